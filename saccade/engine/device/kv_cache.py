"""Memory of the paged KV cache on the device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from saccade.device import lazy_zeros, to_device
from saccade.engine.config import KVFormat
from saccade.model.config import LanguageConfig
from saccade.model.linear import Projection
from saccade.model.vlm import VLM

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


def kv_shape(model: VLM) -> KVShape:
    """The KV cache of a model, or of the heads that this rank has of a divided one."""
    language, keys = model.config.language, model.language.layers[0].get_submodule("self_attn.k_proj")
    assert isinstance(keys, Projection), "keys are a projection"
    return KVShape(language.num_layers, keys.out_features // language.head_dim, language.head_dim)


class KVCache:
    """Keys and values of all pages. The scheduler decides which request owns which page."""

    def __init__(
        self, config: KVShape, *, num_pages: int, page_size: int, kv_format: KVFormat, dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        self.page_size, self.num_pages, self.num_kv_heads = page_size, num_pages, config.num_kv_heads
        self.num_slots = num_pages * page_size
        """Number of KV slots, one per token. A token written to slot `num_slots` is not stored."""
        shape = (config.num_layers, 2, num_pages, config.num_kv_heads, page_size, config.head_dim)
        # Zeros, not uninitialized memory: unused slots of a page are read and then masked, and 0 * NaN is NaN.
        self.entries = lazy_zeros(shape, _FORMATS.get(kv_format, dtype), device)
        self.scales = None if kv_format == "model" else lazy_zeros(shape[:-1], torch.float32, device)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole pages (source, target); no page is both."""
        device = self.entries.device
        sources, targets = (to_device(torch.tensor(column).numpy(), device) for column in zip(*pairs, strict=True))
        for tensor in (self.entries, self.scales):
            if tensor is not None:
                flat = tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor  # fp8 has no index kernels
                flat.index_copy_(2, targets, flat.index_select(2, sources))


def pages_for(num_tokens: int, page_size: int) -> int:
    """Pages that hold this many tokens."""
    return math.ceil(num_tokens / page_size)
