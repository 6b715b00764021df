"""Schedule engine steps: which tokens of which requests the next step computes. Plain Python over integers: no torch, no clock.

    plan = scheduler.plan()          the next step
    scheduler.update(plan, tokens)   its sampled tokens

Chunked prefill and decode share every step. A step computes one token of each decoding request, then fills its token budget with
prompt chunks. The next plan may be made before the previous step's tokens are read: a token that was sampled but not read is pending,
and can be computed because the device has it.

Order. Requests are served by arrival, plus `AGEING` arrivals per level of priority. Only finitely many requests ever precede a given
one, and each is finite, so no request starves even if the budget is below one token per request.

Pages are allocated on demand. When none is free, the running request last in order is preempted; its pages stay in the prefix cache
until they are needed. A request starts only if there are pages for all its known tokens beside those that running prompts still
need, and no later request starts before it.

No deadlock. `Scheduler.add` accepts only requests that can run alone. The first running request can always get pages, because all
others can be preempted. A request uses an image only while a chunk is inside it: acquired when a chunk enters it, released when one
leaves it. So a request that uses an image needs nothing but budget and pages to leave it, and waits for no other image meanwhile.
When the encoder cache has no free slots for one request, no later request enters an image in that step, not even a cached one:
otherwise a popular image could stay in use forever.

Order on the device. A step copies pages, then encodes images, then computes; steps run one after another. So what a plan frees may
be written by the next plan, even while the step is in flight, but not by the plan itself: pages copied from and images left behind
are freed when the plan is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import NamedTuple

from saccade.engine.encoder_cache import ENCODER_SLOT_TOKENS, EncoderCache
from saccade.engine.pages import PagePool
from saccade.engine.request import Failure, FinishReason, Request
from saccade.engine.request_state import Queues, RequestState
from saccade.engine.step_plan import CachedImage, Chunk, ImageToEncode, Limits, StepPlan
from saccade.errors import ImageError, RequestError

Draft = Callable[[Request, int], Sequence[int]]
"""Proposes up to this many draft tokens that follow a request's known tokens."""


class Scheduler:
    """All open requests. Images whose (unsalted) key is in `quarantine` are refused."""

    def __init__(
        self,
        limits: Limits,
        pages: PagePool,
        encoder_cache: EncoderCache,
        draft: Draft | None = None,
        quarantine: Container[bytes] = frozenset(),
    ) -> None:
        self.limits = limits
        self.pages = pages
        self.encoder_cache = encoder_cache
        self._draft = draft if limits.max_draft_tokens else None
        self._quarantine = quarantine
        self._queues = Queues(limits.max_requests, pages, encoder_cache)
        self._in_flight: list[StepPlan] = []
        self._num_added = 0

    @property
    def has_work(self) -> bool:
        """Whether any request is open."""
        return len(self._queues) > 0

    @property
    def num_running(self) -> int:
        """Requests that have a slot."""
        return len(self._queues.running)

    @property
    def num_waiting(self) -> int:
        """Requests that have none, including preempted ones."""
        return len(self._queues.waiting)

    def find(self, request_id: str) -> Request | None:
        """The open request with this id."""
        state = self._queues.find_id(request_id)
        return None if state is None else state.request

    def requests(self) -> list[Request]:
        """All open requests, in order of arrival."""
        return [state.request for state in self._queues]

    # ---- add and end requests

    def add(self, request: Request) -> None:
        """Add a request to the waiting queue. RequestError: it could not run even alone."""
        assert request.id not in self._queues, f"request {request.id} was added before"
        self._check_can_run(request)
        request.arrival = self._num_added
        self._num_added += 1
        self._queues.add(RequestState(request, self.limits.max_length))

    def _check_can_run(self, request: Request) -> None:
        """Raise RequestError, saying what to change, unless the request could run alone."""
        limits, pages, num_prompt = self.limits, self.pages, request.num_prompt_tokens
        if num_prompt == 0:
            raise RequestError("The prompt is empty; give it at least one token")
        if num_prompt >= limits.max_length:
            raise RequestError(
                f"The prompt has {num_prompt} tokens; prompt and output together may have {limits.max_length}. "
                "Shorten it, use smaller images, or raise max_length"
            )
        # The last token is never computed.
        num_pages = pages.num_pages_for(min(num_prompt + request.sampling.max_tokens, limits.max_length) - 1)
        if num_pages > pages.num_pages:
            raise RequestError(
                f"A prompt of {num_prompt} tokens with up to {request.sampling.max_tokens} output tokens needs {num_pages} pages; "
                f"the KV cache has {pages.num_pages}. Lower max_tokens, shorten the prompt, or raise num_pages"
            )
        for image in request.images:
            if not self.encoder_cache.fits(image.num_tokens):
                raise ImageError(
                    f"An image takes {image.num_tokens} tokens; the encoder cache has "
                    f"{self.encoder_cache.num_slots * ENCODER_SLOT_TOKENS}. Use a smaller image, or raise encoder_cache_tokens"
                )
            if image.key in self._quarantine:
                raise ImageError("An image of this request could not be encoded before; send another one")

    def cancel(self, request_id: str) -> bool:
        """End a request at once, even while a step computes it. False: no such open request."""
        return self._end(self._queues.find_id(request_id), "cancelled")

    def finish(self, request_id: str) -> bool:
        """End a request that is complete for a reason outside the scheduler, such as a stop string. False: no such open request."""
        return self._end(self._queues.find_id(request_id), "stop")

    def fail(self, request: Request, failure: Failure) -> bool:
        """End a request as failed. False: it has ended already."""
        has_failed = self._end(self._queues.find(request), "failed")
        if has_failed:
            request.failure = failure
        return has_failed

    def fail_image(self, plan: StepPlan, key: bytes, failure: Failure) -> list[Request]:
        """Fail every request that reads the image with this salted key in the step or uses it, and evict its features."""
        readers = [chunk.request for chunk in plan.chunks if any(image.key == key for image in chunk.images)]
        users = [state.request for state in self._queues.running if key in state.images_in_use]
        failed = [request for request in readers + users if self.fail(request, failure)]
        self.encoder_cache.evict(key)
        return failed

    def _end(self, state: RequestState | None, reason: FinishReason) -> bool:
        if state is None:
            return False
        assert state.request.finish_reason is None, f"request {state.request.id} ends twice"
        self._queues.remove(state)
        state.request.num_pending = 0
        state.request.finish_reason = reason
        return True

    # ---- steps

    def plan(self, token_budget: int | None = None) -> StepPlan | None:
        """Schedule the next step. None: nothing can be computed before a step in flight is read, or at all.

        `token_budget` limits the prompt tokens of the step (at least one is always allowed); decode tokens are not limited by it.
        """
        while True:
            num_running = self.num_running
            plan = _Planner(self._queues, self.limits, token_budget, self._draft).plan()
            if plan is not None:
                self._in_flight.append(plan)
                return plan
            if self.num_running == num_running:
                break
            # A request was preempted and may have released an image that others were waiting for.
        assert self._in_flight or not self.has_work, "there is work and no step in flight, but nothing can be computed"
        return None

    def update(self, plan: StepPlan, sampled: Mapping[str, Sequence[int]]) -> list[Request]:
        """Append the accepted tokens of each chunk that samples, by request id; returns the requests that ended by them.

        Plans are updated in the order in which they were made. Tokens of requests that have ended are ignored.
        """
        assert plan in self._in_flight[:1], "steps are read in the order in which they were planned"
        del self._in_flight[0]
        ended = []
        for chunk in plan.chunks:
            state = self._queues.find(chunk.request)
            if state is not None:
                reason = self._update_request(state, chunk, sampled[chunk.request.id] if chunk.samples else ())
                if reason is not None:
                    self._end(state, reason)
                    ended.append(chunk.request)
        return ended

    def _update_request(self, state: RequestState, chunk: Chunk, tokens: Sequence[int]) -> FinishReason | None:
        request = state.request
        _settle_pending(state, chunk)
        reason = _append(state, tokens)
        if chunk.pages is request.pages:  # else it was preempted meanwhile, and these pages are no longer its own
            end = chunk.end
            if chunk.drafts:
                end = request.num_computed_tokens = chunk.start + len(tokens)
            if end >= (state.num_registered + 1) * self.pages.page_size:
                self._register_pages(state, min(end, len(request.token_ids)))
        return reason

    def _register_pages(self, state: RequestState, num_tokens: int) -> None:
        """Put pages full of computed and known tokens into the prefix cache."""
        page_size = self.pages.page_size
        if self.pages.keeps_prefixes:
            for index in range(state.num_registered, num_tokens // page_size):
                self.pages.register(state.request.pages[index], state.page_key(index, page_size))
        state.num_registered = max(state.num_registered, num_tokens // page_size)

    # ---- invariants

    def check(self) -> None:
        """Check the invariants: pages, images, slots and queues agree with what the requests hold."""
        self._queues.check()

    def is_idle_clean(self) -> bool:
        """Whether no request is open and nothing of ended ones is left."""
        self.check()
        return not self.has_work and self.pages.num_free == self.pages.num_pages


def _append(state: RequestState, tokens: Sequence[int]) -> FinishReason | None:
    """Append tokens up to one that ends the request; the rest is dropped."""
    request = state.request
    for token in tokens:
        request.token_ids.append(token)
        num_tokens = len(request.token_ids)
        if token in request.stop_ids and num_tokens - request.num_prompt_tokens > request.sampling.min_tokens:
            return "stop"
        if num_tokens >= state.token_limit:
            return "length"
    return None


def _settle_pending(state: RequestState, chunk: Chunk) -> None:
    """The chunk's pending tokens are known now, or rejected."""
    if chunk.samples:
        state.request.num_pending -= 1 + len(chunk.drafts)
        state.has_drafts_in_flight = False


class _Prefix(NamedTuple):
    """Cached pages that a request starts with. The last one is copied if the request has to write into it."""

    pages: list[int]
    num_tokens: int
    """Tokens that need not be computed: all of the pages', minus one if the request has no more than those."""
    is_copied: bool = False

    def without_copy(self, page_size: int) -> _Prefix:
        """The same with the last page recomputed."""
        pages = self.pages[:-1]
        return _Prefix(pages, len(pages) * page_size)


class _Planner:
    """One plan while it is being made, and what is left of the step's budgets: running requests first, then waiting ones."""

    def __init__(self, queues: Queues, limits: Limits, token_budget: int | None, draft: Draft | None) -> None:
        self.chunks: list[Chunk] = []
        self.images: list[ImageToEncode] = []
        self.page_copies: list[tuple[int, int]] = []
        self.started: list[Request] = []
        self._queues = queues
        self._draft = draft
        self._max_draft_tokens = limits.max_draft_tokens
        self._tokens_left = limits.max_step_tokens
        self._prompt_tokens_left = limits.max_step_tokens if token_budget is None else max(1, token_budget)
        self._patches_left = limits.max_step_patches
        self._num_decoding = 0  # decoding requests not scheduled yet; one token is reserved for each
        self._is_encoder_cache_full = False
        self._pages_to_free: list[int] = []
        self._images_to_release: list[bytes] = []

    def plan(self) -> StepPlan | None:
        """The plan, unless it is empty. No request starts while running ones are short of pages."""
        num_running = len(self._queues.running)
        self._schedule_running()
        if len(self._queues.running) == num_running:
            self._start_waiting()
        self._free_after_plan()
        if not self.chunks:
            return None
        preempted, self._queues.preempted = self._queues.preempted, []
        return StepPlan(self.chunks, self.images, self.page_copies, self.started, preempted)

    # ---- running requests

    def _schedule_running(self) -> None:
        running = self._queues.running
        all_uncomputed = [state.num_uncomputed for state in running]
        self._num_decoding = all_uncomputed.count(1)
        for index, num_uncomputed in enumerate(all_uncomputed):
            if index >= len(running):  # only the request at `index` or later ones can have been preempted
                break
            if num_uncomputed:
                self._schedule(running[index], num_uncomputed)

    def _schedule(self, state: RequestState, num_uncomputed: int) -> None:
        """Schedule a chunk of a running request; it may be preempted instead if there are no pages."""
        budget = self._tokens_left
        if num_uncomputed == 1:
            self._num_decoding -= 1
        else:
            budget = min(num_uncomputed, budget - self._num_decoding, self._prompt_tokens_left)
        if budget <= 0:
            return
        start, num_images = state.request.num_computed_tokens, len(self.images)
        end = self._enter_images(state, start + min(num_uncomputed, budget))
        if end == start:
            return
        if not self._allocate_pages(state, end):
            self._undo_images(num_images)
        elif num_uncomputed == 1:
            self._add_chunk(state, end, self._propose_drafts(state, end) if self._draft else ())
        else:
            self._prompt_tokens_left -= end - start
            self._add_chunk(state, end)

    def _allocate_pages(self, state: RequestState, end: int) -> bool:
        """Allocate pages up to token `end`, preempting the last running requests if needed. False: it was preempted itself."""
        request, pool = state.request, self._queues.pages
        num_pages = pool.num_pages_for(end) - len(request.pages)
        if num_pages <= 0:
            return True
        while not pool.can_allocate(num_pages):
            last = self._queues.running[-1]
            if last is not state and last.num_uncomputed == 1:
                self._num_decoding -= 1
            self._queues.preempt(last)
            if last is state:
                return False
        request.pages += pool.allocate(num_pages)
        return True

    def _propose_drafts(self, state: RequestState, end: int) -> tuple[int, ...]:
        """Draft tokens after a known last token, within the budget, the request's token limit and the free pages."""
        request, pool = state.request, self._queues.pages
        most = min(self._max_draft_tokens, state.token_limit - end - 1, self._tokens_left - self._num_decoding - 1)
        if self._draft is None or request.num_pending or most <= 0:
            return ()
        drafts = tuple(self._draft(request, most))[:most]
        num_pages = pool.num_pages_for(end + len(drafts)) - len(request.pages)
        if num_pages > 0 and pool.can_allocate(num_pages):
            request.pages += pool.allocate(num_pages)
        return drafts[: len(request.pages) * pool.page_size - end]

    # ---- waiting requests

    def _start_waiting(self) -> None:
        queues = self._queues
        if not queues.waiting or not queues.has_free_slot or self._budget <= 0:
            return
        num_reserved = sum(self._num_pages_needed(state) for state in queues.running)
        while queues.waiting and queues.has_free_slot and self._budget > 0:
            state = queues.waiting[0]
            if not self._start(state, num_reserved):
                break  # no later request starts before it
            num_reserved += self._num_pages_needed(state)

    @property
    def _budget(self) -> int:
        return min(self._tokens_left, self._prompt_tokens_left)

    def _num_pages_needed(self, state: RequestState) -> int:
        """Pages that its current tokens still need."""
        request = state.request
        num_tokens = min(request.num_tokens, state.token_limit - 1)  # its last token is never computed
        return max(0, self._queues.pages.num_pages_for(num_tokens) - len(request.pages))

    def _start(self, state: RequestState, num_reserved: int) -> bool:
        """Start a request if it can compute at least one token in this step."""
        request, pool = state.request, self._queues.pages
        if request.num_pending:  # it was preempted, and resumes when all its tokens are known
            return False
        prefix = self._find_prefix_that_fits(state, num_reserved)
        if prefix is None:
            return False
        state.start_at(prefix.num_tokens)
        end = self._enter_images(state, min(len(request.token_ids), prefix.num_tokens + self._budget))
        if end == prefix.num_tokens:
            state.start_at(0)
            return False
        self._queues.start(state)
        if request.num_preemptions == 0:
            request.num_cached_tokens = prefix.num_tokens
        self._share_prefix(state, prefix)
        request.pages += pool.allocate(pool.num_pages_for(end) - len(request.pages))
        self.started.append(request)
        self._prompt_tokens_left -= end - prefix.num_tokens
        self._add_chunk(state, end)
        return True

    def _find_prefix(self, state: RequestState) -> _Prefix:
        """The longest cached prefix of a request's known tokens. Its last token is always computed, to sample after it."""
        request, pool = state.request, self._queues.pages
        if not pool.keeps_prefixes or request.sampling.prompt_logprobs is not None:
            return _Prefix([], 0)
        pages: list[int] = []
        for index in range(len(request.token_ids) // pool.page_size):
            page = pool.find(state.page_key(index, pool.page_size))
            if page is None:
                break
            pages.append(page)
        last = len(request.token_ids) - 1
        if len(pages) * pool.page_size <= last:
            return _Prefix(pages, len(pages) * pool.page_size)
        whole = _Prefix(pages, last, is_copied=True)
        return whole if last % pool.page_size else whole.without_copy(pool.page_size)

    def _find_prefix_that_fits(self, state: RequestState, num_reserved: int) -> _Prefix | None:
        """The cached prefix to start with; None unless all known tokens have pages beside those reserved for others.

        A copy needs one page more than the request will own. If that one is missing, the page is recomputed instead: a request that
        needs the whole pool would otherwise wait forever beside its own cached prefix.
        """
        prefix = self._find_prefix(state)
        if self._fits(state, prefix, num_reserved):
            return prefix
        if prefix.is_copied:
            shorter = prefix.without_copy(self._queues.pages.page_size)
            if self._fits(state, shorter, num_reserved):
                return shorter
        return None

    def _fits(self, state: RequestState, prefix: _Prefix, num_reserved: int) -> bool:
        pool = self._queues.pages
        num_shared = sum(pool.num_owners(page) == 0 for page in prefix.pages)  # free pages that are about to be shared
        num_new = pool.num_pages_for(len(state.request.token_ids)) - len(prefix.pages) + prefix.is_copied
        return pool.num_free - num_shared >= num_new + num_reserved

    def _share_prefix(self, state: RequestState, prefix: _Prefix) -> None:
        """Own the pages of a prefix, and a copy of the last one if it will be written to."""
        pool, pages = self._queues.pages, state.request.pages
        for page in prefix.pages:
            pool.share(page)
        pages += prefix.pages
        if prefix.is_copied:
            [copy] = pool.allocate(1)
            self.page_copies.append((pages[-1], copy))
            self._pages_to_free.append(pages[-1])
            pages[-1] = copy
        state.num_registered = len(pages) - prefix.is_copied

    # ---- images

    def _enter_images(self, state: RequestState, end: int) -> int:
        """Acquire the images with tokens before `end`. Returns the end of the chunk: before the first image that cannot be acquired."""
        images = state.request.images
        while state.next_image < len(images) and images[state.next_image].start < end:
            if not self._enter_image(state):
                return max(images[state.next_image].start, state.request.num_computed_tokens)
        return end

    def _enter_image(self, state: RequestState) -> bool:
        cache = self._queues.encoder_cache
        span, key = state.request.images[state.next_image], state.image_keys[state.next_image]
        is_new = not cache.contains(key)
        if is_new and self.images and span.num_patches > self._patches_left:
            return False
        if self._is_encoder_cache_full or not cache.can_acquire(key, span.num_tokens):
            self._is_encoder_cache_full = True
            return False
        cache.acquire(key, span.num_tokens)
        state.next_image += 1
        if is_new:
            self._patches_left -= span.num_patches
            self.images.append(ImageToEncode(key, span, state.request, cache.slots(key)))
        return True

    def _undo_images(self, num_images: int) -> None:
        """Do not encode images beyond the first `num_images`: the request that entered them was preempted at once."""
        for planned in self.images[num_images:]:
            self._queues.encoder_cache.evict(planned.key)
            self._patches_left += planned.span.num_patches
        del self.images[num_images:]

    # ---- output

    def _add_chunk(self, state: RequestState, end: int, drafts: tuple[int, ...] = ()) -> None:
        request = state.request
        start, num_known, slot = request.num_computed_tokens, len(request.token_ids), request.slot
        assert slot is not None, f"request {request.id} is scheduled without a slot"
        samples = end == num_known + request.num_pending
        num_tokens = end - start + len(drafts)
        images = self._cached_images(state) if state.first_image < state.next_image else ()
        self.chunks.append(
            Chunk(request, slot, start, num_tokens, images, request.pages, start >= num_known, drafts, samples)
        )
        self._tokens_left -= num_tokens
        request.num_computed_tokens = start + num_tokens
        if samples:
            request.num_pending += 1 + len(drafts)
            state.has_drafts_in_flight = bool(drafts)
        while state.first_image < state.next_image and request.images[state.first_image].end <= end:
            self._images_to_release.append(state.image_keys[state.first_image])
            state.first_image += 1

    def _cached_images(self, state: RequestState) -> tuple[CachedImage, ...]:
        """The images in use, each of which has a token in the chunk."""
        in_use = range(state.first_image, state.next_image)
        keys, images, cache = state.image_keys, state.request.images, self._queues.encoder_cache
        return tuple([CachedImage(keys[index], images[index], cache.slots(keys[index])) for index in in_use])

    def _free_after_plan(self) -> None:
        """Free what this step reads for the last time; the next step may write it."""
        self._queues.pages.free(self._pages_to_free)
        for key in self._images_to_release:
            self._queues.encoder_cache.release(key)
