"""Images and videos of a prompt as the user gave them, before anything is decoded. Plain Python, no torch."""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from saccade.errors import ImageError, RequestError
from saccade.processor.image import Pixels
from saccade.processor.parts import VisualKind
from saccade.workers.shared_memory import byte_view

SourceForm = Literal["image_file", "image_url", "video_file", "video_url", "pixels"]
"""An encoded file, a data URL in UTF-8, or [height, width, 3] upright RGB."""


@dataclass(frozen=True)
class Source:
    """An image, frame or video file as the user gave it."""

    form: SourceForm
    data: bytes | Pixels

    @property
    def num_bytes(self) -> int:
        """Size of the data."""
        return len(self.data) if isinstance(self.data, bytes) else self.data.nbytes

    def describe(self) -> list[Any]:
        """Return form and shape as JSON."""
        return [self.form, *(self.data.shape if isinstance(self.data, np.ndarray) else [len(self.data)])]


@dataclass(frozen=True)
class ImageTask:
    """An image or video to preprocess."""

    kind: VisualKind
    sources: Sequence[Source]
    """One image, the frames of a video, or a video file."""
    fps: float = 1.0
    """Frames per second of a video."""
    num_images: int = 1
    """Images of the conversation, as far as the patches depend on it (`VisionRules.counted_images`)."""

    @property
    def is_video_file(self) -> bool:
        """Whether the frames are not known yet."""
        return self.sources[0].form in ("video_file", "video_url")

    @property
    def num_bytes(self) -> int:
        """Size of all sources."""
        return sum(source.num_bytes for source in self.sources)

    def describe(self) -> dict[str, Any]:
        """The task without the data of its sources, as JSON."""
        return {
            "kind": self.kind,
            "fps": self.fps,
            "num_images": self.num_images,
            "sources": [source.describe() for source in self.sources],
        }

    @functools.cached_property
    def digest(self) -> bytes:
        """sha256 of the task with its data. Takes 0.8 ms for 672 x 672 pixels, once."""
        digest = hashlib.sha256(json.dumps(self.describe()).encode())
        for source in self.sources:
            digest.update(byte_view(source.data))
        return digest.digest()

    def media(self) -> bytes:
        """The data of all sources, one after the other."""
        if len(self.sources) == 1 and isinstance(self.sources[0].data, bytes):
            return self.sources[0].data
        return b"".join(byte_view(source.data) for source in self.sources)


@dataclass(frozen=True, kw_only=True, eq=False)
class EncodedImage:
    """An image or video with its features, which another process has computed (`encoder_host.py`)."""

    grid: tuple[int, int, int]
    """The grid of all its patches."""
    texts: tuple[tuple[int, ...], ...]
    """Tokens of the texts between the features of a video."""
    num_pixels: int
    """Decoded pixels of all frames, before resizing."""
    features: NDArray[np.uint8]
    """[tokens, bytes]: the features of each token, in the dtype of the model."""


class MediaMissingError(Exception):
    """A prompt needs images or videos without their data, and they are not among the processed ones any more."""

    def __init__(self, numbers: Sequence[int]) -> None:
        super().__init__(f"the data of images {list(numbers)} is needed")
        self.numbers = list(numbers)
        """Which of the images and videos of the prompt."""


@dataclass(frozen=True, kw_only=True)
class TaskDescription:
    """An image or video to preprocess without its data, which may be elsewhere."""

    kind: VisualKind
    """An image or a video."""
    fps: float
    """Frames per second of a video."""
    num_images: int
    """Images of the conversation, as far as the patches depend on it."""
    sources: tuple[tuple[Any, ...], ...]
    """Form and shape of each source."""
    digest: bytes
    """`ImageTask.digest`, as the owner of the data computed it."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(VisualKind) or not self.sources or not all(map(_is_source, self.sources)):
            raise RequestError(f"a message describes the {self.kind} {self.sources}, which no image or video is")

    @staticmethod
    def of(task: ImageTask) -> TaskDescription:
        """Describe a task."""
        described = task.describe()
        sources = tuple(tuple(source) for source in described.pop("sources"))
        return TaskDescription(**described, sources=sources, digest=task.digest)

    def with_media(self, media: bytes) -> ImageTask:
        """The task with its data. ImageError: the data has another size than described."""
        sizes = [math.prod(shape) for _, *shape in self.sources]
        if len(media) != sum(sizes):
            raise ImageError(
                f"{len(media)} bytes were received, but {sum(sizes)} announced. Send the bytes that the request "
                "describes"
            )
        if len(sizes) == 1 and self.sources[0][0] != "pixels":  # no copy
            return ImageTask(self.kind, [Source(self.sources[0][0], media)], self.fps, self.num_images)
        sources, start = [], 0
        for (form, *shape), size in zip(self.sources, sizes, strict=True):
            data = memoryview(media)[start : start + size]
            pixels = np.frombuffer(data, np.uint8).reshape(shape) if form == "pixels" else None
            sources.append(Source(form, bytes(data) if pixels is None else pixels))
            start += size
        return ImageTask(self.kind, sources, self.fps, self.num_images)


def _is_source(described: Sequence[Any]) -> bool:
    """Whether this is the form and the shape of a source."""
    form, *shape = described
    if not all(isinstance(size, int) and size >= 0 for size in shape):
        return False
    return len(shape) == 3 and shape[2] == 3 if form == "pixels" else form in get_args(SourceForm) and len(shape) == 1
