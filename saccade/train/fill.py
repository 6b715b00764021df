"""Weights of a checkpoint folder into a model that lies on one device or is sharded over many.

The model is built without memory (`meta`), wrapped, and given empty memory; then every rank reads the files tensor by tensor and
keeps its part. So the model never lies in memory as a whole, and no rank waits for another.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from saccade.errors import CheckpointError
from saccade.model.families import vision_language_family
from saccade.model.tensor_reader import read_tensors
from saccade.model.vlm import VLM
from saccade.model.weights import tensor_files, tensor_shapes
from saccade.processor.folder import read_config
from saccade.train.lora import base_shapes, first_matrices, lora_layers


def empty_model(folder: Path, dtype: torch.dtype) -> VLM:
    """The model a checkpoint folder describes, without memory behind its parameters."""
    raw = read_config(folder)
    with torch.device("meta"):
        return VLM(vision_language_family(raw.get("model_type")).parse_config(raw)).to(dtype)


def fill(model: VLM, folder: Path, *, seed: int = 0) -> None:
    """Copy the folder's weights into the model's parameters, whole or sharded. LoRA's matrices, which are in no folder, begin anew."""
    parameters, layers = dict(model.named_parameters()), lora_layers(model)
    with torch.no_grad():
        for name, stored in stored_tensors(folder, base_shapes(model)):
            layer = layers.get(name.removesuffix(".weight"))
            if layer is None:
                write_whole(parameters[name], _grown(stored, parameters[name].shape))
                continue
            whole = _grown(stored, (layer.out_features, layer.in_features)).to(layer.lora_A.device)
            for held_name, held in layer.held(whole).items():
                write_whole(layer.get_parameter(held_name), held)
        for matrix, value in first_matrices(model, seed):
            write_whole(matrix, value)


def _grown(stored: Tensor, shape: Sequence[int]) -> Tensor:
    """With zeros at the end of each dim, up to the shape it has in memory."""
    return F.pad(stored, [size for have, want in zip(stored.shape[::-1], shape[::-1], strict=True) for size in (0, want - have)])  # fmt: skip


def write_whole(target: Tensor, whole: Tensor) -> None:
    """Copy a whole tensor into `target`, of which this rank may hold only some rows."""
    if not isinstance(target, DTensor):
        target.copy_(whole)
        return
    [axis] = [axis for axis, placement in enumerate(target.placements) if placement.is_shard()]
    parts = whole.chunk(target.device_mesh.size(axis))  # as FSDP cuts: the last ranks may have less, or nothing
    rank = target.device_mesh.get_local_rank(axis)
    if rank < len(parts):
        target.to_local().copy_(parts[rank])


def stored_tensors(folder: Path, shapes: dict[str, tuple[int, ...]]) -> Iterator[tuple[str, Tensor]]:
    """The parameters' values as the files hold them, by the model's names; complete, or an error says what is missing."""
    family = vision_language_family(read_config(folder).get("model_type"))
    files = tensor_files(folder)
    found = {name: (family.name_in_model(name), shape) for name, shape in tensor_shapes(files, any_dtype=True).items()}
    names = {disk: ours for disk, (ours, shape) in found.items() if ours in shapes and shape == shapes[ours]}
    if missing := sorted(shapes.keys() - set(names.values())):
        raise CheckpointError(
            f"{folder}: {len(missing)} tensors are missing or of another shape than config.json says, "
            f"among them {', '.join(missing[:4])}. Use the config.json these weights were saved with"
        )
    for name, tensor in read_tensors(files, names, torch.device("cpu")):
        yield names[name], tensor
