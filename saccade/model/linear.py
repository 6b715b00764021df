"""The projections: every product with a learned matrix, in vision tower, projector, decoder and head.

Legend: T tokens, D inputs, N outputs.

A caller says what is computed. The module owns the storage of its weight and chooses the kernel:

    linear(x)                                x W' + bias
    linear(norm.add_norm(x, residual).input)   rms_norm(x + residual) W' + bias
    linear.gated(gate, up)                   (silu(gate) * up) W' + bias
    project(x, q_proj, k_proj, v_proj)       several outputs of one input
    linear.cross_entropy(x, labels, ...)     the loss of a head, without its logits

Storage forms are subclasses of `Projection`: `Linear` (plain, here), `PrepackedLinear` (inference on a CPU, `prepacked_linear.py`) and
`LoraLinear` (training, `lora_linear.py`), `FakeQuantizedLinear` (`fake_quantized_linear.py`), `Linear8bit` and `Linear4bit` (`quantized_linear.py`). A form implements `linear`; everything else then works unfused, and a form overrides what it has a fused kernel for.

Projections that read the same input can be stored as one matrix (`merge_storage`): one larger product computes all of their outputs
where no gradients are needed. The parts keep their names and are views of it, so that loading, saving and training do not change.

Nothing else in the package reads a projection's weight, except loading, export and the optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from saccade.kernels.grouped_lora import group_tokens
from saccade.kernels.launch import is_differentiable
from saccade.kernels.linear_cross_entropy import linear_cross_entropy
from saccade.kernels.rms_norm import add_rms_norm, rms_norm
from saccade.kernels.small_linear import norm_gated_linear, norm_linear, norm_linear_into, small_linear
from saccade.kernels.swiglu import swiglu, swiglu_linear

ALIGNMENT = 8
"""Rows of half-precision matrices must start at multiples of 16 bytes, or cuBLAS chooses pre-Hopper kernels: 36864 x 1280 x 3420
runs at 258 TFLOP/s, with 3424 at 731 (H200)."""


# ------------------------------------------------------------------ inputs


class NormedSum:
    """rms_norm(x + residual) as the input of projections, and the sum itself.

    With gradients both are computed at once. Without, they are left to the kernel of the first projection that reads them.
    """

    def __init__(self, x_TD: Tensor, residual_TD: Tensor | None, weight_D: Tensor, eps: float) -> None:
        self.x_TD, self.residual_TD, self.weight_D, self.eps = x_TD, residual_TD, weight_D, eps
        self._normed_TD: Tensor | None = None
        self._total_TD: Tensor | None = x_TD if residual_TD is None else None
        if is_differentiable():
            self._compute()

    def _compute(self) -> Tensor:
        if self._normed_TD is None:
            if self.residual_TD is None:
                self._normed_TD = rms_norm(self.x_TD, self.weight_D, self.eps)
            else:
                self._normed_TD, self._total_TD = add_rms_norm(self.x_TD, self.residual_TD, self.weight_D, self.eps)
        return self._normed_TD

    @property
    def input(self) -> Tensor | NormedSum:
        """What projections take: the norm if it is computed, else this object."""
        return self if self._normed_TD is None else self._normed_TD

    @property
    def normed(self) -> Tensor:
        """The norm."""
        return self._compute()

    @property
    def total(self) -> Tensor:
        """x + residual. After a projection has read the norm, it costs nothing."""
        if self._total_TD is None:
            self._compute()
        assert self._total_TD is not None, "the sum is computed with the norm"
        return self._total_TD

    @total.setter
    def total(self, total_TD: Tensor) -> None:
        self._total_TD = total_TD

    @property
    def is_cpu(self) -> bool:
        """Whether it is on the CPU."""
        return self.x_TD.is_cpu

    def __len__(self) -> int:
        return len(self.x_TD)

    def split(self, num_rows: int) -> list[NormedSum]:
        """Parts of up to `num_rows` rows."""
        xs = torch.split(self.x_TD, num_rows)
        residuals = [None] * len(xs) if self.residual_TD is None else torch.split(self.residual_TD, num_rows)
        return [NormedSum(x, residual, self.weight_D, self.eps) for x, residual in zip(xs, residuals, strict=True)]


Input = Tensor | NormedSum
"""What a projection multiplies: rows, or the norm of a sum of rows."""


# ------------------------------------------------------------------ the seam


class RowAdapters:
    """The adapter of each row of an input: slots from 1, 0 for the base model."""

    def __init__(self, slot_T: Tensor, num_slots: int) -> None:
        self._slot_T, self._num_slots = slot_T, num_slots
        self.groups = group_tokens(slot_T, num_slots)

    def select(self, index_S: Tensor) -> RowAdapters:
        """Of some of the rows."""
        return RowAdapters(self._slot_T.index_select(0, index_S), self._num_slots)


class Adapters(Protocol):
    """LoRA adapters beside the projections of one input: B A x is added to their outputs."""

    low: Projection | None
    """A x of all adapters, stored with the projections as one matrix; None: `add` computes it."""

    def add(self, y_TN: Tensor, x_TD: Tensor, chosen: RowAdapters) -> Tensor:
        """Add each row's adapter to the outputs, in place."""

    def add_low(self, y_TN: Tensor, low_TM: Tensor, chosen: RowAdapters) -> Tensor:
        """The same with the outputs of `low` given."""

    def gated_low(self, y_TN: Tensor, low_TM: Tensor, chosen: RowAdapters) -> Tensor:
        """silu(gate) * up of outputs [gate, up] with each row's adapter added."""


class Projection(nn.Module):
    """A linear map with any storage form of its weight."""

    in_features: int
    out_features: int

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.adapters: Adapters | None = None
        """LoRA adapters chosen per row (`adapters.py`); one object for all projections of an input."""
        self._whole: tuple[Projection] | None = None
        """The projection whose storage this one is a part of. In a tuple: it is no submodule, and its weight no further parameter."""

    @property
    def stored_shape(self) -> tuple[int, int]:
        """Outputs and inputs in a checkpoint."""
        return self.out_features, self.in_features

    def linear(self, x: Tensor) -> Tensor:
        """[..., D] to [..., N]: x W' + bias."""
        raise NotImplementedError

    def forward(self, x: Input) -> Tensor:
        """[..., D] to [..., N]."""
        return self.linear(x.normed if isinstance(x, NormedSum) else x)

    def forward_into(self, x: Input, out: Tensor) -> Tensor:
        """The outputs, in the memory of `out` where that costs nothing: CUDA graphs of all sizes then share one."""
        return out.copy_(self(x))

    def forward_gated(self, x: Input) -> Tensor | None:
        """silu(gate) * up of outputs [gate, up], without gradients. None: this form leaves it to the next projection, see `gated`."""
        return None

    def gated(self, gate: Tensor, up: Tensor, *, saves_activation: bool = False) -> Tensor:
        """(silu(gate) * up) W' + bias. `saves_activation`: keep silu(gate) * up for backward instead of computing it again."""
        return self.linear(swiglu(gate, up))

    def cross_entropy(
        self,
        x_TD: Tensor,
        labels_T: Tensor,
        *,
        count: Tensor | float,
        num_labels: int,
        label_smoothing: float = 0.0,
    ) -> Tensor:
        """Sum of the cross entropy of x W' over the labels that are not -100, divided by `count`."""
        logits = self.linear(x_TD).float()
        return F.cross_entropy(logits, labels_T, reduction="sum", label_smoothing=label_smoothing) / count

    def checkpoint_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor on disk."""
        raise NotImplementedError

    def load_tensor(self, name: str, tensor: Tensor, dtype: torch.dtype | None) -> None:
        """Take one tensor of a checkpoint. `dtype`: the compute dtype (None: as stored)."""
        raise NotImplementedError

    @classmethod
    def merge(cls, parts: Sequence[Self]) -> Self | None:
        """One projection with the outputs of all parts, whose storage becomes theirs. None: this form cannot be merged."""
        return None

    # A part whose storage is replaced is no view any more; its whole would be out of date.

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, nn.Parameter):
            self.__dict__["_whole"] = None
        super().__setattr__(name, value)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        self._whole = None
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call, no-any-return]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_whole": None}

    def extra_repr(self) -> str:
        """Sizes, for the printed model."""
        return f"in_features={self.in_features}, out_features={self.out_features}"


def project(x: Input, *parts: Projection, chosen: RowAdapters | None = None) -> tuple[Tensor, ...]:
    """The outputs of one or several projections of one input: one product where they are stored as one matrix and no gradients are needed.

    `chosen`: the adapter of each row.
    """
    if chosen is not None and parts[0].adapters is not None:
        return _project_adapted(x, parts, parts[0].adapters, chosen)
    whole = _whole_of(parts)
    if whole is not None:
        out: Tensor = whole(x)
        return torch.split(out, [part.out_features for part in parts], dim=-1)
    if len(parts) == 1:
        return (parts[0](x),)
    rows = x.normed if isinstance(x, NormedSum) else x
    return tuple(part(rows) for part in parts)


def _whole_of(parts: Sequence[Projection]) -> Projection | None:
    """The projection that computes all parts, where gradients are not needed."""
    shared = parts[0]._whole
    if shared is None or is_differentiable() or any(part._whole is not shared for part in parts):
        return None
    return shared[0] if sum(part.out_features for part in parts) == shared[0].out_features else None


def _project_adapted(
    x: Input, parts: Sequence[Projection], adapters: Adapters, chosen: RowAdapters
) -> tuple[Tensor, ...]:
    found = _with_low(x, parts, adapters)
    if found is not None:
        out = adapters.add_low(*found, chosen)
    else:
        rows, whole = x.normed if isinstance(x, NormedSum) else x, _whole_of(parts)
        out = torch.cat([part.linear(rows) for part in parts], dim=-1) if whole is None else whole.linear(rows)
        out = adapters.add(out, rows, chosen)
    return torch.split(out, [part.out_features for part in parts], dim=-1)


def _with_low(x: Input, parts: Sequence[Projection], adapters: Adapters) -> tuple[Tensor, Tensor] | None:
    """The outputs of projections and those of the adapters' `low`, of one product; None: they are not stored as one matrix."""
    whole = None if adapters.low is None else _whole_of((*parts, adapters.low))
    if whole is None:
        return None
    out: Tensor = whole(x)
    num_outputs = sum(part.out_features for part in parts)
    return out[:, :num_outputs], out[:, num_outputs:]


def project_gated(x: Input, gate: Projection, up: Projection, chosen: RowAdapters | None = None) -> Tensor | None:
    """silu(gate(x)) * up(x), where the form of the projections computes it: always with the adapter of each row, never with gradients."""
    if chosen is None:
        whole = _whole_of((gate, up))
        return None if whole is None else whole.forward_gated(x)
    found = None if gate.adapters is None else _with_low(x, (gate, up), gate.adapters)
    if found is None or gate.adapters is None:
        return swiglu(*project(x, gate, up, chosen=chosen))
    return gate.adapters.gated_low(*found, chosen)


def add_update(x_TD: Tensor, update_TD: Tensor) -> tuple[Tensor, Tensor | None]:
    """The residual stream x + update. Without gradients it stays a pair: the next norm adds it up in its own kernel."""
    return (x_TD + update_TD, None) if is_differentiable() else (x_TD, update_TD)


# ------------------------------------------------------------------ the plain form


class Linear(Projection):
    """The plain form: a weight [N, D] in the compute dtype.

    In memory an aligned size is padded to a multiple of `ALIGNMENT`; checkpoints hold it as configured. The padding channels are zero
    and have zero gradients, so they stay zero under any optimizer.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        aligns_in: bool = False,
        aligns_out: bool = False,
    ) -> None:
        self.num_padding_inputs = -in_features % ALIGNMENT if aligns_in else 0
        self.num_padding_outputs = -out_features % ALIGNMENT if aligns_out else 0
        super().__init__(in_features + self.num_padding_inputs, out_features + self.num_padding_outputs)
        self.weight = nn.Parameter(torch.empty(self._weight_shape()))
        self.bias = nn.Parameter(torch.empty(self.out_features)) if bias else None
        self.reset_parameters()

    def _weight_shape(self) -> tuple[int, ...]:
        return self.out_features, self.in_features

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialize as `nn.Linear` does; on the meta device there is nothing to do."""
        if self.weight.is_meta:
            return
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.bias is not None:
            bound = 1 / math.sqrt(self.in_features)
            nn.init.uniform_(self.bias, -bound, bound)
        self.zero_padding()

    @torch.no_grad()
    def zero_padding(self) -> None:
        """Zero the padding channels. To be called after setting the weights."""
        if self.num_padding_outputs:
            for parameter in self.parameters():
                parameter[-self.num_padding_outputs :].zero_()
        if self.num_padding_inputs:
            self.weight[:, -self.num_padding_inputs :].zero_()

    @property
    def stored_shape(self) -> tuple[int, int]:
        """See `Projection`."""
        return self.out_features - self.num_padding_outputs, self.in_features - self.num_padding_inputs

    def checkpoint_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every parameter on disk."""
        sizes = self.stored_shape
        shapes: dict[str, tuple[int, ...]] = {"weight": sizes if self.weight.dim() == 2 else tuple(self.weight.shape)}
        return shapes if self.bias is None else shapes | {"bias": sizes[:1]}

    def load_tensor(self, name: str, tensor: Tensor, dtype: torch.dtype | None) -> None:
        """Take one tensor of a checkpoint, converted to `dtype` (None: as stored) and zero-padded."""
        shape = self.get_parameter(name).shape
        padding = [
            size for have, want in zip(tensor.shape[::-1], shape[::-1], strict=True) for size in (0, want - have)
        ]
        value = tensor if dtype is None else tensor.to(dtype)
        setattr(self, name, nn.Parameter(F.pad(value, padding) if any(padding) else value))

    def tie(self, embedding: nn.Embedding) -> None:
        """Share the weight of the embedding."""
        self.weight = cast(nn.Parameter, embedding.weight)

    def linear(self, x: Tensor) -> Tensor:
        """See `Projection`."""
        if is_differentiable() or x.dim() != 2:
            return F.linear(x, self.weight, self.bias)
        return small_linear(x, self.weight, self.bias)

    def forward(self, x: Input) -> Tensor:
        """See `Projection`. The norm runs in the kernel of the product, for few tokens."""
        if isinstance(x, NormedSum):
            out, x.total = norm_linear(x.x_TD, x.residual_TD, x.weight_D, x.eps, self.weight, self.bias)
            return out
        return self.linear(x)

    def forward_gated(self, x: Input) -> Tensor | None:
        """See `Projection`. Norm and activation run in the kernel of the product for one token, the activation also for very many."""
        if not isinstance(x, NormedSum):
            return swiglu(*self.linear(x).chunk(2, dim=-1))
        out, x.total = norm_gated_linear(x.x_TD, x.residual_TD, x.weight_D, x.eps, self.weight, self.bias)
        return out

    def forward_into(self, x: Input, out: Tensor) -> Tensor:
        """See `Projection`."""
        if self.bias is not None:
            return super().forward_into(x, out)
        if isinstance(x, NormedSum):
            return norm_linear_into(x.x_TD, x.residual_TD, x.weight_D, x.eps, self.weight, out)
        return torch.mm(x, self.weight.t(), out=out)

    def gated(self, gate: Tensor, up: Tensor, *, saves_activation: bool = False) -> Tensor:
        """See `Projection`."""
        if torch.is_grad_enabled():
            if saves_activation:
                return F.linear(swiglu(gate, up), self.weight, self.bias)
            return swiglu_linear(gate, up, self.weight, self.bias)
        return self.linear(swiglu(gate, up))

    def cross_entropy(
        self,
        x_TD: Tensor,
        labels_T: Tensor,
        *,
        count: Tensor | float,
        num_labels: int,
        label_smoothing: float = 0.0,
    ) -> Tensor:
        """See `Projection`. `num_labels` is an upper bound on the labels that count."""
        return linear_cross_entropy(
            x_TD, self.weight, labels_T, count=count, num_labels=num_labels, label_smoothing=label_smoothing
        )

    @classmethod
    def merge(cls, parts: Sequence[Self]) -> Self | None:
        """See `Projection`."""
        if len({(part.bias is None, part.weight.dtype, part.weight.device) for part in parts}) > 1:
            return None
        with torch.device("meta"):
            whole = cls(parts[0].in_features, sum(p.out_features for p in parts), bias=parts[0].bias is not None)
        share_rows(whole, parts)
        return whole


class PatchLinear(Linear):
    """The patch embedding: a linear map of patches whose weight has the shape of a convolution, as on disk."""

    def __init__(self, patch_shape: tuple[int, ...], out_features: int, *, bias: bool = False) -> None:
        """`patch_shape`: channels, frames, rows, columns."""
        self._patch_shape = patch_shape
        super().__init__(math.prod(patch_shape), out_features, bias=bias)

    def _weight_shape(self) -> tuple[int, ...]:
        return self.out_features, *self._patch_shape

    def linear(self, x: Tensor) -> Tensor:
        """Pixels in any float dtype to features in the weight's."""
        return F.linear(x.to(self.weight.dtype), self.weight.flatten(1), self.bias)


# ------------------------------------------------------------------ the projections of a model


@torch.no_grad()
def share_rows(whole: Projection, parts: Sequence[Projection]) -> None:
    """Give `whole` the concatenated parameters of all parts, and make theirs views of it. What concerns their inputs is common to all."""
    for name, _ in list(whole.named_parameters()):
        if name in ("input_scale", "input_zero_point", "weight_g_idx"):
            setattr(whole, name, parts[0].get_parameter(name))
            continue
        rows = [part.get_parameter(name) for part in parts]
        merged = torch.cat([row.detach() for row in rows])
        setattr(whole, name, nn.Parameter(merged, requires_grad=False))
        for part, own, view in zip(parts, rows, torch.split(merged, [len(row) for row in rows]), strict=True):
            setattr(part, name, nn.Parameter(view, requires_grad=own.requires_grad))


def projections(model: nn.Module) -> Iterator[tuple[str, Projection]]:
    """All projections, by name."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, Projection))


def merge_storage(model: nn.Module) -> None:
    """Store projections of one input as one matrix each, which takes fewer and larger products where no gradients are needed.

    Which ones read the same input is said by the `merged_projections` of the module that owns them. At most one group is held twice
    meanwhile. Nothing depends on it but speed.
    """
    for module in model.modules():
        for names in getattr(module, "merged_projections", ()):
            parts: list[Projection] = [module.get_submodule(name) for name in names]  # type: ignore[misc]
            form = type(parts[0])
            if parts[0]._whole is None and all(type(part) is form for part in parts):
                whole = form.merge(parts)
                shared = None if whole is None else (whole,)
                for part in parts:
                    part._whole = shared


def merge_with_rows(parts: Sequence[Projection], rows_MD: Tensor) -> tuple[Projection, Tensor] | None:
    """Store projections of one input and a further one, of weight `rows_MD` without bias, as one matrix: the further projection, and its weight
    there. None: this form cannot be merged; nothing has changed."""
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
    shared = (whole,)
    for part in together:
        part._whole = shared
    return further, further.weight.detach()


def checkpoint_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter on disk: without the padding that projections have in memory."""
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    for prefix, module in projections(model):
        own = {f"{prefix}.{name}": shape for name, shape in module.checkpoint_shapes().items()}
        shapes |= {name: shape for name, shape in own.items() if name in shapes}  # a tied head is the embedding
    return shapes
