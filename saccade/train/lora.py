"""LoRA and QLoRA: low-rank adapters on frozen linear layers.

Legend: T tokens, D inputs, N outputs, R rank.

    y_TN = x_TD W_ND' + bias_N + alpha / R * (x_TD A_RD') B_NR'

A is initialized randomly and B with zeros, so training starts from the unchanged model. A and B are ordinary parameters (fp32 masters,
sharded, saved) with `optimizer.lr` or the rate of a matching key of `optimizer.lrs`, such as `lora`; everything else is frozen.
Their names are those of the layer: `q_proj.weight`, `q_proj.lora_A`, `q_proj.lora_B`. Saved for backward: x, as for any trained
layer, and x A' [T, R].

QLoRA (`quantize_base`): W is stored as `weight_bits` and `weight_scale`, in 4 bits with one scale per 64 inputs of an output, or in 8
bits with one scale per output; 0.53 or 1 bytes per weight instead of 2. It is dequantized for each matmul, in forward and again
in backward, and not kept in between. Only layers with adapters are quantized.

Merging adds alpha / R * B A to W in fp32 and rounds once. With QLoRA, W is then the original weight, not the quantized one that A and
B were trained with: the export has no quantization error, but differs from the trained model by that error (up to about half a scale
per weight), including what A and B learned to compensate.
"""

import difflib
import math
import re
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from saccade.errors import ConfigError
from saccade.kernels.quant_linear import dequantize_int4, interleave_int4, quantize_weight, quantize_weight_int4
from saccade.model.layers import checkpoint_shapes
from saccade.model.vlm import VLM
from saccade.train.config import LoraConfig, Quantization

GROUP_SIZE = 64
"""Inputs per 4-bit scale: 0.03 bytes per weight for scales."""
_ALIGNMENT = 128
"""Quantized weights are zero-padded to a multiple of this many inputs, as the 4-bit kernels require."""


# ------------------------------------------------------------------ the frozen weight


def stored_weight(weight_ND: Tensor, quantization: Quantization, dtype: torch.dtype) -> dict[str, Tensor]:
    """The parameters a layer stores for its weight, by name; computed on the weight's device, which may be meta.

    Quantized values are stored as tensors of `dtype`, the compute dtype: FSDP gathers those bit for bit, but would cast other
    floats and (torch 2.11) refuse integers.
    """
    if quantization == "none":
        return {"weight": weight_ND.to(dtype)}
    weight_ND = F.pad(weight_ND.to(dtype), (0, -weight_ND.shape[1] % _ALIGNMENT))
    if quantization == "int4":
        packed, scale, _ = quantize_weight_int4(weight_ND, GROUP_SIZE)
        bits = interleave_int4(packed)
    else:
        bits, scale = quantize_weight(weight_ND, torch.int8)
    return {"weight_bits": bits.view(dtype), "weight_scale": scale}


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
        return y_TN.addmm_(low_TR, lora_B.T, alpha=scale)

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


class LoraLinear(nn.Module):
    """A frozen linear layer with a trained LoRA adapter."""

    def __init__(self, linear: nn.Linear, config: LoraConfig, dtype: torch.dtype) -> None:
        """`dtype` is the compute dtype; the adapter has the dtype of the linear layer's parameters."""
        super().__init__()
        self.out_features, self.in_features = linear.weight.shape
        self.rank, self.alpha, self.scale = config.rank, config.alpha, config.alpha / config.rank
        self.dropout, self.quantization, self._dtype = config.dropout, config.quantize_base, dtype
        for name, tensor in self.stored_weight(linear.weight.detach()).items():
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
        self.bias = linear.bias
        self.lora_A = nn.Parameter(linear.weight.new_empty(self.rank, self.in_features))
        self.lora_B = nn.Parameter(linear.weight.new_empty(self.out_features, self.rank))

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] to [..., N]."""
        x_TD = x.flatten(0, -2)
        dropped_TD = F.dropout(x_TD, self.dropout) if self.training and self.dropout else None
        stored = [self.weight] if self.quantization == "none" else [self.weight_bits, self.weight_scale]
        y_TN: Tensor = _LoraFunction.apply(  # type: ignore[no-untyped-call]
            x_TD, dropped_TD, self.bias, self.lora_A, self.lora_B, self.scale, self.quantization, *stored
        )
        return y_TN.view(*x.shape[:-1], self.out_features)

    def stored_weight(self, weight_ND: Tensor) -> dict[str, Tensor]:
        """The parameters that store a full weight, by name."""
        return stored_weight(weight_ND, self.quantization, self._dtype)


# ------------------------------------------------------------------ add to a model, merge


def add_lora(model: VLM, config: LoraConfig, dtype: torch.dtype) -> None:
    """Replace the layers that `config` names by LoRA layers, on the meta device. `dtype`: compute dtype."""
    linears = {name: module for name, module in model.named_modules() if type(module) is nn.Linear}
    for name in target_layers(list(linears), config):
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, LoraLinear(linears[name], config, dtype))


def target_layers(names: Sequence[str], config: LoraConfig) -> list[str]:
    """Names of the linear layers that `config` targets, in order. A target or a part without a match is an error."""
    inside = [name for name in names if name.split(".")[0] in config.parts]
    for target in config.targets:
        if not any(_matches(target, name) for name in inside):
            raise ConfigError(_no_layer(target, inside, config))
    found = [name for name in inside if any(_matches(target, name) for target in config.targets)]
    if idle := [part for part in config.parts if not any(name.startswith(f"{part}.") for name in found)]:
        raise ConfigError(
            f"lora: no target matches a layer of {', '.join(idle)}. Add its layers to targets, or remove it from parts"
        )
    return found


def _matches(target: str, name: str) -> bool:
    """Whether a name equals or ends with the target; a target that is not a plain name is a regular expression."""
    if re.fullmatch(r"[\w.]+", target):
        return f".{name}".endswith(f".{target}")
    return re.search(target, name) is not None


def _no_layer(target: str, names: Sequence[str], config: LoraConfig) -> str:
    """Error message for a target without a match, with similar names."""
    known = sorted({name.rpartition(".")[2] for name in names if not name[-1].isdigit()}) + list(names)
    near = difflib.get_close_matches(re.sub(r"\\(.)", r"\1", target), known, n=3, cutoff=0.4) or known[:8]
    return (
        f"lora: target '{target}' matches no linear layer of {', '.join(config.parts)}. Similar names: {', '.join(near)}. "
        "Correct it, or add the part it belongs to to parts"
    )


def lora_layers(model: nn.Module) -> dict[str, LoraLinear]:
    """The layers with adapters, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLinear)}


def lora_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The adapter parameters, by name."""
    return {
        f"{name}.{matrix}": layer.get_parameter(matrix)
        for name, layer in lora_layers(model).items()
        for matrix in ("lora_A", "lora_B")
    }


def quantized_sizes(model: nn.Module) -> dict[str, int]:
    """Number of weights that each parameter of a quantized layer represents, by name."""
    return {
        f"{name}.{held}": size
        for name, layer in lora_layers(model).items()
        if layer.quantization != "none"
        for held, size in (("weight_bits", layer.out_features * layer.in_features), ("weight_scale", 0))
    }


def initial_adapters(model: nn.Module, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """(parameter, full initial value) of every adapter parameter; independent of the sharding."""
    for name, layer in lora_layers(model).items():
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        bound = 1.0 / math.sqrt(layer.in_features)
        yield layer.lora_A, torch.empty(layer.lora_A.shape).uniform_(-bound, bound, generator=generator)
        yield layer.lora_B, torch.zeros(layer.lora_B.shape)


def base_shapes(model: VLM) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter in a checkpoint folder: without adapters, padding and quantization."""
    with torch.device("meta"):
        return checkpoint_shapes(VLM(model.config))


def merge_lora(weight_ND: Tensor, lora_A: Tensor, lora_B: Tensor, scale: float) -> Tensor:
    """weight + scale * B A in fp32; adapters of padded layers (see `FeedForward`) are cut to the weight."""
    N, D = weight_ND.shape
    return torch.addmm(weight_ND.float(), lora_B[:N].float(), lora_A[:, :D].float(), alpha=scale)
