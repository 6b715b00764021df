"""The random traces detect planted bugs. A check that never fails proves nothing."""

import functools

import pytest
from engine.traces import Trace

from saccade.engine.core import request_state, scheduler
from saccade.engine.core.encoder_cache import EncoderCache
from saccade.engine.core.pages import PagePool, page_key
from saccade.engine.core.request_state import Queues, RequestState
from saccade.engine.core.scheduler import Scheduler, _Planner

NUM_TRACES = 250
FIRST_SEEDS = {
    "drop_the_offset_of_images": 133,
    "start_before_pending_tokens_are_read": 44,
    "reuse_the_slots_of_an_image_in_flight": 38,
    "keep_images_that_failed": 39,
    "do_not_fail_the_users_of_an_image_that_failed": 40,
}
"""Where to begin, for bugs that few traces detect."""


def skip_a_free(monkeypatch):
    free = PagePool.free
    monkeypatch.setattr(PagePool, "free", lambda pool, pages: free(pool, list(pages)[1:]))


def drop_the_offset_of_images(monkeypatch):
    monkeypatch.setattr(
        request_state,
        "page_key",
        lambda parent, token_ids, images: page_key(parent, token_ids, [(key, 0) for key, _ in images]),
    )


def drop_the_images(monkeypatch):
    monkeypatch.setattr(request_state, "page_key", lambda parent, token_ids, images: page_key(parent, token_ids, []))


def drop_the_salt(monkeypatch):
    root_key = request_state.root_key
    monkeypatch.setattr(request_state, "root_key", lambda salt: root_key(b""))


def ignore_the_patch_budget(monkeypatch):
    enter_image = _Planner._enter_image

    def enter(self, state):
        self._patches_left = 10**9
        return enter_image(self, state)

    monkeypatch.setattr(_Planner, "_enter_image", enter)


def write_into_the_shared_page(monkeypatch):
    def share(self, state, prefix):
        for page in prefix.pages:
            self._queues.pages.share(page)
        state.pages += prefix.pages
        state.num_registered = len(prefix.pages)

    monkeypatch.setattr(_Planner, "_share_prefix", share)


def copy_the_wrong_way(monkeypatch):
    share = _Planner._share_prefix

    def share_and_reverse(self, state, prefix):
        share(self, state, prefix)
        if prefix.is_copied:
            self.page_copies[-1] = self.page_copies[-1][::-1]

    monkeypatch.setattr(_Planner, "_share_prefix", share_and_reverse)


def never_resume_preempted_requests(monkeypatch):
    start = _Planner._start
    monkeypatch.setattr(
        _Planner,
        "_start",
        lambda self, state, num_reserved: state.num_preemptions == 0 and start(self, state, num_reserved),
    )


def forget_drafts_in_flight(monkeypatch):
    def settle(state, chunk):
        if chunk.samples:
            state.num_pending -= 1 + len(chunk.drafts)

    monkeypatch.setattr(scheduler, "_settle_pending", settle)


def start_before_pending_tokens_are_read(monkeypatch):
    start = _Planner._start

    def start_at_once(self, state, num_reserved):
        pending, state.num_pending = state.num_pending, 0
        is_started = start(self, state, num_reserved)
        state.num_pending += pending
        return is_started

    monkeypatch.setattr(_Planner, "_start", start_at_once)


def release_images_within_the_plan(monkeypatch):
    add_chunk = _Planner._add_chunk

    def add_and_release(self, *args):
        add_chunk(self, *args)
        for key in self._images_to_release:
            self._queues.encoder_cache.release(key)
        self._images_to_release.clear()

    monkeypatch.setattr(_Planner, "_add_chunk", add_and_release)


def count_rejected_drafts_as_computed(monkeypatch):
    update_request = Scheduler._update_request

    def update_all(self, state, chunk, given, *, is_current):
        output = update_request(self, state, chunk, given, is_current=is_current)
        if chunk.drafts and is_current:
            state.num_computed_tokens = chunk.end
        return output

    monkeypatch.setattr(Scheduler, "_update_request", update_all)


def register_pages_before_drafts_are_verified(monkeypatch):
    update_request = Scheduler._update_request

    def update_early(self, state, chunk, given, *, is_current):
        if chunk.drafts and is_current:
            known = state.token_ids
            state.token_ids = [*known, *chunk.drafts]
            self._register_pages(state, chunk.end)
            state.token_ids = known
        return update_request(self, state, chunk, given, is_current=is_current)

    monkeypatch.setattr(Scheduler, "_update_request", update_early)


def apply_results_of_preempted_requests(monkeypatch):
    update_request = Scheduler._update_request

    def update_always(self, state, chunk, given, *, is_current):
        return update_request(self, state, chunk, given, is_current=True)

    monkeypatch.setattr(Scheduler, "_update_request", update_always)


def schedule_drafting_requests_with_pending_tokens(monkeypatch):
    monkeypatch.setattr(_Planner, "_num_uncomputed", lambda self, state: state.num_uncomputed)


def schedule_requests_with_drafts_in_flight(monkeypatch):
    def num_uncomputed(state):
        return 0 if state.num_tokens >= state.token_limit else state.num_tokens - state.num_computed_tokens

    monkeypatch.setattr(RequestState, "num_uncomputed", property(num_uncomputed))
    monkeypatch.setattr(_Planner, "_num_uncomputed", lambda self, state: state.num_uncomputed)


def read_images_before_they_are_encoded(monkeypatch):
    monkeypatch.setattr(_Planner, "_can_read", lambda self, key: True)


def report_images_ready_when_their_encoding_starts(monkeypatch):
    acquire = EncoderCache.acquire

    def acquire_ready(self, key, num_tokens):
        is_new = acquire(self, key, num_tokens)
        self._entries[key].is_ready = True
        return is_new

    monkeypatch.setattr(EncoderCache, "acquire", acquire_ready)
    monkeypatch.setattr(EncoderCache, "set_ready", lambda self, key: None)


def reuse_the_slots_of_an_image_in_flight(monkeypatch):
    """Once it has no user, although the encoder still writes to them."""

    def release(self, key):
        entry = self._entries[key]
        entry.num_users -= 1
        if entry.num_users == 0:
            self._keep_unused(key, entry)

    def set_ready(self, key):
        if key in self._entries:
            self._entries[key].is_ready = True

    monkeypatch.setattr(EncoderCache, "release", release)
    monkeypatch.setattr(EncoderCache, "set_ready", set_ready)
    monkeypatch.setattr(EncoderCache, "check", lambda self, users: None)


def keep_images_that_failed(monkeypatch):
    evict = EncoderCache.evict

    def evict_if_ready(self, key):
        if key in self._entries and not self._entries[key].is_ready:
            self.set_ready(key)
        else:
            evict(self, key)

    monkeypatch.setattr(EncoderCache, "evict", evict_if_ready)


def do_not_fail_the_users_of_an_image_that_failed(monkeypatch):
    end = Scheduler._end

    def end_others(self, state, reason, failure=None):
        if failure is None or failure.stage != "encoding" or not state.images_in_use:
            return end(self, state, reason, failure)
        for key in state.images_in_use:
            self.encoder_cache.release(key)
        state.first_image = state.next_image
        return scheduler.RequestOutput(request_id=state.request.id)

    monkeypatch.setattr(Scheduler, "_end", end_others)


def begin_a_pass_while_another_one_is_in_progress(monkeypatch):
    planner = Scheduler._planner

    def planner_of_an_idle_encoder(self, *args):
        in_progress, self._pass = self._pass, None
        made = planner(self, *args)
        self._pass = in_progress
        return made

    monkeypatch.setattr(Scheduler, "_planner", planner_of_an_idle_encoder)


def run_all_parts_of_a_pass_at_once(monkeypatch):
    advance_pass = Scheduler._advance_pass
    monkeypatch.setattr(Scheduler, "_advance_pass", lambda self, num_parts: advance_pass(self, num_parts and 4))


def read_a_pass_in_progress(monkeypatch):
    run = _Planner.run

    def run_unblocked(self):
        self._blocked.clear()
        run(self)

    monkeypatch.setattr(_Planner, "run", run_unblocked)


def forget_the_pass_in_progress(monkeypatch):
    finish_encoding = Scheduler.finish_encoding

    def finish(self, results):
        self._pass = None
        return finish_encoding(self, results)

    monkeypatch.setattr(Scheduler, "finish_encoding", finish)


def keep_a_pass_in_progress_that_has_failed(monkeypatch):
    finish_encoding = Scheduler.finish_encoding

    def finish(self, results):
        in_progress = self._pass
        outputs = finish_encoding(self, results)
        self._pass = in_progress
        return outputs

    monkeypatch.setattr(Scheduler, "finish_encoding", finish)


def let_others_wait_for_a_large_image(monkeypatch):
    number = Scheduler._number
    monkeypatch.setattr(Scheduler, "_number", lambda self, *args, is_beside: number(self, *args, is_beside=False))


def encode_beside_a_large_image(monkeypatch):
    plan = Scheduler.plan

    def plan_without_it(self, *args):
        self._beside = None
        return plan(self, *args)

    monkeypatch.setattr(Scheduler, "plan", plan_without_it)


def do_not_send_the_pages_of_later_chunks(monkeypatch):
    add_chunk = _Planner._add_chunk

    def add(self, state, *args):
        if state.num_computed_tokens > 0 and state.num_pages_sent:
            state.num_pages_sent = len(state.pages)
        add_chunk(self, state, *args)

    monkeypatch.setattr(_Planner, "_add_chunk", add)


def send_only_new_pages_after_a_preemption(monkeypatch):
    release = Queues._release

    def release_all_but_the_count(self, state):
        num_pages_sent = state.num_pages_sent
        release(self, state)
        state.num_pages_sent = num_pages_sent

    monkeypatch.setattr(Queues, "_release", release_all_but_the_count)


def reuse_a_slot_before_its_step_is_sampled(monkeypatch):
    plan_encodings = Scheduler.plan_encodings
    monkeypatch.setattr(Scheduler, "plan_encodings", lambda self, patches, unsampled: plan_encodings(self, patches))


def lose_unsent_tokens(monkeypatch):
    output = scheduler._output

    def output_of_a_step(state, *args):
        state.num_sent = max(state.num_sent, len(state.token_ids) - 1)
        return output(state, *args)

    monkeypatch.setattr(scheduler, "_output", output_of_a_step)


def forget_the_end_of_plain_tokens(monkeypatch):
    append_plain = scheduler._append_plain

    def append_any(state, given):
        state.num_plain_tokens += 1
        return append_plain(state, given)

    monkeypatch.setattr(scheduler, "_append_plain", append_any)


def start_without_the_output(monkeypatch):
    start = _Planner._start

    def start_with_the_prompt(self, state, num_reserved):
        is_started = start(self, state, num_reserved)
        if is_started:
            self.started[-1] = self.started[-1]._replace(output_token_ids=())
        return is_started

    monkeypatch.setattr(_Planner, "_start", start_with_the_prompt)


MUTATIONS = [
    skip_a_free,
    drop_the_offset_of_images,
    drop_the_images,
    drop_the_salt,
    ignore_the_patch_budget,
    write_into_the_shared_page,
    copy_the_wrong_way,
    never_resume_preempted_requests,
    forget_drafts_in_flight,
    start_before_pending_tokens_are_read,
    release_images_within_the_plan,
    count_rejected_drafts_as_computed,
    register_pages_before_drafts_are_verified,
    apply_results_of_preempted_requests,
    schedule_drafting_requests_with_pending_tokens,
    schedule_requests_with_drafts_in_flight,
    read_images_before_they_are_encoded,
    report_images_ready_when_their_encoding_starts,
    reuse_the_slots_of_an_image_in_flight,
    keep_images_that_failed,
    do_not_fail_the_users_of_an_image_that_failed,
    begin_a_pass_while_another_one_is_in_progress,
    run_all_parts_of_a_pass_at_once,
    read_a_pass_in_progress,
    forget_the_pass_in_progress,
    keep_a_pass_in_progress_that_has_failed,
    let_others_wait_for_a_large_image,
    encode_beside_a_large_image,
    do_not_send_the_pages_of_later_chunks,
    send_only_new_pages_after_a_preemption,
    start_without_the_output,
    reuse_a_slot_before_its_step_is_sampled,
    lose_unsent_tokens,
    forget_the_end_of_plain_tokens,
]


def first_failing_seed(seeds):
    for seed in seeds:
        try:
            Trace(seed).run()
        except (AssertionError, IndexError):  # by a check, or in the scheduler itself
            return seed
    return None


@functools.cache
def passes(seed):
    """Without a bug. Bugs have many seeds in common."""
    Trace(seed).run()
    return True


@pytest.mark.parametrize("plant", MUTATIONS, ids=lambda plant: plant.__name__)
def test_traces_detect_the_bug_and_pass_without_it(plant, monkeypatch):
    plant(monkeypatch)
    first = FIRST_SEEDS.get(plant.__name__, 0)
    seeds = [*range(first, NUM_TRACES), *range(first)]
    seed = first_failing_seed(seeds)
    assert seed is not None, f"{NUM_TRACES} traces did not detect it"
    monkeypatch.undo()
    assert all(map(passes, seeds[: seeds.index(seed) + 1]))
