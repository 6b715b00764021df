"""A request's papers while it is in the scheduler: its turn, the keys of its pages, which of its images it uses."""

from __future__ import annotations

from bisect import bisect_right

from saccade.engine.image_pool import salted
from saccade.engine.pages import page_key, root_key
from saccade.engine.request import ImageSpan, Request

AGEING = 64
"""Arrivals that make up for one step of priority."""


class Ticket:
    """Books of one request. `images[first_image:next_image]` are those it uses; the ones before are behind it."""

    __slots__ = (
        "first_image",
        "image_keys",
        "is_guessing",
        "limit",
        "next_image",
        "num_registered",
        "order",
        "page_keys",
        "request",
    )

    def __init__(self, request: Request, max_length: int) -> None:
        self.request = request
        self.order = (request.arrival + AGEING * request.priority, request.arrival)
        self.limit = min(
            request.num_prompt_tokens + request.sampling.max_tokens, max_length
        )  # its tokens in all, at most
        self.image_keys = [salted(request.salt, image.key) for image in request.images]
        self.page_keys: list[bytes] = []  # of its full pages, as far as they were needed; known tokens never change
        self.num_registered = 0  # pages at its head that can be found, by it or by others before
        self.first_image = self.next_image = 0
        self.is_guessing = False  # a step under way decides how many of its drafts are right

    @property
    def images_in_use(self) -> list[bytes]:
        """Salted keys, one for each use."""
        return self.image_keys[self.first_image : self.next_image]

    @property
    def num_missing(self) -> int:
        """Tokens that can be computed: known or pending ones, unless what is under way decides on them."""
        request = self.request
        num_tokens = len(request.token_ids) + request.num_pending
        return 0 if self.is_guessing or num_tokens >= self.limit else num_tokens - request.num_computed

    def start_at(self, num_computed: int) -> None:
        """Take up (or give up, with 0) computing behind this many tokens, using no image."""
        self.request.num_computed = num_computed
        self.first_image = self.next_image = _first_ending_behind(self.request.images, num_computed)

    def page_key(self, index: int, page_size: int) -> bytes:
        """The key of its page of this number, all of whose tokens are known."""
        keys, request = self.page_keys, self.request
        while len(keys) <= index:
            start = len(keys) * page_size
            token_ids = request.token_ids[start : start + page_size]
            assert len(token_ids) == page_size, f"page {len(keys)} of request {request.id} is not full"
            parent = keys[-1] if keys else root_key(request.salt)
            keys.append(page_key(parent, token_ids, _images_within(request.images, start, start + page_size)))
        return keys[index]


def _first_ending_behind(images: tuple[ImageSpan, ...], token: int) -> int:
    return bisect_right(images, token, key=lambda image: image.end)


def _images_within(images: tuple[ImageSpan, ...], start: int, end: int) -> list[tuple[bytes, int]]:
    within = []
    index = _first_ending_behind(images, start)
    while index < len(images) and images[index].start < end:
        within.append((images[index].key, start - images[index].start))
        index += 1
    return within
