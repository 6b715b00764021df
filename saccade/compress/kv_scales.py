"""Static scales of keys and values, for engines whose KV cache has 8 bits and one scale per layer.

Keys are measured as they are cached: after RoPE. A scale is the largest magnitude over the calibration samples divided
by half of the range, as compressed-tensors defines it; its tensors are `k_scale` and `v_scale` of a layer's attention.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from saccade.compress.block_runner import Call
from saccade.model.attention import PackedAttention
from saccade.model.quantization import KVCacheForm

ATTENTION = "self_attn"
"""The attention of a decoder layer, by its name in it."""
KV_SCALES = (".k_scale", ".v_scale")
_HALF_RANGES: dict[KVCacheForm, float] = {"fp8": 448.0, "int8": 127.5}


class KVObserver:
    """The largest key and value of one decoder layer."""

    def __init__(self) -> None:
        self._largest = {"k": torch.zeros(()), "v": torch.zeros(())}

    def observed(self, call: Call) -> Call:
        """The call with attention that is observed."""
        args = [ObservedAttention(one, self) if isinstance(one, PackedAttention) else one for one in call.args]
        kwargs = {
            name: ObservedAttention(one, self) if isinstance(one, PackedAttention) else one
            for name, one in call.kwargs.items()
        }
        return replace(call, args=tuple(args), kwargs=kwargs)

    def add(self, k_TGK: Tensor, v_TGK: Tensor) -> None:
        """Take the keys, after RoPE, and values of one batch in."""
        for name, rows in (("k", k_TGK), ("v", v_TGK)):
            self._largest[name] = torch.maximum(self._largest[name].to(rows.device), rows.detach().float().abs().amax())

    def scales(self, form: KVCacheForm) -> dict[str, Tensor]:
        """`k_scale` and `v_scale`, [1] fp32."""
        return {
            f"{name}_scale": (largest / _HALF_RANGES[form]).clamp_min(1e-6).reshape(1)
            for name, largest in self._largest.items()
        }


class ObservedAttention:
    """An `AttentionContext` whose keys and values are observed."""

    def __init__(self, context: PackedAttention, observer: KVObserver) -> None:
        self._context, self._observer = context, observer

    def __call__(self, layer: int, q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor) -> Tensor:
        """See `AttentionContext`."""
        self._observer.add(self._context.rotate(q_THK.clone(), k_TGK.clone())[1], v_TGK)
        return self._context(layer, q_THK, k_TGK, v_TGK)


def kv_cache_scheme(form: KVCacheForm) -> dict[str, Any]:
    """The `kv_cache_scheme` of a folder with these scales."""
    kind = "float" if form == "fp8" else "int"
    return {"num_bits": 8, "type": kind, "symmetric": True, "strategy": "tensor", "dynamic": False}
