# mypy: allow-untyped-decorators
"""Attention over a paged key/value cache, and writing new tokens into the cache.

Legend: T new tokens, R requests, H query heads, G key/value heads (H is a multiple of G), K head dim, F = K / 2,
        N pages in the cache, P tokens per page (a power of two, 1..128), W pages one request may hold, S splits.

A page holds P tokens of every key/value head: `key_pages` and `value_pages` are [N, G, P, K]. Slot s of the cache is
token s % P of page s // P. The keys 0 .. context_lengths[r] - 1 of request r are in pages page_table[r, 0], [r, 1],
..., in order.

`write_pages` applies RoPE to the queries and keys of the new tokens (in place, see rope.py) and stores keys and values
at `slots_T` [T]. A token whose slot is outside the cache is rotated but not stored: padding of a batch.
`paged_attention` is attention of the new tokens of every request over its pages, which contain them already or get them
first (`new`):

    out[t] = sum_s softmax_s(K^-0.5 * q[t] . k[s]) v[s]      over the keys s of t's own request, s <= position of t

With `window`, a token attends to that many earlier keys and its own, as in `attention.py`; tiles of keys before them
are not read.

`cu_seqlens_q` [R + 1] gives the cumulative starts of the requests' new tokens (int32); the last new token of a request
is aligned with its last key, so decode (1 token), chunked prefill, and both mixed are one call. q and out are [T, H,
K]; `page_table` [R, W] and `context_lengths` [R] are int32. A request without new tokens costs nothing, one without
context gets zeros; the rows of `out` that belong to no request are not written.

Formats of the cache: q's own dtype, or float8_e4m3fn / int8 with one fp32 scale per token and head, [N, G, P], where
the largest channel of a row becomes 448 / 127. Scores, softmax and sums are fp32; the weights of the values are rounded
to q's dtype. Decode reads every key and value once: 2 * K * bytes per token and head, and nothing else of that order.

The grid follows from bounds known on the host (T, R, `max_seqlen_q`, `max_context_length`); lengths are read on the
device. One captured CUDA graph therefore serves every batch within its bounds, and no call synchronises.

Decode divides its work evenly for any lengths: the tiles of keys of all requests, one request after another, are cut
into equal ranges, one for each program that the GPU runs at once (stream-K). `plan_decode` finds the ranges, once for
all layers. A program whose range ends inside a request leaves at most two partial results (fp32, with log2-sum-exp); a
second launch, which on Hopper is queued on the GPU before the first ends, combines those of each request.

Prefill of few tokens over a long context is split among programs in the same way, into the same number of splits for
every request.
"""

from itertools import pairwise

import torch
from torch import Tensor

from saccade.kernels import launch
from saccade.kernels._paged_decode import MAX_STORING_REQUESTS, DecodePlan, decode, plan_decode
from saccade.kernels._paged_gather import GatherPlan, attend_gathered, plan_gather, rotate, write_rows
from saccade.kernels._paged_prefill import prefill, schedule_prefill
from saccade.kernels._paged_tile import QUANTIZED_MAX, NewTokens, Pages
from saccade.kernels.attention import attention_reference
from saccade.kernels.launch import tl, triton
from saccade.kernels.rope import CosSin, rope_reference

__all__ = [
    "QUANTIZED_MAX", "DecodePlan", "GatherPlan", "NewTokens", "paged_attention", "paged_attention_reference",
    "plan_decode", "plan_gather", "write_pages", "write_pages_reference",
]  # fmt: skip


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
    decode_plan: DecodePlan | None = None,
    key_scales_NGP: Tensor | None = None,
    value_scales_NGP: Tensor | None = None,
    window: int | None = None,
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
            window=window,
        )
    return out_THK


def _gather_pages(pages_NGPK: Tensor, scales_NGP: Tensor | None, pages: Tensor) -> Tensor:
    """[tokens, G, K] in fp32: dequantized rows of pages, in order."""
    rows = pages_NGPK[pages].float()
    if scales_NGP is not None:
        rows = rows * scales_NGP[pages].unsqueeze(-1)
    return rows.transpose(1, 2).flatten(0, 1)


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
    OVERLAP: tl.constexpr,
) -> None:
    """One program per token: all its heads. LARGEST is 0 for a cache in k's own dtype."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
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
        **launch.overlap_options(q_THK.device),
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
    gather_plan: GatherPlan | None = None,
) -> None:
    """Rotate `q` and `k` in place and store `k` and `v` in the cache at `slots_T`, see the top of this file.

    `gather_plan`: see `paged_attention`; an 8-bit cache is written without it.
    """
    _check_pages("write_pages", q_THK, key_pages_NGPK, value_pages_NGPK, key_scales_NGP, value_scales_NGP)
    if k_TGK.shape != v_TGK.shape or k_TGK.shape != (len(q_THK), key_pages_NGPK.shape[1], q_THK.shape[2]):
        raise ValueError(
            f"write_pages: q {tuple(q_THK.shape)}, k {tuple(k_TGK.shape)}, v {tuple(v_TGK.shape)} do not fit"
        )
    if any(x.stride(-1) != 1 for x in (q_THK, k_TGK, v_TGK, *table)) or table[0].stride() != table[1].stride():
        raise ValueError("write_pages: the channels of q, k, v and of the angle table must be contiguous")
    has_plan = gather_plan is not None and key_scales_NGP is None
    paths: tuple[launch.Path, ...] = ("library", "triton") if has_plan else ("triton",)
    path = launch.choose_path("write_pages", *launch.available_paths(q_THK, *paths))
    if path == "library":
        assert gather_plan is not None, "chosen with a plan alone"
        rotate(q_THK, k_TGK, gather_plan.angles)
        write_rows(k_TGK, v_TGK, key_pages_NGPK, value_pages_NGPK, gather_plan)
        return
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
    gather_plan: GatherPlan | None = None,
    key_scales_NGP: Tensor | None = None,
    value_scales_NGP: Tensor | None = None,
    window: int | None = None,
    new: NewTokens | None = None,
) -> Tensor:
    """Attention of every request's new tokens over its pages, see the top of this file.

    `new`: keys and values that the pages do not contain yet. They are stored first, as by `write_pages`; if few
    requests decode and the cache is not compressed, the decode kernel stores them. q may be rotated in place.

    `max_seqlen_q` bounds the new tokens of a request (1 selects decode), `max_context_length` its keys (W * P if not
    given). The first `num_decode` requests have one new token each, or none; a separate launch decodes them while the
    others are prefilled. `decode_plan` is theirs, made by `plan_decode` if not given; on a CPU `gather_plan` is that of
    all requests. `table_rows_R`: the row of `page_table` that each request has, if not its own index. A plan has the
    same `window`. Bounds and shapes determine the grid: in a captured CUDA graph they are fixed.
    """
    _check_pages("paged_attention", q_THK, key_pages_NGPK, value_pages_NGPK, key_scales_NGP, value_scales_NGP)
    rows = page_table_RW if table_rows_R is None else table_rows_R
    if len(cu_seqlens_q) != len(context_lengths_R) + 1 or len(rows) != len(context_lengths_R):
        raise ValueError(
            f"paged_attention: page table rows {tuple(rows.shape)}, cu_seqlens_q {tuple(cu_seqlens_q.shape)} and "
            f"context lengths {tuple(context_lengths_R.shape)} do not name the same requests"
        )
    path = launch.choose_path("paged_attention", *_paths(q_THK))
    stores_in_decode = max_seqlen_q <= 1 and len(context_lengths_R) <= MAX_STORING_REQUESTS and key_scales_NGP is None
    if new is not None and not (path == "triton" and stores_in_decode):
        pages_of_layer = key_pages_NGPK, value_pages_NGPK, key_scales_NGP, value_scales_NGP
        write_pages(q_THK, new.k, new.v, new.angles, new.slots, *pages_of_layer, gather_plan)
        new = None
    if path == "triton":
        pages = Pages(key_pages_NGPK, value_pages_NGPK, key_scales_NGP, value_scales_NGP, page_table_RW, table_rows_R)
        return _attend(
            q_THK, pages, cu_seqlens_q, context_lengths_R, max_seqlen_q=max_seqlen_q, num_decode=num_decode,
            max_context_length=max_context_length, decode_plan=decode_plan, window=window, new=new,
        )  # fmt: skip
    own_table_RW = page_table_RW if table_rows_R is None else page_table_RW[table_rows_R.long()]
    tensors = (q_THK, key_pages_NGPK, value_pages_NGPK, own_table_RW, cu_seqlens_q, context_lengths_R)
    if path == "library":
        plan = gather_plan or _plan_without_writing(*tensors, window=window)
        return attend_gathered(q_THK, key_pages_NGPK, value_pages_NGPK, plan, key_scales_NGP, value_scales_NGP)
    return paged_attention_reference(
        *tensors,
        max_seqlen_q=max_seqlen_q,
        key_scales_NGP=key_scales_NGP,
        value_scales_NGP=value_scales_NGP,
        window=window,
    )


def _plan_without_writing(
    q_THK: Tensor,
    key_pages_NGPK: Tensor,
    value_pages_NGPK: Tensor,
    page_table_RW: Tensor,
    cu_seqlens_q: Tensor,
    context_lengths_R: Tensor,
    window: int | None,
) -> GatherPlan:
    """A plan for attention alone."""
    del value_pages_NGPK
    nothing = q_THK.new_zeros((0, q_THK.shape[2] // 2))
    return plan_gather(
        (nothing, nothing), torch.zeros(0, dtype=torch.int64), page_table_RW, cu_seqlens_q, context_lengths_R,
        num_slots=key_pages_NGPK.shape[0] * key_pages_NGPK.shape[2], page_size=key_pages_NGPK.shape[2],
        num_kv_heads=key_pages_NGPK.shape[1], window=window,
    )  # fmt: skip


def _attend(
    q_THK: Tensor,
    pages: Pages,
    cu_seqlens_q: Tensor,
    context_lengths_R: Tensor,
    *,
    max_seqlen_q: int,
    num_decode: int,
    max_context_length: int | None,
    decode_plan: DecodePlan | None,
    window: int | None,
    new: NewTokens | None,
) -> Tensor:
    """Prefill, then decode. Split prefill also writes rows of decode tokens, which decode overwrites afterwards."""
    num_requests = len(context_lengths_R)
    num_decode = num_requests if max_seqlen_q <= 1 else num_decode
    out_THK = torch.empty_like(q_THK, memory_format=torch.contiguous_format)
    if len(q_THK) == 0 or num_requests == 0:
        return out_THK
    plan, with_prefill = decode_plan, False
    # Made before prefill: decode does not wait for the launch right before it.
    if num_decode > 0 and (plan is None or plan.num_decode != num_decode):
        plan = plan_decode(cu_seqlens_q, context_lengths_R, pages.keys, num_decode=num_decode, window=window)
    if num_decode < num_requests:
        most_keys = pages.table.shape[1] * pages.keys.shape[2]
        schedule = schedule_prefill(
            num_tokens=len(q_THK), num_requests=num_requests - num_decode, H=q_THK.shape[1], G=pages.keys.shape[1],
            head_dim=q_THK.shape[2], cache_bytes=pages.keys.element_size(), max_seqlen_q=max_seqlen_q,
            max_context_length=most_keys if max_context_length is None else min(max_context_length, most_keys),
            num_sms=launch.num_sms(q_THK.device),
        )  # fmt: skip
        if pages.rows is None:
            others = pages._replace(table=pages.table[num_decode:])
        else:
            others = pages._replace(rows=pages.rows[num_decode:])
        prefill(q_THK, others, cu_seqlens_q[num_decode:], context_lengths_R[num_decode:], out_THK, schedule, window)
        with_prefill = schedule.num_splits == 1
    if plan is not None and num_decode > 0:
        decode(q_THK, pages, cu_seqlens_q, context_lengths_R, out_THK, plan, new, with_prefill=with_prefill)
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
