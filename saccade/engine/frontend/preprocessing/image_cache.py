"""Cache of processed images in host memory, so that an image that is sent again is not decoded again.

    digest of the image as sent, salted  ->  tokens and patches

Least recently used entries are evicted.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from saccade.processor.image import Pixels
from saccade.processor.parts import Part

_ENTRY_BYTES = 2048
"""Size of an entry without its patches."""


@dataclass(frozen=True)
class ProcessedImage:
    """An image or video as model input, independent of its position in a prompt."""

    key: bytes
    """sha256 of the image as sent and of the preprocessing settings. Equal keys have equal features."""
    parts: tuple[Part, ...]
    """The tokens that replace its placeholder."""
    patches: Pixels
    """The patches of its spans in order, read-only: [patches, patch_dim]. A still image may have [patches, frame_dim],
    or its pixels, [height, width, 3]; an image that was encoded elsewhere has its features, [tokens, bytes]."""
    num_pixels: int = 0
    """Decoded pixels of all frames, before resizing."""
    is_encoded: bool = False
    """Whether `patches` is the features."""


class ProcessedImageCache:
    """An LRU cache of at most `max_bytes`. Not thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._images: OrderedDict[bytes, ProcessedImage] = OrderedDict()
        """Images by digest; the least recently used is first."""
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._images)

    def get(self, digest: bytes) -> ProcessedImage | None:
        """The image that was sent with this digest."""
        if digest in self._images:
            self._images.move_to_end(digest)
        return self._images.get(digest)

    def put(self, digest: bytes, image: ProcessedImage) -> None:
        """Add an image, unless it is larger than the cache. An image that is cached stays: two jobs may process one
        image, if the prompt of the first was cancelled while a worker processed it."""
        if digest in self._images or _size(image) > self._max_bytes:
            return
        self._images[digest] = image
        self.num_bytes += _size(image)
        while self.num_bytes > self._max_bytes:
            self.num_bytes -= _size(self._images.popitem(last=False)[1])

    def clear(self) -> None:
        """Evict all images."""
        self._images.clear()
        self.num_bytes = 0


def _size(image: ProcessedImage) -> int:
    return image.patches.nbytes + _ENTRY_BYTES
