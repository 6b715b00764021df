# mypy: allow-untyped-decorators
"""Linear layers with weights of 4 bits and activations of 16 (W4A16).

Legend: T tokens, D inputs, N outputs, Z groups of inputs that share a scale (D / Z inputs each), S splits of the
inputs.

    y[t, n] = sum_d x[t, d] * (q[n, d] - zero[n, z(d)]) * weight_scale[n, z(d)] + bias[n]

The products of a group are summed in fp32 before they are scaled. Words, scales and zero points are those of
`dequantize_int4.py`, the words interleaved. x and y are [T, D] and [T, N] in one float dtype; scales in any float dtype
are used as fp32. Memory-bound up to about 64 tokens: N * D / 2 bytes are read once. Many tokens are multiplied by the
dequantized weight, in torch's matmul. No backward: quantized weights are not trained.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from saccade.kernels import launch
from saccade.kernels._split_linear import (
    SplitTiles,
    choose_splits,
    layer_shape,
    split_tiles,
    sum_of_splits,
    tile_of_program,
)
from saccade.kernels.dequantize_int4 import (
    UNITS,
    centred_values,
    dequantize_int4_reference,
    dequantize_int4_triton,
    load_group,
    nibble_values,
)
from saccade.kernels.launch import tl, triton


def linear_w4a16_reference(
    x_TD: Tensor,
    words: Tensor,
    weight_scale_NZ: Tensor,
    weight_zero_point: Tensor | None = None,
    bias_N: Tensor | None = None,
) -> Tensor:
    """The formula above, in fp32."""
    weight_ND = dequantize_int4_reference(words, weight_scale_NZ, weight_zero_point, torch.float32)
    return F.linear(x_TD.float(), weight_ND, None if bias_N is None else bias_N.float()).to(x_TD.dtype)


@triton.jit(do_not_specialize=["T"])
def _w4a16_kernel(
    x: tl.tensor,
    words: tl.tensor,
    weight_scale: tl.tensor,
    zero_point: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    sums: tl.tensor,
    counters: tl.tensor,
    T: tl.tensor,
    N: tl.tensor,
    Z: tl.tensor,
    x_stride: tl.tensor,
    word_stride: tl.tensor,
    GROUP: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
) -> None:
    """One tile of outputs over one split of the inputs, 128 inputs (16 words per output) a step.

    Weights are the left operand and outputs are transposed: Hopper's wgmma takes its left operand from registers, where
    the nibbles are unpacked, but its right one only from shared memory. In all 2.6 instructions per weight at 16
    tokens.
    """
    t, n = tile_of_program(T, N, BLOCK_T, BLOCK_N)
    GROUPS: tl.constexpr = 128 // GROUP if GROUP < 128 else 1  # groups within a step
    SIZE: tl.constexpr = 128 // GROUPS  # inputs of one of them
    n_read = tl.where(n < N, n, 0)
    is_token = (t < T)[:, None]
    x_rows = x + t.to(tl.int64)[:, None] * x_stride + tl.arange(0, SIZE)[None, :]
    word_rows = words + n_read.to(tl.int64)[:, None] * word_stride + tl.arange(0, 16)[None, :]
    dtype: tl.constexpr = x.dtype.element_ty
    steps = word_stride // 16
    first = steps * tl.program_id(1) // tl.num_programs(1)
    end = steps * (tl.program_id(1) + 1) // tl.num_programs(1)
    total = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    scale, zero_words = load_group(weight_scale, zero_point, n_read, first * 128 // GROUP, Z, HAS_ZERO)
    for step in range(first, end):
        tile = tl.load(word_rows + step * 16)
        for g in tl.static_range(GROUPS):
            # Scales are loaded one group ahead; asynchronous copies hide the latency of words and tokens.
            after = tl.minimum((step * 128 + (g + 1) * SIZE) // GROUP, Z - 1)
            next_scale, next_zero_words = load_group(weight_scale, zero_point, n_read, after, Z, HAS_ZERO)
            x_tile = tl.load(x_rows + step * 128 + g * SIZE, mask=is_token, other=0.0)
            values = centred_values(nibble_values(tile, g, GROUPS, dtype), zero_words, n, HAS_ZERO, UNIT)
            part = tl.dot(values, tl.trans(x_tile), input_precision="ieee")
            total += part * (scale.to(tl.float32) / UNIT)[:, None]
            scale, zero_words = next_scale, next_zero_words
    stored = (t < T)[None, :] & (n < N)[:, None]
    offset = t.to(tl.int64)[None, :] * N + n[:, None]
    if SPLIT:
        total, is_last = sum_of_splits(total, sums, counters, offset, stored, T, N)
        if not is_last:
            return
    if HAS_BIAS:
        total += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    tl.store(out + offset, total.to(out.dtype.element_ty), mask=stored)


_LARGE_TILES = SplitTiles(block_t=128, block_n=128, block_d=128, num_warps=8, num_stages=4, programs_per_sm=1)

# More than 8192 outputs -> maximum number of tokens -> tiles, measured on an H200 at the 3B shapes
# by the bench with --tune. At 16 / 64 tokens gate and up takes 13.6 / 20.5 us, torch in bf16 26.9 / 28.8; qkv
# 5.5 / 7.4, torch 6.6 / 6.8.
_TILES: dict[bool, dict[int, SplitTiles]] = {
    False: {
        16: SplitTiles(block_t=16, block_n=64, block_d=128, num_warps=4, num_stages=4, programs_per_sm=2),
        64: SplitTiles(block_t=32, block_n=64, block_d=128, num_warps=4, num_stages=4, programs_per_sm=2),
        2**62: _LARGE_TILES,
    },
    True: {
        16: SplitTiles(block_t=16, block_n=64, block_d=128, num_warps=4, num_stages=6, programs_per_sm=4),
        32: SplitTiles(block_t=32, block_n=128, block_d=128, num_warps=4, num_stages=5, programs_per_sm=3),
        64: SplitTiles(block_t=64, block_n=64, block_d=128, num_warps=4, num_stages=3, programs_per_sm=2),
        2**62: _LARGE_TILES,
    },
}

_FP32_TILES = SplitTiles(block_t=16, block_n=64, block_d=128, num_warps=4, num_stages=1, programs_per_sm=2)
"""fp32 tokens have no matrix unit and four bytes: larger tiles exceed the shared memory. For tests alone."""
_LIBRARY_TOKENS = {"small": 128, "wide": 257, "deep": 257}
"""Tokens from which dequantizing and torch's matmul are faster, by shape: gate and up of 2048 takes 265 / 433 us."""


def _linear_w4a16_triton(
    x_TD: Tensor,
    words: Tensor,
    weight_scale_NZ: Tensor,
    weight_zero_point: Tensor | None,
    bias_N: Tensor | None,
    tiles: SplitTiles,
    num_splits: int | None = None,
) -> Tensor:
    (T, D), (N, Z) = x_TD.shape, weight_scale_NZ.shape
    num_programs = triton.cdiv(T, tiles.block_t) * triton.cdiv(N, tiles.block_n)
    splits, counters = choose_splits(tiles, num_programs, D, x_TD.device, num_splits)
    out_TN = x_TD.new_empty((T, N))
    sums_STN = out_TN if counters is None else x_TD.new_empty((splits, T, N), dtype=torch.float32)
    _w4a16_kernel[(num_programs, splits)](
        x_TD, words, weight_scale_NZ, words if weight_zero_point is None else weight_zero_point,
        out_TN if bias_N is None else bias_N, out_TN, sums_STN, out_TN if counters is None else counters, T, N, Z,
        x_TD.stride(0), words.stride(0), GROUP=D // Z, HAS_ZERO=weight_zero_point is not None,
        HAS_BIAS=bias_N is not None, UNIT=UNITS[x_TD.dtype], BLOCK_T=tiles.block_t, BLOCK_N=tiles.block_n,
        SPLIT=counters is not None, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    return out_TN


def linear_w4a16(
    x_TD: Tensor,
    words: Tensor,
    weight_scale_NZ: Tensor,
    weight_zero_point: Tensor | None = None,
    bias_N: Tensor | None = None,
) -> Tensor:
    """x W' + bias on 4-bit weights; `words` is `interleave_int4` of a checkpoint's `weight_packed`."""
    (T, D), (N, Z) = x_TD.shape, weight_scale_NZ.shape
    group = D // max(1, Z)
    if words.shape != (N, D // 8) or D % 128 or group * Z != D or (group % 128 and group not in (16, 32, 64)):
        raise ValueError(
            f"linear_w4a16: x {tuple(x_TD.shape)}, words {tuple(words.shape)} and scales "
            f"{tuple(weight_scale_NZ.shape)} do not fit; inputs must be a multiple of 128, groups 16, 32, 64 or a "
            "multiple of 128 inputs"
        )
    if not (words.is_contiguous() and weight_scale_NZ.is_contiguous()):
        raise ValueError("linear_w4a16: words and scales must be contiguous")
    able: tuple[launch.Path, ...] = launch.available_paths(x_TD, "triton")
    if "triton" in able:
        is_faster = x_TD.is_cuda and _LIBRARY_TOKENS[layer_shape(N, D)] <= T
        able = ("library", *able) if is_faster else (*able, "library")
    path = launch.choose_path("linear_w4a16", *able)
    if path == "reference" or T == 0:
        return linear_w4a16_reference(x_TD, words, weight_scale_NZ, weight_zero_point, bias_N)
    x_TD = x_TD if x_TD.stride(1) == 1 else x_TD.contiguous()
    if path == "library":
        return F.linear(x_TD, dequantize_int4_triton(words, weight_scale_NZ, weight_zero_point, x_TD.dtype), bias_N)
    tiles = _FP32_TILES if x_TD.dtype == torch.float32 else split_tiles(_TILES[N > 8192], T)
    return _linear_w4a16_triton(x_TD, words, weight_scale_NZ, weight_zero_point, bias_N, tiles)
