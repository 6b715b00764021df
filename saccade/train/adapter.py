"""LoRA matrices alone, as a folder in PEFT's layout, which `peft`, `transformers` and most servers read beside the original model.

adapter_config.json          rank, alpha, and the layers by their names in the model that `transformers` builds
adapter_model.safetensors    base_model.model.NAME.lora_A.weight [R, D], base_model.model.NAME.lora_B.weight [N, R]
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from saccade.errors import CheckpointError
from saccade.files import atomic_write
from saccade.model.families import vision_language_family
from saccade.model.vlm import VLM
from saccade.processor.folder import read_config
from saccade.train.lora import LoraLinear, base_shapes, lora_layers


def write_adapter(out: Path, model: VLM, matrices: Mapping[str, Tensor], *, like: Path, dtype: torch.dtype) -> None:
    """Write the model's matrices, whole and named as its parameters; `like` is the folder whose weights they stand beside."""
    family = vision_language_family(read_config(like).get("model_type"))
    layers, shapes = lora_layers(model), base_shapes(model)
    tensors: dict[str, Tensor] = {}
    for name in layers:
        N, D = shapes[f"{name}.weight"]
        prefix = f"base_model.model.{family.name_in_transformers(name)}"
        tensors[f"{prefix}.lora_A.weight"] = matrices[f"{name}.lora_A"][:, :D].to(dtype).contiguous()
        tensors[f"{prefix}.lora_B.weight"] = matrices[f"{name}.lora_B"][:N].to(dtype).contiguous()
    described = _describe(next(iter(layers.values())), like) | {
        "target_modules": [family.name_in_transformers(name) for name in layers]
    }
    try:
        with atomic_write(out) as partial:
            partial.mkdir()
            save_file(tensors, partial / "adapter_model.safetensors", metadata={"format": "pt"})
            (partial / "adapter_model.safetensors").chmod(0o644)  # safetensors writes for the owner alone
            (partial / "adapter_config.json").write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{out}: the adapter was not written: {error}. Is the disk full?") from error


def _describe(layer: LoraLinear, like: Path) -> dict[str, Any]:
    """adapter_config.json, but for the layers; all layers of a stage are alike."""
    return {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": str(like),
        "r": layer.rank,
        "lora_alpha": int(layer.alpha) if layer.alpha.is_integer() else layer.alpha,
        "lora_dropout": layer.dropout,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "modules_to_save": None,
    }
