"""A request that takes the slot of an ended one gets its own tokens.

This holds even if the last step of the ended request is still waiting for masks.
"""

import pytest
from engine.tiny import make_core, plain, request_of
from model.hugging_face import SHAPES, make_checkpoint

from saccade.engine.config import EngineConfig
from saccade.engine.core import grammar_requests
from saccade.engine.core.messages import AddRequest, EndRequest
from saccade.engine.core.step import Chunk, SlotStart, StepPlan
from saccade.engine.load_core import load_grammars
from saccade.engine.sampling_params import SamplingParams
from saccade.processor import Processor

CONFIG = EngineConfig(
    num_pages=400, page_size=8, max_length=400, max_requests=2, max_step_tokens=256, num_workers=0, max_draft_tokens=0
)
PENALIZED = SamplingParams(
    max_tokens=6, ignore_eos=True, logit_bias={5: 100.0, 6: 99.0, 7: 98.5}, frequency_penalty=2.0
)
"""The most likely tokens alternate, and an additional counted token changes their order."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("slots") / "checkpoint", SHAPES[0])


@pytest.fixture
def core(folder, monkeypatch):
    monkeypatch.setattr(grammar_requests, "_LONG_MASKS", 1e9)  # requests with a grammar are in every step
    core = make_core(folder, CONFIG, grammars=load_grammars(folder, Processor.load(folder)))
    yield core
    core.close()


@pytest.fixture(scope="module")
def prompts(folder):
    """A prompt without images, and one with."""
    found, _ = plain(folder, 1, 25, 12)
    return [next(prompt for prompt in found if bool(prompt.images) == has_images) for has_images in (False, True)]


def add(core, name, prompt, sampling, **fields):
    core.handle(AddRequest(request=request_of(name, prompt, sampling, **fields), prompt=prompt))


def tokens_of(core, name):
    """Run until the request has ended; returns its tokens."""
    tokens = []
    for _ in range(200):
        for output in core.step():
            if output.request_id == name:
                tokens += output.token_ids
                if output.finish_reason is not None:
                    return tokens
    raise AssertionError(f"{name} has not ended")


def decode_with_a_grammar(core, prompt):
    """Two requests decode: one up to its ninth token, which is a stop token, and one with a grammar.

    Steps wait for the masks of the second one.
    """
    stopped = SamplingParams(max_tokens=100, min_tokens=8, logit_bias={5: 100.0, 8: 50.0})
    add(core, "free", prompt, stopped, stop_ids=frozenset([5]))
    add(core, "bound", prompt, SamplingParams(max_tokens=100, structured={"regex": "[ab]{90}"}))
    core.handle(core.inbox.get(timeout=60))
    while core.scheduler.num_decoding < 2:
        core.step()
    core.step()
    assert core._in_flight.handle is None, "the step waits for masks"


@pytest.mark.parametrize("ending", ["cancelled", "stop"])
def test_a_request_with_penalties_counts_no_token_of_the_request_whose_slot_it_takes(core, prompts, ending):
    text, image = prompts
    add(core, "alone", image, PENALIZED)
    alone = tokens_of(core, "alone")
    decode_with_a_grammar(core, text)
    add(core, "late", image, PENALIZED)
    if ending == "cancelled":
        core.handle(EndRequest(request_id="free", reason="cancelled"))
    assert tokens_of(core, "late") == alone
    assert core.statistics.finished[ending] == 1
    assert core.scheduler.find("bound") is not None, "it decodes meanwhile"


def test_a_slot_given_away_before_its_step_is_sampled_is_an_error(core, prompts):
    runner, [text, _] = core._runner, prompts
    for name in ("first", "second"):
        runner.register(request_of(name, text, SamplingParams()), text)
    chunk = Chunk("first", 0, 0, len(text.token_ids), tuple(range(40)), (), False, (), True)
    launched = runner.forward(StepPlan(number=0, chunks=(chunk,), started=(SlotStart("first", 0, ()),)))
    reuse = StepPlan(number=1, started=(SlotStart("second", 0, ()),))
    with pytest.raises(AssertionError, match=r"slots \{0\} are reused before step 0"):
        runner.forward(reuse)
    runner.sample(launched).read()
    runner.forward(reuse)
