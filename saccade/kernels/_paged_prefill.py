# mypy: allow-untyped-decorators
"""Prefill over pages, of chunks of any number of tokens. Legend: see `paged_attention.py`."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.kernels import launch
from saccade.kernels._paged_tile import LOG2_E, Pages, add_partials, attend_tile, scaled_queries
from saccade.kernels.launch import tl, triton


@triton.jit
def _locate(
    cu_seqlens: tl.tensor, num_requests: tl.tensor, BLOCK: tl.constexpr, BLOCK_R: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Request and block of this program, like `locate` of the packed kernels.

    It reads the lengths of all requests at once: a search would wait for memory at every step.
    """
    r = tl.arange(0, BLOCK_R)
    starts = tl.load(cu_seqlens + r, mask=r < num_requests, other=2**30)
    first_blocks = (starts - tl.min(starts, 0)) // BLOCK + r
    is_reached = first_blocks <= tl.program_id(0)
    return tl.sum(is_reached.to(tl.int32), 0) - 1, tl.program_id(0) - tl.max(tl.where(is_reached, first_blocks, 0), 0)


@triton.jit(do_not_specialize=["num_requests", "num_splits", "min_split"])
def _attend_kernel(
    q: tl.tensor,
    key_pages: tl.tensor,
    value_pages: tl.tensor,
    key_scales: tl.tensor,
    value_scales: tl.tensor,
    page_table: tl.tensor,
    table_rows: tl.tensor,
    cu_seqlens_q: tl.tensor,
    context_lengths: tl.tensor,
    out: tl.tensor,
    partial_out: tl.tensor,
    partial_lse: tl.tensor,
    num_requests: tl.tensor,
    num_splits: tl.tensor,
    min_split: tl.tensor,
    scale_log2: tl.tensor,
    q_stride_t: tl.tensor,
    q_stride_h: tl.tensor,
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
    BLOCK_R: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    SPLIT: tl.constexpr,
    OVERLAP: tl.constexpr,
    LARGEST: tl.constexpr,
    WINDOW: tl.constexpr,
) -> None:
    """One program: some query tokens of one request, the RATIO heads that share a key head, one split of the keys.

    Row m of a block is query token m // RATIO, head m % RATIO. SPLIT: results go to `partial_*`, to be combined by
    `_combine_kernel`. OVERLAP: it starts early, and lets the next kernel do so. LARGEST: see QUANTIZED_MAX, 0 for a
    cache in q's own dtype.
    """
    # Lengths are read before the wait: they were written at the start of the step, and kernels that no other one
    # overlaps have run since.
    BLOCK_Q: tl.constexpr = BLOCK_M // RATIO
    request, block = _locate(cu_seqlens_q, num_requests, BLOCK_Q, BLOCK_R)
    kv_head = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    start = tl.load(cu_seqlens_q + request)
    num_queries = tl.load(cu_seqlens_q + request + 1) - start
    length = tl.load(context_lengths + request)
    row = request.to(tl.int64)
    if HAS_ROWS:
        row = tl.load(table_rows + request).to(tl.int64)
    first_query = (tl.cdiv(num_queries, BLOCK_Q) - 1 - block) * BLOCK_Q  # the last ones, which see the most keys, first
    # One program waits even without work: the next kernel also reads results of earlier kernels, and waits for the end
    # of this one.
    if OVERLAP and ((first_query >= 0) | (tl.program_id(0) + tl.program_id(1) + tl.program_id(2) == 0)):
        tl.extra.cuda.gdc_wait()
    if OVERLAP:  # after the wait: the next kernel may read what earlier kernels wrote
        tl.extra.cuda.gdc_launch_dependents()
    if first_query < 0:
        return

    m = tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_K)
    query = first_query + m // RATIO
    token = (start + query).to(tl.int64)
    head = kv_head * RATIO + m % RATIO
    in_block = (m < BLOCK_Q * RATIO) & (query < num_queries)
    in_head = d < K

    # Keys 0 .. last_key[m] are visible to row m; the block needs those of its last query. Their tiles are divided
    # evenly among as many splits as get min_split keys each.
    last_key = length - num_queries + query
    visible = tl.maximum(tl.minimum(length, length - num_queries + first_query + BLOCK_Q), 0)
    begin_tile = 0
    if WINDOW is not None:  # keys before the window of the first query are not read
        begin_tile = tl.maximum(length - num_queries + first_query - WINDOW, 0) // BLOCK_N
    num_tiles = tl.cdiv(visible, BLOCK_N) - begin_tile
    num_used = tl.maximum(tl.minimum((visible - begin_tile * BLOCK_N) // min_split, num_splits), 1)
    first_key = (begin_tile + split * num_tiles // num_used) * BLOCK_N
    end_key = tl.minimum((begin_tile + (split + 1) * num_tiles // num_used) * BLOCK_N, visible)
    partial_row = (token * H + head) * num_splits + split
    if SPLIT:  # noqa: SIM102 (decided when compiled)
        if split >= num_used:
            tl.store(partial_lse + partial_row, float("-inf"), mask=in_block)
            return

    q_rows = q + token[:, None] * q_stride_t + head[:, None] * q_stride_h + d[None, :]
    q_block = tl.load(q_rows, mask=in_block[:, None] & in_head[None, :], other=0.0)
    q_block = scaled_queries(q_block, scale_log2, LARGEST)
    keys = key_pages + kv_head * head_stride + d[None, :]
    values = value_pages + kv_head * head_stride + d[None, :]
    table_row = page_table + row * table_stride
    scales_k = key_scales + kv_head * scale_head_stride
    scales_v = value_scales + kv_head * scale_head_stride

    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
    # Keys visible to every row come first, without a mask; then those past the last key of a row or of the request.
    all_see = tl.minimum(end_key, length - num_queries + first_query + 1)
    first_masked = first_key + tl.maximum(all_see - first_key, 0) // BLOCK_N * BLOCK_N
    first_full = first_key
    if WINDOW is not None:  # keys before them are outside the window of some rows
        in_all_windows = length - num_queries + first_query + BLOCK_Q - 1 - WINDOW
        first_full += tl.cdiv(tl.maximum(in_all_windows - first_key, 0), BLOCK_N) * BLOCK_N
        first_full = tl.minimum(first_full, first_masked)
        for tile in range(first_key, first_full, BLOCK_N):
            best, total, acc = attend_tile(
                q_block, keys, values, scales_k, scales_v, table_row, tile + n, last_key, end_key, in_head,
                best, total, acc, scale_log2, page_stride, token_stride, scale_page_stride,
                PAGE, K, BLOCK_K, LARGEST, MASKED=True, WINDOW=WINDOW,
            )  # fmt: skip
    for tile in range(first_full, first_masked, BLOCK_N):
        best, total, acc = attend_tile(
            q_block, keys, values, scales_k, scales_v, table_row, tile + n, last_key, end_key, in_head,
            best, total, acc, scale_log2, page_stride, token_stride, scale_page_stride,
            PAGE, K, BLOCK_K, LARGEST, MASKED=False, WINDOW=WINDOW,
        )  # fmt: skip
    for tile in range(first_masked, end_key, BLOCK_N):
        best, total, acc = attend_tile(
            q_block, keys, values, scales_k, scales_v, table_row, tile + n, last_key, end_key, in_head,
            best, total, acc, scale_log2, page_stride, token_stride, scale_page_stride,
            PAGE, K, BLOCK_K, LARGEST, MASKED=True, WINDOW=WINDOW,
        )  # fmt: skip

    divisor = tl.where(total > 0, total, 1.0)
    if LARGEST > 0:
        divisor *= LARGEST
    acc = acc / divisor[:, None]
    to_store = in_block[:, None] & in_head[None, :]
    if SPLIT:
        lse = tl.where(total > 0, best + tl.log2(tl.where(total > 0, total, 1.0)), float("-inf"))
        tl.store(partial_lse + partial_row, lse, mask=in_block)
        tl.store(partial_out + partial_row[:, None] * K + d[None, :], acc, mask=to_store)
    else:
        out_rows = out + token[:, None] * out_stride_t + head[:, None] * out_stride_h + d[None, :]
        tl.store(out_rows, acc.to(out.dtype.element_ty), mask=to_store)


@triton.jit(do_not_specialize=["num_splits"])
def _combine_kernel(
    partial_out: tl.tensor,
    partial_lse: tl.tensor,
    out: tl.tensor,
    num_splits: tl.tensor,
    out_stride_t: tl.tensor,
    out_stride_h: tl.tensor,
    H: tl.constexpr,
    K: tl.constexpr,
    OVERLAP: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """One program per token, head and BLOCK_D channels. OVERLAP: it starts early and waits for the splits."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    s = tl.arange(0, BLOCK_S)
    partials = (row * num_splits + s)[:, None]
    in_parts = (s < num_splits)[:, None, None] & (d < K)[None, None, :]
    parts = tl.load(
        partial_out + partials[:, :, None] * K + d[None, None, :], mask=in_parts, other=0.0, cache_modifier=".cg"
    )
    lse = tl.load(partial_lse + partials, mask=(s < num_splits)[:, None], other=float("-inf"), cache_modifier=".cg")
    zero = tl.zeros([1], tl.float32)
    _, total, acc = add_partials(parts, lse, zero + float("-inf"), zero, tl.zeros([1, BLOCK_D], tl.float32))
    combined = acc / tl.where(total > 0, total, 1.0)[:, None]
    out_row = out + (row // H) * out_stride_t + (row % H) * out_stride_h
    tl.store(out_row + d[None, :], combined.to(out.dtype.element_ty), mask=(d < K)[None, :])


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Grid and tiles of a prefill launch. They depend on shapes and bounds, never on lengths."""

    block_m: int
    """Rows (query token, head) of a program; tensor cores need at least 16."""
    block_n: int
    """Keys per step."""
    num_warps: int
    """Warps of a program."""
    num_stages: int
    """Steps in flight."""
    num_splits: int
    """Maximum number of programs among which the keys of one request are divided."""
    min_split: int
    """Minimum number of keys of a split; short requests use fewer splits than the grid has."""


class PrefillTiles(NamedTuple):
    """Tiles for many queries per request."""

    block_m: int
    """The same tiles with at most this many rows."""
    block_n: int
    num_warps: int
    num_stages: int


# (head dim, bytes per cached channel) -> tiles. Bound by the matrix unit, so larger tiles and fewer stages than decode.
# Measured for head dim 128 in bf16 on an H200: 4 x 500 new tokens take 26.7 us a layer with 64 rows, 30.0 with 128.
_PREFILL_TILES = {
    (64, 1): PrefillTiles(128, 64, 4, 3),
    (64, 2): PrefillTiles(128, 64, 4, 3),
    (64, 4): PrefillTiles(128, 32, 4, 2),
    (128, 1): PrefillTiles(128, 64, 8, 3),
    (128, 2): PrefillTiles(64, 64, 4, 4),
    (128, 4): PrefillTiles(128, 32, 8, 2),
    (256, 1): PrefillTiles(128, 32, 8, 3),
    (256, 2): PrefillTiles(128, 32, 8, 3),
    (256, 4): PrefillTiles(128, 16, 8, 2),
}
_MIN_BLOCK_R = 32
"""Numbers of requests whose lengths are read at once: few, so that few kernels are compiled."""
_MAX_SPLITS = 64
_MIN_SPLIT = 2048
"""Keys of a split: its partial results are as large as the queries. 256 new tokens take 11 us unsplit, 24 in three."""


def schedule_prefill(
    *, num_tokens: int, num_requests: int, H: int, G: int, head_dim: int, cache_bytes: int, max_seqlen_q: int,
    max_context_length: int, num_sms: int,
) -> Schedule:  # fmt: skip
    """Tiles from the table above; as many splits as fill the GPU."""
    ratio = H // G
    tiles = _PREFILL_TILES[max(64, triton.next_power_of_2(head_dim)), cache_bytes]
    block_m = max(16, triton.next_power_of_2(ratio), min(tiles.block_m, triton.next_power_of_2(max_seqlen_q * ratio)))
    num_programs = G * _num_query_blocks(num_tokens, num_requests, block_m // ratio)
    return Schedule(
        block_m=block_m,
        block_n=tiles.block_n,
        num_warps=4 if block_m < 64 else tiles.num_warps,
        num_stages=tiles.num_stages,
        num_splits=max(1, min(num_sms // max(1, num_programs), _MAX_SPLITS, max_context_length // _MIN_SPLIT)),
        min_split=_MIN_SPLIT,
    )


def _num_query_blocks(num_tokens: int, num_requests: int, block_q: int) -> int:
    """Maximum number of query blocks over all requests: each may have one partial block."""
    return num_tokens // block_q + num_requests


def prefill(
    q_THK: Tensor, pages: Pages, cu_seqlens_q: Tensor, context_lengths_R: Tensor, out_THK: Tensor, schedule: Schedule,
    window: int | None = None,
) -> None:  # fmt: skip
    """Write the rows of all new tokens, as `schedule` says. If keys are split, rows of no request become zeros."""
    num_tokens, H, K = q_THK.shape
    num_requests, (_, G, page_size, _) = len(context_lengths_R), pages.keys.shape
    splits = schedule.num_splits
    partial_out, partial_lse = out_THK, out_THK  # unused
    if splits > 1:
        partial_out = q_THK.new_empty((num_tokens, H, splits, K), dtype=torch.float32)
        partial_lse = q_THK.new_full((num_tokens, H, splits), float("-inf"), dtype=torch.float32)
    ratio = H // G
    grid = (_num_query_blocks(num_tokens, num_requests, schedule.block_m // ratio), G, splits)
    overlaps = launch.overlap_options(q_THK.device)
    block_k = triton.next_power_of_2(K)
    _attend_kernel[grid](
        q_THK, *pages.pointers, cu_seqlens_q, context_lengths_R, out_THK, partial_out, partial_lse, num_requests,
        splits, schedule.min_split, K**-0.5 * LOG2_E, *q_THK.stride()[:2], *out_THK.stride()[:2], *pages.strides, H=H,
        RATIO=ratio, K=K, PAGE=page_size, BLOCK_M=schedule.block_m, BLOCK_N=schedule.block_n, BLOCK_K=block_k,
        BLOCK_R=max(_MIN_BLOCK_R, triton.next_power_of_2(num_requests)), HAS_ROWS=pages.rows is not None,
        SPLIT=splits > 1, LARGEST=pages.largest, WINDOW=window, num_warps=schedule.num_warps,
        num_stages=schedule.num_stages, **overlaps,
    )  # fmt: skip
    if splits > 1:
        # Few rows with many splits: a program has fewer channels, so that there are more programs. All loads at once.
        block_s = triton.next_power_of_2(splits)
        block_d = min(block_k, max(32, 4096 // block_s))
        _combine_kernel[num_tokens * H, triton.cdiv(K, block_d)](
            partial_out, partial_lse, out_THK, splits, *out_THK.stride()[:2], H=H, K=K,
            BLOCK_S=block_s, BLOCK_D=block_d, num_warps=4, **overlaps,
        )  # fmt: skip
