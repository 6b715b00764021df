"""A request that carries output tokens continues after them, with the tokens that it would have had without a break."""

import functools
import itertools
import random
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from engine.making_adapters import write_adapters
from engine.mixed_requests import ADAPTERS, FAMILIES
from engine.tiny import PICTURES, Collected, make_core, request_of, run_all
from model.hugging_face import make_checkpoint

from saccade.engine import Engine, EngineConfig, SamplingParams
from saccade.engine.core.grammar_requests import GrammarRequests
from saccade.engine.core.loop import EngineCore
from saccade.engine.core.messages import AddAdapter, AddRequest
from saccade.engine.core.step_budget import StepBudget
from saccade.engine.device.sampler import Sampler
from saccade.engine.load_core import load_grammars
from saccade.engine.prompt import TokenPrompt
from saccade.engine.request import Request, TokenLogprobs
from saccade.processor import Processor

MAX_LENGTH = 192
TOLERANCE = 1e-5
"""Maximum difference of log-probabilities: steps of other shapes round differently."""
IMAGES = [{"type": "image", "image": picture} for picture in PICTURES[:2]]
CONVERSATIONS = [
    [{"role": "user", "content": "what is this"}],
    [{"role": "user", "content": [*IMAGES, {"type": "text", "text": "how many"}]}],
]
SCHEMA = {
    "type": "object",
    "properties": {"count": {"type": "integer", "minimum": 0, "maximum": 99}, "colour": {"enum": ["red", "green"]}},
    "required": ["count", "colour"],
    "additionalProperties": False,
}
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.0, "top_p": 0.9, "seed": 5},
    "sampled with top_k and min_p": {"temperature": 1.3, "top_k": 20, "min_p": 0.02, "seed": 6, "logprobs": 0},
    "penalties": {"logit_bias": "letters", "temperature": 0.9, "seed": 7, "repetition_penalty": 0.9}
    | {"frequency_penalty": 0.5, "presence_penalty": -0.7},
    "greedy with penalties": {"presence_penalty": 2.0, "repetition_penalty": 1.5, "logprobs": 2},
    "log-probabilities": {"logprobs": 3, "prompt_logprobs": 2},
    "a schema": {"structured": {"json_schema": SCHEMA}, "max_tokens": 60, "logprobs": 1},
    "a sampled schema": {"structured": {"json_schema": SCHEMA}, "max_tokens": 60, "temperature": 1.5, "seed": 8},
    "a regular expression": {"structured": {"regex": "(ab|cd){2,6}-[0-9]{3}"}, "temperature": 1.0, "seed": 9},
    "repetitions": {"logit_bias": "letters"},
    "stop tokens": {"logit_bias": "letters", "temperature": 1.0, "seed": 10, "min_tokens": 7, "stop_token_ids": "b"},
    "an adapter": {"temperature": 0.8, "seed": 11},
    "up to the maximum length": {"max_tokens": MAX_LENGTH},
}
COMMON: dict[str, Any] = {"max_length": MAX_LENGTH, "max_adapters": len(ADAPTERS)}
ALONE = EngineConfig(
    num_pages=16, max_requests=1, max_draft_tokens=0, prefix_cache=False, encoder_cache=False, **COMMON
)
CONFIGS = {
    name: EngineConfig(**fields, **COMMON)
    for name, fields in {
        "pages of one token": {"page_size": 1, "num_pages": 300, "max_requests": 6, "max_step_tokens": 24},
        "drafts": {"page_size": 4, "num_pages": 300, "max_requests": 8, "max_draft_tokens": 3, "prefix_cache": False},
        "drafts and cached prefixes": {"num_pages": 100, "max_draft_tokens": 5, "target_step_ms": 1.0},
    }.items()
}


class Asked(NamedTuple):
    """A request, its prompt and its whole output."""

    request: Request
    prompt: TokenPrompt
    whole: Collected


class Checkpoint:
    """A tiny checkpoint, its adapters, and requests with their outputs in an engine that runs them one by one."""

    def __init__(self, family: str, folder: Path) -> None:
        self.folder = make_checkpoint(folder / "checkpoint", FAMILIES[family])
        self.adapters = write_adapters(self.folder, folder / "adapters", merges=False, **ADAPTERS)
        self.processor = Processor.load(self.folder)
        requests = self._requests()
        core = self.core(ALONE)
        whole = run_all(core, requests)
        core.close()
        self.asked = [Asked(*pair, output) for pair, output in zip(requests, whole, strict=True)]

    def core(self, config: EngineConfig) -> EngineCore:
        """A core with the adapters."""
        core = make_core(self.folder, config, grammars=load_grammars(self.folder, self.processor))
        for name, folder in self.adapters.items():
            assert core.handle(AddAdapter(name=name, folder=str(folder), reply_id=name)) == []
            [reply] = core.handle(core.inbox.get(timeout=60))
            assert reply.failure is None
        return core

    def _requests(self) -> list[tuple[Request, TokenPrompt]]:
        a, b, c = (self.processor.tokenizer.encode_text(letter)[0] for letter in "abc")
        values = {"letters": {a: 20.0, b: 20.0, c: 20.0}, "b": (b,)}
        with Engine.load(self.folder, device="cpu", config=EngineConfig(num_workers=0, max_length=64)) as engine:
            prompts = [engine.preprocess(messages).result() for messages in CONVERSATIONS]
        requests = []
        for number, prompt in enumerate(prompts):
            for name, fields in SAMPLING.items():
                found = {
                    key: values[value] if key in ("logit_bias", "stop_token_ids") else value
                    for key, value in fields.items()
                }
                sampling = SamplingParams(**{"max_tokens": 24, **found})
                stop_ids = frozenset(sampling.stop_token_ids)
                if sampling.structured is not None:
                    stop_ids |= self.processor.eos_ids
                request = request_of(
                    f"{name} {number}", prompt, sampling, stop_ids=stop_ids,
                    adapter="everything" if name == "an adapter" else None, stream_interval=1 + 3 * number,
                    salt=b"tenant" * number, priority=number,
                )  # fmt: skip
                requests.append((request, prompt))
        return requests


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """The checkpoint of a family."""
    return functools.cache(lambda family: Checkpoint(family, tmp_path_factory.mktemp(family)))


@pytest.fixture
def checkpoint(checkpoints):
    """A checkpoint of one family, for what does not depend on the model."""
    return checkpoints("qwen2_5_vl")


def splits(rng: random.Random, num_prompt: int, num_output: int, page_size: int) -> set[int]:
    """Numbers of known tokens: none, one, all, all but one, around the end of a page, and others."""
    at_page_end = (-num_prompt) % page_size + page_size * rng.randint(0, 1)
    found = {
        0,
        1,
        num_output - 1,
        num_output,
        at_page_end - 1,
        at_page_end,
        at_page_end + 1,
        rng.randint(0, num_output),
    }
    return {one for one in found if 0 <= one <= num_output}


def continued(asked: Asked, num_known: int) -> Request:
    """The request after so many of its tokens."""
    output_ids = tuple(asked.whole.token_ids[:num_known])
    return replace(asked.request, id=f"{asked.request.id} after {num_known}", output_ids=output_ids)


def differences(asked: Asked, num_known: int, rest: Collected) -> list[str]:
    """How a continued request differs from the rest of the whole output."""
    whole, found = asked.whole, []
    expected = {
        "token_ids": whole.token_ids[num_known:],
        "finish_reason": whole.last.finish_reason,
        "failure": None,
    }
    actual = {"token_ids": rest.token_ids, "finish_reason": rest.last.finish_reason, "failure": rest.last.failure}
    if expected != actual:
        found.append(f"{asked.request.id} after {num_known}: {actual} instead of {expected}")
    elif not are_close(rest.logprobs, whole.logprobs[num_known:]):
        found.append(f"{asked.request.id} after {num_known}: log-probabilities")
    if not are_close(rest.prompt_logprobs, [] if num_known else whole.prompt_logprobs):
        found.append(f"{asked.request.id} after {num_known}: log-probabilities of the prompt")
    if rest.last.num_cached_tokens > asked.request.num_prompt_tokens:
        found.append(f"{asked.request.id} after {num_known}: {rest.last.num_cached_tokens} cached tokens of the prompt")
    return found


def are_close(ours: list[TokenLogprobs], theirs: list[TokenLogprobs]) -> bool:
    """Whether two lists have close log-probabilities of the same tokens. Most likely tokens may swap ranks."""
    return [one.token_id for one in ours] == [one.token_id for one in theirs] and all(
        abs(one.logprob - other.logprob) < TOLERANCE
        and [value for _, value in one.top] == pytest.approx([value for _, value in other.top], abs=TOLERANCE)
        for one, other in zip(ours, theirs, strict=True)
    )


def compare(checkpoint: Checkpoint, config: EngineConfig, asked: list[Asked]) -> list[str]:
    """Continue requests after several numbers of tokens, all in one engine; returns the differences."""
    rng = random.Random(config.page_size)
    cases = [
        (one, num_known)
        for one in asked
        for num_known in sorted(splits(rng, one.request.num_prompt_tokens, len(one.whole.token_ids), config.page_size))
    ]
    rng.shuffle(cases)
    core = checkpoint.core(config)
    try:
        rests = run_all(core, [(continued(one, num_known), one.prompt) for one, num_known in cases], at_once=3)
        if config.max_draft_tokens:
            assert core.statistics.num_accepted_draft_tokens > 0
        if config.page_size == 1:
            assert core.statistics.num_preemptions > 0
    finally:
        core.close()
    return [
        found
        for (one, num_known), rest in zip(cases, rests, strict=True)
        for found in differences(one, num_known, rest)
    ]


ALWAYS = {
    ("qwen2_5_vl", "pages of one token"), ("qwen2_5_vl", "drafts and cached prefixes"),
}  # fmt: skip
"""The other pairs are slow."""


@pytest.mark.parametrize(
    ("family", "name"),
    [
        pytest.param(*pair, marks=[pytest.mark.slow] * (pair not in ALWAYS))
        for pair in itertools.product(FAMILIES, CONFIGS)
    ],
)
def test_a_continued_request_gets_the_rest_of_its_undisturbed_output(checkpoints, family, name, monkeypatch):
    checkpoint = checkpoints(family)
    monkeypatch.setattr(StepBudget, "token_cost", lambda *_: 0.25)  # drafts always pay
    assert {one.whole.last.finish_reason for one in checkpoint.asked} == {"stop", "length"}
    assert compare(checkpoint, CONFIGS[name], checkpoint.asked) == []


def grammar_is_not_advanced(monkeypatch):
    take_compiled = GrammarRequests.take_compiled

    def take_at_the_start(self, request_id):
        message, compiled = self.compiling[request_id]
        start = replace(message, request=replace(message.request, output_ids=()))
        self.compiling[request_id] = start, compiled
        _, failure = take_compiled(self, request_id)
        return message, failure

    monkeypatch.setattr(GrammarRequests, "take_compiled", take_at_the_start)


def randomness_begins_at_the_first_new_token(monkeypatch):
    set_request, sample, num_known = Sampler.set_request, Sampler.sample, {}

    def set_and_count(self, slot, request, output_token_ids=()):
        num_known[slot] = len(request.output_ids)
        set_request(self, slot, request, output_token_ids)

    def sample_from_zero(self, logits, slots, positions, *args):
        return sample(self, logits, slots, positions - [num_known[slot] for slot in slots.tolist()], *args)

    monkeypatch.setattr(Sampler, "set_request", set_and_count)
    monkeypatch.setattr(Sampler, "sample", sample_from_zero)


def penalties_take_known_output_for_the_prompt(monkeypatch):
    reset_counts = Sampler._reset_counts

    def count_as_prompt(self, slot, request, output_token_ids):
        reset_counts(self, slot, replace(request, token_ids=[*request.token_ids, *output_token_ids]), ())

    monkeypatch.setattr(Sampler, "_reset_counts", count_as_prompt)


PLANTED = {
    grammar_is_not_advanced: "a sampled schema",
    randomness_begins_at_the_first_new_token: "sampled",
    penalties_take_known_output_for_the_prompt: "penalties",
}


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_the_comparison_detects_a_planted_bug(checkpoint, plant, monkeypatch):
    asked = [named(checkpoint, PLANTED[plant])]
    assert compare(checkpoint, ALONE, asked) == []
    plant(monkeypatch)
    assert compare(checkpoint, ALONE, asked)


def named(checkpoint: Checkpoint, name: str) -> Asked:
    """The text request with this sampling."""
    [found] = [one for one in checkpoint.asked if one.request.id == f"{name} 0"]
    return found


@pytest.mark.parametrize("name", ["greedy", "stop tokens", "up to the maximum length", "a regular expression"])
def test_a_request_that_known_tokens_end_has_no_new_token_and_needs_no_step(checkpoint, name):
    asked = named(checkpoint, name)
    core = checkpoint.core(CONFIGS["drafts"])
    request = continued(asked, len(asked.whole.token_ids))
    [collected] = run_all(core, [(request, asked.prompt)])
    assert (collected.token_ids, collected.last.finish_reason) == ([], asked.whole.last.finish_reason)
    assert core.statistics.num_steps == 0
    core.close()


def test_pages_of_known_output_are_found_in_the_prefix_cache(checkpoint):
    asked = named(checkpoint, "up to the maximum length")
    core = checkpoint.core(CONFIGS["drafts and cached prefixes"])
    run_all(core, [(asked.request, asked.prompt)])
    num_prompt, num_known = asked.request.num_prompt_tokens, 100
    before = core.statistics.num_prompt_tokens
    [rest] = run_all(core, [(continued(asked, num_known), asked.prompt)])
    assert core.statistics.num_prompt_tokens - before <= 16
    assert rest.last.num_cached_tokens == num_prompt
    assert rest.token_ids == asked.whole.token_ids[num_known:]
    core.close()


def test_the_first_new_token_comes_at_once_then_a_stream_interval(checkpoint):
    asked = named(checkpoint, "greedy")
    core = checkpoint.core(ALONE)
    request = replace(continued(asked, 7), stream_interval=5)
    core.handle(AddRequest(request=request, prompt=asked.prompt))
    outputs = []
    while core.has_work:
        outputs += core.step()
    assert [len(output.token_ids) for output in outputs] == [1, 5, 5, 5, 1]
    core.close()


def test_known_tokens_that_cannot_be_are_refused_alone(checkpoint):
    greedy, stopped, grammar = (named(checkpoint, name) for name in ("greedy", "stop tokens", "a regular expression"))
    stop_id = next(iter(stopped.request.stop_ids))
    wrong = {
        "output_ids has token 320, but the model has tokens 0 to": (greedy, (5, 320)),
        "output_ids has token -1, but the model has tokens 0 to": (grammar, (5, -1)),
        "output_ids has 25 tokens, but the output ends after 24": (greedy, [5] * 25),
        "output_ids has 9 tokens, but the output ends after 8": (stopped, [*[5] * 7, stop_id, 5]),
        "output_ids cannot be continued: structured.regex: the output left": (grammar, [stop_id] * 3),
    }
    requests = [
        (replace(asked.request, id=message, output_ids=tuple(ids)), asked.prompt)
        for message, (asked, ids) in wrong.items()
    ]
    core = checkpoint.core(CONFIGS["drafts"])
    *refused, rest = run_all(core, [*requests, (continued(greedy, 5), greedy.prompt)])
    for (request, _), collected in zip(requests, refused, strict=True):
        assert (collected.last.finish_reason, collected.last.failure.kind) == ("failed", "invalid_request")
        assert collected.last.failure.message.startswith(request.id)
    assert differences(greedy, 5, rest) == []
    assert one_more_grammar_works(core, grammar)
    core.close()


def one_more_grammar_works(core: EngineCore, asked: Asked) -> bool:
    """Whether the grammar of refused requests serves the next one."""
    [whole] = run_all(core, [(asked.request, asked.prompt)])
    return whole.token_ids == asked.whole.token_ids
