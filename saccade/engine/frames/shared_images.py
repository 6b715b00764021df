"""Share the patches of prompts between the front end and a core process.

    front end: SharedImages.share(images) -> segments, places  --file descriptors, places-->  core: map_patches(...)

The new images of a request are written into one segment, an anonymous file. So a request needs few file descriptors
however many images it has: the kernel passes at most 253 with a message, and a video may have 384 images. Recent
segments are kept, because prompts often share images.
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
"""Maximum segments of one request; if its images are in more, they are copied into a new segment. The limit on open
files also bounds the descriptors of all messages that are not received yet."""
_MAX_KEPT_SEGMENTS = 256
"""Maximum number of segments that are kept."""
_MAX_KEPT_BYTES = 512 * 2**20
"""Maximum total size of the kept segments; one long video takes a gigabyte."""

Place = tuple[int, int]
"""Location of an image's patches: index of the segment among those of its request, and offset in bytes."""
_Key = tuple[bytes, int, bool]
"""Key of an image, size of its patches, which may differ if the image is preprocessed again, and whether they are its
features."""


class _Patches(NamedTuple):
    segment: SharedMemory
    offset: int


class SharedImages:
    """Writes images into shared memory and keeps recent ones. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[SharedMemory, tuple[int, Sequence[_Key]]] = OrderedDict()
        """Size and images of each kept segment, least recently used first."""
        self._num_kept_bytes = 0
        self._patches: dict[_Key, _Patches] = {}
        """Location of the images in kept segments."""

    def share(self, images: Sequence[PromptImage]) -> tuple[list[SharedMemory], list[Place]]:
        """Segments with the patches of these images, and the place of each image.

        The caller keeps the segments until their descriptors are sent. OSError: memory or file descriptors are
        exhausted.
        """
        with self._lock:
            keys = [(image.span.key, image.patches.nbytes, image.is_encoded) for image in images]
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
        """Free the least recently used segments. The core has mapped those that it still uses."""
        while len(self._kept) > _MAX_KEPT_SEGMENTS or self._num_kept_bytes > _MAX_KEPT_BYTES:
            oldest, (num_bytes, keys) = self._kept.popitem(last=False)
            self._num_kept_bytes -= num_bytes
            for key in keys:
                if key in self._patches and self._patches[key].segment is oldest:
                    del self._patches[key]


def map_patches(
    fds: Sequence[int], places: Sequence[Place], shapes: Sequence[tuple[int, ...]]
) -> list[NDArray[np.uint8]]:
    """The patches of images with these shapes, read-only.

    A mapping lives as long as its arrays; the descriptors may be closed. OSError: not all descriptors arrived, or a
    segment cannot be mapped.
    """
    num_segments = 1 + max((index for index, _ in places), default=-1)
    if len(fds) < num_segments:
        raise OSError(errno.EMFILE, f"{len(fds)} of {num_segments} file descriptors arrived")
    segments = [np.asarray(MappedMemory(fd)) for fd in fds]
    return [
        segments[index][offset : offset + math.prod(shape)].reshape(shape)
        for (index, offset), shape in zip(places, shapes, strict=True)
    ]
