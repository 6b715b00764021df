"""Projections whose weights are prepacked for a CPU (`kernels/linear.py`): inference alone, without gradients, export or other devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from saccade.kernels.linear import can_prepack, linear, prepack
from saccade.model.linear import Input, Linear, Projection


class PrepackedLinear(Projection):
    """A weight in oneDNN's blocks."""

    def __init__(self, layer: Linear) -> None:
        super().__init__(layer.in_features, layer.out_features)
        self._stored_shape = layer.stored_shape
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

    def __init__(self, whole: tuple[PrepackedLinear], layer: Linear, first: int) -> None:
        super().__init__(layer.in_features, layer.out_features)
        self._whole, self._first, self._stored_shape = whole, first, layer.stored_shape

    @property
    def stored_shape(self) -> tuple[int, int]:
        """See `Projection`."""
        return self._stored_shape

    def linear(self, x: Tensor) -> Tensor:
        """See `Projection`."""
        assert self._whole is not None, "a prepacked model stays where it is"
        return self._whole[0].linear(x)[..., self._first : self._first + self.out_features]


def prepack_storage(model: nn.Module) -> None:
    """Replace plain projections by prepacked ones where this CPU has kernels for them; no effect elsewhere.

    A tied head becomes a copy of the embedding, which is looked up by row. Each weight is freed as soon as it is packed.
    """
    for module in model.modules():
        for names in getattr(module, "merged_projections", ()):
            _prepack_merged(module, names)
        for name, layer in list(module.named_children()):
            if type(layer) is Linear and can_prepack(layer.weight):
                setattr(module, name, PrepackedLinear(layer))


def _prepack_merged(module: nn.Module, names: Sequence[str]) -> None:
    shared = module.get_submodule(names[0])._whole
    if not isinstance(shared, tuple) or type(shared[0]) is not Linear or not can_prepack(shared[0].weight):
        return
    whole, first = (PrepackedLinear(shared[0]),), 0
    for name in names:
        layer: Any = module.get_submodule(name)
        setattr(module, name, PrepackedPart(whole, layer, first))
        first += layer.out_features
