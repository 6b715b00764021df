"""The oracle of quantized checkpoints: folders of the `compressed-tensors` package, and the weights that it reads."""

import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
from compressed_tensors.quantization.quant_args import QuantizationArgs
from compressed_tensors.quantization.utils import calculate_qparams
from model.hugging_face import Oracle
from safetensors.torch import save_file
from transformers import PreTrainedModel

_decompressed: dict[Path, PreTrainedModel] = {}

IGNORE = ("re:.*lm_head", "re:.*visual.*", "re:.*vision_tower.*", "re:.*multi_modal_projector.*")


def write_quantized(
    source: Path, out: Path, preset: str, *, ignore: tuple[str, ...] = IGNORE,
    change: Callable[[QuantizationArgs], None] | None = None, inputs: QuantizationArgs | None = None,
) -> Path:  # fmt: skip
    """Quantize the folder `source` into `out` with a preset of the package, round to nearest.

    `out`-plain gets the decompressed weights. `change`: fields of the preset's weights, such as the group size.
    `inputs`: activations other than the preset's.
    """
    model = Oracle(source).model
    config = QuantizationConfig(config_groups={preset: ["Linear"]}, ignore=list(ignore))
    if change is not None:
        change(config.config_groups[preset].weights)
    if inputs is not None:
        config.config_groups[preset].input_activations = inputs
    apply_quantization_config(model, config)
    for module in model.modules():
        if getattr(module, "quantization_scheme", None) is not None:
            _set_scales(module)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(out)
    compressor.update_config(out)
    compressor.decompress_model(model)
    _decompressed[out] = model.eval()
    plain = out.with_name(f"{out.name}-plain")
    shutil.copytree(source, plain)
    unread = ("_scale", "_zero_point", "_shape", "_packed")
    weights = {name: tensor for name, tensor in model.state_dict().items() if not name.endswith(unread)}
    save_file({name: tensor.clone() for name, tensor in weights.items()}, plain / "model.safetensors")
    for file in source.iterdir():
        if not (out / file.name).exists():
            shutil.copy(file, out / file.name)
    return out


def load_decompressed(folder: Path) -> PreTrainedModel:
    """The model of `transformers` with the package's decompressed weights and its rounding of activations."""
    return _decompressed[folder]


@torch.no_grad()
def _set_scales(module: torch.nn.Linear) -> None:
    args, weight = module.quantization_scheme.weights, module.weight
    sizes = {"channel": weight.shape[1], "group": args.group_size, "tensor": weight.numel()}
    groups = weight.reshape(-1, sizes[str(getattr(args.strategy, "value", args.strategy))])
    scale, zero_point = calculate_qparams(groups.amin(1), groups.amax(1), args)
    module.weight_scale.copy_(scale.view_as(module.weight_scale))
    if hasattr(module, "weight_zero_point"):
        module.weight_zero_point.copy_(zero_point.view_as(module.weight_zero_point))
    if hasattr(module, "input_scale"):
        inputs = module.quantization_scheme.input_activations
        scale, zero_point = calculate_qparams(
            torch.tensor([-6.0 if inputs.symmetric else -4.0]), torch.tensor([6.0]), inputs
        )
        module.input_scale.copy_(scale)
        module.input_zero_point.copy_(zero_point)
