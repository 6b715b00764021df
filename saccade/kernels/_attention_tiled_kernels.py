# mypy: allow-untyped-decorators
"""The three kernels of `_attention_tiled.py`: forward, the gradient of queries, the gradients of keys and values.

Names: m are queries and n keys of one segment; the `position` of a query is the index of the last key it attends to.
"""

from saccade.kernels._attention_tile import (
    NO_MAX,
    add_dot,
    attends,
    dot_rows,
    keys_of_program,
    keys_of_tile,
    load_tile,
    queries_of_program,
    span,
    store_tile,
    zero_tile,
)
from saccade.kernels.launch import tl, triton


@triton.jit(do_not_specialize=["lse_stride", "num_segments"])
def forward_kernel(
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
    LISTED: tl.constexpr,
) -> None:
    """One tile of queries of one head. OVERLAP: the scores of the next keys are computed during this softmax."""
    head = tl.program_id(0) % NUM_HEADS
    q_row, num_queries, k_row, num_keys, m0 = queries_of_program(
        cu_seqlens_q, cu_seqlens_k, tl.program_id(0) // NUM_HEADS, num_segments, BLOCK_M, LISTED
    )
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
    begin, full_begin, full_end, end = keys_of_tile(position, num_keys, CAUSAL, WINDOW, BLOCK_M, BLOCK_N)
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
                seen = (keys < num_keys)[None, :] & attends(positions[:, None], keys[None, :], CAUSAL, WINDOW)
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
def query_gradient_kernel(
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
    LISTED: tl.constexpr,
) -> None:
    """dQ of one tile of queries; also writes delta = sum_k out dO for the key gradient, which runs after it."""
    head = tl.program_id(0) % NUM_HEADS
    q_row, num_queries, k_row, num_keys, m0 = queries_of_program(
        cu_seqlens_q, cu_seqlens_k, tl.program_id(0) // NUM_HEADS, num_segments, BLOCK_M, LISTED
    )
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
    begin, full_begin, full_end, end = keys_of_tile(position, num_keys, CAUSAL, WINDOW, BLOCK_M, BLOCK_N)
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
                seen = (keys < num_keys)[None, :] & attends(positions[:, None], keys[None, :], CAUSAL, WINDOW)
                ds = tl.where(seen, ds, 0.0)
                if TMA:
                    k_main = tl.where((keys < num_keys)[:, None], k_main, 0.0)
                    k_last = tl.where((keys < num_keys)[:, None], k_last, 0.0)
            dq, dq_tail = add_dot(dq, dq_tail, ds, k_main, k_last, TAIL)

    dq = dq * scale
    dq_tail = dq_tail * scale
    store_tile(d_q, dq, dq_tail, q_row, m0, num_queries, d_q_stride, q_column, BLOCK_M, HEAD_DIM, MAIN, TAIL)


@triton.jit
def _add_queries(
    dk: tl.tensor,
    dk_tail: tl.tensor,
    dv: tl.tensor,
    dv_tail: tl.tensor,
    k_main: tl.tensor,
    k_last: tl.tensor,
    v_main: tl.tensor,
    v_last: tl.tensor,
    q: tl.tensor,
    do: tl.tensor,
    lse: tl.tensor,
    delta: tl.tensor,
    q_stride: tl.tensor,
    do_stride: tl.tensor,
    lse_stride: tl.tensor,
    q_row: tl.tensor,
    num_queries: tl.tensor,
    shift: tl.tensor,
    n0: tl.tensor,
    first_head: tl.tensor,
    scale_log2: tl.float32,
    GROUP: tl.constexpr,
    SPLITS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MAIN: tl.constexpr,
    TAIL: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Add the gradients of a tile of keys from a row of queries. Query i of the row is that of key i + shift."""
    # Queries [begin, full_begin) and [full_end, end) need a mask, those between attend to every key of the tile.
    keys = n0 + tl.arange(0, BLOCK_N)
    first = num_queries * 0
    first_full = num_queries * 0
    end = num_queries
    full_end = num_queries
    if CAUSAL:
        first = tl.minimum(tl.maximum(n0 - shift, 0), num_queries)
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
                p = tl.where(attends((queries + shift)[None, :], keys[:, None], CAUSAL, WINDOW), p, 0.0)
            dv, dv_tail = add_dot(dv, dv_tail, p, do_main, do_last, TAIL)
            # dP^T = v dO; dS^T = p^T (dP^T - delta); dK += dS^T q. (dP after dV: before it, head dim 128 spills
            # registers)
            dp = dot_rows(v_main, v_last, do_main, do_last, TAIL)
            dk, dk_tail = add_dot(dk, dk_tail, p * (dp - row_delta[None, :]), q_main, q_last, TAIL)
    return dk, dk_tail, dv, dv_tail


@triton.jit(do_not_specialize=["lse_stride", "num_segments"])
def key_gradient_kernel(
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
    LISTED: tl.constexpr,
) -> None:
    """dK and dV of one tile of keys, summed over GROUP / SPLITS of the query heads that read it; transposed, keys down.

    Query tiles are counted from the segment's end, so that only the first one visited can be partial (it may begin
    before row 0). Keys past the end are zero rows whose gradients are never stored. Tiles are loaded through pointers:
    through the bulk copy engine, fp16 gradients of short segments came out wrong on an H200 (Triton 3.6; right under
    the interpreter).
    """
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    split = tl.program_id(0) // NUM_KV_HEADS % SPLITS
    k_row, num_keys, n0, first_row, end_row = keys_of_program(
        cu_seqlens_k, tl.program_id(0) // (NUM_KV_HEADS * SPLITS), num_segments, BLOCK_N, LISTED
    )
    if n0 >= num_keys:
        return
    k_column = kv_head * HEAD_DIM
    k_main, k_last = load_tile(k, k, k_row, n0, num_keys, k_stride, k_column, BLOCK_N, HEAD_DIM, MAIN, TAIL, False)
    v_main, v_last = load_tile(v, v, k_row, n0, num_keys, v_stride, k_column, BLOCK_N, HEAD_DIM, MAIN, TAIL, False)
    dk, dk_tail = zero_tile(BLOCK_N, MAIN, TAIL)
    dv, dv_tail = zero_tile(BLOCK_N, MAIN, TAIL)
    first_head = kv_head * GROUP + split * (GROUP // SPLITS)
    if LISTED:
        for number in range(first_row, end_row):
            row = cu_seqlens_q + number * 4
            q_row, num_queries = tl.load(row), tl.load(row + 1)
            shift = tl.load(row + 3) - num_queries
            dk, dk_tail, dv, dv_tail = _add_queries(
                dk, dk_tail, dv, dv_tail, k_main, k_last, v_main, v_last, q, do, lse, delta, q_stride, do_stride,
                lse_stride, q_row, num_queries, shift, n0, first_head, scale_log2, GROUP, SPLITS, HEAD_DIM, MAIN,
                TAIL, CAUSAL, WINDOW, BLOCK_M, BLOCK_N,
            )  # fmt: skip
    else:
        q_row, num_queries = span(cu_seqlens_q, first_row)
        shift = num_keys - num_queries
        dk, dk_tail, dv, dv_tail = _add_queries(
            dk, dk_tail, dv, dv_tail, k_main, k_last, v_main, v_last, q, do, lse, delta, q_stride, do_stride,
            lse_stride, q_row, num_queries, shift, n0, first_head, scale_log2, GROUP, SPLITS, HEAD_DIM, MAIN, TAIL,
            CAUSAL, WINDOW, BLOCK_M, BLOCK_N,
        )  # fmt: skip

    dk = dk * scale
    dk_tail = dk_tail * scale
    d_k += split * split_stride
    d_v += split * split_stride
    store_tile(d_k, dk, dk_tail, k_row, n0, num_keys, d_k_stride, k_column, BLOCK_N, HEAD_DIM, MAIN, TAIL)
    store_tile(d_v, dv, dv_tail, k_row, n0, num_keys, d_v_stride, k_column, BLOCK_N, HEAD_DIM, MAIN, TAIL)
