"""Keys and values of all requests on the device, in pages, and how a step's tokens attend to them.

Legend: T tokens of the step, R requests that read pages, E fresh prompts, H query heads, G key/value heads, K head dim, L layers,
        N pages, P tokens per page, W pages of the longest request.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from saccade.device import to_device
from saccade.engine.config import KVFormat
from saccade.kernels.attention import attention
from saccade.kernels.paged_attention import paged_attention, write_pages
from saccade.kernels.rope import AngleTable
from saccade.model.config import LanguageConfig

_FORMATS = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}


def bytes_per_page(config: LanguageConfig, page_size: int, kv_format: KVFormat, dtype: torch.dtype) -> int:
    """What one page takes, over all layers."""
    rows = config.num_layers * 2 * config.num_kv_heads * page_size
    if kv_format == "model":
        return rows * config.head_dim * dtype.itemsize
    return rows * (config.head_dim * _FORMATS[kv_format].itemsize + torch.float32.itemsize)


class KVCache:
    """The pages. Which request has which is the scheduler's business."""

    def __init__(
        self, config: LanguageConfig, *, num_pages: int, page_size: int, kv_format: KVFormat, dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        self.page_size, self.num_pages = page_size, num_pages
        shape = (config.num_layers, 2, num_pages, config.num_kv_heads, page_size, config.head_dim)
        # Zeros, not whatever lay there: a page's unused slots are read and then masked, and 0 * NaN is NaN.
        self.entries = torch.zeros(shape, dtype=_FORMATS.get(kv_format, dtype), device=device)
        self.scales = None if kv_format == "model" else torch.zeros(shape[:-1], dtype=torch.float32, device=device)

    @property
    def num_slots(self) -> int:
        """Tokens it holds. A token written to this slot is not stored."""
        return self.num_pages * self.page_size

    def of_layer(self, layer: int) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Its keys and values, and the scales of both."""
        key_scales, value_scales = (None, None) if self.scales is None else self.scales[layer]
        keys, values = self.entries[layer]
        return keys, values, key_scales, value_scales

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole pages (from, to); no page is both."""
        device = self.entries.device
        sources, targets = (to_device(torch.tensor(column).numpy(), device) for column in zip(*pairs, strict=True))
        for tensor in (self.entries, self.scales):
            if tensor is not None:
                flat = tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor  # fp8 has no index kernels
                flat.index_copy_(2, targets, flat.index_select(2, sources))


@dataclass(frozen=True, eq=False)
class FreshPrompts:
    """The requests at the end of a step that begin in it: every key they see is made in it, so they read no pages.

    Only beside a cache that keeps keys and values as they are made: through a compressed one the rest of the same prompt, computed in
    a later step, would see others.
    """

    first_token: int
    """Of the step's tokens: this one and all behind it are theirs."""
    cu_seqlens: Tensor
    """[E + 1] int32: cumulative tokens, from zero."""
    longest: int
    """Bound known on the host, by which the kernel is chosen."""

    def attend(self, q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor) -> Tensor:
        """[T, H, K] of their own tokens, from these tokens' turned queries and keys, and values."""
        return attention(
            q_THK, k_TGK, v_TGK, self.cu_seqlens, self.cu_seqlens, max_seqlen_q=self.longest, max_seqlen_k=self.longest,
            causal=True,
        )  # fmt: skip


def fresh_at_end(cu_seqlens: Tensor, num_tokens: int, lengths: Sequence[int]) -> FreshPrompts | None:
    """The last requests of a step of `num_tokens`, of these lengths; None if there are none."""
    if not lengths:
        return None
    first_token = num_tokens - sum(lengths)
    return FreshPrompts(first_token, cu_seqlens[-len(lengths) - 1 :] - first_token, max(lengths))


@dataclass(frozen=True, eq=False)
class PagedAttention:
    """An `AttentionContext`: new tokens go into the pages and attend to all of their request's.

    Fresh prompts attend to the step's own instead: 13 prompts of 640 tokens reach about 100 TFLOP/s on an H200 if they read pages, 380
    and more if they do not (kernels/attention.py).
    """

    cache: KVCache
    angles: AngleTable
    slots: Tensor
    """[T]: where each token's key and value go."""
    page_table: Tensor
    """[R, W] int32."""
    cu_seqlens: Tensor
    """[R + 1] int32: cumulative new tokens."""
    context_lengths: Tensor
    """[R] int32: tokens with the new ones."""
    max_new: int
    """Bounds known on the host, which shape the launch."""
    max_context: int
    fresh: FreshPrompts | None = None
    """Their tokens come behind those of the R requests, and are not counted above."""

    def __post_init__(self) -> None:
        assert self.fresh is None or self.cache.scales is None, "fresh prompts would see other keys than the pages hold"

    def __call__(self, layer: int, q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor) -> Tensor:
        """See `AttentionContext`. `q` and `k` are turned where they lie."""
        pages = self.cache.of_layer(layer)
        write_pages(q_THK, k_TGK, v_TGK, self.angles, self.slots, *pages)
        if self.fresh is None:
            return self._read_pages(q_THK, *pages)
        start = self.fresh.first_token
        fresh_THK = self.fresh.attend(q_THK[start:], k_TGK[start:], v_TGK[start:])
        return fresh_THK if start == 0 else torch.cat([self._read_pages(q_THK[:start], *pages), fresh_THK])

    def _read_pages(
        self, q_THK: Tensor, keys: Tensor, values: Tensor, key_scales: Tensor | None, value_scales: Tensor | None
    ) -> Tensor:
        return paged_attention(
            q_THK, keys, values, self.page_table, self.cu_seqlens, self.context_lengths, max_seqlen_q=self.max_new,
            max_context_length=self.max_context, key_scales_NGP=key_scales, value_scales_NGP=value_scales,
        )  # fmt: skip


def pages_for(num_tokens: int, page_size: int) -> int:
    """Pages that hold this many tokens."""
    return math.ceil(num_tokens / page_size)
