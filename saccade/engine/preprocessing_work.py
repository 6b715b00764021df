"""What it takes to prepare prompts: tokens of a conversation, patches of an image. Done here, or by a worker process.

sources of an image  --decode, resize, cut, hash-->  ProcessedImage
messages             --template, tokenizer------->  token ids, one placeholder for each image
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image

from saccade.engine.processed_images import ProcessedImage
from saccade.processor.conversation import Message
from saccade.processor.image import ImageSettings, MediaLimits, Pixels, load_image
from saccade.processor.processor import Processor, ResizeName, Visual, VisualKind, prefix_errors
from saccade.shared_memory import byte_view


@dataclass(frozen=True)
class Source:
    """What an image is made from."""

    form: Literal["file", "url", "pixels"]
    """An encoded file, a data URL in UTF-8, or [height, width, 3] upright RGB."""
    data: bytes | Pixels


@dataclass(frozen=True, kw_only=True)
class WorkSetup:
    """What prompts are prepared with."""

    folder: Path
    """The checkpoint folder."""
    limits: MediaLimits
    """What images may be."""
    resize: ResizeName
    """How images are resized."""

    def to_json(self) -> dict[str, Any]:
        """For a message to another process."""
        return dataclasses.asdict(self) | {"folder": str(self.folder)}

    @staticmethod
    def from_json(content: dict[str, Any]) -> WorkSetup:
        """The same setup in the other process."""
        return WorkSetup(
            folder=Path(content["folder"]), limits=MediaLimits(**content["limits"]), resize=content["resize"]
        )


@dataclass(frozen=True, kw_only=True)
class VisualFacts:
    """What one has to know of images, or of videos, without the processor."""

    token_id: int
    """Their placeholder."""
    merge_size: int
    """Patches of a token, per side."""
    patch_dim: int
    """Bytes of a patch."""
    frames_per_patch: int
    """Frames of a patch."""
    max_patches: int
    """No frame has more."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What one has to know of a checkpoint folder to put prompts together."""

    image: VisualFacts
    """Of its images."""
    video: VisualFacts
    """Of its videos."""
    vocab_size: int
    """One more than the highest token id."""

    def of(self, kind: VisualKind) -> VisualFacts:
        """Of images or of videos."""
        return self.image if kind == "image" else self.video

    def to_json(self) -> dict[str, Any]:
        """For a message to another process."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(content: dict[str, Any]) -> Facts:
        """The same facts in the other process."""
        image, video = VisualFacts(**content["image"]), VisualFacts(**content["video"])
        return Facts(image=image, video=video, vocab_size=content["vocab_size"])


@dataclass(frozen=True)
class ImageWork:
    """An image or video to be made."""

    kind: VisualKind
    sources: Sequence[Source]
    """One, or the frames of a video."""
    fps: float = 1.0
    """Frames of a video a second."""

    def describe(self) -> dict[str, Any]:
        """Everything but the sources' bytes, fit for JSON."""
        return {"kind": self.kind, "fps": self.fps, "sources": [_describe(source) for source in self.sources]}

    def digest(self) -> bytes:
        """sha256 of what was sent."""
        digest = hashlib.sha256(json.dumps(self.describe()).encode())
        for source in self.sources:
            digest.update(byte_view(source.data))
        return digest.digest()


def _describe(source: Source) -> list[Any]:
    """Its form, and its size or shape."""
    return [source.form, *(source.data.shape if isinstance(source.data, np.ndarray) else [len(source.data)])]


class Workshop:
    """Prepares for one checkpoint folder."""

    def __init__(self, setup: WorkSetup) -> None:
        self._processor = Processor.load(setup.folder, limits=setup.limits, resize=setup.resize)
        self._setup = setup
        self._settings: dict[VisualKind, ImageSettings] = {
            "image": self._processor.images,
            "video": self._processor.videos,
        }

    @property
    def facts(self) -> Facts:
        """For those who put prompts together."""
        vision, vocab_size = self._processor.vision, self._processor.tokenizer.vocab_size
        image, video = self._facts("image", vision.image_id), self._facts("video", vision.video_id)
        return Facts(image=image, video=video, vocab_size=vocab_size)

    def tokens(self, messages: Sequence[Message]) -> list[int]:
        """Token ids up to where the assistant is to speak, one placeholder for each image and video."""
        return self._processor.tokenize(messages, add_generation_prompt=True)

    def image(self, work: ImageWork) -> ProcessedImage:
        """Decode, resize, cut, hash. Errors name the frame, but not which image it was."""
        visual = self.cut(work)
        return ProcessedImage(self.key(work.kind, visual), visual.grid, visual.span.time_step, visual.patches)

    def cut(self, work: ImageWork) -> Visual:
        """All of it but the hash. The patches are read only."""
        if work.kind == "image":
            visual = self._processor.patchify_image(self._pixels(work.sources[0]))
        else:
            visual = self._processor.patchify_video(self._frames(work.sources), work.fps)
        visual.patches.flags.writeable = False
        return visual

    def key(self, kind: VisualKind, visual: Visual) -> bytes:
        """Equal for equal features: of the pixels as the model gets them, their arrangement, and how they were made."""
        made_by = [kind, repr(self._settings[kind]), self._setup.resize]
        digest = hashlib.sha256(json.dumps([made_by, visual.grid, visual.span.time_step]).encode())
        digest.update(byte_view(visual.patches))
        return digest.digest()

    def warm_up(self) -> None:
        """Do once what is slow the first time."""
        Image.init()
        self.image(ImageWork("image", [Source("pixels", np.zeros((60, 90, 3), dtype=np.uint8))]))

    def _facts(self, kind: VisualKind, token_id: int) -> VisualFacts:
        settings, limits = self._settings[kind], self._setup.limits
        return VisualFacts(
            token_id=token_id,
            merge_size=settings.merge_size,
            patch_dim=settings.patch_dim,
            frames_per_patch=settings.temporal_patch_size,
            max_patches=_max_patches(settings, min(limits.max_aspect_ratio, limits.max_side)),
        )

    def _frames(self, sources: Sequence[Source]) -> list[Pixels]:
        frames = []
        for number, source in enumerate(sources):
            with prefix_errors(f"frame {number + 1}"):
                frames.append(self._pixels(source))
        return frames

    def _pixels(self, source: Source) -> Pixels:
        if isinstance(source.data, np.ndarray):
            return source.data
        return load_image(source.data.decode() if source.form == "url" else source.data, self._setup.limits)


def _max_patches(settings: ImageSettings, max_aspect_ratio: float) -> int:
    """A bound for `ImageSettings.resized`: the pixels it may have, and a cell more on each side of the longest strip."""
    cells = settings.max_pixels / settings.cell**2
    return math.ceil(cells + 2 * math.sqrt(cells * max_aspect_ratio) + 2) * settings.merge_size**2
