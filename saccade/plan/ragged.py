"""Ragged data to plan with: packed sequences of conversations and images, and the slowest of the ranks that share them.

Two thirds of the samples have one to four images of log-normal sizes (median 1,500 patches, deviation 0.7, at most
12,288), the others are text. Texts have log-normal lengths (median 200 tokens, deviation 0.8). Samples are packed, and
sequences assigned to ranks, by the functions that a run uses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from saccade.data.image_shares import balance, image_cost
from saccade.data.packing import assign, pack
from saccade.errors import ConfigError
from saccade.model.config import ModelConfig
from saccade.model.vlm import VLM
from saccade.processor.patches import Grid
from saccade.train.recorded_step import SequenceShape

Floats = npt.NDArray[np.float64]
_NUM_SAMPLES = 4096
_MEDIAN_PATCHES, _PATCH_DEVIATION, _MOST_PATCHES = 1500, 0.7, 12288
_MEDIAN_TEXT, _TEXT_DEVIATION = 200, 0.8
_IMAGE_SHARE, _MOST_IMAGES = 2 / 3, 4
_FEWEST_SEQUENCES = 32
_SIZE_STEP = 32
"""Patches of images are multiples of it, so that equal images are laid out once."""


class Image(NamedTuple):
    """An image as a tower sees it."""

    grid: Grid
    num_patches: int
    num_tokens: int
    pairs: int
    """Pairs of patches that attend to each other in a block without windows."""


@dataclass(frozen=True)
class PackedShape:
    """A packed sequence with its images."""

    shape: SequenceShape
    images: tuple[Image, ...]

    @property
    def num_patches(self) -> int:
        """Patches of all images."""
        return sum(image.num_patches for image in self.images)

    @property
    def pairs(self) -> float:
        """Pairs of tokens that attend to each other."""
        return sum(n * n for n in self.shape.lengths) / 2

    def shares(self, num_context: int, num_tensor: int) -> Floats:
        """[ranks, 2]: patches, and pairs of patches, of each rank if so many divide the images as a run does."""
        found = np.zeros((num_context, num_tensor, 2))
        of_context = balance([image_cost(image.num_patches) for image in self.images], num_context)
        for rank in range(num_context):
            own = [image for image, owner in zip(self.images, of_context, strict=True) if owner == rank]
            of_tensor = balance([image_cost(image.num_patches) for image in own], num_tensor)
            for image, owner in zip(own, of_tensor, strict=True):
                found[rank, owner] += (image.num_patches, image.pairs)
        return found.reshape(-1, 2)


def draw_sequences(
    config: ModelConfig, *, seq_len: int, patches: int | None = None, image_share: float = _IMAGE_SHARE, seed: int = 0
) -> list[PackedShape]:
    """Packed sequences of up to `seq_len` tokens; `patches`: their mean number of patches, if not the mixture's.

    `image_share`: the share of samples that have images.
    """
    with torch.device("meta"):
        tower = VLM(config).vision
    rng = np.random.default_rng(seed)
    num_samples = max(_NUM_SAMPLES, _FEWEST_SEQUENCES * seq_len // 500)
    texts = np.exp(rng.normal(np.log(_MEDIAN_TEXT), _TEXT_DEVIATION, num_samples)).astype(int) + 2
    numbers = np.where(rng.random(num_samples) < image_share, rng.integers(1, _MOST_IMAGES + 1, num_samples), 0)
    sizes = np.exp(rng.normal(np.log(_MEDIAN_PATCHES), _PATCH_DEVIATION, int(numbers.sum())))
    most = min(_MOST_PATCHES, seq_len * config.vision.patches_per_token // (2 * _MOST_IMAGES))  # samples that fit

    @cache
    def image(size: int) -> Image:
        grid, num_patches = tower.square_grid(size)
        pairs = sum(n * n for n in tower.image_lengths([grid]))
        return Image(grid, num_patches, tower.layout([grid]).sizes.num_tokens, pairs)

    def images_of(factor: float) -> list[Image]:
        rounded = np.clip(factor * sizes // _SIZE_STEP, 1, most // _SIZE_STEP).astype(int) * _SIZE_STEP
        return [image(size) for size in rounded.tolist()]

    factor, images = 1.0, [] if patches == 0 else images_of(1.0)
    for _ in range(5 if patches else 0):  # grids are rounded and sizes limited: the factor is not proportional
        factor *= _patches_wanted(config, seq_len, patches or 0, texts.sum()) / sum(one.num_patches for one in images)
        images = images_of(factor)
    ends = np.cumsum(numbers) if images else np.zeros(num_samples, int)
    of_sample = [images[end - count : end] if images else [] for end, count in zip(ends, numbers, strict=True)]
    tokens = [int(text) + sum(one.num_tokens for one in own) for text, own in zip(texts, of_sample, strict=True)]
    num_patches = [sum(one.num_patches for one in own) for own in of_sample]
    packing = pack(tokens, num_patches, max_seq_len=seq_len, max_patches=max(1, 2 * sum(num_patches)))
    return [
        _packed([tokens[i] for i in chosen], [one for i in chosen for one in of_sample[i]])
        for chosen in packing.sequences[:-1] or packing.sequences  # the last one is not full
    ]


def _patches_wanted(config: ModelConfig, seq_len: int, patches: int, text: float) -> float:
    """Patches next to so much text with which sequences have so many patches: those of an image are tokens too."""
    most, per_token = config.vision.patches_per_token, patches / seq_len
    if per_token >= most:
        raise ConfigError(
            f"{patches} patches are at least {patches // most} tokens, and a packed sequence has {seq_len}, text "
            f"included. Give fewer than {most * seq_len}"
        )
    return per_token * text / (1.0 - per_token / most)


def _packed(lengths: Sequence[int], images: Sequence[Image]) -> PackedShape:
    num_text = sum(lengths) - sum(image.num_tokens for image in images)
    grids = tuple(image.grid for image in images)
    return PackedShape(SequenceShape(lengths=tuple(lengths), grids=grids, num_loss_tokens=num_text), tuple(images))


def typical(sequences: Sequence[PackedShape]) -> PackedShape:
    """The sequence whose pairs of tokens and patches are nearest to their means."""
    features = np.array([[one.pairs, sum(image.pairs for image in one.images)] for one in sequences])
    distance = np.abs(features / np.maximum(features.mean(axis=0), 1.0) - 1.0).sum(axis=1)
    return sequences[int(distance.argmin())]


def slowest_rank(
    sequences: Sequence[PackedShape],
    seconds: Callable[[PackedShape], float],
    *,
    num_ranks: int,
    num_micro_batches: int,
    seed: int = 0,
) -> float:
    """Mean over micro-batches of the time of the slowest rank, when all wait for each other in each of them.

    The packed sequences of a step are drawn, and assigned to ranks as a run assigns them.
    """
    drawn = np.random.default_rng(seed).integers(len(sequences), size=num_ranks * num_micro_batches)
    costs = np.array([one.shape.num_tokens + one.num_patches for one in sequences])[drawn]
    times = np.array([seconds(one) for one in sequences])[drawn]
    table = times[np.array(assign(costs.tolist(), num_ranks))]
    return float(table.max(axis=0).mean())
