"""Vision encoder of the engine: all images of a step in one forward pass.

    round up to a patch budget -> layout -> fill host memory -> copy, patchify -> run the encoder as a CUDA graph

Launched from Python, the encoder is some 400 kernels, which take longer to launch than to run for an image or two. So it is captured
as CUDA graphs for fixed patch budgets. Batches are filled up to the budget with *padding*: blank images, windowed and
computed like any other, whose features are not read. The lists of windows and images are filled up with empty ones. Images attend
only to themselves, so padding does not change their features. A pass is captured in parts of as many blocks each, which the runner may
run one at a time. A still image comes with its frame once (`PromptImage.patches`), which is
repeated on the device, or as it is, to be resized and patchified there.

Legend: P patches, M image tokens (merged patches), F features of an image token.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from saccade.device import to_device
from saccade.engine.core.step import ENCODER_PARTS
from saccade.engine.device.cuda_graphs import CudaGraphs
from saccade.engine.prompt import PromptImage
from saccade.kernels.normalize_pixels import normalize_pixels
from saccade.model.vision.layout import Layout
from saccade.model.vlm import VLM
from saccade.processor.inputs import normalize_patches

_SMALLEST_BUDGET = 64
"""In tokens. Smaller batches take as long."""
_SMALL_BUDGETS = 1280
"""In tokens: up to here budgets are 32 apart, then 64. That is the largest image of most families."""
_LARGEST_BUDGET = 2048
"""In tokens (8192 patches when four are merged). Larger batches keep the GPU busy while the host launches the rest."""

_ALIGNMENT = 16
"""Bytes at multiples of which images begin: Triton specializes kernels on it. Patches of a token have a multiple of it."""

_NUM_TIMED = 6
"""Budgets that are timed at start; times of others are interpolated."""

_CPU_PATCHES = 2048
"""Patches per forward pass on a CPU."""


def patch_budgets(max_patches: int, patches_per_token: int) -> tuple[int, ...]:
    """Patch budgets to capture. Padding takes as long as images do, or longer where it begins another wave of programs: an image of 1288 x 952,
    4920 patches, takes 14.0 ms with a budget of 4992 and 15.1 with 5120 (H200, 3B). Budgets 64 patches apart take the time of the next 128."""
    tokens, budgets = _SMALLEST_BUDGET, [_SMALLEST_BUDGET]
    while tokens < _LARGEST_BUDGET and tokens * patches_per_token < max_patches:
        tokens += 32 if tokens < _SMALL_BUDGETS else 64
        budgets.append(tokens)
    return tuple(tokens * patches_per_token for tokens in budgets)


class Encoder:
    """The vision encoder and its CUDA graphs."""

    def __init__(
        self, model: VLM, *, pixel_mean: Sequence[float], pixel_std: Sequence[float], budgets: Sequence[int] = ()
    ) -> None:
        """`budgets`: ascending, see `patch_budgets`. Batches that fit one are padded to it, and captured on a GPU; others run eagerly."""
        self._model, self._tower, self._config = model, model.vision, model.config.vision
        self._pixel_mean, self._pixel_std = pixel_mean, pixel_std
        self._device = model.device
        self._budgets = budgets
        self._graphs: CudaGraphs[int] | None = None
        if budgets:
            num_ints = self._tower.budget_sizes(budgets[-1]).total
            # A whole image has at most as many pixels as patches of two frames.
            num_bytes = budgets[-1] * (self._config.patch_dim + _ALIGNMENT)
            self._bytes = torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)
            self._pixels = torch.zeros(budgets[-1], self._config.patch_dim, dtype=torch.uint8, device=self._device)
            self._ints = torch.zeros(num_ints, dtype=torch.int32, device=self._device)
            self._staging = [_Staging(num_bytes, num_ints, self._device) for _ in range(2)]
            if self._device.type == "cuda":
                blocks = self._tower.blocks
                bounds = [len(blocks) * part // ENCODER_PARTS for part in range(1, ENCODER_PARTS)]
                self._graphs = CudaGraphs(self._forward, [blocks[bound] for bound in sorted({*bounds} - {0})])
        self._pass: _Pass | None = None
        self._times: tuple[list[int], list[float]] = [], []  # patches of some passes, and ms

    def warm_up(self) -> None:
        """Capture all budgets, on the current stream, compile what patchifies images, and time some budgets."""
        if self._graphs is not None:
            self._forward(self._budgets[0])  # torch makes its constants, which cannot be done in a capture
            for budget in self._budgets:
                self._graphs.capture(budget)
            self._tower.warm_up(self._device)
            timed = sorted({*self._budgets[:: -(-len(self._budgets) // _NUM_TIMED)], self._budgets[-1]})
            self._times = timed, [self._time(self._graphs, budget) for budget in timed]

    @staticmethod
    def _time(graphs: CudaGraphs[int], budget: int) -> float:
        """How long a pass takes, in ms."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        graphs.run(budget)
        start.record()
        graphs.run(budget)
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end))

    @property
    def largest_budget(self) -> int:
        """Patches of the largest pass that is captured. 0: none is."""
        return self._budgets[-1] if self._budgets else 0

    def pass_ms(self, num_patches: int) -> float:
        """How long the encoder takes for so many patches, as timed at start; more than a pass has are in proportion. 0: it is not known,
        or the host waits for it."""
        patches, times = self._times
        if not patches or not num_patches:
            return 0.0
        return float(np.interp(num_patches, patches, times)) * max(1.0, num_patches / patches[-1])

    def run_largest(self) -> None:
        """Run the largest budget on whatever is in the buffers, which compiles kernels."""
        if self._budgets:
            self._forward(self._budgets[-1])

    @property
    def num_captured(self) -> int:
        """Budgets captured so far."""
        return 0 if self._graphs is None else self._graphs.num_captured

    @property
    def num_late_captures(self) -> int:
        """Budgets captured while serving."""
        return 0 if self._graphs is None else self._graphs.num_late_captures

    @torch.inference_mode()
    def encode(self, images: Sequence[PromptImage]) -> Tensor:
        """[M, F]: features of all images, in order. See `run`."""
        self.start(images)
        features_MF = self.run(ENCODER_PARTS)
        assert features_MF is not None, "all parts were run"
        return features_MF

    @torch.inference_mode()
    def start(self, images: Sequence[PromptImage]) -> None:
        """Start a pass: upload the images. A pass that was started before is given up.

        All work is queued on the current stream, which must always be the same one and not the default.
        """
        grids = [image.grid for image in images]
        num_patches = sum(image.span.num_patches for image in images)
        index = bisect_left(self._budgets, num_patches)
        budget = self._budgets[index] if index < len(self._budgets) else None
        layout = None if budget is None else self._tower.padded_layout(grids, budget)
        if budget is None or layout is None:
            budget = None
        else:
            self._upload(images, num_patches, layout, budget)
        self._pass = _Pass(images, budget)

    @torch.inference_mode()
    def run(self, num_parts: int) -> Tensor | None:
        """Run so many parts of the pass that was started; one that is not captured runs whole. Returns the features [M, F] of all images, in
        order, when it is complete. Copy them at once: the next pass may overwrite them."""
        started = self._pass
        assert started is not None, "a pass was started"
        features_MF = self._run(started, num_parts)
        started.num_parts_run += num_parts
        if features_MF is None:
            return None
        self._pass = None
        return features_MF[: sum(image.span.num_tokens for image in started.images)]

    def _run(self, started: _Pass, num_parts: int) -> Tensor | None:
        if started.budget is None:
            return self._encode_eager(started.images)
        if self._graphs is None:
            return self._forward(started.budget)
        return self._graphs.run_parts(started.budget, started.num_parts_run, num_parts)

    def _encode_eager(self, images: Sequence[PromptImage]) -> Tensor:
        if self._device.type == "cpu":
            return torch.cat([self._encode_group(group) for group in _groups(images)])
        return self._encode_group(images)

    def _encode_group(self, images: Sequence[PromptImage]) -> Tensor:
        num_patches = sum(image.span.num_patches for image in images)
        patches = torch.empty(num_patches, self._config.patch_dim, dtype=torch.uint8, device=self._device)
        data = np.empty(sum(_sizes(images)), np.uint8)
        _write_bytes(images, data)
        self._write_patches(images, to_device(data, self._device), patches)
        pixels = normalize_patches(patches, self._pixel_mean, self._pixel_std)
        return self._model.encode_images(pixels, torch.tensor([image.grid for image in images]))

    def _upload(self, images: Sequence[PromptImage], num_patches: int, layout: Layout, budget: int) -> None:
        """Write pixels and layout into the buffers that `_forward` reads. Padding pixels are zero."""
        sizes = self._tower.budget_sizes(budget)
        staging = self._staging[0]
        self._staging.reverse()
        staging.wait()
        _write_bytes(images, staging.bytes)
        layout.write(staging.ints, sizes)
        staging.send(self._bytes[: sum(_sizes(images))], self._ints[: sizes.total])
        self._write_patches(images, self._bytes, self._pixels)
        self._pixels[num_patches:budget].zero_()

    def _write_patches(self, images: Sequence[PromptImage], data: Tensor, patches: Tensor) -> None:
        """Write the patches [P, patch_dim] of all images from their bytes (`_write_bytes`). Still images have one frame, which is repeated;
        whole ones are resized and patchified first."""
        channels, depth, side = self._config.in_channels, self._config.temporal_patch_size, self._config.patch_size
        sizes, first = _sizes(images), 0
        for image, part in zip(images, torch.split(data[: sum(sizes)], sizes), strict=True):
            end = first + image.span.num_patches
            frames = part[: image.patches.nbytes].view(image.patches.shape)
            if image.is_whole:
                frames = self._tower.patchify(frames, image.grid)
            into = patches[first:end].view(end - first, channels, depth, side * side)
            into.copy_(frames.view(end - first, channels, -1, side * side))
            first = end

    def _forward(self, budget: int) -> Tensor:
        """Features of the contents of the device buffers. Capturable: its control flow depends on the budget only."""
        pixels = normalize_pixels(self._pixels[:budget], self._pixel_mean, self._pixel_std, self._model.dtype)
        return self._model.encode_patches(pixels, self._tower.budget_sizes(budget).inputs(self._ints))


class _Pass:
    """A pass that was started."""

    def __init__(self, images: Sequence[PromptImage], budget: int | None) -> None:
        self.images, self.budget = images, budget
        self.num_parts_run = 0


def _sizes(images: Sequence[PromptImage]) -> list[int]:
    """Bytes of each image, aligned."""
    return [-(-image.patches.nbytes // _ALIGNMENT) * _ALIGNMENT for image in images]


def _write_bytes(images: Sequence[PromptImage], out: NDArray[np.uint8]) -> None:
    """Write the bytes of all images, one after another."""
    offset = 0
    for image, size in zip(images, _sizes(images), strict=True):
        out[offset : offset + image.patches.nbytes] = image.patches.reshape(-1)
        offset += size


def _groups(images: Sequence[PromptImage]) -> Iterator[list[PromptImage]]:
    """Groups of images small enough for activations to stay in the CPU's cache."""
    group: list[PromptImage] = []
    num_patches = 0
    for image in images:
        if group and num_patches + image.span.num_patches > _CPU_PATCHES:
            yield group
            group, num_patches = [], 0
        group.append(image)
        num_patches += image.span.num_patches
    yield group


class _Staging:
    """Pinned host memory for asynchronous copies to the device."""

    def __init__(self, num_bytes: int, num_ints: int, device: torch.device) -> None:
        is_gpu = device.type == "cuda"
        self._bytes = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=is_gpu)
        self._ints = torch.zeros(num_ints, dtype=torch.int32, pin_memory=is_gpu)
        self.bytes: NDArray[np.uint8] = self._bytes.numpy()
        self.ints: NDArray[np.int32] = self._ints.numpy()
        self._sent: torch.cuda.Event | None = None
        if is_gpu:
            self._sent = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Wait until the last copy from this memory has completed. It usually has: the other buffer was copied after it."""
        if self._sent is not None:
            self._sent.synchronize()

    def send(self, data: Tensor, ints: Tensor) -> None:
        """Copy to the device as much as the two tensors hold."""
        data.copy_(self._bytes[: len(data)], non_blocking=True)
        ints.copy_(self._ints[: len(ints)], non_blocking=True)
        if self._sent is not None:
            self._sent.record()
