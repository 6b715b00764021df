"""Prompt-lookup drafts: right where text repeats, none where it does not, never image tokens."""

import itertools
import random
import time
from dataclasses import dataclass

import pytest

from saccade.engine.prompt_lookup import PromptLookup
from saccade.engine.request import ImageSpan, Request, SamplingParams

IMAGE = 999


def make_request(token_ids, *, num_prompt_tokens=None, images=(), **fields):
    num_prompt_tokens = len(token_ids) if num_prompt_tokens is None else num_prompt_tokens
    spans = tuple(ImageSpan(key=b"", start=start, num_tokens=num, num_patches=4 * num) for start, num in images)
    return Request(
        id="r", token_ids=list(token_ids), num_prompt_tokens=num_prompt_tokens, images=spans, **fields
    )  # fmt: skip


@dataclass
class Run:
    """Cost of generating an output."""

    num_steps: int = 0
    num_drafted: int = 0
    num_accepted: int = 0


def write(lookup, request, output, num_drafts=4):
    """A model that generates `output`: drafts are accepted as far as they are right, and one more token is sampled."""
    run, start = Run(), len(request.token_ids)
    while (done := len(request.token_ids) - start) < len(output):
        drafts = lookup.propose(request, num_drafts)
        assert len(drafts) <= num_drafts
        expected = output[done : done + len(drafts)]
        right = next(
            (n for n, pair in enumerate(zip(drafts, expected, strict=False)) if pair[0] != pair[1]), len(expected)
        )
        request.token_ids += output[done : done + right + 1]
        lookup.observe(request, len(drafts), right)
        run = Run(run.num_steps + 1, run.num_drafted + len(drafts), run.num_accepted + right)
    return run


def test_tokens_that_followed_the_last_ngram_before_are_drafted():
    request = make_request([1, 2, 3, 4, 5, 6, 2, 3])
    assert list(PromptLookup().propose(request, 3)) == [4, 5, 6]


def test_a_longer_match_beats_a_later_one():
    request = make_request([1, 2, 3, 7, 9, 2, 3, 8, 1, 2, 3])
    assert list(PromptLookup().propose(request, 1)) == [7]
    assert list(PromptLookup(max_ngram=2).propose(request, 1)) == [8]


def test_of_equal_matches_the_latest_wins():
    request = make_request([2, 3, 7, 2, 3, 8, 2, 3])
    assert list(PromptLookup().propose(request, 2)) == [8, 2]


def test_a_loop_is_continued():
    request = make_request([5, 1, 2, 1, 2])
    assert list(PromptLookup().propose(request, 5)) == [1, 2, 1, 2, 1]


def test_without_a_match_nothing_is_drafted():
    assert list(PromptLookup().propose(make_request([1, 2, 3, 4, 5]), 4)) == []
    assert list(PromptLookup().propose(make_request([1]), 4)) == []
    assert list(PromptLookup().propose(make_request([1, 2, 3, 1, 2]), 0)) == []


def test_nothing_is_drafted_after_a_stop_token():
    request = make_request([1, 2, 3, 0, 4, 1, 2], stop_ids=frozenset([0]))
    assert list(PromptLookup().propose(request, 4)) == [3, 0]


def test_a_request_with_penalties_gets_no_drafts():
    request = make_request([1, 2, 3, 1, 2], sampling=SamplingParams(presence_penalty=0.5))
    assert list(PromptLookup().propose(request, 4)) == []


def test_image_tokens_are_neither_drafted_nor_matched():
    lookup = PromptLookup()
    before_an_image = [1, 2, 3, *[IMAGE] * 4, 5, 1, 2]
    assert list(lookup.propose(make_request(before_an_image, images=[(3, 4)]), 4)) == [3]
    lookup = PromptLookup()
    across_an_image = [7, *[IMAGE] * 3, 8, 9, 6, 7, *[IMAGE] * 3]
    assert list(lookup.propose(make_request(across_an_image, images=[(1, 3), (8, 3)]), 4)) == []


def test_image_tokens_are_never_drafted_in_random_conversations():
    rng = random.Random(3)
    for _ in range(200):
        token_ids, images = [], []
        for _ in range(rng.randint(1, 4)):
            token_ids += rng.choices(range(4), k=rng.randint(0, 12))
            images.append((len(token_ids), rng.randint(1, 6)))
            token_ids += [IMAGE] * images[-1][1]
        token_ids += rng.choices(range(4), k=rng.randint(1, 12))
        request, lookup = make_request(token_ids, images=images), PromptLookup(min_ngram=1)
        for _ in range(10):
            drafts = lookup.propose(request, 6)
            assert IMAGE not in drafts
            request.token_ids.append(rng.randrange(4))


def drafts_reference(token_ids, num_tokens):
    """The same by searching the whole text each time."""
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
    request = make_request(rng.choices(range(5), k=20))
    for _ in range(300):
        assert list(lookup.propose(request, 4)) == drafts_reference(request.token_ids, 4)
        request.token_ids += rng.choices(range(5), k=rng.randint(1, 3))


def test_copying_the_prompt_takes_a_fraction_of_the_steps():
    rng = random.Random(0)
    prompt = rng.choices(range(50_000), k=300)
    run = write(PromptLookup(), make_request(prompt), prompt[100:300])
    assert run.num_accepted >= 0.9 * run.num_drafted
    assert run.num_steps < 50


def test_random_text_soon_gets_few_drafts():
    """Eight different tokens: every n-gram occurred before, and what follows is random."""
    rng = random.Random(0)
    run = write(PromptLookup(), make_request(rng.choices(range(8), k=200)), rng.choices(range(8), k=4000))
    assert run.num_drafted - run.num_accepted < 0.04 * 4000
    assert run.num_drafted > 0


def test_drafting_resumes_when_text_starts_to_repeat():
    rng, lookup = random.Random(0), PromptLookup()
    request = make_request(rng.choices(range(8), k=200))
    write(lookup, request, rng.choices(range(8), k=300))
    loop = rng.choices(range(50_000), k=20)
    run = write(lookup, request, loop * 30)
    assert run.num_accepted > 0.3 * 600
    again = write(lookup, request, loop * 10)
    assert again.num_steps < 0.3 * 200


def test_pauses_grow_while_no_trial_succeeds():
    rng, lookup, trials = random.Random(0), PromptLookup(), []
    request = make_request([1, 2] * 50)
    for _ in range(3000):
        drafts = lookup.propose(request, 4)
        lookup.observe(request, len(drafts), 0)
        if drafts:
            trials.append(len(request.token_ids))
        request.token_ids.append(rng.choice([1, 2]))
    pauses = [after - before for before, after in itertools.pairwise(trials) if after - before > 8]
    assert [pause // 32 for pause in pauses] == [1, 2, 4, 8, 16, 32]


def test_a_forgotten_request_leaks_nothing():
    lookup, request = PromptLookup(), make_request([1, 2, 3, 1, 2])
    lookup.propose(request, 2)
    lookup.forget(request)
    lookup.observe(request, 2, 0)
    lookup.forget(request)
    assert not lookup._histories


@pytest.mark.parametrize("num_prompt_tokens", [1_000, 100_000])
def test_a_proposal_takes_little_time_however_long_the_prompt(num_prompt_tokens):
    rng, lookup, slowest = random.Random(0), PromptLookup(), 0.0
    request = make_request(rng.choices(range(150_000), k=num_prompt_tokens))
    for _ in range(200):
        start = time.process_time()
        lookup.propose(request, 4)
        slowest = max(slowest, time.process_time() - start)
        request.token_ids.append(rng.randrange(150_000))
    assert slowest < 0.1
    assert len(lookup._histories["r"].last) <= 2 * (32768 + 200)
