"""The scheduler's guarantees one by one. The random traces check that all of them hold together."""

import pickle
from collections import Counter

import pytest
from engine.traces import Trace

from saccade.engine.core import image_policy
from saccade.engine.core.admission import AGEING
from saccade.engine.core.encoder_cache import ENCODER_SLOT_TOKENS, EncoderCache, salted
from saccade.engine.core.pages import PagePool
from saccade.engine.core.scheduler import EncoderTurn, Limits, Scheduler
from saccade.engine.core.step import (
    ENCODER_PARTS,
    Chunk,
    ChunkResult,
    EncodeResult,
    ImageFeatures,
    ImageToEncode,
    SlotStart,
    StepPlan,
    StepResult,
)
from saccade.engine.request import Failure, ImageSpan, Request
from saccade.engine.sampling_params import SamplingParams
from saccade.errors import ImageError, RequestError

STOP, WORD = 0, 9
FAILURE = Failure("encoding", "it cannot be decoded")


class Recording(Scheduler):
    """Keeps all outputs."""

    def record(self, outputs):
        self.outputs = [*getattr(self, "outputs", []), *outputs]
        return outputs

    def tokens(self, request_id):
        return [token for output in self.outputs if output.request_id == request_id for token in output.token_ids]

    def last(self, request_id):
        """The last output of a request that has ended."""
        [last] = [output for output in self.outputs if output.request_id == request_id and output.finish_reason]
        return last


def make(
    *,
    num_pages=100,
    page_size=4,
    encoder_slots=4,
    keeps_prefixes=True,
    keeps_images=True,
    drafter=None,
    **limits,
):
    defaults = {
        "max_requests": 8,
        "max_step_tokens": 64,
        "max_step_chunks": 32,
        "max_encoder_patches": 64,
        "max_length": 200,
    }
    return Recording(
        Limits(**{**defaults, **limits}),
        PagePool(num_pages, page_size, keeps_prefixes),
        EncoderCache(encoder_slots * ENCODER_SLOT_TOKENS, keeps_images),
        drafter,
    )


def ask(name, tokens, images=(), *, priority=0, salt=b"", stream_interval=1, **sampling):
    token_ids = tuple(range(100, 100 + tokens)) if isinstance(tokens, int) else tuple(tokens)
    return Request(
        id=name,
        token_ids=token_ids,
        images=tuple(images),
        sampling=SamplingParams(**{"max_tokens": 4, **sampling}),
        stop_ids=frozenset([STOP]),
        priority=priority,
        salt=salt,
        stream_interval=stream_interval,
    )


def image(key, start, num_tokens, num_patches=4):
    return ImageSpan(key=key * 32, start=start, num_tokens=num_tokens, num_patches=num_patches)


def added(scheduler, *requests):
    """Add requests; returns their states."""
    for request in requests:
        scheduler.add(request)
    return [scheduler.find(request.id) for request in requests]


def encoded(plan):
    """Results of all encodings of a plan."""
    return tuple(EncodeResult(planned.key) for planned in plan.images)


def read(scheduler, plan, token=WORD, *, tokens=None, images=None):
    """Update with results: every chunk that samples gets `token`, or its entry of `tokens`; no draft is accepted.

    All encodings end unless `images` are given. An image that failed fails the chunks that read it.
    """
    images = encoded(plan) if images is None else images
    failures = {result.key: result.failure for result in images if result.failure is not None}
    failed_slots = {planned.slots: failures[planned.key] for planned in plan.images if planned.key in failures}
    results = []
    for chunk in plan.chunks:
        sampled = tuple((tokens or {}).get(chunk.request_id, [token])) if chunk.samples else ()
        failure = next((failed_slots[read.slots] for read in chunk.images if read.slots in failed_slots), None)
        results.append(ChunkResult(chunk.request_id, () if failure else sampled, failure=failure))
    outputs = scheduler.update(plan, StepResult(number=plan.number, chunks=tuple(results), images=images))
    scheduler.check()
    return scheduler.record(outputs)


def ended(outputs):
    return [output.request_id for output in outputs if output.finish_reason]


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
    return {chunk.request_id: chunk.num_tokens for chunk in plan.chunks}


# ---- one request


def test_a_prompt_is_computed_in_chunks_then_the_output_token_by_token():
    scheduler = make(max_step_tokens=4)
    added(scheduler, ask("a", 10, max_tokens=3))
    chunks = [plan.chunks[0] for plan in finish_all(scheduler)]
    assert [(chunk.start, chunk.num_tokens, chunk.samples, chunk.reads_last_token) for chunk in chunks] == [
        (0, 4, False, False),
        (4, 4, False, False),
        (8, 2, True, False),
        (10, 1, True, True),
        (11, 1, True, True),
    ]
    assert scheduler.tokens("a") == [WORD] * 3
    assert scheduler.last("a").finish_reason == "length"


def test_new_pages_are_sent_once():
    scheduler = make(max_step_tokens=6, page_size=4)
    [state] = added(scheduler, ask("a", 10, max_tokens=8))
    sent = []
    while scheduler.has_work:
        plan = scheduler.plan()
        new_pages = plan.chunks[0].new_pages
        assert [*sent, *new_pages] == state.pages
        sent += new_pages
        read(scheduler, plan)
    assert len(sent) == 5


def test_a_request_starts_with_the_tokens_it_has():
    scheduler, _, _ = preempting_pair()
    starts = [start for plan in finish_all(scheduler) for start in plan.started]
    assert [start.request_id for start in starts] == ["old", "young", "young"]
    assert starts[0].output_token_ids == starts[1].output_token_ids == ()
    assert starts[2].output_token_ids == (WORD,) * len(starts[2].output_token_ids)
    assert len(starts[2].output_token_ids) > 0


def test_the_next_step_is_planned_before_the_last_one_is_read():
    scheduler = make()
    added(scheduler, ask("a", 3, max_tokens=2))
    first, second = scheduler.plan(), scheduler.plan()
    assert not first.chunks[0].reads_last_token
    assert second.chunks[0].reads_last_token
    assert (second.chunks[0].start, second.chunks[0].num_tokens) == (3, 1)
    assert scheduler.plan() is None  # both output tokens are pending
    assert ended(read(scheduler, first, 5)) == []
    assert ended(read(scheduler, second, 6)) == ["a"]
    assert scheduler.tokens("a") == [5, 6]
    assert scheduler.plan() is None


def test_a_deferred_request_is_left_out_of_steps_until_its_token_is_read():
    scheduler = make()
    added(scheduler, ask("deferred", 3), ask("other", 3))
    first, second = scheduler.plan(deferred={"deferred"}), scheduler.plan(deferred={"deferred"})
    assert sizes(first) == {"deferred": 3, "other": 3}
    assert sizes(second) == {"other": 1}
    read(scheduler, first)
    assert sizes(scheduler.plan(deferred={"deferred"})) == {"deferred": 1, "other": 1}
    assert sizes(scheduler.plan()) == {"deferred": 1, "other": 1}, "it waits no longer"


def test_steps_are_read_in_order():
    scheduler = make()
    added(scheduler, ask("a", 3))
    scheduler.plan()
    second = scheduler.plan()
    with pytest.raises(AssertionError, match="order"):
        read(scheduler, second)


def test_a_stop_token_ends_a_request_but_not_before_min_tokens():
    scheduler = make()
    added(scheduler, ask("a", 3, max_tokens=10, min_tokens=2))
    for _ in range(3):
        assert scheduler.has_work
        step(scheduler, STOP)
    assert scheduler.last("a").finish_reason == "stop"
    assert scheduler.tokens("a") == [STOP] * 3


def test_an_output_has_the_first_token_alone_then_a_stream_interval_and_the_last_one_the_rest():
    scheduler = make()
    added(scheduler, ask("a", 3, max_tokens=10, stream_interval=4))
    finish_all(scheduler)
    assert [len(output.token_ids) for output in scheduler.outputs] == [1, 4, 4, 1]
    assert scheduler.last("a").finish_reason == "length"


def test_a_cancelled_request_gets_the_tokens_that_were_not_sent():
    scheduler = make()
    added(scheduler, ask("a", 3, max_tokens=10, stream_interval=4))
    for token in (5, 6, 7):
        step(scheduler, token)
    assert scheduler.tokens("a") == [5]
    assert scheduler.end("a", "cancelled").token_ids == (6, 7)


def test_tokens_computed_after_a_stop_token_are_dropped():
    scheduler = make()
    added(scheduler, ask("a", 3))
    first, second = scheduler.plan(), scheduler.plan()
    assert ended(read(scheduler, first, STOP)) == ["a"]
    assert read(scheduler, second) == []
    assert scheduler.tokens("a") == [STOP]
    assert scheduler.is_idle_clean()


def test_a_request_ends_at_the_maximum_length():
    scheduler = make(max_length=6)
    added(scheduler, ask("a", 4, max_tokens=50))
    finish_all(scheduler)
    assert len(scheduler.tokens("a")) == 2
    assert scheduler.last("a").finish_reason == "length"


@pytest.mark.parametrize(
    ("request_", "error", "message"),
    [
        (ask("a", 0), RequestError, "empty"),
        (ask("a", 200), RequestError, "200 tokens; prompt and output together may have 200"),
        (ask("a", 40, max_tokens=42), RequestError, "needs 21 pages; the KV cache has 20"),
        (ask("a", 70, [image(b"i", 0, 65)]), ImageError, "takes 65 tokens; the encoder cache has 64"),
    ],
)
def test_a_request_that_can_never_run_is_refused(request_, error, message):
    scheduler = make(num_pages=20, encoder_slots=1)
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
    added(scheduler, *(ask(name, 1, max_tokens=3) for name in "abcd"))
    assert sizes(step(scheduler)) == {"a": 1, "b": 1}
    finish_all(scheduler)
    assert all(len(scheduler.tokens(name)) == 3 for name in "abcd")


def test_only_finitely_many_urgent_requests_overtake_a_waiting_one():
    scheduler = make(max_requests=1)
    waiting = ask("patient", 2, max_tokens=1)
    added(scheduler, waiting)
    for number in range(AGEING + 10):
        added(scheduler, ask(f"urgent-{number}", 2, max_tokens=1, priority=-1))
    order = [plan.chunks[0].request_id for plan in finish_all(scheduler)]
    assert order.index("patient") == AGEING - 1


def test_a_small_request_does_not_overtake_a_large_one_that_waits_for_pages():
    scheduler = make(num_pages=10, keeps_prefixes=False)
    added(scheduler, ask("a", 16, max_tokens=8), ask("large", 30), ask("small", 2, max_tokens=1))
    assert sizes(step(scheduler)) == {"a": 16}
    assert scheduler.num_waiting == 2
    plans = finish_all(scheduler)
    firsts = [start.request_id for plan in plans for start in plan.started]
    assert firsts == ["large", "small"]


def test_a_prompt_waits_until_there_are_pages_in_addition_to_the_reserved_ones():
    scheduler = make(num_pages=10, max_step_tokens=4)
    added(scheduler, ask("a", 24), ask("b", range(20)))
    step(scheduler)
    assert scheduler.num_running == 1
    finish_all(scheduler)
    assert scheduler.num_preemptions == 0


def test_a_step_has_a_limited_number_of_chunks_in_addition_to_decode_requests():
    scheduler = make(max_step_chunks=2)
    added(scheduler, *(ask(name, range(100 * i, 100 * i + 4), max_tokens=20) for i, name in enumerate("abcde")))
    assert sizes(step(scheduler)) == {"a": 4, "b": 4}
    assert sizes(step(scheduler)) == {"a": 1, "b": 1, "c": 4, "d": 4}
    assert sizes(step(scheduler)) == {"a": 1, "b": 1, "c": 1, "d": 1, "e": 4}


# ---- preemption


def preempting_pair(**sampling):
    scheduler = make(num_pages=6, page_size=2)
    old, young = added(
        scheduler, ask("old", 4, max_tokens=8, **sampling), ask("young", range(50, 54), max_tokens=6, **sampling)
    )
    return scheduler, old, young


def test_the_youngest_request_is_preempted_and_resumes_later():
    scheduler, old, young = preempting_pair()
    finish_all(scheduler)
    assert (scheduler.num_preemptions, old.num_preemptions, young.num_preemptions) == (1, 0, 1)
    assert scheduler.last("young").num_preemptions == 1
    assert len(scheduler.tokens("old")) == 8
    assert len(scheduler.tokens("young")) == 6


def test_a_preempted_request_with_a_pending_token_waits_until_it_is_read():
    scheduler, _, young = preempting_pair()
    under_way = [scheduler.plan()]
    while not young.num_preemptions:
        under_way.append(scheduler.plan())
        read(scheduler, under_way.pop(0))
    assert young.num_pending == 0  # `young` was preempted while pending; its token is read now
    while scheduler.has_work:
        plan = scheduler.plan()
        if plan is not None:
            under_way.append(plan)
        read(scheduler, under_way.pop(0))
    assert scheduler.tokens("young") == [WORD] * 6
    assert scheduler.tokens("old") == [WORD] * 8
    assert scheduler.is_idle_clean()


def test_a_request_that_needs_every_page_is_not_blocked_by_its_own_cached_prefix():
    scheduler = make(num_pages=3, page_size=4)
    added(scheduler, ask("a", 12, max_tokens=1))
    finish_all(scheduler)
    [again] = added(scheduler, ask("b", 12, max_tokens=1))
    plan = step(scheduler)
    assert plan.page_copies == ()
    assert again.num_cached_tokens == 8


# ---- prefixes


def test_a_request_with_a_cached_prefix_shares_its_pages():
    scheduler = make()
    added(scheduler, ask("a", 10))
    pages = step(scheduler).chunks[0].new_pages
    [second] = added(scheduler, ask("b", 14))
    chunk = step(scheduler).chunks[-1]
    assert (second.num_cached_tokens, chunk.start, chunk.num_tokens) == (8, 8, 6)
    assert chunk.new_pages[:2] == pages[:2]
    assert scheduler.pages.num_owners(pages[0]) == 2
    finish_all(scheduler)
    assert scheduler.last("b").num_cached_tokens == 8


def test_the_last_token_is_computed_in_a_copy_of_its_page():
    scheduler = make()
    added(scheduler, ask("a", 8))
    [*_, last] = step(scheduler).chunks[0].new_pages
    finish_all(scheduler)
    [again] = added(scheduler, ask("b", 8))
    plan = step(scheduler)
    [(source, target)] = plan.page_copies
    assert (plan.chunks[0].start, plan.chunks[0].num_tokens, again.num_cached_tokens) == (7, 1, 7)
    assert source == last
    assert plan.chunks[0].new_pages[1] == target
    assert scheduler.pages.num_owners(target) == 1
    finish_all(scheduler)


def test_a_page_that_is_copied_from_is_not_written_in_the_same_step():
    scheduler = make(num_pages=4)
    added(scheduler, ask("a", 8, max_tokens=1))
    finish_all(scheduler)
    added(scheduler, ask("b", 8, max_tokens=1), ask("c", range(50, 58), max_tokens=1))
    plan = step(scheduler)
    [(source, _)] = plan.page_copies
    assert all(source not in chunk.new_pages for chunk in plan.chunks)
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
    [state] = added(scheduler, other)
    assert step(scheduler).chunks[0].start == 0
    assert state.num_cached_tokens == 0


def test_images_inside_a_cached_prefix_are_not_encoded_again():
    scheduler = make(keeps_images=False)
    images = [image(b"i", 1, 5), image(b"j", 7, 4)]
    added(scheduler, ask("a", 14, images))
    assert len(step(scheduler).images) == 2
    finish_all(scheduler)
    added(scheduler, ask("b", [*range(100, 109), 110, 110, 5, 5], images))
    plan = step(scheduler)
    assert plan.chunks[0].start == 8
    assert [planned.image_index for planned in plan.images] == [1]
    assert [read.image_index for read in plan.chunks[0].images] == [1]


# ---- images


def test_a_pass_encodes_no_more_patches_than_allowed_and_a_larger_image_alone():
    scheduler = make(max_encoder_patches=10)
    images = [image(b"a", 0, 2, 6), image(b"b", 2, 2, 4), image(b"c", 4, 2, 99), image(b"d", 6, 2, 1)]
    added(scheduler, ask("a", 10, images))
    indices = [[planned.image_index for planned in plan.images] for plan in finish_all(scheduler)]
    assert indices[:3] == [[0, 1], [2], [3]]


def decoding_with(scheduler, *requests):
    """A request that decodes, and new requests."""
    added(scheduler, ask("text", 2, max_tokens=50))
    step(scheduler)
    added(scheduler, *requests)


def test_passes_follow_one_another_without_waiting_for_their_results():
    scheduler = make(max_encoder_patches=10, keeps_prefixes=False)
    spans = [image(bytes([n]), 2 * n, 2, 8) for n in range(3)]
    decoding_with(scheduler, ask("a", 8, spans, max_tokens=1))
    plans = [scheduler.plan() for _ in range(3)]
    assert [[planned.image_index for planned in plan.images] for plan in plans] == [[0], [1], [2]]
    assert [sizes(plan) for plan in plans] == [{"text": 1, "a": 2}, {"text": 1, "a": 2}, {"text": 1, "a": 4}]


def test_a_pass_has_no_more_patches_than_its_turn_allows():
    scheduler = make(max_encoder_patches=100, keeps_prefixes=False)
    spans = [image(bytes([n]), 2 * n, 2, 8) for n in range(6)]
    decoding_with(scheduler, ask("a", 12, spans))
    assert scheduler.next_pass(20) == (16, ENCODER_PARTS, ENCODER_PARTS)
    assert len(scheduler.plan(turn=EncoderTurn(max_patches=20)).images) == 2
    assert scheduler.next_pass(1) == (8, ENCODER_PARTS, ENCODER_PARTS), "an image with more is encoded alone"
    assert len(scheduler.plan(turn=EncoderTurn(max_patches=1)).images) == 1
    assert scheduler.plan(turn=EncoderTurn(0)).images == ()


def test_a_pass_runs_in_parts_and_is_read_with_its_last_one():
    scheduler = make(keeps_prefixes=False)
    spans = [image(b"i", 2, 4, 64), image(b"j", 6, 1, 8)]
    decoding_with(scheduler, ask("a", 8, spans, max_tokens=1))
    plans = [scheduler.plan(turn=EncoderTurn(1))]
    assert scheduler.next_pass(100) == (64, ENCODER_PARTS, ENCODER_PARTS - 1)
    plans += [scheduler.plan(turn=EncoderTurn(num_parts)) for num_parts in (0, 2, 3, 4)]
    assert [plan.encoder_parts for plan in plans] == [1, 0, 2, 1, 4]
    assert [len(plan.images) for plan in plans] == [1, 0, 0, 0, 1], "the second image does not fit into the pass"
    assert [sizes(plan) for plan in plans] == [
        {"text": 1, "a": 2}, {"text": 1}, {"text": 1}, {"text": 1, "a": 4}, {"text": 1, "a": 2}
    ]  # fmt: skip


def test_a_pass_runs_to_its_end_without_the_request_that_began_it():
    scheduler = make(keeps_prefixes=False)
    decoding_with(scheduler, ask("a", 8, [image(b"i", 2, 4, 64)], max_tokens=1))
    first = scheduler.plan(turn=EncoderTurn(1))
    read(scheduler, first, images=())
    scheduler.end("a", "cancelled")
    scheduler.end("text", "cancelled")
    plan = scheduler.plan()
    assert (plan.chunks, plan.encoder_parts) == ((), ENCODER_PARTS - 1)
    read(scheduler, plan, images=encoded(first))
    assert scheduler.plan() is None
    assert not scheduler.images.is_encoding


def test_a_pass_that_fails_or_ends_before_its_last_part_is_over():
    for failure in (None, FAILURE):
        scheduler = make(keeps_prefixes=False)
        decoding_with(scheduler, ask("a", 8, [image(b"i", 2, 4, 64)], max_tokens=1))
        [planned] = scheduler.plan(turn=EncoderTurn(1)).images
        scheduler.finish_encoding([EncodeResult(planned.key, failure)])
        assert scheduler.next_pass(100) is None
        assert scheduler.plan().encoder_parts == 0


def test_while_no_request_decodes_a_pass_runs_whole():
    scheduler = make()
    added(scheduler, ask("a", 8, [image(b"i", 2, 4)]))
    plan = scheduler.plan(turn=EncoderTurn(1))
    assert (sizes(plan), plan.encoder_parts) == ({"a": 8}, ENCODER_PARTS)


def test_an_image_larger_than_a_pass_is_encoded_alone_and_in_more_parts():
    """A part of it takes about as long as a part of any other pass, so that decoding is delayed no more."""
    scheduler = make(keeps_prefixes=False)
    spans = [image(b"i", 2, 4, 65), image(b"j", 6, 1, 8)]
    decoding_with(scheduler, ask("a", 8, spans, max_tokens=1))
    assert scheduler.next_pass(64) == (65, 2 * ENCODER_PARTS, 2 * ENCODER_PARTS)
    plans = [scheduler.plan() for _ in range(3)]
    assert [(plan.encoder_parts, plan.pass_parts, len(plan.images)) for plan in plans] == [
        (ENCODER_PARTS, 2 * ENCODER_PARTS, 1), (ENCODER_PARTS, 0, 0), (ENCODER_PARTS, ENCODER_PARTS, 1)
    ]  # fmt: skip
    assert [sizes(plan) for plan in plans] == [{"text": 1, "a": 2}, {"text": 1, "a": 4}, {"text": 1, "a": 2}]


def test_a_large_image_is_encoded_in_several_steps_though_no_request_decodes():
    """Otherwise a request that arrives meanwhile would wait for the whole image."""
    scheduler = make(keeps_prefixes=False)
    added(scheduler, ask("a", 8, [image(b"i", 2, 4, 65)], max_tokens=1))
    plans = [scheduler.plan() for _ in range(2)]
    assert [(sizes(plan), plan.encoder_parts) for plan in plans] == [({"a": 2}, 4), ({"a": 6}, 4)]


def test_images_are_encoded_though_prompts_use_up_the_tokens_of_the_step():
    scheduler = make(keeps_prefixes=False)
    decoding_with(scheduler, ask("long", 30, max_tokens=1), ask("a", 8, [image(b"i", 2, 4)], max_tokens=1))
    plan = scheduler.plan(8)
    assert (sizes(plan), len(plan.images)) == ({"text": 1, "long": 8}, 1)


def test_work_left_counts_what_waits_before_the_first_image_that_cannot_be_read():
    scheduler = make(keeps_prefixes=False, max_encoder_patches=1000)
    decoding_with(
        scheduler,
        ask("first", 20, max_tokens=1),
        ask("a", 8, [image(b"i", 2, 4, 100)], max_tokens=1),
        ask("b", 30, [image(b"i", 2, 4, 100), image(b"j", 7, 4, 10)], max_tokens=1),
    )
    assert scheduler.work_left() == (3, 58, 22, 110), "the image of two requests is encoded once"
    [planned] = scheduler.plan(1, turn=EncoderTurn(1, max_patches=100)).images
    assert scheduler.work_left() == (3, 57, 21, 10)
    scheduler.finish_encoding([EncodeResult(planned.key)])
    assert scheduler.work_left() == (3, 57, 34, 10)


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
    added(scheduler, ask("other", 12, [image(b"o", 3, 8)], max_tokens=1))
    for _ in range(20):
        added(scheduler, ask(f"popular-{next(names)}", 12, [image(b"p", 0, 12)], max_tokens=1))
        step(scheduler)
    assert scheduler.last("other").finish_reason == "length"


def test_an_image_is_read_at_once_while_no_request_decodes():
    """The step waits for the image on the device."""
    scheduler = make()
    added(scheduler, ask("a", 8, [image(b"i", 2, 4)]))
    plan = scheduler.plan()
    assert sizes(plan) == {"a": 8}
    assert plan.chunks[0].images == (ImageFeatures(0, plan.images[0].slots),)


def test_images_of_a_request_are_encoded_ahead_of_its_chunks():
    scheduler = make(max_step_tokens=4)
    added(scheduler, ask("a", 20, [image(b"i", 8, 2), image(b"j", 12, 2)]))
    plan = scheduler.plan()
    assert sizes(plan) == {"a": 4}
    assert [planned.image_index for planned in plan.images] == [0, 1]
    assert plan.chunks[0].images == ()


def test_a_step_that_only_starts_encodings_is_a_plan_without_chunks():
    scheduler = make(max_step_tokens=4, keeps_prefixes=False)
    added(scheduler, ask("text", 2, max_tokens=2))
    step(scheduler)
    last = scheduler.plan()
    added(scheduler, ask("a", 4, [image(b"i", 0, 4)], max_tokens=1))
    plan = scheduler.plan(turn=EncoderTurn(1))
    assert (sizes(plan), len(plan.images), len(plan.started)) == ({}, 1, 1)
    read(scheduler, last)
    read(scheduler, plan, images=())
    assert sizes(scheduler.plan()) == {"a": 4}


def test_the_slots_of_an_image_in_flight_are_not_reused():
    """The encoder still writes to the slots, even if the request has ended."""
    scheduler = make(encoder_slots=1, keeps_prefixes=False)
    added(scheduler, ask("a", 8, [image(b"i", 0, 4)]), ask("b", 8, [image(b"j", 0, 4)]))
    plan = scheduler.plan()
    scheduler.end("a", "cancelled")
    scheduler.check()
    assert scheduler.plan() is None or not scheduler.plan().images
    read(scheduler, plan, images=())
    assert scheduler.images.is_encoding
    scheduler.finish_encoding(encoded(plan))
    assert not scheduler.images.is_encoding
    [planned] = scheduler.plan().images
    assert planned.slots == plan.images[0].slots


def test_an_image_whose_request_was_preempted_before_encoding_is_not_cached():
    for start in range(2, 12):
        scheduler = make(num_pages=21, page_size=1, max_step_tokens=2, keeps_prefixes=False)
        [_, young] = added(
            scheduler, ask("old", 2, max_tokens=20), ask("young", 14, [image(b"i", start, 14 - start)], max_tokens=1)
        )
        encoded_keys = set()
        while scheduler.has_work:
            plan = step(scheduler)
            encoded_keys |= {planned.key for planned in plan.images}
            assert scheduler.encoder_cache.contains(salted(b"", b"i" * 32)) == bool(encoded_keys)
        assert young.num_preemptions == 1


def failed(plan, *failing, kind="internal_error"):
    failure = Failure("encoding", "it cannot be decoded", kind)
    return tuple(
        EncodeResult(planned.key, failure if planned.image_index in failing else None) for planned in plan.images
    )


def test_every_request_that_uses_a_bad_image_fails_and_others_continue():
    scheduler = make(max_step_tokens=14, keeps_prefixes=False)
    bad = image(b"i", 1, 10)
    added(scheduler, ask("c", range(50, 54)), ask("a", 12, [bad]), ask("b", 12, [bad]))
    plan = scheduler.plan()
    assert sizes(plan) == {"c": 4, "a": 10}
    outputs = read(scheduler, plan, images=failed(plan, 0))
    assert ended(outputs) == ["a", "b"]
    assert scheduler.last("a").failure == scheduler.last("b").failure == FAILURE
    assert not scheduler.encoder_cache.contains(plan.images[0].key)
    finish_all(scheduler)
    assert scheduler.last("c").finish_reason == "length"


def test_requests_that_share_a_bad_image_fail_together():
    scheduler = make(keeps_prefixes=False)
    added(scheduler, ask("text", 2, max_tokens=9))
    step(scheduler)
    bad, good = image(b"i", 1, 4), image(b"j", 5, 2)
    added(scheduler, ask("a", 8, [bad, good]), ask("b", 12, [bad]), ask("c", 8, [image(b"j", 1, 2)]))
    plan = scheduler.plan()
    assert ended(read(scheduler, plan, images=failed(plan, 0))) == ["a", "b"]
    finish_all(scheduler)
    assert scheduler.last("c").finish_reason == scheduler.last("text").finish_reason == "length"


def test_a_chunk_that_failed_ends_its_request_alone():
    scheduler = make()
    added(scheduler, ask("a", 6), ask("b", 6))
    plans = [scheduler.plan(), scheduler.plan()]
    failure = Failure("running", "no memory", "out_of_memory")
    results = (ChunkResult("a", failure=failure), ChunkResult("b", (WORD,)))
    outputs = scheduler.record(scheduler.update(plans[0], StepResult(number=0, chunks=results, images=())))
    assert ended(outputs) == ["a"]
    assert scheduler.last("a").failure == failure
    read(scheduler, plans[1])
    finish_all(scheduler)
    assert scheduler.tokens("a") == []
    assert len(scheduler.tokens("b")) == 4


@pytest.mark.parametrize(("kind", "is_refused"), [("internal_error", True), ("out_of_memory", False)])
def test_an_image_that_could_not_be_encoded_is_refused_from_then_on(kind, is_refused):
    scheduler = make()
    added(scheduler, ask("a", 6, [image(b"i", 1, 4)]))
    plan = scheduler.plan()
    read(scheduler, plan, images=failed(plan, 0, kind=kind))
    again = ask("b", 8, [image(b"i", 3, 4)], salt=b"tenant")
    if is_refused:
        with pytest.raises(ImageError, match="could not be encoded before"):
            scheduler.add(again)
        assert not scheduler.has_work
    else:
        added(scheduler, again)
        finish_all(scheduler)
        assert scheduler.last("b").finish_reason == "length"


def test_the_quarantine_is_bounded(monkeypatch):
    monkeypatch.setattr(image_policy, "_MAX_QUARANTINED", 2)
    scheduler = make()
    for key in (b"a", b"b", b"c"):
        added(scheduler, ask(key.decode(), 6, [image(key, 1, 4)]))
        plan = scheduler.plan()
        read(scheduler, plan, images=failed(plan, 0))
    added(scheduler, ask("again", 6, [image(b"a", 1, 4)]))
    with pytest.raises(ImageError):
        scheduler.add(ask("c2", 6, [image(b"c", 1, 4)]))
    finish_all(scheduler)


# ---- endings


@pytest.mark.parametrize("depth", [0, 1])
def test_a_request_cancelled_while_in_flight_leaks_nothing(depth):
    scheduler = make()
    added(scheduler, ask("a", 6, [image(b"i", 1, 4)]), ask("b", 6))
    plans = [scheduler.plan() for _ in range(1 + depth)]
    output = scheduler.end("a", "cancelled")
    assert (output.request_id, output.finish_reason, output.token_ids) == ("a", "cancelled", ())
    assert scheduler.end("a", "cancelled") is None
    scheduler.check()
    for plan in plans:
        assert "a" not in ended(read(scheduler, plan))
    finish_all(scheduler)
    assert scheduler.tokens("a") == []
    assert len(scheduler.tokens("b")) == 4


def test_a_failed_request_has_a_failure_and_ends_once():
    scheduler = make()
    added(scheduler, ask("a", 6))
    output = scheduler.end("a", "failed", FAILURE)
    assert (output.finish_reason, output.failure) == ("failed", FAILURE)
    assert scheduler.end("a", "failed", Failure("running", "again")) is None
    assert scheduler.end("a", "stop") is None
    assert scheduler.is_idle_clean()


def test_an_id_can_be_reused_while_the_first_request_is_in_flight():
    scheduler = make()
    added(scheduler, ask("a", 6))
    plan = scheduler.plan()
    scheduler.end("a", "cancelled")
    added(scheduler, ask("a", 6))
    assert read(scheduler, plan) == []
    finish_all(scheduler)
    assert len(scheduler.tokens("a")) == 4


def test_prompt_log_probabilities_are_sent_once_even_after_a_preemption():
    from saccade.engine.request import TokenLogprobs

    scheduler, _, _ = preempting_pair(prompt_logprobs=0)
    found = {"old": [], "young": []}
    while scheduler.has_work:
        plan = scheduler.plan()
        results = []
        for chunk in plan.chunks:
            prompt = scheduler.find(chunk.request_id).request.token_ids
            targets = prompt[chunk.start + 1 : chunk.end + 1]
            results.append(
                ChunkResult(
                    chunk.request_id,
                    (WORD,) if chunk.samples else (),
                    prompt_logprobs=tuple(TokenLogprobs(token, 0.0) for token in targets),
                )
            )
        for output in scheduler.update(plan, StepResult(number=plan.number, chunks=tuple(results), images=())):
            found[output.request_id] += [entry.token_id for entry in output.prompt_logprobs]
    assert scheduler.num_preemptions == 1
    assert found == {"old": [101, 102, 103], "young": [51, 52, 53]}


# ---- drafts


class Drafts:
    """A drafter that always proposes the same tokens, for some requests or all."""

    def __init__(self, *only):
        self.only = only

    def is_drafting(self, state):
        return not self.only or state.request.id in self.only

    def propose(self, state, num_tokens):
        assert state.num_pending == 0
        return [21, 22, 23][:num_tokens] if self.is_drafting(state) else ()


def test_accepted_drafts_are_kept_and_rejected_ones_recomputed():
    scheduler = make(drafter=Drafts(), max_draft_tokens=3)
    [state] = added(scheduler, ask("a", 5, max_tokens=20))
    step(scheduler, 20)
    plan = scheduler.plan()
    chunk = plan.chunks[0]
    assert (chunk.drafts, chunk.num_tokens, chunk.start, chunk.reads_last_token) == ((21, 22, 23), 4, 5, True)
    assert scheduler.plan() is None  # the number of accepted drafts is known when they are read
    read(scheduler, plan, tokens={"a": [21, 22, 9]})
    assert scheduler.tokens("a") == [20, 21, 22, 9]
    assert (state.num_computed_tokens, state.num_pending) == (8, 0)
    assert scheduler.plan().chunks[0].start == 8


def test_a_request_that_drafts_waits_for_its_tokens_and_others_do_not():
    scheduler = make(drafter=Drafts("a"), max_draft_tokens=3)
    added(scheduler, ask("a", 5, max_tokens=20), ask("b", 5, max_tokens=20))
    first, second = scheduler.plan(), scheduler.plan()
    assert (sizes(first), sizes(second)) == ({"a": 5, "b": 5}, {"b": 1})
    read(scheduler, first)
    third = scheduler.plan()
    assert sizes(third) == {"a": 4, "b": 1}
    assert sizes(scheduler.plan()) == {"b": 1}


def test_drafts_stay_within_the_token_limit_and_are_dropped_after_a_stop_token():
    scheduler = make(drafter=Drafts(), max_draft_tokens=3)
    added(scheduler, ask("a", 5, max_tokens=3), ask("b", 5, max_tokens=20))
    step(scheduler)
    plan = scheduler.plan()
    assert [len(chunk.drafts) for chunk in plan.chunks] == [1, 3]
    read(scheduler, plan, tokens={"a": [21, 22], "b": [21, STOP, 23]})
    assert (scheduler.last("a").finish_reason, scheduler.last("b").finish_reason) == ("length", "stop")
    assert scheduler.tokens("b") == [WORD, 21, STOP]
    assert scheduler.is_idle_clean()


def test_drafts_take_neither_pages_nor_tokens_of_other_requests():
    scheduler = make(drafter=Drafts(), max_draft_tokens=3, num_pages=4, page_size=4, max_step_tokens=3)
    added(scheduler, ask("a", 2, max_tokens=15), ask("b", range(50, 52), max_tokens=3))
    plans = [step(scheduler) for _ in range(3)]
    assert all(sum(sizes(plan).values()) <= 3 for plan in plans)
    assert Counter(len(plan.chunks) for plan in plans[1:]) == {2: 2}
    finish_all(scheduler)


def test_a_decoding_request_keeps_its_token_when_one_that_waits_for_its_tokens_is_preempted():
    """`old` preempts `young`, which waits for its tokens; the prompt between must not use the token of `late`."""
    drafter = Drafts("young")
    drafter.propose = lambda state, num_tokens: ()  # it finds no drafts
    num_preemptions = 0
    for num_pages in range(60, 80):
        scheduler = make(
            drafter=drafter,
            max_draft_tokens=3,
            num_pages=num_pages,
            page_size=1,
            max_step_tokens=8,
            keeps_prefixes=False,
        )
        added(scheduler, ask("old", 1, max_tokens=30, priority=-1))
        added(scheduler, *(ask(name, 1, max_tokens=30) for name in ("b", "c", "late")))
        added(scheduler, ask("young", 7, max_tokens=30))
        step(scheduler)
        step(scheduler)
        added(scheduler, ask("prompt", 40, max_tokens=1, priority=-1))
        in_flight = []
        for _ in range(12):
            in_flight.append(scheduler.plan())
            late = scheduler.find("late")
            assert late.slot is None or "late" in sizes(in_flight[-1])
            if len(in_flight) > 1:
                read(scheduler, in_flight.pop(0))
        num_preemptions += scheduler.num_preemptions
    assert num_preemptions > 0


# ---- plans are plain data


def primitives(value):
    """Flatten nested tuples to primitives that msgpack can encode; AssertionError for other types."""
    if isinstance(value, tuple):
        return tuple(primitives(one) for one in value)
    assert value is None or type(value) in (int, str, bytes, bool), f"{value!r} is not plain data"
    return value


def to_primitives(plan):
    encoder = plan.encoder_parts, plan.pass_parts
    return primitives((plan.number, plan.chunks, plan.images, plan.loads, *encoder, plan.page_copies, plan.started))


def from_primitives(data):
    number, chunks, images, loads, encoder_parts, pass_parts, page_copies, started = data
    return StepPlan(
        number=number,
        chunks=tuple(Chunk(*c[:5], tuple(ImageFeatures(*image) for image in c[5]), *c[6:]) for c in chunks),
        images=tuple(ImageToEncode(*image) for image in images),
        loads=tuple(ImageToEncode(*image) for image in loads),
        encoder_parts=encoder_parts,
        pass_parts=pass_parts,
        page_copies=page_copies,
        started=tuple(SlotStart(*start) for start in started),
    )


def test_plans_are_plain_data_and_survive_a_round_trip():
    num_plans = 0
    for seed in range(20):
        trace = Trace(seed)
        plan_of = trace.scheduler.plan

        def plan_and_check(*arguments, plan_of=plan_of):
            plan = plan_of(*arguments)
            if plan is None:
                return None
            data = to_primitives(plan)
            sent = pickle.loads(pickle.dumps(data))
            assert from_primitives(sent) == plan
            assert hash(from_primitives(sent)) == hash(plan)
            return plan

        trace.scheduler.plan = plan_and_check
        num_plans += trace.run()
    assert num_plans > 1000


def test_a_plan_cannot_be_changed():
    scheduler = make()
    added(scheduler, ask("a", 6, [image(b"i", 1, 4)]))
    plan = scheduler.plan()
    for value, name in (
        (plan, "chunks"),
        (plan.chunks[0], "slot"),
        (plan.images[0], "slots"),
        (plan.started[0], "slot"),
    ):
        with pytest.raises(AttributeError):
            setattr(value, name, None)
