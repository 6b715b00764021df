"""Images to features, all images of a step in one pass of the tower.

    round up to a budget of patches -> plan -> fill host memory -> copy -> run the tower, replayed from a recording

From Python the tower is some 400 launches, which take longer than the work of an image or two. So its work is recorded, for a
number of patches. What is missing to that number is filled up with *nobody*: blank images, planned, windowed and computed like any
other, whose features no one reads. The lists of windows and images are filled up with empty ones. Images see only themselves, so
who lies beside them in the row does not matter to them.

Legend: P patches, M image tokens (merged patches), D decoder width.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from saccade.device import to_device
from saccade.engine.graphs import Graphs
from saccade.engine.prompt import PromptImage
from saccade.model.config import VisionConfig
from saccade.model.vision import LayoutSizes, WindowLayout, window_layout
from saccade.model.vlm import VLM
from saccade.processor.inputs import normalize_patches

Grid = tuple[int, int, int]
"""Frame pairs, rows and columns of patches."""

_SMALLEST_BUDGET = 64
"""In tokens. Below it the tower takes as long as for it."""
_LARGEST_BUDGET = 2048
"""In tokens (8192 patches of a tower that merges four). More than that keeps the GPU busy while the host launches the rest."""

_CPU_PATCHES = 2048
"""Encoded at once on a CPU."""


def patch_budgets(max_patches: int, patches_per_token: int) -> tuple[int, ...]:
    """Numbers of patches to record the tower for: 64 tokens apart, then four to a doubling, which leaves nobody a fifth at most."""
    tokens, budgets = _SMALLEST_BUDGET, [_SMALLEST_BUDGET]
    while tokens < _LARGEST_BUDGET and tokens * patches_per_token < max_patches:
        tokens += max(_SMALLEST_BUDGET, 1 << (tokens.bit_length() - 1) >> 2)
        budgets.append(tokens)
    return tuple(tokens * patches_per_token for tokens in budgets)


def budget_sizes(budget: int, config: VisionConfig) -> LayoutSizes:
    """What a recording of a budget has room for: four times the windows of whole ones, and images of 64 patches each, and a few.

    An empty window or image costs next to nothing: a program of the attention kernel that finds it has no rows.
    """
    max_window = config.window_tokens**2 * config.patches_per_token
    return LayoutSizes(
        num_tokens=budget // config.patches_per_token,
        num_patches=budget,
        num_images=budget // 64 + 8,
        num_windows=4 * -(-budget // max_window) + 32,
        max_image=budget,
        max_window=max_window,
    )


def padded_plan(grids: Sequence[Grid], budget: int, config: VisionConfig) -> WindowLayout | None:
    """The plan of the images and, behind them, nobody's up to the budget. None: they are too small and too many for a recording."""
    missing = budget - sum(frames * rows * columns for frames, rows, columns in grids)
    plan = window_layout([*grids, *_nobody(missing // config.patches_per_token, config)], config)
    sizes, room = plan.sizes, budget_sizes(budget, config)
    return plan if sizes.num_images <= room.num_images and sizes.num_windows <= room.num_windows else None


def _nobody(num_tokens: int, config: VisionConfig) -> list[Grid]:
    """Images of so many tokens in all: a row of whole windows, and a row of single tokens."""
    merge, side = config.merge_size, config.merge_size * config.window_tokens
    num_windows, num_rest = divmod(num_tokens, config.window_tokens**2)
    grids = [(1, side, side * num_windows), (1, merge, merge * num_rest)]
    return [grid for grid in grids if grid[2]]


class Encoder:
    """The tower and its recordings."""

    def __init__(
        self, model: VLM, *, pixel_mean: Sequence[float], pixel_std: Sequence[float], budgets: Sequence[int] = ()
    ) -> None:
        """`budgets`: rising, see `patch_budgets`. What fits one is padded to it, and on a GPU recorded; the rest runs as it is."""
        self._model, self._config = model, model.config.vision
        self._pixel_mean, self._pixel_std = pixel_mean, pixel_std
        self._device = model.head.weight.device
        self._budgets = budgets
        self._graphs: Graphs[int] | None = None
        if budgets:
            num_numbers = budget_sizes(budgets[-1], self._config).total
            pixel_shape = (budgets[-1], self._config.patch_dim)
            self._pixels = torch.zeros(pixel_shape, dtype=torch.uint8, device=self._device)
            self._numbers = torch.zeros(num_numbers, dtype=torch.int32, device=self._device)
            self._staging = [_Staging(pixel_shape, num_numbers, self._device) for _ in range(2)]
            if self._device.type == "cuda":
                self._graphs = Graphs(self._forward)

    @property
    def num_recorded(self) -> int:
        """Budgets recorded so far."""
        return 0 if self._graphs is None else self._graphs.num_recorded

    @torch.inference_mode()
    def encode(self, images: Sequence[PromptImage]) -> Tensor:
        """[M, D]: features of all images, in reading order. Copy them at once: the next call may overwrite them.

        Everything is queued on the current stream, which must always be the same one and not the default.
        """
        grids = [image.grid for image in images]
        num_patches = sum(len(image.patches) for image in images)
        place = bisect_left(self._budgets, num_patches)
        budget = self._budgets[place] if place < len(self._budgets) else None
        plan = None if budget is None else padded_plan(grids, budget, self._config)
        if budget is None or plan is None:
            return self._encode_as_it_is(images)
        self._upload(images, num_patches, plan, budget)
        features_MD = self._forward(budget) if self._graphs is None else self._graphs.run(budget)
        return features_MD[: num_patches // self._config.patches_per_token]

    def _encode_as_it_is(self, images: Sequence[PromptImage]) -> Tensor:
        if self._device.type == "cpu":
            return torch.cat([self._encode_at_once(group) for group in _groups(images)])
        return self._encode_at_once(images)

    def _encode_at_once(self, images: Sequence[PromptImage]) -> Tensor:
        patches = to_device(np.concatenate([image.patches for image in images]), self._device)
        pixels = normalize_patches(patches, self._pixel_mean, self._pixel_std)
        return self._model.encode_images(pixels, torch.tensor([image.grid for image in images]))

    def _upload(self, images: Sequence[PromptImage], num_patches: int, plan: WindowLayout, budget: int) -> None:
        """Put pixels and plan where `_forward` reads them. Nobody's pixels are zero."""
        sizes = budget_sizes(budget, self._config)
        staging = self._staging[0]
        self._staging.reverse()
        staging.wait()
        np.concatenate([image.patches for image in images], out=staging.pixels[:num_patches])
        plan.write(staging.numbers, sizes)
        staging.send(self._pixels[:num_patches], self._numbers[: sizes.total])
        self._pixels[num_patches:budget].zero_()

    def _forward(self, budget: int) -> Tensor:
        """Features of what lies in the device's buffers. Only the budget and tensors decide what it does."""
        pixels = normalize_patches(self._pixels[:budget], self._pixel_mean, self._pixel_std)
        return self._model.encode_patches(pixels, budget_sizes(budget, self._config).inputs(self._numbers))


def _groups(images: Sequence[PromptImage]) -> Iterator[list[PromptImage]]:
    """The images, so many at a time that what lies between two layers stays in the cache of a CPU."""
    group: list[PromptImage] = []
    num_patches = 0
    for image in images:
        if group and num_patches + len(image.patches) > _CPU_PATCHES:
            yield group
            group, num_patches = [], 0
        group.append(image)
        num_patches += len(image.patches)
    yield group


class _Staging:
    """Host memory from which a copy to the device need not be waited for, until the memory is filled again."""

    def __init__(self, pixel_shape: tuple[int, int], num_numbers: int, device: torch.device) -> None:
        is_gpu = device.type == "cuda"
        self._pixels = torch.zeros(pixel_shape, dtype=torch.uint8, pin_memory=is_gpu)
        self._numbers = torch.zeros(num_numbers, dtype=torch.int32, pin_memory=is_gpu)
        self.pixels: NDArray[np.uint8] = self._pixels.numpy()
        self.numbers: NDArray[np.int32] = self._numbers.numpy()
        self._sent: torch.cuda.Event | None = None
        if is_gpu:
            self._sent = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Until what was sent has left. It has, as a rule: the other memory was sent after it."""
        if self._sent is not None:
            self._sent.synchronize()

    def send(self, pixels: Tensor, numbers: Tensor) -> None:
        """Copy to the device as much as there is room for in the two tensors."""
        pixels.copy_(self._pixels[: len(pixels)], non_blocking=True)
        numbers.copy_(self._numbers[: len(numbers)], non_blocking=True)
        if self._sent is not None:
            self._sent.record()
