"""Augmentation of training images: random resized crop, horizontal flip and colour jitter.

    image -> crop and resize (one pass) -> flip -> brightness, contrast, saturation

All random numbers of a sample come from one generator, whose seed is the stream's seed, the sample's id and the epoch: a resumed
stream, and one with another number of ranks or workers, gives the same pixels. Images keep their size, so that measured lengths hold.
An image of 224 px takes 1.4 ms of one core beyond decoding.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from PIL import Image, ImageEnhance

from saccade.errors import ConfigError

if TYPE_CHECKING:
    from saccade.processor.conversation import Message

_SIDES = re.compile(r"\b(left|right)", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class AugmentConfig:
    """Random changes of training images, other ones in every epoch. Images of validation are never changed."""

    crop_scale: tuple[float, ...] = (1.0, 1.0)
    """Random resized crop: smallest and largest area of the crop, as a share of the image's; [1, 1] crops nothing."""
    crop_ratio: tuple[float, ...] = (1.0, 1.0)
    """Smallest and largest aspect ratio of the crop, relative to the image's; [0.75, 1.333] is usual."""
    flip: float = 0.0
    """Probability of a horizontal flip. Not applied where the text mentions left or right; leave it at 0 for images of text."""
    brightness: float = 0.0
    """Largest relative change of brightness: 0.4 draws a factor between 0.6 and 1.4."""
    contrast: float = 0.0
    """Largest relative change of contrast, likewise."""
    saturation: float = 0.0
    """Largest relative change of saturation, likewise."""

    def __post_init__(self) -> None:
        for name, limit in (("crop_scale", 1.0), ("crop_ratio", 10.0)):
            values = getattr(self, name)
            if len(values) != 2 or not 0.0 < values[0] <= values[1] <= limit:
                raise ConfigError(
                    f"{name} is {list(values)}; give the smallest and the largest value, above 0 and at most {limit:g}"
                )
        for name in ("flip", "brightness", "contrast", "saturation"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ConfigError(f"{name} is {getattr(self, name)}; give a number between 0 and 1")


def generator(seed: int, sample_id: str, epoch: int) -> random.Random:
    """The random numbers of one sample in one epoch."""
    return random.Random(f"{seed}/{epoch}/{sample_id}")  # noqa: S311 - not for secrets


def has_sides(messages: Sequence[Message]) -> bool:
    """Whether the text of a conversation mentions left or right, so that its images must not be mirrored."""
    return any(_SIDES.search(text) for message in messages for text in _texts(message["content"]))


def _texts(content: str | list[dict[str, Any]]) -> list[str]:
    return [content] if isinstance(content, str) else [part["text"] for part in content if "text" in part]


def augment(
    image: Image.Image, size: tuple[int, int], config: AugmentConfig, rng: random.Random, *, can_flip: bool
) -> Image.Image:
    """The changed image, `size` (width, height) large."""
    changed = image.resize(size, Image.Resampling.BICUBIC, box=_crop_box(image.size, config, rng))
    if rng.random() < config.flip and can_flip:
        changed = changed.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    for enhancer, strength in (
        (ImageEnhance.Brightness, config.brightness),
        (ImageEnhance.Contrast, config.contrast),
        (ImageEnhance.Color, config.saturation),
    ):
        if strength:
            changed = enhancer(changed).enhance(rng.uniform(1 - strength, 1 + strength))
    return changed


def _crop_box(size: tuple[int, int], config: AugmentConfig, rng: random.Random) -> tuple[float, float, float, float]:
    """Left, top, right and bottom of a random crop; one wider or higher than the image is cut."""
    scale = rng.uniform(*config.crop_scale)
    low, high = config.crop_ratio
    ratio = low * (high / low) ** rng.random()
    width, height = (
        share * side
        for share, side in zip((min(1, (scale * ratio) ** 0.5), min(1, (scale / ratio) ** 0.5)), size, strict=True)
    )
    left, top = rng.random() * (size[0] - width), rng.random() * (size[1] - height)
    return left, top, left + width, top + height
