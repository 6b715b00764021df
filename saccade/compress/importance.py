"""How much the units of a model matter, measured on calibration samples.

Legend: T tokens, D inputs, C channels of an MLP, G key/value heads.

A unit is a channel of an MLP, a key/value head with the query heads that share it, or a layer. The first two are
inputs x_TD of a projection (`down_proj`, `o_proj`):

    taylor       sum over tokens of (x * d loss / d x)^2: the first-order change of the loss when the input of one token
                 is removed, squared; changes are not added up over tokens first, since in a trained model they cancel
    activation   sum over tokens of x^2

Changes of the inputs of a head are added up before they are squared. A layer's importance is the loss of the model
without it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from saccade.compress.observed_linear import replace_projection
from saccade.model.linear import Linear, Projection, projections
from saccade.model.vlm import VLM
from saccade.processor.inputs import ModelInputs, count_labels, next_token_labels

Measure = Literal["taylor", "activation"]


class MeasuredLinear(Projection):
    """A projection that measures its inputs, forward and backward."""

    def __init__(self, layer: Linear, group_size: int) -> None:
        """`group_size`: inputs that are removed together."""
        super().__init__(layer.in_features, layer.out_features)
        self.layer, self._group_size = layer, group_size
        self.squares_D = torch.zeros(layer.in_features)
        """Sum of x^2 over the tokens so far."""
        self.changes_U = torch.zeros(layer.in_features // group_size)
        """Sum of the squared changes of the loss, for each unit."""

    def linear(self, x: Tensor) -> Tensor:
        """See `Projection`."""
        rows_TD = x.detach().float().flatten(0, -2)
        self.squares_D = self.squares_D.to(x.device) + rows_TD.square().sum(0)
        if torch.is_grad_enabled():
            x = x.detach().requires_grad_() if not x.requires_grad else x.view_as(x)
            x.register_hook(  # type: ignore[no-untyped-call]
                lambda slope: self._add(rows_TD * slope.float().view_as(rows_TD))
            )
        return self.layer.linear(x)

    def _add(self, change_TD: Tensor) -> None:
        change_TU = change_TD.unflatten(1, (-1, self._group_size)).sum(2)  # type: ignore[no-untyped-call]
        self.changes_U = self.changes_U.to(change_TU.device) + change_TU.square().sum(0)


@contextmanager
def measured(model: VLM, names: Sequence[str], group_size: int = 1) -> Iterator[dict[str, MeasuredLinear]]:
    """The model with measured inputs of these projections, until the end of this context."""
    layers: dict[str, Any] = {name: model.get_submodule(name) for name in names}
    found = {name: MeasuredLinear(layer, group_size) for name, layer in layers.items()}
    for name, layer in found.items():
        replace_projection(model, name, layer)
    try:
        yield found
    finally:
        for name, layer in layers.items():
            replace_projection(model, name, layer)


def loss_of(model: VLM, inputs: ModelInputs) -> tuple[Tensor, int]:
    """Sum of the cross entropy over the loss tokens of a packed sequence, and their number. Without full logits."""
    labels = next_token_labels(inputs)
    count, on_device = count_labels(labels), inputs.to(model.device)
    hidden_TD = model.hidden_states(on_device)
    return model.head.cross_entropy(hidden_TD, labels.to(model.device), count=1.0, num_labels=count), count


@torch.no_grad()
def mean_loss(model: VLM, batches: Sequence[ModelInputs]) -> float:
    """Mean cross entropy over the loss tokens of all batches."""
    found = [loss_of(model, inputs) for inputs in batches]
    return sum(float(loss) for loss, _ in found) / max(1, sum(count for _, count in found))


def input_importance(
    model: VLM, names: Sequence[str], batches: Sequence[ModelInputs], measure: Measure, group_size: int = 1
) -> dict[str, Tensor]:
    """Importance of the inputs of each projection, [D / group_size]: inputs of a group are removed together."""
    is_taylor = measure == "taylor"
    with measured(model, names, group_size) as layers:
        for inputs in batches:
            with torch.set_grad_enabled(is_taylor):
                loss, _ = loss_of(model, inputs)
            if is_taylor:
                loss.backward()  # type: ignore[no-untyped-call]
        if is_taylor:
            return {name: layer.changes_U.cpu() for name, layer in layers.items()}
        return {name: layer.squares_D.view(-1, group_size).sum(1).cpu() for name, layer in layers.items()}


def layer_importance(
    model: VLM, layers: Sequence[nn.Module], batches: Sequence[ModelInputs], protected: set[int]
) -> list[float]:
    """Loss of the model without each layer; infinite for protected ones."""
    losses = []
    for number, layer in enumerate(layers):
        if number in protected:
            losses.append(float("inf"))
            continue
        with skipped(layer):
            losses.append(mean_loss(model, batches))
    return losses


@contextmanager
def skipped(layer: Any) -> Iterator[None]:
    """The layer passes the residual stream on, until the end of this context."""
    layer.forward = lambda x_TD, update_TD, *args, **kwargs: (x_TD, update_TD)
    try:
        yield
    finally:
        del layer.forward


@dataclass(frozen=True)
class BlockLayers:
    """Names of the projections of one transformer layer whose inputs are units."""

    mlp_out: str
    attention_out: str
    mlp_in: tuple[str, ...]


def block_layers(model: VLM, prefix: str, block: nn.Module) -> BlockLayers:
    """The names of the layer `prefix`: the last projection of its MLP reads channels, that of its attention heads."""
    mlp = [name for name, _ in projections(block.get_submodule("mlp"))]
    attention = "attn" if hasattr(block, "attn") else "self_attn"
    names = [name for name, _ in projections(block.get_submodule(attention))]
    *first, last = (f"{prefix}.mlp.{name}" for name in mlp)
    return BlockLayers(last, f"{prefix}.{attention}.{names[-1]}", tuple(first))
