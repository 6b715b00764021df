"""Saved training states on disk: find the one to resume from, verify it, load its tensors (layout: `saver.py`)."""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load

from saccade.errors import CheckpointError
from saccade.world import World

logger = logging.getLogger(__name__)

COMPLETE, PROGRESS, RANDOM = "complete.json", "progress.json", "random.json"


@dataclass(frozen=True)
class SavedState:
    """A complete training state on disk."""

    path: Path
    progress: dict[str, Any]

    @property
    def step(self) -> int:
        """The step it was saved after."""
        return int(self.path.name.removeprefix("step-"))

    @property
    def is_validated(self) -> bool:
        """Whether the validation after its step was done."""
        return bool(self.progress["is_stage_done"]) or "validation" in self.progress.get("done", ())


# ------------------------------------------------------------------ find and verify


def states(folder: Path) -> list[SavedState]:
    """The complete states of a run, oldest first. Sizes are checked, checksums are not."""
    return [_read(path) for path in sorted(folder.glob("step-*")) if _defect(path) is None]


def newest_state(folder: Path, world: World, *, verify: bool = False) -> SavedState | None:
    """The state to resume from, the same on every rank; None for a new run.

    With `verify` the checksums are compared, each rank reading part of the files; a damaged state is announced and set
    aside. If no other state is left, that is an error: training from the beginning would discard the run's metrics.
    """
    names: list[str] = world.broadcast(sorted(path.name for path in folder.glob("step-*")) if world.is_main else None)
    while names:
        path = folder / names.pop()
        found = world.gather(_defect(path, world if verify else None))
        defects = [defect for defect in found if defect is not None]
        if not defects:
            return _read(path)
        if not names:
            raise CheckpointError(
                f"{path} is damaged, or of an earlier version: {defects[0]}, and there is no other state. "
                "Remove it to train from the beginning, or use another run folder: --set run=NAME"
            )
        if world.is_main:
            rejected = path.rename(path.with_name(f"rejected-{path.name}"))
            logger.warning(
                "%s is damaged: %s. It is kept as %s; using the state before it", path, defects[0], rejected.name
            )
    return None


def state_before(folder: Path, world: World, *, stage: int, optimizer_steps: int) -> SavedState | None:
    """The state of a stage to roll back to, the same on every rank: the newest one with fewer optimizer steps.

    A state with as many has the weights that led to the bad steps. It is used if there is no older one, because the
    weights in memory may be damaged, unless it was saved between bad steps.
    """
    found = [state for state in states(folder) if state.progress["stage"] == stage] if world.is_main else []
    older = [state for state in found if state.progress["optimizer_steps"] < optimizer_steps]
    equal = [state for state in found if not state.progress["guard"]["num_skips"]]
    name = world.broadcast(next((chosen[-1].path.name for chosen in (older, equal) if chosen), None))
    return None if name is None else _read(folder / name)


def state_of_step(folder: Path, step: int) -> SavedState | None:
    """The complete state of a step; None if there is none."""
    path = folder / folder_name(step)
    return _read(path) if _defect(path) is None else None


def folder_name(step: int) -> str:
    """Name of the folder of the state after a step."""
    return f"step-{step:08d}"


def _read(path: Path) -> SavedState:
    return SavedState(path, json.loads((path / PROGRESS).read_text(encoding="utf-8")))


def _defect(path: Path, world: World | None = None) -> str | None:
    """Return the first defect of a state, or None; in a `world`, checksums of this rank's share of the files count."""
    try:
        files = json.loads((path / COMPLETE).read_text(encoding="utf-8"))
        compared = () if world is None else world.share(list(files))
        for name, (size, checksum) in files.items():
            if (actual := (path / name).stat().st_size) != size:
                return f"{name} has {actual} bytes instead of {size}"
            if name in compared and checksum_of(path / name) != checksum:
                return f"{name} does not match its checksum"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (ValueError, TypeError, AttributeError) as error:
        return f"{COMPLETE} cannot be read ({error})"
    return None


def checksum_of(path: Path) -> int:
    """CRC-32 of a file: about 1 GB/s per core, and zlib releases the GIL."""
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(2**24):
            checksum = zlib.crc32(block, checksum)
    return checksum


# ------------------------------------------------------------------ load


def stored_names(state: SavedState) -> set[str]:
    """Names of the tensors in a state."""
    return set(_reader(state).read_metadata().state_dict_metadata)


def weight_names(state: SavedState, *, averaged: bool) -> dict[str, str]:
    """Return the name in the state of every parameter; with `averaged`, that of its average, if it has one."""
    names = stored_names(state)
    parameters = [name.removeprefix("parameter/") for name in names if name.startswith("parameter/")]
    kinds = {name: "average" if averaged and f"average/{name}" in names else "parameter" for name in parameters}
    return {name: f"{kind}/{name}" for name, kind in kinds.items()}


def load_tensors(state: SavedState, tensors: Mapping[str, Tensor], world: World) -> None:
    """Load the named tensors in place, each rank its shard."""
    if missing := sorted(tensors.keys() - stored_names(state)):
        raise CheckpointError(
            f"{state.path}: {len(missing)} tensors are not in it, among them {', '.join(missing[:4])}. "
            "It was saved with other settings: restore them, or use another run folder: --set run=NAME"
        )
    _check_shapes(state, tensors)
    world.open_local_group()
    try:
        load(dict(tensors), storage_reader=_reader(state), process_group=world.cpu_group)
    except (RuntimeError, OSError, ValueError, CheckpointException) as error:
        raise CheckpointError(
            f"{state.path}: cannot be read: {reason_of(error)}. Delete this folder to resume from the state before it"
        ) from error


def _check_shapes(state: SavedState, tensors: Mapping[str, Tensor]) -> None:
    """Refuse a state whose tensors have other shapes, as after a change of the LoRA rank."""
    stored = _reader(state).read_metadata().state_dict_metadata
    shapes = {name: tuple(getattr(stored[name], "size", ())) for name in tensors}
    changed = sorted(name for name, tensor in tensors.items() if shapes[name] != tuple(tensor.shape))
    if not changed:
        return
    first = changed[0]
    cause = (
        "lora.rank was changed" if first.endswith((".lora_A", ".lora_B")) else "the model or its settings were changed"
    )
    raise CheckpointError(
        f"{state.path}: {first} is {_shape(shapes[first])} in it and {_shape(tensors[first].shape)} in this run "
        f"({len(changed)} tensors differ): {cause} since it was saved. "
        "Restore it to resume, or use another run folder: --set run=NAME"
    )


def _shape(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "a scalar"


def _reader(state: SavedState) -> FileSystemReader:
    return FileSystemReader(state.path)


def reason_of(error: BaseException) -> str:
    """The innermost reason: DCP wraps the errors of each rank."""
    if isinstance(error, CheckpointException):
        rank, (first, _) = min(error.failures.items())
        return f"rank {rank}: {reason_of(first)}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if "inline_container" in str(error):  # torch's file writer drops the original reason
        return "a write failed part way, as on a full disk"
    return str(error).splitlines()[0] if str(error) else repr(error)
