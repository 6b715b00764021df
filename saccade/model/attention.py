"""What attends to what in the decoder: an explicit argument of `forward`, not a global.

Legend: T new tokens, S all tokens, H query heads, G key/value heads, K head dim.

A layer computes queries, keys and values of the new tokens and calls its `AttentionContext`, which turns them by their
positions and lets them attend. The layers do not know whether there is a cache:

    PackedAttention   all tokens of all conversations at once (training, scoring)
    CachedAttention   new tokens behind those computed before, kept as plain tensors (`generate`)
"""

from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from saccade.kernels.attention import attention
from saccade.kernels.rope import CosSin, rope


class AttentionContext(Protocol):
    """Rotate, attend: [T, H, K] from the unrotated q [T, H, K], k and v [T, G, K] of decoder layer `layer`."""

    def __call__(self, layer: int, q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor) -> Tensor:
        """See the class."""
        ...


class PackedAttention:
    """Each conversation of the row attends to itself, causally."""

    def __init__(self, angles: CosSin, cu_seqlens: Tensor, max_seqlen: int) -> None:
        self._angles, self._cu_seqlens, self._max_seqlen = angles, cu_seqlens, max_seqlen

    def __call__(self, layer: int, q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor) -> Tensor:
        """See `AttentionContext`; every layer sees the same row."""
        q_THK, k_TGK = rope(q_THK, k_TGK, self._angles)
        return attention(
            q_THK, k_TGK, v_TGK, self._cu_seqlens, self._cu_seqlens,
            max_seqlen_q=self._max_seqlen, max_seqlen_k=self._max_seqlen, causal=True,
        )  # fmt: skip


class KVCache:
    """Keys and values of every conversation and layer, as one tensor with room for `capacity` tokens each. No paging."""

    def __init__(
        self, *, num_layers: int, num_conversations: int, capacity: int, num_kv_heads: int, head_dim: int,
        device: torch.device, dtype: torch.dtype,
    ) -> None:  # fmt: skip
        shape = (num_layers, 2, num_conversations, capacity, num_kv_heads, head_dim)
        self.entries = torch.empty(shape, device=device, dtype=dtype)
        self.lengths = [0] * num_conversations
        """Tokens held of each conversation."""


class CachedAttention:
    """Each conversation's new tokens attend to its cached ones and, causally, to each other; they join the cache."""

    def __init__(self, cache: KVCache, angles: CosSin, cu_seqlens: Tensor) -> None:
        self._cache, self._angles, self._cu_seqlens_q = cache, angles, cu_seqlens
        new = [end - start for start, end in pairwise(cu_seqlens.tolist())]
        before, cache.lengths = cache.lengths, [old + n for old, n in zip(cache.lengths, new, strict=True)]
        device = cu_seqlens.device
        self._new_rows = _rows(before, cache.lengths, device)
        self._all_rows = _rows([0] * len(new), cache.lengths, device)
        self._cu_seqlens_k = torch.tensor([0, *cache.lengths], device=device).cumsum(0).int()
        self._max_new, self._max_all = max(new), max(cache.lengths)

    def __call__(self, layer: int, q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor) -> Tensor:
        """See `AttentionContext`."""
        q_THK, k_TGK = rope(q_THK, k_TGK, self._angles)
        keys, values = self._cache.entries[layer]
        keys[self._new_rows], values[self._new_rows] = k_TGK, v_TGK
        return attention(
            q_THK, keys[self._all_rows], values[self._all_rows], self._cu_seqlens_q, self._cu_seqlens_k,
            max_seqlen_q=self._max_new, max_seqlen_k=self._max_all, causal=True,
        )  # fmt: skip


def _rows(starts: list[int], ends: list[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """(conversation, slot) of the tokens starts[i] .. ends[i] of every conversation i, packed."""
    conversations = [i for i, (start, end) in enumerate(zip(starts, ends, strict=True)) for _ in range(start, end)]
    slots = [slot for start, end in zip(starts, ends, strict=True) for slot in range(start, end)]
    return torch.tensor(conversations, device=device), torch.tensor(slots, device=device)
