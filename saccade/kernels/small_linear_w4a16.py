# mypy: allow-untyped-decorators
"""Linear layers on 4-bit weights for one or two tokens, fused with the norm before and the gated activation after.

Legend: T tokens (at most MAX_TOKENS for the kernel), D inputs, W words of a tile (8 inputs each), N outputs, Z groups
of inputs that share a scale, I intermediate channels of an MLP. Weights and scales are those of `linear_w4a16.py`.

    small_linear_w4a16:       out = x W' + bias
    norm_linear_w4a16:        out = rms_norm(s) W' + bias,  s = x + residual (or x itself);   returns (out, s)
    norm_gated_linear_w4a16:  out = silu(gate) * up,  [gate, up] = norm_linear_w4a16 with W [2 I, D];   returns (out, s)

x, residual, bias and the outputs share one dtype. s, gate and up are rounded to it, as the separate kernels round them;
the normalised row is not, since 1 / rms is multiplied with the finished sums. Everything else is fp32. The kernel takes
groups of a multiple of 128 inputs. For more tokens `rms_norm`, `swiglu` and `linear_w4a16` are used. Forward only.

Memory-bound: N * D / 2 bytes are read once (`_few_tokens.py`). A nibble becomes a float without a conversion: its bits
are set into the mantissa of 2^7 or 2^11, and the sum of inputs times those powers of two is subtracted from the sum of
products: 2.5 instructions per weight.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from saccade.kernels import launch
from saccade.kernels._few_tokens import MAGIC, VectorTiles, max_tokens, sum_of_vectors, vector_tiles
from saccade.kernels.launch import tl, triton
from saccade.kernels.linear_w4a16 import linear_w4a16, linear_w4a16_reference
from saccade.kernels.rms_norm import add_rms_norm, add_rms_norm_reference, rms_norm, rms_norm_reference
from saccade.kernels.small_linear import gated_output, rows_of_program
from saccade.kernels.swiglu import swiglu, swiglu_reference


class Weight4bit(NamedTuple):
    """A weight of `linear_w4a16`, and the bias."""

    words: Tensor
    """[N, D / 8], interleaved."""
    scale: Tensor
    """[N, Z]."""
    zero_point: Tensor | None = None
    bias: Tensor | None = None


def small_linear_w4a16_reference(x_TD: Tensor, weight: Weight4bit) -> Tensor:
    """The first formula above."""
    return linear_w4a16_reference(x_TD, *weight)


def norm_linear_w4a16_reference(
    x_TD: Tensor, residual_TD: Tensor | None, norm_weight_D: Tensor, eps: float, weight: Weight4bit
) -> tuple[Tensor, Tensor]:
    """The second formula: (out, what was normalised)."""
    if residual_TD is None:
        return linear_w4a16_reference(rms_norm_reference(x_TD, norm_weight_D, eps), *weight), x_TD
    normalized_TD, total_TD = add_rms_norm_reference(x_TD, residual_TD, norm_weight_D, eps)
    return linear_w4a16_reference(normalized_TD, *weight), total_TD


def norm_gated_linear_w4a16_reference(
    x_TD: Tensor, residual_TD: Tensor | None, norm_weight_D: Tensor, eps: float, weight: Weight4bit
) -> tuple[Tensor, Tensor]:
    """The third formula: (out, what was normalised)."""
    out_TN, total_TD = norm_linear_w4a16_reference(x_TD, residual_TD, norm_weight_D, eps, weight)
    return swiglu_reference(*out_TN.chunk(2, dim=1)), total_TD


@triton.jit
def _nibble(words: tl.tensor, j: tl.constexpr, magic: tl.tensor) -> tl.tensor:
    """Nibble j of every word as a float: 128 + value for odd j, 2048 + value for even j.

    One shift moves an even nibble to bits 12 to 15 and its odd neighbour to bits 16 to 19. `magic`, the bits of 2^7, is
    an argument of the kernel: of two constants the assembler makes two instructions, of a mask and a register one.
    """
    SHIFT: tl.constexpr = 4 * (j // 2 * 2) - 12
    moved = words >> SHIFT if SHIFT > 0 else words << -SHIFT
    bits = (moved & 0x000F0000) | magic if j % 2 == 1 else (moved & 0x0000F000) | (magic + 0x02000000)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _inputs_of_nibbles(rows: tl.tensor, W: tl.constexpr) -> tuple[tl.tensor, ...]:
    """Eight vectors [W] from 8 W inputs: the inputs of nibbles 0 to 7 of W words, in the order of `interleave_int4`."""
    # g m p q b -> g q m b p: nibble p + 4 b of word 16 g + 4 q + m
    ordered = rows.reshape(W // 16, 4, 4, 4, 2).permute(0, 3, 1, 4, 2).reshape(W, 2, 2, 2)
    even, odd = tl.split(ordered)  # the low bit of p
    even_low, even_high = tl.split(even)  # its high bit
    odd_low, odd_high = tl.split(odd)
    n0, n4 = tl.split(even_low)  # b
    n2, n6 = tl.split(even_high)
    n1, n5 = tl.split(odd_low)
    n3, n7 = tl.split(odd_high)
    return n0, n1, n2, n3, n4, n5, n6, n7


@triton.jit(do_not_specialize=["N", "magic"])
def _small_w4a16_kernel(
    x: tl.tensor,
    residual: tl.tensor,
    norm_weight: tl.tensor,
    words: tl.tensor,
    weight_scale: tl.tensor,
    zero_point: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    total: tl.tensor,
    x_stride: tl.tensor,
    residual_stride: tl.tensor,
    N: tl.tensor,
    eps: tl.tensor,
    magic: tl.tensor,
    D: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    IS_GATED: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    W: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """BLOCK_N rows of W for all tokens. N: outputs."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    WORDS: tl.constexpr = D // 8
    Z: tl.constexpr = D // GROUP
    n, n_row = rows_of_program(N, BLOCK_N, IS_GATED)
    row = n_row[:, None]
    w = tl.arange(0, W)[None, :]
    v = tl.arange(0, W // 4)[None, :] * 4  # the first word of every 16 bytes
    d = tl.arange(0, 8 * W)
    tile = tl.load(words + row * WORDS + w, mask=w < WORDS, other=0, eviction_policy="evict_first")
    scale = tl.load(weight_scale + row * Z + v * 8 // GROUP, mask=v < WORDS, other=0.0)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    stored = tl.where(tl.program_id(0) == 0, D, 0)  # the first program stores s

    sums = (tl.zeros([BLOCK_N, W // 4], tl.float32),) * TOKENS
    squares = (tl.zeros([8 * W], tl.float32),) * TOKENS
    for first in range(0, WORDS, W):
        next_tile, next_scale = tile, scale
        if W < WORDS:
            ahead, ahead_v = first + W + w, first + W + v
            next_tile = tl.load(words + row * WORDS + ahead, mask=ahead < WORDS, other=0, eviction_policy="evict_first")
            next_scale = tl.load(weight_scale + row * Z + ahead_v * 8 // GROUP, mask=ahead_v < WORDS, other=0.0)
        zero = 8.0
        if HAS_ZERO:
            zeros = zero_point + (row // 8) * Z + (first + v) * 8 // GROUP
            zero = (tl.load(zeros, mask=first + v < WORDS, other=0) >> (row % 8 * 4).to(tl.int32)) & 15
        at = first * 8 + d
        is_input = at < D
        values = ()  # type: tuple[tl.tensor, ...]
        for t in tl.static_range(TOKENS):
            inputs = tl.load(x + t * x_stride + at, mask=is_input, other=0.0)
            if HAS_RESIDUAL:
                inputs += tl.load(residual + t * residual_stride + at, mask=is_input, other=0.0)
                tl.store(total + t * D + at, inputs, mask=at < stored)
            inputs = inputs.to(tl.float32)
            if HAS_NORM:
                squares = squares[1:] + (squares[0] + inputs * inputs,)  # noqa: RUF005
                inputs *= tl.load(norm_weight + at, mask=is_input, other=0.0).to(tl.float32)
            values = values + _inputs_of_nibbles(inputs, W)
        # All tokens for each nibble: its float is then needed once. After all tokens the tuple of sums is in its first
        # order.
        products = (tl.zeros([BLOCK_N, W], tl.float32),) * TOKENS
        for j in tl.static_range(8):
            numbers = _nibble(tile, j, magic)
            for t in tl.static_range(TOKENS):
                products = products[1:] + (products[0] + numbers * values[8 * t + j][None, :],)  # noqa: RUF005
        for t in tl.static_range(TOKENS):
            # sum x (q - zero) = sum x (q + 2^k) - (sum x 2^k + zero sum x)
            even = values[8 * t] + values[8 * t + 2] + values[8 * t + 4] + values[8 * t + 6]
            odd = values[8 * t + 1] + values[8 * t + 3] + values[8 * t + 5] + values[8 * t + 7]
            offset = sum_of_vectors((2048.0 * even + 128.0 * odd)[None, :], 4)
            offset += zero * sum_of_vectors((even + odd)[None, :], 4)
            part = (sum_of_vectors(products[t], 4) - offset) * scale.to(tl.float32)
            sums = sums[1:] + (sums[0] + part,)  # noqa: RUF005
        tile, scale = next_tile, next_scale

    for t in tl.static_range(TOKENS):
        result = tl.sum(sums[t], 1)
        if HAS_NORM:
            result *= tl.rsqrt(tl.sum(squares[t], 0) / D + eps)
        if HAS_BIAS:
            result += tl.load(bias + n_row).to(tl.float32)
        if IS_GATED:
            result = tl.reshape(gated_output(result[:, None], out.dtype.element_ty), [BLOCK_N // 2])
            n = tl.program_id(0) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        at_out = out + tl.cast(N, tl.int64) * t + n
        tl.store(at_out, result.to(out.dtype.element_ty), mask=n < N)


# (more than 4096 inputs, more than 8192 outputs) -> tiles, measured on an H200 by the bench with --tune: one
# token takes 3.7 us with the norm and 2048 -> 2560 (bf16 4.4), 7.0 us with 11008 -> 2048 (bf16 12.7).
_TILES = {
    (False, False): VectorTiles(block_n=2, num_warps=2),
    (False, True): VectorTiles(block_n=8, num_warps=2),
    (True, False): VectorTiles(block_n=4, num_warps=4),
    (True, True): VectorTiles(block_n=8, num_warps=4),
}


def _run(
    x: Tensor,
    weight: Weight4bit,
    *,
    residual: Tensor | None = None,
    norm: tuple[Tensor, float] | None = None,
    is_gated: bool = False,
) -> tuple[Tensor, Tensor]:
    """Launch the kernel: (out, x or its sum with `residual`)."""
    (num_tokens, D), (num_rows, Z) = x.shape, weight.scale.shape
    tiles = vector_tiles(_TILES, num_rows, D, num_tokens)
    N = num_rows // 2 if is_gated else num_rows
    num_words = min(tiles.num_warps * 128, triton.next_power_of_2(D // 8))
    out_TN = x.new_empty((num_tokens, N))
    total = x if residual is None else x.new_empty(x.shape)
    added = x if residual is None else residual
    norm_weight, eps = norm if norm is not None else (x, 0.0)
    _small_w4a16_kernel[(triton.cdiv(num_rows, tiles.block_n),)](
        x, added, norm_weight, weight.words, weight.scale,
        weight.words if weight.zero_point is None else weight.zero_point, x if weight.bias is None else weight.bias,
        out_TN, total, x.stride(0), added.stride(0), N, eps, MAGIC, D=D, GROUP=D // Z, HAS_NORM=norm is not None,
        HAS_RESIDUAL=residual is not None, IS_GATED=is_gated, HAS_ZERO=weight.zero_point is not None,
        HAS_BIAS=weight.bias is not None, TOKENS=num_tokens, BLOCK_N=tiles.block_n, W=num_words,
        num_warps=max(1, num_words // 128), num_stages=1, **launch.overlap_options(x.device),
    )  # fmt: skip
    return out_TN, total


def _is_small(operation: str, x: Tensor, weight: Weight4bit, *others: Tensor | None, is_fused: bool = True) -> bool:
    """Whether the kernel supports this call; otherwise the unfused operations are used."""
    (N, Z), D = weight.scale.shape, 8 * weight.words.shape[1]
    tensors = [x, *(other for other in others if other is not None)]
    is_small = (
        1 <= len(x) <= max_tokens(torch.int32, N, D, is_fused=is_fused)
        and x.dim() == 2
        and x.shape[1] == D
        and N > 0
        and D % max(1, Z) == 0
        and D // max(1, Z) % 128 == 0
        and (x.dtype in (torch.bfloat16, torch.float16) or launch.is_forced("triton"))
        and weight.words.is_contiguous()
        and weight.scale.is_contiguous()
        and all(tensor.dtype == x.dtype and tensor.stride(-1) == 1 for tensor in tensors)
    )
    if not is_small:
        launch.log_path(f"{operation}: in parts")
    return is_small


def small_linear_w4a16(x_TD: Tensor, weight: Weight4bit) -> Tensor:
    """x W' + bias on 4-bit weights."""
    if not _is_small("small_linear_w4a16", x_TD, weight, is_fused=False):
        return linear_w4a16(x_TD, *weight)
    if launch.choose_path("small_linear_w4a16", *launch.available_paths(x_TD, "triton")) == "triton":
        return _run(x_TD, weight)[0]
    return small_linear_w4a16_reference(x_TD, weight)


def norm_linear_w4a16(
    x_TD: Tensor, residual_TD: Tensor | None, norm_weight_D: Tensor, eps: float, weight: Weight4bit
) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual) W' + bias, x + residual) on 4-bit weights; without a residual the second is x itself."""
    _check_residual(x_TD, residual_TD)
    if not _is_small("norm_linear_w4a16", x_TD, weight, residual_TD, norm_weight_D):
        if residual_TD is None:
            return small_linear_w4a16(rms_norm(x_TD, norm_weight_D, eps), weight), x_TD
        normalized_TD, total_TD = add_rms_norm(x_TD, residual_TD, norm_weight_D, eps)
        return small_linear_w4a16(normalized_TD, weight), total_TD
    if launch.choose_path("norm_linear_w4a16", *launch.available_paths(x_TD, "triton")) == "triton":
        return _run(x_TD, weight, residual=residual_TD, norm=(norm_weight_D, eps))
    return norm_linear_w4a16_reference(x_TD, residual_TD, norm_weight_D, eps, weight)


def norm_gated_linear_w4a16(
    x_TD: Tensor, residual_TD: Tensor | None, norm_weight_D: Tensor, eps: float, weight: Weight4bit
) -> tuple[Tensor, Tensor]:
    """(silu(gate) * up, x + residual), where gate and up are the halves of `norm_linear_w4a16`."""
    if len(weight.scale) % 2:
        raise ValueError(f"norm_gated_linear_w4a16: {len(weight.scale)} outputs have no halves for gate and up")
    is_small = _is_small("norm_gated_linear_w4a16", x_TD, weight, residual_TD, norm_weight_D)
    if is_small and launch.choose_path("norm_gated_linear_w4a16", *launch.available_paths(x_TD, "triton")) == "triton":
        _check_residual(x_TD, residual_TD)
        return _run(x_TD, weight, residual=residual_TD, norm=(norm_weight_D, eps), is_gated=True)
    out_TN, total_TD = norm_linear_w4a16(x_TD, residual_TD, norm_weight_D, eps, weight)
    return swiglu(*out_TN.chunk(2, dim=1)), total_TD


def _check_residual(x: Tensor, residual: Tensor | None) -> None:
    if residual is not None and residual.shape != x.shape:
        raise ValueError(f"norm_linear_w4a16: x {tuple(x.shape)}, residual {tuple(residual.shape)} do not fit")
