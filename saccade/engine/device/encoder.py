"""The vision encoder on the device: passes over several images, in parts.

    round up to a patch budget -> layout -> fill host memory -> copy, patchify -> run parts as CUDA graphs

For an image or two, the encoder's 400 kernels take longer to launch than to run. So it is captured as CUDA graphs for
fixed patch budgets, one graph for each part. A pass is filled up to its budget with *padding*: blank images that are
computed like any other, but whose features are not read. Images attend only to themselves, so padding does not change
their features. A pass that fits no budget runs eagerly, also in parts.

A still image is uploaded either as the patches of one frame (`PromptImage.patches`), which are repeated on the device,
or as a whole image, which is resized and patchified there.

Legend: P patches, M image tokens (merged patches), F features of an image token.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from saccade.device import to_device
from saccade.engine.core.admission import PATCHES_PER_TOKEN
from saccade.engine.core.step import ENCODER_PARTS
from saccade.engine.device.cuda_graphs import CudaGraphs
from saccade.engine.prompt import PromptImage
from saccade.kernels.normalize_pixels import normalize_pixels
from saccade.model.vision.layout import Layout
from saccade.model.vlm import VLM
from saccade.processor.inputs import normalize_patches

_SMALLEST_BUDGET = 64
"""Image tokens of the smallest budget. Smaller passes take equally long."""
_SMALL_BUDGETS = 1280
"""Budgets up to this many tokens, the largest image of most families, are 32 tokens apart; larger ones 64."""
_LARGEST_BUDGET = 2048
"""Image tokens of the largest budget (8192 patches if four are merged). Larger passes run eagerly: they take longer
than their launch."""

_ALIGNMENT = 16
"""Images begin at multiples of this many bytes, because Triton specializes kernels on alignment. The patches of a token
take a multiple of it."""

_FIRST_BUDGETS = 3
"""Every third budget is captured before the engine is ready."""
_NUM_TIMED = 6
"""Number of budgets that are timed at start-up; times of others are interpolated."""

_CPU_PATCHES = 2048
"""Maximum patches of a group of images on a CPU."""


def patch_budgets(max_patches: int, patches_per_token: int) -> tuple[int, ...]:
    """Patch budgets to capture, ascending. Padding is computed like images, so budgets are close together."""
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
        """`budgets`: see `patch_budgets`. Passes that fit one are padded and, on a GPU, captured."""
        self._model, self._tower, self._config = model, model.vision, model.config.vision
        self._pixel_mean, self._pixel_std = pixel_mean, pixel_std
        self.device, self.dtype = model.device, model.dtype
        self._budgets = budgets
        self._graphs: CudaGraphs[int] | None = None
        if budgets:
            num_ints = self._tower.budget_sizes(budgets[-1]).total
            # A whole image has at most as many bytes as its patches with two frames.
            num_bytes = budgets[-1] * (self._config.patch_dim + _ALIGNMENT)
            self._bytes = torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)
            self._pixels = torch.zeros(budgets[-1], self._config.patch_dim, dtype=torch.uint8, device=self.device)
            self._ints = torch.zeros(num_ints, dtype=torch.int32, device=self.device)
            self._staging = [_Staging(num_bytes, num_ints, self.device) for _ in range(2)]
            if self.device.type == "cuda":
                self._graphs = CudaGraphs(self._forward)
        self._pass: _Pass | None = None
        self._times: tuple[list[int], list[float]] = [], []  # patches of the timed passes, and their ms

    def warm_up(self) -> None:
        """Capture some budgets on the current stream, compile the patchify kernels, and time a few budgets."""
        if self._graphs is not None:
            self.run_budget(self._budgets[0])  # torch creates its constants, which it cannot do in a capture
            first = self._budgets[::-1][::_FIRST_BUDGETS][::-1]  # the largest is one of them
            for budget in self._budgets:
                cover = first[bisect_left(first, budget)]
                if budget == cover:
                    self._graphs.capture(budget)
                else:
                    self._graphs.postpone(budget, cover, (cover - budget) // PATCHES_PER_TOKEN)
            self._tower.warm_up(self.device)
            timed = sorted({*first[:: -(-len(first) // _NUM_TIMED)], first[-1]})
            self._times = timed, [self._time(self._graphs, budget) for budget in timed]

    def capture_next(self) -> bool:
        """Capture a budget whose capture was postponed. False: there is none."""
        return self._graphs is not None and self._graphs.capture_next()

    @staticmethod
    def _time(graphs: CudaGraphs[int], budget: int) -> float:
        """Time of a pass in ms."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        graphs.run(budget)
        start.record()
        graphs.run(budget)
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end))

    @property
    def largest_budget(self) -> int | None:
        """Patches of the largest captured pass. None: passes are not captured."""
        return self._budgets[-1] if self._budgets else None

    def pass_ms(self, num_patches: int) -> float:
        """Time of a pass in ms, interpolated from those measured at start-up. 0: unknown.

        Larger passes take proportionally longer.
        """
        patches, times = self._times
        if not patches or not num_patches:
            return 0.0
        return float(np.interp(num_patches, patches, times)) * max(1.0, num_patches / patches[-1])

    def run_largest(self) -> None:
        """Run a pass of the largest budget on the contents of the buffers, which compiles kernels."""
        if self._budgets:
            self.run_budget(self._budgets[-1])

    def run_budget(self, budget: int) -> None:
        """Run a pass of this budget eagerly on the contents of the buffers."""
        list(self._forward(budget))

    @property
    def num_captured(self) -> int:
        """Number of budgets captured so far."""
        return 0 if self._graphs is None else self._graphs.num_captured

    @property
    def num_late_captures(self) -> int:
        """Number of budgets captured while serving."""
        return 0 if self._graphs is None else self._graphs.num_late_captures

    @torch.inference_mode()
    def encode(self, images: Sequence[PromptImage]) -> Tensor:
        """[M, F]: features of all images, in order. See `run`."""
        self.start(images)
        features_MF = self.run(ENCODER_PARTS)
        assert features_MF is not None, "all parts were run"
        return features_MF

    @torch.inference_mode()
    def start(self, images: Sequence[PromptImage], num_parts: int = ENCODER_PARTS) -> None:
        """Upload the images of a pass and divide it into `num_parts` parts. A pass in progress is abandoned.

        All work is queued on the current stream, which must always be the same one and not the default stream.
        """
        grids = [image.grid for image in images]
        num_patches = sum(image.span.num_patches for image in images)
        index = bisect_left(self._budgets, num_patches)
        budget = self._budgets[index] if index < len(self._budgets) else None
        if budget is not None and self._graphs is not None:
            budget = self._graphs.fitting(budget)
        layout = None if budget is None else self._tower.padded_layout(grids, budget)
        num_tokens = sum(image.span.num_tokens for image in images)
        if budget is None or layout is None:
            self._pass = _Pass(self._encode_eager(images, num_parts), num_tokens)
            return
        self._upload(images, num_patches, layout, budget)
        parts = self._forward(budget) if self._graphs is None else self._graphs.run_parts(budget)
        self._pass = _Pass(parts, num_tokens)

    @torch.inference_mode()
    def run(self, num_parts: int) -> Tensor | None:
        """Run `num_parts` parts of the pass in progress.

        After the last part, returns the features [M, F] of all images, in order. Copy them at once: the next pass may
        overwrite them.
        """
        started = self._pass
        assert started is not None, "a pass was started"
        for features_MF in itertools.islice(started.parts, num_parts):
            if features_MF is not None:
                self._pass = None
                return features_MF[: started.num_tokens]
        return None

    def _encode_eager(self, images: Sequence[PromptImage], num_parts: int) -> Iterator[Tensor | None]:
        """Encode images in parts. On a CPU, each part runs over one small group of images after another."""
        groups = _groups(images) if self.device.type == "cpu" else [images]
        passes = [self._encode_group(group, num_parts) for group in groups]
        for features in zip(*passes, strict=True):
            yield None if features[0] is None else torch.cat(features)

    def _encode_group(self, images: Sequence[PromptImage], num_parts: int) -> Iterator[Tensor | None]:
        num_patches = sum(image.span.num_patches for image in images)
        patches = torch.empty(num_patches, self._config.patch_dim, dtype=torch.uint8, device=self.device)
        data = np.empty(sum(_sizes(images)), np.uint8)
        _write_bytes(images, data)
        self._write_patches(images, to_device(data, self.device), patches)
        pixels = normalize_patches(patches, self._pixel_mean, self._pixel_std)
        layout = self._tower.layout([image.grid for image in images])
        yield from self._model.encode_in_parts(pixels, layout.to(self.device), num_parts)

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
        """Write the patches [P, patch_dim] of all images from their bytes (`_write_bytes`).

        The one frame of a still image is repeated. A whole image is resized and patchified first.
        """
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

    def _forward(self, budget: int) -> Iterator[Tensor | None]:
        """Encode the contents of the device buffers, in parts. Capturable: control flow depends only on the budget."""
        pixels = normalize_pixels(self._pixels[:budget], self._pixel_mean, self._pixel_std, self._model.dtype)
        inputs = self._tower.budget_sizes(budget).inputs(self._ints)
        yield from self._model.encode_in_parts(pixels, inputs, ENCODER_PARTS)


class _Pass(NamedTuple):
    """A pass in progress."""

    parts: Iterator[Tensor | None]
    """Runs a part when its item is consumed. The last item is the features; the others are None."""
    num_tokens: int
    """Number of image tokens, without padding."""


def _sizes(images: Sequence[PromptImage]) -> list[int]:
    """Bytes of each image, rounded up to `_ALIGNMENT`."""
    return [-(-image.patches.nbytes // _ALIGNMENT) * _ALIGNMENT for image in images]


def _write_bytes(images: Sequence[PromptImage], out: NDArray[np.uint8]) -> None:
    """Write the bytes of all images to aligned offsets, one after another."""
    offset = 0
    for image, size in zip(images, _sizes(images), strict=True):
        out[offset : offset + image.patches.nbytes] = image.patches.reshape(-1)
        offset += size


def _groups(images: Sequence[PromptImage]) -> Iterator[list[PromptImage]]:
    """Divide images into groups whose activations fit into the CPU's cache."""
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
        """Wait until the last copy from this memory is complete. Usually it is: the other buffer was copied later."""
        if self._sent is not None:
            self._sent.synchronize()

    def send(self, data: Tensor, ints: Tensor) -> None:
        """Fill two device tensors from this memory."""
        data.copy_(self._bytes[: len(data)], non_blocking=True)
        ints.copy_(self._ints[: len(ints)], non_blocking=True)
        if self._sent is not None:
            self._sent.record()
