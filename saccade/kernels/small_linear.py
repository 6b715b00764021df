# mypy: allow-untyped-decorators
"""Linear layers for few tokens (decode of a small batch), fused with the norm before and the gated activation after.

Legend: T tokens (at most MAX_TOKENS for the fused kernel), D inputs, N outputs, I intermediate channels of an MLP.

    small_linear:       out = x W' + bias
    norm_linear:        out = rms_norm(s) W' + bias,  s = x + residual (or x itself);   returns (out, s)
    norm_gated_linear:  out = silu(gate) * up,  [gate, up] = norm_linear with W [2 I, D];   returns (out, s)

x, residual, W [N, D], bias [N] and the outputs share one dtype: bf16, fp16 or fp32. Rounding is that of the unfused
layers: s, the normalised row before and after its weight, gate and up are rounded to x's dtype; norm, activation and
every sum are fp32; out is rounded once, after bias or activation. Forward only: with gradients, for more tokens, or
with a prepacked weight, `rms_norm`, `linear` and `swiglu` are used.

Memory-bound: the N * D elements of W are read once. A program computes BLOCK_N outputs and loops over the inputs in
tiles of BLOCK_K. Every program computes the normalised rows itself: T * D elements from the cache, and two barriers,
cost less than a launch. A program of a gated layer has the rows of gate and up of BLOCK_N / 2 channels. Each thread
accumulates its own products; one reduction at the end. No atomics and no splits: results are deterministic, and the
tiles do not depend on T, so neither does the order of any sum.

On Hopper (programmatic dependent launch) a kernel starts before the previous one ends and loads its first DEPTH tiles
of W before waiting for it. Only constants (W, bias, the norm's weight) are read before the wait. They must not be
written by a kernel that lets its successor start early (`gdc_launch_dependents`): those launched with `launch_pdl`.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from saccade.kernels import launch
from saccade.kernels.launch import tl, triton
from saccade.kernels.linear import linear
from saccade.kernels.rms_norm import add_rms_norm, add_rms_norm_reference, rms_norm, rms_norm_reference
from saccade.kernels.swiglu import swiglu, swiglu_reference

MAX_TOKENS = 8
"""The kernel uses no tensor cores, so it is for few tokens."""


def small_linear_reference(x_TD: Tensor, weight_ND: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """The first formula above."""
    return F.linear(x_TD, weight_ND, bias_N)


def norm_linear_reference(
    x_TD: Tensor,
    residual_TD: Tensor | None,
    norm_weight_D: Tensor,
    eps: float,
    weight_ND: Tensor,
    bias_N: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The second formula: (out, what was normalised)."""
    if residual_TD is None:
        return F.linear(rms_norm_reference(x_TD, norm_weight_D, eps), weight_ND, bias_N), x_TD
    normalized_TD, total_TD = add_rms_norm_reference(x_TD, residual_TD, norm_weight_D, eps)
    return F.linear(normalized_TD, weight_ND, bias_N), total_TD


def norm_gated_linear_reference(
    x_TD: Tensor,
    residual_TD: Tensor | None,
    norm_weight_D: Tensor,
    eps: float,
    weight_ND: Tensor,
    bias_N: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The third formula: (out, what was normalised)."""
    out_TN, total_TD = norm_linear_reference(x_TD, residual_TD, norm_weight_D, eps, weight_ND, bias_N)
    return swiglu_reference(*out_TN.chunk(2, dim=1)), total_TD


@triton.jit
def _load(rows: tl.tensor, k: tl.tensor, K: tl.constexpr, IS_EVEN: tl.constexpr, POLICY: tl.constexpr) -> tl.tensor:
    """Columns k of rows; zeros past K."""
    if IS_EVEN:
        return tl.load(rows + k[None, :], eviction_policy=POLICY)
    return tl.load(rows + k[None, :], mask=(k < K)[None, :], other=0.0, eviction_policy=POLICY)


@triton.jit
def _load_tiles(
    rows: tl.tensor,
    k: tl.tensor,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DEPTH: tl.constexpr,
    IS_EVEN: tl.constexpr,
    POLICY: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """DEPTH tiles, the first of columns k."""
    tiles = (_load(rows, k, K, IS_EVEN, POLICY),)
    for i in tl.static_range(1, DEPTH):
        tiles = tiles + (_load(rows, i * BLOCK_K + k, K, IS_EVEN, POLICY),)  # type: ignore[assignment]  # noqa: RUF005
    return tiles


@triton.jit
def _sum_of_vectors(x: tl.tensor, VECTOR: tl.constexpr) -> tl.tensor:
    """[R, C] to [R, C / VECTOR]: VECTOR adjacent elements are in one thread, loaded by one instruction."""
    return tl.sum(tl.reshape(x, [x.shape[0], x.shape[1] // VECTOR, VECTOR]), 2)


@triton.jit
def _sum_of_rows(sums: tl.tensor, TOKENS: tl.constexpr) -> tl.tensor:
    """TOKENS x [R, C] to [R, TOKENS], with one reduction over threads. Even tokens come first: `join` interleaves."""
    if TOKENS == 1:
        joined = sums[0]
    elif TOKENS == 2:
        joined = tl.join(sums[0], sums[1])
    elif TOKENS == 4:
        joined = tl.join(tl.join(sums[0], sums[2]), tl.join(sums[1], sums[3]))
    else:
        even = tl.join(tl.join(sums[0], sums[4]), tl.join(sums[2], sums[6]))
        odd = tl.join(tl.join(sums[1], sums[5]), tl.join(sums[3], sums[7]))
        joined = tl.join(even, odd)
    return tl.reshape(tl.sum(joined, 1), [sums[0].shape[0], TOKENS])


@triton.jit
def rows_of_program(N: tl.tensor, BLOCK_N: tl.constexpr, IS_GATED: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """A program's outputs [BLOCK_N] (in pairs if IS_GATED) and its rows of W; rows past the last repeat it."""
    i = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    n = i // 2 if IS_GATED else i
    row = tl.minimum(n, N - 1).to(tl.int64)
    if IS_GATED:
        row += i % 2 * tl.cast(N, tl.int64)  # gate, up, gate, up, ...
    return n, row


@triton.jit
def gated_output(result: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """silu(gate) * up [I, T] in fp32 of [2 I, T], where gate and up alternate and are rounded to `dtype` first."""
    result = result.to(dtype).to(tl.float32)
    pairs = tl.reshape(result, [result.shape[0] // 2, 2, result.shape[1]])
    gate, up = tl.split(tl.permute(pairs, (0, 2, 1)))
    return gate * tl.sigmoid(gate) * up


@triton.jit(do_not_specialize=["num_tokens", "N"])
def _linear_kernel(
    x: tl.tensor,
    residual: tl.tensor,
    norm_weight: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    total: tl.tensor,
    x_stride: tl.tensor,
    residual_stride: tl.tensor,
    weight_stride: tl.tensor,
    num_tokens: tl.tensor,
    N: tl.tensor,
    eps: tl.tensor,
    K: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    IS_GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DEPTH: tl.constexpr,
    VECTOR: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """BLOCK_N rows of W for all tokens; TOKENS is num_tokens rounded up. VECTOR: elements in 16 bytes. N: outputs.

    DEPTH tiles of W are in flight. The loops are unrolled by DEPTH, after which the tuple of tiles is in its first
    order: no tile is moved between registers.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    STEP: tl.constexpr = DEPTH * BLOCK_K
    IS_EVEN: tl.constexpr = K == STEP  # a single iteration, all of it inside the row
    dtype = out.dtype.element_ty
    k = tl.arange(0, BLOCK_K)
    # Outputs and tokens past the last repeat the last: no mask until the end.
    n, n_row = rows_of_program(N, BLOCK_N, IS_GATED)
    weights = weight + n_row[:, None] * weight_stride
    scales = norm_weight + tl.zeros([1, 1], tl.int32)
    tiles = _load_tiles(weights, k, K, BLOCK_K, DEPTH, IS_EVEN, "evict_first")
    if HAS_NORM:
        scale_tiles = _load_tiles(scales, k, K, BLOCK_K, DEPTH, IS_EVEN, "evict_last")
    added = tl.zeros([BLOCK_N], tl.float32)
    if HAS_BIAS:
        added += tl.load(bias + n_row).to(tl.float32)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()

    token = tl.arange(0, TOKENS)
    tokens = tl.minimum(token, num_tokens - 1).to(tl.int64)[:, None]
    rstd = tl.zeros([TOKENS], tl.float32)
    if HAS_NORM:
        # s = x + residual, rounded; rstd = 1 / sqrt(mean(s^2) + eps)
        squares = tl.zeros([TOKENS, BLOCK_K // VECTOR], tl.float32)
        stored = tl.where(tl.program_id(0) == 0, num_tokens, 0)  # the first program stores s
        for first in range(0, K, STEP):
            x_tiles = _load_tiles(x + tokens * x_stride, first + k, K, BLOCK_K, DEPTH, IS_EVEN, "evict_last")
            if HAS_RESIDUAL:
                others = residual + tokens * residual_stride
                residual_tiles = _load_tiles(others, first + k, K, BLOCK_K, DEPTH, IS_EVEN, "evict_last")
            for i in tl.static_range(DEPTH):
                row = x_tiles[i]
                if HAS_RESIDUAL:
                    row += residual_tiles[i]
                    at = first + i * BLOCK_K + k
                    in_total = (token < stored)[:, None] & (at < K)[None, :]
                    tl.store(total + tokens * K + at[None, :], row, mask=in_total)
                row = row.to(tl.float32)
                squares += _sum_of_vectors(row * row, VECTOR)
        rstd = tl.rsqrt(tl.sum(squares, 1) / K + eps)

    sums = (tl.zeros([BLOCK_N, BLOCK_K // VECTOR], tl.float32),)
    for _ in tl.static_range(1, TOKENS):
        sums = sums + (tl.zeros([BLOCK_N, BLOCK_K // VECTOR], tl.float32),)  # type: ignore[assignment]  # noqa: RUF005
    for first in range(0, K, STEP):
        for i in tl.static_range(DEPTH):
            at = first + i * BLOCK_K + k
            tile = tiles[0]
            w = tile.to(tl.float32)
            if K > STEP:
                tile = _load(weights, STEP + at, K, False, "evict_first")
            tiles = tiles[1:] + (tile,)  # noqa: RUF005
            if HAS_NORM:
                scale_tile = scale_tiles[0]
                scale = scale_tile.to(tl.float32)
                if K > STEP:
                    scale_tile = _load(scales, STEP + at, K, False, "evict_last")
                scale_tiles = scale_tiles[1:] + (scale_tile,)  # noqa: RUF005
            for t in tl.static_range(TOKENS):
                index = tl.minimum(t, num_tokens - 1).to(tl.int64)
                rows = x + index * x_stride + tl.zeros([1, 1], tl.int32)
                row = _load(rows, at, K, IS_EVEN, "evict_last")
                if HAS_RESIDUAL:
                    other_rows = residual + index * residual_stride + tl.zeros([1, 1], tl.int32)
                    row += _load(other_rows, at, K, IS_EVEN, "evict_last")
                row = row.to(tl.float32)
                if HAS_NORM:
                    # y = weight * round(s * rstd), rounded
                    own_rstd = tl.sum(tl.where(token == t, rstd, 0.0), 0)
                    row = ((row * own_rstd).to(dtype).to(tl.float32) * scale).to(dtype).to(tl.float32)
                # Here too: after one iteration over the tokens their sums are in order again.
                sums = sums[1:] + (sums[0] + _sum_of_vectors(w * row, VECTOR),)  # noqa: RUF005

    result = _sum_of_rows(sums, TOKENS) + added[:, None]
    if IS_GATED:
        result = gated_output(result, dtype)
        n = tl.program_id(0) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    in_out = (n < N)[:, None] & (token < num_tokens)[None, :]
    tl.store(out + token.to(tl.int64)[None, :] * N + n[:, None], result.to(dtype), mask=in_out)


class SmallLinearTiles(NamedTuple):
    """Tile sizes of a layer. They depend on its shape only, never on the number of tokens."""

    block_n: int
    """Outputs of a program."""
    block_k: int
    """Inputs of 16 bits per step, half as many of 32. From 256 per warp, a thread has the same inputs of every tile."""
    num_warps: int
    depth: int
    """Tiles of W in flight, in registers."""


# (more than 4096 inputs, more than 8192 outputs) -> tiles, measured within a step on an H200, where other tiles are
# best than alone. One token, bf16: norm and 2048 -> 2560 takes 4.4 us, in parts 8.1; 11008 -> 2048 12.7, in parts 17.1.
_CUTS = {
    (False, False): SmallLinearTiles(block_n=4, block_k=1024, num_warps=4, depth=2),
    (False, True): SmallLinearTiles(block_n=16, block_k=1024, num_warps=4, depth=1),
    (True, False): SmallLinearTiles(block_n=4, block_k=2048, num_warps=8, depth=2),
    (True, True): SmallLinearTiles(block_n=8, block_k=1024, num_warps=4, depth=3),
}
_WORTHWHILE_TOKENS = {(False, False): 4, (False, True): 1, (True, False): 2, (True, True): 1}
"""Tokens up to which the kernel is faster than torch's product: 2048 -> 2560 with 4 tokens takes 5.1 us against 6.6."""


def _tiles_for(num_outputs: int, num_inputs: int) -> SmallLinearTiles:
    """The entry of the table; no tile is longer than a row."""
    tiles = _CUTS[num_inputs > 4096, num_outputs > 8192]
    block_k = min(tiles.block_k, max(256, triton.next_power_of_2(num_inputs)))
    depth = min(tiles.depth, triton.cdiv(num_inputs, block_k))
    return tiles._replace(block_k=block_k, num_warps=min(tiles.num_warps, block_k // 256), depth=depth)


def _run(
    x: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None,
    *,
    residual: Tensor | None = None,
    norm: tuple[Tensor, float] | None = None,
    is_gated: bool = False,
    out_TN: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Launch the kernel: (out, x or its sum with `residual`). `out_TN`: contiguous memory for the outputs."""
    (num_rows, K), num_tokens = weight_NK.shape, len(x)
    tiles = _tiles_for(num_rows, K)
    N = num_rows // 2 if is_gated else num_rows
    out_TN = x.new_empty((num_tokens, N)) if out_TN is None else out_TN
    total = x if residual is None else x.new_empty(x.shape)
    others = x if residual is None else residual
    norm_weight, eps = norm if norm is not None else (weight_NK, 0.0)
    halves = x.element_size() // 2
    _linear_kernel[(triton.cdiv(num_rows, tiles.block_n),)](
        x, others, norm_weight, weight_NK, out_TN if bias_N is None else bias_N, out_TN, total, x.stride(0),
        others.stride(0), weight_NK.stride(0), num_tokens, N, eps, K=K, HAS_NORM=norm is not None,
        HAS_RESIDUAL=residual is not None, IS_GATED=is_gated, HAS_BIAS=bias_N is not None,
        TOKENS=triton.next_power_of_2(num_tokens), BLOCK_N=tiles.block_n, BLOCK_K=tiles.block_k // halves,
        DEPTH=tiles.depth, VECTOR=8 // halves, num_warps=tiles.num_warps, **launch.overlap_options(x.device),
    )  # fmt: skip
    return out_TN, total


def _is_small(operation: str, x: Tensor, weight: Tensor, *others: Tensor | None) -> bool:
    """Whether the kernel supports this call; otherwise the unfused operations are used."""
    tensors = [x, weight, *(other for other in others if other is not None)]
    most = MAX_TOKENS if launch.is_forced("triton") else _WORTHWHILE_TOKENS[weight.shape[1] > 4096, len(weight) > 8192]
    is_small = (
        1 <= len(x) <= most
        and x.dtype in (torch.bfloat16, torch.float16, torch.float32)
        and len(weight) > 0
        and weight.shape[1] > 0
        and not weight.is_mkldnn
        and all(tensor.dtype == x.dtype and tensor.stride(-1) == 1 for tensor in tensors)
        and not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors))
    )
    if not is_small:
        launch.log_path(f"{operation}: in parts")
    return is_small


def small_linear(x_TD: Tensor, weight_ND: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """x W' + bias."""
    _check("small_linear", x_TD, weight_ND, bias_N)
    if not _is_small("small_linear", x_TD, weight_ND, bias_N):
        return linear(x_TD, weight_ND, bias_N)
    if launch.choose_path("small_linear", *launch.available_paths(x_TD, "triton")) == "triton":
        return _run(x_TD, weight_ND, bias_N)[0]
    return small_linear_reference(x_TD, weight_ND, bias_N)


def norm_linear(
    x_TD: Tensor,
    residual_TD: Tensor | None,
    norm_weight_D: Tensor,
    eps: float,
    weight_ND: Tensor,
    bias_N: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual) W' + bias, x + residual); without a residual the second is x itself."""
    _check_norm(x_TD, residual_TD, norm_weight_D, weight_ND, bias_N)
    if not _is_small("norm_linear", x_TD, weight_ND, bias_N, residual_TD, norm_weight_D):
        normalized_TD, total_TD = _norm(x_TD, residual_TD, norm_weight_D, eps)
        return linear(normalized_TD, weight_ND, bias_N), total_TD
    if launch.choose_path("norm_linear", *launch.available_paths(x_TD, "triton")) == "triton":
        return _run(x_TD, weight_ND, bias_N, residual=residual_TD, norm=(norm_weight_D, eps))
    return norm_linear_reference(x_TD, residual_TD, norm_weight_D, eps, weight_ND, bias_N)


def norm_linear_into(
    x_TD: Tensor, residual_TD: Tensor | None, norm_weight_D: Tensor, eps: float, weight_ND: Tensor, out_TN: Tensor
) -> Tensor:
    """`norm_linear` without a bias, into the memory of `out_TN`."""
    is_small = _is_small("norm_linear", x_TD, weight_ND, residual_TD, norm_weight_D) and out_TN.is_contiguous()
    if is_small and launch.choose_path("norm_linear", *launch.available_paths(x_TD, "triton")) == "triton":
        _check_norm(x_TD, residual_TD, norm_weight_D, weight_ND, None)
        return _run(x_TD, weight_ND, None, residual=residual_TD, norm=(norm_weight_D, eps), out_TN=out_TN)[0]
    return torch.mm(_norm(x_TD, residual_TD, norm_weight_D, eps)[0], weight_ND.t(), out=out_TN)


def _norm(x_TD: Tensor, residual_TD: Tensor | None, norm_weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(the norm, what was normalised)."""
    if residual_TD is None:
        return rms_norm(x_TD, norm_weight_D, eps), x_TD
    return add_rms_norm(x_TD, residual_TD, norm_weight_D, eps)


def norm_gated_linear(
    x_TD: Tensor,
    residual_TD: Tensor | None,
    norm_weight_D: Tensor,
    eps: float,
    weight_ND: Tensor,
    bias_N: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(silu(gate) * up, x + residual), where gate and up are the halves of `norm_linear`."""
    if len(weight_ND) % 2:
        raise ValueError(f"norm_gated_linear: weight {tuple(weight_ND.shape)} has no halves for gate and up")
    _check_norm(x_TD, residual_TD, norm_weight_D, weight_ND, bias_N)
    is_small = _is_small("norm_gated_linear", x_TD, weight_ND, bias_N, residual_TD, norm_weight_D)
    if is_small and launch.choose_path("norm_gated_linear", *launch.available_paths(x_TD, "triton")) == "triton":
        return _run(x_TD, weight_ND, bias_N, residual=residual_TD, norm=(norm_weight_D, eps), is_gated=True)
    if is_small:
        out_TN, total_TD = norm_linear(x_TD, residual_TD, norm_weight_D, eps, weight_ND, bias_N)
        return swiglu(*out_TN.chunk(2, dim=1)), total_TD
    normalized_TD, total_TD = _norm(x_TD, residual_TD, norm_weight_D, eps)
    return swiglu(*linear(normalized_TD, weight_ND, bias_N).chunk(2, dim=-1)), total_TD


def _check(operation: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    is_fit = x.dim() == weight.dim() == 2 and weight.shape[1] == x.shape[1]
    if not is_fit or (bias is not None and bias.shape != weight.shape[:1]):
        bias_shape = None if bias is None else tuple(bias.shape)
        raise ValueError(
            f"{operation}: x {tuple(x.shape)}, weight {tuple(weight.shape)} and bias {bias_shape} do not fit"
        )


def _check_norm(x: Tensor, residual: Tensor | None, norm_weight: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    _check("norm_linear", x, weight, bias)
    if norm_weight.shape != x.shape[1:] or (residual is not None and residual.shape != x.shape):
        residual_shape = None if residual is None else tuple(residual.shape)
        raise ValueError(
            f"norm_linear: x {tuple(x.shape)}, residual {residual_shape} and norm weight {tuple(norm_weight.shape)} "
            "do not fit"
        )
