# mypy: allow-untyped-decorators
"""Attention over a paged key/value cache, and writing new tokens into the cache.

Legend: T new tokens, R requests, H query heads, G key/value heads (H is a multiple of G), K head dim, F = K / 2,
        N pages in the cache, P tokens per page (a power of two, 1..128), W pages one request may hold, S splits.

A page holds P tokens of every key/value head: `key_pages` and `value_pages` are [N, G, P, K]. Slot s of the cache is token
s % P of page s // P. The keys 0 .. context_lengths[r] - 1 of request r are in pages page_table[r, 0], [r, 1], ..., in order.

`write_pages` applies RoPE to the queries and keys of the new tokens (in place, see rope.py) and stores keys and values at
`slots_T` [T]. A token whose slot is outside the cache is rotated but not stored: padding of a batch.
`paged_attention` is attention of the new tokens of every request over its pages, which already contain them:

    out[t] = sum_s softmax_s(K^-0.5 * q[t] . k[s]) v[s]      over the keys s of t's own request, s <= position of t

`cu_seqlens_q` [R + 1] gives the cumulative starts of the requests' new tokens (int32); the last new token of a request is
aligned with its last key, so decode (1 token), chunked prefill, and both mixed are one call. q and out are
[T, H, K]; `page_table` [R, W] and `context_lengths` [R] are int32. A request without new tokens costs nothing, one without
context gets zeros; the rows of `out` that belong to no request are not written.

Formats of the cache: q's own dtype, or float8_e4m3fn / int8 with one fp32 scale per token and head, [N, G, P], where the
largest channel of a row becomes 448 / 127. Scores, softmax and sums are fp32; the weights of the values are rounded to q's
dtype. Decode reads every key and value once: 2 * K * bytes per token and head, and nothing else of that order.

The grid follows from bounds known on the host (T, R, `max_seqlen_q`, `max_context_length`); lengths are read on the device.
So one captured CUDA graph serves every batch within its bounds, and no call synchronises.

Decode divides its work evenly, whatever the lengths: the tiles of keys of all requests, one request after another, are cut into equal
ranges, one for each program that the GPU runs at once (stream-K). `plan_decode` finds the ranges, once for all layers. A program
whose range ends inside a request leaves a partial result (fp32, with its log2-sum-exp), at most two of them; a second launch, which on
Hopper is queued on the GPU before the first ends, combines those of each request. (Combining in the first launch, by the program
that finishes last, was measured and is slower: 27.5 us against 24.5 for 16 requests of 4096 tokens.)

Prefill of few tokens over a long context is split among programs in the same way, but into the same number of splits for every request.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from saccade.kernels import launch
from saccade.kernels._attention_tiled import locate
from saccade.kernels.attention import attention, attention_reference
from saccade.kernels.launch import tl, triton
from saccade.kernels.rope import CosSin, rope_reference

QUANTIZED_MAX = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
"""The largest value of each compressed cache format."""


def write_pages_reference(
    q_THK: Tensor,
    k_TGK: Tensor,
    v_TGK: Tensor,
    table: CosSin,
    slots_T: Tensor,
    key_pages_NGPK: Tensor,
    value_pages_NGPK: Tensor,
    key_scales_NGP: Tensor | None = None,
    value_scales_NGP: Tensor | None = None,
) -> None:
    """Rotate `q` and `k` in place, then store `k` and `v` at `slots_T`."""
    for x, rotated in zip((q_THK, k_TGK), rope_reference(q_THK, k_TGK, table), strict=True):
        x.copy_(rotated)
    num_pages, _, page_size, _ = key_pages_NGPK.shape
    stored = (slots_T >= 0) & (slots_T < num_pages * page_size)
    page, token = slots_T[stored] // page_size, slots_T[stored] % page_size
    for x_TGK, pages, scales in ((k_TGK, key_pages_NGPK, key_scales_NGP), (v_TGK, value_pages_NGPK, value_scales_NGP)):
        rows = x_TGK[stored]
        if scales is not None:
            rows, scales[page, :, token] = quantize_rows_reference(rows, pages.dtype)
        pages[page, :, token] = rows.to(pages.dtype)


def quantize_rows_reference(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The rows (last dim) of `x` in a cache format, and the fp32 scale of each; an all-zero row has scale zero."""
    largest = QUANTIZED_MAX[dtype]
    scale = x.float().abs().amax(-1) / largest
    scaled = x.float() / torch.where(scale > 0, scale, 1.0).unsqueeze(-1)
    scaled = scaled.clamp(-largest, largest)
    return (scaled.round() if dtype == torch.int8 else scaled).to(dtype), scale


def paged_attention_reference(
    q_THK: Tensor,
    key_pages_NGPK: Tensor,
    value_pages_NGPK: Tensor,
    page_table_RW: Tensor,
    cu_seqlens_q: Tensor,
    context_lengths_R: Tensor,
    *,
    max_seqlen_q: int,
    num_decode: int = 0,
    max_context_length: int | None = None,
    table_rows_R: Tensor | None = None,
    decode_plan: "DecodePlan | None" = None,
    key_scales_NGP: Tensor | None = None,
    value_scales_NGP: Tensor | None = None,
) -> Tensor:
    """Packed attention on the gathered pages, one request at a time. Bounds and plan are unused."""
    del max_seqlen_q, num_decode, max_context_length, decode_plan
    if table_rows_R is not None:
        page_table_RW = page_table_RW[table_rows_R.long()]
    page_size = key_pages_NGPK.shape[2]
    out_THK = torch.zeros_like(q_THK)
    for request, ((start, end), length) in enumerate(
        zip(pairwise(cu_seqlens_q.tolist()), context_lengths_R.tolist(), strict=True)
    ):
        if start == end or length == 0:
            continue
        pages = page_table_RW[request, : -(-length // page_size)].long()
        k_SGK = _gather_pages(key_pages_NGPK, key_scales_NGP, pages)[:length]
        v_SGK = _gather_pages(value_pages_NGPK, value_scales_NGP, pages)[:length]
        out_THK[start:end] = attention_reference(
            q_THK[start:end],
            k_SGK,
            v_SGK,
            torch.tensor([0, end - start]),
            torch.tensor([0, length]),
            max_seqlen_q=end - start,
            max_seqlen_k=length,
            causal=True,
        )
    return out_THK


def _gather_pages(pages_NGPK: Tensor, scales_NGP: Tensor | None, pages: Tensor) -> Tensor:
    """[tokens, G, K] in fp32: dequantized rows of pages, in order."""
    rows = pages_NGPK[pages].float()
    if scales_NGP is not None:
        rows = rows * scales_NGP[pages].unsqueeze(-1)
    return rows.transpose(1, 2).flatten(0, 1)


def _attend_gathered(
    q_THK: Tensor,
    key_pages_NGPK: Tensor,
    value_pages_NGPK: Tensor,
    page_table_RW: Tensor,
    cu_seqlens_q: Tensor,
    context_lengths_R: Tensor,
    *,
    key_scales_NGP: Tensor | None = None,
    value_scales_NGP: Tensor | None = None,
) -> Tensor:
    """CPU path: decode requests in one batch on their gathered pages; prefill requests one by one."""
    page_size, out_THK = key_pages_NGPK.shape[2], torch.zeros_like(q_THK)
    starts, lengths = cu_seqlens_q.tolist(), context_lengths_R.tolist()
    decoding = [r for r, length in enumerate(lengths) if starts[r + 1] - starts[r] == 1 and length > 0]

    def gathered(pages: Tensor, scales: Tensor | None, table: Tensor) -> Tensor:
        """[requests, G, tokens, K]"""
        G = pages.shape[1]
        indices = (table.unsqueeze(1) * G + torch.arange(G).unsqueeze(1)).flatten()  # requests, heads, pages
        rows = pages.flatten(0, 1).index_select(0, indices)
        if scales is not None:
            rows = (rows.float() * scales.flatten(0, 1).index_select(0, indices).unsqueeze(-1)).to(q_THK.dtype)
        return rows.view(len(table), G, -1, rows.shape[-1])

    if decoding:
        own = context_lengths_R[decoding]
        table = page_table_RW[decoding, : -(-max(lengths[r] for r in decoding) // page_size)].long()
        is_own = torch.arange(table.shape[1] * page_size) < own.unsqueeze(1)
        table = table.masked_fill(~is_own[:, ::page_size], 0)
        k, v = (
            gathered(pages, scales, table)
            for pages, scales in ((key_pages_NGPK, key_scales_NGP), (value_pages_NGPK, value_scales_NGP))
        )
        # Slots after a request's last token may hold NaN, and 0 * NaN is NaN.
        others = (~is_own).nonzero(as_tuple=True)
        for x in (k, v):
            x[others[0], :, others[1]] = 0.0
        rows = cu_seqlens_q[:-1][decoding].long()
        # Query heads that share keys become tokens: keys are then read once.
        q = q_THK[rows].view(len(rows), k.shape[1], -1, q_THK.shape[2])
        out_THK[rows] = F.scaled_dot_product_attention(q, k, v, attn_mask=is_own[:, None, None]).flatten(1, 2)
    for r, (start, end) in enumerate(pairwise(starts)):
        if end - start < 2 or lengths[r] == 0:
            continue
        table = page_table_RW[r : r + 1, : -(-lengths[r] // page_size)].long()
        k, v = (
            gathered(pages, scales, table)[0, :, : lengths[r]].transpose(0, 1)
            for pages, scales in ((key_pages_NGPK, key_scales_NGP), (value_pages_NGPK, value_scales_NGP))
        )
        out_THK[start:end] = attention(
            q_THK[start:end], k, v, torch.tensor([0, end - start], dtype=torch.int32),
            torch.tensor([0, lengths[r]], dtype=torch.int32), max_seqlen_q=end - start, max_seqlen_k=lengths[r], causal=True,
        )  # fmt: skip
    return out_THK


@triton.jit(do_not_specialize=["num_slots"])
def _write_kernel(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    slots: tl.tensor,
    key_pages: tl.tensor,
    value_pages: tl.tensor,
    key_scales: tl.tensor,
    value_scales: tl.tensor,
    num_slots: tl.tensor,
    q_stride_t: tl.tensor,
    q_stride_h: tl.tensor,
    k_stride_t: tl.tensor,
    k_stride_h: tl.tensor,
    v_stride_t: tl.tensor,
    v_stride_h: tl.tensor,
    table_stride: tl.tensor,
    page_stride: tl.tensor,
    head_stride: tl.tensor,
    token_stride: tl.tensor,
    scale_page_stride: tl.tensor,
    scale_head_stride: tl.tensor,
    H: tl.constexpr,
    G: tl.constexpr,
    F: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_F: tl.constexpr,
    LARGEST: tl.constexpr,
) -> None:
    """One program per token: all its heads. LARGEST is 0 for a cache in k's own dtype."""
    t = tl.program_id(0).to(tl.int64)
    f = tl.arange(0, BLOCK_F)[None, :]
    h = tl.arange(0, BLOCK_H)[:, None]
    g = tl.arange(0, BLOCK_G)[:, None].to(tl.int64)
    in_q = (h < H) & (f < F)
    in_k = (g < G) & (f < F)
    cos_f = tl.load(cos + t * table_stride + f, mask=f < F, other=0.0)
    sin_f = tl.load(sin + t * table_stride + f, mask=f < F, other=0.0)

    q_rows = q + t * q_stride_t + h * q_stride_h + f
    k_rows = k + t * k_stride_t + g * k_stride_h + f
    v_rows = v + t * v_stride_t + g * v_stride_h + f
    q1 = tl.load(q_rows, mask=in_q, other=0.0).to(tl.float32)
    q2 = tl.load(q_rows + F, mask=in_q, other=0.0).to(tl.float32)
    k1 = tl.load(k_rows, mask=in_k, other=0.0).to(tl.float32)
    k2 = tl.load(k_rows + F, mask=in_k, other=0.0).to(tl.float32)
    v1 = tl.load(v_rows, mask=in_k, other=0.0)
    v2 = tl.load(v_rows + F, mask=in_k, other=0.0)
    # Small tiles are replicated over threads: all must have read before the first writes.
    tl.debug_barrier()

    # out[i] = x[i] cos - x[i + F] sin,   out[i + F] = x[i + F] cos + x[i] sin
    tl.store(q_rows, (q1 * cos_f - q2 * sin_f).to(q.dtype.element_ty), mask=in_q)
    tl.store(q_rows + F, (q2 * cos_f + q1 * sin_f).to(q.dtype.element_ty), mask=in_q)
    k1_turned = (k1 * cos_f - k2 * sin_f).to(k.dtype.element_ty)
    k2_turned = (k2 * cos_f + k1 * sin_f).to(k.dtype.element_ty)
    tl.store(k_rows, k1_turned, mask=in_k)
    tl.store(k_rows + F, k2_turned, mask=in_k)

    slot = tl.load(slots + t).to(tl.int64)
    if (slot >= 0) & (slot < num_slots):
        page = slot // PAGE
        token = slot % PAGE
        row = page * page_stride + g * head_stride + token * token_stride + f
        scale_row = page * scale_page_stride + g * scale_head_stride + token
        _store_row(key_pages + row, key_scales + scale_row, k1_turned, k2_turned, g < G, in_k, F, LARGEST)
        _store_row(value_pages + row, value_scales + scale_row, v1, v2, g < G, in_k, F, LARGEST)


@triton.jit
def _store_row(
    row: tl.tensor,
    scale_row: tl.tensor,
    x1: tl.tensor,
    x2: tl.tensor,
    in_heads: tl.tensor,
    in_row: tl.tensor,
    F: tl.constexpr,
    LARGEST: tl.constexpr,
) -> None:
    """Store both halves of a token's heads in its page, quantized if the cache is."""
    if LARGEST > 0:
        x1 = x1.to(tl.float32)
        x2 = x2.to(tl.float32)
        scale = tl.maximum(tl.max(tl.abs(x1), 1), tl.max(tl.abs(x2), 1))[:, None] / LARGEST
        tl.store(scale_row, scale, mask=in_heads)
        divisor = tl.where(scale > 0, scale, 1.0)
        x1 = _round_for(row.dtype.element_ty, tl.clamp(x1 / divisor, -LARGEST, LARGEST))
        x2 = _round_for(row.dtype.element_ty, tl.clamp(x2 / divisor, -LARGEST, LARGEST))
    tl.store(row, x1.to(row.dtype.element_ty), mask=in_row)
    tl.store(row + F, x2.to(row.dtype.element_ty), mask=in_row)


@triton.jit
def _round_for(dtype: tl.constexpr, x: tl.tensor) -> tl.tensor:
    """Round half to even before an integer format; a float format rounds in the cast."""
    if dtype == tl.int8:
        # Adding 1.5 * 2^23 leaves no bits for a fraction: fp32 rounds, exactly as torch.round does.
        x = (x + 12582912.0) - 12582912.0
    return x


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
) -> None:
    """Where the ranges of BLOCK_P decode programs begin: see `plan_decode`. Every program adds up all tiles itself."""
    r = tl.arange(0, BLOCK_R)
    is_request = r < num_requests
    num_new = tl.load(cu_seqlens_q + r + 1, mask=is_request, other=0) - tl.load(
        cu_seqlens_q + r, mask=is_request, other=0
    )
    length = tl.where(num_new > 0, tl.load(context_lengths + r, mask=is_request, other=0), 0)
    num_tiles = tl.cdiv(length, BLOCK_N)
    ends = tl.cumsum(num_tiles, 0)
    total = tl.sum(num_tiles, 0)
    per_program = tl.maximum(tl.cdiv(total, NUM_PROGRAMS), MIN_TILES)
    # A range begins in the request after those that end before it; past the last tile it is empty.
    p = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    first = tl.minimum(p * per_program, total)
    is_before = ends[None, :] <= first[:, None]
    request = tl.minimum(tl.sum(is_before.to(tl.int32), 1), num_requests)
    tile = first - tl.max(tl.where(is_before, ends[None, :], 0), 1)
    tl.store(ranges + 2 * p, request, mask=p <= NUM_PROGRAMS)
    tl.store(ranges + 2 * p + 1, tile, mask=p <= NUM_PROGRAMS)
    if tl.program_id(0) == 0:
        tl.store(cu_tiles, per_program)
        tl.store(cu_tiles + 1, 0)
        tl.store(cu_tiles + 2 + r, ends, mask=is_request)


@triton.jit
def _decode_kernel(
    q: tl.tensor,
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
    HAS_ROWS: tl.constexpr,
    OVERLAP: tl.constexpr,
    LARGEST: tl.constexpr,
) -> None:
    """One program: a range of tiles of consecutive requests, for the RATIO heads that share a key head.

    A request whose tiles are all in the range is finished here; the first and the last may leave a partial result each.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    program = tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)
    first_request = tl.load(ranges + 2 * program)
    first_tile = tl.load(ranges + 2 * program + 1)
    last_request = tl.load(ranges + 2 * program + 2)
    end_tile = tl.load(ranges + 2 * program + 3)

    m = tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_K)
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
        begin = tl.where(request == first_request, first_tile, 0)
        end = tl.where(request == last_request, end_tile, num_tiles)
        end_key = tl.minimum(end * BLOCK_N, length)
        row = token * 0 + request
        if HAS_ROWS:
            row = tl.load(table_rows + request).to(tl.int64)
        if begin < end:
            q_rows = q + token * q_stride_t + head[:, None] * q_stride_h + d[None, :]
            q_block = tl.load(q_rows, mask=in_rows, other=0.0)
            q_block = _scaled_queries(q_block, scale_log2, LARGEST)
            best = tl.full([BLOCK_M], float("-inf"), tl.float32)
            total = tl.zeros([BLOCK_M], tl.float32)
            acc = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
            last_key = tl.zeros([BLOCK_M], tl.int32) + (length - 1)
            for tile in range(begin * BLOCK_N, end_key, BLOCK_N):
                best, total, acc = _attend_tile(
                    q_block, keys, values, scales_k, scales_v, page_table + row * table_stride, tile + n, last_key, end_key,
                    in_head, best, total, acc, scale_log2, page_stride, token_stride, scale_page_stride,
                    PAGE, K, BLOCK_K, LARGEST, MASKED=True,
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
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    request = tl.program_id(0)
    token = tl.load(cu_seqlens_q + request).to(tl.int64)
    if tl.load(cu_seqlens_q + request + 1) <= token:
        return
    per_program = tl.load(cu_tiles)
    begin = tl.load(cu_tiles + 1 + request)
    end = tl.load(cu_tiles + 2 + request)
    first = begin // per_program
    last = (end - 1) // per_program
    if (end > begin) & (first == last):  # one program had it whole
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
        # In its first program the request may come second, after the end of another one.
        is_second = (program == first) & (begin > first * per_program)
        rows = (2 * program + is_second.to(tl.int32)).to(tl.int64)[:, None] * H + h[None, :]
        in_partials = (split + s < count)[:, None] & (h < H)[None, :]
        parts_at = partial_out + rows[:, :, None] * K + d[None, None, :]
        in_parts = in_partials[:, :, None] & (d < K)[None, None, :]
        parts = tl.load(parts_at, mask=in_parts, other=0.0, cache_modifier=".cg")
        lse = tl.load(partial_lse + rows, mask=in_partials, other=float("-inf"), cache_modifier=".cg")
        best, total, acc = _add_partials(parts, lse, best, total, acc)
    combined = acc / tl.where(total > 0, total, 1.0)[:, None]
    out_rows = out + token * out_stride_t + h[:, None] * out_stride_h + d[None, :]
    tl.store(out_rows, combined.to(out.dtype.element_ty), mask=in_rows)


@triton.jit
def _scaled_queries(q_block: tl.tensor, scale_log2: tl.tensor, LARGEST: tl.constexpr) -> tl.tensor:
    """Queries for a quantized cache, which is converted to fp16: lossless for 8-bit formats, and one instruction for fp8.

    Scores are in base 2; q is scaled down first and cannot overflow. (fp32 queries stay fp32.)
    """
    if LARGEST > 0:
        dtype: tl.constexpr = tl.float32 if q_block.dtype == tl.float32 else tl.float16
        q_block = (q_block.to(tl.float32) * scale_log2).to(dtype)
    return q_block


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
    HAS_ROWS: tl.constexpr,
    SPLIT: tl.constexpr,
    OVERLAP: tl.constexpr,
    LARGEST: tl.constexpr,
) -> None:
    """One program: some query tokens of one request, the RATIO heads that share a key head, one split of the keys.

    Row m of a block is query token m // RATIO, head m % RATIO. SPLIT: results go to `partial_*`, to be combined by
    `_combine_kernel`, which OVERLAP lets start early. LARGEST: see QUANTIZED_MAX, 0 for a cache in q's own dtype.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    BLOCK_Q: tl.constexpr = BLOCK_M // RATIO
    request, block = locate(cu_seqlens_q, tl.program_id(0), num_requests, tl.load(cu_seqlens_q), BLOCK_Q)
    first_query = block * BLOCK_Q
    kv_head = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    start = tl.load(cu_seqlens_q + request)
    num_queries = tl.load(cu_seqlens_q + request + 1) - start
    length = tl.load(context_lengths + request)
    if first_query >= num_queries:
        return

    m = tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_K)
    query = first_query + m // RATIO
    token = (start + query).to(tl.int64)
    head = kv_head * RATIO + m % RATIO
    in_block = (m < BLOCK_Q * RATIO) & (query < num_queries)
    in_head = d < K

    # Keys 0 .. last_key[m] are visible to row m; the block needs those of its last query. Their tiles are shared out evenly
    # among as many splits as find min_split keys each.
    last_key = length - num_queries + query
    visible = tl.maximum(tl.minimum(length, length - num_queries + first_query + BLOCK_Q), 0)
    num_tiles = tl.cdiv(visible, BLOCK_N)
    num_used = tl.maximum(tl.minimum(visible // min_split, num_splits), 1)
    first_key = split * num_tiles // num_used * BLOCK_N
    end_key = tl.minimum((split + 1) * num_tiles // num_used * BLOCK_N, visible)
    partial_row = (token * H + head) * num_splits + split
    if SPLIT:  # noqa: SIM102 (decided when compiled)
        if split >= num_used:
            tl.store(partial_lse + partial_row, float("-inf"), mask=in_block)
            return

    q_rows = q + token[:, None] * q_stride_t + head[:, None] * q_stride_h + d[None, :]
    q_block = tl.load(q_rows, mask=in_block[:, None] & in_head[None, :], other=0.0)
    q_block = _scaled_queries(q_block, scale_log2, LARGEST)
    keys = key_pages + kv_head * head_stride + d[None, :]
    values = value_pages + kv_head * head_stride + d[None, :]
    row = request.to(tl.int64)
    if HAS_ROWS:
        row = tl.load(table_rows + request).to(tl.int64)
    table_row = page_table + row * table_stride
    scales_k = key_scales + kv_head * scale_head_stride
    scales_v = value_scales + kv_head * scale_head_stride

    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
    # Keys visible to every row come first, without a mask; then those past some row's last key or past the request's end.
    all_see = tl.minimum(end_key, length - num_queries + first_query + 1)
    first_masked = first_key + tl.maximum(all_see - first_key, 0) // BLOCK_N * BLOCK_N
    for tile in range(first_key, first_masked, BLOCK_N):
        best, total, acc = _attend_tile(
            q_block, keys, values, scales_k, scales_v, table_row, tile + n, last_key, end_key, in_head,
            best, total, acc, scale_log2, page_stride, token_stride, scale_page_stride,
            PAGE, K, BLOCK_K, LARGEST, MASKED=False,
        )  # fmt: skip
    for tile in range(first_masked, end_key, BLOCK_N):
        best, total, acc = _attend_tile(
            q_block, keys, values, scales_k, scales_v, table_row, tile + n, last_key, end_key, in_head,
            best, total, acc, scale_log2, page_stride, token_stride, scale_page_stride,
            PAGE, K, BLOCK_K, LARGEST, MASKED=True,
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


@triton.jit
def _attend_tile(
    q_block: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    scales_k: tl.tensor,
    scales_v: tl.tensor,
    table_row: tl.tensor,
    n: tl.tensor,
    last_key: tl.tensor,
    end_key: tl.tensor,
    in_head: tl.tensor,
    best: tl.tensor,
    total: tl.tensor,
    acc: tl.tensor,
    scale_log2: tl.tensor,
    page_stride: tl.tensor,
    token_stride: tl.tensor,
    scale_page_stride: tl.tensor,
    PAGE: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LARGEST: tl.constexpr,
    MASKED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """One tile of keys into the running maximum, sum and weighted values (online softmax, base 2)."""
    in_context = n < end_key
    if MASKED:
        page = tl.load(table_row + n // PAGE, mask=in_context, other=0).to(tl.int64)
    else:
        page = tl.load(table_row + n // PAGE).to(tl.int64)
    rows = (page * page_stride + (n % PAGE) * token_stride)[:, None]
    # Slots past the end of the context may hold NaN: they are not read.
    if MASKED:
        k = tl.load(keys + rows, mask=in_context[:, None] & in_head[None, :], other=0.0)
        v = tl.load(values + rows, mask=in_context[:, None] & in_head[None, :], other=0.0)
    elif BLOCK_K == K:
        k = tl.load(keys + rows)
        v = tl.load(values + rows)
    else:
        k = tl.load(keys + rows, mask=in_head[None, :], other=0.0)
        v = tl.load(values + rows, mask=in_head[None, :], other=0.0)

    scores = tl.dot(q_block, tl.trans(k.to(q_block.dtype)), input_precision="ieee")
    if LARGEST > 0:
        scale_rows = page * scale_page_stride + n % PAGE
        scores *= tl.load(scales_k + scale_rows, mask=in_context, other=0.0)[None, :]
    else:
        scores *= scale_log2
    if MASKED:
        scores = tl.where((n[None, :] <= last_key[:, None]) & in_context[None, :], scores, float("-inf"))

    # p = 2^(scores - best'),  total' = total 2^(best - best') + sum p,  acc' = acc 2^(best - best') + p v
    new_best = tl.maximum(best, tl.max(scores, 1))
    shift = new_best
    if MASKED:
        shift = tl.where(new_best == float("-inf"), 0.0, new_best)  # a row without keys so far: -inf - -inf is NaN
    p = tl.exp2(scores - shift[:, None])
    correction = tl.exp2(best - shift)
    total = total * correction + tl.sum(p, 1)
    acc *= correction[:, None]
    if LARGEST > 0:
        # Times LARGEST (taken back at the end): the row's largest channel, where the bare scale could underflow in fp16.
        p *= tl.load(scales_v + scale_rows, mask=in_context, other=0.0)[None, :] * LARGEST
    acc = tl.dot(p.to(q_block.dtype), v.to(q_block.dtype), acc, input_precision="ieee")
    return new_best, total, acc


@triton.jit
def _add_partials(
    parts: tl.tensor, lse: tl.tensor, best: tl.tensor, total: tl.tensor, acc: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Add [splits, rows, d] partial results, each weighted by its share of the softmax's sum.

    An unused split has lse -inf; its result was never written, may be NaN, and gets weight zero. It is read anyway: skipping it would
    mean waiting for lse first.
    """
    # weight = 2^(lse - best'),  total' = total 2^(best - best') + sum weight,  acc' = acc 2^(best - best') + weight parts
    new_best = tl.maximum(best, tl.max(lse, 0))
    shift = tl.where(new_best == float("-inf"), 0.0, new_best)
    weight = tl.exp2(lse - shift[None, :])
    correction = tl.exp2(best - shift)
    weighted = tl.where(weight[:, :, None] > 0, parts * weight[:, :, None], 0.0)
    return new_best, total * correction + tl.sum(weight, 0), acc * correction[:, None] + tl.sum(weighted, 0)


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
    _, total, acc = _add_partials(parts, lse, zero + float("-inf"), zero, tl.zeros([1, BLOCK_D], tl.float32))
    combined = acc / tl.where(total > 0, total, 1.0)[:, None]
    out_row = out + (row // H) * out_stride_t + (row % H) * out_stride_h
    tl.store(out_row + d[None, :], combined.to(out.dtype.element_ty), mask=(d < K)[None, :])


class DecodeTiles(NamedTuple):
    """Tile size and pipeline of the decode kernel."""

    block_n: int
    """Keys per step."""
    num_warps: int
    num_stages: int
    """Steps in flight. The page number is loaded before the page, so the keys get (num_stages - 1) // 2 of them."""
    programs_per_sm: int = 4
    """All run concurrently: one more would run alone at the end."""
    min_keys: int = 32
    """Fewest keys of a range."""


# (head dim, bytes per cached channel) -> tiles. In 8 bits the conversion decides. Not measured but for head dim 128.
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
# The same for few and for many requests. H200, head dim 128, bf16, from a graph (bench/kernels/tune_serving.py), us with n32 w4 st5,
# n16 w2 st7 and n64 w2 st3: 1 x 600 6.2, 7.0, 7.1; 16 x 700 12.0, 13.7, 12.7; 64 x 700 29.2, 20.9, 29.1; 256 x 1024 90.5, 76.1, 69.4;
# 140 x 100..2000 62.6, 51.9, 51.8 (with equal splits per request instead of equal ranges: 91.0).
_FEW_REQUESTS, _MANY_REQUESTS = 16, 96
_FEW_TILES = {(128, 2): DecodeTiles(32, 4, 5)}
_MANY_TILES = {(128, 2): DecodeTiles(64, 2, 3)}


def decode_tiles(head_dim: int, cache_bytes: int, num_requests: int) -> DecodeTiles:
    """Tiles for a head dim, the bytes of a cached channel and up to so many requests."""
    key = max(64, triton.next_power_of_2(head_dim)), cache_bytes
    if num_requests <= _FEW_REQUESTS:
        return _FEW_TILES.get(key, _DECODE_TILES[key])
    return (_MANY_TILES if num_requests > _MANY_REQUESTS else _DECODE_TILES).get(key, _DECODE_TILES[key])


class DecodePlan(NamedTuple):
    """How decode divides its work: the same for all layers of a step."""

    ranges: Tensor
    """[programs + 1, 2] int32: request and tile where the range of each program begins."""
    cu_tiles: Tensor
    """int32: tiles of a range, then the cumulative tiles of the requests, from 0."""
    tiles: DecodeTiles
    num_decode: int


def plan_decode(
    cu_seqlens_q: Tensor,
    context_lengths_R: Tensor,
    key_pages_NGPK: Tensor,
    *,
    num_decode: int,
    tiles: DecodeTiles | None = None,
) -> DecodePlan:
    """Divide the keys of the first `num_decode` requests into equal ranges. Reads lengths on the device, once for all layers."""
    _, G, _, K = key_pages_NGPK.shape
    tiles = tiles or decode_tiles(K, key_pages_NGPK.element_size(), num_decode)
    num_programs = max(1, launch.num_sms(cu_seqlens_q.device) * tiles.programs_per_sm // G)
    ranges = context_lengths_R.new_empty((num_programs + 1, 2))
    cu_tiles = context_lengths_R.new_empty(num_decode + 2)
    block_p = 16
    _plan_kernel[(triton.cdiv(num_programs + 1, block_p),)](
        cu_seqlens_q, context_lengths_R, ranges, cu_tiles, num_decode, NUM_PROGRAMS=num_programs,
        MIN_TILES=triton.cdiv(tiles.min_keys, tiles.block_n), BLOCK_N=tiles.block_n,
        BLOCK_R=max(16, triton.next_power_of_2(num_decode)), BLOCK_P=block_p, num_warps=4,
    )  # fmt: skip
    return DecodePlan(ranges, cu_tiles, tiles, num_decode)


def _decode(
    q_THK: Tensor,
    key_pages_NGPK: Tensor,
    value_pages_NGPK: Tensor,
    page_table: Tensor,
    cu_seqlens_q: Tensor,
    context_lengths_R: Tensor,
    out_THK: Tensor,
    plan: DecodePlan,
    *,
    table_rows_R: Tensor | None = None,
    key_scales_NGP: Tensor | None = None,
    value_scales_NGP: Tensor | None = None,
) -> None:
    """Launch the kernels of the first requests, as `plan` says."""
    (_, H, K), (_, G, page_size, _) = q_THK.shape, key_pages_NGPK.shape
    num_programs, ratio = len(plan.ranges) - 1, H // G
    partial_out = q_THK.new_empty((2 * num_programs, H, K), dtype=torch.float32)
    partial_lse = q_THK.new_empty((2 * num_programs, H), dtype=torch.float32)
    key_scales = key_scales_NGP if key_scales_NGP is not None else key_pages_NGPK
    value_scales = value_scales_NGP if value_scales_NGP is not None else value_pages_NGPK
    overlaps = launch.can_overlap(q_THK.device)
    block_k = triton.next_power_of_2(K)
    _decode_kernel[num_programs, G](
        q_THK, key_pages_NGPK, value_pages_NGPK, key_scales, value_scales, page_table,
        page_table if table_rows_R is None else table_rows_R, cu_seqlens_q, context_lengths_R, plan.ranges, out_THK,
        partial_out, partial_lse, K**-0.5 * _LOG2_E, *q_THK.stride()[:2], *out_THK.stride()[:2],
        *key_pages_NGPK.stride()[:3], *key_scales.stride()[:2], page_table.stride(0),
        H=H, RATIO=ratio, K=K, PAGE=page_size, BLOCK_M=max(16, triton.next_power_of_2(ratio)), BLOCK_N=plan.tiles.block_n,
        BLOCK_K=block_k, HAS_ROWS=table_rows_R is not None, OVERLAP=overlaps,
        LARGEST=QUANTIZED_MAX.get(key_pages_NGPK.dtype, 0.0), num_warps=plan.tiles.num_warps, num_stages=plan.tiles.num_stages,
    )  # fmt: skip
    # Few requests have many partial results each, which many programs combine at once; of many requests most have none.
    block_h, block_s, block_d = min(8, triton.next_power_of_2(H)), 2, block_k
    if plan.num_decode <= _FEW_REQUESTS:
        block_h, block_s, block_d = 1, 128 if plan.num_decode <= 4 else 32, min(block_k, 32)
    early = {"launch_pdl": True} if overlaps else {}
    _combine_decode_kernel[plan.num_decode, triton.cdiv(H, block_h), triton.cdiv(K, block_d)](
        partial_out, partial_lse, cu_seqlens_q, plan.cu_tiles, out_THK, *out_THK.stride()[:2], H=H, K=K, OVERLAP=overlaps,
        BLOCK_H=block_h, BLOCK_S=block_s, BLOCK_D=block_d, num_warps=4, **early,
    )  # fmt: skip


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
    """Most programs one request's keys are shared among."""
    min_split: int
    """Fewest keys worth a split of their own; short requests use fewer splits than the grid offers."""


# Keys per step, warps and stages for many queries per request, at most 128 rows: bound by the matrix unit, so larger tiles and fewer
# stages than decode.
_PREFILL_TILES = {
    (64, 1): (64, 4, 3),
    (64, 2): (64, 4, 3),
    (64, 4): (32, 4, 2),
    (128, 1): (64, 8, 3),
    (128, 2): (64, 8, 3),
    (128, 4): (32, 8, 2),
    (256, 1): (32, 8, 3),
    (256, 2): (32, 8, 3),
    (256, 4): (16, 8, 2),
}
_MAX_SPLITS = 64
_MIN_SPLIT = 2048
"""Keys: partial results are as many as the queries. H200, 256 new tokens: 11 us a layer in one piece, 24 in three."""
_LOG2_E = 1.4426950408889634


def _schedule(
    *, num_tokens: int, num_requests: int, H: int, G: int, head_dim: int, cache_bytes: int, max_seqlen_q: int,
    max_context_length: int, num_sms: int,
) -> Schedule:  # fmt: skip
    """Tiles from the table above; as many splits as fill the GPU."""
    ratio = H // G
    block_m = max(16, triton.next_power_of_2(ratio), min(128, triton.next_power_of_2(max_seqlen_q * ratio)))
    block_n, num_warps, num_stages = _PREFILL_TILES[max(64, triton.next_power_of_2(head_dim)), cache_bytes]
    num_programs = G * _num_query_blocks(num_tokens, num_requests, block_m // ratio)
    return Schedule(
        block_m=block_m,
        block_n=block_n,
        num_warps=4 if block_m < 64 else num_warps,
        num_stages=num_stages,
        num_splits=max(1, min(num_sms // max(1, num_programs), _MAX_SPLITS, max_context_length // _MIN_SPLIT)),
        min_split=_MIN_SPLIT,
    )


def _num_query_blocks(num_tokens: int, num_requests: int, block_q: int) -> int:
    """Maximum number of query blocks over all requests: each may have one partial block."""
    return num_tokens // block_q + num_requests


def _prefill(
    q_THK: Tensor,
    key_pages_NGPK: Tensor,
    value_pages_NGPK: Tensor,
    page_table: Tensor,
    cu_seqlens_q: Tensor,
    context_lengths_R: Tensor,
    out_THK: Tensor,
    schedule: Schedule,
    *,
    table_rows_R: Tensor | None = None,
    key_scales_NGP: Tensor | None = None,
    value_scales_NGP: Tensor | None = None,
) -> None:
    """Launch the kernels as `schedule` says."""
    num_tokens, H, K = q_THK.shape
    num_requests, G, page_size = len(context_lengths_R), key_pages_NGPK.shape[1], key_pages_NGPK.shape[2]
    splits = schedule.num_splits
    partial_out, partial_lse = out_THK, out_THK  # unused
    if splits > 1:
        partial_out = q_THK.new_empty((num_tokens, H, splits, K), dtype=torch.float32)
        # Rows of tokens that are not prefill are combined too, from no splits at all, and overwritten: see `paged_attention`.
        partial_lse = q_THK.new_full((num_tokens, H, splits), float("-inf"), dtype=torch.float32)
    ratio = H // G
    grid = (_num_query_blocks(num_tokens, num_requests, schedule.block_m // ratio), G, splits)
    key_scales = key_scales_NGP if key_scales_NGP is not None else key_pages_NGPK
    value_scales = value_scales_NGP if value_scales_NGP is not None else value_pages_NGPK
    overlaps = splits > 1 and launch.can_overlap(q_THK.device)
    block_k = triton.next_power_of_2(K)
    _attend_kernel[grid](
        q_THK, key_pages_NGPK, value_pages_NGPK, key_scales, value_scales, page_table,
        page_table if table_rows_R is None else table_rows_R, cu_seqlens_q, context_lengths_R,
        out_THK, partial_out, partial_lse, num_requests, splits, schedule.min_split, K**-0.5 * _LOG2_E,
        *q_THK.stride()[:2], *out_THK.stride()[:2], *key_pages_NGPK.stride()[:3], *key_scales.stride()[:2], page_table.stride(0),
        H=H, RATIO=ratio, K=K, PAGE=page_size, BLOCK_M=schedule.block_m, BLOCK_N=schedule.block_n,
        BLOCK_K=block_k, HAS_ROWS=table_rows_R is not None, SPLIT=splits > 1, OVERLAP=overlaps,
        LARGEST=QUANTIZED_MAX.get(key_pages_NGPK.dtype, 0.0), num_warps=schedule.num_warps, num_stages=schedule.num_stages,
    )  # fmt: skip
    if splits > 1:
        # Few rows with many splits: fewer channels per program, so that more programs share them. All loads at once.
        block_s = triton.next_power_of_2(splits)
        block_d = min(block_k, max(32, 4096 // block_s))
        early = {"launch_pdl": True} if overlaps else {}
        _combine_kernel[num_tokens * H, triton.cdiv(K, block_d)](
            partial_out, partial_lse, out_THK, splits, *out_THK.stride()[:2], H=H, K=K, OVERLAP=overlaps,
            BLOCK_S=block_s, BLOCK_D=block_d, num_warps=4, **early,
        )  # fmt: skip


def _write(
    q_THK: Tensor,
    k_TGK: Tensor,
    v_TGK: Tensor,
    table: CosSin,
    slots_T: Tensor,
    key_pages_NGPK: Tensor,
    value_pages_NGPK: Tensor,
    key_scales_NGP: Tensor | None,
    value_scales_NGP: Tensor | None,
) -> None:
    num_tokens, H, K = q_THK.shape
    num_pages, G, page_size, _ = key_pages_NGPK.shape
    cos, sin = table
    key_scales = key_scales_NGP if key_scales_NGP is not None else key_pages_NGPK
    value_scales = value_scales_NGP if value_scales_NGP is not None else value_pages_NGPK
    if num_tokens == 0:
        return
    _write_kernel[(num_tokens,)](
        q_THK, k_TGK, v_TGK, cos, sin, slots_T, key_pages_NGPK, value_pages_NGPK, key_scales, value_scales,
        num_pages * page_size, *q_THK.stride()[:2], *k_TGK.stride()[:2], *v_TGK.stride()[:2], cos.stride(0),
        *key_pages_NGPK.stride()[:3], *key_scales.stride()[:2],
        H=H, G=G, F=K // 2, PAGE=page_size, BLOCK_H=triton.next_power_of_2(H), BLOCK_G=triton.next_power_of_2(G),
        BLOCK_F=triton.next_power_of_2(K // 2), LARGEST=QUANTIZED_MAX.get(key_pages_NGPK.dtype, 0.0), num_warps=4,
    )  # fmt: skip


def write_pages(
    q_THK: Tensor,
    k_TGK: Tensor,
    v_TGK: Tensor,
    table: CosSin,
    slots_T: Tensor,
    key_pages_NGPK: Tensor,
    value_pages_NGPK: Tensor,
    key_scales_NGP: Tensor | None = None,
    value_scales_NGP: Tensor | None = None,
) -> None:
    """Rotate `q` and `k` in place and store `k` and `v` in the cache at `slots_T`, see the top of this file."""
    _check_pages("write_pages", q_THK, key_pages_NGPK, value_pages_NGPK, key_scales_NGP, value_scales_NGP)
    if k_TGK.shape != v_TGK.shape or k_TGK.shape != (len(q_THK), key_pages_NGPK.shape[1], q_THK.shape[2]):
        raise ValueError(
            f"write_pages: q {tuple(q_THK.shape)}, k {tuple(k_TGK.shape)}, v {tuple(v_TGK.shape)} do not fit"
        )
    if any(x.stride(-1) != 1 for x in (q_THK, k_TGK, v_TGK, *table)) or table[0].stride() != table[1].stride():
        raise ValueError("write_pages: the channels of q, k, v and of the angle table must be contiguous")
    path = launch.choose_path("write_pages", *launch.available_paths(q_THK, "triton"))
    write = _write if path == "triton" else write_pages_reference
    write(q_THK, k_TGK, v_TGK, table, slots_T, key_pages_NGPK, value_pages_NGPK, key_scales_NGP, value_scales_NGP)


def paged_attention(
    q_THK: Tensor,
    key_pages_NGPK: Tensor,
    value_pages_NGPK: Tensor,
    page_table_RW: Tensor,
    cu_seqlens_q: Tensor,
    context_lengths_R: Tensor,
    *,
    max_seqlen_q: int,
    num_decode: int = 0,
    max_context_length: int | None = None,
    table_rows_R: Tensor | None = None,
    decode_plan: DecodePlan | None = None,
    key_scales_NGP: Tensor | None = None,
    value_scales_NGP: Tensor | None = None,
) -> Tensor:
    """Attention of every request's new tokens over its pages, see the top of this file.

    `max_seqlen_q` bounds the new tokens of a request (1 selects decode), `max_context_length` its keys (W * P if not given).
    The first `num_decode` requests have one new token each, or none; they are decoded beside the prefill of the others, in a
    launch of their own: one decode of 4000 tokens beside a prefill of 640 takes 28 us a layer instead of 99 (H200). `decode_plan` is
    theirs, made by `plan_decode` if not given. `table_rows_R`: the row of `page_table` that each request has, if not its own
    index. Bounds and shapes determine the grid: in a captured CUDA graph they are fixed.
    """
    _check_pages("paged_attention", q_THK, key_pages_NGPK, value_pages_NGPK, key_scales_NGP, value_scales_NGP)
    rows = page_table_RW if table_rows_R is None else table_rows_R
    if len(cu_seqlens_q) != len(context_lengths_R) + 1 or len(rows) != len(context_lengths_R):
        raise ValueError(
            f"paged_attention: page table rows {tuple(rows.shape)}, cu_seqlens_q {tuple(cu_seqlens_q.shape)} and "
            f"context lengths {tuple(context_lengths_R.shape)} do not name the same requests"
        )
    path = launch.choose_path("paged_attention", *_paths(q_THK))
    if path == "triton":
        return _attend(
            q_THK, key_pages_NGPK, value_pages_NGPK, page_table_RW, cu_seqlens_q, context_lengths_R, max_seqlen_q=max_seqlen_q,
            num_decode=num_decode, max_context_length=max_context_length, table_rows_R=table_rows_R, decode_plan=decode_plan,
            key_scales_NGP=key_scales_NGP, value_scales_NGP=value_scales_NGP,
        )  # fmt: skip
    own_table_RW = page_table_RW if table_rows_R is None else page_table_RW[table_rows_R.long()]
    scales = {"key_scales_NGP": key_scales_NGP, "value_scales_NGP": value_scales_NGP}
    tensors = (q_THK, key_pages_NGPK, value_pages_NGPK, own_table_RW, cu_seqlens_q, context_lengths_R)
    if path == "library":
        return _attend_gathered(*tensors, **scales)
    return paged_attention_reference(*tensors, max_seqlen_q=max_seqlen_q, **scales)


def _attend(
    q_THK: Tensor,
    key_pages_NGPK: Tensor,
    value_pages_NGPK: Tensor,
    page_table: Tensor,
    cu_seqlens_q: Tensor,
    context_lengths_R: Tensor,
    *,
    max_seqlen_q: int,
    num_decode: int,
    max_context_length: int | None,
    table_rows_R: Tensor | None,
    decode_plan: DecodePlan | None,
    key_scales_NGP: Tensor | None,
    value_scales_NGP: Tensor | None,
) -> Tensor:
    """Prefill first: where it is split, it also writes rows of decode tokens, which decode overwrites."""
    num_requests = len(context_lengths_R)
    num_decode = num_requests if max_seqlen_q <= 1 else num_decode
    out_THK = torch.empty_like(q_THK, memory_format=torch.contiguous_format)
    if len(q_THK) == 0 or num_requests == 0:
        return out_THK
    cache = (q_THK, key_pages_NGPK, value_pages_NGPK, page_table)
    scales = {"key_scales_NGP": key_scales_NGP, "value_scales_NGP": value_scales_NGP}
    if num_decode < num_requests:
        most_keys = page_table.shape[1] * key_pages_NGPK.shape[2]
        schedule = _schedule(
            num_tokens=len(q_THK), num_requests=num_requests - num_decode, H=q_THK.shape[1], G=key_pages_NGPK.shape[1],
            head_dim=q_THK.shape[2], cache_bytes=key_pages_NGPK.element_size(), max_seqlen_q=max_seqlen_q,
            max_context_length=most_keys if max_context_length is None else min(max_context_length, most_keys),
            num_sms=launch.num_sms(q_THK.device),
        )  # fmt: skip
        rows = None if table_rows_R is None else table_rows_R[num_decode:]
        _prefill(
            *cache[:3], page_table if table_rows_R is not None else page_table[num_decode:], cu_seqlens_q[num_decode:],
            context_lengths_R[num_decode:], out_THK, schedule, table_rows_R=rows, **scales,
        )  # fmt: skip
    if num_decode > 0:
        plan = decode_plan or plan_decode(cu_seqlens_q, context_lengths_R, key_pages_NGPK, num_decode=num_decode)
        _decode(*cache, cu_seqlens_q, context_lengths_R, out_THK, plan, table_rows_R=table_rows_R, **scales)
    return out_THK


def _paths(q_THK: Tensor) -> tuple[launch.Path, ...]:
    """Gathering needs lengths on the host: CPU only."""
    return (
        launch.available_paths(q_THK, "triton") if q_THK.is_cuda else launch.available_paths(q_THK, "library", "triton")
    )


def _check_pages(
    operation: str,
    q_THK: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    key_scales: Tensor | None,
    value_scales: Tensor | None,
) -> None:
    """Check shapes, dtypes and strides."""
    num_pages, G, page_size, K = key_pages.shape
    if q_THK.shape[1] % G or q_THK.shape[2] != K or K > 256 or K % 2:
        raise ValueError(f"{operation}: q {tuple(q_THK.shape)} and pages {tuple(key_pages.shape)} do not fit")
    if page_size not in (1, 2, 4, 8, 16, 32, 64, 128):
        raise ValueError(f"{operation}: {page_size} tokens per page; use a power of two up to 128")
    if key_pages.shape != value_pages.shape or key_pages.stride() != value_pages.stride() or key_pages.stride(3) != 1:
        raise ValueError(f"{operation}: key and value pages must agree in shape and strides, channels contiguous")
    is_quantized = key_pages.dtype in QUANTIZED_MAX
    if key_pages.dtype != value_pages.dtype or not (is_quantized or key_pages.dtype == q_THK.dtype):
        raise ValueError(
            f"{operation}: pages hold {key_pages.dtype} and {value_pages.dtype}, q is {q_THK.dtype}; "
            "use q's dtype, float8_e4m3fn or int8 for both"
        )
    for scales in (key_scales, value_scales):
        if (scales is not None) != is_quantized:
            raise ValueError(f"{operation}: pages in {key_pages.dtype} {'need' if is_quantized else 'take no'} scales")
        if scales is not None and (scales.shape != (num_pages, G, page_size) or scales.stride(2) != 1):
            raise ValueError(f"{operation}: scales {tuple(scales.shape)} must be {(num_pages, G, page_size)}")
    if key_scales is not None and value_scales is not None and key_scales.stride() != value_scales.stride():
        raise ValueError(f"{operation}: key and value scales must have the same strides")
