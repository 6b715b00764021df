# mypy: allow-untyped-decorators
"""LoRA adapters chosen per token, added to the output of a linear layer.

Legend: T tokens, D inputs, N outputs, R rank, S adapters in memory, P parts of the outputs with matrices A of their own (q, k, v).

    out[t, n] = y[t, n] + scale[s] * sum_r low[t, p(n), r] * B[s, n, r],   low[t, p, r] = sum_d x[t, d] * A[s, p, r, d],   s = slot[t] - 1

slot [T] int32: 0 for tokens without an adapter, which stay as they are. x [T, D], y [T, N], A [S, P, R, D] and B [S, N, R] share one dtype, scale [S] is
fp32; sums are fp32, low is rounded to x's dtype before the second product, as an unmerged adapter rounds it, and out once. y is overwritten. Adapters
of a lower rank are padded with zeros; R is a power of two from 16.

Tokens are sorted by slot once for all layers of a step (`group_tokens`), on the device: no shape depends on the slots, so that a CUDA graph can be
replayed with other adapters. A program has BLOCK_T tokens in this order and visits each adapter among them once, mostly one or two. Without adapters
among its tokens it ends at once.

Two kernels, as low needs all inputs and out all of low. The first splits the inputs over programs, which store partial sums
[splits, P, T, R]; the second adds them up, always in the same order. On Hopper a kernel is launched before the previous one ends, and waits
for it (programmatic dependent launch).

The first is not needed where the product that gave y computed x A' of all adapters too, as further outputs: low [T, S * P * R]. That costs a
few outputs more than an adapter needs, and no launch. Then

    add_lora:      out as above
    lora_swiglu:   silu(gate) * up of an out [T, gate and up], rounded as out and `swiglu` round

Memory-bound for few tokens: each adapter among them is read once by every BLOCK_T tokens, mostly from the L2 cache. Forward only.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.kernels import launch
from saccade.kernels.launch import tl, triton
from saccade.kernels.swiglu import swiglu_reference


class TokenGroups(NamedTuple):
    """Tokens sorted by the slot of their adapter."""

    slots: Tensor
    """[T] int32, ascending; 0: no adapter."""
    order: Tensor
    """[T] int32: the token at each position of that order."""


def group_tokens(slot_T: Tensor) -> TokenGroups:
    """Sort tokens by slot, those of one slot in their order. Once for all layers; it does not synchronise."""
    slots, order = torch.sort(slot_T, stable=True)
    return TokenGroups(slots, order.int())


def grouped_lora_reference(
    y_TN: Tensor,
    x_TD: Tensor,
    lora_A: Tensor,
    lora_B: Tensor,
    scale_S: Tensor,
    groups: TokenGroups,
    part_sizes: Sequence[int],
) -> Tensor:
    """The formula above, adapter by adapter."""
    for slot in torch.unique(groups.slots).tolist():
        if slot == 0:
            continue
        rows, s = groups.order[groups.slots == slot].long(), slot - 1
        low_PTR = torch.einsum("td,prd->ptr", x_TD[rows].float(), lora_A[s].float()).to(x_TD.dtype).float()
        products = [
            low_TR @ B_NR.float().T
            for low_TR, B_NR in zip(low_PTR, torch.split(lora_B[s], list(part_sizes)), strict=True)
        ]
        y_TN[rows] = (y_TN[rows].float() + scale_S[s] * torch.cat(products, dim=1)).to(y_TN.dtype)
    return y_TN


def add_lora_reference(
    y_TN: Tensor, low_TM: Tensor, lora_B: Tensor, scale_S: Tensor, groups: TokenGroups, part_sizes: Sequence[int]
) -> Tensor:
    """The formula above with low given, token by token."""
    low_TSPR = low_TM.unflatten(1, (len(lora_B), len(part_sizes), -1)).float()  # type: ignore[no-untyped-call]
    for token, slot in zip(groups.order.tolist(), groups.slots.tolist(), strict=True):
        if slot == 0:
            continue
        matrices = torch.split(lora_B[slot - 1].float(), list(part_sizes))
        products = [B_NR @ low_R for B_NR, low_R in zip(matrices, low_TSPR[token, slot - 1], strict=True)]
        y_TN[token] = (y_TN[token].float() + scale_S[slot - 1] * torch.cat(products)).to(y_TN.dtype)
    return y_TN


def lora_swiglu_reference(y_TN: Tensor, low_TM: Tensor, lora_B: Tensor, scale_S: Tensor, groups: TokenGroups) -> Tensor:
    """The last formula above."""
    half = y_TN.shape[1] // 2
    out = add_lora_reference(y_TN.clone(), low_TM, lora_B, scale_S, groups, (half, half))
    return swiglu_reference(out[:, :half], out[:, half:])


@triton.jit
def _next_slot(slots: tl.tensor, last: tl.tensor) -> tl.tensor:
    """The smallest slot above `last`; 2^30 if there is none."""
    return tl.min(tl.where(slots > last, slots, 1 << 30), 0)


@triton.jit(do_not_specialize=["T"])
def _shrink_kernel(
    x: tl.tensor,
    lora_A: tl.tensor,
    slot: tl.tensor,
    order: tl.tensor,
    low: tl.tensor,
    T: tl.tensor,
    D: tl.tensor,
    x_stride: tl.tensor,
    P: tl.constexpr,
    R: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Partial sums of x A' over one split of the inputs, for one part: low [splits, P, T, R], in the order of the slots."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    slots = tl.load(slot + t, mask=t < T, other=0)
    current = _next_slot(slots, 0)
    if current == (1 << 30):
        return
    part = tl.program_id(2)
    r = tl.arange(0, R)
    d = tl.arange(0, BLOCK_D)
    num_steps = tl.cdiv(D, BLOCK_D)
    first = num_steps * tl.program_id(1) // tl.num_programs(1) * BLOCK_D
    end = num_steps * (tl.program_id(1) + 1) // tl.num_programs(1) * BLOCK_D
    tokens = tl.load(order + t, mask=t < T, other=0)
    rows = x + tokens.to(tl.int64)[:, None] * x_stride
    total = tl.zeros([BLOCK_T, R], tl.float32)
    while current < (1 << 30):
        is_own = (slots == current)[:, None]
        matrix = lora_A + ((current - 1).to(tl.int64) * P + part) * R * D
        for start in range(first, end, BLOCK_D):
            is_input = start + d < D
            x_tile = tl.load(rows + (start + d)[None, :], mask=is_own & is_input[None, :], other=0.0)
            A_tile = tl.load(matrix + r[None, :] * D + (start + d)[:, None], mask=is_input[:, None], other=0.0)
            total = tl.dot(x_tile, A_tile, total, input_precision="ieee")
        current = _next_slot(slots, current)
    offset = ((tl.program_id(1) * P + part).to(tl.int64) * T + t[:, None]) * R + r[None, :]
    tl.store(low + offset, total, mask=(t < T)[:, None])


@triton.jit
def _sum_splits(
    low: tl.tensor, offset: tl.tensor, mask: tl.tensor, stride: tl.tensor, num_splits: tl.tensor
) -> tl.tensor:
    """Add partial sums up, always in the same order."""
    AHEAD: tl.constexpr = 4  # loads in flight
    sums = tl.load(low + offset, mask=mask, other=0.0)
    for first in range(1, num_splits, AHEAD):
        for i in tl.static_range(AHEAD):
            split = tl.full([1, 1], first + i, tl.int64)
            sums += tl.load(low + split * stride + offset, mask=mask & (split < num_splits), other=0.0)
    return sums


@triton.jit(do_not_specialize=["T", "num_splits"])
def _expand_kernel(
    low: tl.tensor,
    lora_B: tl.tensor,
    scale: tl.tensor,
    slot: tl.tensor,
    order: tl.tensor,
    y: tl.tensor,
    T: tl.tensor,
    num_splits: tl.tensor,
    low_stride: tl.tensor,
    y_stride: tl.tensor,
    N0: tl.constexpr,
    N1: tl.constexpr,
    N2: tl.constexpr,
    P: tl.constexpr,
    R: tl.constexpr,
    IS_PARTIAL: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Add scale * low B' to one tile of outputs, which lies within one part. N0, N1, N2: outputs of the parts. IS_PARTIAL: low is partial
    sums [splits, P, T, R] in the order of the slots, else [T, S * P * R]."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    slots = tl.load(slot + t, mask=t < T, other=0)
    tokens = tl.load(order + t, mask=t < T, other=0).to(tl.int64)
    if tl.max(slots, 0) == 0:
        return
    BLOCKS0: tl.constexpr = (N0 + BLOCK_N - 1) // BLOCK_N
    BLOCKS1: tl.constexpr = (N1 + BLOCK_N - 1) // BLOCK_N
    block = tl.program_id(1)
    part = tl.where(block < BLOCKS0, 0, tl.where(block < BLOCKS0 + BLOCKS1, 1, 2))
    part_start = tl.where(part == 0, 0, tl.where(part == 1, N0, N0 + N1))
    part_end = tl.where(part == 0, N0, tl.where(part == 1, N0 + N1, N0 + N1 + N2))
    block_of_part = block - tl.where(part == 0, 0, tl.where(part == 1, BLOCKS0, BLOCKS0 + BLOCKS1))
    n = part_start + block_of_part * BLOCK_N + tl.arange(0, BLOCK_N)
    r = tl.arange(0, R)
    has_adapter, is_output = (slots > 0)[:, None], n < part_end
    out = y + tokens[:, None] * y_stride + n[None, :]
    is_stored = has_adapter & is_output[None, :]
    total = tl.load(out, mask=is_stored, other=0.0).to(tl.float32)
    dtype = y.dtype.element_ty
    if IS_PARTIAL:
        offset = (part.to(tl.int64) * T + t[:, None]) * R + r[None, :]
        low_tile = _sum_splits(low, offset, has_adapter, P * T.to(tl.int64) * R, num_splits).to(dtype)
    else:
        offset = tokens[:, None] * low_stride + ((slots[:, None] - 1) * P + part) * R + r[None, :]
        low_tile = tl.load(low + offset, mask=has_adapter, other=0.0)
    current = _next_slot(slots, 0)
    while current < (1 << 30):
        own_low = tl.where((slots == current)[:, None], low_tile, 0.0).to(dtype)
        B_rows = lora_B + ((current - 1).to(tl.int64) * (N0 + N1 + N2) + n[None, :]) * R
        B_tile = tl.load(B_rows + r[:, None], mask=is_output[None, :], other=0.0)
        own_scale = tl.load(scale + current - 1)
        total += tl.dot(own_low, B_tile, input_precision="ieee") * own_scale
        current = _next_slot(slots, current)
    tl.store(out, total.to(dtype), mask=is_stored)


@triton.jit(do_not_specialize=["T"])
def _swiglu_kernel(
    low: tl.tensor,
    lora_B: tl.tensor,
    scale: tl.tensor,
    slot: tl.tensor,
    order: tl.tensor,
    y: tl.tensor,
    out: tl.tensor,
    T: tl.tensor,
    low_stride: tl.tensor,
    y_stride: tl.tensor,
    I: tl.constexpr,  # noqa: E741
    R: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """silu(gate) * up of one tile of tokens and of the I channels, adapters added."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    slots = tl.load(slot + t, mask=t < T, other=0)
    tokens = tl.load(order + t, mask=t < T, other=0).to(tl.int64)
    n, r = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, R)
    has_adapter, is_output = (slots > 0)[:, None], n < I
    is_stored = (t < T)[:, None] & is_output[None, :]
    rows = y + tokens[:, None] * y_stride + n[None, :]
    dtype = y.dtype.element_ty
    gate = tl.load(rows, mask=is_stored, other=0.0).to(tl.float32)
    up = tl.load(rows + I, mask=is_stored, other=0.0).to(tl.float32)
    current = _next_slot(slots, 0)
    if current < (1 << 30):
        offset = tokens[:, None] * low_stride + (slots[:, None] - 1) * (2 * R) + r[None, :]
        low_gate = tl.load(low + offset, mask=has_adapter, other=0.0)
        low_up = tl.load(low + offset + R, mask=has_adapter, other=0.0)
        while current < (1 << 30):
            is_own = (slots == current)[:, None]
            B_rows = lora_B + ((current - 1).to(tl.int64) * (2 * I) + n[None, :]) * R + r[:, None]
            B_gate = tl.load(B_rows, mask=is_output[None, :], other=0.0)
            B_up = tl.load(B_rows + I * R, mask=is_output[None, :], other=0.0)
            own_scale = tl.load(scale + current - 1)
            gate += tl.dot(tl.where(is_own, low_gate, 0.0).to(dtype), B_gate, input_precision="ieee") * own_scale
            up += tl.dot(tl.where(is_own, low_up, 0.0).to(dtype), B_up, input_precision="ieee") * own_scale
            current = _next_slot(slots, current)
        gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
    value = gate * tl.sigmoid(gate) * up
    tl.store(out + tokens[:, None] * I + n[None, :], value.to(dtype), mask=is_stored)


# As measured on layers of a 3B decoder with 8 adapters (bench/kernels/grouped_lora.py, H200, Triton 3.6, 2026-11-16).
_BLOCK_N = 128


class _Tiles(NamedTuple):
    """Tokens and inputs of a tile, and its warps."""

    block_t: int
    block_d: int
    num_warps: int


_SMALL, _LARGE = _Tiles(16, 256, 8), _Tiles(32, 128, 4)
_MAX_SMALL = 256
"""Tokens of a step up to which tiles are small."""
_PROGRAMS_PER_SM = 4
"""Splits of the inputs are added until the GPU has this many programs."""
_MAX_SPLITS = 16


def _num_splits(num_programs: int, num_steps: int, num_sms: int) -> int:
    return max(1, min(_PROGRAMS_PER_SM * num_sms // num_programs, num_steps, _MAX_SPLITS))


def _tiles_for(num_tokens: int) -> _Tiles:
    return _SMALL if num_tokens <= _MAX_SMALL else _LARGE


def _options(tiles: _Tiles, device: torch.device) -> dict[str, Any]:
    overlaps = launch.can_overlap(device)
    common = {"BLOCK_T": tiles.block_t, "num_warps": tiles.num_warps, "OVERLAP": overlaps}
    return common | ({"launch_pdl": True} if overlaps else {})


def _shrink(x_TD: Tensor, lora_A: Tensor, groups: TokenGroups) -> Tensor:
    """Partial sums [splits, P, T, R] of x A', in the order of the slots."""
    (T, D), (_, P, R, _) = x_TD.shape, lora_A.shape
    tiles = _tiles_for(T)
    block_d = min(tiles.block_d, 8192 // R)  # as registers and shared memory allow
    tiles_t = triton.cdiv(T, tiles.block_t)
    splits = _num_splits(tiles_t * P, triton.cdiv(D, block_d), launch.num_sms(x_TD.device))
    low = x_TD.new_empty((splits, P, T, R), dtype=torch.float32)
    _shrink_kernel[(tiles_t, splits, P)](
        x_TD, lora_A, groups.slots, groups.order, low, T, D, x_TD.stride(0), P=P, R=R, BLOCK_D=block_d,
        **_options(tiles, x_TD.device) | {"num_warps": 4},
    )  # fmt: skip
    return low


def _expand(
    y_TN: Tensor, low: Tensor, lora_B: Tensor, scale_S: Tensor, groups: TokenGroups, part_sizes: Sequence[int]
) -> Tensor:
    """Add scale * low B' to y. low: partial sums [splits, P, T, R], or [T, S * P * R]."""
    T, R, sizes = len(y_TN), lora_B.shape[2], [*part_sizes, 0, 0][:3]
    is_partial, tiles = low.dim() == 4, _tiles_for(T)
    tiles_n = sum(triton.cdiv(size, _BLOCK_N) for size in part_sizes)
    _expand_kernel[(triton.cdiv(T, tiles.block_t), tiles_n)](
        low, lora_B, scale_S, groups.slots, groups.order, y_TN, T, len(low) if is_partial else 1, low.stride(0), y_TN.stride(0),
        N0=sizes[0], N1=sizes[1], N2=sizes[2], P=len(part_sizes), R=R, IS_PARTIAL=is_partial, BLOCK_N=_BLOCK_N,
        **_options(tiles, y_TN.device),
    )  # fmt: skip
    return y_TN


def grouped_lora(
    y_TN: Tensor,
    x_TD: Tensor,
    lora_A: Tensor,
    lora_B: Tensor,
    scale_S: Tensor,
    groups: TokenGroups,
    part_sizes: Sequence[int],
) -> Tensor:
    """Add each token's adapter to y, in place; see the top of this file."""
    _check("grouped_lora", y_TN, lora_B, scale_S, groups, part_sizes)
    (S, N, R), P = lora_B.shape, len(part_sizes)
    if lora_A.dim() != 4 or lora_A.shape != (S, P, R, x_TD.shape[1]) or len(x_TD) != len(y_TN):
        raise ValueError(
            f"grouped_lora: x {tuple(x_TD.shape)} and A {tuple(lora_A.shape)} do not fit y {(len(y_TN), N)} and B {tuple(lora_B.shape)}"
        )
    if not lora_A.is_contiguous():
        raise ValueError("grouped_lora: A must be contiguous")
    path = launch.choose_path("grouped_lora", *launch.available_paths(x_TD, "triton"))
    if path == "reference" or len(y_TN) == 0:
        return grouped_lora_reference(y_TN, x_TD, lora_A, lora_B, scale_S, groups, part_sizes)
    x_TD = x_TD if x_TD.stride(1) == 1 else x_TD.contiguous()
    return _expand(y_TN, _shrink(x_TD, lora_A, groups), lora_B, scale_S, groups, part_sizes)


def add_lora(
    y_TN: Tensor, low_TM: Tensor, lora_B: Tensor, scale_S: Tensor, groups: TokenGroups, part_sizes: Sequence[int]
) -> Tensor:
    """Add each token's adapter to y, in place, with x A' of all adapters given as low [T, S * P * R]."""
    _check("add_lora", y_TN, lora_B, scale_S, groups, part_sizes, low_TM)
    path = launch.choose_path("add_lora", *launch.available_paths(y_TN, "triton"))
    if path == "reference" or len(y_TN) == 0:
        return add_lora_reference(y_TN, low_TM, lora_B, scale_S, groups, part_sizes)
    return _expand(y_TN, low_TM, lora_B, scale_S, groups, part_sizes)


def lora_swiglu(y_TN: Tensor, low_TM: Tensor, lora_B: Tensor, scale_S: Tensor, groups: TokenGroups) -> Tensor:
    """silu(gate) * up [T, N / 2] of y = [gate, up] with each token's adapter added. y is not changed."""
    T, half, R = len(y_TN), y_TN.shape[1] // 2, lora_B.shape[-1]
    _check("lora_swiglu", y_TN, lora_B, scale_S, groups, (half, half), low_TM)
    path = launch.choose_path("lora_swiglu", *launch.available_paths(y_TN, "triton"))
    if path == "reference" or T == 0:
        return lora_swiglu_reference(y_TN, low_TM, lora_B, scale_S, groups)
    out, tiles = y_TN.new_empty(T, half), _tiles_for(T)
    _swiglu_kernel[(triton.cdiv(T, tiles.block_t), triton.cdiv(half, _BLOCK_N))](
        low_TM, lora_B, scale_S, groups.slots, groups.order, y_TN, out, T, low_TM.stride(0), y_TN.stride(0), I=half, R=R,
        BLOCK_N=_BLOCK_N, **_options(tiles, y_TN.device),
    )  # fmt: skip
    return out


def _check(
    operation: str,
    y_TN: Tensor,
    lora_B: Tensor,
    scale_S: Tensor,
    groups: TokenGroups,
    part_sizes: Sequence[int],
    low_TM: Tensor | None = None,
) -> None:
    (T, N), (S, outputs, R), P = y_TN.shape, lora_B.shape, len(part_sizes)
    if (
        outputs != N
        or scale_S.shape != (S,)
        or groups.slots.shape != (T,)
        or groups.order.shape != (T,)
        or (low_TM is not None and low_TM.shape != (T, S * P * R))
        or sum(part_sizes) != N
        or P > 3
        or R < 16
        or R & (R - 1)
    ):
        low = "" if low_TM is None else f"low {tuple(low_TM.shape)}, "
        raise ValueError(
            f"{operation}: y {tuple(y_TN.shape)}, {low}B {tuple(lora_B.shape)}, scales {tuple(scale_S.shape)}, slots "
            f"{tuple(groups.slots.shape)} and parts {tuple(part_sizes)} do not fit; up to 3 parts, ranks 16, 32, ..."
        )
    rows = (y_TN,) if low_TM is None else (y_TN, low_TM)
    if not lora_B.is_contiguous() or any(row.stride(1) != 1 for row in rows):
        raise ValueError(f"{operation}: B must be contiguous, outputs adjacent")
