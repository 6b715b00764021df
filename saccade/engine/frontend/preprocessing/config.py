"""Configuration of the preprocessing workers, and metadata of a checkpoint's processor. Plain data."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from saccade.processor.image import MediaLimits
from saccade.processor.parts import VisualKind
from saccade.processor.processor import ResizeName

MAX_WORKER_BYTES = 8 * 2**30
"""Memory a worker may allocate beyond what it was forked with; more is an error of the request."""
MAX_TOKENS = 2**24
"""Maximum tokens of a conversation."""


@dataclass(frozen=True, kw_only=True)
class PreprocessingConfig:
    """Configuration of the workers."""

    folder: Path
    """The checkpoint folder."""
    limits: MediaLimits
    """Limits on images and videos."""
    resize: ResizeName
    """Implementation of the resize."""
    chat_template: str | None = None
    """Source of a template that replaces the checkpoint's."""
    max_worker_bytes: int = MAX_WORKER_BYTES
    """Memory a worker may allocate."""
    patchifies_on_device: bool = False
    """Leave it to the vision tower to resize and patchify images, where the family allows it; workers decode them."""
    measures_only: bool = False
    """Make prompts without patches, for an engine that makes them again with patches. Of an image only the header is
    read; a video is decoded."""

    @property
    def sends_whole_images(self) -> bool:
        """Whether images may be patchified on the device, which resizes as Pillow does."""
        return self.patchifies_on_device and self.resize == "pillow" and not self.measures_only

    def to_json(self) -> dict[str, Any]:
        """Return the settings as JSON, for a message to another process."""
        return dataclasses.asdict(self) | {"folder": str(self.folder)}

    @staticmethod
    def from_json(content: dict[str, Any]) -> PreprocessingConfig:
        """Inverse of `to_json`."""
        return PreprocessingConfig(
            folder=Path(content["folder"]),
            limits=MediaLimits(**content["limits"]),
            resize=content["resize"],
            chat_template=content["chat_template"],
            max_worker_bytes=content["max_worker_bytes"],
            patchifies_on_device=content["patchifies_on_device"],
            measures_only=content["measures_only"],
        )


@dataclass(frozen=True, kw_only=True)
class VisualMetadata:
    """How a checkpoint preprocesses images, or videos."""

    token_id: int | None
    """Id of the placeholder token; None if the model accepts none."""
    patch_bytes: int
    """Bytes of a patch: all frames of a video's patch, the one frame of an image's."""
    max_bytes: int
    """Maximum size of the patches of one image or video."""
    settings: str
    """All other settings that the patches depend on; part of the image key."""


@dataclass(frozen=True, kw_only=True)
class ProcessorMetadata:
    """Metadata of a checkpoint's processor, from which prompts are assembled."""

    image: VisualMetadata
    """Metadata of images."""
    video: VisualMetadata
    """Metadata of videos."""
    vocab_size: int
    """Number of token ids."""
    control_ids: list[int]
    """Ids of control tokens, which plain text never has."""

    def of(self, kind: VisualKind) -> VisualMetadata:
        """Metadata of images or of videos."""
        return self.image if kind == "image" else self.video

    @staticmethod
    def from_json(content: dict[str, Any]) -> ProcessorMetadata:
        """Inverse of `dataclasses.asdict`."""
        image, video = VisualMetadata(**content["image"]), VisualMetadata(**content["video"])
        return ProcessorMetadata(**content | {"image": image, "video": video})
