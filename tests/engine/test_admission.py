"""The order of requests: by arrival, except that long work is overtaken, within a bound that no arrivals exceed."""

import random

import pytest

from saccade.engine.core.admission import AGEING, MAX_OVERTAKING, SHORT_WORK, WORK_PER_ARRIVAL, position_of, work_of
from saccade.engine.core.encoder_cache import EncoderCache
from saccade.engine.core.pages import PagePool
from saccade.engine.core.scheduler import Limits, Scheduler
from saccade.engine.core.step import ChunkResult, StepResult
from saccade.engine.request import ImageSpan, Request
from saccade.engine.sampling_params import SamplingParams


def ask(name, num_tokens, images=(), priority=0, max_tokens=4):
    """A request whose images have these keys and patches; each takes a token for four patches."""
    spans, start = [], 0
    for key, num_patches in images:
        spans.append(ImageSpan(key=key, start=start, num_tokens=num_patches // 4, num_patches=num_patches))
        start += num_patches // 4
    return Request(
        id=str(name), token_ids=[1] * (start + num_tokens), images=tuple(spans), priority=priority,
        sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
    )  # fmt: skip


def test_an_image_adds_to_the_work_once():
    image = (b"a", 1200)
    assert work_of(ask(0, 100)) == 100
    assert work_of(ask(0, 100, [image])) == 100 + 300 + 400
    assert work_of(ask(0, 100, [image, image])) == 100 + 600 + 400


def test_only_long_requests_are_overtaken():
    requests = [
        ask(0, SHORT_WORK + 2 * WORK_PER_ARRIVAL),
        ask(1, SHORT_WORK),
        ask(2, 20, [(b"a", 3 * (SHORT_WORK + WORK_PER_ARRIVAL))]),
        ask(3, 1),
        ask(4, 1),
    ]
    order = sorted(requests, key=lambda request: position_of(request, int(request.id)))
    assert [request.id for request in order] == ["1", "0", "3", "4", "2"]


@pytest.mark.parametrize("priority", [0, -1, 1])
def test_no_request_is_overtaken_by_more_than_the_bound(priority):
    """Whatever its own work and that of the others, at most the bound, and the ageing of each level of priority."""
    rng = random.Random(0)
    kinds = [ask(0, tokens, priority=level) for tokens in (1, 9_000, 12_000, 30_000) for level in (0, 0, priority)]
    for _ in range(100):
        requests = [rng.choice(kinds) for _ in range(200)]
        place = [position_of(request, number) for number, request in enumerate(requests)]
        number = rng.randrange(80)
        overtaking = [other for other in range(number + 1, 200) if place[other] < place[number]]
        levels = requests[number].priority - min(request.priority for request in requests)
        assert len(overtaking) <= MAX_OVERTAKING + AGEING * levels
        assert place[number][1] == number


@pytest.mark.parametrize("seed", range(2))
def test_a_long_request_starts_although_short_ones_keep_arriving(seed):
    """In a random run in which a short request arrives before every step, no first token comes after the bound."""
    rng = random.Random(seed)
    limits = Limits(max_requests=4, max_step_tokens=512, max_step_chunks=4, max_encoder_patches=256, max_length=30_000,
                    max_draft_tokens=0)  # fmt: skip
    scheduler = Scheduler(limits, PagePool(8192, 16), EncoderCache(1024))
    arrived: dict[str, int] = {}
    first: dict[str, int] = {}
    for number in range(150):
        is_long = rng.random() < 0.03
        request = ask(
            number, rng.randint(9_000, 20_000) if is_long else rng.randint(1, 30), max_tokens=rng.randint(1, 3)
        )
        assert scheduler.add(request) is None
        arrived[request.id] = number
        for _ in range(2):
            plan = scheduler.plan(480)
            if plan is None:
                continue
            results = tuple(ChunkResult(chunk.request_id, (7,) if chunk.samples else ()) for chunk in plan.chunks)
            for output in scheduler.update(
                plan, StepResult(number=plan.number, chunks=results, images=(), duration_s=0)
            ):
                first.setdefault(output.request_id, len(arrived))
        scheduler.check()
    overtakers = {
        name: sum(arrived[other] > at and first[other] < first[name] for other in first)
        for name, at in arrived.items()
        if name in first
    }
    assert max(overtakers.values()) <= MAX_OVERTAKING + limits.max_requests
    waiting = [at for name, at in arrived.items() if name not in first]
    assert not waiting or min(waiting) > 75


def test_a_prompt_that_is_being_computed_leaves_half_of_each_step_to_waiting_requests_of_less_work():
    limits = Limits(max_requests=4, max_step_tokens=64, max_step_chunks=4, max_encoder_patches=256, max_length=30_000)
    scheduler = Scheduler(limits, PagePool(2048, 16), EncoderCache(1024))
    assert scheduler.add(ask("long", 20_000)) is None
    first = scheduler.plan(48)
    assert [chunk.num_tokens for chunk in first.chunks] == [48]
    assert scheduler.add(ask("short", 30)) is None
    counts = [{chunk.request_id: chunk.num_tokens for chunk in scheduler.plan(48).chunks} for _ in range(2)]
    assert counts == [{"long": 24, "short": 24}, {"long": 42, "short": 6}]


def test_a_running_prompt_continues_while_no_earlier_request_can_start():
    limits = Limits(max_requests=4, max_step_tokens=64, max_step_chunks=4, max_encoder_patches=256, max_length=30_000)
    scheduler = Scheduler(limits, PagePool(640, 16), EncoderCache(1024))
    assert scheduler.add(ask("long", 10_000)) is None
    scheduler.plan(48)
    assert scheduler.add(ask("short", 300)) is None  # its pages are reserved for the long prompt
    assert [{chunk.request_id: chunk.num_tokens for chunk in scheduler.plan(48).chunks}] == [{"long": 24}]
