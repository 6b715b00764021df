"""The projection of quantization-aware training: a plain weight that computes what its quantized form will compute.

Legend: T tokens, D inputs, N outputs.

    y_TN = q(x)_TD q(W)_ND' + bias_N

q rounds to the grid that `weight_rounding.py` defines: int4 weights in groups of inputs with 16-bit activations
(W4A16), or int8 weights per output with int8 activations per token (W8A8). Scales follow the weights: they are computed
again for each product.

Gradients pass the rounding as if it were the identity (straight-through estimator): d W = d y' q(x), d x = d y q(W).
Saved for backward are x and W, as for a plain layer; both are rounded again there.

The parameters are those of the plain layer (`weight`, `bias`), so that loading, sharding and the optimizer do not
differ. An exported weight is `on_grid`: rounding it again gives the same values, so that a quantized folder computes
what training computed.
"""

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from saccade.errors import ConfigError
from saccade.kernels.quantize_activation import quantize_activation_reference
from saccade.model.linear import Linear, Projection
from saccade.model.quantization import fitting_group
from saccade.model.weight_rounding import round_to_grid

Form = Literal["int4", "int8"]
Maximum = Callable[[Tensor], Tensor]


def round_weight(
    weight_ND: Tensor, form: Form, group_size: int | None, bits: int = 4, maximum: Maximum | None = None
) -> Tensor:
    """The weight on its grid, in its own dtype. `bits`: fewer than 4 are fewer levels in the same format.

    `maximum`: over the tensor ranks that hold the other inputs of an output.
    """
    levels = 2 ** (bits - 1) if form == "int4" else 128
    return round_to_grid(weight_ND, group_size, -levels, levels - 1, None if group_size else maximum)


def round_activation(x_TD: Tensor, form: Form, maximum: Maximum | None = None) -> Tensor:
    """Tokens on the grid of their scale, in their own dtype; 16-bit activations stay as they are."""
    if form == "int4":
        return x_TD
    values_TD, scale_T = quantize_activation_reference(x_TD, torch.int8, maximum)
    return (values_TD.float() * scale_T.unsqueeze(1)).to(x_TD.dtype)


class _FakeQuantizedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_ND: Tensor, bias_N: Tensor | None, layer: Any) -> Tensor:
        ctx.save_for_backward(x_TD, weight_ND)
        ctx.layer, ctx.has_bias = layer, bias_N is not None
        return F.linear(round_activation(x_TD, layer.form, layer.maximum), layer.rounded(weight_ND), bias_N)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y_TN: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, weight_ND = ctx.saved_tensors
        d_x_TD = d_weight_ND = None
        if ctx.needs_input_grad[0]:
            d_x_TD = d_y_TN @ ctx.layer.rounded(weight_ND)
        if ctx.needs_input_grad[1]:
            d_weight_ND = d_y_TN.T @ round_activation(x_TD, ctx.layer.form, ctx.layer.maximum)
        return d_x_TD, d_weight_ND, d_y_TN.sum(0) if ctx.has_bias else None, None


class FakeQuantizedLinear(Projection):
    """A plain weight, rounded in every product."""

    def __init__(self, linear: Linear, *, form: Form, group_size: int = 128, bits: int = 4, dtype: torch.dtype) -> None:
        """Replace a plain layer and take its parameters. `dtype`: the compute dtype."""
        super().__init__(linear.in_features, linear.out_features)
        self.shard = linear.shard
        self._stored_shape, self._shapes = linear.stored_shape, linear.checkpoint_shapes()
        self.form: Form = form
        self._bits = bits
        self.group_size = fitting_group(linear.whole_shape[1], group_size) if form == "int4" else None
        """Inputs per scale; None: one scale per output."""
        if self.group_size is not None and self._stored_shape[1] % self.group_size:
            raise ConfigError(
                f"{self._stored_shape[1]} inputs of a tensor rank are no whole groups of {self.group_size}. "
                "Set a smaller qat.group_size, or use a smaller parallel.tensor"
            )
        self._dtype = dtype
        self.weight, self.bias = linear.weight, linear.bias

    @property
    def stored_shape(self) -> tuple[int, int]:
        """See `Projection`."""
        return self._stored_shape

    def checkpoint_shapes(self) -> dict[str, tuple[int, ...]]:
        """See `Projection`."""
        return self._shapes

    def linear(self, x: Tensor) -> Tensor:
        """See `Projection`."""
        y_TN: Tensor = _FakeQuantizedProduct.apply(  # type: ignore[no-untyped-call]
            x.flatten(0, -2), self.weight, self.bias, self
        )
        return y_TN.view(*x.shape[:-1], self.out_features)

    def rounded(self, weight_ND: Tensor) -> Tensor:
        """A weight of this layer on its grid. Padding inputs belong to no group."""
        num_padding = self.in_features - self._stored_shape[1]
        rounded_ND = round_weight(
            weight_ND[:, : self._stored_shape[1]], self.form, self.group_size, self._bits, self.maximum
        )
        return F.pad(rounded_ND, (0, num_padding)) if num_padding else rounded_ND

    def on_grid(self, weight_ND: Tensor) -> Tensor:
        """The exported form of a full weight of any precision, without padding: the values that training used."""
        return round_weight(weight_ND.to(self._dtype), self.form, self.group_size, self._bits)
