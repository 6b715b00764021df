"""The paged KV cache on the device, and attention of a step's tokens over it.

Legend: T tokens of the step, R requests, H query heads, G key/value heads, K head dim, L layers, N pages,
P tokens per page, W pages of the longest request.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.device import to_device
from saccade.engine.config import KVFormat
from saccade.kernels.paged_attention import DecodePlan, GatherPlan, NewTokens, paged_attention
from saccade.kernels.rope import CosSin
from saccade.model.config import LanguageConfig

_FORMATS = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}


class KVShape(NamedTuple):
    """Model sizes that determine the size of a KV cache."""

    num_layers: int
    num_kv_heads: int
    head_dim: int


def bytes_per_page(config: LanguageConfig | KVShape, page_size: int, kv_format: KVFormat, dtype: torch.dtype) -> int:
    """Bytes of one page, over all layers."""
    rows = config.num_layers * 2 * config.num_kv_heads * page_size
    if kv_format == "model":
        return rows * config.head_dim * dtype.itemsize
    return rows * (config.head_dim * _FORMATS[kv_format].itemsize + torch.float32.itemsize)


class KVCache:
    """Keys and values of all pages. The scheduler decides which request owns which page."""

    def __init__(
        self, config: LanguageConfig, *, num_pages: int, page_size: int, kv_format: KVFormat, dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        self.page_size, self.num_pages = page_size, num_pages
        shape = (config.num_layers, 2, num_pages, config.num_kv_heads, page_size, config.head_dim)
        # Zeros, not uninitialized memory: unused slots of a page are read and then masked, and 0 * NaN is NaN.
        self.entries = torch.zeros(shape, dtype=_FORMATS.get(kv_format, dtype), device=device)
        self.scales = None if kv_format == "model" else torch.zeros(shape[:-1], dtype=torch.float32, device=device)

    @property
    def num_slots(self) -> int:
        """Number of KV slots, one per token. A token written to slot `num_slots` is not stored."""
        return self.num_pages * self.page_size

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole pages (source, target); no page is both."""
        device = self.entries.device
        sources, targets = (to_device(torch.tensor(column).numpy(), device) for column in zip(*pairs, strict=True))
        for tensor in (self.entries, self.scales):
            if tensor is not None:
                flat = tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor  # fp8 has no index kernels
                flat.index_copy_(2, targets, flat.index_select(2, sources))


@dataclass(frozen=True, eq=False)
class PagedAttention:
    """An `AttentionContext` that writes KV of new tokens into pages and attends over all tokens of their request."""

    cache: KVCache
    angles: CosSin
    slot_mapping: Tensor
    """[T]: KV slot of each token."""
    page_table: Tensor
    """[slots, W] int32."""
    slots: Tensor
    """[R] int32: request slot of each request, its row of the page table."""
    cu_seqlens: Tensor
    """[R + 1] int32: cumulative new tokens."""
    context_lengths: Tensor
    """[R] int32: tokens including the new ones."""
    num_decode: int
    """Number of leading requests with at most one new token each."""
    max_new: int
    """Upper bound of new tokens per request, known on the host."""
    max_context: int
    """Upper bound of context lengths, known on the host."""
    decode_plan: DecodePlan | None
    """How decode attention is divided, shared by all layers. None: each layer computes it."""
    gather_plan: GatherPlan | None = None
    """On a CPU: where tokens are stored and pages are read, shared by all layers."""
    window: int | None = None
    """Preceding tokens that a token attends to; None: all. The plans have the same window."""

    def __call__(self, layer: int, q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor) -> Tensor:
        """See `AttentionContext`. `q` and `k` may be rotated in place."""
        keys, values = self.cache.entries[layer]
        key_scales, value_scales = (None, None) if self.cache.scales is None else self.cache.scales[layer]
        return paged_attention(
            q_THK, keys, values, self.page_table, self.cu_seqlens, self.context_lengths, max_seqlen_q=self.max_new,
            num_decode=self.num_decode, max_context_length=self.max_context, table_rows_R=self.slots,
            decode_plan=self.decode_plan, gather_plan=self.gather_plan, key_scales_NGP=key_scales,
            value_scales_NGP=value_scales, window=self.window,
            new=NewTokens(k_TGK, v_TGK, self.angles, self.slot_mapping),
        )  # fmt: skip


def pages_for(num_tokens: int, page_size: int) -> int:
    """Pages that hold this many tokens."""
    return math.ceil(num_tokens / page_size)
