"""Prepared images in host memory, so that a picture that is asked about again is not decoded again.

    sha256 of what was sent  ->  image key  ->  grid and patches

Two files of the same picture (a PNG and a BMP, or a JPEG with another comment) share one entry. When it is full, what was used
longest ago goes.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np

from saccade.processor.image import Pixels

_ENTRY_BYTES = 2048
"""What an entry takes beside its patches."""
_MAX_SOURCES = 8
"""Ways of sending one picture that are remembered: whoever changes a byte of a file each time fills no memory."""


@dataclass(frozen=True)
class ProcessedImage:
    """An image or video as the model takes it, wherever it stands."""

    key: bytes
    """sha256 of its pixels, its size, and how they were made."""
    grid: tuple[int, int, int]
    """Frame pairs, rows and columns of patches."""
    time_step: float
    """Positions between one frame pair and the next."""
    patches: Pixels
    """[patches, patch_dim], read only."""


@dataclass(eq=False)
class _Entry:
    image: ProcessedImage
    sources: OrderedDict[bytes, None] = field(default_factory=OrderedDict)


class ProcessedImageCache:
    """At most `max_bytes` of prepared images. Used by one thread at a time."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        """By image key; the one used longest ago is first."""
        self._keys: dict[bytes, bytes] = {}
        """Image keys by source."""
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, source: bytes) -> ProcessedImage | None:
        """The image made from the source with this sha256."""
        if (key := self._keys.get(source)) is None:
            return None
        self._entries.move_to_end(key)
        return self._entries[key].image

    def keep(self, source: bytes, image: ProcessedImage) -> ProcessedImage:
        """Remember what a source has become. Gives the image to use: an equal one that is here already, or this one."""
        entry = self._entries.get(image.key)
        if entry is None:
            if _size(image) > self._max_bytes:
                return image
            entry = self._entries[image.key] = _Entry(image)
            self.num_bytes += _size(image)
        elif not np.array_equal(entry.image.patches, image.patches):
            return image  # a key is only told; pixels of another are never given for it
        self._entries.move_to_end(image.key)
        self._add_source(entry, source)
        while self.num_bytes > self._max_bytes:
            self._drop_oldest()
        return entry.image

    def _add_source(self, entry: _Entry, source: bytes) -> None:
        entry.sources[source] = None
        self._keys[source] = entry.image.key
        if len(entry.sources) > _MAX_SOURCES:
            del self._keys[entry.sources.popitem(last=False)[0]]

    def _drop_oldest(self) -> None:
        _, entry = self._entries.popitem(last=False)
        self.num_bytes -= _size(entry.image)
        for source in entry.sources:
            del self._keys[source]


def _size(image: ProcessedImage) -> int:
    return image.patches.nbytes + _ENTRY_BYTES
