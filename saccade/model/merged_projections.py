"""Several projections of one input: stored as one matrix, and with LoRA adapters chosen per row.

Legend: T rows, D inputs, N outputs.

    project(x, q_proj, k_proj, v_proj)     the outputs of each
    project_gated(x, gate_proj, up_proj)   silu(gate(x)) * up(x), if the form of the projections computes it

Stored as one matrix they take one product, unless gradients are needed. A module names its projections of one input in
`merged_projections`; `merge_storage` merges them. The parts keep their names, and their weights are views of the merged
matrix, so that loading, saving and training do not change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from saccade.kernels.grouped_lora import group_tokens
from saccade.kernels.launch import is_differentiable
from saccade.kernels.swiglu import swiglu
from saccade.model.linear import Linear, Projection
from saccade.model.normed_sum import Input, NormedSum


class RowAdapters:
    """The adapter of each row of an input: slots from 1, 0 for the base model."""

    def __init__(self, slot_T: Tensor, num_slots: int) -> None:
        self._slot_T, self._num_slots = slot_T, num_slots
        self.groups = group_tokens(slot_T, num_slots)

    def select(self, index_S: Tensor) -> RowAdapters:
        """The adapters of some of the rows."""
        return RowAdapters(self._slot_T.index_select(0, index_S), self._num_slots)


class Adapters(Protocol):
    """LoRA adapters of the projections of one input: B A x is added to their outputs."""

    low: Projection | None
    """Computes A x of all adapters, stored with the projections as one matrix. None: `add` computes A x."""

    def add(self, y_TN: Tensor, x_TD: Tensor, chosen: RowAdapters) -> Tensor:
        """Add each row's adapter to the outputs, in place."""

    def add_low(self, y_TN: Tensor, low_TM: Tensor, chosen: RowAdapters) -> Tensor:
        """`add` with the outputs of `low` given."""

    def gated_low(self, y_TN: Tensor, low_TM: Tensor, chosen: RowAdapters) -> Tensor:
        """silu(gate) * up of outputs [gate, up] with each row's adapter added."""


class MergedStorage:
    """One matrix that stores several projections of one input."""

    def __init__(self, parts: Sequence[Projection], whole: Projection) -> None:
        self.num_parts = len(parts)
        self.whole: Projection | None = whole
        """Computes the outputs of all parts, in their order. None: the storage of a part was replaced."""
        for part in parts:
            part.merged = self

    def stores(self, parts: Sequence[Projection]) -> bool:
        """Whether it stores exactly these projections."""
        return self.whole is not None and len(parts) == self.num_parts and all(part.merged is self for part in parts)


def project(x: Input, *parts: Projection, chosen: RowAdapters | None = None) -> tuple[Tensor, ...]:
    """The outputs of projections of one input: of one product if they are stored as one matrix and need no gradients.

    `chosen`: the adapter of each row.
    """
    if chosen is not None and parts[0].adapters is not None:
        return _project_adapted(x, parts, parts[0].adapters, chosen)
    whole = _whole_of(parts)
    if whole is not None:
        return _split(whole(x), parts)
    if len(parts) == 1:
        return (parts[0](x),)
    rows = x.normed if isinstance(x, NormedSum) else x
    return tuple(part(rows) for part in parts)


def project_gated(x: Input, gate: Projection, up: Projection, chosen: RowAdapters | None = None) -> Tensor | None:
    """silu(gate(x)) * up(x). None: `Projection.gated` of the next projection computes the activation.

    It is never None with `chosen`, the adapter of each row, and always None with gradients.
    """
    if chosen is None:
        whole = _whole_of((gate, up))
        return None if whole is None else whole.forward_gated(x)
    found = None if gate.adapters is None else _with_low(x, (gate, up), gate.adapters)
    if found is None or gate.adapters is None:
        return swiglu(*project(x, gate, up, chosen=chosen))
    return gate.adapters.gated_low(*found, chosen)


def _whole_of(parts: Sequence[Projection]) -> Projection | None:
    """The projection that computes exactly these parts, if gradients are not needed."""
    merged = parts[0].merged
    return None if merged is None or is_differentiable() or not merged.stores(parts) else merged.whole


def _split(out: Tensor, parts: Sequence[Projection]) -> tuple[Tensor, ...]:
    return torch.split(out, [part.out_features for part in parts], dim=-1)


def _project_adapted(
    x: Input, parts: Sequence[Projection], adapters: Adapters, chosen: RowAdapters
) -> tuple[Tensor, ...]:
    found = _with_low(x, parts, adapters)
    if found is not None:
        return _split(adapters.add_low(*found, chosen), parts)
    rows, whole = x.normed if isinstance(x, NormedSum) else x, _whole_of(parts)
    out = torch.cat([part.linear(rows) for part in parts], dim=-1) if whole is None else whole.linear(rows)
    return _split(adapters.add(out, rows, chosen), parts)


def _with_low(x: Input, parts: Sequence[Projection], adapters: Adapters) -> tuple[Tensor, Tensor] | None:
    """The outputs of projections and of the adapters' `low`, by one product. None: they are stored separately."""
    whole = None if adapters.low is None else _whole_of((*parts, adapters.low))
    if whole is None:
        return None
    out: Tensor = whole(x)
    num_outputs = sum(part.out_features for part in parts)
    return out[:, :num_outputs], out[:, num_outputs:]


# ------------------------------------------------------------------ merging


def merge_storage(model: nn.Module) -> None:
    """Store the projections of one input as one matrix each: without gradients they take fewer and larger products.

    At most one group is held twice meanwhile. Nothing depends on it but speed.
    """
    for module in model.modules():
        for names in getattr(module, "merged_projections", ()):
            parts: list[Projection] = [module.get_submodule(name) for name in names]  # type: ignore[misc]
            form = type(parts[0])
            if not parts[0].is_merged and all(type(part) is form for part in parts):
                whole = form.merge(parts)
                if whole is not None:
                    MergedStorage(parts, whole)


def merge_with_rows(parts: Sequence[Projection], rows_MD: Tensor) -> tuple[Projection, Tensor] | None:
    """Store projections of one input and a further one, of weight `rows_MD` without bias, as one matrix.

    Returns the further projection, and its weight there. None: this form cannot be merged; nothing has changed.
    """
    if not all(type(part) is Linear for part in parts):
        return None
    has_bias = cast(Linear, parts[0]).bias is not None
    with torch.device("meta"):
        further = Linear(rows_MD.shape[1], len(rows_MD), bias=has_bias)
    further.weight = nn.Parameter(rows_MD, requires_grad=False)
    if has_bias:
        further.bias = nn.Parameter(rows_MD.new_zeros(len(rows_MD)), requires_grad=False)
    together = [*(cast(Linear, part) for part in parts), further]
    whole = Linear.merge(together)
    if whole is None:
        return None
    MergedStorage(together, whole)
    return further, further.weight.detach()
