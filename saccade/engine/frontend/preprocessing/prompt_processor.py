"""The work of a preprocessing worker: tokenise conversations, decode and patchify images."""

from __future__ import annotations

import codecs
import contextlib
import io
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from typing import NamedTuple

import numpy as np
from PIL import Image

from saccade.engine.frontend.preprocessing.config import PreprocessingConfig, ProcessorMetadata, VisualMetadata
from saccade.engine.media import ImageTask, Source
from saccade.errors import ImageError
from saccade.processor.families import VisionRules
from saccade.processor.image import FORMATS, MediaBudget, MediaLimits, Pixels, load_image, read_encoded, upright_size
from saccade.processor.messages import Message
from saccade.processor.parts import Visual, VisualKind
from saccade.processor.patches import Grid, ImageSettings
from saccade.processor.processor import Processor, prefix_errors
from saccade.processor.tools import Tool
from saccade.processor.video import import_all_of_av, sampled_frames

_ENCODINGS = ("ascii", "latin-1", "utf-8", "utf-16", "utf-16-le", "utf-16-be", "cp437")
"""Encodings of the text in image and video files. Python loads an encoding when it is first used."""


class Patchified(NamedTuple):
    """Patches of an image or video, and the time they took."""

    visual: Visual
    """Grid and patches, read-only; or pixels, [height, width, 3], if the device patchifies the image; or no patches, if
    it is only measured."""
    num_pixels: int
    """Decoded pixels of all frames, before resizing."""
    decode_s: float | None
    """Time to decode. None: it was sent as pixels."""
    preprocess_s: float | None
    """Time to resize and to cut into patches. None: that is done elsewhere."""


class PromptProcessor:
    """Tokenises conversations and patchifies images for one checkpoint folder."""

    def __init__(self, config: PreprocessingConfig) -> None:
        self._processor = Processor.load(
            config.folder, limits=config.limits, resize=config.resize, chat_template=config.chat_template
        )
        self._config = config
        self.rules = rules = self._processor.rules
        tokenizer = self._processor.tokenizer
        self.metadata = ProcessorMetadata(
            image=self._visual_metadata("image", rules.image_id, rules.images),
            video=self._visual_metadata("video", rules.video_id, rules.videos),
            vocab_size=tokenizer.vocab_size,
            control_ids=sorted(tokenizer.control_ids.values()),
        )

    def tokenize(
        self,
        messages: Sequence[Message],
        continue_final_message: bool = False,
        tools: Sequence[Tool] | None = None,
    ) -> list[int]:
        """Token ids up to the start of the assistant's turn, with one placeholder per image and video."""
        return self._processor.tokenize(messages, not continue_final_message, continue_final_message, tools)

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text, after the ids that the tokenizer puts before a prompt."""
        tokenizer = self._processor.tokenizer
        return [*tokenizer.prefix_ids, *tokenizer.encode_text(text)]

    def patchify(self, task: ImageTask) -> Patchified:
        """Decode, resize and patchify; or only measure. Errors name the frame, but not the image."""
        if self._config.measures_only and task.kind == "image":
            return self._measure(task)
        started_at = time.perf_counter()
        frames = self._frames(task, MediaBudget(self._config.limits))
        decoded_at = time.perf_counter()
        whole = whole_image(task, frames[0], self.rules, self._config)
        if whole is not None:
            visual = whole
        elif task.kind == "image":
            visual = self._patchify_image(frames[0], task.num_images)
        else:
            visual = self._processor.patchify_video(frames, task.fps)
        if self._config.measures_only:
            visual = replace(visual, patches=visual.patches[:0].copy())
        visual.patches.flags.writeable = False
        _check_possible(visual.grid, task, self.rules, self._config.limits)
        num_pixels = sum(frame.shape[0] * frame.shape[1] for frame in frames)
        preprocess_s = None if whole is not None else time.perf_counter() - decoded_at
        return Patchified(visual, num_pixels, decoded_at - started_at, preprocess_s)

    def _measure(self, task: ImageTask) -> Patchified:
        """Read the header of an image."""
        started_at = time.perf_counter()
        source = task.sources[0]
        if isinstance(source.data, np.ndarray):
            height, width = source.data.shape[:2]
        else:
            height, width = upright_size(_encoded(source), self._config.limits)
        measured = measured_image(task, height, width, self.rules, self._config)
        return measured._replace(decode_s=time.perf_counter() - started_at)

    def _patchify_image(self, pixels: Pixels, num_images: int) -> Visual:
        """Each patch holds the one frame once: half the bytes to send, to cache and to copy to the device."""
        height, width = pixels.shape[:2]
        num_patches = self.rules.num_patches(self.rules.image_grid(height, width, num_images))
        into = np.empty((num_patches, self.rules.images.frame_dim), np.uint8)
        return self._processor.patchify_image(pixels, into, num_images)

    def warm_up(self) -> None:
        """Do the work once that is slow the first time, and import what a sealed worker can no longer import."""
        Image.init()
        self.patchify(ImageTask("image", [Source("pixels", np.zeros((60, 90, 3), dtype=np.uint8))]))
        for name in FORMATS:
            file = io.BytesIO()
            Image.new("RGB", (28, 28)).save(file, name)
            with contextlib.suppress(ImageError):  # the limits may be tighter
                self.patchify(ImageTask("image", [Source("image_file", file.getvalue())]))
        import_all_of_av()
        self.tokenize([{"role": "user", "content": "text"}])
        for encoding in _ENCODINGS:
            codecs.lookup(encoding)
        datetime.now().astimezone()

    def _visual_metadata(self, kind: VisualKind, token_id: int | None, settings: ImageSettings) -> VisualMetadata:
        patch_bytes = settings.frame_dim if kind == "image" else settings.patch_dim
        return VisualMetadata(
            token_id=token_id,
            patch_bytes=patch_bytes,
            max_bytes=self.rules.max_patches(kind, self._config.limits) * patch_bytes,
            settings=json.dumps([kind, repr(settings), self._config.resize]),
        )

    def _frames(self, task: ImageTask, budget: MediaBudget) -> list[Pixels]:
        if task.is_video_file:
            return sampled_frames(read_encoded(_encoded(task.sources[0]), budget.limits, "video"), task.fps, budget)
        if task.kind == "image":
            return [self._pixels(task.sources[0], budget)]
        frames = []
        for number, source in enumerate(task.sources):
            with prefix_errors(f"frame {number + 1}"):
                frames.append(self._pixels(source, budget))
        return frames

    def _pixels(self, source: Source, budget: MediaBudget) -> Pixels:
        if isinstance(source.data, np.ndarray):
            return source.data
        return load_image(_encoded(source), budget.limits, budget)


def whole_image(task: ImageTask, pixels: Pixels, rules: VisionRules, config: PreprocessingConfig) -> Visual | None:
    """The pixels of an image that the vision tower resizes and patchifies. None: it is patchified here."""
    height, width = pixels.shape[:2]
    if task.kind != "image" or not config.sends_whole_images or not rules.can_patchify_on_device(height, width):
        return None
    grid = rules.image_grid(height, width, task.num_images)
    return Visual(pixels, grid, [], rules.parts("image", grid, task.fps, []))


def measured_image(
    task: ImageTask, height: int, width: int, rules: VisionRules, config: PreprocessingConfig
) -> Patchified:
    """An image of this size without its patches."""
    grid = rules.image_grid(height, width, task.num_images)
    _check_possible(grid, task, rules, config.limits)
    none = np.empty((0, rules.images.frame_dim), np.uint8)
    none.flags.writeable = False
    visual = Visual(none, grid, [], rules.parts("image", grid, task.fps, []))
    return Patchified(visual, height * width, None, None)


def as_pixels(task: ImageTask, rules: VisionRules, config: PreprocessingConfig) -> Patchified | None:
    """An image that was sent as pixels and is measured, or patchified on the device. None: a worker processes it."""
    pixels = task.sources[0].data
    if task.kind != "image" or not isinstance(pixels, np.ndarray):
        return None
    if config.measures_only:
        height, width = pixels.shape[:2]
        return measured_image(task, height, width, rules, config)
    if (visual := whole_image(task, pixels, rules, config)) is None:
        return None
    visual.patches.flags.writeable = False
    return Patchified(visual, pixels.shape[0] * pixels.shape[1], None, None)


def _encoded(source: Source) -> str | bytes:
    data = source.data if isinstance(source.data, bytes) else source.data.tobytes()
    return data.decode() if source.form in ("image_url", "video_url") else data


def _check_possible(grid: Grid, task: ImageTask, rules: VisionRules, limits: MediaLimits) -> None:
    if not is_possible(grid, task, rules, limits):
        raise ImageError(
            f"a {task.kind} of grid {grid} at {task.fps:g} frames per second cannot be computed. Use another fps"
        )


def is_possible(grid: Grid, task: ImageTask, rules: VisionRules, limits: MediaLimits) -> bool:
    """Whether the task can have this grid."""
    num_frames = len(task.sources)
    frames = range(1, limits.max_frames + 1) if task.is_video_file else range(num_frames, num_frames + 1)
    return rules.is_possible(task.kind, grid, task.fps, frames, limits, task.num_images)
