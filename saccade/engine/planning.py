"""How one plan is made: running requests first, by rank, then waiting ones.

Why it never gets stuck. `Scheduler.add` accepts only what can run alone. The running request of lowest rank can always have pages,
because all others yield theirs to it. An image is in use only by requests that stand inside it: it is taken when a chunk enters it
and released when one leaves it. So who uses an image needs nothing but budget and pages to get out of it, and does not wait for
another image meanwhile. When the pool has no room for someone, no request of higher rank enters an image in that step, not even
one that is there already: else a popular image could stay in use for ever.

Order on the device. A step copies pages, then encodes images, then computes; steps run one after another. So what a plan gives back may
be written by the next plan, even while the step is under way, but not by the plan itself: pages copied from and images left
behind are given back when the plan is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from saccade.engine.admission import Prefix, fit_prefix
from saccade.engine.request import Request
from saccade.engine.roster import Roster
from saccade.engine.step_plan import Chunk, ImageToEncode, Limits, PlacedImage, StepPlan
from saccade.engine.ticket import Ticket

Draft = Callable[[Request, int], Sequence[int]]
"""Guesses up to so many tokens that go on behind a request's known ones."""


class Planning:
    """One plan while it is made: what is in it, and what is left of the step's budgets."""

    def __init__(self, roster: Roster, limits: Limits, token_budget: int | None, draft: Draft | None) -> None:
        self.chunks: list[Chunk] = []
        self.images: list[ImageToEncode] = []
        self.copies: list[tuple[int, int]] = []
        self.began: list[Request] = []
        self._roster = roster
        self._draft = draft
        self._max_draft_tokens = limits.max_draft_tokens
        self._tokens_left = limits.max_step_tokens
        self._prompt_tokens_left = limits.max_step_tokens if token_budget is None else max(1, token_budget)
        self._patches_left = limits.max_step_patches
        self._num_answering = 0  # requests still to be served that need one token; it is set aside for them
        self._lacks_room = False  # an image found no room in the pool
        self._pages_to_free: list[int] = []
        self._images_to_release: list[bytes] = []

    def make(self) -> StepPlan | None:
        """The plan, unless it is empty. Nobody is admitted while those who run are short of pages."""
        num_running = len(self._roster.running)
        self._serve_running()
        if len(self._roster.running) == num_running:
            self._admit_waiting()
        self._give_back()
        if not self.chunks:
            return None
        preempted, self._roster.preempted = self._roster.preempted, []
        return StepPlan(self.chunks, self.images, self.copies, self.began, preempted)

    # ---- those who run

    def _serve_running(self) -> None:
        running = self._roster.running
        all_missing = [ticket.num_missing for ticket in running]
        self._num_answering = all_missing.count(1)
        for index, num_missing in enumerate(all_missing):
            if index >= len(running):  # who is preempted stands behind the one being served, or is that one
                break
            if num_missing:
                self._serve(running[index], num_missing)

    def _serve(self, ticket: Ticket, num_missing: int) -> None:
        """Give a running request its share of the step; for want of pages it may be preempted instead."""
        budget = self._tokens_left
        if num_missing == 1:
            self._num_answering -= 1
        else:
            budget = min(num_missing, budget - self._num_answering, self._prompt_tokens_left)
        if budget <= 0:
            return
        start, num_images = ticket.request.num_computed, len(self.images)
        end = self._enter_images(ticket, start + min(num_missing, budget))
        if end == start:
            return
        if not self._get_pages(ticket, end):
            self._undo_images(num_images)
        elif num_missing == 1:
            self._add_chunk(ticket, end, self._guess(ticket, end) if self._draft else ())
        else:
            self._prompt_tokens_left -= end - start
            self._add_chunk(ticket, end)

    def _get_pages(self, ticket: Ticket, end: int) -> bool:
        """Pages up to token `end`, from the youngest running requests if need be. False: that was itself, and it waits now."""
        request, pool = ticket.request, self._roster.pages
        num_pages = pool.num_pages_for(end) - len(request.pages)
        if num_pages <= 0:
            return True
        while not pool.can_allocate(num_pages):
            youngest = self._roster.running[-1]
            if youngest is not ticket and youngest.num_missing == 1:
                self._num_answering -= 1
            self._roster.preempt(youngest)
            if youngest is ticket:
                return False
        request.pages += pool.allocate(num_pages)
        return True

    def _guess(self, ticket: Ticket, end: int) -> tuple[int, ...]:
        """Drafts behind a known last token, as far as the budget, the request's limit and free pages go."""
        request, pool = ticket.request, self._roster.pages
        most = min(self._max_draft_tokens, ticket.limit - end - 1, self._tokens_left - self._num_answering - 1)
        if self._draft is None or request.num_pending or most <= 0:
            return ()
        drafts = tuple(self._draft(request, most))[:most]
        num_pages = pool.num_pages_for(end + len(drafts)) - len(request.pages)
        if num_pages > 0 and pool.can_allocate(num_pages):
            request.pages += pool.allocate(num_pages)
        return drafts[: len(request.pages) * pool.page_size - end]

    # ---- those who wait

    def _admit_waiting(self) -> None:
        roster = self._roster
        if not roster.waiting or not roster.has_row or self._budget <= 0:
            return
        num_promised = sum(self._num_lacking(ticket) for ticket in roster.running)
        while roster.waiting and roster.has_row and self._budget > 0:
            ticket = roster.waiting[0]
            if not self._admit(ticket, num_promised):
                break  # nobody passes it
            num_promised += self._num_lacking(ticket)

    @property
    def _budget(self) -> int:
        return min(self._tokens_left, self._prompt_tokens_left)

    def _num_lacking(self, ticket: Ticket) -> int:
        """Pages that the tokens it has will still take."""
        request = ticket.request
        num_tokens = min(request.num_tokens, ticket.limit - 1)  # its last token is never computed
        return max(0, self._roster.pages.num_pages_for(num_tokens) - len(request.pages))

    def _admit(self, ticket: Ticket, num_promised: int) -> bool:
        """Let a request run, if it can compute at least one token in this step."""
        request = ticket.request
        if request.num_pending:  # it was preempted, and goes on when all its tokens are known
            return False
        prefix = fit_prefix(ticket, self._roster.pages, num_promised)
        if prefix is None:
            return False
        ticket.start_at(prefix.num_tokens)
        end = self._enter_images(ticket, min(len(request.token_ids), prefix.num_tokens + self._budget))
        if end == prefix.num_tokens:
            ticket.start_at(0)
            return False
        self._roster.admit(ticket)
        self._begin(ticket, prefix, end)
        return True

    def _begin(self, ticket: Ticket, prefix: Prefix, end: int) -> None:
        request, pool = ticket.request, self._roster.pages
        if request.num_preemptions == 0:
            request.num_cached = prefix.num_tokens
        self._share(ticket, prefix)
        request.pages += pool.allocate(pool.num_pages_for(end) - len(request.pages))
        self.began.append(request)
        self._prompt_tokens_left -= end - prefix.num_tokens
        self._add_chunk(ticket, end)

    def _share(self, ticket: Ticket, prefix: Prefix) -> None:
        """Own the pages of a prefix, and a copy of the last one if it will be written to."""
        pool, pages = self._roster.pages, ticket.request.pages
        for page in prefix.pages:
            pool.share(page)
        pages += prefix.pages
        if prefix.is_copied:
            [copy] = pool.allocate(1)
            self.copies.append((pages[-1], copy))
            self._pages_to_free.append(pages[-1])
            pages[-1] = copy
        ticket.num_registered = len(pages) - prefix.is_copied

    # ---- images

    def _enter_images(self, ticket: Ticket, end: int) -> int:
        """Use the images with tokens before `end`. Returns where the chunk ends: before the first image that cannot be had now."""
        images = ticket.request.images
        while ticket.next_image < len(images) and images[ticket.next_image].start < end:
            if not self._enter_image(ticket):
                return max(images[ticket.next_image].start, ticket.request.num_computed)
        return end

    def _enter_image(self, ticket: Ticket) -> bool:
        pool = self._roster.images
        image, key = ticket.request.images[ticket.next_image], ticket.image_keys[ticket.next_image]
        is_new = not pool.holds(key)
        if is_new and self.images and image.num_patches > self._patches_left:
            return False
        if self._lacks_room or not pool.can_take(key, image.num_tokens):
            self._lacks_room = True
            return False
        pool.take(key, image.num_tokens)
        ticket.next_image += 1
        if is_new:
            self._patches_left -= image.num_patches
            self.images.append(ImageToEncode(key, image, ticket.request, pool.places(key)))
        return True

    def _placed(self, ticket: Ticket) -> tuple[PlacedImage, ...]:
        """The images in use, each of which has a token in the chunk: it was entered and is not left yet."""
        in_use = range(ticket.first_image, ticket.next_image)
        keys, images, pool = ticket.image_keys, ticket.request.images, self._roster.images
        return tuple([PlacedImage(keys[index], images[index], pool.places(keys[index])) for index in in_use])

    def _undo_images(self, num_images: int) -> None:
        """All but so many images will not be encoded: who entered the others was preempted in the same breath."""
        for planned in self.images[num_images:]:
            self._roster.images.drop(planned.key)
            self._patches_left += planned.image.num_patches
        del self.images[num_images:]

    # ---- what comes of it

    def _add_chunk(self, ticket: Ticket, end: int, drafts: tuple[int, ...] = ()) -> None:
        request = ticket.request
        start, num_known, row = request.num_computed, len(request.token_ids), request.row
        assert row is not None, f"request {request.id} computes without a row"
        samples = end == num_known + request.num_pending
        num_tokens = end - start + len(drafts)
        images = self._placed(ticket) if ticket.first_image < ticket.next_image else ()
        self.chunks.append(
            Chunk(request, row, start, num_tokens, images, request.pages, start >= num_known, drafts, samples)
        )
        self._tokens_left -= num_tokens
        request.num_computed = start + num_tokens
        if samples:
            request.num_pending += 1 + len(drafts)
            ticket.is_guessing = bool(drafts)
        while ticket.first_image < ticket.next_image and request.images[ticket.first_image].end <= end:
            self._images_to_release.append(ticket.image_keys[ticket.first_image])
            ticket.first_image += 1

    def _give_back(self) -> None:
        """What this step reads for the last time may be written by the next one."""
        self._roster.pages.free(self._pages_to_free)
        for key in self._images_to_release:
            self._roster.images.release(key)
