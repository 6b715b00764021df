"""Prompt lookup drafts repeated text, no random text and no image tokens, and does not change the output."""

import dataclasses
import random
import statistics
import time
from dataclasses import dataclass

import numpy as np
import pytest
from engine.tiny import make_core, request_of, run_all
from model.hugging_face import SHAPES, make_checkpoint

from saccade.engine.config import EngineConfig
from saccade.engine.core.prompt_lookup import PromptLookup, min_rate
from saccade.engine.core.request_state import RequestState
from saccade.engine.core.step import MAX_DRAFTING, Chunk
from saccade.engine.core.step_budget import StepBudget
from saccade.engine.device.step_inputs import InputBuilder, RequestInputs, StepSize, split
from saccade.engine.prompt import TokenPrompt
from saccade.engine.request import ImageSpan, Request
from saccade.engine.sampling_params import SamplingParams
from saccade.processor.positions import TextSpan, mrope_positions

IMAGE = 999


def make_state(token_ids, *, images=(), **fields):
    spans = tuple(ImageSpan(key=b"", start=start, num_tokens=num, num_patches=4 * num) for start, num in images)
    return RequestState(Request(id="r", token_ids=tuple(token_ids), images=spans, **fields), 0, 10**9)


def drafts_of(state, num_tokens, lookup=None):
    """Drafts for a request that drafts."""
    lookup = lookup or PromptLookup()
    lookup.observe(state, 1, 0)
    lookup._histories["r"].is_drafting = True
    return list(lookup.propose(state, num_tokens))


@dataclass
class Run:
    """Counts of one generated output."""

    num_steps: int = 0
    num_drafted: int = 0
    num_accepted: int = 0


def write(lookup, state, output, num_drafts=4):
    """Simulate a model that generates `output`: each step accepts correct drafts and samples one more token."""
    run, start = Run(), len(state.token_ids)
    while (done := len(state.token_ids) - start) < len(output):
        drafts = lookup.propose(state, num_drafts)
        assert len(drafts) <= num_drafts
        assert not drafts or lookup.is_drafting(state)
        expected = output[done : done + len(drafts)]
        right = next(
            (n for n, pair in enumerate(zip(drafts, expected, strict=False)) if pair[0] != pair[1]), len(expected)
        )
        new = output[done : done + right + 1]
        state.token_ids += new
        lookup.observe(state, len(new), len(drafts))
        run = Run(run.num_steps + 1, run.num_drafted + len(drafts), run.num_accepted + right)
    return run


# ---- which tokens are drafted


def test_tokens_that_followed_the_last_ngram_before_are_drafted():
    assert drafts_of(make_state([1, 2, 3, 4, 5, 6, 2, 3]), 3) == [4, 5, 6]


def test_a_longer_match_beats_a_later_one():
    state = make_state([1, 2, 3, 7, 9, 2, 3, 8, 1, 2, 3])
    assert drafts_of(state, 1) == [7]
    assert drafts_of(state, 1, PromptLookup(max_ngram=2)) == [8]


def test_of_equal_matches_the_latest_wins():
    assert drafts_of(make_state([2, 3, 7, 2, 3, 8, 2, 3]), 2) == [8, 2]


def test_a_loop_is_continued():
    assert drafts_of(make_state([5, 1, 2, 1, 2]), 5) == [1, 2, 1, 2, 1]


def test_without_a_match_nothing_is_drafted():
    assert drafts_of(make_state([1, 2, 3, 4, 5]), 4) == []
    assert drafts_of(make_state([1]), 4) == []
    assert drafts_of(make_state([1, 2, 3, 1, 2]), 0) == []


def test_nothing_is_drafted_after_a_stop_token():
    assert drafts_of(make_state([1, 2, 3, 0, 4, 1, 2], stop_ids=frozenset([0])), 4) == [3, 0]


def test_image_tokens_are_neither_drafted_nor_matched():
    before_an_image = [1, 2, 3, *[IMAGE] * 4, 5, 1, 2]
    assert drafts_of(make_state(before_an_image, images=[(3, 4)]), 4) == [3]
    across_an_image = [7, *[IMAGE] * 3, 8, 9, 6, 7, *[IMAGE] * 3]
    assert drafts_of(make_state(across_an_image, images=[(1, 3), (8, 3)]), 4) == []


def test_image_tokens_are_never_drafted_in_random_conversations():
    rng = random.Random(3)
    num_drafts = 0
    for _ in range(200):
        token_ids, images = [], []
        for _ in range(rng.randint(1, 4)):
            token_ids += rng.choices(range(4), k=rng.randint(0, 12))
            images.append((len(token_ids), rng.randint(1, 6)))
            token_ids += [IMAGE] * images[-1][1]
        token_ids += rng.choices(range(4), k=rng.randint(1, 12))
        state, lookup = make_state(token_ids, images=images), PromptLookup(min_ngram=1)
        for _ in range(10):
            drafts = drafts_of(state, 6, lookup)
            assert IMAGE not in drafts
            num_drafts += len(drafts)
            state.token_ids.append(rng.randrange(4))
    assert num_drafts > 1000


def drafts_reference(token_ids, num_tokens):
    """Reference drafts, by searching the whole text each time."""
    for length in (3, 2):
        for index in range(len(token_ids) - 1, length - 1, -1):
            if token_ids[index - length : index] == token_ids[-length:]:
                known = list(token_ids)
                for number in range(index, index + num_tokens):
                    known.append(known[number])
                return known[len(token_ids) :]
    return []


def test_drafts_from_the_table_equal_a_search_through_the_whole_text():
    rng, lookup = random.Random(1), PromptLookup()
    state = make_state(rng.choices(range(5), k=20))
    for _ in range(300):
        assert drafts_of(state, 4, lookup) == drafts_reference(state.token_ids, 4)
        state.token_ids += rng.choices(range(5), k=rng.randint(1, 3))


# ---- when a request drafts


def test_a_request_drafts_only_once_its_tokens_were_predicted():
    lookup, state = PromptLookup(), make_state([*range(50), 7, 8])
    assert not lookup.is_drafting(state)
    assert lookup.propose(state, 4) == ()
    num_predicted = 0
    while not lookup.is_drafting(state):
        state.token_ids.append(state.token_ids[-1] + 1)
        lookup.observe(state, 1, 0)
        num_predicted += 1
    assert 5 <= num_predicted <= 9
    assert list(lookup.propose(state, 3)) == [state.token_ids[-1] + n for n in (1, 2, 3)]


def test_copying_the_prompt_takes_a_fraction_of_the_steps():
    rng = random.Random(0)
    prompt = rng.choices(range(50_000), k=300)
    run = write(PromptLookup(), make_state(prompt), prompt[100:300])
    assert run.num_accepted >= 0.9 * run.num_drafted
    assert run.num_steps < 60


@pytest.mark.parametrize(("num_tokens", "most"), [(8, 40), (50, 0), (50_000, 0)])
def test_random_text_gets_no_drafts(num_tokens, most):
    """With eight tokens every n-gram occurred before; the next token is random, and right once in eight times."""
    rng = random.Random(0)
    state = make_state(rng.choices(range(num_tokens), k=200))
    run = write(PromptLookup(), state, rng.choices(range(num_tokens), k=4000))
    assert run.num_drafted <= most


def test_drafting_starts_when_text_starts_to_repeat_and_stops_when_it_ends():
    rng, lookup = random.Random(0), PromptLookup()
    state = make_state(rng.choices(range(8), k=200))
    assert write(lookup, state, rng.choices(range(8), k=300)).num_drafted == 0
    loop = rng.choices(range(50_000), k=20)
    run = write(lookup, state, loop * 30)
    assert run.num_accepted > 0.7 * 600
    again = write(lookup, state, loop * 10)
    assert again.num_steps < 0.3 * 200
    after = write(lookup, state, rng.choices(range(8), k=300))
    assert after.num_drafted < 80
    assert not lookup.is_drafting(state)


def test_a_request_with_penalties_or_a_grammar_gets_no_drafts():
    for sampling in (SamplingParams(presence_penalty=0.5), SamplingParams(structured={"regex": "(ab)*"})):
        lookup, state = PromptLookup(), make_state([1, 2] * 10, sampling=sampling)
        assert write(lookup, state, [1, 2] * 40).num_drafted == 0
        assert not lookup._histories


def test_no_request_drafts_after_a_pause_until_its_next_token():
    lookup, state = PromptLookup(), make_state([1, 2] * 10)
    write(lookup, state, [1, 2] * 40)
    assert lookup.is_drafting(state)
    lookup.pause()
    assert not lookup.is_drafting(state)
    assert lookup.propose(state, 4) == ()
    write(lookup, state, [1, 2])
    assert lookup.is_drafting(state)


def test_a_forgotten_request_leaks_nothing():
    lookup, state = PromptLookup(), make_state([1, 2, 3, 1, 2])
    lookup.observe(state, 1, 0)
    assert lookup._histories
    lookup.forget("r")
    lookup.forget("r")
    assert not lookup._histories
    assert not lookup.is_drafting(state)


def step_s(num_prompt_tokens):
    """CPU time of a step, without the first step of a request, which reads the end of the prompt."""
    rng, lookup, times = random.Random(0), PromptLookup(), []
    state = make_state(rng.choices(range(150_000), k=num_prompt_tokens))
    for _ in range(200):
        start = time.process_time()
        lookup.observe(state, 1, 0)
        lookup.propose(state, 4)
        times.append(time.process_time() - start)
        state.token_ids.append(rng.randrange(150_000))
    assert len(lookup._histories["r"].last) <= 2 * (32768 + 200)
    return statistics.median(times[1:])


def test_a_step_takes_the_same_time_however_long_the_prompt():
    assert step_s(100_000) < 5 * step_s(1_000) + 1e-4


# ---- in the engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("drafts") / "checkpoint", SHAPES[0])


CONFIG = EngineConfig(num_pages=400, page_size=8, max_length=300, max_requests=8, max_step_tokens=256)


def generate(folder, prompts, sampling, **changes):
    core = make_core(folder, dataclasses.replace(CONFIG, **changes))
    requests = [(request_of(f"r{number}", prompt, sampling), prompt) for number, prompt in enumerate(prompts)]
    outputs = [collected.token_ids for collected in run_all(core, requests)]
    return core.statistics, outputs


def text_prompt(token_ids):
    return TokenPrompt(token_ids=token_ids, positions=mrope_positions([TextSpan(len(token_ids))]))


def random_prompt(rng, length=30):
    return text_prompt(rng.choices(range(5, 250), k=length))


@pytest.fixture
def cheap_drafts(monkeypatch):
    """A draft always costs a quarter of a token; measured times are ignored."""
    monkeypatch.setattr(StepBudget, "token_cost", lambda *_: 0.25)


REPEATS = {"logit_bias": {7: 100.0}}
"""The output repeats one token."""


@pytest.mark.parametrize("num_requests", [1, MAX_DRAFTING])
@pytest.mark.usefixtures("cheap_drafts")
def test_drafts_of_repeating_text_save_steps_and_change_no_token(folder, num_requests):
    rng = random.Random(1)
    prompts = [random_prompt(rng) for _ in range(num_requests)]
    sampling = SamplingParams(max_tokens=160, ignore_eos=True, **REPEATS)
    plain, expected = generate(folder, prompts, sampling, max_draft_tokens=0)
    drafted, found = generate(folder, prompts, sampling, max_draft_tokens=7)
    assert found == expected
    assert drafted.num_accepted_draft_tokens == drafted.num_draft_tokens > 0.7 * 160 * num_requests
    assert drafted.num_steps < 0.4 * plain.num_steps


def test_a_cpu_drafts_by_default_where_it_pays(folder, monkeypatch):
    rng = random.Random(3)
    sampling = SamplingParams(max_tokens=60, ignore_eos=True, **REPEATS)
    prompts = [random_prompt(rng) for _ in range(3)]
    _, expected = generate(folder, prompts, sampling, max_draft_tokens=0)
    for cost, drafts in ((0.1, True), (0.5, True), (0.95, False), (1.0, False)):
        monkeypatch.setattr(StepBudget, "token_cost", lambda *_, cost=cost: cost)
        statistics, found = generate(folder, prompts, sampling)
        assert found == expected
        assert (statistics.num_draft_tokens > 0) == drafts


def test_the_rate_from_which_drafts_pay_rises_with_their_cost():
    for num_drafts in (1, 4, 16):
        rates = [min_rate(cost, num_drafts) for cost in (0.0, 0.1, 0.5, 0.9)]
        assert rates == sorted(rates)
        for cost, rate in zip((0.1, 0.5, 0.9), rates[1:], strict=True):
            saved = [sum(r**n for n in range(1, num_drafts + 1)) for r in (rate - 0.02, rate)]
            assert saved[0] < cost * num_drafts <= saved[1]
        assert min_rate(1.0, num_drafts) is None


def test_random_text_is_never_drafted(folder):
    """High temperature makes every token random."""
    rng = random.Random(2)
    prompts = [random_prompt(rng) for _ in range(4)]
    sampling = SamplingParams(max_tokens=150, temperature=50.0, seed=3, ignore_eos=True)
    plain, expected = generate(folder, prompts, sampling, max_draft_tokens=0)
    drafted, found = generate(folder, prompts, sampling, max_draft_tokens=7)
    assert found == expected
    assert (drafted.num_draft_tokens, drafted.num_steps) == (0, plain.num_steps)


@pytest.mark.parametrize(
    ("temperature", "changes"),
    [
        (0.0, {}),
        (1.0, {"num_pages": 40}),
        (1.0, {"page_size": 1, "num_pages": 1000, "max_step_tokens": 9}),
        pytest.param(0.0, {"num_pages": 40}, marks=pytest.mark.slow),
        pytest.param(0.0, {"page_size": 1, "num_pages": 1000, "max_step_tokens": 9}, marks=pytest.mark.slow),
        pytest.param(1.0, {}, marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.usefixtures("cheap_drafts")
def test_drafts_change_no_token_at_any_temperature(folder, temperature, changes):
    """The distribution is narrow but repeats; with few pages, requests are preempted while they draft."""
    rng = random.Random(4)
    prompts = [random_prompt(rng) for _ in range(6)]
    loop = dict.fromkeys(rng.sample(range(5, 250), 3), 60.0)
    sampling = SamplingParams(max_tokens=70, temperature=temperature, top_k=2, seed=5, ignore_eos=True, logit_bias=loop)
    _, expected = generate(folder, prompts, sampling, max_draft_tokens=0)
    drafted, found = generate(folder, prompts, sampling, max_draft_tokens=5, **changes)
    assert found == expected
    assert drafted.num_draft_tokens > 0
    assert "num_pages" not in changes or changes["num_pages"] > 40 or drafted.num_preemptions > 0


@pytest.mark.parametrize("reads_last_token", [True, False])
def test_drafts_follow_the_first_token_of_their_chunk(reads_last_token):
    """The host knows the first token when a request resumes with one token to compute."""
    prompt = text_prompt(list(range(100, 106)))
    inputs = RequestInputs(Request(id="r", token_ids=prompt.token_ids), prompt)
    builder = InputBuilder(max_requests=2, page_size=4, max_pages=16, num_kv_slots=64, num_features=64)
    builder.start_slot(1, inputs)
    start = 6 if reads_last_token else 5
    chunk = Chunk("r", 1, start, 4, (3, 5, 7), (), reads_last_token, (21, 22, 23), True)
    builder.append_pages([chunk])
    size = StepSize(num_tokens=4, num_decode=0, num_chunks=1, num_samples=4)
    out = split(np.zeros(size.total, np.int32), size)
    builder.fill(out, 0, [], [chunk], {"r": inputs})
    assert out.token_ids.tolist() == [0 if reads_last_token else 105, 21, 22, 23]
    assert out.last_token_slots.tolist() == [1 if reads_last_token else 2, 2, 2, 2]
    assert out.positions[0].tolist() == list(range(start, start + 4))
    assert out.slot_mapping.tolist() == [[12, 20, 28][i // 4] + i % 4 for i in range(start, start + 4)]
    assert out.sampled.tolist() == [0, 1, 2, 3]
