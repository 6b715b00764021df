"""Cache of processed images in host memory, so that an image that is sent again is not decoded again.

    sha256 of the image as sent  ->  image key  ->  grid and patches

Two files of the same image (a PNG and a BMP, or a JPEG with another comment) share one entry. Least recently used entries are
evicted.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np

from saccade.processor.image import Pixels

_ENTRY_BYTES = 2048
"""Size of an entry besides its patches."""
_MAX_DIGESTS = 8
"""Encodings of one image that are remembered, so that files that differ in a byte each time do not fill the memory."""


@dataclass(frozen=True)
class ProcessedImage:
    """An image or video as model input, independent of its position in a prompt."""

    key: bytes
    """sha256 of its patches, grid and preprocessing settings."""
    grid: tuple[int, int, int]
    """Frame pairs, rows and columns of patches."""
    time_step: float
    """Positions between two frame pairs."""
    patches: Pixels
    """[patches, patch_dim], read-only."""
    num_pixels: int = 0
    """Decoded pixels of all frames, before resizing."""
    decode_s: float = 0.0
    """Time its worker took to decode it."""
    preprocess_s: float = 0.0
    """Time its worker took to resize it and to cut it into patches."""


@dataclass(eq=False)
class _Entry:
    image: ProcessedImage
    digests: OrderedDict[bytes, None] = field(default_factory=OrderedDict)


class ProcessedImageCache:
    """An LRU cache of at most `max_bytes`. Not thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        """By image key; the least recently used is first."""
        self._keys: dict[bytes, bytes] = {}
        """Image keys by digest."""
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, digest: bytes) -> ProcessedImage | None:
        """The image that was sent with this digest."""
        if (key := self._keys.get(digest)) is None:
            return None
        self._entries.move_to_end(key)
        return self._entries[key].image

    def put(self, digest: bytes, image: ProcessedImage) -> ProcessedImage:
        """Add an image; return an equal one that is cached already, or this one."""
        entry = self._entries.get(image.key)
        if entry is None:
            if _size(image) > self._max_bytes:
                return image
            entry = self._entries[image.key] = _Entry(image)
            self.num_bytes += _size(image)
        elif not np.array_equal(entry.image.patches, image.patches):
            return image  # the key comes from a worker and is not trusted
        self._entries.move_to_end(image.key)
        self._add_digest(entry, digest)
        while self.num_bytes > self._max_bytes:
            self._evict()
        return entry.image

    def clear(self) -> None:
        """Evict all images."""
        self._entries.clear()
        self._keys.clear()
        self.num_bytes = 0

    def _add_digest(self, entry: _Entry, digest: bytes) -> None:
        entry.digests[digest] = None
        self._keys[digest] = entry.image.key
        if len(entry.digests) > _MAX_DIGESTS:
            del self._keys[entry.digests.popitem(last=False)[0]]

    def _evict(self) -> None:
        _, entry = self._entries.popitem(last=False)
        self.num_bytes -= _size(entry.image)
        for digest in entry.digests:
            del self._keys[digest]


def _size(image: ProcessedImage) -> int:
    return image.patches.nbytes + _ENTRY_BYTES
