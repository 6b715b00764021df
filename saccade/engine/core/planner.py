"""Make the plan of one step: running requests first, then waiting ones, within the step's budgets.

Plain Python: no torch, no clock.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import NamedTuple, Protocol

from saccade.engine.core.image_policy import NO_IMAGES, EncoderTurn, ImagePolicy
from saccade.engine.core.pages import PagePool
from saccade.engine.core.request_state import Queues, RequestState
from saccade.engine.core.step import Chunk, SlotStart, StepPlan


class Drafter(Protocol):
    """Proposes draft tokens; implemented by `prompt_lookup.py`."""

    def is_drafting(self, state: RequestState) -> bool:
        """Whether the request drafts, so that its next chunk has to wait until all its tokens are known."""

    def propose(self, state: RequestState, num_tokens: int) -> Sequence[int]:
        """Propose up to `num_tokens` draft tokens after the known ones."""


class StepLimits(NamedTuple):
    """Budgets of one step."""

    num_tokens: int
    num_prompt_tokens: int
    num_chunks: int
    """Requests with more than one token in the step."""
    num_drafts: int
    """Draft tokens per request."""


class PlannedChunk(NamedTuple):
    """Scheduler state of a chunk until its result is read."""

    state: RequestState
    num_preemptions: int
    """Preemptions of the request when the chunk was planned. After another preemption the request has other pages."""


class StepPlanner:
    """Builds the plan of one step and keeps track of the step's remaining budgets."""

    def __init__(
        self,
        queues: Queues,
        images: ImagePolicy,
        limits: StepLimits,
        drafter: Drafter | None,
        deferred: Container[str],
    ) -> None:
        self.planned: list[PlannedChunk] = []
        self._queues, self._images, self._pages = queues, images, queues.pages
        self._drafter, self._deferred = drafter, deferred
        self._tokens_left, self._prompt_tokens_left, self._chunks_left, self._max_drafts = limits
        self._num_decoding = 0
        """Requests not scheduled yet that need one token and no image. One token of the budget is reserved for each."""
        self._chunks: list[Chunk] = []
        self._page_copies: list[tuple[int, int]] = []
        self._started: list[SlotStart] = []
        self._pages_to_free: list[int] = []

    def make(self, number: int, turn: EncoderTurn) -> StepPlan:
        """Make the plan. No request starts if a running one had to be preempted."""
        num_running = len(self._queues.running)
        with_images = [state.has_images_left for state in self._queues.running]
        uses_encoder = any(with_images) or len(self._queues.waiting) > 0 or self._images.current_pass is not None
        if uses_encoder:
            self._images.begin_plan(number, turn)
        self._schedule_running(with_images)
        if len(self._queues.running) == num_running:
            self._start_waiting()
        # Pages that this step copies from are freed now, so that only later steps can write to them.
        if self._pages_to_free:
            self._pages.free(self._pages_to_free)
        images = self._images.end_plan() if uses_encoder else NO_IMAGES
        return StepPlan(
            number=number,
            chunks=tuple(self._chunks),
            images=images.images,
            loads=images.loads,
            encoder_parts=images.num_parts,
            pass_parts=images.pass_parts,
            page_copies=tuple(self._page_copies),
            started=tuple(self._started),
        )

    # ---- running requests

    def _schedule_running(self, with_images: Sequence[bool]) -> None:
        running = self._queues.running
        if self._drafter is None and not self._deferred:
            all_uncomputed = [state.num_uncomputed for state in running]
        else:
            all_uncomputed = [self._num_uncomputed(state) for state in running]
        self._num_decoding = list(zip(all_uncomputed, with_images, strict=True)).count((1, False))
        for index, num_uncomputed in enumerate(all_uncomputed):
            if index >= len(running):  # only this request or later ones can have been preempted
                break
            if num_uncomputed:
                self._schedule(running[index], num_uncomputed)

    def _num_uncomputed(self, state: RequestState) -> int:
        """Tokens of a running request that can be computed now.

        A request that drafts or is deferred has none until all its tokens are known.
        """
        if state.num_pending and (
            (self._drafter is not None and self._drafter.is_drafting(state)) or state.request.id in self._deferred
        ):
            return 0
        return state.num_uncomputed

    def _schedule(self, state: RequestState, num_uncomputed: int) -> None:
        """Schedule a chunk of a running request, or preempt it if there are no pages."""
        is_one = num_uncomputed == 1 and not state.has_images_left
        if is_one:
            self._num_decoding -= 1
            budget = self._tokens_left
        else:
            for_prompt = self._prompt_budget - self._tokens_for_earlier(state)
            budget = min(num_uncomputed, self._tokens_left - self._num_decoding, for_prompt)
        start = state.num_computed_tokens
        if budget <= 0:
            if self._images.has_room:  # encode its images even without a token budget
                self._images.enter(state, start)
            return
        end = start + min(num_uncomputed, budget)
        if end > state.num_ready_tokens and (end := self._acquire(state, end)) == start:
            return
        if not is_one:
            self._add_prompt_chunk(state, end)
        elif self._drafter is None:
            self._add_chunk(state, end)
        else:
            self._add_chunk(state, end, self._propose_drafts(state, end))

    def _tokens_for_earlier(self, state: RequestState) -> int:
        """Prompt tokens that a running request leaves to waiting requests before it in order: half of them at most.

        Without them a long prompt would keep all requests waiting until it is computed. Half remains even if none of
        them can start.
        """
        if not self._queues.has_free_slot:
            return 0
        half, num_tokens = self._prompt_budget // 2, 0
        for waiting in self._queues.waiting:
            if waiting.order > state.order or num_tokens >= half:
                break
            num_tokens += len(waiting.token_ids)
        return min(num_tokens, half)

    def _acquire(self, state: RequestState, end: int) -> int:
        """Acquire images and pages for a chunk. Returns its end, which is its start if nothing can be computed."""
        start, images = state.num_computed_tokens, self._images.planned
        end = self._images.enter(state, end)
        if end > start and not self._allocate_pages(state, end):
            self._images.undo(images)
            return start
        return end

    @property
    def _prompt_budget(self) -> int:
        return min(self._tokens_left, self._prompt_tokens_left) if self._chunks_left else 0

    def _allocate_pages(self, state: RequestState, end: int) -> bool:
        """Allocate pages up to token `end`, preempting the last running requests if needed.

        False: the request was preempted itself.
        """
        num_pages = self._pages.num_pages_for(end) - len(state.pages)
        if num_pages <= 0:
            return True
        while not self._pages.can_allocate(num_pages):
            last = self._queues.running[-1]
            if last is not state and self._num_uncomputed(last) == 1 and not last.has_images_left:
                self._num_decoding -= 1
            self._queues.preempt(last)
            if last is state:
                return False
        state.pages += self._pages.allocate(num_pages)
        return True

    def _propose_drafts(self, state: RequestState, end: int) -> tuple[int, ...]:
        """Propose drafts after a known last token, within the budget, the request's token limit and the free pages."""
        pool = self._pages
        most = min(self._max_drafts, state.token_limit - end - 1, self._tokens_left - self._num_decoding - 1)
        if self._drafter is None or state.num_pending or most <= 0 or not self._chunks_left:
            return ()
        drafts = tuple(self._drafter.propose(state, most))[:most]
        num_pages = pool.num_pages_for(end + len(drafts)) - len(state.pages)
        if num_pages > 0 and pool.can_allocate(num_pages):
            state.pages += pool.allocate(num_pages)
        return drafts[: len(state.pages) * pool.page_size - end]

    # ---- waiting requests

    def _start_waiting(self) -> None:
        queues = self._queues
        if not queues.waiting or not queues.has_free_slot or not self._can_serve(queues.waiting[0]):
            return
        num_reserved = sum(self._num_pages_needed(state) for state in queues.running)
        while queues.waiting and queues.has_free_slot and self._can_serve(queues.waiting[0]):
            state = queues.waiting[0]
            if not self._start(state, num_reserved):
                break  # no later request starts before it
            num_reserved += self._num_pages_needed(state)

    def _can_serve(self, state: RequestState) -> bool:
        """Whether budgets remain for a waiting request: tokens, or patches if it has images."""
        return self._prompt_budget > 0 or (self._images.has_room and bool(state.image_keys))

    def _num_pages_needed(self, state: RequestState) -> int:
        """Pages that the request's current tokens still need."""
        num_tokens = min(state.num_tokens, state.token_limit - 1)  # its last token is never computed
        return max(0, self._pages.num_pages_for(num_tokens) - len(state.pages))

    def _start(self, state: RequestState, num_reserved: int) -> bool:
        """Start a request if there are pages for it. If it has to wait for its images, later requests may start."""
        request = state.request
        if state.num_pending:  # it was preempted; it resumes once all its tokens are known
            return False
        prefix = self._find_prefix_that_fits(state, num_reserved)
        if prefix is None:
            return False
        state.start_at(prefix.num_tokens)
        end = self._images.enter(state, min(len(state.token_ids), prefix.num_tokens + self._prompt_budget))
        self._queues.start(state)
        assert state.slot is not None, "a started request has a slot"
        if state.num_preemptions == 0:
            state.num_cached_tokens = min(prefix.num_tokens, state.num_prompt_tokens)
        self._started.append(SlotStart(request.id, state.slot, tuple(state.token_ids[request.num_prompt_tokens :])))
        self._share_prefix(state, prefix)
        if end > prefix.num_tokens:
            state.pages += self._pages.allocate(self._pages.num_pages_for(end) - len(state.pages))
            self._add_prompt_chunk(state, end)
        return True

    def _find_prefix_that_fits(self, state: RequestState, num_reserved: int) -> _Prefix | None:
        """The cached prefix to start with, or None if there are too few pages.

        All known tokens need pages in addition to those reserved for others. Copying the last page needs one page more
        than the request will own. If that page is missing, the last page is recomputed instead: a request that needs
        the whole pool would otherwise wait forever for its own cached prefix to be evicted.
        """
        prefix = _find_prefix(state, self._pages)
        if self._fits(state, prefix, num_reserved):
            return prefix
        if prefix.is_copied:
            shorter = prefix.without_copy(self._pages.page_size)
            if self._fits(state, shorter, num_reserved):
                return shorter
        return None

    def _fits(self, state: RequestState, prefix: _Prefix, num_reserved: int) -> bool:
        pool = self._pages
        num_shared = sum(pool.num_owners(page) == 0 for page in prefix.pages)  # they count as free
        num_new = pool.num_pages_for(len(state.token_ids)) - len(prefix.pages) + prefix.is_copied
        return pool.num_free - num_shared >= num_new + num_reserved

    def _share_prefix(self, state: RequestState, prefix: _Prefix) -> None:
        """Add the request as an owner of a prefix's pages; copy the last page if the request will write to it."""
        pages = state.pages
        for page in prefix.pages:
            self._pages.share(page)
        pages += prefix.pages
        if prefix.is_copied:
            [copy] = self._pages.allocate(1)
            self._page_copies.append((pages[-1], copy))
            self._pages_to_free.append(pages[-1])
            pages[-1] = copy
        state.num_registered = len(pages) - prefix.is_copied

    # ---- chunks

    def _add_prompt_chunk(self, state: RequestState, end: int) -> None:
        self._prompt_tokens_left -= end - state.num_computed_tokens
        self._chunks_left -= 1
        self._add_chunk(state, end)

    def _add_chunk(self, state: RequestState, end: int, drafts: tuple[int, ...] = ()) -> None:
        start, num_tokens = state.num_computed_tokens, end - state.num_computed_tokens + len(drafts)
        assert state.slot is not None, f"request {state.request.id} is scheduled without a slot"
        samples = end == len(state.token_ids) + state.num_pending
        self._chunks.append(
            Chunk(
                state.request.id,
                state.slot,
                start,
                num_tokens,
                tuple(state.pages[state.num_pages_sent :]),
                self._images.features(state, end) if state.first_image < state.next_image else (),
                start >= state.num_start_tokens,
                drafts,
                samples,
            )
        )
        self.planned.append(PlannedChunk(state, state.num_preemptions))
        state.num_pages_sent = len(state.pages)
        self._tokens_left -= num_tokens
        if drafts:
            self._chunks_left -= 1
        state.num_computed_tokens = start + num_tokens
        if samples:
            state.num_pending += 1 + len(drafts)
            state.has_drafts_in_flight = bool(drafts)
        if state.first_image < state.next_image:
            self._images.leave(state, end)
        state.num_ready_tokens = 0 if state.has_images_left else len(state.pages) * self._pages.page_size


class _Prefix(NamedTuple):
    """Cached pages that a request starts with. The last page is copied if the request has to write to it."""

    pages: list[int]
    num_tokens: int
    """Tokens that need not be computed: all tokens of the pages, or one less if the request has no further token."""
    is_copied: bool = False

    def without_copy(self, page_size: int) -> _Prefix:
        """The prefix without its last page, which is recomputed instead."""
        pages = self.pages[:-1]
        return _Prefix(pages, len(pages) * page_size)


def _find_prefix(state: RequestState, pool: PagePool) -> _Prefix:
    """The longest cached prefix of a request's known tokens. The last token is always computed, to sample the next."""
    if not pool.keeps_prefixes or state.request.prompt_logprobs is not None:
        return _Prefix([], 0)
    pages: list[int] = []
    for index in range(len(state.token_ids) // pool.page_size):
        page = pool.find(state.page_key(index, pool.page_size))
        if page is None:
            break
        pages.append(page)
    last = len(state.token_ids) - 1
    if len(pages) * pool.page_size <= last:
        return _Prefix(pages, len(pages) * pool.page_size)
    whole = _Prefix(pages, last, is_copied=True)
    return whole if last % pool.page_size else whole.without_copy(pool.page_size)
