"""Adapters written by PEFT, and checkpoints with merged adapters, with which served ones are compared."""

import shutil
from pathlib import Path
from typing import Any

import torch
from model.hugging_face import Oracle
from peft import LoraConfig, get_peft_model

SETTINGS: dict[str, dict[str, Any]] = {
    "everything": {"r": 8, "lora_alpha": 16, "target_modules": r".*language_model.*_proj"},
    "attention": {"r": 4, "lora_alpha": 3, "use_rslora": True, "target_modules": r".*language_model.*(q_proj|v_proj)"},
    "mlp": {"r": 16, "lora_alpha": 12, "target_modules": r".*language_model\.layers\.1\.mlp\..*_proj"},
}


def write_adapters(base: Path, folder: Path, *, merges: bool = True, **settings: dict[str, Any]) -> dict[str, Path]:
    """Write adapters and return their folders by name. With `merges`, NAME-merged is `base` with an adapter merged."""
    found = {}
    for seed, (name, options) in enumerate((settings or SETTINGS).items()):
        torch.manual_seed(seed)
        model = get_peft_model(Oracle(base).model, LoraConfig(**options))
        for parameter_name, parameter in model.named_parameters():
            if "lora_" in parameter_name:
                torch.nn.init.normal_(parameter, std=0.15)
        model.save_pretrained(folder / name)
        found[name] = folder / name
        if not merges:
            continue
        merged = folder / f"{name}-merged"
        model.merge_and_unload().save_pretrained(merged)
        for file in base.iterdir():
            if not (merged / file.name).exists():
                shutil.copy(file, merged / file.name)
    return found
