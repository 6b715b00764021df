"""The scheduler's guarantees one by one. The random traces check that all of them hold together."""

from collections import Counter

import pytest

from saccade.engine.encoder_cache import ENCODER_SLOT_TOKENS, EncoderCache, salted
from saccade.engine.pages import PagePool
from saccade.engine.request import Failure, ImageSpan, Request, SamplingParams
from saccade.engine.request_state import AGEING
from saccade.engine.scheduler import Scheduler
from saccade.engine.step_plan import Limits
from saccade.errors import ImageError, RequestError

STOP, WORD = 0, 9
FAILURE = Failure("encoding", "it cannot be decoded")


def make(
    *,
    num_pages=100,
    page_size=4,
    encoder_slots=4,
    keeps_prefixes=True,
    keeps_images=True,
    draft=None,
    quarantine=(),
    **limits,
):
    defaults = {"max_requests": 8, "max_step_tokens": 64, "max_step_patches": 64, "max_length": 200}
    return Scheduler(
        Limits(**{**defaults, **limits}),
        PagePool(num_pages, page_size, keeps_prefixes),
        EncoderCache(encoder_slots * ENCODER_SLOT_TOKENS, keeps_images),
        draft=draft,
        quarantine=quarantine,
    )


def ask(name, tokens, images=(), *, priority=0, salt=b"", **sampling):
    token_ids = list(range(100, 100 + tokens)) if isinstance(tokens, int) else list(tokens)
    return Request(
        id=name,
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids),
        images=tuple(images),
        sampling=SamplingParams(**{"max_tokens": 4, **sampling}),
        stop_ids=frozenset([STOP]),
        priority=priority,
        salt=salt,
    )


def image(key, start, num_tokens, num_patches=4):
    return ImageSpan(key=key * 32, start=start, num_tokens=num_tokens, num_patches=num_patches)


def added(scheduler, *requests):
    for request in requests:
        scheduler.add(request)
    return requests


def read(scheduler, plan, token=WORD):
    """Every chunk that samples gets the token; drafts are never accepted."""
    ended = scheduler.update(plan, {chunk.request.id: [token] for chunk in plan.chunks if chunk.samples})
    scheduler.check()
    return ended


def step(scheduler, token=WORD, **options):
    plan = scheduler.plan(**options)
    read(scheduler, plan, token)
    return plan


def finish_all(scheduler, most_steps=1000):
    plans = []
    while scheduler.has_work:
        plans.append(step(scheduler))
        assert len(plans) < most_steps
    assert scheduler.is_idle_clean()
    return plans


def sizes(plan):
    return {chunk.request.id: chunk.num_tokens for chunk in plan.chunks}


# ---- one request


def test_a_prompt_is_computed_in_chunks_then_the_output_token_by_token():
    scheduler = make(max_step_tokens=4)
    [request] = added(scheduler, ask("a", 10, max_tokens=3))
    chunks = [plan.chunks[0] for plan in finish_all(scheduler)]
    assert [(chunk.start, chunk.num_tokens, chunk.samples) for chunk in chunks] == [
        (0, 4, False),
        (4, 4, False),
        (8, 2, True),
        (10, 1, True),
        (11, 1, True),
    ]
    assert request.output_token_ids == [WORD] * 3
    assert request.finish_reason == "length"


def test_the_next_step_is_planned_before_the_last_one_is_read():
    scheduler = make()
    [request] = added(scheduler, ask("a", 3, max_tokens=2))
    first, second = scheduler.plan(), scheduler.plan()
    assert not first.chunks[0].reads_pending
    assert second.chunks[0].reads_pending
    assert (second.chunks[0].start, second.chunks[0].num_tokens) == (3, 1)
    assert scheduler.plan() is None  # both output tokens are pending
    assert read(scheduler, first, 5) == []
    assert read(scheduler, second, 6) == [request]
    assert request.output_token_ids == [5, 6]
    assert scheduler.plan() is None


def test_steps_are_read_in_order():
    scheduler = make()
    added(scheduler, ask("a", 3))
    scheduler.plan()
    second = scheduler.plan()
    with pytest.raises(AssertionError, match="order"):
        scheduler.update(second, {"a": [WORD]})


def test_a_stop_token_ends_a_request_but_not_before_min_tokens():
    scheduler = make()
    [request] = added(scheduler, ask("a", 3, max_tokens=10, min_tokens=2))
    for _ in range(3):
        assert request.finish_reason is None
        step(scheduler, STOP)
    assert request.finish_reason == "stop"
    assert request.output_token_ids == [STOP] * 3


def test_tokens_computed_after_a_stop_token_are_dropped():
    scheduler = make()
    [request] = added(scheduler, ask("a", 3))
    first, second = scheduler.plan(), scheduler.plan()
    assert read(scheduler, first, STOP) == [request]
    assert read(scheduler, second) == []
    assert request.output_token_ids == [STOP]
    assert scheduler.is_idle_clean()


def test_a_request_ends_at_the_maximum_length():
    scheduler = make(max_length=6)
    [request] = added(scheduler, ask("a", 4, max_tokens=50))
    finish_all(scheduler)
    assert len(request.token_ids) == 6
    assert request.finish_reason == "length"


@pytest.mark.parametrize(
    ("request_", "error", "message"),
    [
        (ask("a", 0), RequestError, "empty"),
        (ask("a", 200), RequestError, "200 tokens; prompt and output together may have 200"),
        (ask("a", 40, max_tokens=42), RequestError, "needs 21 pages; the KV cache has 20"),
        (ask("a", 70, [image(b"i", 0, 65)]), ImageError, "takes 65 tokens; the encoder cache has 64"),
        (ask("a", 10, [image(b"q", 0, 5)]), ImageError, "could not be encoded before"),
    ],
)
def test_a_request_that_can_never_run_is_refused(request_, error, message):
    scheduler = make(num_pages=20, encoder_slots=1, quarantine={b"q" * 32})
    with pytest.raises(error, match=message):
        scheduler.add(request_)
    assert not scheduler.has_work


def test_a_request_that_just_fits_runs():
    scheduler = make(num_pages=20, encoder_slots=1)
    added(scheduler, ask("a", 64, [image(b"i", 0, 64)], max_tokens=17))
    finish_all(scheduler)


# ---- sharing a step


def test_decode_continues_and_prompts_share_the_remaining_budget():
    scheduler = make(max_step_tokens=8)
    added(scheduler, ask("a", 3, max_tokens=20), ask("b", 3, max_tokens=20))
    step(scheduler)
    added(scheduler, ask("c", 20), ask("d", range(50, 60)))
    assert sizes(step(scheduler)) == {"a": 1, "b": 1, "c": 6}
    assert sizes(step(scheduler, token_budget=2)) == {"a": 1, "b": 1, "c": 2}
    assert sizes(step(scheduler, token_budget=0)) == {"a": 1, "b": 1, "c": 1}


def test_a_budget_below_one_token_each_serves_requests_in_order():
    scheduler = make(max_step_tokens=2)
    requests = added(scheduler, *(ask(name, 1, max_tokens=3) for name in "abcd"))
    assert sizes(step(scheduler)) == {"a": 1, "b": 1}
    finish_all(scheduler)
    assert all(len(request.output_token_ids) == 3 for request in requests)


def test_only_finitely_many_urgent_requests_overtake_a_waiting_one():
    scheduler = make(max_requests=1)
    waiting = ask("patient", 2, max_tokens=1)
    added(scheduler, waiting)
    for number in range(AGEING + 10):
        added(scheduler, ask(f"urgent-{number}", 2, max_tokens=1, priority=-1))
    order = [plan.chunks[0].request.id for plan in finish_all(scheduler)]
    assert order.index("patient") == AGEING - 1


def test_a_small_request_does_not_overtake_a_large_one_that_waits_for_pages():
    scheduler = make(num_pages=10, keeps_prefixes=False)
    added(scheduler, ask("a", 16, max_tokens=8), ask("large", 30), ask("small", 2, max_tokens=1))
    assert sizes(step(scheduler)) == {"a": 16}
    assert scheduler.num_waiting == 2
    plans = finish_all(scheduler)
    firsts = [request.id for plan in plans for request in plan.started]
    assert firsts == ["large", "small"]


def test_a_prompt_waits_until_there_are_pages_beside_the_reserved_ones():
    scheduler = make(num_pages=10, max_step_tokens=4)
    added(scheduler, ask("a", 24), ask("b", range(20)))
    step(scheduler)
    assert scheduler.num_running == 1
    assert all(not plan.preempted for plan in finish_all(scheduler))


# ---- preemption


def preempting_pair(**options):
    scheduler = make(num_pages=6, page_size=2, **options)
    old, young = added(scheduler, ask("old", 4, max_tokens=8), ask("young", range(50, 54), max_tokens=6))
    return scheduler, old, young


def test_the_youngest_request_is_preempted_and_resumes_later():
    scheduler, old, young = preempting_pair()
    plans = finish_all(scheduler)
    assert [request.id for plan in plans for request in plan.preempted] == ["young"]
    assert (old.num_preemptions, young.num_preemptions) == (0, 1)
    assert len(old.output_token_ids) == 8
    assert len(young.output_token_ids) == 6


def test_a_preempted_request_with_a_pending_token_waits_until_it_is_read():
    scheduler, old, young = preempting_pair()
    under_way = [scheduler.plan()]
    while not young.num_preemptions:
        under_way.append(scheduler.plan())
        read(scheduler, under_way.pop(0))
    assert young.num_pending == 0  # read just now; before that it was pending and preempted at once
    while scheduler.has_work:
        plan = scheduler.plan()
        if plan is not None:
            under_way.append(plan)
        read(scheduler, under_way.pop(0))
    assert young.output_token_ids == [WORD] * 6
    assert old.output_token_ids == [WORD] * 8
    assert scheduler.is_idle_clean()


def test_a_request_that_needs_every_page_is_not_blocked_by_its_own_cached_prefix():
    scheduler = make(num_pages=3, page_size=4)
    added(scheduler, ask("a", 12, max_tokens=1))
    finish_all(scheduler)
    [again] = added(scheduler, ask("b", 12, max_tokens=1))
    plan = step(scheduler)
    assert plan.page_copies == []
    assert again.num_cached_tokens == 8


# ---- prefixes


def test_a_request_with_a_cached_prefix_shares_its_pages():
    scheduler = make()
    first, second = ask("a", 10), ask("b", 14)
    added(scheduler, first)
    pages = list(step(scheduler).chunks[0].pages)
    added(scheduler, second)
    chunk = step(scheduler).chunks[-1]
    assert (second.num_cached_tokens, chunk.start, chunk.num_tokens) == (8, 8, 6)
    assert list(chunk.pages[:2]) == pages[:2]
    assert scheduler.pages.num_owners(pages[0]) == 2
    finish_all(scheduler)


def test_the_last_token_is_computed_in_a_copy_of_its_page():
    scheduler = make()
    added(scheduler, ask("a", 8))
    [*_, last] = step(scheduler).chunks[0].pages
    finish_all(scheduler)
    [again] = added(scheduler, ask("b", 8))
    plan = step(scheduler)
    [(source, target)] = plan.page_copies
    assert (plan.chunks[0].start, plan.chunks[0].num_tokens, again.num_cached_tokens) == (7, 1, 7)
    assert source == last
    assert plan.chunks[0].pages[1] == target
    assert scheduler.pages.num_owners(target) == 1
    finish_all(scheduler)


def test_a_page_that_is_copied_from_is_not_written_in_the_same_step():
    scheduler = make(num_pages=4)
    added(scheduler, ask("a", 8, max_tokens=1))
    finish_all(scheduler)
    added(scheduler, ask("b", 8, max_tokens=1), ask("c", range(50, 58), max_tokens=1))
    plan = step(scheduler)
    [(source, _)] = plan.page_copies
    assert all(source not in chunk.pages for chunk in plan.chunks)
    finish_all(scheduler)


@pytest.mark.parametrize(
    "other",
    [
        ask("b", 14, salt=b"tenant"),
        ask("b", 14, prompt_logprobs=0),
        ask("b", range(101, 115)),
        ask("b", 14, [image(b"j", 2, 4)]),
        ask("b", 14, [image(b"i", 3, 4)]),
        ask("b", 14),
    ],
    ids=["salt", "prompt logprobs", "tokens", "another image", "image elsewhere", "no image"],
)
def test_different_prefixes_are_not_shared(other):
    scheduler = make()
    added(scheduler, ask("a", 14, [image(b"i", 2, 4)]))
    finish_all(scheduler)
    added(scheduler, other)
    assert step(scheduler).chunks[0].start == 0
    assert other.num_cached_tokens == 0


def test_images_inside_a_cached_prefix_are_not_encoded_again():
    scheduler = make(keeps_images=False)
    images = [image(b"i", 1, 5), image(b"j", 7, 4)]
    added(scheduler, ask("a", 14, images))
    assert len(step(scheduler).images) == 2
    finish_all(scheduler)
    added(scheduler, ask("b", [*range(100, 109), 110, 110, 5, 5], images))
    plan = step(scheduler)
    assert plan.chunks[0].start == 8
    assert [planned.span for planned in plan.images] == [images[1]]
    assert [cached.span for cached in plan.chunks[0].images] == [images[1]]


# ---- images


def test_a_step_encodes_no_more_patches_than_allowed_and_a_larger_image_alone():
    scheduler = make(max_step_patches=10)
    images = [image(b"a", 0, 2, 6), image(b"b", 2, 2, 4), image(b"c", 4, 2, 99), image(b"d", 6, 2, 1)]
    added(scheduler, ask("a", 10, images))
    keys = [[planned.span.key[:1] for planned in plan.images] for plan in finish_all(scheduler)]
    assert keys[:3] == [[b"a", b"b"], [b"c"], [b"d"]]


def test_requests_with_the_same_image_encode_it_once():
    scheduler = make(keeps_prefixes=False)
    added(scheduler, ask("a", 6, [image(b"i", 1, 4)]), ask("b", 8, [image(b"i", 3, 4)]))
    plan = step(scheduler)
    assert len(plan.images) == 1
    assert [chunk.images[0].slots for chunk in plan.chunks] == [plan.images[0].slots] * 2
    assert sum(len(plan.images) for plan in finish_all(scheduler)) == 0


def test_an_image_is_read_before_another_gets_its_slot():
    scheduler = make(encoder_slots=1)
    added(scheduler, ask("a", 10, [image(b"i", 1, 3), image(b"j", 5, 3)]))
    first, second = step(scheduler), step(scheduler)
    assert (sizes(first), sizes(second)) == ({"a": 5}, {"a": 5})
    assert first.images[0].slots == second.images[0].slots


def test_an_image_larger_than_a_chunk_is_encoded_once():
    scheduler = make(max_step_tokens=10)
    added(scheduler, ask("a", 64, [image(b"i", 2, 60)], max_tokens=1))
    assert [len(plan.images) for plan in finish_all(scheduler)] == [1, 0, 0, 0, 0, 0, 0]


def test_a_popular_image_does_not_block_others_forever():
    scheduler = make(encoder_slots=1, max_step_tokens=8, keeps_prefixes=False)
    names = iter(range(1000))
    added(scheduler, ask(f"popular-{next(names)}", 12, [image(b"p", 0, 12)], max_tokens=1))
    [other] = added(scheduler, ask("other", 12, [image(b"o", 3, 8)], max_tokens=1))
    for _ in range(20):
        added(scheduler, ask(f"popular-{next(names)}", 12, [image(b"p", 0, 12)], max_tokens=1))
        step(scheduler)
    assert other.finish_reason == "length"


def test_an_image_whose_request_was_preempted_before_encoding_is_not_cached():
    for start in range(2, 12):
        scheduler = make(num_pages=21, page_size=1, max_step_tokens=2, keeps_prefixes=False)
        [_, young] = added(
            scheduler, ask("old", 2, max_tokens=20), ask("young", 14, [image(b"i", start, 14 - start)], max_tokens=1)
        )
        encoded = set()
        while scheduler.has_work:
            plan = step(scheduler)
            encoded |= {planned.key for planned in plan.images}
            assert scheduler.encoder_cache.contains(salted(b"", b"i" * 32)) == bool(encoded)
        assert young.num_preemptions == 1


def test_every_request_that_reads_a_bad_image_fails_and_others_continue():
    scheduler = make(max_step_tokens=14, keeps_prefixes=False)
    bad = image(b"i", 1, 4)
    requests = added(scheduler, ask("a", 8, [bad]), ask("b", 12, [bad]), ask("c", range(50, 54)))
    plan = scheduler.plan()
    failed = scheduler.fail_image(plan, plan.images[0].key, FAILURE)
    assert [request.id for request in failed] == ["a", "b"]
    assert all(request.failure == FAILURE and request.finish_reason == "failed" for request in failed)
    assert not scheduler.encoder_cache.contains(plan.images[0].key)
    read(scheduler, plan)
    finish_all(scheduler)
    assert requests[2].finish_reason == "length"


# ---- endings


@pytest.mark.parametrize("depth", [0, 1])
def test_a_request_cancelled_while_in_flight_leaks_nothing(depth):
    scheduler = make()
    request, other = added(scheduler, ask("a", 6, [image(b"i", 1, 4)]), ask("b", 6))
    plans = [scheduler.plan() for _ in range(1 + depth)]
    assert scheduler.cancel("a")
    assert not scheduler.cancel("a")
    scheduler.check()
    for plan in plans:
        assert request not in read(scheduler, plan)
    assert request.finish_reason == "cancelled"
    assert request.output_token_ids == []
    finish_all(scheduler)
    assert len(other.output_token_ids) == 4


def test_a_failed_request_has_a_failure_and_ends_once():
    scheduler = make()
    [request] = added(scheduler, ask("a", 6))
    assert scheduler.fail(request, FAILURE)
    assert not scheduler.fail(request, Failure("running", "again"))
    assert not scheduler.finish("a")
    assert (request.finish_reason, request.failure) == ("failed", FAILURE)
    assert scheduler.is_idle_clean()


def test_a_request_finished_from_outside_has_the_reason_stop():
    scheduler = make()
    [request] = added(scheduler, ask("a", 6))
    step(scheduler)
    assert scheduler.finish("a")
    assert request.finish_reason == "stop"


def test_an_id_can_be_reused_while_the_first_request_is_in_flight():
    scheduler = make()
    added(scheduler, ask("a", 6))
    plan = scheduler.plan()
    scheduler.cancel("a")
    [second] = added(scheduler, ask("a", 6))
    read(scheduler, plan)
    assert second.output_token_ids == []
    finish_all(scheduler)
    assert len(second.output_token_ids) == 4


# ---- drafts


def propose(request, most):
    return [21, 22, 23][:most]


def test_accepted_drafts_are_kept_and_rejected_ones_recomputed():
    scheduler = make(draft=propose, max_draft_tokens=3)
    [request] = added(scheduler, ask("a", 5, max_tokens=20))
    step(scheduler, 20)
    plan = scheduler.plan()
    chunk = plan.chunks[0]
    assert (chunk.drafts, chunk.num_tokens, chunk.start) == ((21, 22, 23), 4, 5)
    assert scheduler.plan() is None  # how many are accepted is known when they are read
    scheduler.update(plan, {"a": [21, 22, 9]})
    assert request.output_token_ids == [20, 21, 22, 9]
    assert (request.num_computed_tokens, request.num_pending) == (8, 0)
    assert scheduler.plan().chunks[0].start == 8


def test_drafts_stay_within_the_token_limit_and_are_dropped_after_a_stop_token():
    scheduler = make(draft=propose, max_draft_tokens=3)
    short, stopped = added(scheduler, ask("a", 5, max_tokens=3), ask("b", 5, max_tokens=20))
    step(scheduler)
    plan = scheduler.plan()
    assert [len(chunk.drafts) for chunk in plan.chunks] == [1, 3]
    scheduler.update(plan, {"a": [21, 22], "b": [21, STOP, 23]})
    assert (short.finish_reason, stopped.finish_reason) == ("length", "stop")
    assert stopped.output_token_ids == [WORD, 21, STOP]
    assert scheduler.is_idle_clean()


def test_drafts_take_neither_pages_nor_tokens_of_other_requests():
    scheduler = make(draft=propose, max_draft_tokens=3, num_pages=4, page_size=4, max_step_tokens=3)
    added(scheduler, ask("a", 2, max_tokens=15), ask("b", range(50, 52), max_tokens=3))
    plans = [step(scheduler) for _ in range(3)]
    assert all(sum(sizes(plan).values()) <= 3 for plan in plans)
    assert Counter(len(plan.chunks) for plan in plans[1:]) == {2: 2}
    finish_all(scheduler)
