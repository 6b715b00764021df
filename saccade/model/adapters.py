"""Many LoRA adapters on one model, chosen per token: read PEFT folders, keep their matrices in slots on the device.

    load_adapter   adapter_config.json, adapter_model.safetensors  ->  matrices by projection, checked, on the host
    AdapterBank    slots of fixed size for each projection of the decoder; they are filled and emptied while serving

The base weights are not touched and may be stored in any form. A token's slot is an integer on the device (0: the base
model), so that requests with different adapters share every step (`kernels/grouped_lora.py`).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from saccade.errors import CheckpointError
from saccade.kernels.grouped_lora import add_lora, grouped_lora, lora_swiglu
from saccade.model.checkpoint_reader import read_tensors, tensor_names
from saccade.model.linear import Projection, projections
from saccade.model.merged_projections import RowAdapters, merge_with_rows
from saccade.model.shard import Shard
from saccade.model.weights import check_finite
from saccade.processor.folder import read_json

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"

_MIN_RANK = 16
"""The smallest rank of the kernel."""
_PLAIN: dict[str, tuple[Any, ...]] = {
    "modules_to_save": (None, []), "bias": (None, "none"), "use_dora": (None, False), "fan_in_fan_out": (None, False),
    "lora_bias": (None, False), "rank_pattern": (None, {}), "alpha_pattern": (None, {}),
    "layer_replication": (None, []), "trainable_token_indices": (None,), "target_parameters": (None, []),
    "megatron_config": (None,), "use_qalora": (None, False), "alora_invocation_tokens": (None,),
    "arrow_config": (None,),
}  # fmt: skip
"""Settings that can change what an adapter computes, and their values that do not."""
_CHANGES_BASE = ("pissa", "olora", "loftq", "corda")
"""Initializations that change the base weights too."""
_MAX_LOW_SHARE = 1 / 4
"""Maximum rows of A of all slots, as a fraction of the outputs of their projections, for one product of both."""


@dataclass(frozen=True)
class Adapter:
    """The matrices of a LoRA adapter, on the host."""

    rank: int
    scale: float
    """The factor of B A x."""
    matrices: Mapping[str, tuple[Tensor, Tensor]]
    """A [R, D] and B [N, R] by name of the projection."""
    digest: bytes
    """sha256 of its files."""


# ------------------------------------------------------------------ read a folder


def load_adapter(folder: str | Path, shapes: Mapping[str, tuple[int, int]], family: Any) -> Adapter:
    """Read a PEFT folder; anything unsupported is refused. `shapes`: outputs and inputs of the projections, by name."""
    folder = Path(folder)
    rank, scale = _read_config(folder)
    if not (folder / WEIGHTS_FILE).is_file():
        raise CheckpointError(
            f"{folder}: no {WEIGHTS_FILE}. Only safetensors are read: save the adapter with PEFT again"
        )
    file = folder / WEIGHTS_FILE
    names = {name: _projection_and_matrix(folder, name, family) for name in tensor_names(file)}
    tensors = {
        names[name]: tensor for name, tensor in read_tensors(dict.fromkeys(names, file), names, torch.device("cpu"))
    }
    check_finite({f"{layer}.{matrix}": tensor for (layer, matrix), tensor in tensors.items()}, folder)
    layers = dict.fromkeys(layer for layer, _ in tensors)
    matrices = {layer: _pair(folder, layer, tensors, shapes, rank) for layer in layers}
    if not matrices:
        raise CheckpointError(f"{folder}: {WEIGHTS_FILE} has no tensors. Save the adapter again")
    return Adapter(rank, scale, matrices, _digest(folder))


def _digest(folder: Path) -> bytes:
    digest = hashlib.sha256((folder / CONFIG_FILE).read_bytes())
    with (folder / WEIGHTS_FILE).open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.digest()


def adapter_rank(folder: str | Path) -> int:
    """The rank of an adapter folder."""
    return _read_config(Path(folder))[0]


def _read_config(folder: Path) -> tuple[int, float]:
    """Rank and scale. Unsupported settings are refused by name."""
    if not (folder / CONFIG_FILE).is_file():
        raise CheckpointError(f"{folder}: no {CONFIG_FILE}. An adapter is a folder that PEFT or `saccade train` wrote")
    raw = read_json(folder / CONFIG_FILE)
    if raw.get("peft_type") != "LORA":
        raise CheckpointError(f"{folder}: peft_type is {raw.get('peft_type')!r}; only LORA adapters are served")
    for name, plain in _PLAIN.items():
        if raw.get(name) not in plain:
            raise CheckpointError(
                f"{folder}: {name} is {raw[name]!r}, which is not supported. Merge the adapter into its model "
                "with PEFT, or train without it"
            )
    start = raw.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
        raise CheckpointError(
            f"{folder}: init_lora_weights is {start!r}, which changes the base weights too. Convert it with "
            "PEFT's path_initial_model_for_weight_conversion"
        )
    rank, alpha = raw.get("r"), raw.get("lora_alpha")
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1 or not isinstance(alpha, int | float):
        raise CheckpointError(
            f"{folder}: r is {rank!r} and lora_alpha {alpha!r}; both must be numbers, r from 1. Copy "
            f"{CONFIG_FILE} again"
        )
    return rank, alpha / (math.sqrt(rank) if raw.get("use_rslora") else rank)


def _projection_and_matrix(folder: Path, name: str, family: Any) -> tuple[str, str]:
    """base_model.model.NAME.lora_A.weight to (projection, A), for names of any version of `transformers`."""
    module, _, matrix = name.removeprefix("base_model.model.").removesuffix(".weight").rpartition(".")
    if not name.startswith("base_model.model.") or matrix not in ("lora_A", "lora_B"):
        raise CheckpointError(
            f"{folder}: tensor {name} is not supported; only lora_A and lora_B of linear layers are served"
        )
    ours = family.name_in_model(f"{module}.weight")
    return (module if ours is None else ours.removesuffix(".weight")), matrix


def _pair(
    folder: Path,
    layer: str,
    tensors: Mapping[tuple[str, str], Tensor],
    shapes: Mapping[str, tuple[int, int]],
    rank: int,
) -> tuple[Tensor, Tensor]:
    if layer not in shapes:
        is_served = layer.partition(".")[0] in {name.partition(".")[0] for name in shapes}
        raise CheckpointError(
            f"{folder}: it adapts {layer}, which the model does not have. Use the adapter with the model it was "
            "trained on"
            if is_served or not layer.startswith(("vision.", "projector."))
            else f"{folder}: it adapts the vision tower or projector ({layer}), which is not served. Merge it "
            "into its model: saccade merge"
        )
    found = [tensors.get((layer, matrix)) for matrix in ("lora_A", "lora_B")]
    outputs, inputs = shapes[layer]
    expected = [(rank, inputs), (outputs, rank)]
    if any(tensor is None or tuple(tensor.shape) != shape for tensor, shape in zip(found, expected, strict=True)):
        stored = [None if tensor is None else list(tensor.shape) for tensor in found]
        raise CheckpointError(
            f"{folder}: lora_A and lora_B of {layer} are {stored[0]} and {stored[1]}, expected "
            f"{list(expected[0])} and {list(expected[1])}. "
            "Use the adapter with the model it was trained on"
        )
    lora_A, lora_B = found
    assert lora_A is not None and lora_B is not None, "checked above"  # noqa: PT018
    return lora_A, lora_B


# ------------------------------------------------------------------ slots on the device


class AdapterStack:
    """The matrices of all slots for projections of one input.

    If they are small enough, the matrices A are stored below the weight of the projections: one product then also
    computes A x of all slots. It is more than a token needs, but saves reading x again and a launch, most of the cost
    of an adapter in decode.
    """

    def __init__(self, parts: Sequence[Projection], scale_S: Tensor, rank: int, dtype: torch.dtype) -> None:
        self.part_sizes = tuple(part.out_features for part in parts)
        slots, device = len(scale_S), scale_S.device
        shape = (slots, len(parts), rank, parts[0].in_features)
        self._scale_S = scale_S
        self.low: Projection | None = None
        self._A = torch.zeros(shape, dtype=dtype, device=device)
        num_rows = math.prod(shape[:3])
        if num_rows <= _MAX_LOW_SHARE * sum(self.part_sizes):
            merged = merge_with_rows(parts, self._A.view(num_rows, -1))
            if merged is not None:
                self.low, rows = merged
                self._A = rows.view(shape)
        self._B = torch.zeros(slots, sum(self.part_sizes), rank, dtype=dtype, device=device)

    @property
    def num_bytes(self) -> int:
        """Device memory of all slots."""
        return self._A.nbytes + self._B.nbytes

    def add(self, y_TN: Tensor, x_TD: Tensor, chosen: RowAdapters) -> Tensor:
        """Add each row's adapter to the outputs of the projections, in place."""
        return grouped_lora(y_TN, x_TD, self._A, self._B, self._scale_S, chosen.groups, self.part_sizes)

    def add_low(self, y_TN: Tensor, low_TM: Tensor, chosen: RowAdapters) -> Tensor:
        """`add` with A x of all slots given."""
        return add_lora(y_TN, low_TM, self._B, self._scale_S, chosen.groups, self.part_sizes)

    def gated_low(self, y_TN: Tensor, low_TM: Tensor, chosen: RowAdapters) -> Tensor:
        """silu(gate) * up of outputs [gate, up] with each row's adapter added."""
        return lora_swiglu(y_TN, low_TM, self._B, self._scale_S, chosen.groups)

    def set(self, slot: int, part: int, matrices: tuple[Tensor, Tensor] | None) -> None:
        """Fill a slot of one projection, from 0; None: it has no adapter."""
        first = sum(self.part_sizes[:part])
        own_A, own_B = self._A[slot, part], self._B[slot, first : first + self.part_sizes[part]]
        own_A.zero_(), own_B.zero_()
        if matrices is not None:
            lora_A, lora_B = matrices
            own_A[: lora_A.shape[0], : lora_A.shape[1]].copy_(lora_A, non_blocking=True)
            own_B[: lora_B.shape[0], : lora_B.shape[1]].copy_(lora_B, non_blocking=True)


class AdapterBank:
    """Slots for the adapters of a model's decoder."""

    def __init__(
        self, model: nn.Module, *, num_slots: int, max_rank: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Allocate the slots of every projection of the decoder."""
        self.num_slots, self.max_rank = num_slots, max_rank
        self._scale_S = torch.zeros(num_slots, dtype=torch.float32, device=device)
        self._stacks: dict[str, tuple[AdapterStack, int]] = {}
        self.shapes: dict[str, tuple[int, int]] = {}
        """Outputs and inputs of the projections that can have adapters, by name."""
        self._shards: dict[str, Shard | None] = {}
        padded_rank = max(_MIN_RANK, 1 << (max_rank - 1).bit_length())
        for names in _groups(model):
            parts = [model.get_submodule(name) for name in names]
            stack = AdapterStack(parts, self._scale_S, padded_rank, dtype)  # type: ignore[arg-type]
            for number, (name, part) in enumerate(zip(names, parts, strict=True)):
                assert isinstance(part, Projection), "adapters are on projections"
                part.adapters = stack
                self._stacks[name], self.shapes[name] = (stack, number), part.whole_shape
                self._shards[name] = part.shard
        language: Any = model.get_submodule("language")
        language.num_adapter_slots = num_slots
        if device.type == "cuda":
            torch.cuda.empty_cache()  # weights that were merged into larger ones

    @property
    def num_bytes(self) -> int:
        """Device memory of all slots."""
        stacks = {id(stack): stack for stack, _ in self._stacks.values()}
        return sum(stack.num_bytes for stack in stacks.values())

    @torch.inference_mode()
    def set(self, slot: int, adapter: Adapter) -> None:
        """Fill a slot, from 0, after the work that is queued on the current stream."""
        assert adapter.rank <= self.max_rank, "the rank is checked before"
        for name, (stack, part) in self._stacks.items():
            stack.set(slot, part, _own_part(adapter.matrices.get(name), self._shards[name]))
        self._scale_S[slot] = adapter.scale


def _own_part(matrices: tuple[Tensor, Tensor] | None, shard: Shard | None) -> tuple[Tensor, Tensor] | None:
    """The matrices of this tensor rank: B A x of its outputs, or its part of the sum over the inputs."""
    if matrices is None or shard is None:
        return matrices
    lora_A, lora_B = matrices
    own = slice(shard.start, shard.stop)
    return (lora_A, lora_B[own]) if shard.dim == 0 else (lora_A[:, own], lora_B)


def _groups(model: nn.Module) -> list[tuple[str, ...]]:
    """Names of the decoder's projections, grouped by their input."""
    layers = {f"language.layers.{name}": module for name, module in projections(model.get_submodule("language.layers"))}
    grouped = [
        tuple(f"{prefix}.{name}" for name in names)
        for prefix, module in model.named_modules()
        if prefix.startswith("language.layers.")
        for names in getattr(module, "merged_projections", ())
    ]
    together = {name for names in grouped for name in names}
    return grouped + [(name,) for name in layers if name not in together]
