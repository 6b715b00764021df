"""How each model family turns images and videos into patches, tokens and positions: one file per family, no torch.

    image or frames -> grid -> patches               (`resize`, `patchify`)
    grid -> parts, which replace the placeholder     (`texts`, `parts`)
    parts -> positions                               (`positions.py`)

`VisionRules` is the seam; the model's side of it is `saccade.model.families`. Nothing outside a family reads a *grid*:
three integers that say how the patches of one image are arranged, frame pairs x rows x columns or (tiles, height,
width). Everything else asks for numbers of patches and tokens.

The grid of a family with tiles (LLaVA-NeXT, LLaVA-OneVision; `tiles.py`) is (tiles, height, width) of the original
image. Its rules derive the tiles, the tokens without padding and the newline tokens from it, its tower the features; an
image of any shape stays one `FeatureSpan`. With 1-D RoPE its span is one of text length (`positions.py`). If an image's
tiles depend on the number of images in the conversation, that number is an argument of `image_grid` and `patchify`, and
as `counted_images` a part of the image's key in caches (`ImageTask.digest`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from saccade.errors import CheckpointError
from saccade.processor.families import llava_next, llava_onevision, qwen2_5_vl, qwen2_vl, qwen3_vl
from saccade.processor.folder import read_config
from saccade.processor.image import MediaLimits, Pixels
from saccade.processor.parts import Part, VisualKind
from saccade.processor.patches import Grid, ImageSettings, Resize


class VisionRules(Protocol):
    """The images and videos of one checkpoint."""

    @property
    def images(self) -> ImageSettings:
        """Settings of images. Mean and deviation are those of videos too."""
        ...

    @property
    def videos(self) -> ImageSettings:
        """Settings of videos."""
        ...

    @property
    def image_id(self) -> int:
        """Placeholder token of an image."""
        ...

    @property
    def video_id(self) -> int | None:
        """Placeholder token of a video; None if the model takes no videos."""
        ...

    def counted_images(self, num_images: int) -> int:
        """The number of images of a conversation, as far as their patches depend on it.

        Numbers with the same patches give the same result, 1 if the number does not matter. It is a part of an image's
        key in caches.
        """
        ...

    def image_grid(self, height: int, width: int, num_images: int = 1) -> Grid:
        """The grid of an image of this size, one of `num_images` in its conversation. No pixel is read."""
        ...

    def num_patches(self, grid: Grid) -> int:
        """Patches of a grid."""
        ...

    def can_patchify_on_device(self, height: int, width: int) -> bool:
        """Whether the vision tower may resize and patchify an image of this size (`Tower.patchify`)."""
        ...

    def patchify(
        self,
        kind: VisualKind,
        frames: Sequence[Pixels],
        resize: Resize,
        into: Pixels | None = None,
        num_images: int = 1,
    ) -> tuple[Pixels, Grid]:
        """[patches, patch_dim] uint8 and the grid of an image (one frame) or a video.

        The patches are the first rows of `into`, or new memory. An image written to rows of `frame_dim` values has its
        frame once, not repeated to fill the patch. `num_images`: images of the conversation.
        """
        ...

    def num_texts(self, kind: VisualKind, grid: Grid) -> int:
        """Number of texts between the features of an image or video."""
        ...

    def texts(self, kind: VisualKind, num_frames: int, fps: float) -> list[str]:
        """These texts, such as the times of frames."""
        ...

    def parts(self, kind: VisualKind, grid: Grid, fps: float, texts: Sequence[Sequence[int]]) -> tuple[Part, ...]:
        """The parts that replace the placeholder. `texts`: those of `texts`, tokenised. `fps`: of a video."""
        ...

    def max_patches(self, kind: VisualKind, limits: MediaLimits) -> int:
        """Upper bound on the patches of an image or video within the limits."""
        ...

    def is_possible(
        self, kind: VisualKind, grid: Grid, fps: float, num_frames: range, limits: MediaLimits, num_images: int = 1
    ) -> bool:
        """Whether an image or video of `num_frames` can have this grid, and positions that are not too far apart.

        The engine checks the grids of worker processes with it: nothing else about a grid may be trusted.
        """
        ...


_FAMILIES: dict[str, Callable[[Path, Mapping[str, Any]], VisionRules]] = {
    qwen2_5_vl.MODEL_TYPE: qwen2_5_vl.Rules.load,
    qwen2_vl.MODEL_TYPE: qwen2_vl.Rules.load,
    qwen3_vl.MODEL_TYPE: qwen3_vl.Rules.load,
    llava_next.MODEL_TYPE: llava_next.Rules.load,
    llava_onevision.MODEL_TYPE: llava_onevision.Rules.load,
}
TEXT_TYPES = ("qwen2", "llama")
"""Model types of text models, to which a vision tower can be added."""


def vision_language_type(folder: str | Path) -> str:
    """The `model_type` of the vision-language model in a checkpoint folder, by its `config.json`."""
    model_type = str(read_config(Path(folder)).get("model_type"))
    if model_type in _FAMILIES:
        return model_type
    if model_type in TEXT_TYPES:
        raise CheckpointError(
            f"{folder}: a text model (model_type {model_type}). "
            f"Give it a vision tower: saccade init OUT --text {folder}"
        )
    raise CheckpointError(f"{folder}: model_type {model_type!r} is not supported. Supported: {', '.join(_FAMILIES)}")


def load_rules(folder: str | Path) -> VisionRules:
    """The rules of a checkpoint folder, from its JSON files."""
    folder = Path(folder)
    config: dict[str, Any] = read_config(folder)
    rules = _FAMILIES[vision_language_type(folder)]
    for name in ("vision_config", "text_config"):
        if not isinstance(config.get(name), dict | None):
            raise CheckpointError(f"{folder}/config.json: {name} is {config[name]!r}, not an object")
    return rules(folder, config)
