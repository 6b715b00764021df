"""Which tokens of which requests a step computes. Plain Python over integers: no torch, no clock.

    plan = scheduler.plan()          what the next step does
    scheduler.update(plan, tokens)   what came of it

There is no prefill phase and no decode phase. Every request has tokens that are not computed yet; a step takes one from each that
answers, then shares the rest of its budget among prompts, in chunks. The next plan may be made before the last one's tokens are
read: a token that was sampled but not read is pending, and can be computed, because the device has it.

Whose turn it is. Requests are served by rank: arrival, plus `AGEING` arrivals per step of priority. Only finitely many requests ever
rank before a given one, and each is finite, so nobody starves even if the budget is less than one token for each.

Pages are had when needed. When none is left, the running request of highest rank loses its own and waits again; what it computed is
found in the cache later if it is still there. A request is admitted only if pages for all its known tokens are to be had beside those
that running prompts still need, and nobody is admitted past it.

`planning.py` makes one plan and says why it never gets stuck, `admission.py` what a waiting request needs, `roster.py` who holds what.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

from saccade.engine.admission import refuse_what_can_never_run
from saccade.engine.image_pool import ImagePool
from saccade.engine.pages import PagePool
from saccade.engine.planning import Draft, Planning
from saccade.engine.request import Failure, FinishReason, Request
from saccade.engine.roster import Roster
from saccade.engine.step_plan import Chunk, ImageToEncode, Limits, PlacedImage, StepPlan
from saccade.engine.ticket import AGEING, Ticket

__all__ = ["AGEING", "Chunk", "Draft", "ImageToEncode", "Limits", "PlacedImage", "Scheduler", "StepPlan"]


class Scheduler:
    """Requests from `add` to their end. No request may bring an image whose (unsalted) key is in `quarantine`."""

    def __init__(
        self,
        limits: Limits,
        pages: PagePool,
        images: ImagePool,
        draft: Draft | None = None,
        quarantine: Container[bytes] = frozenset(),
    ) -> None:
        self.limits = limits
        self.pages = pages
        self.images = images
        self._draft = draft if limits.max_draft_tokens else None
        self._quarantine = quarantine
        self._roster = Roster(limits.max_requests, pages, images)
        self._under_way: list[StepPlan] = []
        self._num_added = 0

    @property
    def has_work(self) -> bool:
        """Whether any request has not ended."""
        return len(self._roster) > 0

    @property
    def num_running(self) -> int:
        """Requests that have a row."""
        return len(self._roster.running)

    @property
    def num_waiting(self) -> int:
        """Requests that have none, preempted ones among them."""
        return len(self._roster.waiting)

    def find(self, request_id: str) -> Request | None:
        """The request of this id, unless it has ended."""
        ticket = self._roster.find_id(request_id)
        return None if ticket is None else ticket.request

    def requests(self) -> list[Request]:
        """All that have not ended, in order of arrival."""
        return [ticket.request for ticket in self._roster]

    # ---- requests come and go

    def add(self, request: Request) -> None:
        """Let a request wait for its turn. RequestError: it could not run even if it were alone."""
        assert request.id not in self._roster, f"request {request.id} is here already"
        refuse_what_can_never_run(request, self.limits, self.pages, self.images, self._quarantine)
        request.arrival = self._num_added
        self._num_added += 1
        self._roster.add(Ticket(request, self.limits.max_length))

    def cancel(self, request_id: str) -> bool:
        """End a request at once, also while a step computes it. False: there is none."""
        return self._end(self._roster.find_id(request_id), "cancelled")

    def finish(self, request_id: str) -> bool:
        """End a request whose answer is complete for a reason seen outside, such as a stop text. False: there is none."""
        return self._end(self._roster.find_id(request_id), "stop")

    def fail(self, request: Request, failure: Failure) -> bool:
        """End a request that something went wrong with. False: it has ended already."""
        has_failed = self._end(self._roster.find(request), "failed")
        if has_failed:
            request.failure = failure
        return has_failed

    def fail_image(self, plan: StepPlan, key: bytes, failure: Failure) -> list[Request]:
        """End every request that reads the image of this salted key in the step or stands inside it, and forget its features."""
        readers = [chunk.request for chunk in plan.chunks if any(placed.key == key for placed in chunk.images)]
        users = [ticket.request for ticket in self._roster.running if key in ticket.images_in_use]
        failed = [request for request in readers + users if self.fail(request, failure)]
        self.images.drop(key)
        return failed

    # ---- steps

    def plan(self, token_budget: int | None = None) -> StepPlan | None:
        """The next step. None: there is nothing to compute before a step under way is read, or at all.

        `token_budget` bounds the tokens of prompts (one is always allowed); answers go on whatever it is.
        """
        while True:
            num_running = self.num_running
            plan = Planning(self._roster, self.limits, token_budget, self._draft).make()
            if plan is not None:
                self._under_way.append(plan)
                return plan
            if self.num_running == num_running:
                break
            # Someone gave up its pages, and with them perhaps the image that others waited for.
        assert self._under_way or not self.has_work, (
            "there is work and nothing is under way, but nothing can be computed"
        )
        return None

    def update(self, plan: StepPlan, sampled: Mapping[str, Sequence[int]]) -> list[Request]:
        """Take in the tokens accepted behind each chunk that samples, by request id; returns the requests that ended by them.

        Plans are updated in the order in which they were made. Tokens of requests that have ended are ignored.
        """
        assert plan in self._under_way[:1], "steps are read in the order in which they were planned"
        del self._under_way[0]
        ended = []
        for chunk in plan.chunks:
            ticket = self._roster.find(chunk.request)
            if ticket is not None:
                reason = self._take_in(ticket, chunk, sampled[chunk.request.id] if chunk.samples else ())
                if reason is not None:
                    self._end(ticket, reason)
                    ended.append(chunk.request)
        return ended

    def abandon(self, plan: StepPlan) -> None:
        """The newest plan was not carried out: whoever had a chunk in it begins anew."""
        assert plan in self._under_way[-1:], "only the newest plan can be abandoned"
        self._under_way.pop()
        for chunk in plan.chunks:
            ticket = self._roster.find(chunk.request)
            if ticket is not None:
                _settle(ticket, chunk)
                if ticket.request.row is not None:
                    self._roster.preempt(ticket)
        for image in plan.images:
            self.images.drop(image.key)

    def forget_caches(self) -> None:
        """The weights changed: whoever runs begins anew, and nothing that the old ones computed is found again."""
        for ticket in list(self._roster.running):
            self._roster.preempt(ticket)
        self.pages.forget_all()
        self.images.forget_unused()

    # ---- integrity

    def check(self) -> None:
        """Raise AssertionError unless pages, images, rows and queues agree with what the requests hold."""
        self._roster.check()

    def is_idle_clean(self) -> bool:
        """Whether nothing is left of any request."""
        self.check()
        return not self.has_work and self.pages.num_free == self.pages.num_pages

    # ---- taking in what was sampled

    def _take_in(self, ticket: Ticket, chunk: Chunk, tokens: Sequence[int]) -> FinishReason | None:
        request = ticket.request
        _settle(ticket, chunk)
        reason = _append(ticket, tokens)
        if chunk.pages is request.pages:  # else it was preempted meanwhile, and these pages are no longer its own
            end = chunk.end
            if chunk.drafts:
                end = request.num_computed = chunk.start + len(tokens)
            if end >= (ticket.num_registered + 1) * self.pages.page_size:
                self._register(ticket, min(end, len(request.token_ids)))
        return reason

    def _register(self, ticket: Ticket, num_tokens: int) -> None:
        """Let pages full of computed and known tokens be found."""
        page_size = self.pages.page_size
        if self.pages.keeps_prefixes:
            for index in range(ticket.num_registered, num_tokens // page_size):
                self.pages.register(ticket.request.pages[index], ticket.page_key(index, page_size))
        ticket.num_registered = max(ticket.num_registered, num_tokens // page_size)

    def _end(self, ticket: Ticket | None, reason: FinishReason) -> bool:
        if ticket is None:
            return False
        assert ticket.request.finish_reason is None, f"request {ticket.request.id} ends twice"
        self._roster.remove(ticket)
        ticket.request.num_pending = 0
        ticket.request.finish_reason = reason
        return True


def _append(ticket: Ticket, tokens: Sequence[int]) -> FinishReason | None:
    """Tokens become known up to one that ends the answer; what is behind it is dropped."""
    request = ticket.request
    for token in tokens:
        request.token_ids.append(token)
        num_tokens = len(request.token_ids)
        if token in request.stop_ids and num_tokens - request.num_prompt_tokens > request.sampling.min_tokens:
            return "stop"
        if num_tokens >= ticket.limit:
            return "length"
    return None


def _settle(ticket: Ticket, chunk: Chunk) -> None:
    """What this chunk left pending is known now, or will never be."""
    if chunk.samples:
        ticket.request.num_pending -= 1 + len(chunk.drafts)
        ticket.is_guessing = False
