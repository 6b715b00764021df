# mypy: allow-untyped-decorators
"""Products of one or two tokens with a weight, both in 8 bits (decode of a small batch).

Legend: T tokens (at most MAX_TOKENS for the kernel), D inputs, N outputs.

    y[t, n] = x_scale[t] * weight_scale[n] * sum_d x8[t, d] * weight[n, d] + bias[n]

Shapes and dtypes are those of `matmul_w8a8`, whose reference is the specification; more tokens take it. Sums are fp32,
those of int8 too. Forward only. Memory-bound: N * D bytes are read once (`_few_tokens.py`).
"""

import torch
from torch import Tensor

from saccade.kernels import launch
from saccade.kernels._few_tokens import MAGIC, VectorTiles, max_tokens, sum_of_vectors, vector_tiles
from saccade.kernels.launch import tl, triton
from saccade.kernels.linear_w8a8 import matmul_w8a8, matmul_w8a8_reference

small_matmul_w8a8_reference = matmul_w8a8_reference
"""The specification is the same for any number of tokens."""


@triton.jit
def _numbers(tile: tl.tensor, j: tl.constexpr, magic: tl.tensor) -> tl.tensor:
    """fp8 values, or byte j of words with four int8 values, as floats.

    Bytes are set into the mantissa of 2^15: the conversion of integers is slow (16 a clock).
    """
    if tile.dtype == tl.int32:
        moved = (tile ^ -0x7F7F7F80) >> (8 * j - 8) if j > 0 else (tile ^ -0x7F7F7F80) << 8
        numbers = ((moved & 0xFF00) | (magic + 0x04000000)).to(tl.float32, bitcast=True) - 32896.0
    else:
        numbers = tile.to(tl.float32)
    return numbers


@triton.jit(do_not_specialize=["N", "magic"])
def _small_w8a8_kernel(
    x: tl.tensor,
    x_scale: tl.tensor,
    weight: tl.tensor,
    weight_scale: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    x_stride: tl.tensor,
    weight_stride: tl.tensor,
    N: tl.tensor,
    magic: tl.tensor,
    D: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """BLOCK_N outputs of all tokens.

    x and the weight hold fp8 values or words of four int8 values: D and BLOCK_D count these elements.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    VALUES: tl.constexpr = 4 if weight.dtype.element_ty == tl.int32 else 1
    VECTOR: tl.constexpr = 16 // VALUES
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)[None, :]
    rows = weight + tl.minimum(n, N - 1).to(tl.int64)[:, None] * weight_stride
    tile = tl.load(rows + d, mask=d < D, other=0.0, eviction_policy="evict_first")
    columns = tl.load(weight_scale + n, mask=n < N, other=0.0).to(tl.float32)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    sums = (tl.zeros([BLOCK_N, BLOCK_D // VECTOR], tl.float32),) * TOKENS
    for first in range(0, D, BLOCK_D):
        next_tile = tile
        if BLOCK_D < D:
            ahead = first + BLOCK_D + d
            next_tile = tl.load(rows + ahead, mask=ahead < D, other=0.0, eviction_policy="evict_first")
        x_tiles = ()  # type: tuple[tl.tensor, ...]
        for t in tl.static_range(TOKENS):
            x_tiles = x_tiles + (tl.load(x + t * x_stride + first + d, mask=first + d < D, other=0.0),)  # noqa: RUF005
        products = (tl.zeros([BLOCK_N, BLOCK_D], tl.float32),) * TOKENS
        for j in tl.static_range(VALUES):
            numbers = _numbers(tile, j, magic)
            for t in tl.static_range(TOKENS):
                products = products[1:] + (products[0] + numbers * _numbers(x_tiles[t], j, magic),)  # noqa: RUF005
        for t in tl.static_range(TOKENS):
            sums = sums[1:] + (sums[0] + sum_of_vectors(products[t], VECTOR),)  # noqa: RUF005
        tile = next_tile
    for t in tl.static_range(TOKENS):
        result = tl.sum(sums[t], 1) * columns * tl.load(x_scale + t)
        if HAS_BIAS:
            result += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
        at_out = out + tl.cast(N, tl.int64) * t + n
        tl.store(at_out, result.to(out.dtype.element_ty), mask=n < N)


# (more than 4096 inputs, more than 8192 outputs) -> tiles, measured on an H200 by the bench with --tune: one
# token takes 3.7 us in int8 and 3.1 us in fp8 with 2048 -> 2560, 10.9 us with 11008 -> 2048.
_TILES = {
    (False, False): VectorTiles(block_n=4, num_warps=4),
    (False, True): VectorTiles(block_n=8, num_warps=4),
    (True, False): VectorTiles(block_n=8, num_warps=4),
    (True, True): VectorTiles(block_n=8, num_warps=4),
}


def _run(
    x8_TD: Tensor,
    x_scale_T: Tensor,
    weight_ND: Tensor,
    weight_scale_N1: Tensor,
    bias_N: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """Launch the kernel."""
    num_tokens, N = len(x8_TD), len(weight_ND)
    tiles = vector_tiles(_TILES, N, x8_TD.shape[1], num_tokens)
    out_TN = x8_TD.new_empty((num_tokens, N), dtype=out_dtype)
    x, weight = (
        (x8_TD.view(torch.int32), weight_ND.view(torch.int32)) if x8_TD.dtype == torch.int8 else (x8_TD, weight_ND)
    )
    vector = 16 // x.element_size()
    block_d = min(tiles.num_warps * 32 * vector, max(vector, triton.next_power_of_2(x.shape[1])))
    _small_w8a8_kernel[(triton.cdiv(N, tiles.block_n),)](
        x, x_scale_T, weight, weight_scale_N1, out_TN if bias_N is None else bias_N, out_TN, x.stride(0),
        weight.stride(0), N, MAGIC, D=x.shape[1], HAS_BIAS=bias_N is not None, TOKENS=num_tokens,
        BLOCK_N=tiles.block_n, BLOCK_D=block_d, num_warps=max(1, block_d // (32 * vector)), num_stages=1,
        **launch.overlap_options(x.device),
    )  # fmt: skip
    return out_TN


def small_matmul_w8a8(
    x8_TD: Tensor,
    x_scale_T: Tensor,
    weight_ND: Tensor,
    weight_scale_N1: Tensor,
    bias_N: Tensor | None = None,
    *,
    out_dtype: torch.dtype,
) -> Tensor:
    """`matmul_w8a8`, with a separate kernel for few tokens."""
    able = launch.available_paths(x8_TD, "triton")
    is_small = (
        1 <= len(x8_TD) <= max_tokens(weight_ND.dtype, *weight_ND.shape)
        and x8_TD.dtype == weight_ND.dtype
        and x8_TD.shape[1] == weight_ND.shape[1]
        and x8_TD.shape[1] % 16 == 0
        and x8_TD.is_contiguous()
        and weight_ND.is_contiguous()
    )
    if not is_small or launch.choose_path("small_matmul_w8a8", *able) != "triton":
        return matmul_w8a8(x8_TD, x_scale_T, weight_ND, weight_scale_N1, bias_N, out_dtype=out_dtype)
    return _run(x8_TD, x_scale_T, weight_ND, weight_scale_N1, bias_N, out_dtype)
