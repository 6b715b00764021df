# mypy: allow-untyped-decorators
"""Decode and prefill over pages share one tile of keys and the sum of partial results.

Legend: see `paged_attention.py`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from saccade.kernels.launch import tl, triton
from saccade.kernels.rope import CosSin

QUANTIZED_MAX = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
"""The largest value of each compressed cache format."""
LOG2_E = 1.4426950408889634


class NewTokens(NamedTuple):
    """Keys and values of a step's tokens, before RoPE, that are not in the pages yet."""

    k: Tensor
    """[T, G, K]"""
    v: Tensor
    """[T, G, K]"""
    angles: CosSin
    slots: Tensor
    """[T]: the slot of each token; it is not stored if the slot is outside of the cache."""


class Pages(NamedTuple):
    """The cache of one layer, and the page table."""

    keys: Tensor
    """[N, G, P, K]"""
    values: Tensor
    """[N, G, P, K]"""
    key_scales: Tensor | None
    """[N, G, P]"""
    value_scales: Tensor | None
    """[N, G, P]"""
    table: Tensor
    """[rows, W]"""
    rows: Tensor | None
    """[R]: the row of `table` that each request has. None: its own index."""

    @property
    def largest(self) -> float:
        """The largest value of a compressed cache, 0 for a cache in q's own dtype."""
        return QUANTIZED_MAX.get(self.keys.dtype, 0.0)

    @property
    def pointers(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Arguments of a kernel, in order. A tensor that is not read replaces missing scales or rows."""
        keys, values, key_scales, value_scales, table, rows = self
        scales = keys if key_scales is None else key_scales, values if value_scales is None else value_scales
        return keys, values, *scales, table, table if rows is None else rows

    @property
    def strides(self) -> tuple[int, ...]:
        """Arguments of a kernel, in order."""
        scales = self.keys if self.key_scales is None else self.key_scales
        return *self.keys.stride()[:3], *scales.stride()[:2], self.table.stride(0)


@triton.jit
def scaled_queries(q_block: tl.tensor, scale_log2: tl.tensor, LARGEST: tl.constexpr) -> tl.tensor:
    """Queries for a quantized cache, which is converted to fp16.

    The conversion is lossless for 8-bit formats, and one instruction for fp8. Scores are in base 2; q is scaled down
    first and cannot overflow. (fp32 queries stay fp32.)
    """
    if LARGEST > 0:
        dtype: tl.constexpr = tl.float32 if q_block.dtype == tl.float32 else tl.float16
        q_block = (q_block.to(tl.float32) * scale_log2).to(dtype)
    return q_block


@triton.jit
def attend_tile(
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
    WINDOW: tl.constexpr,
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
        seen = (n[None, :] <= last_key[:, None]) & in_context[None, :]
        if WINDOW is not None:
            seen = seen & (n[None, :] >= last_key[:, None] - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))

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
        # Times LARGEST, which is divided out at the end: the scale alone could underflow in fp16.
        p *= tl.load(scales_v + scale_rows, mask=in_context, other=0.0)[None, :] * LARGEST
    acc = tl.dot(p.to(q_block.dtype), v.to(q_block.dtype), acc, input_precision="ieee")
    return new_best, total, acc


@triton.jit
def add_partials(
    parts: tl.tensor, lse: tl.tensor, best: tl.tensor, total: tl.tensor, acc: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Add [splits, rows, d] partial results, each weighted by its share of the softmax's sum.

    An unused split has lse -inf; its result was never written, may be NaN, and gets weight zero. It is read all the
    same: skipping it would have to wait for lse.
    """
    # weight = 2^(lse - best'), total' = total 2^(best - best') + sum weight, acc' = acc 2^(best - best') + weight parts
    new_best = tl.maximum(best, tl.max(lse, 0))
    shift = tl.where(new_best == float("-inf"), 0.0, new_best)
    weight = tl.exp2(lse - shift[None, :])
    correction = tl.exp2(best - shift)
    weighted = tl.where(weight[:, :, None] > 0, parts * weight[:, :, None], 0.0)
    return new_best, total * correction + tl.sum(weight, 0), acc * correction[:, None] + tl.sum(weighted, 0)
