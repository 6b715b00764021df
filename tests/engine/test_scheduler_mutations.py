"""The random traces notice planted bugs. A check that never fails proves nothing."""

import pytest
from engine.traces import Trace

from saccade.engine import scheduler, ticket
from saccade.engine.pages import PagePool, page_key
from saccade.engine.planning import Planning

NUM_TRACES = 250


def skip_a_free(monkeypatch):
    free = PagePool.free
    monkeypatch.setattr(PagePool, "free", lambda pool, pages: free(pool, list(pages)[1:]))


def drop_the_offset_of_images(monkeypatch):
    monkeypatch.setattr(
        ticket,
        "page_key",
        lambda parent, token_ids, images: page_key(parent, token_ids, [(key, 0) for key, _ in images]),
    )


def drop_the_images(monkeypatch):
    monkeypatch.setattr(ticket, "page_key", lambda parent, token_ids, images: page_key(parent, token_ids, []))


def drop_the_salt(monkeypatch):
    root_key = ticket.root_key
    monkeypatch.setattr(ticket, "root_key", lambda salt: root_key(b""))


def ignore_the_patch_budget(monkeypatch):
    enter_image = Planning._enter_image

    def enter(self, ticket):
        self._patches_left = 10**9
        return enter_image(self, ticket)

    monkeypatch.setattr(Planning, "_enter_image", enter)


def write_into_the_shared_page(monkeypatch):
    def share(self, ticket, prefix):
        for page in prefix.pages:
            self._roster.pages.share(page)
        ticket.request.pages += prefix.pages
        ticket.num_registered = len(prefix.pages)

    monkeypatch.setattr(Planning, "_share", share)


def copy_the_wrong_way(monkeypatch):
    share = Planning._share

    def share_and_turn(self, ticket, prefix):
        share(self, ticket, prefix)
        if prefix.is_copied:
            self.copies[-1] = self.copies[-1][::-1]

    monkeypatch.setattr(Planning, "_share", share_and_turn)


def forget_who_was_preempted(monkeypatch):
    admit = Planning._admit
    monkeypatch.setattr(
        Planning,
        "_admit",
        lambda self, ticket, promised: ticket.request.num_preemptions == 0 and admit(self, ticket, promised),
    )


def forget_who_waits_for_its_drafts(monkeypatch):
    def settle(ticket, chunk):
        if chunk.samples:
            ticket.request.num_pending -= 1 + len(chunk.drafts)

    monkeypatch.setattr(scheduler, "_settle", settle)


def admit_before_pending_tokens_are_read(monkeypatch):
    admit = Planning._admit

    def admit_at_once(self, ticket, promised):
        pending, ticket.request.num_pending = ticket.request.num_pending, 0
        is_admitted = admit(self, ticket, promised)
        ticket.request.num_pending += pending
        return is_admitted

    monkeypatch.setattr(Planning, "_admit", admit_at_once)


def release_images_within_the_plan(monkeypatch):
    add_chunk = Planning._add_chunk

    def add_and_release(self, *args):
        add_chunk(self, *args)
        for key in self._images_to_release:
            self._roster.images.release(key)
        self._images_to_release.clear()

    monkeypatch.setattr(Planning, "_add_chunk", add_and_release)


def count_rejected_drafts_as_computed(monkeypatch):
    take_in = scheduler.Scheduler._take_in

    def take_in_all(self, ticket, chunk, tokens):
        reason = take_in(self, ticket, chunk, tokens)
        if chunk.drafts and chunk.pages is ticket.request.pages:
            ticket.request.num_computed = chunk.end
        return reason

    monkeypatch.setattr(scheduler.Scheduler, "_take_in", take_in_all)


def register_pages_before_drafts_are_judged(monkeypatch):
    take_in = scheduler.Scheduler._take_in

    def take_in_early(self, ticket, chunk, tokens):
        if chunk.drafts and chunk.pages is ticket.request.pages:
            known = ticket.request.token_ids
            ticket.request.token_ids = [*known, *chunk.drafts]
            self._register(ticket, chunk.end)
            ticket.request.token_ids = known
        return take_in(self, ticket, chunk, tokens)

    monkeypatch.setattr(scheduler.Scheduler, "_take_in", take_in_early)


MUTATIONS = [
    skip_a_free,
    drop_the_offset_of_images,
    drop_the_images,
    drop_the_salt,
    ignore_the_patch_budget,
    write_into_the_shared_page,
    copy_the_wrong_way,
    forget_who_was_preempted,
    forget_who_waits_for_its_drafts,
    admit_before_pending_tokens_are_read,
    release_images_within_the_plan,
    count_rejected_drafts_as_computed,
    register_pages_before_drafts_are_judged,
]


def first_failing_seed():
    for seed in range(NUM_TRACES):
        try:
            Trace(seed).run()
        except AssertionError:
            return seed
    return None


@pytest.mark.parametrize("plant", MUTATIONS, ids=lambda plant: plant.__name__)
def test_traces_notice_the_bug_and_pass_without_it(plant, monkeypatch):
    plant(monkeypatch)
    seed = first_failing_seed()
    assert seed is not None, f"{NUM_TRACES} traces did not notice it"
    monkeypatch.undo()
    for same in range(seed + 1):
        Trace(same).run()
