# mypy: allow-untyped-decorators
"""Decode over pages with equal work for every program. Legend: see `paged_attention.py`."""

from typing import NamedTuple

import torch
from torch import Tensor

from saccade.kernels import launch
from saccade.kernels._paged_tile import LOG2_E, NewTokens, Pages, add_partials, attend_tile, scaled_queries
from saccade.kernels.launch import tl, triton


@triton.jit(do_not_specialize=["num_requests"])
def _plan_kernel(
    cu_seqlens_q: tl.tensor,
    context_lengths: tl.tensor,
    ranges: tl.tensor,
    cu_tiles: tl.tensor,
    num_requests: tl.tensor,
    NUM_PROGRAMS: tl.constexpr,
    MIN_TILES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
    WINDOW: tl.constexpr,
) -> None:
    """The beginnings of the ranges of BLOCK_P decode programs, see `plan_decode`. Every program adds up all tiles."""
    r = tl.arange(0, BLOCK_R)
    is_request = r < num_requests
    num_new = tl.load(cu_seqlens_q + r + 1, mask=is_request, other=0) - tl.load(
        cu_seqlens_q + r, mask=is_request, other=0
    )
    length = tl.where(num_new > 0, tl.load(context_lengths + r, mask=is_request, other=0), 0)
    num_tiles = tl.cdiv(length, BLOCK_N)
    if WINDOW is not None:
        num_tiles -= tl.maximum(length - 1 - WINDOW, 0) // BLOCK_N
    ends = tl.cumsum(num_tiles, 0)
    total = tl.sum(num_tiles, 0)
    per_program = tl.maximum(tl.cdiv(total, NUM_PROGRAMS), MIN_TILES)
    # A range begins in the request after those that end before it. Past the last tile a range is empty and begins after
    # the last request with tiles: otherwise the previous program would read the lengths of all padding.
    num_used = tl.max(tl.where(num_tiles > 0, r + 1, 0), 0)
    p = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    first = tl.minimum(p * per_program, total)
    is_before = ends[None, :] <= first[:, None]
    request = tl.minimum(tl.sum(is_before.to(tl.int32), 1), num_used)
    tile = first - tl.max(tl.where(is_before, ends[None, :], 0), 1)
    tl.store(ranges + 2 * p, request, mask=p <= NUM_PROGRAMS)
    tl.store(ranges + 2 * p + 1, tile, mask=p <= NUM_PROGRAMS)
    if tl.program_id(0) == 0:
        tl.store(cu_tiles, per_program)
        tl.store(cu_tiles + 1, 0)
        tl.store(cu_tiles + 2 + r, ends, mask=is_request)


@triton.jit
def _prefetch_tile(
    keys: tl.tensor,
    values: tl.tensor,
    table_row: tl.tensor,
    n: tl.tensor,
    length: tl.tensor,
    page_stride: tl.tensor,
    token_stride: tl.tensor,
    PAGE: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """Prefetch keys and values n of a request of this length into L2."""
    if length > 0:
        n = tl.minimum(n, length - 1)
        page = tl.load(table_row + n // PAGE).to(tl.int64)
        LINE: tl.constexpr = 128 // (keys.dtype.element_ty.primitive_bitwidth // 8)  # channels of a cache line
        line = tl.arange(0, (BLOCK_K + LINE - 1) // LINE) * LINE
        at = (page * page_stride + n % PAGE * token_stride)[:, None] + line[None, :]
        _prefetch(keys + at)
        _prefetch(values + at)


@triton.jit
def _prefetch(address: tl.tensor) -> None:
    """Prefetch the cache lines at these addresses into L2."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _rotated(
    x: tl.tensor, at: tl.tensor, d: tl.tensor, mask: tl.tensor, cos: tl.tensor, sin: tl.tensor, F: tl.constexpr
) -> tl.tensor:
    """Heads at `at`, channels d, with RoPE: x cos + y sin, y the other channel of the pair.

    sin is negative in the first half.
    """
    own = tl.load(x + at + d, mask=mask, other=0.0).to(tl.float32)
    other = tl.load(x + at + tl.where(d < F, d + F, d - F), mask=mask, other=0.0).to(tl.float32)
    return (own * cos + other * sin).to(x.dtype.element_ty)


@triton.jit
def _decode_kernel(
    q: tl.tensor,
    new_k: tl.tensor,
    new_v: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    new_slots: tl.tensor,
    key_pages: tl.tensor,
    value_pages: tl.tensor,
    key_scales: tl.tensor,
    value_scales: tl.tensor,
    page_table: tl.tensor,
    table_rows: tl.tensor,
    cu_seqlens_q: tl.tensor,
    context_lengths: tl.tensor,
    ranges: tl.tensor,
    out: tl.tensor,
    partial_out: tl.tensor,
    partial_lse: tl.tensor,
    scale_log2: tl.tensor,
    num_slots: tl.tensor,
    q_stride_t: tl.tensor,
    q_stride_h: tl.tensor,
    k_stride_t: tl.tensor,
    k_stride_h: tl.tensor,
    v_stride_t: tl.tensor,
    v_stride_h: tl.tensor,
    angle_stride: tl.tensor,
    out_stride_t: tl.tensor,
    out_stride_h: tl.tensor,
    page_stride: tl.tensor,
    head_stride: tl.tensor,
    token_stride: tl.tensor,
    scale_page_stride: tl.tensor,
    scale_head_stride: tl.tensor,
    table_stride: tl.tensor,
    H: tl.constexpr,
    RATIO: tl.constexpr,
    K: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    STORES: tl.constexpr,
    WITH_PREFILL: tl.constexpr,
    OVERLAP: tl.constexpr,
    LARGEST: tl.constexpr,
    WINDOW: tl.constexpr,
) -> None:
    """One program: a range of tiles of consecutive requests, for the RATIO heads that share a key head.

    A request whose tiles are all in the range is finished here; the first and the last request may leave partial
    results. With a WINDOW the tiles of a request begin with the tile of the first key in it. STORES: queries and new
    keys are rotated here, and the program with the last tile of a request stores its new key and value. WITH_PREFILL:
    this kernel runs concurrently with the prefill kernel, which lets it start when all keys are written; it ends after
    it.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    # Ranges, lengths and page numbers are read before the wait: kernels at the start of the step wrote them, and no
    # other kernel starts before those have ended.
    program = tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)
    first_request = tl.load(ranges + 2 * program)
    first_tile = tl.load(ranges + 2 * program + 1)
    last_request = tl.load(ranges + 2 * program + 2)
    end_tile = tl.load(ranges + 2 * program + 3)

    m = tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_K)
    if STORES and OVERLAP:  # older keys, while the queries are computed
        has_keys = (first_request < last_request) | (first_tile < end_tile)
        first_length = tl.load(context_lengths + first_request, mask=has_keys, other=0)
        first_row = tl.cast(first_request, tl.int64)
        if HAS_ROWS:
            first_row = tl.load(table_rows + first_request, mask=has_keys, other=0).to(tl.int64)
        first_key = first_tile * BLOCK_N
        if WINDOW is not None:
            first_key += tl.maximum(first_length - 1 - WINDOW, 0) // BLOCK_N * BLOCK_N
        _prefetch_tile(
            key_pages + kv_head * head_stride, value_pages + kv_head * head_stride,
            page_table + first_row * table_stride, first_key + n, first_length, page_stride, token_stride, PAGE,
            BLOCK_K,
        )  # fmt: skip
    if OVERLAP and not WITH_PREFILL:
        tl.extra.cuda.gdc_wait()

    head = kv_head * RATIO + m
    in_block = m < RATIO
    in_head = d < K
    in_rows = in_block[:, None] & in_head[None, :]
    keys = key_pages + kv_head * head_stride + d[None, :]
    values = value_pages + kv_head * head_stride + d[None, :]
    scales_k = key_scales + kv_head * scale_head_stride
    scales_v = value_scales + kv_head * scale_head_stride

    for request in range(first_request, last_request + (end_tile > 0).to(tl.int32)):
        token = tl.load(cu_seqlens_q + request).to(tl.int64)
        has_token = tl.load(cu_seqlens_q + request + 1) > token
        length = tl.where(has_token, tl.load(context_lengths + request), 0)
        num_tiles = tl.cdiv(length, BLOCK_N)
        window_key = 0
        if WINDOW is not None:
            num_before = tl.maximum(length - 1 - WINDOW, 0) // BLOCK_N
            num_tiles -= num_before
            window_key = num_before * BLOCK_N
        begin = tl.where(request == first_request, first_tile, 0)
        end = tl.where(request == last_request, end_tile, num_tiles)
        end_key = tl.minimum(window_key + end * BLOCK_N, length)
        row = token * 0 + request
        if HAS_ROWS:
            row = tl.load(table_rows + request).to(tl.int64)
        if begin < end:
            q_rows = token * q_stride_t + head[:, None] * q_stride_h
            if STORES:
                F: tl.constexpr = K // 2
                f = tl.where(d < F, d, d - F)
                cos_d = tl.load(cos + token * angle_stride + f, mask=in_head, other=0.0)
                sin_d = tl.load(sin + token * angle_stride + f, mask=in_head, other=0.0)
                sin_d = tl.where(d < F, -sin_d, sin_d)
                q_block = _rotated(q, q_rows, d[None, :], in_rows, cos_d[None, :], sin_d[None, :], F)
                if end == num_tiles:
                    k_row = _rotated(new_k, token * k_stride_t + kv_head * k_stride_h, d, in_head, cos_d, sin_d, F)
                    v_row = tl.load(new_v + token * v_stride_t + kv_head * v_stride_h + d, mask=in_head, other=0.0)
                    slot = tl.load(new_slots + token).to(tl.int64)
                    if (slot >= 0) & (slot < num_slots):
                        at = slot // PAGE * page_stride + kv_head * head_stride + slot % PAGE * token_stride + d
                        tl.store(key_pages + at, k_row, mask=in_head)
                        tl.store(value_pages + at, v_row, mask=in_head)
                    tl.debug_barrier()  # the tile with them is read by all threads
            else:
                q_block = tl.load(q + q_rows + d[None, :], mask=in_rows, other=0.0, cache_modifier=".cg")
            q_block = scaled_queries(q_block, scale_log2, LARGEST)
            best = tl.full([BLOCK_M], float("-inf"), tl.float32)
            total = tl.zeros([BLOCK_M], tl.float32)
            acc = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
            last_key = tl.zeros([BLOCK_M], tl.int32) + (length - 1)
            for tile in range(window_key + begin * BLOCK_N, end_key, BLOCK_N):
                best, total, acc = attend_tile(
                    q_block, keys, values, scales_k, scales_v, page_table + row * table_stride, tile + n, last_key,
                    end_key, in_head, best, total, acc, scale_log2, page_stride, token_stride, scale_page_stride,
                    PAGE, K, BLOCK_K, LARGEST, MASKED=True, WINDOW=WINDOW,
                )  # fmt: skip
            divisor = total * LARGEST if LARGEST > 0 else total
            acc = acc / divisor[:, None]
            if (begin == 0) & (end == num_tiles):
                out_rows = out + token * out_stride_t + head[:, None] * out_stride_h + d[None, :]
                tl.store(out_rows, acc.to(out.dtype.element_ty), mask=in_rows)
            else:
                partial = (2 * program + (request != first_request).to(tl.int32)).to(tl.int64) * H + head
                tl.store(partial_lse + partial, best + tl.log2(total), mask=in_block)
                tl.store(partial_out + partial[:, None] * K + d[None, :], acc, mask=in_rows)
    if OVERLAP and WITH_PREFILL and (program + tl.program_id(1) == 0):
        tl.extra.cuda.gdc_wait()


@triton.jit
def _combine_decode_kernel(
    partial_out: tl.tensor,
    partial_lse: tl.tensor,
    cu_seqlens_q: tl.tensor,
    cu_tiles: tl.tensor,
    out: tl.tensor,
    out_stride_t: tl.tensor,
    out_stride_h: tl.tensor,
    H: tl.constexpr,
    K: tl.constexpr,
    OVERLAP: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """Combine the partial results of one request, BLOCK_H heads and BLOCK_D channels; zeros for one without context."""
    request = tl.program_id(0)
    token = tl.load(cu_seqlens_q + request).to(tl.int64)
    next_token = tl.load(cu_seqlens_q + request + 1)
    per_program = tl.load(cu_tiles)
    begin = tl.load(cu_tiles + 1 + request)
    end = tl.load(cu_tiles + 2 + request)
    first = begin // per_program
    last = (end - 1) // per_program
    is_complete = (next_token <= token) | ((end > begin) & (first == last))  # padding, or one program had it whole
    # The values above were written at the start of the step, by kernels that no other one overlaps. One program of a
    # request waits even without work: the next kernel reads the rows of decode and waits for the end of this one.
    if OVERLAP and ((not is_complete) | (tl.program_id(1) + tl.program_id(2) == 0)):
        tl.extra.cuda.gdc_wait()
    if is_complete:
        return
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    d = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    s = tl.arange(0, BLOCK_S)
    in_rows = (h < H)[:, None] & (d < K)[None, :]
    best = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    count = tl.where(end > begin, last + 1 - first, 0)
    for split in range(0, count, BLOCK_S):
        program = first + split + s
        # In its first program another request may come before it.
        is_second = (program == first) & (begin > first * per_program)
        rows = (2 * program + is_second.to(tl.int32)).to(tl.int64)[:, None] * H + h[None, :]
        in_partials = (split + s < count)[:, None] & (h < H)[None, :]
        parts_at = partial_out + rows[:, :, None] * K + d[None, None, :]
        in_parts = in_partials[:, :, None] & (d < K)[None, None, :]
        parts = tl.load(parts_at, mask=in_parts, other=0.0, cache_modifier=".cg")
        lse = tl.load(partial_lse + rows, mask=in_partials, other=float("-inf"), cache_modifier=".cg")
        best, total, acc = add_partials(parts, lse, best, total, acc)
    combined = acc / tl.where(total > 0, total, 1.0)[:, None]
    out_rows = out + token * out_stride_t + h[:, None] * out_stride_h + d[None, :]
    tl.store(out_rows, combined.to(out.dtype.element_ty), mask=in_rows)


class DecodeTiles(NamedTuple):
    """Tile size and pipeline of the decode kernel."""

    block_n: int
    """Keys per step."""
    num_warps: int
    num_stages: int
    """Steps in flight. The page number is loaded before the page, so the keys get (num_stages - 1) // 2 of them."""
    programs_per_sm: int = 4
    """Programs that run concurrently: a further one would run alone at the end."""
    min_keys: int = 32
    """Minimum number of keys of a range."""


# (head dim, bytes per cached channel) -> tiles. In 8 bits the conversion decides. Measured for head dim 128 only.
_DECODE_TILES = {
    (64, 1): DecodeTiles(64, 4, 5),
    (64, 2): DecodeTiles(64, 2, 5),
    (64, 4): DecodeTiles(32, 4, 3),
    (128, 1): DecodeTiles(64, 2, 3),
    (128, 2): DecodeTiles(16, 2, 7),
    (128, 4): DecodeTiles(32, 4, 3),
    (256, 1): DecodeTiles(32, 4, 5),
    (256, 2): DecodeTiles(32, 4, 3),
    (256, 4): DecodeTiles(16, 4, 3),
}
# Tiles for few and for many requests, measured on an H200, head dim 128, bf16, by the bench with --tune: 16
# requests of 700 keys take 12.0 us, 256 of 1024 69.4; equal splits per request instead of equal ranges take 1.7 times
# as long for mixed lengths.
_FEW_REQUESTS, _MANY_REQUESTS = 16, 96
MAX_STORING_REQUESTS = 8
"""Maximum number of requests for which decode stores its own tokens: a step of 4 takes 2.64 ms instead of 2.68."""
_FEW_TILES = {(128, 2): DecodeTiles(32, 4, 5)}
_MANY_TILES = {(128, 2): DecodeTiles(64, 2, 3)}


def decode_tiles(head_dim: int, cache_bytes: int, num_requests: int) -> DecodeTiles:
    """Tiles for a head dim, the bytes of a cached channel and a maximum number of requests."""
    key = max(64, triton.next_power_of_2(head_dim)), cache_bytes
    if num_requests <= _FEW_REQUESTS:
        return _FEW_TILES.get(key, _DECODE_TILES[key])
    return (_MANY_TILES if num_requests > _MANY_REQUESTS else _DECODE_TILES).get(key, _DECODE_TILES[key])


class DecodePlan(NamedTuple):
    """The division of decode's work, the same for all layers of a step."""

    ranges: Tensor
    """[programs + 1, 2] int32: request and tile where the range of each program begins."""
    cu_tiles: Tensor
    """int32: tiles of a range, then the cumulative tiles of the requests, from 0."""
    tiles: DecodeTiles
    num_decode: int
    window: int | None = None
    """Earlier keys that a token attends to; None: all."""


def plan_decode(
    cu_seqlens_q: Tensor,
    context_lengths_R: Tensor,
    key_pages_NGPK: Tensor,
    *,
    num_decode: int,
    tiles: DecodeTiles | None = None,
    window: int | None = None,
) -> DecodePlan:
    """Divide the keys of the first `num_decode` requests into equal ranges, on the device, once for all layers."""
    _, G, _, K = key_pages_NGPK.shape
    tiles = tiles or decode_tiles(K, key_pages_NGPK.element_size(), num_decode)
    num_programs = max(1, launch.num_sms(cu_seqlens_q.device) * tiles.programs_per_sm // G)
    ranges = context_lengths_R.new_empty((num_programs + 1, 2))
    cu_tiles = context_lengths_R.new_empty(num_decode + 2)
    block_p = 16
    _plan_kernel[(triton.cdiv(num_programs + 1, block_p),)](
        cu_seqlens_q, context_lengths_R, ranges, cu_tiles, num_decode, NUM_PROGRAMS=num_programs,
        MIN_TILES=triton.cdiv(tiles.min_keys, tiles.block_n), BLOCK_N=tiles.block_n,
        BLOCK_R=max(16, triton.next_power_of_2(num_decode)), BLOCK_P=block_p, WINDOW=window, num_warps=4,
    )  # fmt: skip
    return DecodePlan(ranges, cu_tiles, tiles, num_decode, window)


def decode(
    q_THK: Tensor,
    pages: Pages,
    cu_seqlens_q: Tensor,
    context_lengths_R: Tensor,
    out_THK: Tensor,
    plan: DecodePlan,
    new: NewTokens | None = None,
    *,
    with_prefill: bool = False,
) -> None:
    """Write the rows of the first requests, as `plan` says. `new`: rotate q and these keys, and store them first.

    `with_prefill`: the previous launch is `prefill` of the other requests, without splits; the two run concurrently.
    """
    (_, H, K), (num_pages, G, page_size, _) = q_THK.shape, pages.keys.shape
    num_programs, ratio = len(plan.ranges) - 1, H // G
    partial_out = q_THK.new_empty((2 * num_programs, H, K), dtype=torch.float32)
    partial_lse = q_THK.new_empty((2 * num_programs, H), dtype=torch.float32)
    overlaps = launch.overlap_options(q_THK.device)
    block_k = triton.next_power_of_2(K)
    k, v, angles, slots = (q_THK, q_THK, (q_THK, q_THK), q_THK) if new is None else new  # not read without `new`
    _decode_kernel[num_programs, G](
        q_THK, k, v, *angles, slots, *pages.pointers, cu_seqlens_q, context_lengths_R, plan.ranges, out_THK,
        partial_out, partial_lse, K**-0.5 * LOG2_E, num_pages * page_size, *q_THK.stride()[:2], *k.stride()[:2],
        *v.stride()[:2], angles[0].stride(0), *out_THK.stride()[:2], *pages.strides, H=H, RATIO=ratio, K=K,
        PAGE=page_size, BLOCK_M=max(16, triton.next_power_of_2(ratio)), BLOCK_N=plan.tiles.block_n, BLOCK_K=block_k,
        HAS_ROWS=pages.rows is not None, STORES=new is not None, WITH_PREFILL=with_prefill, LARGEST=pages.largest,
        WINDOW=plan.window, num_warps=plan.tiles.num_warps, num_stages=plan.tiles.num_stages, **overlaps,
    )  # fmt: skip
    # A program reads all partial results of its rows at once: a loop would wait for memory in every pass. Few requests
    # have many partial results each; of many requests most have none, unless most of them are padding.
    block_h, block_s, block_d = 1, 16 if plan.num_decode > _MANY_REQUESTS else 32, block_k
    if plan.num_decode <= _FEW_REQUESTS:
        block_s, block_d = 128 if plan.num_decode <= 4 else 32, min(block_k, 32)
    _combine_decode_kernel[plan.num_decode, triton.cdiv(H, block_h), triton.cdiv(K, block_d)](
        partial_out, partial_lse, cu_seqlens_q, plan.cu_tiles, out_THK, *out_THK.stride()[:2], H=H, K=K,
        BLOCK_H=block_h, BLOCK_S=block_s, BLOCK_D=block_d, num_warps=4, **overlaps,
    )  # fmt: skip
