"""Shrinking the images of samples, for those who would rather store fewer pixels than all bytes."""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from PIL import Image

from saccade.data.header import upright_size
from saccade.data.readers.reader import Skipped
from saccade.data.sample import Sample, image_names
from saccade.errors import ImageError
from saccade.processor.image import MediaLimits, load_image

T = TypeVar("T")

JPEG_QUALITY = 90


def resize_in_order(
    items: Iterable[tuple[T, Sample | Skipped]], longest: int, num_workers: int
) -> Iterator[tuple[T, Sample | Skipped]]:
    """The same items with no image side longer than `longest`, in the same order; threads work ahead."""
    window: deque[tuple[T, Future[Sample | Skipped]]] = deque()
    with ThreadPoolExecutor(num_workers, thread_name_prefix="resize") as pool:
        for tag, item in items:
            window.append((tag, pool.submit(resize, item, longest)))
            if len(window) > 4 * num_workers:
                tag, future = window.popleft()
                yield tag, future.result()
        for tag, future in window:
            yield tag, future.result()


def resize(item: Sample | Skipped, longest: int) -> Sample | Skipped:
    """One sample with its images shrunk; images that are small enough keep their bytes."""
    if isinstance(item, Skipped):
        return item
    try:
        members: dict[str, bytes] = {}
        images = set(image_names(item.members))
        for name, data in item.members.items():
            if name in images and max(upright_size(data)) > longest:
                number, dot, extension = name.rpartition(".")
                data, extension = _shrink(data, longest, extension)
                name = f"{number}{dot}{extension}"
            members[name] = data
    except ImageError as error:
        return Skipped(item.key, "image cannot be decoded", str(error))
    return Sample(item.key, item.source, members)


def _shrink(data: bytes, longest: int, extension: str) -> tuple[bytes, str]:
    """The image upright and opaque with its longer side at `longest`. PNG stays PNG: drawings suffer as JPEG."""
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
