"""Merge a LoRA adapter into its base model: a PEFT folder and a checkpoint folder make another checkpoint folder.

    check the folders -> read the adapter -> per tensor of the base: read, add scale * B A in fp32, round once, write

Memory: the adapter, one tensor of the base, and one shard of the result.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from saccade.errors import CheckpointError
from saccade.model.adapters import CONFIG_FILE, load_adapter
from saccade.model.checkpoint_reader import read_tensors, tensor_files
from saccade.model.checkpoint_writer import CheckpointWriter
from saccade.model.families import family_of
from saccade.model.linear import projections
from saccade.model.lora_linear import merge_lora
from saccade.model.weights import (
    PROCESSOR_FILES,
    check_finite,
    config_for_export,
    match_tensors,
    meta_model,
    tensor_shapes,
)
from saccade.processor.folder import read_json


def base_of_adapter(adapter: Path) -> str:
    """The name of the base model in an adapter folder: a path, or ORG/NAME of the hub."""
    if not (adapter / CONFIG_FILE).is_file():
        raise CheckpointError(f"{adapter}: no {CONFIG_FILE}. An adapter is a folder that PEFT or `saccade train` wrote")
    name = read_json(adapter / CONFIG_FILE).get("base_model_name_or_path")
    if not isinstance(name, str) or not name:
        raise CheckpointError(f"{adapter}: {CONFIG_FILE} names no base model. Give it with --base")
    return name


def merge_adapter(
    adapter: Path, base: Path, out: Path, *, on_tensor: Callable[[str], None] = lambda _: None
) -> list[str]:
    """Write the checkpoint folder `out`: the weights of `base` with the adapter added, and its other files.

    Tensors keep the dtypes of `base`. Returns the names of the layers that have changed.
    """
    model, quantization = meta_model(base)
    if quantization is not None:
        raise CheckpointError(
            f"{base}: its weights are quantized, and merged weights would be rounded again. Merge into the "
            "original model, then compress "
            "the result; or serve the adapter as it is: saccade serve --adapter"
        )
    family, files = family_of(base), tensor_files(base)
    names = match_tensors(tensor_shapes(files, any_dtype=True), model, family, base)
    found = load_adapter(adapter, _mergeable_shapes(model), family)
    num_bytes = sum(file.stat().st_size for file in set(files.values()))
    with CheckpointWriter(out) as writer:
        writer.check_space(num_bytes)
        writer.write_json("config.json", config_for_export(base))
        for name in PROCESSOR_FILES:
            if (base / name).is_file():
                writer.copy(base / name)
        for name, tensor in read_tensors(files, names, torch.device("cpu")):
            matrices = (
                found.matrices.get(names[name].removesuffix(".weight")) if names[name].endswith(".weight") else None
            )
            merged = tensor if matrices is None else merge_lora(tensor, *matrices, found.scale).to(tensor.dtype)
            check_finite({name: merged}, base)
            writer.add(family.name_on_disk(names[name]), merged)
            on_tensor(name)
    return list(found.matrices)


def _mergeable_shapes(model: torch.nn.Module) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of every projection. A tied head is the embedding, which cannot change alone."""
    stored = dict(model.named_parameters())
    return {name: layer.stored_shape for name, layer in projections(model) if f"{name}.weight" in stored}
