"""LoRA and QLoRA: low-rank adapters on frozen linear layers (`model/lora_linear.py`), added to a model and merged.

Legend: N outputs, D inputs, R rank.

A is initialized randomly and B with zeros, so training starts from the unchanged model. A and B are ordinary parameters
(fp32 masters, sharded, saved) with `optimizer.lr` or the rate of a matching key of `optimizer.lrs`, such as `lora`;
everything else is frozen. With `quantize_base` (QLoRA) the weights of layers with adapters are stored in 4 or 8 bits,
other layers as they are.

Merging adds alpha / R * B A to W in fp32 and rounds once. With QLoRA, W is then the original weight, not the quantized
one that A and B were trained with: the export has no quantization error, but differs from the trained model by that
error (up to about half a scale per weight), including what A and B learned to compensate.
"""

import contextlib
import difflib
import re
import zlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from saccade.errors import ConfigError
from saccade.model.linear import Linear, checkpoint_shapes
from saccade.model.lora_linear import LoraLinear
from saccade.model.vlm import VLM
from saccade.train.stage_config import LoraConfig


def add_lora(model: VLM, config: LoraConfig, dtype: torch.dtype) -> None:
    """Replace the layers that `config` names by LoRA layers, on the meta device. `dtype`: compute dtype."""
    linears = {name: module for name, module in model.named_modules() if type(module) is Linear}
    for name in target_layers(list(linears), config):
        parent, _, child = name.rpartition(".")
        layer = LoraLinear(
            linears[name], rank=config.rank, alpha=config.alpha, dropout=config.dropout,
            quantization=config.quantize_base, dtype=dtype,
        )  # fmt: skip
        setattr(model.get_submodule(parent), child, layer)


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
    """Return the error message for a target without a match, with similar names."""
    known = sorted({name.rpartition(".")[2] for name in names if not name[-1].isdigit()}) + list(names)
    near = difflib.get_close_matches(re.sub(r"\\(.)", r"\1", target), known, n=3, cutoff=0.4) or known[:8]
    return (
        f"lora: target '{target}' matches no linear layer of {', '.join(config.parts)}. "
        f"Similar names: {', '.join(near)}. Correct it, or add the part it belongs to to parts"
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


@contextlib.contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Disable the adapters until the end of this context, for passes without gradients."""
    layers = list(lora_layers(model).values())
    for layer in layers:
        layer.is_adapted = False
    try:
        yield
    finally:
        for layer in layers:
            layer.is_adapted = True


def quantized_sizes(model: nn.Module) -> dict[str, int]:
    """Number of weights that each parameter of a quantized layer represents, by name."""
    return {
        f"{name}.{held}": size
        for name, layer in lora_layers(model).items()
        if layer.quantization != "none"
        for held, size in (("weight_bits", layer.out_features * layer.in_features), ("weight_scale", 0))
    }


def initial_adapters(model: nn.Module, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (parameter, full initial value) of every adapter parameter, the same for any sharding."""
    for name, layer in lora_layers(model).items():
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        yield from layer.initial_adapter(generator)


def base_shapes(model: VLM) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter in a checkpoint folder: without adapters, padding and quantization."""
    with torch.device("meta"):
        return checkpoint_shapes(VLM(model.config))
