"""Trained weights as a checkpoint folder in Hugging Face's layout, which evaluation, compression, serving and others read.

Tensors are gathered one at a time and written by rank 0: no rank ever holds the whole model.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from shutil import rmtree

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from saccade.device import DTYPE_NAMES
from saccade.errors import CheckpointError
from saccade.model.families import vision_language_family
from saccade.model.vlm import VLM
from saccade.model.weights import PROCESSOR_FILES, CheckpointWriter
from saccade.processor.folder import read_config
from saccade.train.adapter import write_adapter
from saccade.train.fill import stored_tensors
from saccade.train.lora import base_shapes, lora_layers, lora_parameters, merge_lora
from saccade.world import World


def export(
    out: Path,
    model: VLM,
    weights: Mapping[str, Tensor],
    *,
    like: Path,
    dtype: torch.dtype,
    world: World,
    only_adapter: bool = False,
) -> None:
    """Write `weights`, whole or sharded and named as the model's parameters, with the other files of the folder `like`.

    LoRA's matrices are merged, and are in `adapter/` by themselves; with `only_adapter` they are all that is written. Weights that
    they stand beside in 4 or 8 bits are taken from `like`, the folder the run began with.

    Every rank must call it. A folder that is there already is replaced.
    """
    shapes, matrices = base_shapes(model), _matrices(model, weights, world)
    wanted = {} if only_adapter else {name: weights[name] for name in shapes if name in weights}
    whole = _gathered(wanted, world.device)
    failure = None
    if world.is_main:
        try:
            if out.exists():
                rmtree(out)
            if not only_adapter:
                quantized = {name: shape for name, shape in shapes.items() if name not in weights}
                originals = stored_tensors(like, quantized) if quantized else ()
                merged = _merged(chain(whole, originals), shapes, model, matrices)
                _write(out, merged, like, dtype, num_parameters=sum(map(math.prod, shapes.values())))
            if matrices:
                write_adapter(out if only_adapter else out / "adapter", model, matrices, like=like, dtype=dtype)
        except (CheckpointError, OSError) as error:
            failure = str(error)
    for _ in whole:  # every rank takes part in gathering, also in what a failed write has left over
        pass
    failure = world.share(failure)
    if failure is not None:
        raise CheckpointError(failure)


def _gathered(weights: Mapping[str, Tensor], device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Each tensor whole."""
    for name, tensor in weights.items():
        whole = tensor.detach()
        if isinstance(whole, DTensor):
            whole = whole.to(device).full_tensor()  # type: ignore[attr-defined]
        yield name, whole


def _matrices(model: VLM, weights: Mapping[str, Tensor], world: World) -> dict[str, Tensor]:
    """LoRA's matrices, whole and in host memory; on the main rank alone."""
    gathered = _gathered({name: weights[name] for name in lora_parameters(model)}, world.device)
    return {name: whole.cpu() for name, whole in gathered if world.is_main}


def _merged(
    tensors: Iterable[tuple[str, Tensor]],
    shapes: Mapping[str, tuple[int, ...]],
    model: VLM,
    matrices: Mapping[str, Tensor],
) -> Iterator[tuple[str, Tensor]]:
    """Each tensor without what is added to it in memory, and with LoRA's matrices added where they stand beside it, in fp32."""
    layers = lora_layers(model)
    for name, tensor in tensors:
        stored = tensor[tuple(slice(size) for size in shapes[name])]
        layer = name.removesuffix(".weight")
        if layer in layers:
            lora_A, lora_B = (matrices[f"{layer}.{matrix}"].to(stored.device) for matrix in ("lora_A", "lora_B"))
            stored = merge_lora(stored, lora_A, lora_B, layers[layer].scale)
        yield name, stored


def _write(
    out: Path, tensors: Iterator[tuple[str, Tensor]], like: Path, dtype: torch.dtype, *, num_parameters: int
) -> None:
    raw = read_config(like)
    family = vision_language_family(raw.get("model_type"))
    with CheckpointWriter(out) as writer:
        writer.check_space(num_parameters * dtype.itemsize)
        writer.write_json("config.json", raw | {"torch_dtype" if "torch_dtype" in raw else "dtype": DTYPE_NAMES[dtype]})
        for name in PROCESSOR_FILES:
            if (like / name).is_file():
                writer.copy(like / name)
        for name, tensor in tensors:
            writer.add(family.name_on_disk(name), tensor.to(dtype))
