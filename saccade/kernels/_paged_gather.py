"""Paged attention on a CPU: gather the pages of the requests, then attend with torch's SDPA.

Legend: see `paged_attention.py`. Slots, pages and masks are the same in every layer of a step: `plan_gather` computes
them once. A layer is then a dozen operations for any number of decode requests; computed in every layer they would take
a quarter of a decode step of 8 requests.

Small operations cost a few microseconds each, and more where other processes use the cores, since several threads wait
for each other. So tensors that follow each other in memory are one operand: queries and keys of a merged projection are
rotated together, keys and values are written and gathered together.
"""

from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from saccade.kernels.rope import CosSin, rotate_whole, whole_heads


class _Decode(NamedTuple):
    """Requests with one new token each, attended to in one batch."""

    num_requests: int
    tokens: Tensor | None
    """[R]: their tokens. None: all tokens of the step, in order."""
    pages: Tensor
    """[2 * R * G * W]: pages of each request and head, in keys and values viewed as [2 * N * G, P, K]."""
    padding: Tensor
    """Rows of the gathered keys and values, [2 * R * G * W * P, K], after the last token of their request."""
    mask: Tensor
    """[R, 1, 1, W * P]: True at keys of the request, within its window."""


class _Prefill(NamedTuple):
    """One request with several new tokens."""

    start: int
    end: int
    num_keys: int
    pages: Tensor
    """[2 * G * W], as for decode."""
    mask: Tensor | None
    """[tokens, keys], or None: the first token is the first key."""


class GatherPlan(NamedTuple):
    """Slots, pages, masks and angles, the same for all layers of a step."""

    angles: CosSin
    """Angles of whole heads, see `rope.whole_heads`."""
    rows: Tensor
    """[stored tokens * 2 * G]: slots of keys and values, which are viewed as [2 * N * G * P, K]."""
    stored: Tensor | None
    """[stored tokens]: tokens with a slot. None: all."""
    decode: _Decode | None
    prefill: tuple[_Prefill, ...]


def plan_gather(
    table: CosSin,
    slots_T: Tensor,
    page_table_RW: Tensor,
    cu_seqlens_q: Tensor,
    context_lengths_R: Tensor,
    *,
    num_slots: int,
    page_size: int,
    num_kv_heads: int,
    window: int | None = None,
) -> GatherPlan:
    """The plan of a step. `page_table_RW` has a row for each request; `num_slots` is the size of the cache in tokens.

    `window`: earlier keys that a token attends to.
    """
    stored = None
    if len(slots_T) and not 0 <= int(slots_T.min()) <= int(slots_T.max()) < num_slots:
        stored = ((slots_T >= 0) & (slots_T < num_slots)).nonzero().squeeze(1)
        slots_T = slots_T[stored]
    heads = torch.arange(num_kv_heads)
    page, offset = slots_T.long() // page_size, slots_T.long() % page_size
    key_rows = (page.unsqueeze(1) * num_kv_heads + heads) * page_size + offset.unsqueeze(1)
    rows = torch.cat([key_rows, key_rows + num_slots * num_kv_heads], 1)
    starts, lengths, num_pages = cu_seqlens_q.tolist(), context_lengths_R.tolist(), num_slots // page_size
    new = [(r, start, end) for r, (start, end) in enumerate(pairwise(starts)) if end > start and lengths[r] > 0]

    def pages_of(own_table_RW: Tensor) -> Tensor:
        key_pages = (own_table_RW.long().unsqueeze(1) * num_kv_heads + heads.unsqueeze(1)).flatten()
        return torch.cat([key_pages, key_pages + num_pages * num_kv_heads])

    def prefill(r: int, start: int, end: int) -> _Prefill:
        pages = pages_of(page_table_RW[r : r + 1, : -(-lengths[r] // page_size)])
        num_before = lengths[r] - (end - start)
        is_cut = window is not None and lengths[r] > window + 1
        mask = None
        if num_before or is_cut:
            mask = torch.ones(end - start, lengths[r], dtype=torch.bool).tril(num_before)
        if window is not None and mask is not None:
            mask = mask.triu(num_before - window)
        return _Prefill(start, end, lengths[r], pages, mask)

    def decode(requests: list[int], tokens: list[int]) -> _Decode:
        width = -(-max(lengths[r] for r in requests) // page_size)
        is_own = torch.arange(width * page_size) < context_lengths_R[requests].unsqueeze(1)
        own_table = page_table_RW[requests, :width].masked_fill(~is_own[:, ::page_size], 0)
        padding = (~is_own).expand(2, num_kv_heads, -1, -1).transpose(1, 2).flatten().nonzero().squeeze(1)
        seen = is_own
        if window is not None:
            seen = is_own & (torch.arange(width * page_size) >= context_lengths_R[requests].unsqueeze(1) - 1 - window)
        index = None if tokens == list(range(starts[-1])) else torch.tensor(tokens)
        return _Decode(len(tokens), index, pages_of(own_table), padding, seen[:, None, None])

    single = [(r, start) for r, start, end in new if end - start == 1]
    return GatherPlan(
        angles=whole_heads(table),
        rows=rows.flatten(),
        stored=stored,
        decode=decode([r for r, _ in single], [token for _, token in single]) if single else None,
        prefill=tuple(prefill(*request) for request in new if request[2] - request[1] > 1),
    )


def joined(first: Tensor, second: Tensor, dim: int) -> Tensor | None:
    """Two tensors that follow each other in memory along a dimension, as one view. None: they do not."""
    size = first.shape[dim] * first.stride(dim)
    follows = second.data_ptr() == first.data_ptr() + size * first.element_size()
    is_one = first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    if not (follows and is_one and first.stride() == second.stride()):
        return None
    shape = list(first.shape)
    shape[dim] += second.shape[dim]
    return first.as_strided(shape, first.stride())


def rotate(q_THK: Tensor, k_TGK: Tensor, angles: CosSin) -> None:
    """Rotate queries and keys in place."""
    both = joined(q_THK, k_TGK, 1)
    for x in (q_THK, k_TGK) if both is None else (both,):
        x.copy_(rotate_whole(x, angles))


def write_rows(
    k_TGK: Tensor, v_TGK: Tensor, key_pages_NGPK: Tensor, value_pages_NGPK: Tensor, plan: GatherPlan
) -> None:
    """Store keys, which are rotated already, and values."""
    rows = joined(k_TGK, v_TGK, 1)
    rows = torch.cat([k_TGK, v_TGK], 1) if rows is None else rows
    rows = rows if plan.stored is None else rows[plan.stored]
    pages, index = joined(key_pages_NGPK, value_pages_NGPK, 0), plan.rows
    if pages is not None:
        pages.view(-1, rows.shape[-1]).index_copy_(0, index, rows.reshape(-1, rows.shape[-1]))
        return
    key_index = index.view(len(rows), 2, -1)[:, 0].reshape(-1)
    for part, own in zip((key_pages_NGPK, value_pages_NGPK), rows.chunk(2, 1), strict=True):
        part.view(-1, rows.shape[-1]).index_copy_(0, key_index, own.reshape(-1, rows.shape[-1]))


def _gather(first_NGP: Tensor, second_NGP: Tensor, pages: Tensor) -> Tensor:
    """Pages of keys, then of values: [pages, P, ...]."""
    both = joined(first_NGP, second_NGP, 0)
    if both is not None:
        return both.flatten(0, 1).index_select(0, pages)
    key_pages = pages[: len(pages) // 2]
    return torch.cat([part.flatten(0, 1).index_select(0, key_pages) for part in (first_NGP, second_NGP)])


def attend_gathered(
    q_THK: Tensor,
    key_pages_NGPK: Tensor,
    value_pages_NGPK: Tensor,
    plan: GatherPlan,
    key_scales_NGP: Tensor | None,
    value_scales_NGP: Tensor | None,
) -> Tensor:
    """[T, H, K]: decode requests in one batch, the others one by one."""
    G, K = key_pages_NGPK.shape[1], q_THK.shape[2]

    def gathered(pages: Tensor) -> Tensor:
        """[2 * requests * G * tokens, K], in order."""
        rows = _gather(key_pages_NGPK, value_pages_NGPK, pages)
        if key_scales_NGP is not None and value_scales_NGP is not None:
            scales = _gather(key_scales_NGP, value_scales_NGP, pages)
            rows = (rows.float() * scales.unsqueeze(-1)).to(q_THK.dtype)
        return rows.view(-1, K)

    def decode(request: _Decode, q_RHK: Tensor) -> Tensor:
        # Slots after a request's last token may hold NaN, and 0 * NaN is NaN.
        rows = gathered(request.pages).index_fill_(0, request.padding, 0.0)
        k, v = rows.view(2, request.num_requests, G, -1, K)
        # Query heads that share keys become tokens: keys are then read once.
        q = q_RHK.unflatten(1, (G, -1))  # type: ignore[no-untyped-call]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=request.mask).flatten(1, 2)

    if plan.decode is not None and plan.decode.tokens is None:
        return decode(plan.decode, q_THK)
    out_THK = torch.zeros_like(q_THK, memory_format=torch.contiguous_format)
    if plan.decode is not None and plan.decode.tokens is not None:
        tokens = plan.decode.tokens
        out_THK.index_copy_(0, tokens, decode(plan.decode, q_THK.index_select(0, tokens)))
    for one in plan.prefill:
        k, v = gathered(one.pages).view(2, 1, G, -1, K)[:, :, :, : one.num_keys]
        q = q_THK[one.start : one.end].transpose(0, 1).unsqueeze(0)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=one.mask, is_causal=one.mask is None, enable_gqa=True)
        out_THK[one.start : one.end] = out[0].transpose(0, 1)
    return out_THK
