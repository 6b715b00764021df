"""Patches of prompts in memory that the front end shares with a core process.

    front end: SharedImages.share(images) -> segments, places  --file descriptors, places-->  core: map_patches(...)

The new images of a request are written one after another into one segment, an anonymous file. So a request has few file descriptors
however many images it has: the kernel passes at most 253 with a message, and a video may consist of 384 images. Recent segments are kept,
since prompts often share an image.
"""

from __future__ import annotations

import errno
import math
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from saccade.engine.prompt import PromptImage
from saccade.workers.shared_memory import MappedMemory, SharedMemory

MAX_SEGMENTS = 16
"""Segments of one request; images of more are copied into a new one. The kernel also bounds the descriptors of all messages that are not
received yet, by the limit on open files."""
_MAX_KEPT_SEGMENTS = 256
_MAX_KEPT_BYTES = 512 * 2**20
"""Size of the segments that are kept; a long video alone has a gigabyte."""

Place = tuple[int, int]
"""Where the patches of an image are: the index of a segment among those of its request, and the first byte in it."""
_Key = tuple[bytes, int]
"""The key of an image and the size of its patches: a worker that preprocesses an image again may send something else."""


class _Patches(NamedTuple):
    segment: SharedMemory
    offset: int


class SharedImages:
    """Images in shared memory. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[SharedMemory, tuple[int, Sequence[_Key]]] = OrderedDict()
        """Size of each segment and its images, the least recently used first."""
        self._num_kept_bytes = 0
        self._patches: dict[_Key, _Patches] = {}
        """Images in segments that are kept."""

    def share(self, images: Sequence[PromptImage]) -> tuple[list[SharedMemory], list[Place]]:
        """Segments that hold the patches of these images, which the caller holds until their descriptors are sent, and the places of the
        images. OSError: there is no memory or no file descriptor left."""
        with self._lock:
            keys = [(image.span.key, image.patches.nbytes) for image in images]
            usable = {key: self._patches[key] for key in keys if key in self._patches}
            if len({patches.segment for patches in usable.values()}) >= MAX_SEGMENTS:
                usable = {}
            missing = {key: image for key, image in zip(keys, images, strict=True) if key not in usable}
            if missing:
                usable |= self._write(missing)
            segments = list(dict.fromkeys(usable[key].segment for key in keys))
            for segment in segments:
                if segment in self._kept:
                    self._kept.move_to_end(segment)
            return segments, [(segments.index(usable[key].segment), usable[key].offset) for key in keys]

    def _write(self, images: Mapping[_Key, PromptImage]) -> dict[_Key, _Patches]:
        """Write images into a new segment, and keep it unless it is too large."""
        segment, size, written = SharedMemory(), 0, {}
        for key, image in images.items():
            written[key] = _Patches(segment, size)
            size += segment.write(np.ascontiguousarray(image.patches), size)
        if size <= _MAX_KEPT_BYTES:
            self._patches |= written
            self._kept[segment] = size, tuple(written)
            self._num_kept_bytes += size
            self._evict()
        return written

    def _evict(self) -> None:
        """Free the least recently used segments; the core has mapped those that it still needs."""
        while len(self._kept) > _MAX_KEPT_SEGMENTS or self._num_kept_bytes > _MAX_KEPT_BYTES:
            oldest, (num_bytes, keys) = self._kept.popitem(last=False)
            self._num_kept_bytes -= num_bytes
            for key in keys:
                if key in self._patches and self._patches[key].segment is oldest:
                    del self._patches[key]


def map_patches(
    fds: Sequence[int], places: Sequence[Place], shapes: Sequence[tuple[int, ...]]
) -> list[NDArray[np.uint8]]:
    """The patches of images of these shapes, read-only. A mapping lives as long as its arrays; the descriptors may be closed. OSError: not
    all descriptors arrived, or a segment cannot be mapped."""
    num_segments = 1 + max((index for index, _ in places), default=-1)
    if len(fds) < num_segments:
        raise OSError(errno.EMFILE, f"{len(fds)} of {num_segments} file descriptors arrived")
    segments = [np.asarray(MappedMemory(fd)) for fd in fds]
    return [
        segments[index][offset : offset + math.prod(shape)].reshape(shape)
        for (index, offset), shape in zip(places, shapes, strict=True)
    ]
