# mypy: allow-untyped-decorators
"""Tiled Triton kernels of packed attention; `attention.py` has the specification and the reference.

One program per tile of queries (forward, dQ) or of keys (dK and dV), which loops over tiles of the other side. Forward
saves out and, per query and head, the base-2 log-sum-exp in fp32. Backward is two kernels: dQ, which also writes delta
= sum_k out dO, then dK and dV: 7 matrix products instead of the 5 with atomics, but deterministic. Segment lengths stay
on the device: see `locate`.

A head dim that is not a power of two is split into two that are (80 = 64 + 16) rather than padded to 128: tiles have
two chunks of columns, MAIN and TAIL. If TAIL is 0, the second is unused.

Names in the kernels: m are queries and n keys of one segment; the `position` of a query is the index of the last key it
attends to.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from saccade.kernels import launch
from saccade.kernels.launch import tl, triton

NO_MAX = tl.constexpr(-1.0e30)  # finite, so that a row whose keys are all masked has no inf - inf


@triton.jit
def locate(
    cu_seqlens: tl.tensor, tile: tl.tensor, num_segments: tl.tensor, first: tl.tensor, BLOCK: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The segment of a tile, and the index of the tile in that segment. `first` is cu_seqlens[0].

    Segment s owns the tiles from (cu_seqlens[s] - first) // BLOCK + s up to those of segment s + 1: always enough for
    its rows, at most one too many. A grid of T // BLOCK + num_segments tiles thus covers any lengths, which the host
    need not know.
    """
    low = tile * 0
    high = low + num_segments
    while high - low > 1:
        middle = (low + high) // 2
        is_reached = (tl.load(cu_seqlens + middle) - first) // BLOCK + middle <= tile
        low = tl.where(is_reached, middle, low)
        high = tl.where(is_reached, high, middle)
    return low, tile - ((tl.load(cu_seqlens + low) - first) // BLOCK + low)


@triton.jit
def span(cu_seqlens: tl.tensor, segment: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """First row and number of rows of a segment."""
    row = tl.load(cu_seqlens + segment)
    return row, tl.load(cu_seqlens + segment + 1) - row


@triton.jit
def load_tile(
    source: tl.tensor,
    source_tail: tl.tensor,
    row: tl.tensor,
    first: tl.tensor,
    num_rows: tl.tensor,
    stride: tl.tensor,
    column: tl.tensor,
    BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MAIN: tl.constexpr,
    TAIL: tl.constexpr,
    TMA: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Load rows `first` .. `first + BLOCK` of the segment that starts at `row`, in two chunks of columns.

    Through pointers, rows outside the segment read as zero. Through descriptors (TMA) they read as arbitrary data: the
    caller masks them. The offset of the first row is 64-bit; within a tile 32 bits do (see `rows_of`).
    """
    if TMA:
        main = source.load([row + first, column])
        tail = main
        if TAIL > 0:
            tail = source_tail.load([row + first, column + MAIN])
    else:
        rows = tl.arange(0, BLOCK)
        is_inside = ((rows + first >= 0) & (rows + first < num_rows))[:, None]
        pointers = source + (row + first).to(tl.int64) * stride + column + rows[:, None] * stride
        main = tl.load(pointers + tl.arange(0, MAIN)[None, :], mask=is_inside, other=0.0)
        tail = main
        if TAIL > 0:
            columns = MAIN + tl.arange(0, TAIL)[None, :]
            tail = tl.load(pointers + columns, mask=is_inside & (columns < HEAD_DIM), other=0.0)
    return main, tail


@triton.jit
def store_tile(
    target: tl.tensor,
    main: tl.tensor,
    tail: tl.tensor,
    row: tl.tensor,
    first: tl.tensor,
    num_rows: tl.tensor,
    stride: tl.tensor,
    column: tl.tensor,
    BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MAIN: tl.constexpr,
    TAIL: tl.constexpr,
) -> None:
    """Store a tile where `load_tile` would load it; rows outside the segment are not written."""
    rows = tl.arange(0, BLOCK)
    is_inside = (rows + first < num_rows)[:, None]
    pointers = target + (row + first).to(tl.int64) * stride + column + rows[:, None] * stride
    tl.store(pointers + tl.arange(0, MAIN)[None, :], main.to(target.dtype.element_ty), mask=is_inside)
    if TAIL > 0:
        columns = MAIN + tl.arange(0, TAIL)[None, :]
        tl.store(pointers + columns, tail.to(target.dtype.element_ty), mask=is_inside & (columns < HEAD_DIM))


@triton.jit
def zero_tile(BLOCK: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """A zero accumulator, in two chunks of columns."""
    return tl.zeros([BLOCK, MAIN], tl.float32), tl.zeros([BLOCK, TAIL if TAIL > 0 else 16], tl.float32)


@triton.jit
def dot_rows(a: tl.tensor, a_tail: tl.tensor, b: tl.tensor, b_tail: tl.tensor, TAIL: tl.constexpr) -> tl.tensor:
    """a @ b^T over both chunks. fp32 inputs keep their precision (three TF32 products)."""
    product = tl.dot(a, tl.trans(b), input_precision="tf32x3")
    if TAIL > 0:
        product = tl.dot(a_tail, tl.trans(b_tail), product, input_precision="tf32x3")
    return product


@triton.jit
def add_dot(
    sums: tl.tensor, sums_tail: tl.tensor, weights: tl.tensor, b: tl.tensor, b_tail: tl.tensor, TAIL: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """sums + weights @ b, both chunks; the weights are rounded to b's dtype, for the tensor cores."""
    weights = weights.to(b.dtype)
    sums = tl.dot(weights, b, sums, input_precision="tf32x3")
    if TAIL > 0:
        sums_tail = tl.dot(weights, b_tail, sums_tail, input_precision="tf32x3")
    return sums, sums_tail


@triton.jit
def _attends(position: tl.tensor, key: tl.tensor, CAUSAL: tl.constexpr, WINDOW: tl.constexpr) -> tl.tensor:
    """Whether the query at `position` attends to `key`."""
    seen = key == key
    if CAUSAL:
        seen = key <= position
    if WINDOW is not None:
        seen = seen & (key >= position - WINDOW)
    return seen


@triton.jit
def _keys_of_tile(
    position: tl.tensor,
    num_keys: tl.tensor,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Key range of the queries from `position` on: [begin, full_begin) and [full_end, end) need a mask."""
    begin = num_keys * 0
    end = num_keys
    full_end = num_keys
    if CAUSAL:
        end = tl.minimum(num_keys, position + BLOCK_M)
        full_end = tl.minimum(num_keys, tl.maximum(position + 1, 0))
    full_begin = begin
    full_end = full_end // BLOCK_N * BLOCK_N
    if WINDOW is not None:
        begin = tl.maximum(position - WINDOW, 0) // BLOCK_N * BLOCK_N
        full_end = tl.maximum(full_end, begin)
        full_begin = tl.cdiv(tl.maximum(position + BLOCK_M - 1 - WINDOW, 0), BLOCK_N) * BLOCK_N
        full_begin = tl.minimum(full_begin, full_end)
    return begin, full_begin, full_end, end


@triton.jit(do_not_specialize=["lse_stride", "num_segments"])
def _forward_kernel(
    q: tl.tensor,
    k: tl.tensor,
    k_tail: tl.tensor,
    v: tl.tensor,
    v_tail: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    cu_seqlens_q: tl.tensor,
    cu_seqlens_k: tl.tensor,
    q_stride: tl.tensor,
    k_stride: tl.tensor,
    v_stride: tl.tensor,
    out_stride: tl.tensor,
    lse_stride: tl.tensor,
    num_segments: tl.tensor,
    scale_log2: tl.float32,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MAIN: tl.constexpr,
    TAIL: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OVERLAP: tl.constexpr,
    TMA: tl.constexpr,
) -> None:
    """One tile of queries of one head. OVERLAP: the scores of the next keys are computed during this softmax."""
    head = tl.program_id(0) % NUM_HEADS
    segment, tile = locate(cu_seqlens_q, tl.program_id(0) // NUM_HEADS, num_segments, 0, BLOCK_M)
    q_row, num_queries = span(cu_seqlens_q, segment)
    k_row, num_keys = span(cu_seqlens_k, segment)
    m0 = (tl.cdiv(num_queries, BLOCK_M) - 1 - tile) * BLOCK_M  # the longest rows of a causal segment go first
    if m0 < 0:
        return
    q_column = head * HEAD_DIM
    k_column = head // GROUP * HEAD_DIM
    q_main, q_last = load_tile(q, q, q_row, m0, num_queries, q_stride, q_column, BLOCK_M, HEAD_DIM, MAIN, TAIL, False)
    sums, sums_tail = zero_tile(BLOCK_M, MAIN, TAIL)
    total = tl.zeros([BLOCK_M], tl.float32)
    peak = tl.full([BLOCK_M], NO_MAX, tl.float32)

    position = m0 + num_keys - num_queries
    positions = position + tl.arange(0, BLOCK_M)
    begin, full_begin, full_end, end = _keys_of_tile(position, num_keys, CAUSAL, WINDOW, BLOCK_M, BLOCK_N)
    scores = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if OVERLAP:
        k_main, k_last = load_tile(
            k, k_tail, k_row, begin, num_keys, k_stride, k_column, BLOCK_N, HEAD_DIM, MAIN, TAIL, TMA
        )
        scores = dot_rows(q_main, q_last, k_main, k_last, TAIL)

    for phase in tl.static_range(1 if WINDOW is None else 0, 3):  # masked, full, masked
        if phase == 0:
            low, high = begin, full_begin
        elif phase == 1:
            low, high = full_begin, full_end
        else:
            low, high = full_end, end
        for n0 in tl.range(low, high, BLOCK_N):
            keys = n0 + tl.arange(0, BLOCK_N)
            ahead = n0 + BLOCK_N if OVERLAP else n0
            k_main, k_last = load_tile(
                k, k_tail, k_row, ahead, num_keys, k_stride, k_column, BLOCK_N, HEAD_DIM, MAIN, TAIL, TMA
            )
            fresh = dot_rows(q_main, q_last, k_main, k_last, TAIL)
            if not OVERLAP:
                scores = fresh
            if phase != 1:
                seen = (keys < num_keys)[None, :] & _attends(positions[:, None], keys[None, :], CAUSAL, WINDOW)
                scores = tl.where(seen, scores, float("-inf"))
            # p = 2^(scale s - peak); earlier sums shrink by 2^(old peak - new peak)
            new_peak = tl.maximum(peak, tl.max(scores, 1) * scale_log2)
            p = tl.exp2(scores * scale_log2 - new_peak[:, None])
            decay = tl.exp2(peak - new_peak)
            v_main, v_last = load_tile(
                v, v_tail, k_row, n0, num_keys, v_stride, k_column, BLOCK_N, HEAD_DIM, MAIN, TAIL, TMA
            )
            if phase != 1 and TMA:
                v_main = tl.where((keys < num_keys)[:, None], v_main, 0.0)
                v_last = tl.where((keys < num_keys)[:, None], v_last, 0.0)
            # sums = decay sums + p v
            sums = sums * decay[:, None]
            if TAIL > 0:
                sums_tail = sums_tail * decay[:, None]
            sums, sums_tail = add_dot(sums, sums_tail, p, v_main, v_last, TAIL)
            total = total * decay + tl.sum(p, 1)
            peak = new_peak
            if OVERLAP:
                scores = fresh

    # out = sums / total; lse = log2 sum_s 2^(scale s). +inf for queries without keys makes p = 0 in backward.
    divisor = tl.where(total > 0, total, 1.0)
    inverse = (1.0 / divisor)[:, None]
    sums = sums * inverse
    sums_tail = sums_tail * inverse
    row_lse = tl.where(total > 0, peak + tl.log2(divisor), float("inf"))
    queries = m0 + tl.arange(0, BLOCK_M)
    tl.store(lse + head.to(tl.int64) * lse_stride + q_row + queries, row_lse, mask=queries < num_queries)
    store_tile(out, sums, sums_tail, q_row, m0, num_queries, out_stride, q_column, BLOCK_M, HEAD_DIM, MAIN, TAIL)


@triton.jit(do_not_specialize=["lse_stride", "num_segments"])
def _query_gradient_kernel(
    q: tl.tensor,
    k: tl.tensor,
    k_tail: tl.tensor,
    v: tl.tensor,
    v_tail: tl.tensor,
    out: tl.tensor,
    do: tl.tensor,
    lse: tl.tensor,
    delta: tl.tensor,
    d_q: tl.tensor,
    cu_seqlens_q: tl.tensor,
    cu_seqlens_k: tl.tensor,
    q_stride: tl.tensor,
    k_stride: tl.tensor,
    v_stride: tl.tensor,
    out_stride: tl.tensor,
    do_stride: tl.tensor,
    d_q_stride: tl.tensor,
    lse_stride: tl.tensor,
    num_segments: tl.tensor,
    scale: tl.float32,
    scale_log2: tl.float32,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MAIN: tl.constexpr,
    TAIL: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TMA: tl.constexpr,
) -> None:
    """dQ of one tile of queries; also writes delta = sum_k out dO for the key gradient, which runs after it."""
    head = tl.program_id(0) % NUM_HEADS
    segment, tile = locate(cu_seqlens_q, tl.program_id(0) // NUM_HEADS, num_segments, 0, BLOCK_M)
    q_row, num_queries = span(cu_seqlens_q, segment)
    k_row, num_keys = span(cu_seqlens_k, segment)
    m0 = (tl.cdiv(num_queries, BLOCK_M) - 1 - tile) * BLOCK_M
    if m0 < 0:
        return
    q_column = head * HEAD_DIM
    k_column = head // GROUP * HEAD_DIM
    queries = m0 + tl.arange(0, BLOCK_M)
    row_stats = head.to(tl.int64) * lse_stride + q_row

    do_main, do_last = load_tile(
        do, do, q_row, m0, num_queries, do_stride, q_column, BLOCK_M, HEAD_DIM, MAIN, TAIL, False
    )
    o_main, o_last = load_tile(
        out, out, q_row, m0, num_queries, out_stride, q_column, BLOCK_M, HEAD_DIM, MAIN, TAIL, False
    )
    row_delta = tl.sum(o_main.to(tl.float32) * do_main.to(tl.float32), 1)
    if TAIL > 0:
        row_delta += tl.sum(o_last.to(tl.float32) * do_last.to(tl.float32), 1)
    tl.store(delta + row_stats + queries, row_delta, mask=queries < num_queries)
    row_lse = tl.load(lse + row_stats + queries, mask=queries < num_queries, other=float("inf"))
    q_main, q_last = load_tile(q, q, q_row, m0, num_queries, q_stride, q_column, BLOCK_M, HEAD_DIM, MAIN, TAIL, False)
    dq, dq_tail = zero_tile(BLOCK_M, MAIN, TAIL)

    position = m0 + num_keys - num_queries
    positions = position + tl.arange(0, BLOCK_M)
    begin, full_begin, full_end, end = _keys_of_tile(position, num_keys, CAUSAL, WINDOW, BLOCK_M, BLOCK_N)
    for phase in tl.static_range(1 if WINDOW is None else 0, 3):  # masked, full, masked
        if phase == 0:
            low, high = begin, full_begin
        elif phase == 1:
            low, high = full_begin, full_end
        else:
            low, high = full_end, end
        for n0 in tl.range(low, high, BLOCK_N):
            keys = n0 + tl.arange(0, BLOCK_N)
            k_main, k_last = load_tile(
                k, k_tail, k_row, n0, num_keys, k_stride, k_column, BLOCK_N, HEAD_DIM, MAIN, TAIL, TMA
            )
            v_main, v_last = load_tile(
                v, v_tail, k_row, n0, num_keys, v_stride, k_column, BLOCK_N, HEAD_DIM, MAIN, TAIL, TMA
            )
            # p = 2^(scale q k - lse); dP = dO v; dS = p (dP - delta); dQ += dS k
            scores = dot_rows(q_main, q_last, k_main, k_last, TAIL)
            dp = dot_rows(do_main, do_last, v_main, v_last, TAIL)
            ds = tl.exp2(scores * scale_log2 - row_lse[:, None]) * (dp - row_delta[:, None])
            if phase != 1:
                seen = (keys < num_keys)[None, :] & _attends(positions[:, None], keys[None, :], CAUSAL, WINDOW)
                ds = tl.where(seen, ds, 0.0)
                if TMA:
                    k_main = tl.where((keys < num_keys)[:, None], k_main, 0.0)
                    k_last = tl.where((keys < num_keys)[:, None], k_last, 0.0)
            dq, dq_tail = add_dot(dq, dq_tail, ds, k_main, k_last, TAIL)

    dq = dq * scale
    dq_tail = dq_tail * scale
    store_tile(d_q, dq, dq_tail, q_row, m0, num_queries, d_q_stride, q_column, BLOCK_M, HEAD_DIM, MAIN, TAIL)


@triton.jit(do_not_specialize=["lse_stride", "num_segments"])
def _key_gradient_kernel(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    do: tl.tensor,
    lse: tl.tensor,
    delta: tl.tensor,
    d_k: tl.tensor,
    d_v: tl.tensor,
    cu_seqlens_q: tl.tensor,
    cu_seqlens_k: tl.tensor,
    q_stride: tl.tensor,
    k_stride: tl.tensor,
    v_stride: tl.tensor,
    do_stride: tl.tensor,
    d_k_stride: tl.tensor,
    d_v_stride: tl.tensor,
    split_stride: tl.int64,
    lse_stride: tl.tensor,
    num_segments: tl.tensor,
    scale: tl.float32,
    scale_log2: tl.float32,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SPLITS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MAIN: tl.constexpr,
    TAIL: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """dK and dV of one tile of keys, summed over GROUP / SPLITS of the query heads that read it; transposed, keys down.

    Query tiles are counted from the segment's end, so that only the first one visited can be partial (it may begin
    before row 0). Keys past the end are zero rows whose gradients are never stored. Tiles are loaded through pointers:
    through the bulk copy engine, fp16 gradients of short segments came out wrong on an H200 (Triton 3.6; right under
    the interpreter).
    """
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    split = tl.program_id(0) // NUM_KV_HEADS % SPLITS
    segment, tile = locate(cu_seqlens_k, tl.program_id(0) // (NUM_KV_HEADS * SPLITS), num_segments, 0, BLOCK_N)
    q_row, num_queries = span(cu_seqlens_q, segment)
    k_row, num_keys = span(cu_seqlens_k, segment)
    n0 = tile * BLOCK_N
    if n0 >= num_keys:
        return
    k_column = kv_head * HEAD_DIM
    k_main, k_last = load_tile(k, k, k_row, n0, num_keys, k_stride, k_column, BLOCK_N, HEAD_DIM, MAIN, TAIL, False)
    v_main, v_last = load_tile(v, v, k_row, n0, num_keys, v_stride, k_column, BLOCK_N, HEAD_DIM, MAIN, TAIL, False)
    dk, dk_tail = zero_tile(BLOCK_N, MAIN, TAIL)
    dv, dv_tail = zero_tile(BLOCK_N, MAIN, TAIL)

    # Queries [begin, full_begin) and [full_end, end) need a mask, those between attend to every key of the tile.
    shift = num_keys - num_queries
    keys = n0 + tl.arange(0, BLOCK_N)
    first = num_queries * 0
    first_full = num_queries * 0
    end = num_queries
    full_end = num_queries
    if CAUSAL:
        first = tl.maximum(n0 - shift, 0)
        first_full = tl.minimum(tl.maximum(n0 + BLOCK_N - 1 - shift, 0), num_queries)
    if WINDOW is not None:
        end = tl.maximum(tl.minimum(n0 + BLOCK_N + WINDOW - shift, num_queries), first)
        full_end = tl.maximum(tl.minimum(n0 + 1 + WINDOW - shift, end), first)
        full_end = end - tl.cdiv(end - full_end, BLOCK_M) * BLOCK_M
    begin = end - tl.cdiv(end - first, BLOCK_M) * BLOCK_M
    full_begin = end - tl.maximum(end - first_full, 0) // BLOCK_M * BLOCK_M
    if WINDOW is not None:
        full_end = tl.maximum(full_end, begin)
        full_begin = tl.minimum(full_begin, full_end)

    first_head = kv_head * GROUP + split * (GROUP // SPLITS)
    for phase in tl.static_range(0, 2 if WINDOW is None else 3):  # masked, full, masked
        if phase == 0:
            low, high = begin, full_begin
        elif phase == 1:
            low, high = full_begin, full_end
        else:
            low, high = full_end, end
        # One loop over all heads, so that loads are pipelined across heads.
        num_tiles = tl.cdiv(high - low, BLOCK_M)
        # Loads of the first steps are issued before the loop, even if it is empty. Dividing by zero tiles would be
        # undefined, and the compiler would assume that there is a step.
        tiles_per_head = tl.maximum(num_tiles, 1)
        for step in tl.range(0, num_tiles * (GROUP // SPLITS)):
            head = first_head + step // tiles_per_head
            m0 = low + step % tiles_per_head * BLOCK_M
            queries = m0 + tl.arange(0, BLOCK_M)
            is_inside = (queries >= 0) & (queries < num_queries)
            q_column = head * HEAD_DIM
            q_main, q_last = load_tile(
                q, q, q_row, m0, num_queries, q_stride, q_column, BLOCK_M, HEAD_DIM, MAIN, TAIL, False
            )
            do_main, do_last = load_tile(
                do, do, q_row, m0, num_queries, do_stride, q_column, BLOCK_M, HEAD_DIM, MAIN, TAIL, False
            )
            row_stats = head.to(tl.int64) * lse_stride + q_row
            if phase == 1:
                row_lse = tl.load(lse + row_stats + queries)
                row_delta = tl.load(delta + row_stats + queries)
            else:
                row_lse = tl.load(lse + row_stats + queries, mask=is_inside, other=float("inf"))
                row_delta = tl.load(delta + row_stats + queries, mask=is_inside, other=0.0)
            # p^T = 2^(scale k q - lse); dV += p^T dO
            scores = dot_rows(k_main, k_last, q_main, q_last, TAIL)
            p = tl.exp2(scores * scale_log2 - row_lse[None, :])
            if phase != 1:
                p = tl.where(_attends((queries + shift)[None, :], keys[:, None], CAUSAL, WINDOW), p, 0.0)
            dv, dv_tail = add_dot(dv, dv_tail, p, do_main, do_last, TAIL)
            # dP^T = v dO; dS^T = p^T (dP^T - delta); dK += dS^T q. (dP after dV: before it, head dim 128 spills
            # registers)
            dp = dot_rows(v_main, v_last, do_main, do_last, TAIL)
            dk, dk_tail = add_dot(dk, dk_tail, p * (dp - row_delta[None, :]), q_main, q_last, TAIL)

    dk = dk * scale
    dk_tail = dk_tail * scale
    d_k += split * split_stride
    d_v += split * split_stride
    store_tile(d_k, dk, dk_tail, k_row, n0, num_keys, d_k_stride, k_column, BLOCK_N, HEAD_DIM, MAIN, TAIL)
    store_tile(d_v, dv, dv_tail, k_row, n0, num_keys, d_v_stride, k_column, BLOCK_N, HEAD_DIM, MAIN, TAIL)


class AttentionTiles(NamedTuple):
    """Tile sizes and compile options of a tiled kernel."""

    block_m: int
    """Queries per tile."""
    block_n: int
    """Keys per tile."""
    num_warps: int
    num_stages: int
    """Tiles in flight between memory and the tensor cores."""
    overlap: bool = False
    """Forward: compute the scores of the next keys during the softmax of the current ones."""
    tma: bool = False
    """Load through TMA (Hopper and later) instead of pointers."""
    max_registers: int | None = None
    """Cap per thread; 128 lets two programs of 8 warps share a multiprocessor."""


# Keyed by kernel and head dim rounded up to 64, 96, 128 or 256. Those of 96 and 128 are measured
# (bench/kernels/tune_attention.py, H200): forward of ragged causal text with head dim 128 runs at 372 TFLOP/s, dQ at
# 415, dK and dV at 246. Those of 64 and 256 follow from register counts as compiled for sm_90.
CONFIGS: dict[tuple[str, int], AttentionTiles] = {
    ("forward", 64): AttentionTiles(128, 128, 8, 2, overlap=True, tma=True),
    ("forward", 96): AttentionTiles(64, 64, 4, 3, tma=True),
    ("forward", 128): AttentionTiles(64, 64, 4, 3, tma=True),
    ("forward", 256): AttentionTiles(128, 64, 8, 2, tma=True),
    ("query_gradient", 64): AttentionTiles(128, 64, 8, 2, tma=True),
    ("query_gradient", 96): AttentionTiles(128, 32, 8, 3),
    ("query_gradient", 128): AttentionTiles(64, 64, 4, 2, tma=True),
    ("query_gradient", 256): AttentionTiles(64, 32, 8, 2, tma=True),
    ("key_gradient", 64): AttentionTiles(64, 128, 8, 2),
    ("key_gradient", 96): AttentionTiles(64, 64, 4, 2),
    ("key_gradient", 128): AttentionTiles(32, 128, 8, 3),
    ("key_gradient", 256): AttentionTiles(32, 64, 8, 2),
}
FP32_TILES = AttentionTiles(32, 32, 8, 1)  # accurate rather than fast: three TF32 products for one


def _tiles(kernel: str, q_THK: Tensor) -> AttentionTiles:
    if q_THK.dtype == torch.float32:
        return FP32_TILES
    tiles = CONFIGS[kernel, next(width for width in (64, 96, 128, 256) if q_THK.shape[2] <= width)]
    return tiles if launch.has_tma(q_THK.device) else tiles._replace(tma=False)


def chunks(head_dim: int) -> dict[str, int]:
    """Split a head dim into powers of two: 128 = 128 + 0, 80 = 64 + 16, 72 = 64 + 16 of which 8 are masked."""
    main = 1 << (head_dim.bit_length() - 1)
    rest = head_dim - main
    tail = max(16, triton.next_power_of_2(rest)) if rest else 0
    return {"HEAD_DIM": head_dim, "MAIN": main, "TAIL": tail}


def rows_of(x_THK: Tensor) -> Tensor:
    """`x_THK` with adjacent heads and 16-byte aligned rows less than 2^24 elements apart, as the kernels require.

    A view of fused QKV satisfies that already. The bound keeps offsets within a tile in 32 bits.
    """
    row_stride, head_stride, stride = x_THK.stride()
    is_packed = stride == 1 and head_stride == x_THK.shape[2]
    is_aligned = 0 < row_stride < 2**24 and row_stride % 8 == 0 and x_THK.data_ptr() % 16 == 0
    return x_THK if is_packed and is_aligned else x_THK.clone(memory_format=torch.contiguous_format)


def _streamed(x_THK: Tensor, num_rows: int, tma: bool) -> tuple[object, object]:
    """Kernel arguments to load x, `num_rows` at a time: TMA descriptors of its two chunks, or x itself."""
    if not tma or x_THK.is_meta:
        return x_THK, x_THK
    from triton.tools.tensor_descriptor import TensorDescriptor

    num_tokens, num_heads, head_dim = x_THK.shape
    columns = chunks(head_dim)
    shape, strides = [num_tokens, num_heads * head_dim], [x_THK.stride(0), 1]
    main = TensorDescriptor(x_THK, shape, strides, [num_rows, columns["MAIN"]])
    return main, TensorDescriptor(x_THK, shape, strides, [num_rows, columns["TAIL"]]) if columns["TAIL"] else main


def _compile_options(tiles: AttentionTiles) -> dict[str, int]:
    options = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
    return options if tiles.max_registers is None else options | {"maxnreg": tiles.max_registers}


def scales(head_dim: int) -> tuple[float, float]:
    """The softmax scale, and the same for base 2: e^(scale s) = 2^(scale_log2 s)."""
    return head_dim**-0.5, head_dim**-0.5 * math.log2(math.e)


def forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, causal: bool, window: int | None
) -> tuple[Tensor, Tensor]:
    """out and its base-2 log-sum-exp [H, T]."""
    (num_tokens, num_heads, head_dim), num_segments = q.shape, len(cu_seqlens_q) - 1
    tiles = _tiles("forward", q)
    out = q.new_empty(q.shape)
    lse = q.new_empty(num_heads, num_tokens, dtype=torch.float32)
    _forward_kernel[((num_tokens // tiles.block_m + num_segments) * num_heads,)](
        q,
        *_streamed(k, tiles.block_n, tiles.tma),
        *_streamed(v, tiles.block_n, tiles.tma),
        out,
        lse,
        cu_seqlens_q,
        cu_seqlens_k,
        *(x.stride(0) for x in (q, k, v, out, lse)),
        num_segments,
        scales(head_dim)[1],
        NUM_HEADS=num_heads,
        GROUP=num_heads // k.shape[1],
        **chunks(head_dim),
        CAUSAL=causal,
        WINDOW=window,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        OVERLAP=tiles.overlap,
        TMA=tiles.tma,
        **_compile_options(tiles),
    )
    return out, lse


def query_gradient(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    d_out: Tensor,
    lse: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    causal: bool,
    window: int | None,
) -> tuple[Tensor, Tensor]:
    """dQ, and delta [H, T] for the key gradient."""
    (num_tokens, num_heads, head_dim), num_segments = q.shape, len(cu_seqlens_q) - 1
    tiles = _tiles("query_gradient", q)
    d_q, delta = q.new_empty(q.shape), torch.empty_like(lse)
    _query_gradient_kernel[((num_tokens // tiles.block_m + num_segments) * num_heads,)](
        q,
        *_streamed(k, tiles.block_n, tiles.tma),
        *_streamed(v, tiles.block_n, tiles.tma),
        out,
        d_out,
        lse,
        delta,
        d_q,
        cu_seqlens_q,
        cu_seqlens_k,
        *(x.stride(0) for x in (q, k, v, out, d_out, d_q, lse)),
        num_segments,
        *scales(head_dim),
        NUM_HEADS=num_heads,
        GROUP=num_heads // k.shape[1],
        **chunks(head_dim),
        CAUSAL=causal,
        WINDOW=window,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        TMA=tiles.tma,
        **_compile_options(tiles),
    )
    return d_q, delta


def key_gradient(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    d_out: Tensor,
    lse: Tensor,
    delta: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    causal: bool,
    window: int | None,
) -> tuple[Tensor, Tensor]:
    """dK and dV. If tiles times key heads do not fill the GPU twice, the query heads of a group are split as well."""
    (num_keys, num_kv_heads, head_dim), num_segments = k.shape, len(cu_seqlens_k) - 1
    tiles = _tiles("key_gradient", q)
    group = q.shape[1] // num_kv_heads
    num_programs = (num_keys // tiles.block_n + num_segments) * num_kv_heads
    splits = 1
    while group % (2 * splits) == 0 and num_programs * splits < 2 * launch.num_sms(q.device):
        splits *= 2
    partial_dtype = k.dtype if splits == 1 else torch.float32
    d_k, d_v = (k.new_empty(splits, *k.shape, dtype=partial_dtype) for _ in range(2))
    _key_gradient_kernel[(num_programs * splits,)](
        q,
        k,
        v,
        d_out,
        lse,
        delta,
        d_k,
        d_v,
        cu_seqlens_q,
        cu_seqlens_k,
        *(x.stride(0) for x in (q, k, v, d_out, d_k[0], d_v[0], d_k, lse)),
        num_segments,
        *scales(head_dim),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        SPLITS=splits,
        **chunks(head_dim),
        CAUSAL=causal,
        WINDOW=window,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        **_compile_options(tiles),
    )
    return (d_k[0], d_v[0]) if splits == 1 else (d_k.sum(0).to(k.dtype), d_v.sum(0).to(k.dtype))


class _TiledAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, *mask: Any) -> Tensor:
        q, k, v = rows_of(q), rows_of(k), rows_of(v)
        out, lse = forward(q, k, v, cu_q, cu_k, *mask)
        ctx.save_for_backward(q, k, v, cu_q, cu_k, out, lse)
        ctx.mask = mask
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, cu_q, cu_k, out, lse = ctx.saved_tensors
        d_out = rows_of(d_out)
        d_q, delta = query_gradient(q, k, v, out, d_out, lse, cu_q, cu_k, *ctx.mask)
        d_k, d_v = key_gradient(q, k, v, d_out, lse, delta, cu_q, cu_k, *ctx.mask)
        return d_q, d_k, d_v, None, None, None, None


def can_tile(q_THK: Tensor) -> bool:
    """Whether the kernels take this dtype and head dim."""
    head_dim = q_THK.shape[2]
    return q_THK.dtype in (torch.bfloat16, torch.float16, torch.float32) and head_dim % 8 == 0 and 16 <= head_dim <= 256


def tiled_attention(
    q_THK: Tensor,
    k_SGK: Tensor,
    v_SGK: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    causal: bool,
    window: int | None,
) -> Tensor:
    """`attention` for any mask and any lengths."""
    out: Tensor = _TiledAttention.apply(  # type: ignore[no-untyped-call]
        q_THK, k_SGK, v_SGK, cu_seqlens_q, cu_seqlens_k, causal, window
    )
    return out
