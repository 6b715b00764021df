"""Low-rank matrices that learn beside frozen linear layers.

Legend: T tokens, D inputs, N outputs, R rank.

    y_TN = x_TD W_ND' + bias_N + alpha / R * (x_TD A_RD') B_NR'

A begins random and B zero: training begins at the model as it is. A and B are parameters like any other (fp32 masters, sharded,
saved), at `optimizer.lr` or the rate of a key of `optimizer.lrs` that matches their names, such as `lora`; all else is frozen.
Names stay as they are: beside `q_proj.weight` stand `q_proj.lora_A` and `q_proj.lora_B`. For backward a layer keeps x, as one that
learns does, and x A' [T, R].

QLoRA (`quantize_base`). W is held as `weight_bits` and `weight_scale`: in 4 bits with a scale for every 64 inputs of an output, or in
8 bits with a scale for every output; 0.53 or 1 bytes a weight where bf16 has 2. It is made whole where it is multiplied, in
forward and again in backward, and not kept between. Only layers with matrices are quantized.

Merging adds alpha / R * B A to W in fp32 and rounds once. With QLoRA, W is then that of the folder the run began with, not the
rounded one that A and B were trained beside. So the exported folder has no error of 4 bits in it; but it differs from the model that
was trained by that error (up to about half a scale a weight), and what A and B had learned to make up for it, they still do.
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
"""Inputs that share a scale in 4 bits: 0.03 bytes a weight for scales."""
_ALIGNMENT = 128
"""Quantized weights are held in multiples of so many inputs, as the 4-bit kernels want them; the added ones are zero."""


# ------------------------------------------------------------------ the frozen weight


def stored_weight(weight_ND: Tensor, quantization: Quantization, dtype: torch.dtype) -> dict[str, Tensor]:
    """What a layer keeps of its weight, by parameter name; computed where the weight lies, and without memory on `meta`.

    Quantized numbers stand in memory as tensors of `dtype`, the one that is computed in: FSDP gathers those bit for bit, where
    it would cast another float and (torch 2.11) refuse integers.
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


def compute_weight(held: Sequence[Tensor], quantization: Quantization, num_inputs: int) -> Tensor:
    """[N, D]: the weight that `stored_weight` kept, in the dtype it is computed in."""
    if quantization == "none":
        return held[0]
    bits, scale = held
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
        *held: Tensor,
    ) -> Tensor:
        seen_TD = x_TD if dropped_TD is None else dropped_TD
        low_TR = seen_TD @ lora_A.T
        y_TN = F.linear(x_TD, compute_weight(held, quantization, x_TD.shape[1]), bias_N)
        ctx.save_for_backward(seen_TD, low_TR, lora_A, lora_B, *held)
        ctx.scale, ctx.quantization, ctx.has_dropout = scale, quantization, dropped_TD is not None
        return y_TN.addmm_(low_TR, lora_B.T, alpha=scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y_TN: Tensor) -> tuple[Tensor | None, ...]:
        seen_TD, low_TR, lora_A, lora_B, *held = ctx.saved_tensors
        d_low_TR = (d_y_TN @ lora_B).mul_(ctx.scale)
        d_lora_A = d_low_TR.T @ seen_TD
        d_lora_B = (d_y_TN.T @ low_TR).mul_(ctx.scale)
        d_x_TD = d_dropped_TD = None
        if ctx.needs_input_grad[0]:
            d_x_TD = d_y_TN @ compute_weight(held, ctx.quantization, seen_TD.shape[1])
            if ctx.has_dropout:
                d_dropped_TD = d_low_TR @ lora_A
            else:
                d_x_TD.addmm_(d_low_TR, lora_A)
        return d_x_TD, d_dropped_TD, None, d_lora_A, d_lora_B, *(None,) * (2 + len(held))


class LoraLinear(nn.Module):
    """A frozen linear layer with two matrices beside it that learn."""

    def __init__(self, linear: nn.Linear, config: LoraConfig, dtype: torch.dtype) -> None:
        """`dtype` is the one that is computed in; the matrices are of the linear layer's own, in which parameters are held."""
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
        held = [self.weight] if self.quantization == "none" else [self.weight_bits, self.weight_scale]
        y_TN: Tensor = _LoraFunction.apply(  # type: ignore[no-untyped-call]
            x_TD, dropped_TD, self.bias, self.lora_A, self.lora_B, self.scale, self.quantization, *held
        )
        return y_TN.view(*x.shape[:-1], self.out_features)

    def stored_weight(self, weight_ND: Tensor) -> dict[str, Tensor]:
        """What is kept of a whole weight, by the name of the parameter that keeps it."""
        return stored_weight(weight_ND, self.quantization, self._dtype)


# ------------------------------------------------------------------ into the model and out again


def add_lora(model: VLM, config: LoraConfig, dtype: torch.dtype) -> None:
    """Put matrices beside the layers that `config` names. The model has no memory yet; it is computed in `dtype`."""
    linears = {name: module for name, module in model.named_modules() if type(module) is nn.Linear}
    for name in target_layers(list(linears), config):
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, LoraLinear(linears[name], config, dtype))


def target_layers(names: Sequence[str], config: LoraConfig) -> list[str]:
    """Those of the linear layers' names that `config` means, in order. A target or a part that means none is an error."""
    inside = [name for name in names if name.split(".")[0] in config.parts]
    for target in config.targets:
        if not any(_means(target, name) for name in inside):
            raise ConfigError(_no_layer(target, inside, config))
    found = [name for name in inside if any(_means(target, name) for target in config.targets)]
    if idle := [part for part in config.parts if not any(name.startswith(f"{part}.") for name in found)]:
        raise ConfigError(
            f"lora: no target is a layer of {', '.join(idle)}. Add its layers to targets, or take it out of parts"
        )
    return found


def _means(target: str, name: str) -> bool:
    """Whether a name is, or ends with, the target; one that is no plain name is a regular expression searched for in it."""
    if re.fullmatch(r"[\w.]+", target):
        return f".{name}".endswith(f".{target}")
    return re.search(target, name) is not None


def _no_layer(target: str, names: Sequence[str], config: LoraConfig) -> str:
    """The error of a target that is no layer, with the names nearest to it."""
    known = sorted({name.rpartition(".")[2] for name in names if not name[-1].isdigit()}) + list(names)
    near = difflib.get_close_matches(re.sub(r"\\(.)", r"\1", target), known, n=3, cutoff=0.4) or known[:8]
    return (
        f"lora: target '{target}' is no linear layer of {', '.join(config.parts)}. Near names: {', '.join(near)}. "
        "Correct it, or name the part it belongs to in parts"
    )


def lora_layers(model: nn.Module) -> dict[str, LoraLinear]:
    """The layers with matrices, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLinear)}


def lora_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The matrices, by name."""
    return {
        f"{name}.{matrix}": layer.get_parameter(matrix)
        for name, layer in lora_layers(model).items()
        for matrix in ("lora_A", "lora_B")
    }


def quantized_sizes(model: nn.Module) -> dict[str, int]:
    """Weights that each parameter of a quantized layer stands for, by its name."""
    return {
        f"{name}.{held}": size
        for name, layer in lora_layers(model).items()
        if layer.quantization != "none"
        for held, size in (("weight_bits", layer.out_features * layer.in_features), ("weight_scale", 0))
    }


def initial_adapters(model: nn.Module, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """(parameter, whole value it begins with) of every matrix; the same however the model is spread."""
    for name, layer in lora_layers(model).items():
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        bound = 1.0 / math.sqrt(layer.in_features)
        yield layer.lora_A, torch.empty(layer.lora_A.shape).uniform_(-bound, bound, generator=generator)
        yield layer.lora_B, torch.zeros(layer.lora_B.shape)


def base_shapes(model: VLM) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter as a checkpoint folder holds it: of the model without matrices, and not quantized."""
    with torch.device("meta"):
        return checkpoint_shapes(VLM(model.config))


def merge_lora(weight_ND: Tensor, lora_A: Tensor, lora_B: Tensor, scale: float) -> Tensor:
    """weight + scale * B A, in fp32. Of matrices with more inputs or outputs (see `FeedForward`) those of the weight count."""
    N, D = weight_ND.shape
    return torch.addmm(weight_ND.float(), lora_B[:N].float(), lora_A[:, :D].float(), alpha=scale)
