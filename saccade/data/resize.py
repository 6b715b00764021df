"""Downscale the images of samples in threads, for smaller shards."""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from PIL import Image

from saccade.data.header import upright_size
from saccade.data.readers.reader import Merged, Skipped
from saccade.data.sample import Sample, image_names
from saccade.errors import ImageError
from saccade.processor.image import MediaLimits, load_image

T = TypeVar("T")

JPEG_QUALITY = 90


def resize_in_order(
    items: Iterable[tuple[T, Sample | Skipped | Merged]], longest: int, num_workers: int
) -> Iterator[tuple[T, Sample | Skipped | Merged]]:
    """Resize the images of items so that no side is longer than `longest`; keeps the order."""
    window: deque[tuple[T, Future[Sample | Skipped | Merged]]] = deque()
    with ThreadPoolExecutor(num_workers, thread_name_prefix="resize") as pool:
        for tag, item in items:
            window.append((tag, pool.submit(resize, item, longest)))
            if len(window) > 4 * num_workers:
                tag, future = window.popleft()
                yield tag, future.result()
        for tag, future in window:
            yield tag, future.result()


def resize(item: Sample | Skipped | Merged, longest: int) -> Sample | Skipped | Merged:
    """Resize the images of a sample; images that are small enough keep their bytes."""
    if not isinstance(item, Sample):
        return item
    try:
        members: dict[str, bytes] = {}
        images = set(image_names(item.members))
        for name, data in item.members.items():
            if name in images and max(upright_size(data)) > longest:
                number, dot, extension = name.rpartition(".")
                data, extension = _downscale(data, longest, extension)
                name = f"{number}{dot}{extension}"
            members[name] = data
    except ImageError as error:
        return Skipped(item.key, "image cannot be decoded", str(error))
    return Sample(item.key, item.source, members)


def _downscale(data: bytes, longest: int, extension: str) -> tuple[bytes, str]:
    """The image upright and opaque, its longer side `longest`. PNG stays PNG: JPEG damages drawings."""
    picture = Image.fromarray(load_image(data, MediaLimits()))
    scale = longest / max(picture.size)
    size = (max(1, round(picture.width * scale)), max(1, round(picture.height * scale)))
    buffer = io.BytesIO()
    picture = picture.resize(size, Image.Resampling.LANCZOS)
    if extension == "png":
        picture.save(buffer, "PNG")
        return buffer.getvalue(), "png"
    picture.save(buffer, "JPEG", quality=JPEG_QUALITY)
    return buffer.getvalue(), "jpg"
