# mypy: allow-untyped-decorators
"""LoRA adapters chosen per token, added to the output of a linear layer.

Legend: T tokens, D inputs, N outputs, R rank, S adapters in memory, P parts of the outputs with their own matrices A
(q, k, v).

    out[t, n]    = y[t, n] + scale[s] * sum_r low[t, p(n), r] * B[s, n, r],   s = slot[t] - 1
    low[t, p, r] = sum_d x[t, d] * A[s, p, r, d]

slot [T] int32: 0 for tokens without an adapter, which stay as they are. x [T, D], y [T, N], A [S, P, R, D] and B [S, N,
R] share one dtype, scale [S] is fp32; sums are fp32, low is rounded to x's dtype before the second product, as an
unmerged adapter rounds it, and out once. y is overwritten. Adapters of a lower rank are padded with zeros; R is a power
of two from 16.

Tokens are grouped by slot into tiles of one adapter each, padded, once for all layers of a step (`group_tokens`) and on
the device: no shape depends on the slots, so that a CUDA graph can be replayed with other adapters. A program has one
tile; tiles without an adapter end at once.

    grouped_lora:  out as above, in two kernels, as low needs all inputs and out all of low. The first splits the inputs
                   over programs, which store partial sums [splits, P, tiles, R]; the second adds them up, always in
                   the same order.
    add_lora:      the second kernel alone, if the product that gave y also computed x A' of all adapters, as further
                   outputs: low [T, S * P * R]. That is more than a token needs, but takes no launch.
    lora_swiglu:   silu(gate) * up of the out [T, gate and up] of add_lora, rounded as out and `swiglu` round

On Hopper a kernel is launched before the previous one ends, and waits for it (programmatic dependent launch).
Memory-bound for few tokens: each adapter among them is read once by every tile, mostly from the L2 cache. Forward only.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.kernels import launch
from saccade.kernels.launch import tl, triton
from saccade.kernels.swiglu import swiglu_reference


class TokenGroups(NamedTuple):
    """Tokens grouped by the slot of their adapter into tiles."""

    slots: Tensor
    """[tiles] int32: the slot of all tokens of a tile, ascending; 0: no adapter; -1: no tokens."""
    tokens: Tensor
    """[tiles, tokens per tile] int32, -1 for padding; not set in tiles without tokens."""


# Within 6 % of the best sizes on layers of a 3B decoder with 8 adapters (H200, bench/kernels/grouped_lora.py), except
# for _NUM_BLOCKS: one tile was a tenth faster at 512 tokens, and 2048 are not measured.
_BLOCK_N = 128
_SMALL_T, _LARGE_T = 16, 32
"""Tokens of a tile in decode and in steps with prefill."""
_MAX_SMALL = 256
"""Tokens of a step up to which tiles are small."""
_NUM_BLOCKS = 4
"""Tiles of channels of a program of `lora_swiglu` in steps with prefill: it reads its tokens and their low once."""
_BLOCK_D = 256
_PROGRAMS_PER_SM = 4
"""Splits of the inputs are added until the GPU has this many programs."""
_MAX_SPLITS = 16
_GROUPED_AT_ONCE = 64
"""Tokens, and tiles, a program groups at once."""


# ------------------------------------------------------------------ references


def group_tokens_reference(slot_T: Tensor, num_slots: int) -> TokenGroups:
    """Tiles of each slot in turn, tokens in their order."""
    block_t, num_tiles = _tile_shape(len(slot_T), num_slots)
    slots = torch.full((num_tiles,), -1, dtype=torch.int32)
    tokens = torch.full((num_tiles, block_t), -1, dtype=torch.int32)
    tile, slot_T = 0, slot_T.cpu()
    for slot in torch.unique(slot_T).tolist():
        for rows in torch.split(torch.nonzero(slot_T == slot).flatten().int(), block_t):
            slots[tile], tokens[tile, : len(rows)] = slot, rows
            tile += 1
    return TokenGroups(slots, tokens)


def _by_slot(groups: TokenGroups) -> list[tuple[int, Tensor]]:
    """Slots from 1 and their tokens."""
    found = []
    for slot in torch.unique(groups.slots).tolist():
        tokens = groups.tokens[groups.slots == slot].flatten().long()
        if slot > 0:
            found.append((slot, tokens[tokens >= 0]))
    return found


def _add_reference(
    y_TN: Tensor, low: Tensor, tokens: Tensor, lora_B: Tensor, scale: Tensor, part_sizes: Sequence[int]
) -> None:
    """Add one adapter to its tokens. low: [P, tokens, R]; lora_B: [N, R]."""
    products = [
        low_TR.float() @ B_NR.float().T for low_TR, B_NR in zip(low, torch.split(lora_B, list(part_sizes)), strict=True)
    ]
    y_TN[tokens] = (y_TN[tokens].float() + scale * torch.cat(products, dim=1)).to(y_TN.dtype)


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
    for slot, tokens in _by_slot(groups):
        low = torch.einsum("td,prd->ptr", x_TD[tokens].float(), lora_A[slot - 1].float()).to(x_TD.dtype)
        _add_reference(y_TN, low, tokens, lora_B[slot - 1], scale_S[slot - 1], part_sizes)
    return y_TN


def add_lora_reference(
    y_TN: Tensor, low_TM: Tensor, lora_B: Tensor, scale_S: Tensor, groups: TokenGroups, part_sizes: Sequence[int]
) -> Tensor:
    """`grouped_lora_reference` with low given."""
    low_STPR = low_TM.unflatten(1, (len(lora_B), len(part_sizes), -1)).movedim(1, 0)  # type: ignore[no-untyped-call]
    for slot, tokens in _by_slot(groups):
        low = low_STPR[slot - 1, tokens].movedim(1, 0)
        _add_reference(y_TN, low, tokens, lora_B[slot - 1], scale_S[slot - 1], part_sizes)
    return y_TN


def lora_swiglu_reference(y_TN: Tensor, low_TM: Tensor, lora_B: Tensor, scale_S: Tensor, groups: TokenGroups) -> Tensor:
    """The last formula above."""
    half = y_TN.shape[1] // 2
    out = add_lora_reference(y_TN.clone(), low_TM, lora_B, scale_S, groups, (half, half))
    return swiglu_reference(out[:, :half], out[:, half:])


# ------------------------------------------------------------------ kernels


@triton.jit(do_not_specialize=["T", "num_tiles"])
def _group_kernel(
    slot: tl.tensor,
    slots: tl.tensor,
    tokens: tl.tensor,
    T: tl.tensor,
    num_tiles: tl.tensor,
    SLOTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write BLOCK tokens after all tokens of lower slots and earlier tokens of their own slots.

    The first program writes slots and padding.
    """
    own = tl.program_id(0) * BLOCK
    s, i = tl.arange(0, SLOTS), tl.arange(0, BLOCK)
    total, before = tl.zeros([SLOTS], tl.int32), tl.zeros([SLOTS], tl.int32)
    for first in range(0, T, BLOCK):
        found = tl.load(slot + first + i, mask=first + i < T, other=-1)
        counts = tl.sum((found[None, :] == s[:, None]).to(tl.int32), 1)
        total += counts
        before += counts * (own > first).to(tl.int32)
    own_tiles = (total + BLOCK_T - 1) // BLOCK_T
    end_tile = tl.cumsum(own_tiles, 0)
    first_tile = end_tile - own_tiles
    t = own + i
    found = tl.load(slot + t, mask=t < T, other=-1)
    start = (first_tile * BLOCK_T + before)[None, :]
    position = tl.sum(tl.where(found[:, None] == s[None, :], start, 0), 1)
    position += tl.sum(((found[:, None] == found[None, :]) & (t[None, :] < t[:, None])).to(tl.int32), 1)
    tl.store(tokens + position, t, mask=t < T)
    if own == 0:
        padding = (first_tile * BLOCK_T + total)[:, None] + tl.arange(0, BLOCK_T)[None, :]
        tl.store(
            tokens + padding, tl.full([SLOTS, BLOCK_T], -1, tl.int32), mask=padding < (end_tile * BLOCK_T)[:, None]
        )
        for first in range(0, num_tiles, BLOCK):
            tile = first + i
            is_own = (tile[:, None] >= first_tile[None, :]) & (tile[:, None] < end_tile[None, :])
            tl.store(slots + tile, tl.sum(tl.where(is_own, s[None, :] + 1, 0), 1) - 1, mask=tile < num_tiles)


@triton.jit
def _shrink_kernel(
    x: tl.tensor,
    lora_A: tl.tensor,
    slots: tl.tensor,
    tokens: tl.tensor,
    low: tl.tensor,
    D: tl.tensor,
    x_stride: tl.tensor,
    P: tl.constexpr,
    R: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Partial sums of x A' over one split of the inputs, for one part: low [splits, P, tiles, BLOCK_T, R]."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    tile, split, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    own_slot = tl.load(slots + tile)
    if own_slot <= 0:
        return
    i, r, d = tl.arange(0, BLOCK_T), tl.arange(0, R), tl.arange(0, BLOCK_D)
    token = tl.load(tokens + tile * BLOCK_T + i)
    num_steps = tl.cdiv(D, BLOCK_D)
    first = num_steps * split // tl.num_programs(1) * BLOCK_D
    end = num_steps * (split + 1) // tl.num_programs(1) * BLOCK_D
    rows = x + token.to(tl.int64)[:, None] * x_stride
    matrix = lora_A + ((own_slot - 1).to(tl.int64) * P + part) * R * D
    total = tl.zeros([BLOCK_T, R], tl.float32)
    for start in range(first, end, BLOCK_D):
        is_input = start + d < D
        x_tile = tl.load(rows + (start + d)[None, :], mask=(token >= 0)[:, None] & is_input[None, :], other=0.0)
        A_tile = tl.load(matrix + r[None, :] * D + (start + d)[:, None], mask=is_input[:, None], other=0.0)
        total = tl.dot(x_tile, A_tile, total, input_precision="ieee")
    tile_of_part = (split * P + part).to(tl.int64) * tl.num_programs(0) + tile
    tl.store(low + (tile_of_part * BLOCK_T + i[:, None]) * R + r[None, :], total)


@triton.jit
def _sum_splits(low: tl.tensor, offset: tl.tensor, stride: tl.tensor, num_splits: tl.tensor) -> tl.tensor:
    """Add partial sums up, always in the same order."""
    AHEAD: tl.constexpr = 4  # loads in flight
    sums = tl.load(low + offset)
    for first in range(1, num_splits, AHEAD):
        for i in tl.static_range(AHEAD):
            split = tl.full([1, 1], first + i, tl.int64)
            sums += tl.load(low + split * stride + offset, mask=split < num_splits, other=0.0)
    return sums


@triton.jit
def _product(low: tl.tensor, rows: tl.tensor, is_output: tl.tensor, R: tl.constexpr) -> tl.tensor:
    """low B', with rows of B."""
    B_tile = tl.load(rows[None, :] + tl.arange(0, R)[:, None], mask=is_output[None, :], other=0.0)
    return tl.dot(low, B_tile, input_precision="ieee")


@triton.jit(do_not_specialize=["num_splits"])
def _expand_kernel(
    low: tl.tensor,
    lora_B: tl.tensor,
    scale: tl.tensor,
    slots: tl.tensor,
    tokens: tl.tensor,
    y: tl.tensor,
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
    """Add scale * low B' to one tile of outputs, which is within one part.

    N0, N1, N2: outputs of the parts. IS_PARTIAL: low is partial sums of tiles, else [T, S * P * R].
    """
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    tile = tl.program_id(0)
    own_slot = tl.load(slots + tile)
    if own_slot <= 0:
        return
    i, r = tl.arange(0, BLOCK_T), tl.arange(0, R)
    token = tl.load(tokens + tile * BLOCK_T + i).to(tl.int64)
    BLOCKS0: tl.constexpr = (N0 + BLOCK_N - 1) // BLOCK_N
    BLOCKS1: tl.constexpr = (N1 + BLOCK_N - 1) // BLOCK_N
    block = tl.program_id(1)
    part = tl.where(block < BLOCKS0, 0, tl.where(block < BLOCKS0 + BLOCKS1, 1, 2))
    part_start = tl.where(part == 0, 0, tl.where(part == 1, N0, N0 + N1))
    part_end = tl.where(part == 0, N0, tl.where(part == 1, N0 + N1, N0 + N1 + N2))
    block_of_part = block - tl.where(part == 0, 0, tl.where(part == 1, BLOCKS0, BLOCKS0 + BLOCKS1))
    n = part_start + block_of_part * BLOCK_N + tl.arange(0, BLOCK_N)
    out = y + token[:, None] * y_stride + n[None, :]
    is_output = n < part_end
    is_stored = (token >= 0)[:, None] & is_output[None, :]
    total = tl.load(out, mask=is_stored, other=0.0).to(tl.float32)
    dtype = y.dtype.element_ty
    if IS_PARTIAL:
        stride = P * tl.num_programs(0).to(tl.int64) * BLOCK_T * R
        offset = ((part.to(tl.int64) * tl.num_programs(0) + tile) * BLOCK_T + i[:, None]) * R + r[None, :]
        low_tile = _sum_splits(low, offset, stride, num_splits).to(dtype)
    else:
        offset = token[:, None] * low_stride + ((own_slot - 1) * P + part) * R + r[None, :]
        low_tile = tl.load(low + offset, mask=(token >= 0)[:, None], other=0.0)
    rows = lora_B + ((own_slot - 1).to(tl.int64) * (N0 + N1 + N2) + n) * R
    total += _product(low_tile, rows, is_output, R) * tl.load(scale + own_slot - 1)
    tl.store(out, total.to(dtype), mask=is_stored)


@triton.jit
def _swiglu_kernel(
    low: tl.tensor,
    lora_B: tl.tensor,
    scale: tl.tensor,
    slots: tl.tensor,
    tokens: tl.tensor,
    y: tl.tensor,
    out: tl.tensor,
    low_stride: tl.tensor,
    y_stride: tl.tensor,
    I: tl.constexpr,  # noqa: E741
    R: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """silu(gate) * up of one tile of tokens and NUM_BLOCKS tiles of the I channels, adapters added."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    tile = tl.program_id(0)
    own_slot = tl.load(slots + tile)
    if own_slot < 0:
        return
    r = tl.arange(0, R)
    token = tl.load(tokens + tile * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    is_token = (token >= 0)[:, None]
    dtype = y.dtype.element_ty
    low_gate, low_up = tl.zeros([BLOCK_T, R], dtype), tl.zeros([BLOCK_T, R], dtype)
    own_scale = 0.0
    if own_slot > 0:
        offset = token[:, None] * low_stride + (own_slot - 1) * (2 * R) + r[None, :]
        low_gate = tl.load(low + offset, mask=is_token, other=0.0)
        low_up = tl.load(low + offset + R, mask=is_token, other=0.0)
        own_scale = tl.load(scale + own_slot - 1)
    first = tl.program_id(1) * NUM_BLOCKS * BLOCK_N
    for start in range(first, min(first + NUM_BLOCKS * BLOCK_N, I), BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        is_output = n < I
        is_stored = is_token & is_output[None, :]
        channels = y + token[:, None] * y_stride + n[None, :]
        gate = tl.load(channels, mask=is_stored, other=0.0).to(tl.float32)
        up = tl.load(channels + I, mask=is_stored, other=0.0).to(tl.float32)
        if own_slot > 0:
            rows = lora_B + ((own_slot - 1).to(tl.int64) * (2 * I) + n) * R
            gate = (gate + _product(low_gate, rows, is_output, R) * own_scale).to(dtype).to(tl.float32)
            up = (up + _product(low_up, rows + I * R, is_output, R) * own_scale).to(dtype).to(tl.float32)
        value = gate * tl.sigmoid(gate) * up
        tl.store(out + token[:, None] * I + n[None, :], value.to(dtype), mask=is_stored)


# ------------------------------------------------------------------ launches


def _tile_shape(num_tokens: int, num_slots: int) -> tuple[int, int]:
    """Tokens per tile, and an upper bound on the tiles of any choice of slots."""
    block_t = _SMALL_T if num_tokens <= _MAX_SMALL else _LARGE_T
    return block_t, min(num_tokens, num_tokens // block_t + num_slots + 1)


def _num_splits(num_programs: int, num_steps: int, num_sms: int) -> int:
    return max(1, min(_PROGRAMS_PER_SM * num_sms // num_programs, num_steps, _MAX_SPLITS))


def _options(groups: TokenGroups) -> dict[str, Any]:
    options = {"BLOCK_T": groups.tokens.shape[1], "num_warps": 4}
    return options | launch.overlap_options(groups.tokens.device)


def group_tokens(slot_T: Tensor, num_slots: int) -> TokenGroups:
    """Group tokens by slot, from 0 to `num_slots`, once for all layers. It does not synchronise."""
    path = launch.choose_path("group_tokens", *launch.available_paths(slot_T, "triton"))
    if path == "reference" or len(slot_T) == 0:
        return TokenGroups(*(part.to(slot_T.device) for part in group_tokens_reference(slot_T, num_slots)))
    block_t, num_tiles = _tile_shape(len(slot_T), num_slots)
    groups = TokenGroups(
        slot_T.new_empty(num_tiles, dtype=torch.int32), slot_T.new_empty(num_tiles, block_t, dtype=torch.int32)
    )
    _group_kernel[(triton.cdiv(len(slot_T), _GROUPED_AT_ONCE),)](
        slot_T, *groups, len(slot_T), num_tiles, SLOTS=max(2, triton.next_power_of_2(num_slots + 1)), BLOCK_T=block_t,
        BLOCK=_GROUPED_AT_ONCE, num_warps=4,
    )  # fmt: skip
    return groups


def _shrink(x_TD: Tensor, lora_A: Tensor, groups: TokenGroups) -> Tensor:
    """Partial sums [splits, P, tiles, tokens, R] of x A'."""
    D, (_, P, R, _), num_tiles = x_TD.shape[1], lora_A.shape, len(groups.slots)
    block_d = min(_BLOCK_D, 8192 // R)  # as registers and shared memory allow
    splits = _num_splits(num_tiles * P, triton.cdiv(D, block_d), launch.num_sms(x_TD.device))
    low = x_TD.new_empty((splits, P, *groups.tokens.shape, R), dtype=torch.float32)
    _shrink_kernel[(num_tiles, splits, P)](
        x_TD, lora_A, *groups, low, D, x_TD.stride(0), P=P, R=R, BLOCK_D=block_d, **_options(groups)
    )
    return low


def _expand(
    y_TN: Tensor, low: Tensor, lora_B: Tensor, scale_S: Tensor, groups: TokenGroups, part_sizes: Sequence[int]
) -> Tensor:
    """Add scale * low B' to y. low: partial sums of tiles, or [T, S * P * R]."""
    is_partial, sizes = low.dim() > 2, [*part_sizes, 0, 0][:3]
    tiles_n = sum(triton.cdiv(size, _BLOCK_N) for size in part_sizes)
    _expand_kernel[(len(groups.slots), tiles_n)](
        low, lora_B, scale_S, *groups, y_TN, len(low) if is_partial else 1, low.stride(0), y_TN.stride(0), N0=sizes[0],
        N1=sizes[1], N2=sizes[2], P=len(part_sizes), R=lora_B.shape[2], IS_PARTIAL=is_partial, BLOCK_N=_BLOCK_N,
        **_options(groups),
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
            f"grouped_lora: x {tuple(x_TD.shape)} and A {tuple(lora_A.shape)} do not fit y {(len(y_TN), N)} "
            f"and B {tuple(lora_B.shape)}"
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
    half = y_TN.shape[1] // 2
    _check("lora_swiglu", y_TN, lora_B, scale_S, groups, (half, half), low_TM)
    path = launch.choose_path("lora_swiglu", *launch.available_paths(y_TN, "triton"))
    if path == "reference" or len(y_TN) == 0:
        return lora_swiglu_reference(y_TN, low_TM, lora_B, scale_S, groups)
    out = y_TN.new_empty(len(y_TN), half)
    num_blocks = 1 if groups.tokens.shape[1] == _SMALL_T else _NUM_BLOCKS
    _swiglu_kernel[(len(groups.slots), triton.cdiv(half, num_blocks * _BLOCK_N))](
        low_TM, lora_B, scale_S, *groups, y_TN, out, low_TM.stride(0), y_TN.stride(0), I=half, R=lora_B.shape[2],
        BLOCK_N=_BLOCK_N, NUM_BLOCKS=num_blocks, **_options(groups),
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
    block_t, num_tiles = _tile_shape(T, S)
    if (
        outputs != N
        or scale_S.shape != (S,)
        or groups.slots.shape != (num_tiles,)
        or groups.tokens.shape != (num_tiles, block_t)
        or (low_TM is not None and low_TM.shape != (T, S * P * R))
        or sum(part_sizes) != N
        or P > 3
        or R < 16
        or R & (R - 1)
    ):
        low = "" if low_TM is None else f"low {tuple(low_TM.shape)}, "
        raise ValueError(
            f"{operation}: y {tuple(y_TN.shape)}, {low}B {tuple(lora_B.shape)}, scales {tuple(scale_S.shape)}, tiles "
            f"{tuple(groups.tokens.shape)} and parts {tuple(part_sizes)} do not fit; up to 3 parts, ranks 16, 32, ..."
        )
    rows = (y_TN,) if low_TM is None else (y_TN, low_TM)
    if not lora_B.is_contiguous() or any(row.stride(1) != 1 for row in rows):
        raise ValueError(f"{operation}: B must be contiguous, outputs adjacent")
