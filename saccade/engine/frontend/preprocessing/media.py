"""Reads images and videos from files, data URLs, bytes, PIL images and arrays into tasks for a worker."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
from PIL import Image

from saccade.engine.media import ImageTask, Source
from saccade.processor.image import (
    ImageSource,
    MediaBudget,
    MediaLimits,
    check_data_url,
    load_image,
    read_encoded,
)
from saccade.processor.messages import ImageItem, VideoFileItem, VisualItem
from saccade.processor.parts import VisualKind
from saccade.processor.processor import prefix_errors

_NUM_IMAGE_LOCKS = 61
"""A prime: ids of objects are multiples of 16."""


class MediaReader:
    """Makes tasks of the images and videos of a conversation. Any thread may use it."""

    def __init__(self, limits: MediaLimits) -> None:
        self._limits = limits
        self._image_locks = [threading.Lock() for _ in range(_NUM_IMAGE_LOCKS)]
        """PIL images are not thread-safe: file and EXIF are read on first access."""

    def read(self, item: VisualItem, num_images: int, budget: MediaBudget) -> ImageTask:
        """Read the bytes of an image, of a video file, or of all frames of a video."""
        if isinstance(item, ImageItem):
            return ImageTask("image", [self._read_source(item.source, budget)], num_images=num_images)
        if isinstance(item, VideoFileItem):
            return ImageTask("video", [self._read_encoded(item.source, "video", budget)], item.fps)
        budget.add_frames(len(item.frames))
        sources = []
        for number, frame in enumerate(item.frames):
            with prefix_errors(f"frame {number + 1}"):
                sources.append(self._read_source(frame, budget))
        return ImageTask("video", sources, item.fps)

    def _read_source(self, source: ImageSource, budget: MediaBudget) -> Source:
        if isinstance(source, Image.Image):
            with self._image_locks[id(source) % _NUM_IMAGE_LOCKS]:
                return Source("pixels", np.ascontiguousarray(load_image(source, self._limits, budget)))
        return self._read_encoded(source, "image", budget)

    def _read_encoded(self, source: str | Path | bytes, kind: VisualKind, budget: MediaBudget) -> Source:
        if isinstance(source, str) and source[:5].lower() == "data:":  # the worker decodes base64
            check_data_url(source, self._limits, kind)
            budget.add_bytes(len(source) * 3 // 4)
            return Source("image_url" if kind == "image" else "video_url", source.encode(errors="replace"))
        data = read_encoded(source, self._limits, kind)
        budget.add_bytes(len(data))
        return Source("image_file" if kind == "image" else "video_file", data)
