"""Load a checkpoint folder into a (sharded) model; export a checkpoint folder or a LoRA adapter.

Loading: the model is built on the meta device, sharded, and allocated; then every rank reads the files tensor by tensor
and keeps its shard. No rank ever holds the full model, and no rank waits for another. Exporting gathers one tensor at a
time; rank 0 writes.

An adapter folder has PEFT's layout, which `peft`, `transformers` and most servers read with the original model:

    adapter_config.json          rank, alpha, and the layers by their names in `transformers`
    adapter_model.safetensors    base_model.model.NAME.lora_A.weight [R, D], base_model.model.NAME.lora_B.weight [N, R]
"""

import json
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from saccade.device import DTYPE_NAMES
from saccade.errors import CheckpointError
from saccade.files import atomic_write
from saccade.model.checkpoint_reader import read_tensors, tensor_files
from saccade.model.checkpoint_writer import CheckpointWriter
from saccade.model.families import family_of, load_model_config
from saccade.model.lora_linear import LoraLinear, merge_lora
from saccade.model.shard import Shard
from saccade.model.vlm import VLM
from saccade.model.weights import PROCESSOR_FILES, check_finite, config_for_export, tensor_shapes
from saccade.train.dtensor import copy_full_tensor
from saccade.train.lora import base_shapes, initial_adapters, lora_layers, lora_parameters
from saccade.train.quantization_aware import fake_quantized_layers
from saccade.world import World

# ------------------------------------------------------------------ load


def meta_model(folder: Path, dtype: torch.dtype) -> VLM:
    """The model described by a checkpoint folder, on the meta device."""
    with torch.device("meta"):
        return VLM(load_model_config(folder)).to(dtype)


def load_weights(
    model: VLM,
    folder: Path,
    *,
    seed: int = 0,
    masters_device: torch.device | str = "cpu",
    parts: Mapping[str, Shard] | None = None,
) -> dict[str, Tensor]:
    """Load a checkpoint folder into a plain or sharded model; LoRA adapters, which no folder holds, start from `seed`.

    Returns the values, in fp32 and on `masters_device`, of trained parameters that have lower precision than the
    folder. The optimizer's masters start from them, so that they equal the fp32 parameters of a sharded model.

    `parts`: what this tensor rank holds of divided parameters; it reads nothing else.
    """
    parameters, layers = dict(model.named_parameters()), lora_layers(model)
    names: dict[Tensor, str] = {parameter: name for name, parameter in parameters.items()}
    masters: dict[str, Tensor] = {}
    parts = parts or {}
    # int8 weights have a scale per output, which needs all inputs.
    whole = {f"{name}.weight" for name, layer in layers.items() if layer.quantization == "int8"} & parts.keys()
    slices = {name: _slices_of(part) for name, part in parts.items() if name not in whole}

    def load(parameter: Tensor, full: Tensor) -> None:
        copy_full_tensor(parameter, full)
        if parameter.requires_grad and parameter.dtype not in (torch.float32, full.dtype):
            masters[names[parameter]] = full.to(masters_device, torch.float32)

    with torch.no_grad():
        shapes = {
            name: shape
            for name, shape in base_shapes(model).items()
            if name in parameters or name.removesuffix(".weight") in layers
        }  # not those of other ranks of a pipeline
        for name, tensor in checkpoint_tensors(folder, shapes, slices):
            layer = layers.get(name.removesuffix(".weight"))
            if layer is None:
                load(parameters[name], _pad_to(tensor, parameters[name].shape))
                continue
            weight = tensor if name in whole else _pad_to(tensor, (layer.out_features, layer.in_features))
            for stored_name, stored in layer.stored_weight(weight.to(layer.lora_A.device)).items():
                load(layer.get_parameter(stored_name), stored)
        for adapter, value in initial_adapters(model, seed):
            name = names[adapter]
            load(adapter, value[_slices_of(parts[name])] if name in parts else value)
    return masters


def _slices_of(part: Shard) -> tuple[slice, ...]:
    own = slice(part.start, part.stop)
    return (own,) if part.dim == 0 else (slice(None), own)


def _pad_to(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Pad each dim with zeros at its end, up to the shape in memory."""
    return F.pad(
        tensor, [size for have, want in zip(tensor.shape[::-1], shape[::-1], strict=True) for size in (0, want - have)]
    )


def checkpoint_tensors(
    folder: Path, shapes: Mapping[str, tuple[int, ...]], slices: Mapping[str, tuple[slice, ...]] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield (parameter name, tensor) of a checkpoint folder. Missing tensors and NaN or inf values are errors.

    `slices`: the part of a parameter that is read; default: all of it.
    """
    names, files = checkpoint_names(folder, shapes), tensor_files(folder)
    parts = {name: slices[ours] for name, ours in names.items() if slices and ours in slices}
    for name, tensor in read_tensors(files, names, torch.device("cpu"), parts):
        check_finite({name: tensor}, folder)
        yield names[name], tensor


def checkpoint_names(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """Name on disk to parameter name, for all parameters in `shapes`. Reads only the headers of the files."""
    family = family_of(folder)
    on_disk = tensor_shapes(tensor_files(folder), any_dtype=True)
    found = {name: (family.name_in_model(name), shape) for name, shape in on_disk.items()}
    names = {disk: ours for disk, (ours, shape) in found.items() if ours is not None and shapes.get(ours) == shape}
    if missing := sorted(shapes.keys() - set(names.values())):
        shown = ", ".join(family.name_on_disk(name) for name in missing[:4])
        raise CheckpointError(
            f"{folder}: {len(missing)} tensors are missing or do not have the shape that config.json implies, "
            f"among them {shown}. Use the config.json these weights were saved with"
        )
    return names


# ------------------------------------------------------------------ export

Gather = Callable[[str, Tensor], Tensor]
"""What a tensor rank holds of a parameter, by name, to the whole of it. Collective."""


def export_checkpoint(
    out: Path,
    model: VLM,
    weights: Mapping[str, Tensor],
    *,
    like: Path,
    dtype: torch.dtype,
    world: World,
    only_adapter: bool = False,
    gather: Gather = lambda _, tensor: tensor,
) -> None:
    """Write `weights` (plain or sharded, by parameter name) as a checkpoint folder, with the other files of `like`.

    LoRA adapters are merged, and also written to `adapter/`; with `only_adapter` nothing else is written. Base weights
    that are quantized in memory are read from `like`, the folder the run started from.

    `gather` makes the whole tensor, by parameter name, of what tensor ranks hold parts of.

    Collective: every rank must call it. An existing folder is replaced.
    """
    shapes, adapters = base_shapes(model), _full_adapters(model, weights, world, gather)
    wanted = {} if only_adapter else {name: weights[name] for name in shapes if name in weights}
    full_tensors = _full_tensors(wanted, world.device, gather)
    failure = None
    if world.is_main:
        try:
            if out.exists():
                shutil.rmtree(out)
            if not only_adapter:
                quantized = {name: shape for name, shape in shapes.items() if name not in weights}
                originals = checkpoint_tensors(like, quantized) if quantized else ()
                merged = _merged(chain(full_tensors, originals), shapes, model, adapters)
                _write(out, merged, like, dtype, num_parameters=sum(map(math.prod, shapes.values())))
            if adapters:
                export_adapter(out if only_adapter else out / "adapter", model, adapters, like=like, dtype=dtype)
        except (CheckpointError, OSError) as error:
            failure = str(error)
    for _ in full_tensors:  # gathering is collective: finish it on every rank, also after a failed write
        pass
    failure = world.broadcast(failure)
    if failure is not None:
        raise CheckpointError(failure)


def _full_tensors(weights: Mapping[str, Tensor], device: torch.device, gather: Gather) -> Iterator[tuple[str, Tensor]]:
    """Gather each tensor."""
    for name, tensor in weights.items():
        full = tensor.detach()
        if isinstance(full, DTensor):
            full = full.to(device).full_tensor()  # type: ignore[attr-defined]
        yield name, gather(name, full)


def _full_adapters(model: VLM, weights: Mapping[str, Tensor], world: World, gather: Gather) -> dict[str, Tensor]:
    """LoRA adapters, gathered to host memory; on the main rank only."""
    gathered = _full_tensors({name: weights[name] for name in lora_parameters(model)}, world.device, gather)
    return {name: full.cpu() for name, full in gathered if world.is_main}


def _merged(
    tensors: Iterable[tuple[str, Tensor]],
    shapes: Mapping[str, tuple[int, ...]],
    model: VLM,
    adapters: Mapping[str, Tensor],
) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors without padding, with LoRA adapters merged in fp32, or rounded to the grid they were trained on."""
    layers, rounded = lora_layers(model), fake_quantized_layers(model)
    for name, tensor in tensors:
        unpadded = tensor[tuple(slice(size) for size in shapes[name])]
        layer = name.removesuffix(".weight")
        if layer in layers:
            lora_A, lora_B = (adapters[f"{layer}.{matrix}"].to(unpadded.device) for matrix in ("lora_A", "lora_B"))
            unpadded = merge_lora(unpadded, lora_A, lora_B, layers[layer].scale)
        elif layer in rounded and name.endswith(".weight"):
            unpadded = rounded[layer].on_grid(unpadded)
        yield name, unpadded


def _write(
    out: Path, tensors: Iterator[tuple[str, Tensor]], like: Path, dtype: torch.dtype, *, num_parameters: int
) -> None:
    raw = config_for_export(like)
    family = family_of(like)
    with CheckpointWriter(out) as writer:
        writer.check_space(num_parameters * dtype.itemsize)
        writer.write_json("config.json", raw | {"torch_dtype" if "torch_dtype" in raw else "dtype": DTYPE_NAMES[dtype]})
        for name in PROCESSOR_FILES:
            if (like / name).is_file():
                writer.copy(like / name)
        for name, tensor in tensors:
            writer.add(family.name_on_disk(name), tensor.to(dtype))


def export_adapter(out: Path, model: VLM, adapters: Mapping[str, Tensor], *, like: Path, dtype: torch.dtype) -> None:
    """Write LoRA adapters (full tensors, by parameter name) in PEFT's layout; `like` is the base model's folder."""
    family = family_of(like)
    layers, shapes = lora_layers(model), base_shapes(model)
    tensors: dict[str, Tensor] = {}
    for name in layers:
        N, D = shapes[f"{name}.weight"]
        prefix = f"base_model.model.{family.name_in_transformers(name)}"
        tensors[f"{prefix}.lora_A.weight"] = adapters[f"{name}.lora_A"][:, :D].to(dtype).contiguous()
        tensors[f"{prefix}.lora_B.weight"] = adapters[f"{name}.lora_B"][:N].to(dtype).contiguous()
    config = _adapter_config(next(iter(layers.values())), like) | {
        "target_modules": [family.name_in_transformers(name) for name in layers]
    }
    try:
        with atomic_write(out) as partial:
            partial.mkdir()
            save_file(tensors, partial / "adapter_model.safetensors", metadata={"format": "pt"})
            (partial / "adapter_model.safetensors").chmod(0o644)  # safetensors makes it readable by the owner only
            (partial / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{out}: the adapter was not written: {error}. Is the disk full?") from error


def _adapter_config(layer: LoraLinear, like: Path) -> dict[str, Any]:
    """adapter_config.json without target_modules; all adapters of a stage have the same settings."""
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
