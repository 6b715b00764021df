"""The projections: every product with a learned matrix, in vision tower, projector, decoder and head.

Legend: T tokens, D inputs, N outputs.

A caller says what is computed. The module owns the storage of its weight and chooses the kernel:

    linear(x)                                  x W' + bias
    linear(norm.add_norm(x, residual).input)   rms_norm(x + residual) W' + bias
    linear.gated(gate, up)                     (silu(gate) * up) W' + bias
    linear.cross_entropy(x, labels, ...)       the loss of a head, without its logits

Storage forms are subclasses of `Projection`: `Linear` (plain, here), `PrepackedLinear` (inference on a CPU),
`LoraLinear` and `FakeQuantizedLinear` (training), `Linear8bit` and `Linear4bit` (`quantized_linear.py`). A form
implements `linear`; everything else then works unfused, and a form overrides what it has a fused kernel for.
Projections of one input can be stored as one matrix: `merged_projections.py`.

Nothing else in the package reads a projection's weight, except loading, export and the optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Self, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from saccade.kernels.launch import is_differentiable
from saccade.kernels.linear_cross_entropy import linear_cross_entropy
from saccade.kernels.small_linear import norm_gated_linear, norm_linear, norm_linear_into, small_linear
from saccade.kernels.swiglu import swiglu, swiglu_linear
from saccade.model.deferred_gradients import can_defer, deferred_linear
from saccade.model.normed_sum import Input, NormedSum
from saccade.model.shard import Shard

if TYPE_CHECKING:
    from saccade.model.merged_projections import Adapters, MergedStorage

ALIGNMENT = 8
"""Rows of half-precision matrices start at multiples of 16 bytes, or cuBLAS chooses pre-Hopper kernels: 36864 x 1280 x
3420 runs at 258 TFLOP/s, 3424 at 731 (H200)."""
_INPUT_PARAMETERS = ("input_scale", "input_zero_point", "weight_g_idx")
"""Parameters that describe the inputs of a projection, not its outputs."""


class Projection(nn.Module):
    """A linear map with any storage form of its weight."""

    in_features: int
    out_features: int

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.adapters: Adapters | None = None
        """LoRA adapters chosen per row (`adapters.py`); one object for all projections of an input."""
        self.merged: MergedStorage | None = None
        """The matrix that stores this projection with others of its input; None: it has its own storage."""
        self.shard: Shard | None = None
        """The outputs or inputs that this tensor rank holds; None: all (`tensor_parallel.py`)."""
        self.maximum: Callable[[Tensor], Tensor] | None = None
        """The maximum over the ranks that hold the other inputs, for activations that are rounded."""
        self.vocabulary_group: dist.ProcessGroup | None = None
        """The ranks that hold the other outputs of a head."""

    @property
    def stored_shape(self) -> tuple[int, int]:
        """Outputs and inputs in a checkpoint; of a shard, its own."""
        return self.out_features, self.in_features

    @property
    def whole_shape(self) -> tuple[int, int]:
        """Outputs and inputs in a checkpoint, of all tensor ranks."""
        sizes = list(self.stored_shape)
        if self.shard is not None:
            sizes[self.shard.dim] = self.shard.size
        return sizes[0], sizes[1]

    def of_size(self, out_features: int, in_features: int, *, of_inputs: bool = False) -> Self:
        """An empty projection of this form with other sizes, padded alike. `of_inputs`: for some inputs of it."""
        raise NotImplementedError

    def linear(self, x: Tensor) -> Tensor:
        """[..., D] to [..., N]: x W' + bias."""
        raise NotImplementedError

    def forward(self, x: Input) -> Tensor:
        """[..., D] to [..., N]."""
        return self.linear(x.normed if isinstance(x, NormedSum) else x)

    def forward_into(self, x: Input, out: Tensor) -> Tensor:
        """The outputs, in the memory of `out` if that costs nothing: CUDA graphs of all sizes then share one."""
        return out.copy_(self(x))

    def forward_gated(self, x: Input) -> Tensor | None:
        """silu(gate) * up of outputs [gate, up], without gradients. None: the next projection computes it (`gated`)."""
        return None

    def gated(self, gate: Tensor, up: Tensor, *, saves_activation: bool = False) -> Tensor:
        """(silu(gate) * up) W' + bias. `saves_activation`: silu(gate) * up is saved for backward."""
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
        logits = self(x_TD).float()
        return F.cross_entropy(logits, labels_T, reduction="sum", label_smoothing=label_smoothing) / count

    def checkpoint_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor on disk."""
        raise NotImplementedError

    def load_tensor(self, name: str, tensor: Tensor, dtype: torch.dtype | None) -> None:
        """Take one tensor of a checkpoint. `dtype`: the compute dtype (None: as stored)."""
        raise NotImplementedError

    @classmethod
    def merge(cls, parts: Sequence[Self]) -> Self | None:
        """One projection with the outputs of all parts, which become views of it. None: this form cannot be merged."""
        return None

    @torch.no_grad()
    def take_rows(self, parts: Sequence[Projection]) -> None:
        """Hold the concatenated parameters of all parts and make theirs views of them.

        Parameters that concern the inputs are the same in all parts, and taken from the first.
        """
        for name, _ in list(self.named_parameters()):
            if name in _INPUT_PARAMETERS:
                setattr(self, name, parts[0].get_parameter(name))
                continue
            rows = [part.get_parameter(name) for part in parts]
            merged = torch.cat([row.detach() for row in rows])
            setattr(self, name, nn.Parameter(merged, requires_grad=False))
            for part, own, view in zip(parts, rows, torch.split(merged, [len(row) for row in rows]), strict=True):
                setattr(part, name, nn.Parameter(view, requires_grad=own.requires_grad))

    @property
    def is_merged(self) -> bool:
        """Whether its storage is a view of a merged matrix."""
        return self.merged is not None and self.merged.whole is not None

    def _leave_merged(self) -> None:
        """Free the merged matrix: the storage of this part of it is replaced."""
        merged = self.__dict__.get("merged")
        if merged is not None:
            merged.whole = None

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, nn.Parameter):
            self._leave_merged()
        super().__setattr__(name, value)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        self._leave_merged()
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call, no-any-return]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"merged": None}  # a copy has its own storage

    def extra_repr(self) -> str:
        """Sizes, for the printed model."""
        return f"in_features={self.in_features}, out_features={self.out_features}"


class Linear(Projection):
    """The plain form: a weight [N, D] in the compute dtype.

    In memory an aligned size is padded to a multiple of `ALIGNMENT`; checkpoints hold the configured size. The padding
    channels are zero and have zero gradients, so they stay zero with any optimizer.
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

    def of_size(self, out_features: int, in_features: int, *, of_inputs: bool = False) -> Self:
        """See `Projection`."""
        assert self.bias is None or not of_inputs, "a bias is added once, not by every rank"
        aligns = {"aligns_in": self.num_padding_inputs > 0, "aligns_out": self.num_padding_outputs > 0}
        return type(self)(in_features, out_features, bias=self.bias is not None, **aligns).to(self.weight.dtype)

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
        """Zero the padding channels, after the weights are set."""
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
        if can_defer(self.weight):
            return deferred_linear(x, self.weight, self.bias)
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
        """See `Projection`. Norm and activation run in the kernel of the product, for one token."""
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
            if saves_activation or can_defer(self.weight):
                return Linear.linear(self, swiglu(gate, up))
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
            x_TD, self.weight, labels_T, count=count, num_labels=num_labels, label_smoothing=label_smoothing,
            group=self.vocabulary_group, vocab_start=0 if self.shard is None else self.shard.start,
        )  # fmt: skip

    @classmethod
    def merge(cls, parts: Sequence[Self]) -> Self | None:
        """See `Projection`."""
        if len({(part.bias is None, part.weight.dtype, part.weight.device) for part in parts}) > 1:
            return None
        with torch.device("meta"):
            whole = cls(parts[0].in_features, sum(p.out_features for p in parts), bias=parts[0].bias is not None)
        whole.take_rows(parts)
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


def projections(model: nn.Module) -> Iterator[tuple[str, Projection]]:
    """All projections, by name."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, Projection))


def checkpoint_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter on disk: without the padding of projections in memory, and of all tensor ranks."""
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    for prefix, module in model.named_modules():
        shard: Shard | None = getattr(module, "shard", None)
        if shard is not None:
            stored = shard.shapes
        elif isinstance(module, Projection):
            stored = module.checkpoint_shapes()
        else:
            continue
        own = {f"{prefix}.{name}": shape for name, shape in stored.items()}
        shapes |= {name: shape for name, shape in own.items() if name in shapes}  # a tied head is the embedding
    return shapes
