"""Choose the images of each vision encoder pass, and track which of them a step can read.

Plain Python: no torch, no clock.

    images of requests -> a pass -> parts of it, in one or several steps -> EncodeResult

Images are encoded in passes, one after another. A pass is divided into parts with about equally many blocks. A step
runs some parts before its chunks, so that a pass delays the output tokens of other requests by a few parts at a time.
The step that runs the last part of a pass can read its images, and so can later steps. An image that is larger than a
pass is encoded alone, in more parts. An image whose features came with its request is in no pass: they are loaded in
the first step that has room for it, which can read it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from saccade.engine.core.encoder_cache import EncoderCache
from saccade.engine.core.request_state import RequestState
from saccade.engine.core.step import ENCODER_PARTS, EncodeResult, ImageFeatures, ImageToEncode
from saccade.engine.request import Failure, ImageSpan

_MAX_QUARANTINED = 4096
"""Maximum images that are remembered because they could not be encoded."""


class EncoderTurn(NamedTuple):
    """Limits of the vision encoder in one step."""

    num_parts: int = ENCODER_PARTS
    """Maximum parts to run, of the pass in progress or of the one that begins."""
    max_patches: int | None = None
    """Maximum patches of a pass that begins, unless its first image has more. None: as many as a pass may have."""


class NextPass(NamedTuple):
    """The pass in progress, or the one that could begin."""

    num_patches: int
    num_parts: int
    """Parts of the whole pass."""
    parts_left: int
    """Parts that are in no plan yet."""


class _Encoding(NamedTuple):
    """An image that is being encoded."""

    image_key: bytes
    """Key of the image without the salt."""
    num_patches: int
    pass_number: int | None
    """Number of the plan that began its pass. None: its features are loaded."""


class _Pass:
    """The pass in progress."""

    def __init__(self, number: int, num_patches: int, num_parts: int) -> None:
        self.number, self.num_patches = number, num_patches
        self.num_parts = self.parts_left = num_parts


class ImagePlan(NamedTuple):
    """The encoder's share of a plan."""

    images: tuple[ImageToEncode, ...]
    """Images of the pass that begins."""
    num_parts: int
    """Parts to run in this step."""
    pass_parts: int
    """Parts of the whole pass that begins; 0 if none does."""
    loads: tuple[ImageToEncode, ...] = ()
    """Images whose features are loaded."""


class PlannedImages(NamedTuple):
    """How many images a plan has so far."""

    num_encoded: int
    num_loaded: int


NO_IMAGES = ImagePlan((), 0, 0)


class ImagePolicy:
    """Groups the images of all requests into vision encoder passes.

    A plan calls `begin_plan`, then `enter` and `leave` for each chunk, then `end_plan`. A plan without images calls
    none of them while no pass is in progress.
    """

    def __init__(self, cache: EncoderCache, max_patches: int) -> None:
        """`max_patches`: maximum patches of a pass with several images."""
        self.cache = cache
        self._max_patches = max_patches
        self._encoding: dict[bytes, _Encoding] = {}  # by salted key
        self.current_pass: _Pass | None = None
        """The pass in progress."""
        self._quarantine: dict[bytes, None] = {}  # keys of images that could not be encoded, oldest first
        # State of the plan that is being made.
        self._images: list[ImageToEncode] = []
        self._loads: list[ImageToEncode] = []
        self._to_release: list[bytes] = []
        self._number = self._num_parts = self._patches_left = 0
        self._unreadable: int | None = None  # number of the pass whose images this plan cannot read
        self._is_cache_full = False

    @property
    def is_encoding(self) -> bool:
        """Whether the encoding result of some image is not reported yet."""
        return bool(self._encoding)

    def is_quarantined(self, key: bytes) -> bool:
        """Whether an earlier encoding of the image failed."""
        return key in self._quarantine

    # ---- pending images

    def next_pass(self, states: Iterable[RequestState], max_patches: int) -> NextPass | None:
        """The pass in progress, or the one that could begin with up to `max_patches` patches."""
        if self.current_pass is not None:
            return NextPass(self.current_pass.num_patches, self.current_pass.num_parts, self.current_pass.parts_left)
        num_patches, max_patches = 0, min(max_patches, self._max_patches)
        seen: set[bytes] = set()
        for state in states:
            for image in self.new_images(state, seen) if state.next_image < len(state.image_keys) else ():
                if num_patches and num_patches + image.num_patches > max_patches:
                    return self._new_pass(num_patches)
                num_patches += image.num_patches
        return self._new_pass(num_patches) if num_patches else None

    def _new_pass(self, num_patches: int) -> NextPass:
        num_parts = self._parts_of(num_patches)
        return NextPass(num_patches, num_parts, num_parts)

    def _parts_of(self, num_patches: int) -> int:
        """Parts of a pass. A larger image has more parts, so that the time of a part is bounded."""
        return ENCODER_PARTS * -(-num_patches // self._max_patches)

    def new_images(self, state: RequestState, seen: set[bytes]) -> list[ImageSpan]:
        """Images of a request that are in no plan yet and whose keys are not in `seen`. Adds their keys to `seen`."""
        found = []
        for index in range(state.next_image, len(state.image_keys)):
            key = state.image_keys[index]
            if key not in seen and not self.cache.contains(key):
                found.append(state.request.images[index])
                seen.add(key)
        return found

    def first_unreadable(self, state: RequestState) -> int | None:
        """First token of the first image that the next step can only read if it runs parts of the encoder."""
        in_progress = None if self.current_pass is None else self.current_pass.number
        for index in range(state.first_image, len(state.image_keys)):
            key = state.image_keys[index]
            is_new = not self.cache.contains(key)
            if is_new and not state.request.images[index].num_patches:
                continue  # the next step loads it
            if is_new or not self._is_complete(key, in_progress):
                return state.request.images[index].start
        return None

    def _is_complete(self, key: bytes, unreadable: int | None) -> bool:
        """Whether the image's encoding is complete or in a pass other than number `unreadable`."""
        if self.cache.is_ready(key):
            return True
        pass_number = self._encoding[key].pass_number
        return pass_number is None or pass_number != unreadable

    # ---- a plan

    def begin_plan(self, number: int, turn: EncoderTurn) -> None:
        """Begin plan `number`. It can begin a pass only if none is in progress."""
        self._images, self._loads, self._to_release, self._is_cache_full = [], [], [], False
        self._number, self._num_parts, self._patches_left, self._unreadable = number, turn.num_parts, 0, None
        if self.current_pass is None:
            if turn.num_parts:
                self._patches_left = min(turn.max_patches or self._max_patches, self._max_patches)
        elif turn.num_parts < self.current_pass.parts_left:
            self._unreadable = self.current_pass.number

    @property
    def has_room(self) -> bool:
        """Whether the plan can encode another image."""
        return self._patches_left > 0

    @property
    def planned(self) -> PlannedImages:
        """Images that this plan encodes or loads so far."""
        return PlannedImages(len(self._images), len(self._loads))

    def enter(self, state: RequestState, end: int) -> int:
        """Acquire images of a request, and add new ones to the pass.

        Returns the end of its chunk: `end`, or the start of the first image that cannot be read yet.
        """
        images, first = state.request.images, state.num_computed_tokens
        if state.next_image < len(images) and images[-1].end > first:
            while state.next_image < len(images) and self._acquire_next(state):
                pass
        for index in range(state.first_image, len(images)):
            if images[index].start >= end:
                break
            if index >= state.next_image or not self._is_complete(state.image_keys[index], self._unreadable):
                return max(images[index].start, first)
        return end

    def _acquire_next(self, state: RequestState) -> bool:
        """Acquire the request's next image if it fits into the cache and, if it is new, into the pass."""
        index = state.next_image
        span, key = state.request.images[index], state.image_keys[index]
        is_new = not self.cache.contains(key)
        if is_new and span.num_patches and not self._fits_pass(span.num_patches):
            self._patches_left = 0  # no later image overtakes this one
            return False
        if self._is_cache_full or not self.cache.can_acquire(key, span.num_tokens):
            self._is_cache_full = True
            return False
        self.cache.acquire(key, span.num_tokens)
        state.next_image += 1
        planned = ImageToEncode(state.request.id, index, key, self.cache.slots(key))
        if is_new and not span.num_patches:
            self._encoding[key] = _Encoding(span.key, 0, None)
            self._loads.append(planned)
        elif is_new:
            self._patches_left -= span.num_patches
            self._encoding[key] = _Encoding(span.key, span.num_patches, self._number)
            self._images.append(planned)
            if self._num_parts < self._parts_of(self._planned_patches()):
                self._unreadable = self._number
        return True

    def _fits_pass(self, num_patches: int) -> bool:
        """Whether an image fits into the pass that begins. An image larger than a pass is encoded alone."""
        return num_patches <= self._patches_left or (self._patches_left > 0 and not self._images)

    def _planned_patches(self) -> int:
        return sum([self._encoding[image.key].num_patches for image in self._images])

    def undo(self, before: PlannedImages) -> None:
        """Remove images that were planned after `before`: the request that acquired them was preempted."""
        for images, count in zip((self._images, self._loads), before, strict=True):
            for planned in images[count:]:
                self.cache.evict(planned.key)
                del self._encoding[planned.key]
            del images[count:]

    def features(self, state: RequestState, end: int) -> tuple[ImageFeatures, ...]:
        """Images with a token in the request's chunk that ends at `end`."""
        images = state.request.images
        in_chunk = [index for index in range(state.first_image, state.next_image) if images[index].start < end]
        return tuple([ImageFeatures(index, self.cache.slots(state.image_keys[index])) for index in in_chunk])

    def leave(self, state: RequestState, end: int) -> None:
        """Release the images whose last token is before `end`, when the plan is complete."""
        while state.first_image < state.next_image and state.request.images[state.first_image].end <= end:
            self._to_release.append(state.image_keys[state.first_image])
            state.first_image += 1

    def end_plan(self) -> ImagePlan:
        """Complete the plan, and release the images that requests read for the last time in it."""
        for key in self._to_release:
            self.cache.release(key)
        pass_parts = 0
        if self._images:
            num_patches = self._planned_patches()
            pass_parts = self._parts_of(num_patches)
            self.current_pass = _Pass(self._number, num_patches, pass_parts)
        self._patches_left = 0
        return ImagePlan(tuple(self._images), self._advance(), pass_parts, tuple(self._loads))

    def _advance(self) -> int:
        """Take parts of the pass in progress into the plan; returns how many."""
        if self.current_pass is None:
            return 0
        num_parts = min(self._num_parts, self.current_pass.parts_left)
        self.current_pass.parts_left -= num_parts
        if not self.current_pass.parts_left:
            self.current_pass = None
        return num_parts

    # ---- results

    def finish(self, results: Iterable[EncodeResult]) -> list[tuple[bytes, Failure]]:
        """Mark images as encoded. Returns the salted keys and failures of those that failed.

        The caller releases and evicts the failed ones.
        """
        failed = []
        for key, failure in results:
            encoding = self._encoding.pop(key)
            if failure is None:
                self.cache.set_ready(key)
                continue
            if failure.kind != "out_of_memory":
                self._put_into_quarantine(encoding.image_key)
            failed.append((key, failure))
        if self.current_pass is not None and self.current_pass.number not in {
            one.pass_number for one in self._encoding.values()
        }:
            self.current_pass = None  # the pass failed; its images were encoded again at once, or failed
        return failed

    def _put_into_quarantine(self, key: bytes) -> None:
        self._quarantine[key] = None
        if len(self._quarantine) > _MAX_QUARANTINED:
            del self._quarantine[next(iter(self._quarantine))]
