# mypy: allow-untyped-decorators
"""Linear layers with weights and activations of 8 bits (W8A8).

Legend: T tokens, D inputs, N outputs, S splits of the inputs.

    y[t, n] = x_scale[t] * weight_scale[n] * sum_d x8[t, d] * weight[n, d] + bias[n]

The weight [N, D] is int8 or float8_e4m3fn with one scale per output, [N, 1]; every token has its own scale
(`quantize_activation`). `linear_w8a8` quantizes x [T, D] itself; `matmul_w8a8` takes tokens that are quantized already.
y is [T, N] in a float dtype; scales in any float dtype are used as fp32.

int8 is summed exactly in int32 (on a CPU by oneDNN, if it has such instructions), fp8 in fp32 (the library path
accumulates with about 14 bits in the tensor core, an error small compared with the 4 bits of a channel). Memory-bound
up to about 64 tokens: N * D bytes are read once. No backward: quantized weights are not trained.
"""

import functools

import torch
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
from saccade.kernels.launch import tl, triton
from saccade.kernels.quantize_activation import quantize_activation, quantize_activation_reference


def matmul_w8a8_reference(
    x8_TD: Tensor,
    x_scale_T: Tensor,
    weight_ND: Tensor,
    weight_scale_N1: Tensor,
    bias_N: Tensor | None = None,
    *,
    out_dtype: torch.dtype,
) -> Tensor:
    """The formula above, in fp32."""
    y = (x8_TD.float() @ weight_ND.float().T) * x_scale_T.unsqueeze(1) * weight_scale_N1.float().T
    return (y if bias_N is None else y + bias_N.float()).to(out_dtype)


def linear_w8a8_reference(
    x_TD: Tensor, weight_ND: Tensor, weight_scale_N1: Tensor, bias_N: Tensor | None = None
) -> Tensor:
    """`matmul_w8a8_reference` of tokens that the reference quantized."""
    x8_TD, x_scale_T = quantize_activation_reference(x_TD, weight_ND.dtype)
    return matmul_w8a8_reference(x8_TD, x_scale_T, weight_ND, weight_scale_N1, bias_N, out_dtype=x_TD.dtype)


@triton.jit(do_not_specialize=["T"])
def _w8a8_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    x_scale: tl.tensor,
    weight_scale: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    sums: tl.tensor,
    counters: tl.tensor,
    T: tl.tensor,
    N: tl.tensor,
    D: tl.tensor,
    x_stride: tl.tensor,
    weight_stride: tl.tensor,
    HAS_BIAS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLIT: tl.constexpr,
    STORES_SUMS: tl.constexpr,
    EVEN: tl.constexpr,
) -> None:
    """One tile of outputs over one split of the inputs.

    STORES_SUMS: the sums are stored for `_scale_kernel`. EVEN: BLOCK_D divides D.
    """
    t, n = tile_of_program(T, N, BLOCK_T, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    is_token = (t < T)[:, None]
    # Rows past the end: tokens are not read (one token must not cost the traffic of 16), outputs read row 0.
    x_rows = x + t.to(tl.int64)[:, None] * x_stride + d[None, :]
    weight_rows = weight + tl.where(n < N, n, 0).to(tl.int64)[:, None] * weight_stride + d[None, :]
    steps = tl.cdiv(D, BLOCK_D)
    first = steps * tl.program_id(1) // tl.num_programs(1) * BLOCK_D
    end = steps * (tl.program_id(1) + 1) // tl.num_programs(1) * BLOCK_D
    IS_INT: tl.constexpr = x.dtype.element_ty == tl.int8
    # Few tokens: weights are the left operand, which Hopper's wgmma reads in 64 rows from shared memory. (With 16
    # tokens on the left every weight passes through registers, and fp8 through fp16.)
    WEIGHT_LEFT: tl.constexpr = BLOCK_T < 64
    if WEIGHT_LEFT:
        total = tl.zeros([BLOCK_N, BLOCK_T], tl.int32 if IS_INT else tl.float32)
    else:
        total = tl.zeros([BLOCK_T, BLOCK_N], tl.int32 if IS_INT else tl.float32)
    for start in range(first, end, BLOCK_D):
        if EVEN:
            x_tile = tl.load(x_rows + start, mask=is_token, other=0.0)
            weight_tile = tl.load(weight_rows + start)
        else:
            is_input = (start + d < D)[None, :]
            x_tile = tl.load(x_rows + start, mask=is_token & is_input, other=0.0)
            weight_tile = tl.load(weight_rows + start, mask=is_input, other=0.0)
        left = weight_tile if WEIGHT_LEFT else x_tile
        right = tl.trans(x_tile) if WEIGHT_LEFT else tl.trans(weight_tile)
        if IS_INT:
            total = tl.dot(left, right, total, out_dtype=tl.int32)
        else:
            # The tensor core's fp8 accumulator is short: it is added to fp32 after every 128 inputs.
            total = tl.dot(left, right, total, max_num_imprecise_acc=128 if BLOCK_D > 128 else BLOCK_D)
    if WEIGHT_LEFT:
        total = tl.trans(total)
    stored = is_token & (n < N)[None, :]
    offset = t.to(tl.int64)[:, None] * N + n[None, :]
    if STORES_SUMS:
        tl.store(sums + tl.program_id(1) * tl.cast(T, tl.int64) * N + offset, total, mask=stored)
        return
    if SPLIT:
        total, is_last = sum_of_splits(total, sums, counters, offset, stored, T, N)
        if not is_last:
            return
    y = _scale_outputs(total, x_scale, weight_scale, bias, t, n, T, N, HAS_BIAS)
    tl.store(out + offset, y.to(out.dtype.element_ty), mask=stored)


@triton.jit
def _scale_outputs(
    total: tl.tensor,
    x_scale: tl.tensor,
    weight_scale: tl.tensor,
    bias: tl.tensor,
    t: tl.tensor,
    n: tl.tensor,
    T: tl.tensor,
    N: tl.tensor,
    HAS_BIAS: tl.constexpr,
) -> tl.tensor:
    """sums * x_scale[t] * weight_scale[n] + bias[n], in fp32."""
    rows = tl.load(x_scale + t, mask=t < T, other=0.0)
    columns = tl.load(weight_scale + n, mask=n < N, other=0.0).to(tl.float32)
    y = total.to(tl.float32) * rows[:, None] * columns[None, :]
    if HAS_BIAS:
        y += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    return y


@triton.jit(do_not_specialize=["T"])
def _scale_kernel(
    sums: tl.tensor,
    x_scale: tl.tensor,
    weight_scale: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    T: tl.tensor,
    N: tl.tensor,
    SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """Add up the sums of splits [SPLITS, T, N] and scale them."""
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    stored = (t < T)[:, None] & (n < N)[None, :]
    offset = t.to(tl.int64)[:, None] * N + n[None, :]
    total = tl.load(sums + offset, mask=stored, other=0)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(sums + split * tl.cast(T, tl.int64) * N + offset, mask=stored, other=0)
    y = _scale_outputs(total, x_scale, weight_scale, bias, t, n, T, N, HAS_BIAS)
    tl.store(out + offset, y.to(out.dtype.element_ty), mask=stored)


# Maximum number of tokens -> tiles, measured on an H200 at the 3B shapes by the bench with --tune. At 16 / 64
# tokens int8 down takes 10.6 / 15.4 us, torch in bf16 18.5 / 18.8; at 256 tokens 17.0 with sums that are stored, 27.5
# if the last program of a tile adds them up.
_W8A8_TILES: dict[int, SplitTiles] = {
    16: SplitTiles(block_t=16, block_n=64, block_d=256, num_warps=4, num_stages=3, programs_per_sm=2),
    32: SplitTiles(block_t=32, block_n=64, block_d=256, num_warps=4, num_stages=3, programs_per_sm=2),
    64: SplitTiles(block_t=64, block_n=64, block_d=128, num_warps=4, num_stages=4, programs_per_sm=2),
    512: SplitTiles(
        block_t=64, block_n=128, block_d=128, num_warps=4, num_stages=4, programs_per_sm=2, stores_sums=True
    ),
    2**62: SplitTiles(block_t=128, block_n=128, block_d=128, num_warps=8, num_stages=4, programs_per_sm=1),
}

_LIBRARY_TOKENS = {"small": 64, "wide": 65, "deep": 64}
"""Tokens from which torch's fp8 matmul is faster, by shape: down at 64 tokens takes 14.9 us here, 13.8 in torch."""
# Tokens up to which torch's fp8 matmul with one scale, followed by a kernel that applies ours, is faster than the one
# with scales per row, by shape: it splits the inputs. Down takes 22.7 against 29.9 us at 512 tokens, 36.1 against 32.4
# at 1024.
_SCALED_AFTER_TOKENS = {"small": 384, "wide": 0, "deep": 768}

_unit_scales: dict[torch.device, Tensor] = {}


def _unit_scale(device: torch.device) -> Tensor | None:
    """The fp32 scalar 1 on a device. None at its first use during a capture: only a replay would write it."""
    if device not in _unit_scales:
        if torch.cuda.is_current_stream_capturing():
            return None
        _unit_scales[device] = torch.ones((), device=device)
    return _unit_scales[device]


def _matmul_w8a8_triton(
    x8_TD: Tensor,
    x_scale_T: Tensor,
    weight_ND: Tensor,
    weight_scale_N1: Tensor,
    bias_N: Tensor | None,
    out_dtype: torch.dtype,
    tiles: SplitTiles,
    num_splits: int | None = None,
) -> Tensor:
    (T, D), N = x8_TD.shape, len(weight_ND)
    num_programs = triton.cdiv(T, tiles.block_t) * triton.cdiv(N, tiles.block_n)
    splits, counters = choose_splits(tiles, num_programs, D, x8_TD.device, num_splits)
    sum_dtype = torch.int32 if weight_ND.dtype == torch.int8 else torch.float32
    out_TN = x8_TD.new_empty((T, N), dtype=out_dtype)
    stores_sums = tiles.stores_sums and splits > 1
    has_sums = stores_sums or counters is not None
    sums_STN = x8_TD.new_empty((splits, T, N), dtype=sum_dtype) if has_sums else out_TN
    _w8a8_kernel[(num_programs, splits)](
        x8_TD, weight_ND, x_scale_T, weight_scale_N1, out_TN if bias_N is None else bias_N, out_TN, sums_STN,
        out_TN if counters is None else counters, T, N, D, x8_TD.stride(0), weight_ND.stride(0),
        HAS_BIAS=bias_N is not None, BLOCK_T=tiles.block_t, BLOCK_N=tiles.block_n, BLOCK_D=tiles.block_d,
        SPLIT=counters is not None, STORES_SUMS=stores_sums, EVEN=D % tiles.block_d == 0, num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )  # fmt: skip
    if stores_sums:
        _scale_sums(sums_STN, x_scale_T, weight_scale_N1, bias_N, out_TN)
    return out_TN


def _scale_sums(
    sums_STN: Tensor, x_scale_T: Tensor, weight_scale_N1: Tensor, bias_N: Tensor | None, out_TN: Tensor
) -> None:
    """Add up the sums of all splits and scale them."""
    (S, T, N), block_t, block_n = sums_STN.shape, 4, 512
    _scale_kernel[(triton.cdiv(T, block_t), triton.cdiv(N, block_n))](
        sums_STN, x_scale_T, weight_scale_N1, out_TN if bias_N is None else bias_N, out_TN, T, N, SPLITS=S,
        HAS_BIAS=bias_N is not None, BLOCK_T=block_t, BLOCK_N=block_n, num_warps=4,
    )  # fmt: skip


def _matmul_w8a8_library(
    x8_TD: Tensor,
    x_scale_T: Tensor,
    weight_ND: Tensor,
    weight_scale_N1: Tensor,
    bias_N: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """torch's int8 matmul on a CPU, its fp8 matmul on a GPU.

    fp8 of few tokens has one scale, and our kernel applies the scales afterwards; of more tokens it has scales per row.
    """
    if weight_ND.dtype == torch.int8:
        y = torch._int_mm(x8_TD, weight_ND.T).float().mul_(x_scale_T.unsqueeze(1)).mul_(weight_scale_N1.float().T)
        return (y if bias_N is None else y.add_(bias_N)).to(out_dtype)
    (T, D), N = x8_TD.shape, len(weight_ND)
    unit = _unit_scale(x8_TD.device) if _SCALED_AFTER_TOKENS[layer_shape(N, D)] >= T else None
    if unit is not None:
        sums_TN = torch._scaled_mm(x8_TD, weight_ND.T, unit, unit, out_dtype=torch.float32, use_fast_accum=True)
        out_TN = sums_TN.new_empty((T, N), dtype=out_dtype)
        _scale_sums(sums_TN.unsqueeze(0), x_scale_T, weight_scale_N1, bias_N, out_TN)
        return out_TN
    has_fused_bias = bias_N is not None and bias_N.dtype == out_dtype
    y = torch._scaled_mm(
        x8_TD, weight_ND.T, x_scale_T.unsqueeze(1), weight_scale_N1.float().T, bias=bias_N if has_fused_bias else None,
        out_dtype=out_dtype, use_fast_accum=True,
    )  # fmt: skip
    return y if bias_N is None or has_fused_bias else y.add_(bias_N)


def _library_takes(x8_TD: Tensor, weight_ND: Tensor, out_dtype: torch.dtype) -> bool:
    """Whether torch's 8-bit matmuls accept these shapes on this device."""
    D, N = x8_TD.shape[1], len(weight_ND)
    if x8_TD.is_cpu:
        is_int8 = weight_ND.dtype == torch.int8 and x8_TD.is_contiguous() and weight_ND.is_contiguous()
        return is_int8 and not torch.compiler.is_compiling() and _has_exact_int8()
    is_fp8 = weight_ND.dtype == torch.float8_e4m3fn and out_dtype == torch.bfloat16
    return x8_TD.is_cuda and is_fp8 and D % 16 == N % 16 == 0 and x8_TD.is_contiguous() and weight_ND.is_contiguous()


@functools.cache
def _has_exact_int8() -> bool:
    """Whether torch sums int8 products in int32 on this CPU.

    Without such instructions oneDNN sums pairs in int16, which overflow.
    """
    if not hasattr(torch, "_int_mm") or not getattr(torch.cpu, "_is_vnni_supported", bool)():
        return False
    weight_ND = torch.tensor([[-128, 127], [127, 127]], dtype=torch.int8).repeat(16, 64)
    exact = weight_ND.float() @ weight_ND.float().T
    return all(torch.equal(torch._int_mm(weight_ND[:rows], weight_ND.T).float(), exact[:rows]) for rows in (1, 32))


def matmul_w8a8(
    x8_TD: Tensor,
    x_scale_T: Tensor,
    weight_ND: Tensor,
    weight_scale_N1: Tensor,
    bias_N: Tensor | None = None,
    *,
    out_dtype: torch.dtype,
) -> Tensor:
    """x W' + bias in `out_dtype`, of tokens and a weight in 8 bits with their scales."""
    (T, D), N = x8_TD.shape, len(weight_ND)
    if (
        weight_ND.shape[1] != D
        or weight_scale_N1.numel() != N
        or x_scale_T.shape != (T,)
        or x8_TD.dtype != weight_ND.dtype
    ):
        raise ValueError(
            f"matmul_w8a8: x {tuple(x8_TD.shape)} {x8_TD.dtype} with {tuple(x_scale_T.shape)} scales and weight "
            f"{tuple(weight_ND.shape)} {weight_ND.dtype} with {tuple(weight_scale_N1.shape)} scales do not fit"
        )
    if weight_ND.stride(1) != 1 or x8_TD.stride(1) != 1 or not weight_scale_N1.is_contiguous():
        raise ValueError("matmul_w8a8: inputs and weights must be contiguous along D, weight scales altogether")
    able: tuple[launch.Path, ...] = launch.available_paths(x8_TD, "triton")
    if _library_takes(x8_TD, weight_ND, out_dtype):
        is_faster = x8_TD.is_cpu or _LIBRARY_TOKENS[layer_shape(N, D)] <= T
        able = ("library", *able) if is_faster else (*able, "library")
    path = launch.choose_path(f"matmul_w8a8 {str(weight_ND.dtype).removeprefix('torch.')}", *able)
    if path == "reference" or T == 0:
        return matmul_w8a8_reference(x8_TD, x_scale_T, weight_ND, weight_scale_N1, bias_N, out_dtype=out_dtype)
    if path == "library":
        return _matmul_w8a8_library(x8_TD, x_scale_T, weight_ND, weight_scale_N1, bias_N, out_dtype)
    tiles = split_tiles(_W8A8_TILES, T)
    return _matmul_w8a8_triton(x8_TD, x_scale_T, weight_ND, weight_scale_N1, bias_N, out_dtype, tiles)


def linear_w8a8(x_TD: Tensor, weight_ND: Tensor, weight_scale_N1: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """x W' + bias on 8-bit weights; tokens are quantized to the weight's dtype."""
    x8_TD, x_scale_T = quantize_activation(x_TD, weight_ND.dtype)
    return matmul_w8a8(x8_TD, x_scale_T, weight_ND, weight_scale_N1, bias_N, out_dtype=x_TD.dtype)
