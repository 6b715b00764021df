"""Paged attention on a CPU: gather the pages of the requests, then attend with torch's SDPA.

Legend: see `paged_attention.py`. Slots, pages and masks are the same in every layer of a step: `plan_gather` computes
them once. A layer is then a dozen operations for any number of decode requests; computed in every layer they would take
a quarter of a decode step of 8 requests.
"""

from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from saccade.kernels.rope import CosSin, whole_heads


class _Decode(NamedTuple):
    """Requests with one new token each, attended to in one batch."""

    tokens: Tensor
    """[R]: their tokens."""
    pages: Tensor
    """[R * G * W]: pages of each request and head, in pages viewed as [N * G, P, K]."""
    padding: Tensor
    """Rows of the gathered keys, [R * G * W * P, K], after the last token of their request."""
    mask: Tensor
    """[R, 1, 1, W * P]: True at keys of the request, within its window."""


class _Prefill(NamedTuple):
    """One request with several new tokens."""

    start: int
    end: int
    num_keys: int
    pages: Tensor
    """[G * W], as for decode."""
    mask: Tensor | None
    """[tokens, keys], or None: the first token is the first key."""


class GatherPlan(NamedTuple):
    """Slots, pages, masks and angles, the same for all layers of a step."""

    angles: CosSin
    """Angles of whole heads, see `rope.whole_heads`."""
    rows: Tensor
    """[stored tokens * G]: slots of keys and values, in pages viewed as [N * G * P, K]."""
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
    rows = (page.unsqueeze(1) * num_kv_heads + heads) * page_size + offset.unsqueeze(1)
    starts, lengths = cu_seqlens_q.tolist(), context_lengths_R.tolist()
    new = [(r, start, end) for r, (start, end) in enumerate(pairwise(starts)) if end > start and lengths[r] > 0]

    def pages_of(own_table_RW: Tensor) -> Tensor:
        return (own_table_RW.long().unsqueeze(1) * num_kv_heads + heads.unsqueeze(1)).flatten()

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
        padding = (~is_own).unsqueeze(1).expand(-1, num_kv_heads, -1).flatten().nonzero().squeeze(1)
        seen = is_own
        if window is not None:
            seen = is_own & (torch.arange(width * page_size) >= context_lengths_R[requests].unsqueeze(1) - 1 - window)
        return _Decode(torch.tensor(tokens), pages_of(own_table), padding, seen[:, None, None])

    single = [(r, start) for r, start, end in new if end - start == 1]
    return GatherPlan(
        angles=whole_heads(table),
        rows=rows.flatten(),
        stored=stored,
        decode=decode([r for r, _ in single], [token for _, token in single]) if single else None,
        prefill=tuple(prefill(*request) for request in new if request[2] - request[1] > 1),
    )


def write_rows(x_TGK: Tensor, pages_NGPK: Tensor, plan: GatherPlan) -> None:
    """Store keys or values that are rotated already."""
    rows = x_TGK if plan.stored is None else x_TGK[plan.stored]
    pages_NGPK.view(-1, x_TGK.shape[-1]).index_copy_(0, plan.rows, rows.reshape(-1, x_TGK.shape[-1]))


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
    caches = ((key_pages_NGPK, key_scales_NGP), (value_pages_NGPK, value_scales_NGP))

    def gathered(pages_NGPK: Tensor, scales_NGP: Tensor | None, pages: Tensor) -> Tensor:
        """[requests * G * tokens, K], in order."""
        rows = pages_NGPK.flatten(0, 1).index_select(0, pages)
        if scales_NGP is not None:
            scales = scales_NGP.flatten(0, 1).index_select(0, pages)
            rows = (rows.float() * scales.unsqueeze(-1)).to(q_THK.dtype)
        return rows.view(-1, K)

    out_THK = torch.zeros_like(q_THK, memory_format=torch.contiguous_format)
    if plan.decode is not None:
        num = len(plan.decode.tokens)
        # Slots after a request's last token may hold NaN, and 0 * NaN is NaN.
        k, v = (
            gathered(*cache, plan.decode.pages).index_fill_(0, plan.decode.padding, 0.0).view(num, G, -1, K)
            for cache in caches
        )
        # Query heads that share keys become tokens: keys are then read once.
        q = q_THK.index_select(0, plan.decode.tokens).view(num, G, -1, K)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=plan.decode.mask)
        out_THK.index_copy_(0, plan.decode.tokens, out.flatten(1, 2))
    for request in plan.prefill:
        k, v = (gathered(*cache, request.pages).view(1, G, -1, K)[:, :, : request.num_keys] for cache in caches)
        q = q_THK[request.start : request.end].transpose(0, 1).unsqueeze(0)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=request.mask, is_causal=request.mask is None, enable_gqa=True
        )
        out_THK[request.start : request.end] = out[0].transpose(0, 1)
    return out_THK
