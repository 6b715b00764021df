"""Attention contexts of the decoder: which tokens attend to which, passed to `forward` explicitly.

Legend: T new tokens, S all tokens, H query heads, G key/value heads, K head dim.

A layer computes queries, keys and values of the new tokens and calls its `AttentionContext`, which applies RoPE and
attends. Layers do not know whether there is a cache:

    PackedAttention   all tokens of all conversations at once (training, scoring)
    CachedAttention   new tokens after cached ones, in plain tensors (`generate`)
"""

from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from saccade.kernels.attention import attention
from saccade.kernels.rope import CosSin, rope


class AttentionContext(Protocol):
    """RoPE and attention of one decoder layer: q [T, H, K], k and v [T, G, K] before RoPE to [T, H, K]."""

    def __call__(self, layer: int, q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor) -> Tensor:
        """Attend in layer `layer`."""
        ...


class PackedAttention:
    """Causal attention within each conversation of a packed sequence."""

    def __init__(self, cos_sin: CosSin, cu_seqlens: Tensor, max_seqlen: int, window: int | None = None) -> None:
        """`window`: earlier tokens that a token attends to; None: all."""
        self._cos_sin, self._cu_seqlens, self._max_seqlen, self._window = cos_sin, cu_seqlens, max_seqlen, window

    def rotate(self, q_THK: Tensor, k_TGK: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys with RoPE, as a KV cache holds the latter."""
        return rope(q_THK, k_TGK, self._cos_sin)

    def __call__(self, layer: int, q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor) -> Tensor:
        """See `AttentionContext`."""
        q_THK, k_TGK = self.rotate(q_THK, k_TGK)
        return attention(
            q_THK, k_TGK, v_TGK, self._cu_seqlens, self._cu_seqlens,
            max_seqlen_q=self._max_seqlen, max_seqlen_k=self._max_seqlen, causal=True, window=self._window,
        )  # fmt: skip


class ContiguousKVCache:
    """Keys and values of every conversation and layer: one tensor with `capacity` tokens each, without paging."""

    def __init__(
        self, *, num_layers: int, num_conversations: int, capacity: int, num_kv_heads: int, head_dim: int,
        device: torch.device, dtype: torch.dtype,
    ) -> None:  # fmt: skip
        shape = (num_layers, 2, num_conversations, capacity, num_kv_heads, head_dim)
        self.entries = torch.empty(shape, device=device, dtype=dtype)
        self.lengths = [0] * num_conversations
        """Cached tokens of each conversation."""


class CachedAttention:
    """Causal attention of new tokens to the cached and new tokens of their conversation; appends them to the cache."""

    def __init__(
        self, cache: ContiguousKVCache, cos_sin: CosSin, cu_seqlens: Tensor, window: int | None = None
    ) -> None:
        self._cache, self._cos_sin, self._cu_seqlens_q, self._window = cache, cos_sin, cu_seqlens, window
        new = [end - start for start, end in pairwise(cu_seqlens.tolist())]
        before, cache.lengths = cache.lengths, [old + n for old, n in zip(cache.lengths, new, strict=True)]
        device = cu_seqlens.device
        self._new_slots = _slots(before, cache.lengths, device)
        self._all_slots = _slots([0] * len(new), cache.lengths, device)
        self._cu_seqlens_k = torch.tensor([0, *cache.lengths], device=device).cumsum(0).int()
        self._max_new, self._max_all = max(new), max(cache.lengths)

    def __call__(self, layer: int, q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor) -> Tensor:
        """See `AttentionContext`."""
        q_THK, k_TGK = rope(q_THK, k_TGK, self._cos_sin)
        keys, values = self._cache.entries[layer]
        keys[self._new_slots], values[self._new_slots] = k_TGK, v_TGK
        return attention(
            q_THK, keys[self._all_slots], values[self._all_slots], self._cu_seqlens_q, self._cu_seqlens_k,
            max_seqlen_q=self._max_new, max_seqlen_k=self._max_all, causal=True, window=self._window,
        )  # fmt: skip


def _slots(starts: list[int], ends: list[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Indices (conversation, token) of tokens starts[i] .. ends[i] of every conversation i, packed."""
    conversations = [i for i, (start, end) in enumerate(zip(starts, ends, strict=True)) for _ in range(start, end)]
    tokens = [token for start, end in zip(starts, ends, strict=True) for token in range(start, end)]
    return torch.tensor(conversations, device=device), torch.tensor(tokens, device=device)
