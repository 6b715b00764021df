"""Training workloads: uniform and ragged packed sequences of image-text samples, random pixels and token ids.

uniform   16 samples of one 672 x 672 image (576 tokens, two markers) and 446 text tokens: 16384 tokens, 36864 patches
ragged    4 batches of 32 samples: image size drawn from `RAGGED_SIZES`, min(1024, max(16, exp(N(4, 1)))) text tokens

Every token carries a label.
"""

from typing import NamedTuple

import numpy as np
import torch

from saccade.model.config import VisionConfig
from saccade.processor.inputs import ModelInputs
from saccade.processor.positions import TextSpan, VisionSpan, mrope_positions

RAGGED_SIZES = ((224, 224), (336, 336), (336, 504), (448, 448), (448, 672), (672, 448), (672, 672), (896, 672))
"""Height and width in pixels."""
VISION_START, VISION_END, IMAGE_PAD = 151652, 151653, 151655
TEXT_IDS = 150000
"""Number of text ids; none of them is a control token."""


class SampleShape(NamedTuple):
    """One sample: an image followed by text."""

    height: int
    width: int
    num_text: int

    def grid(self, vision: VisionConfig) -> tuple[int, int, int]:
        """Return frame pairs, rows and columns of patches; sides are whole multiples of a token."""
        cell = vision.patch_size * vision.merge_size
        return 1, round(self.height / cell) * vision.merge_size, round(self.width / cell) * vision.merge_size


def uniform() -> list[list[SampleShape]]:
    """Return one batch of 16 equal samples."""
    return [[SampleShape(672, 672, 446)] * 16]


def ragged() -> list[list[SampleShape]]:
    """Return four batches of 32 unequal samples, with seed 7."""
    rng = np.random.default_rng(7)
    batches = []
    for _ in range(4):
        sizes = rng.integers(len(RAGGED_SIZES), size=32)
        texts = np.clip(np.exp(rng.normal(4.0, 1.0, size=32)), 16, 1024).astype(int)
        batches.append([SampleShape(*RAGGED_SIZES[i], int(n)) for i, n in zip(sizes, texts, strict=True)])
    return batches


WORKLOADS = {"uniform": uniform, "ragged": ragged}


def packed_sequence(samples: list[SampleShape], vision: VisionConfig, seed: int = 0) -> ModelInputs:
    """Pack the samples into one sequence, with uint8 pixels."""
    sequences = [
        _one(sample, vision, torch.Generator().manual_seed(seed * 1000 + i)) for i, sample in enumerate(samples)
    ]
    return ModelInputs.pack(sequences)


def _one(sample: SampleShape, vision: VisionConfig, generator: torch.Generator) -> ModelInputs:
    grid = sample.grid(vision)
    num_patches, merge = grid[1] * grid[2], vision.merge_size
    num_image = num_patches // merge**2
    text = torch.randint(TEXT_IDS, (sample.num_text,), generator=generator)
    token_ids = torch.cat([torch.tensor([VISION_START] + [IMAGE_PAD] * num_image + [VISION_END]), text])
    spans = [TextSpan(1), VisionSpan(1, grid[1] // merge, grid[2] // merge), TextSpan(1 + sample.num_text)]
    patch_dim = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    grids = torch.tensor([grid])
    return ModelInputs(
        token_ids=token_ids,
        cu_seqlens=torch.tensor([0, len(token_ids)], dtype=torch.int32),
        positions=torch.from_numpy(mrope_positions(spans)),
        loss_mask=torch.ones(len(token_ids), dtype=torch.bool),
        patches=torch.randint(256, (num_patches, patch_dim), generator=generator, dtype=torch.uint8),
        image_grids=grids,
        image_token_index=torch.arange(1, 1 + num_image),
        pixel_mean=(0.48145466, 0.4578275, 0.40821073),
        pixel_std=(0.26862954, 0.26130258, 0.27577711),
        max_seqlen=len(token_ids),
    )
