"""Packed attention: many sequences of different lengths in one row, none of them padded, none seeing another.

Legend: T query tokens, S key tokens, H query heads, G key/value heads (H is a multiple of G), K head dim.

    out[t] = sum_s softmax_s(scale * q[t] . k[s]) v[s]      over the keys s of t's own segment

`cu_seqlens_q` [segments + 1] and `cu_seqlens_k` give the cumulative starts of each segment's queries and keys (int32). Query
head h reads key/value head h // (H / G). With `causal`, the last query of a segment stands beside its last key: query i of n
sees keys 0 .. i + (m - n) of m. That covers training (n = m), prefill behind a cache (n < m) and decode (n = 1) alike.
q [T, H, K], k and v [S, G, K], out [T, H, K]; softmax in fp32. A segment without queries costs nothing.
"""

from itertools import pairwise
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from saccade.kernels import launch


def attention_reference(
    q_THK: Tensor,
    k_SGK: Tensor,
    v_SGK: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool,
) -> Tensor:
    """The formula above, one segment at a time, in fp32. `max_seqlen_*` are here so that the signatures agree."""
    del max_seqlen_q, max_seqlen_k
    repeat = q_THK.shape[1] // k_SGK.shape[1]
    out_THK = torch.empty_like(q_THK)
    for (q0, q1), (k0, k1) in zip(pairwise(cu_seqlens_q.tolist()), pairwise(cu_seqlens_k.tolist()), strict=True):
        q, k, v = (x.float().transpose(0, 1) for x in (q_THK[q0:q1], k_SGK[k0:k1], v_SGK[k0:k1]))
        k, v = k.repeat_interleave(repeat, 0), v.repeat_interleave(repeat, 0)
        scores_HTS = q @ k.transpose(1, 2) * q.shape[-1] ** -0.5
        if causal:
            scores_HTS = scores_HTS.masked_fill(~_causal_mask(q1 - q0, k1 - k0, q.device), float("-inf"))
        out_THK[q0:q1] = (scores_HTS.softmax(-1) @ v).transpose(0, 1).to(q_THK.dtype)
    return out_THK


def _causal_mask(num_queries: int, num_keys: int, device: torch.device) -> Tensor:
    """[queries, keys], True where the query may look; the last query sees every key."""
    return torch.ones(num_queries, num_keys, dtype=torch.bool, device=device).tril(num_keys - num_queries)


def _attention_sdpa(
    q_THK: Tensor, k_SGK: Tensor, v_SGK: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, *, causal: bool
) -> Tensor:
    """torch's SDPA, one call for all segments of one shape: the hundreds of equal vision windows become one batch."""
    segments: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for (q0, q1), (k0, k1) in zip(pairwise(cu_seqlens_q.tolist()), pairwise(cu_seqlens_k.tolist()), strict=True):
        segments.setdefault((q1 - q0, k1 - k0), []).append((q0, k0))
    out_THK = torch.empty_like(q_THK)
    for (num_queries, num_keys), starts in segments.items():
        if num_queries == 0:
            continue
        q_rows = _rows([q0 for q0, _ in starts], num_queries, q_THK.device)
        k_rows = _rows([k0 for _, k0 in starts], num_keys, q_THK.device)
        q, k, v = (x[rows].transpose(1, 2) for x, rows in ((q_THK, q_rows), (k_SGK, k_rows), (v_SGK, k_rows)))
        repeat = q.shape[1] // k.shape[1]
        if repeat > 1:
            k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        if causal and 1 < num_queries < num_keys:
            mask = _causal_mask(num_queries, num_keys, q.device)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        else:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=causal and num_queries > 1)
        out_THK[q_rows] = out.transpose(1, 2)
    return out_THK


def _rows(starts: list[int], length: int, device: torch.device) -> Tensor:
    """[segments, length]: the row numbers of equally long segments."""
    return torch.tensor(starts, device=device)[:, None] + torch.arange(length, device=device)


def _torch_varlen() -> ModuleType | None:
    """torch's packed FlashAttention, where this torch has it."""
    try:
        from torch.nn.attention import varlen
    except ImportError:
        return None
    return varlen


def _attention_varlen(
    q_THK: Tensor,
    k_SGK: Tensor,
    v_SGK: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool,
) -> Tensor:
    """torch's packed FlashAttention; it takes grouped heads as they are and head dims that are multiples of 8."""
    varlen = _torch_varlen()
    assert varlen is not None, "checked by _has_varlen"
    out: Tensor = varlen.varlen_attn(
        q_THK,
        k_SGK,
        v_SGK,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        window_size=(-1, 0) if causal else (-1, -1),
    )
    return out


def _has_varlen(q_THK: Tensor) -> bool:
    """Whether torch's packed FlashAttention takes this device, dtype and head dim."""
    is_half = q_THK.dtype in (torch.bfloat16, torch.float16)
    return q_THK.is_cuda and is_half and q_THK.shape[-1] % 8 == 0 and _torch_varlen() is not None


def attention(
    q_THK: Tensor,
    k_SGK: Tensor,
    v_SGK: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool,
) -> Tensor:
    """Packed attention, see the top of this file. `max_seqlen_*` bound the segment lengths (kernels size their grid by it)."""
    if q_THK.shape[1] % k_SGK.shape[1] or q_THK.shape[2] != k_SGK.shape[2] or k_SGK.shape != v_SGK.shape:
        raise ValueError(
            f"attention: q {tuple(q_THK.shape)}, k {tuple(k_SGK.shape)}, v {tuple(v_SGK.shape)} do not fit"
        )
    path = launch.choose("attention", "library")
    if path == "library" and not _has_varlen(q_THK):
        return _attention_sdpa(q_THK, k_SGK, v_SGK, cu_seqlens_q, cu_seqlens_k, causal=causal)
    run = _attention_varlen if path == "library" else attention_reference
    return run(
        q_THK,
        k_SGK,
        v_SGK,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        causal=causal,
    )
