# mypy: allow-untyped-decorators
"""Pillow's bicubic resize of an 8-bit RGB image, equal to Pillow bit for bit.

Legend: H rows, W columns, C = 3 colours of the image; in one pass N new positions of a dim, T taps of each.

    pass:  out[n]  = clip((2^21 + sum_t weight[n, t] * pixel[first[n] + t]) >> 22, 0, 255)
    image: a pass over dim 0, the vertical one, then one over dim 1 (rows_first), or in the other order; a dim that
           keeps its size has none

Pixels are uint8 between the passes too, and clipped: the order of the passes changes pixels. Sums are int32, as 255 *
sum_t |weight[n, t]| < 2^31. `weight` is an antialiased cubic filter (a = -0.5) in units of 2^-22,
computed on the host in float64 as Pillow does (`resize_weights`), and cached on the device. No backward. Bytes, from H
x W to h x w with rows first: 3 (H W + 2 h W + h w), and 4 (T + 1) for every new row and column.
"""

import functools
import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from saccade.device import to_device
from saccade.kernels import launch
from saccade.kernels.launch import tl, triton

_PRECISION_BITS = 22
"""Fractional bits of a weight, as in Pillow."""
_BLOCK, _NUM_WARPS = 1024, 4
"""Elements and warps of a program. Not tuned: bench/kernels/resize.py --tune measures them."""


@functools.lru_cache(maxsize=256)
def resize_weights(old: int, new: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """First source index [N] and integer weights [N, T] of every new position, from `old` positions. Read-only.

    Operations are in Pillow's order, because the last bit of a float64 can decide how a weight is rounded. Taps after
    the last source pixel of a position have weight 0; for them first + t may exceed `old`.
    """
    scale = old / new
    filter_scale = max(scale, 1.0)  # when shrinking, the filter is as much wider: antialiasing
    support = 2.0 * filter_scale
    num_taps = math.ceil(support) * 2 + 1
    center_N = (np.arange(new) + 0.5) * scale
    first_N = np.maximum((center_N - support + 0.5).astype(np.int32), 0)
    end_N = np.minimum((center_N + support + 0.5).astype(np.int32), old)
    source_NT = first_N[:, None] + np.arange(num_taps, dtype=np.int32)
    w_NT = _bicubic((source_NT - center_N[:, None] + 0.5) * (1.0 / filter_scale))
    w_NT[source_NT >= end_N[:, None]] = 0.0
    w_NT /= np.cumsum(w_NT, axis=1)[:, -1:]  # adds tap by tap; np.sum adds pairs
    weights_NT = (w_NT * 2**_PRECISION_BITS + np.copysign(0.5, w_NT)).astype(np.int32)  # the cast truncates
    first_N.flags.writeable = weights_NT.flags.writeable = False
    return first_N, weights_NT


def _bicubic(x: NDArray[np.float64]) -> NDArray[np.float64]:
    a, x = -0.5, np.abs(x)
    near, far = ((a + 2.0) * x - (a + 3.0)) * x * x + 1, (((x - 5) * x + 8) * x - 4) * a
    return np.where(x < 1.0, near, np.where(x < 2.0, far, 0.0))


def resize_reference(pixels_HWC: Tensor, height: int, width: int, *, rows_first: bool) -> Tensor:
    """[height, width, 3]: the formula above, in plain PyTorch."""
    for dim in (0, 1) if rows_first else (1, 0):
        pixels_HWC = _pass_reference(pixels_HWC, dim, (height, width)[dim])
    return pixels_HWC


def _pass_reference(pixels_HWC: Tensor, dim: int, new: int) -> Tensor:
    old = pixels_HWC.shape[dim]
    if old == new:
        return pixels_HWC
    first_N, weights_NT = (torch.tensor(values, device=pixels_HWC.device) for values in resize_weights(old, new))
    return _weighted_sum(pixels_HWC, dim, first_N, weights_NT)


def _weighted_sum(pixels_HWC: Tensor, dim: int, first_N: Tensor, weights_NT: Tensor) -> Tensor:
    weights_TN11 = weights_NT.T[:, :, None, None].transpose(1, 1 + dim)  # [T, N, 1, 1], or [T, 1, N, 1]
    total = torch.tensor(1 << _PRECISION_BITS - 1, dtype=torch.int32, device=pixels_HWC.device)
    for t, weight in enumerate(weights_TN11):
        source_N = (first_N + t).clamp(max=pixels_HWC.shape[dim] - 1)
        total = total + weight * pixels_HWC.index_select(dim, source_N)
    return (total >> _PRECISION_BITS).clamp(0, 255).to(torch.uint8)


@triton.jit(do_not_specialize=["num_elements", "old", "new", "inner", "num_taps"])
def _pass_kernel(
    pixels: tl.tensor,
    table: tl.tensor,
    out: tl.tensor,
    num_elements: tl.tensor,
    old: tl.tensor,
    new: tl.tensor,
    inner: tl.tensor,
    num_taps: tl.tensor,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """BLOCK elements of an output [outer, new, inner], from pixels [outer, old, inner]."""
    # Element = (o * new + n) * inner + i. 64-bit division is slow and only for the first element; the others are
    # relative to it in 32 bits.
    start = tl.program_id(0).to(tl.int64) * BLOCK
    first_line = start // inner
    first_o = first_line // new
    i = (start - first_line * inner).to(tl.int32) + tl.arange(0, BLOCK)
    line = i // inner
    i -= line * inner
    n = (first_line - first_o * new).to(tl.int32) + line
    o = n // new
    n -= o * new
    is_inside = start + tl.arange(0, BLOCK) < num_elements
    source = pixels + (first_o + o) * old * inner + i
    first = tl.load(table + n)
    total = tl.full((BLOCK,), 1 << (BITS - 1), tl.int32)
    for t in range(num_taps):
        # total += weight[n, t] * pixel[first[n] + t]; beyond the last pixel the weight is 0
        weight = tl.load(table + (t + 1) * new + n)
        index = tl.minimum(first + t, old - 1).to(tl.int64)
        total += weight * tl.load(source + index * inner, mask=is_inside, other=0).to(tl.int32)
    clipped = tl.minimum(tl.maximum(total >> BITS, 0), 255)
    tl.store(out + start + tl.arange(0, BLOCK), clipped.to(tl.uint8), mask=is_inside)


@functools.lru_cache(maxsize=256)
def _device_table(old: int, new: int, device: torch.device, stream: int) -> Tensor:
    """[1 + T, N] int32: first source index, then weights, without the last taps where all are 0.

    One per stream, so that the copy needs no synchronisation and comes before the kernels that read it.
    """
    first_N, weights_NT = resize_weights(old, new)
    num_taps = int(np.flatnonzero(np.any(weights_NT, axis=0))[-1]) + 1
    return to_device(np.ascontiguousarray(np.vstack([first_N, weights_NT.T[:num_taps]])), device)


def _pass_triton(pixels_HWC: Tensor, dim: int, new: int) -> Tensor:
    (H, W, C), old, device = pixels_HWC.shape, pixels_HWC.shape[dim], pixels_HWC.device
    if old == new:
        return pixels_HWC
    table = _device_table(old, new, device, torch.cuda.current_stream(device).cuda_stream if pixels_HWC.is_cuda else 0)
    out = pixels_HWC.new_empty((new, W, C) if dim == 0 else (H, new, C))
    inner = W * C if dim == 0 else C
    _pass_kernel[(triton.cdiv(out.numel(), _BLOCK),)](
        *(pixels_HWC, table, out, out.numel(), old, new, inner, len(table) - 1),
        BITS=_PRECISION_BITS,
        BLOCK=_BLOCK,
        num_warps=_NUM_WARPS,
    )
    return out


def _resize_triton(pixels_HWC: Tensor, height: int, width: int, *, rows_first: bool) -> Tensor:
    for dim in (0, 1) if rows_first else (1, 0):
        pixels_HWC = _pass_triton(pixels_HWC, dim, (height, width)[dim])
    return pixels_HWC


def resize(pixels_HWC: Tensor, height: int, width: int, *, rows_first: bool) -> Tensor:
    """[height, width, 3] uint8: Pillow's bicubic resize; the input itself if it has that size. Never waits for the GPU.

    rows_first: whether the vertical pass is the first one, as `saccade.processor.pillow_resize.rows_first` says for
    these sizes.
    """
    is_image = pixels_HWC.ndim == 3 and pixels_HWC.shape[2] == 3 and pixels_HWC.dtype == torch.uint8
    if not (is_image and pixels_HWC.is_contiguous() and min(*pixels_HWC.shape, height, width) >= 1):
        raise ValueError(
            f"resize: needs a contiguous uint8 image [H, W, 3] and sizes of at least 1, not {pixels_HWC.dtype} "
            f"{tuple(pixels_HWC.shape)} with strides {pixels_HWC.stride()}, to {height} x {width}"
        )
    path = launch.choose_path("resize", *launch.available_paths(pixels_HWC, "triton"))
    return (_resize_triton if path == "triton" else resize_reference)(pixels_HWC, height, width, rows_first=rows_first)
