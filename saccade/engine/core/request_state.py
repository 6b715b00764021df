"""Scheduler state of a request, and the running and waiting queues. Plain Python, no torch."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Iterator
from heapq import heappop, heappush

from saccade.engine.core.admission import Position, position_of
from saccade.engine.core.encoder_cache import EncoderCache, salted
from saccade.engine.core.pages import PagePool, page_key, root_key
from saccade.engine.request import ImageSpan, Request


class RequestState:
    """Scheduler state of an open request. It uses `images[first_image:next_image]`; earlier ones are fully computed."""

    __slots__ = (
        "first_image",
        "has_drafts_in_flight",
        "image_keys",
        "next_image",
        "next_output_at",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_pages_sent",
        "num_pending",
        "num_preemptions",
        "num_prompt_logprobs_sent",
        "num_prompt_tokens",
        "num_ready_tokens",
        "num_registered",
        "num_sent",
        "num_start_tokens",
        "order",
        "page_keys",
        "pages",
        "request",
        "slot",
        "token_ids",
        "token_limit",
    )

    def __init__(self, request: Request, arrival: int, max_length: int) -> None:
        self.request = request
        self.order = position_of(request, arrival)
        self.num_prompt_tokens = request.num_prompt_tokens
        self.token_limit = min(self.num_prompt_tokens + request.sampling.max_tokens, max_length)
        self.token_ids = list(request.token_ids)  # known tokens: prompt, then output tokens read so far
        self.num_computed_tokens = 0  # tokens whose KV is in the pages once the steps in flight have run
        self.num_pending = 0  # tokens sampled in steps in flight
        self.pages: list[int] = []  # page table
        self.num_pages_sent = 0  # leading pages that earlier plans have sent to the device
        self.num_ready_tokens = 0  # tokens that can be computed without another page or image
        self.slot: int | None = None  # index into the runner's tables; None while it waits
        self.num_start_tokens = 0  # tokens known when it got its slot; later ones were sampled in it
        self.num_cached_tokens = 0  # prompt tokens found in the prefix cache at its first start
        self.num_preemptions = 0
        self.num_sent = self.num_prompt_tokens  # known tokens that were sent, counting the prompt
        self.next_output_at = self.num_prompt_tokens + 1  # the next output is sent when this many tokens are known
        self.num_prompt_logprobs_sent = 1  # prompt tokens with log-probabilities sent; the first has none
        self.image_keys = [salted(request.salt, image.key) for image in request.images]
        self.page_keys: list[bytes] = []  # prefix-cache keys of its full pages, computed on demand
        self.num_registered = 0  # leading pages that are registered in the prefix cache
        self.first_image = self.next_image = 0
        self.has_drafts_in_flight = False  # the number of accepted drafts is not known yet

    @property
    def num_tokens(self) -> int:
        """Number of known and pending tokens."""
        return len(self.token_ids) + self.num_pending

    @property
    def images_in_use(self) -> list[bytes]:
        """Salted keys of the images in use; an image used twice is listed twice."""
        return self.image_keys[self.first_image : self.next_image]

    @property
    def has_images_left(self) -> bool:
        """Whether some token of an image is not computed yet."""
        return self.first_image < len(self.image_keys)

    @property
    def num_uncomputed(self) -> int:
        """Known or pending tokens that are not computed; 0 while drafts are in flight."""
        num_tokens = len(self.token_ids) + self.num_pending
        if self.has_drafts_in_flight or num_tokens >= self.token_limit:
            return 0
        return num_tokens - self.num_computed_tokens

    @property
    def is_decoding(self) -> bool:
        """Whether its prompt is computed, so that a long step delays its next output token."""
        return self.num_computed_tokens >= self.num_prompt_tokens

    def start_at(self, num_computed_tokens: int) -> None:
        """Set the number of computed tokens, with no image in use."""
        self.num_computed_tokens = num_computed_tokens
        self.first_image = self.next_image = _first_ending_after(self.request.images, num_computed_tokens)

    def page_key(self, index: int, page_size: int) -> bytes:
        """Prefix-cache key of page `index`, all of whose tokens must be known."""
        keys, request = self.page_keys, self.request
        while len(keys) <= index:
            start = len(keys) * page_size
            token_ids = self.token_ids[start : start + page_size]
            assert len(token_ids) == page_size, f"page {len(keys)} of request {request.id} is not full"
            parent = keys[-1] if keys else root_key(request.salt)
            keys.append(page_key(parent, token_ids, _images_within(request.images, start, start + page_size)))
        return keys[index]


def _first_ending_after(images: tuple[ImageSpan, ...], token: int) -> int:
    return bisect_right(images, token, key=lambda image: image.end)


def _images_within(images: tuple[ImageSpan, ...], start: int, end: int) -> list[tuple[bytes, int]]:
    within = []
    index = _first_ending_after(images, start)
    while index < len(images) and images[index].start < end:
        within.append((images[index].key, start - images[index].start))
        index += 1
    return within


class Queues:
    """Running and waiting requests in order, with the slots, pages and images they hold. Waiting requests hold none."""

    def __init__(self, max_requests: int, pages: PagePool, encoder_cache: EncoderCache) -> None:
        self.pages = pages
        self.encoder_cache = encoder_cache
        self.running: list[RequestState] = []
        self.waiting: list[RequestState] = []
        self.num_preemptions = 0
        self._max_requests = max_requests
        self._states: dict[str, RequestState] = {}
        self._free_slots = list(range(max_requests))  # a heap: the lowest slot is taken first

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[RequestState]:
        return iter(list(self._states.values()))

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._states

    def in_order(self) -> Iterator[RequestState]:
        """Running requests, then waiting ones, each sorted by `order`."""
        yield from self.running
        yield from self.waiting

    @property
    def has_free_slot(self) -> bool:
        """Whether one more request may run."""
        return bool(self._free_slots)

    def find(self, request_id: str) -> RequestState | None:
        """The state of the open request with this id."""
        return self._states.get(request_id)

    def add(self, state: RequestState) -> None:
        """Put a new request into the waiting queue."""
        self._states[state.request.id] = state
        insort(self.waiting, state, key=_order)

    def start(self, state: RequestState) -> None:
        """Move a waiting request into the running queue and give it a slot."""
        _remove(self.waiting, state)
        state.slot = heappop(self._free_slots)
        state.num_start_tokens = len(state.token_ids)
        insort(self.running, state, key=_order)

    def preempt(self, state: RequestState) -> None:
        """Free what a running request holds and move it back into the waiting queue."""
        _remove(self.running, state)
        self._release(state)
        state.num_preemptions += 1
        self.num_preemptions += 1
        insort(self.waiting, state, key=_order)

    def remove(self, state: RequestState) -> None:
        """Free what an ended request holds and remove it."""
        del self._states[state.request.id]
        _remove(self.waiting if state.slot is None else self.running, state)
        self._release(state)

    def check(self) -> None:
        """Check the invariants: pages, images, slots and queues agree with what the requests hold."""
        self.pages.check([state.pages for state in self._states.values()])
        self.encoder_cache.check(Counter([key for state in self.running for key in state.images_in_use]))
        slots = [state.slot for state in self.running if state.slot is not None]
        assert sorted(self._free_slots + slots) == list(range(self._max_requests)), (
            "a slot is lost or was assigned twice"
        )
        queued = [state.request.id for state in self.running + self.waiting]
        assert len(queued) == len(self._states), "a request is in no queue or in two"
        assert set(queued) == self._states.keys(), "a request is in no queue or in two"
        for state in self.waiting:
            holds_nothing = state.slot is None and not state.pages and not state.images_in_use
            assert holds_nothing, f"request {state.request.id} is waiting but holds resources"

    def _release(self, state: RequestState) -> None:
        """Free the pages, images and slot of a request."""
        self.pages.free(reversed(state.pages))
        state.pages, state.num_pages_sent = [], 0
        for key in state.images_in_use:
            self.encoder_cache.release(key)
        if state.slot is not None:
            heappush(self._free_slots, state.slot)
            state.slot = None
        state.num_registered = state.num_ready_tokens = 0
        state.start_at(0)


def _order(state: RequestState) -> Position:
    return state.order


def _remove(queue: list[RequestState], state: RequestState) -> None:
    index = bisect_left(queue, state.order, key=_order)
    assert queue[index : index + 1] == [state], f"request {state.request.id} is not in its queue"
    del queue[index]
