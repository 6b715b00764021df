"""Projections whose weights are prepacked for a CPU: for inference, without gradients, export or other devices."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from torch import Tensor, nn

from saccade.kernels.linear import can_prepack, linear, prepack
from saccade.model.linear import Linear, Projection
from saccade.model.merged_projections import MergedStorage
from saccade.model.normed_sum import Input


class PrepackedLinear(Projection):
    """A weight in oneDNN's blocks."""

    def __init__(self, layer: Linear) -> None:
        super().__init__(layer.in_features, layer.out_features)
        self._stored_shape, self.shard = layer.stored_shape, layer.shard
        self.weight = nn.Parameter(prepack(layer.weight), requires_grad=False)
        self.bias = layer.bias

    @property
    def stored_shape(self) -> tuple[int, int]:
        """See `Projection`."""
        return self._stored_shape

    def linear(self, x: Tensor) -> Tensor:
        """See `Projection`."""
        return linear(x, self.weight, self.bias)

    def forward_into(self, x: Input, out: Tensor) -> Tensor:
        """See `Projection`. oneDNN writes to memory of its own."""
        return self.forward(x)


class PrepackedPart(Projection):
    """Some outputs of a prepacked weight. Alone it costs a product of all of them; `project` computes them together."""

    def __init__(self, layer: Linear, first: int) -> None:
        """`first`: where its outputs begin in those of the whole."""
        super().__init__(layer.in_features, layer.out_features)
        self._first, self._stored_shape, self.shard = first, layer.stored_shape, layer.shard

    @property
    def stored_shape(self) -> tuple[int, int]:
        """See `Projection`."""
        return self._stored_shape

    def linear(self, x: Tensor) -> Tensor:
        """See `Projection`."""
        assert self.merged is not None, "the parts are merged as soon as they are made"
        assert self.merged.whole is not None, "a prepacked model stays where it is"
        return self.merged.whole.linear(x)[..., self._first : self._first + self.out_features]


def prepack_storage(model: nn.Module) -> None:
    """Replace plain projections by prepacked ones if this CPU has kernels for them; no effect elsewhere.

    A tied head becomes a copy of the embedding, which is looked up by row. Each weight is freed as soon as it is
    packed.
    """
    for module in model.modules():
        for names in getattr(module, "merged_projections", ()):
            _prepack_merged(module, names)
        for name, layer in list(module.named_children()):
            if type(layer) is Linear and can_prepack(layer.weight):
                setattr(module, name, PrepackedLinear(layer))


def _prepack_merged(module: nn.Module, names: Sequence[str]) -> None:
    layers: list[Any] = [module.get_submodule(name) for name in names]
    merged: MergedStorage | None = layers[0].merged
    if merged is None or type(merged.whole) is not Linear or not can_prepack(merged.whole.weight):
        return
    starts = accumulate((layer.out_features for layer in layers[:-1]), initial=0)
    parts = [PrepackedPart(layer, first) for layer, first in zip(layers, starts, strict=True)]
    MergedStorage(parts, PrepackedLinear(merged.whole))
    for name, part in zip(names, parts, strict=True):
        setattr(module, name, part)
