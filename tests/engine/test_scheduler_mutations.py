"""The random traces detect planted bugs. A check that never fails proves nothing."""

import pytest
from engine.traces import Trace

from saccade.engine import request_state, scheduler
from saccade.engine.pages import PagePool, page_key
from saccade.engine.scheduler import _Planner

NUM_TRACES = 250


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
        state.request.pages += prefix.pages
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
        lambda self, state, num_reserved: state.request.num_preemptions == 0 and start(self, state, num_reserved),
    )


def forget_drafts_in_flight(monkeypatch):
    def settle(state, chunk):
        if chunk.samples:
            state.request.num_pending -= 1 + len(chunk.drafts)

    monkeypatch.setattr(scheduler, "_settle_pending", settle)


def start_before_pending_tokens_are_read(monkeypatch):
    start = _Planner._start

    def start_at_once(self, state, num_reserved):
        pending, state.request.num_pending = state.request.num_pending, 0
        is_started = start(self, state, num_reserved)
        state.request.num_pending += pending
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
    update_request = scheduler.Scheduler._update_request

    def update_all(self, state, chunk, tokens):
        reason = update_request(self, state, chunk, tokens)
        if chunk.drafts and chunk.pages is state.request.pages:
            state.request.num_computed_tokens = chunk.end
        return reason

    monkeypatch.setattr(scheduler.Scheduler, "_update_request", update_all)


def register_pages_before_drafts_are_verified(monkeypatch):
    update_request = scheduler.Scheduler._update_request

    def update_early(self, state, chunk, tokens):
        if chunk.drafts and chunk.pages is state.request.pages:
            known = state.request.token_ids
            state.request.token_ids = [*known, *chunk.drafts]
            self._register_pages(state, chunk.end)
            state.request.token_ids = known
        return update_request(self, state, chunk, tokens)

    monkeypatch.setattr(scheduler.Scheduler, "_update_request", update_early)


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
]


def first_failing_seed():
    for seed in range(NUM_TRACES):
        try:
            Trace(seed).run()
        except AssertionError:
            return seed
    return None


@pytest.mark.parametrize("plant", MUTATIONS, ids=lambda plant: plant.__name__)
def test_traces_detect_the_bug_and_pass_without_it(plant, monkeypatch):
    plant(monkeypatch)
    seed = first_failing_seed()
    assert seed is not None, f"{NUM_TRACES} traces did not detect it"
    monkeypatch.undo()
    for same in range(seed + 1):
        Trace(same).run()
