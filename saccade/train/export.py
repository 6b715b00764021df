"""Trained weights as a checkpoint folder in Hugging Face's layout, which evaluation, compression, serving and others read.

Tensors are gathered one at a time and written by rank 0: no rank ever holds the whole model.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from shutil import rmtree

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from saccade.device import DTYPE_NAMES
from saccade.errors import CheckpointError
from saccade.model.families import vision_language_family
from saccade.model.layers import stored_shapes
from saccade.model.vlm import VLM
from saccade.model.weights import PROCESSOR_FILES, CheckpointWriter
from saccade.processor.folder import read_config
from saccade.world import World


def export(
    out: Path, model: VLM, weights: Mapping[str, Tensor], *, like: Path, dtype: torch.dtype, world: World
) -> None:
    """Write `weights`, whole or sharded and named as the model's parameters, with the other files of the folder `like`.

    Every rank must call it. A folder that is there already is replaced.
    """
    whole = _gathered(weights, stored_shapes(model), dtype, world.device)
    failure = None
    if world.is_main:
        try:
            _write(out, whole, like, dtype, num_parameters=sum(tensor.numel() for tensor in weights.values()))
        except (CheckpointError, OSError) as error:
            failure = str(error)
    for _ in whole:  # every rank takes part in gathering, also in what a failed write has left over
        pass
    failure = world.share(failure)
    if failure is not None:
        raise CheckpointError(failure)


def _gathered(
    weights: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Each tensor whole, without what is added to it in memory."""
    for name, tensor in weights.items():
        whole = tensor.detach()
        if isinstance(whole, DTensor):
            whole = whole.to(device).full_tensor()  # type: ignore[attr-defined]
        yield name, whole[tuple(slice(size) for size in shapes[name])].to(dtype)


def _write(
    out: Path, tensors: Iterator[tuple[str, Tensor]], like: Path, dtype: torch.dtype, *, num_parameters: int
) -> None:
    raw = read_config(like)
    family = vision_language_family(raw.get("model_type"))
    if out.exists():
        rmtree(out)
    with CheckpointWriter(out) as writer:
        writer.check_space(num_parameters * dtype.itemsize)
        writer.write_json("config.json", raw | {"torch_dtype" if "torch_dtype" in raw else "dtype": DTYPE_NAMES[dtype]})
        for name in PROCESSOR_FILES:
            if (like / name).is_file():
                writer.copy(like / name)
        for name, tensor in tensors:
            writer.add(family.name_on_disk(name), tensor)
