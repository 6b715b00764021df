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

Memory-bound for few tokens: each adapter among them is read once by every BLOCK_T tokens, mostly from the L2 cache. Forward only.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.kernels import launch
from saccade.kernels.launch import tl, triton


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
    y_stride: tl.tensor,
    N0: tl.constexpr,
    N1: tl.constexpr,
    N2: tl.constexpr,
    P: tl.constexpr,
    R: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Add scale * low B' to one tile of outputs, which lies within one part. N0, N1, N2: outputs of the parts."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    slots = tl.load(slot + t, mask=t < T, other=0)
    current = _next_slot(slots, 0)
    if current == (1 << 30):
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
    is_token, is_output = (t < T)[:, None], n < part_end
    dtype = y.dtype.element_ty
    AHEAD: tl.constexpr = 4  # loads in flight
    sums = tl.zeros([BLOCK_T, R], tl.float32)
    has_adapter = (slots > 0)[:, None]
    for first in range(0, num_splits, AHEAD):
        for i in tl.static_range(AHEAD):
            split = tl.full([1, 1], first + i, tl.int64)
            is_split = is_token & has_adapter & (split < num_splits)
            offset = ((split * P + part) * T + t[:, None]) * R + r[None, :]
            sums += tl.load(low + offset, mask=is_split, other=0.0)
    low_tile = sums.to(dtype)
    total = tl.zeros([BLOCK_T, BLOCK_N], tl.float32)
    while current < (1 << 30):
        own_low = tl.where((slots == current)[:, None], low_tile, 0.0).to(dtype)
        B_rows = lora_B + ((current - 1).to(tl.int64) * (N0 + N1 + N2) + n[None, :]) * R
        B_tile = tl.load(B_rows + r[:, None], mask=is_output[None, :], other=0.0)
        own_scale = tl.load(scale + current - 1)
        total += tl.dot(own_low, B_tile, input_precision="ieee") * own_scale
        current = _next_slot(slots, current)
    tokens = tl.load(order + t, mask=t < T, other=0)
    out = y + tokens.to(tl.int64)[:, None] * y_stride + n[None, :]
    stored = is_token & has_adapter & is_output[None, :]
    value = tl.load(out, mask=stored, other=0.0).to(tl.float32) + total
    tl.store(out, value.to(dtype), mask=stored)


# Not measured yet: bench/kernels/grouped_lora.py.
_BLOCK_T, _BLOCK_D, _BLOCK_N = 16, 256, 128
_LARGE_T, _LARGE_D = 64, 128
"""Tokens and inputs of a tile of a step with prefill."""
_PROGRAMS_PER_SM = 4
"""Splits of the inputs are added until the GPU has this many programs."""
_MAX_SPLITS = 16


def _num_splits(num_programs: int, num_steps: int, num_sms: int) -> int:
    return max(1, min(_PROGRAMS_PER_SM * num_sms // num_programs, num_steps, _MAX_SPLITS))


def _run(
    y_TN: Tensor,
    x_TD: Tensor,
    lora_A: Tensor,
    lora_B: Tensor,
    scale_S: Tensor,
    groups: TokenGroups,
    part_sizes: Sequence[int],
) -> Tensor:
    (T, D), (_, P, R, _) = x_TD.shape, lora_A.shape
    block_t, block_d = (_LARGE_T, _LARGE_D) if T > 4 * _LARGE_T else (_BLOCK_T, _BLOCK_D)
    block_d = min(block_d, 8192 // R)  # as registers and shared memory allow
    tiles_t = triton.cdiv(T, block_t)
    splits = _num_splits(tiles_t * P, triton.cdiv(D, block_d), launch.num_sms(x_TD.device))
    low = x_TD.new_empty((splits, P, T, R), dtype=torch.float32)
    overlaps = launch.can_overlap(x_TD.device)
    options = {"P": P, "R": R, "BLOCK_T": block_t, "OVERLAP": overlaps, "num_warps": 4} | (
        {"launch_pdl": True} if overlaps else {}
    )
    _shrink_kernel[(tiles_t, splits, P)](
        x_TD, lora_A, groups.slots, groups.order, low, T, D, x_TD.stride(0), BLOCK_D=block_d, **options
    )
    sizes = [*part_sizes, 0, 0][:3]
    tiles_n = sum(triton.cdiv(size, _BLOCK_N) for size in part_sizes)
    _expand_kernel[(tiles_t, tiles_n)](
        low, lora_B, scale_S, groups.slots, groups.order, y_TN, T, splits, y_TN.stride(0), N0=sizes[0], N1=sizes[1],
        N2=sizes[2], BLOCK_N=_BLOCK_N, **options,
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
    (S, P, R, D), N = lora_A.shape, y_TN.shape[1]
    if (
        lora_B.shape != (S, N, R)
        or x_TD.shape != (len(y_TN), D)
        or scale_S.shape != (S,)
        or groups.slots.shape != (len(y_TN),)
        or groups.order.shape != (len(y_TN),)
        or len(part_sizes) != P
        or sum(part_sizes) != N
        or P > 3
        or R < 16
        or R & (R - 1)
    ):
        raise ValueError(
            f"grouped_lora: y {tuple(y_TN.shape)}, x {tuple(x_TD.shape)}, A {tuple(lora_A.shape)}, B {tuple(lora_B.shape)}, scales "
            f"{tuple(scale_S.shape)}, slots {tuple(groups.slots.shape)} and parts {tuple(part_sizes)} do not fit; up to 3 parts, ranks 16, 32, ..."
        )
    if not (lora_A.is_contiguous() and lora_B.is_contiguous()) or y_TN.stride(1) != 1:
        raise ValueError("grouped_lora: A and B must be contiguous, outputs adjacent")
    path = launch.choose_path("grouped_lora", *launch.available_paths(x_TD, "triton"))
    if path == "reference" or len(y_TN) == 0:
        return grouped_lora_reference(y_TN, x_TD, lora_A, lora_B, scale_S, groups, part_sizes)
    x_TD = x_TD if x_TD.stride(1) == 1 else x_TD.contiguous()
    return _run(y_TN, x_TD, lora_A, lora_B, scale_S, groups, part_sizes)
