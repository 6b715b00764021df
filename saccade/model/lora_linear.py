"""The projection with a trained LoRA adapter on a frozen weight, which may be quantized (QLoRA).

Legend: T tokens, D inputs, N outputs, R rank.

    y_TN = x_TD W_ND' + bias_N + alpha / R * (x_TD A_RD') B_NR'

Parameter names are those of the layer: `q_proj.weight`, `q_proj.lora_A`, `q_proj.lora_B`. Saved for backward: x, as for
any trained layer, and x A' [T, R].

A quantized W is stored as `weight_bits` and `weight_scale`, in 4 bits with one scale per 64 inputs of an output, or in
8 bits with one scale per output; 0.53 or 1 bytes per weight instead of 2. It is dequantized for each matmul, in forward
and again in backward, and not kept in between.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from saccade.kernels.dequantize_int4 import dequantize_int4, interleave_int4
from saccade.model.linear import Linear, Projection
from saccade.model.weight_rounding import quantize_weight, quantize_weight_int4

Quantization = Literal["none", "int8", "int4"]
GROUP_SIZE = 64
"""Inputs per 4-bit scale: 0.03 bytes per weight for scales."""
_ALIGNMENT = 128
"""Quantized weights are zero-padded to a multiple of this many inputs, as the 4-bit kernels require."""


# ------------------------------------------------------------------ the frozen weight


def stored_weight(weight_ND: Tensor, quantization: Quantization, dtype: torch.dtype) -> dict[str, Tensor]:
    """The parameters a layer stores for its weight, by name; computed on the weight's device, which may be meta.

    Quantized values are stored as tensors of `dtype`, the compute dtype: FSDP gathers those bit for bit, but would cast
    other floats and (torch 2.11) refuse integers.
    """
    if quantization == "none":
        return {"weight": weight_ND.to(dtype)}
    weight_ND = _padded(weight_ND.to(dtype))
    if quantization == "int4":
        packed, scale, _ = quantize_weight_int4(weight_ND, GROUP_SIZE)
        bits = interleave_int4(packed)
    else:
        bits, scale = quantize_weight(weight_ND, torch.int8)
    return {"weight_bits": bits.view(dtype), "weight_scale": scale}


def _padded(x_ND: Tensor) -> Tensor:
    return F.pad(x_ND, (0, -x_ND.shape[1] % _ALIGNMENT)).contiguous()


def compute_weight(stored: Sequence[Tensor], quantization: Quantization, num_inputs: int) -> Tensor:
    """[N, D]: the weight that `stored_weight` stored, in the compute dtype."""
    if quantization == "none":
        return stored[0]
    bits, scale = stored
    if quantization == "int4":
        return dequantize_int4(bits.view(torch.int32), scale, None, scale.dtype)[:, :num_inputs]
    return bits.view(torch.int8)[:, :num_inputs].to(scale.dtype).mul_(scale)


# ------------------------------------------------------------------ the layer


class _LoraFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        dropped_TD: Tensor | None,
        bias_N: Tensor | None,
        lora_A: Tensor,
        lora_B: Tensor,
        scale: float,
        quantization: Quantization,
        *stored: Tensor,
    ) -> Tensor:
        seen_TD = x_TD if dropped_TD is None else dropped_TD
        low_TR = seen_TD @ lora_A.T
        y_TN = F.linear(x_TD, compute_weight(stored, quantization, x_TD.shape[1]), bias_N)
        ctx.save_for_backward(seen_TD, low_TR, lora_A, lora_B, *stored)
        ctx.scale, ctx.quantization, ctx.has_dropout = scale, quantization, dropped_TD is not None
        # Not in place: compiled by torch 2.11, a forward that returns the result of an in-place operation has no
        # gradients.
        return torch.addmm(y_TN, low_TR, lora_B.T, alpha=scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y_TN: Tensor) -> tuple[Tensor | None, ...]:
        seen_TD, low_TR, lora_A, lora_B, *stored = ctx.saved_tensors
        d_low_TR = (d_y_TN @ lora_B).mul_(ctx.scale)
        d_lora_A = d_low_TR.T @ seen_TD
        d_lora_B = (d_y_TN.T @ low_TR).mul_(ctx.scale)
        d_x_TD = d_dropped_TD = None
        if ctx.needs_input_grad[0]:
            d_x_TD = d_y_TN @ compute_weight(stored, ctx.quantization, seen_TD.shape[1])
            if ctx.has_dropout:
                d_dropped_TD = d_low_TR @ lora_A
            else:
                d_x_TD.addmm_(d_low_TR, lora_A)
        return d_x_TD, d_dropped_TD, None, d_lora_A, d_lora_B, *(None,) * (2 + len(stored))


class LoraLinear(Projection):
    """A frozen weight with a trained LoRA adapter."""

    def __init__(
        self, linear: Linear, *, rank: int, alpha: float, dtype: torch.dtype, dropout: float = 0.0,
        quantization: Quantization = "none",
    ) -> None:  # fmt: skip
        """Replace a plain layer. `dtype` is the compute dtype; the adapter has the dtype of the layer's parameters."""
        super().__init__(linear.in_features, linear.out_features)
        self.shard = linear.shard
        self.rank, self.alpha, self.scale = rank, alpha, alpha / rank
        self.dropout, self.quantization, self._dtype = dropout, quantization, dtype
        self.is_adapted = True
        """Whether the adapter is applied; without it the layer is the frozen one, for passes without gradients."""
        for name, tensor in self.stored_weight(linear.weight.detach()).items():
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
        self.bias = linear.bias
        self.lora_A = nn.Parameter(linear.weight.new_empty(self.rank, self.in_features))
        self.lora_B = nn.Parameter(linear.weight.new_empty(self.out_features, self.rank))

    def linear(self, x: Tensor) -> Tensor:
        """See `Projection`."""
        x_TD = x.flatten(0, -2)
        names = ["weight"] if self.quantization == "none" else ["weight_bits", "weight_scale"]
        stored: list[Tensor] = [self.get_parameter(name) for name in names]
        if not self.is_adapted:
            return F.linear(x, compute_weight(stored, self.quantization, self.in_features), self.bias)
        dropped_TD = F.dropout(x_TD, self.dropout) if self.training and self.dropout else None
        y_TN: Tensor = _LoraFunction.apply(  # type: ignore[no-untyped-call]
            x_TD, dropped_TD, self.bias, self.lora_A, self.lora_B, self.scale, self.quantization, *stored
        )
        return y_TN.view(*x.shape[:-1], self.out_features)

    def initial_adapter(self, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        """(parameter, full initial value) of A and B, for any sharding."""
        sizes = [self.out_features, self.in_features]
        if self.shard is not None:
            sizes[self.shard.dim] = self.shard.size
        bound = 1.0 / math.sqrt(sizes[1])
        yield self.lora_A, torch.empty(self.rank, sizes[1]).uniform_(-bound, bound, generator=generator)
        yield self.lora_B, torch.zeros(sizes[0], self.rank)

    def stored_weight(self, weight_ND: Tensor) -> dict[str, Tensor]:
        """The parameters that store a full weight, by name.

        With tensor parallelism it is this rank's part, in int8 the whole weight: an output has one scale on all ranks.
        """
        if self.shard is None or self.quantization != "int8" or weight_ND.is_meta:
            return stored_weight(weight_ND, self.quantization, self._dtype)
        own = slice(self.shard.start, self.shard.stop)
        if self.shard.dim == 0:
            return stored_weight(weight_ND[own], self.quantization, self._dtype)
        bits, scale = quantize_weight(weight_ND.to(self._dtype), torch.int8)
        return {"weight_bits": _padded(bits[:, own]).view(self._dtype), "weight_scale": scale}


def merge_lora(weight_ND: Tensor, lora_A: Tensor, lora_B: Tensor, scale: float) -> Tensor:
    """weight + scale * B A in fp32; adapters of padded layers (see `Linear`) are cut to the weight."""
    N, D = weight_ND.shape
    return torch.addmm(weight_ND.float(), lora_B[:N].float(), lora_A[:, :D].float(), alpha=scale)
