"""Packed attention: sequences of different lengths concatenated without padding, each attending only to itself.

Legend: T query tokens, S key tokens, H query heads, G key/value heads (H is a multiple of G), K head dim.

    out[t] = sum_s softmax_s(scale * q[t] . k[s]) v[s]      over the keys s of t's own segment, scale = 1 / sqrt(K)

`cu_seqlens_q` [segments + 1] and `cu_seqlens_k` give the cumulative starts of each segment's queries and keys (int32).
Query head h reads key/value head h // (H / G). With `causal`, the last query of a segment is aligned with its last key:
query i of n attends to keys 0 .. i + (m - n) of m. That covers training (n = m), prefill with a cache (n < m) and
decode (n = 1) alike. With `window`, a causal query attends to that many earlier keys and its own. A query without keys
gets zero; rows past the last segment are not written. If the number of rows equals segments times `max_seqlen`, all
segments must have that length. q [T, H, K], k and v [S, G, K], out [T, H, K]; softmax in fp32. A segment without
queries costs nothing.

There are two kinds of Triton kernels: `_attention_tiled.py`, for any mask and any lengths, saves out and one fp32 per
query and head; `_attention_window.py`, for thousands of segments of at most 64 tokens, saves nothing. Lengths stay on
the device.

`rope_attention` is attention of segments to themselves with q and k rotated first, see `rope.py`. Without gradients the
kernel of short segments rotates what it loads; everything else is `rope`, then `attention`.
"""

import functools
import inspect
import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from saccade.kernels import launch
from saccade.kernels._attention_tiled import can_tile, tiled_attention
from saccade.kernels._attention_window import can_window, rotated_window_attention, window_attention
from saccade.kernels.rope import CosSin, rope, rope_reference


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
    window: int | None = None,
) -> Tensor:
    """The formula above, one segment at a time, in fp32. `max_seqlen_*` are unused."""
    del max_seqlen_q, max_seqlen_k
    repeat = q_THK.shape[1] // k_SGK.shape[1]
    out_THK = torch.zeros_like(q_THK)
    for (q0, q1), (k0, k1) in zip(pairwise(cu_seqlens_q.tolist()), pairwise(cu_seqlens_k.tolist()), strict=True):
        q, k, v = (x.float().transpose(0, 1) for x in (q_THK[q0:q1], k_SGK[k0:k1], v_SGK[k0:k1]))
        k, v = k.repeat_interleave(repeat, 0), v.repeat_interleave(repeat, 0)
        scores_HTS = q @ k.transpose(1, 2) * q.shape[-1] ** -0.5
        if causal:
            seen_TS = _causal_mask(q1 - q0, k1 - k0, window, q.device)
            weights_HTS = scores_HTS.masked_fill(~seen_TS, float("-inf")).softmax(-1).masked_fill(~seen_TS, 0.0)
        else:
            weights_HTS = scores_HTS.softmax(-1)
        out_THK[q0:q1] = (weights_HTS @ v).transpose(0, 1).to(q_THK.dtype)
    return out_THK


def _causal_mask(num_queries: int, num_keys: int, window: int | None, device: torch.device) -> Tensor:
    """[queries, keys]: True where the query attends to the key; the last query is aligned with the last key."""
    seen = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device).tril(num_keys - num_queries)
    return seen if window is None else seen.triu(num_keys - num_queries - window)


class _Call(NamedTuple):
    """Arguments of one call of `attention`."""

    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    causal: bool
    window: int | None

    @property
    def num_segments(self) -> int:
        return len(self.cu_seqlens_q) - 1

    @property
    def is_half(self) -> bool:
        return self.q.dtype in (torch.bfloat16, torch.float16)

    @property
    def sides(self) -> tuple[int, int]:
        """Keys before and after a query that it attends to, as FlashAttention counts them: -1 for all."""
        return -1 if self.window is None else self.window, 0 if self.causal else -1

    @property
    def has_equal_lengths(self) -> bool:
        """Whether every segment is as long as the bound, in queries and in keys: no other lengths have this sum."""
        is_full_q = self.num_segments * self.max_seqlen_q == self.q.shape[0]
        return is_full_q and self.num_segments * self.max_seqlen_k == self.k.shape[0]


def _can_dense(call: _Call) -> bool:
    """Equal, round lengths, unmasked or with torch's mask (top left): cuDNN plans 10 ms and more for a new shape."""
    is_round = call.max_seqlen_q % 128 == 0 and call.max_seqlen_k % 128 == 0
    is_aligned = call.window is None and (not call.causal or call.max_seqlen_q == call.max_seqlen_k)
    return call.q.is_cuda and call.is_half and call.has_equal_lengths and is_round and is_aligned


def _dense(call: _Call) -> Tensor:
    """Segments of one length are a batch: torch's SDPA (cuDNN on Hopper) takes views of the packed tensors."""
    q, k, v = (x.view(call.num_segments, -1, *x.shape[1:]).transpose(1, 2) for x in (call.q, call.k, call.v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=call.causal, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2).flatten(0, 1)


@functools.cache
def _torch_varlen() -> Callable[..., Any] | None:
    """torch's packed FlashAttention 2, if this torch has it.

    Its packed cuDNN op is not used: up to torch 2.12 it plans again on every call (42 ms) and its backward takes the
    head dim for the longest segment (pytorch#191576, pytorch#186142).
    """
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    takes_grouped_heads_on_request = "enable_gqa" in inspect.signature(varlen_attn).parameters
    return functools.partial(varlen_attn, enable_gqa=True) if takes_grouped_heads_on_request else varlen_attn


def _can_flash(call: _Call) -> bool:
    return call.q.is_cuda and call.is_half and call.q.shape[2] % 8 == 0 and _torch_varlen() is not None


def _flash(call: _Call) -> Tensor:
    run = _torch_varlen()
    assert run is not None, "checked by _can_flash"
    return run(*call[:7], window_size=call.sides)  # type: ignore[no-any-return]


def _by_length(call: _Call) -> Tensor:
    """torch's SDPA, one call for all segments of one shape. It reads the lengths on the host: CPU only."""
    segments: dict[tuple[int, int], list[tuple[int, int]]] = {}
    starts_q, starts_k = call.cu_seqlens_q.tolist(), call.cu_seqlens_k.tolist()
    for (q0, q1), (k0, k1) in zip(pairwise(starts_q), pairwise(starts_k), strict=True):
        segments.setdefault((q1 - q0, k1 - k0), []).append((q0, k0))
    out_THK = torch.zeros_like(call.q)
    repeat = call.q.shape[1] // call.k.shape[1]
    for (num_queries, num_keys), starts in segments.items():
        if num_queries == 0 or num_keys == 0:
            continue
        q_rows = _row_numbers([q0 for q0, _ in starts], num_queries, call.q.device)
        k_rows = _row_numbers([k0 for _, k0 in starts], num_keys, call.q.device)
        if call.has_equal_lengths:  # nothing to gather: the segments are consecutive rows
            q, k, v = (
                x.unflatten(0, (len(starts), -1)).transpose(1, 2)  # type: ignore[no-untyped-call]
                for x in (call.q, call.k, call.v)
            )
        else:
            q, k, v = (x[rows].transpose(1, 2) for x, rows in ((call.q, q_rows), (call.k, k_rows), (call.v, k_rows)))
        k, v = (x.repeat_interleave(repeat, 1) if repeat > 1 else x for x in (k, v))
        if call.causal and (call.window is not None or num_queries != num_keys):
            seen_TS = _causal_mask(num_queries, num_keys, call.window, q.device)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen_TS)
            out = out.masked_fill(~seen_TS.any(1)[:, None], 0.0)
        else:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=call.causal)
        out_THK[q_rows] = out.transpose(1, 2)
    return out_THK


def _row_numbers(starts: list[int], length: int, device: torch.device) -> Tensor:
    """[segments, length]: row indices of segments of equal length."""
    return torch.tensor(starts, device=device)[:, None] + torch.arange(length, device=device)


class _Candidate(NamedTuple):
    path: launch.Path
    can_serve: Callable[[_Call], bool]
    run: Callable[[_Call], Tensor]


_CANDIDATES = {
    "window": _Candidate(
        "triton",
        lambda call: can_window(call.q, call.k, call.max_seqlen_q, call.max_seqlen_k, call.causal),
        lambda call: window_attention(*call[:7]),
    ),
    "tiled": _Candidate(
        "triton", lambda call: can_tile(call.q), lambda call: tiled_attention(*call[:5], call.causal, call.window)
    ),
    "dense": _Candidate("library", _can_dense, _dense),
    "flash": _Candidate("library", _can_flash, _flash),
    "by length": _Candidate("library", lambda call: not call.q.is_cuda, _by_length),
}


_MIN_HEAD_DIM, _MAX_HEAD_DIM = 16, 256


class _Rule(NamedTuple):
    """Candidates, fastest first, for calls up to these sizes; the first matching rule applies."""

    head_dim: int
    causal: bool
    max_seqlen: float
    order: tuple[str, ...]


# Measured on an H200 (bench/kernels/attention.py), TFLOP/s forward / backward: 16 x 1024 causal d128 dense 453 / 293,
# tiled 352 / 196, flash 216 / 189; ragged 64..2048 tiled 380 / 213, flash 227 / 196. 576 windows of 64, d80: window
# 0.103 ms forward, tiled 0.173. Candidates that do not support a call are skipped.
_RULES = (
    _Rule(256, False, 64, ("window", "tiled", "flash", "by length")),
    _Rule(128, False, math.inf, ("dense", "tiled", "flash", "by length")),
    _Rule(128, True, math.inf, ("dense", "tiled", "flash", "by length")),
    _Rule(256, False, math.inf, ("dense", "flash", "tiled", "by length")),
    _Rule(256, True, math.inf, ("dense", "flash", "tiled", "by length")),
)


def _candidates(call: _Call) -> list[str]:
    """Names of the candidates that support a call, fastest first."""
    longest = max(call.max_seqlen_q, call.max_seqlen_k)
    for rule in _RULES:
        if call.q.shape[2] <= rule.head_dim and call.causal == rule.causal and longest <= rule.max_seqlen:
            return [name for name in rule.order if _CANDIDATES[name].can_serve(call)]
    return []


def _padding(q_THK: Tensor) -> int:
    """Channels to add to heads of a size that no GPU kernel supports."""
    head_dim = q_THK.shape[2]
    runs_kernels = q_THK.is_cuda or launch.is_forced("triton")
    return 0 if not runs_kernels or head_dim > _MAX_HEAD_DIM else max(_MIN_HEAD_DIM, -(-head_dim // 8) * 8) - head_dim


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
    window: int | None = None,
) -> Tensor:
    """Packed attention, see the top of this file. `max_seqlen_*` bound the segment lengths, and choose the kernel."""
    if q_THK.shape[1] % k_SGK.shape[1] or q_THK.shape[2] != k_SGK.shape[2] or k_SGK.shape != v_SGK.shape:
        raise ValueError(
            f"attention: q {tuple(q_THK.shape)}, k {tuple(k_SGK.shape)}, v {tuple(v_SGK.shape)} do not fit"
        )
    if window is not None and not causal:
        raise ValueError(f"attention: window {window} counts keys to the left, so it needs causal=True")
    if padding := _padding(q_THK):
        # Channels of zeros change nothing but the scale of the scores, 1 / sqrt(channels).
        scale = ((q_THK.shape[2] + padding) / q_THK.shape[2]) ** 0.5
        q, k, v = (F.pad(x, (0, padding)) for x in (q_THK * scale, k_SGK, v_SGK))
        return attention(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, causal=causal,
            window=window
        )[..., : q_THK.shape[2]]  # fmt: skip
    call = _Call(q_THK, k_SGK, v_SGK, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, window)
    if q_THK.numel() == 0 or k_SGK.numel() == 0:
        return q_THK * 0.0
    names = _candidates(call)
    path = launch.choose_path("attention", *launch.available_paths(q_THK, *(_CANDIDATES[name].path for name in names)))
    if path == "reference":
        return attention_reference(
            *call[:5], max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, causal=causal, window=window
        )
    name = next(name for name in names if _CANDIDATES[name].path == path)
    launch.log_path(f"attention of head dim {q_THK.shape[2]}, {'causal' if causal else 'full'}: {name}")
    return _CANDIDATES[name].run(call)


def rope_attention_reference(
    q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, table: CosSin, cu_seqlens: Tensor, *, max_seqlen: int, causal: bool
) -> Tensor:
    """`rope_reference`, then `attention_reference`."""
    q_THK, k_TGK = rope_reference(q_THK, k_TGK, table)
    return attention_reference(
        q_THK, k_TGK, v_TGK, cu_seqlens, cu_seqlens, max_seqlen_q=max_seqlen, max_seqlen_k=max_seqlen, causal=causal
    )


def rope_attention(
    q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, table: CosSin, cu_seqlens: Tensor, *, max_seqlen: int, causal: bool
) -> Tensor:
    """Attention of q and k after RoPE, see the top of this file."""
    if any(part.shape != (len(q_THK), q_THK.shape[2] // 2) for part in table) or q_THK.shape[2] % 2:
        tables = ", ".join(str(tuple(part.shape)) for part in table)
        raise ValueError(f"rope_attention: q {tuple(q_THK.shape)} and tables {tables} do not fit")
    if q_THK.shape[2] != k_TGK.shape[2] or k_TGK.shape != v_TGK.shape or len(k_TGK) != len(q_THK):
        shapes = ", ".join(str(tuple(x.shape)) for x in (q_THK, k_TGK, v_TGK))
        raise ValueError(f"rope_attention: q, k and v {shapes} do not fit")
    if not launch.is_differentiable() and can_window(q_THK, k_TGK, max_seqlen, max_seqlen, causal) and len(q_THK):
        path = launch.choose_path("rope_attention", *launch.available_paths(q_THK, "triton"))
        if path == "triton":
            return rotated_window_attention(q_THK, k_TGK, v_TGK, table, cu_seqlens, max_seqlen)
    q_THK, k_TGK = rope(q_THK, k_TGK, table)
    return attention(
        q_THK, k_TGK, v_TGK, cu_seqlens, cu_seqlens, max_seqlen_q=max_seqlen, max_seqlen_k=max_seqlen, causal=causal
    )
