"""The state of a run, saved so that it can be taken up again: after a crash, on another number of ranks, by another strategy.

    RUN/state/step-00000100/   *.distcp, .metadata   tensors, by torch.distributed.checkpoint; every rank writes its part
                               progress.json         everything else: step, stage, data position, guard, settings' fingerprint
                               random.json           random states of every rank
                               complete.json         name and size of every file; written last. A folder without it does not count

    save:  copy to host memory -> (in the background) write under a hidden name -> sync -> mark complete -> rename -> retire old ones

Training waits for the copy alone. A save that fails is reported and leaves the states before it as they are. Tensors are stored
under their parameter's name, whole or in parts, and are read into whatever lies there when a run resumes.

DCP's own `.metadata` is a pickle: take up only runs you trust, as you would run only code you trust.
"""

from __future__ import annotations

import json
import logging
import random
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, cast

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from saccade.errors import CheckpointError
from saccade.files import sync_to_disk
from saccade.train.config import CheckpointConfig
from saccade.world import World

logger = logging.getLogger(__name__)

COMPLETE, PROGRESS, RANDOM = "complete.json", "progress.json", "random.json"


@dataclass(frozen=True)
class SavedState:
    """A complete state on disk."""

    path: Path
    progress: dict[str, Any]

    @property
    def step(self) -> int:
        """The step it was saved after."""
        return int(self.path.name.removeprefix("step-"))


# ------------------------------------------------------------------ finding


def states(folder: Path) -> list[SavedState]:
    """The complete states of a run, oldest first."""
    complete = [path for path in sorted(folder.glob("step-*")) if _is_complete(path)]
    return [SavedState(path, json.loads((path / PROGRESS).read_text(encoding="utf-8"))) for path in complete]


def newest_state(folder: Path, world: World) -> SavedState | None:
    """The state to go on from, the same on every rank; None for a new run."""
    found = states(folder) if world.is_main else []
    name = world.share(found[-1].path.name if found else None)
    if name is None:
        return None
    path = folder / name
    return SavedState(path, json.loads((path / PROGRESS).read_text(encoding="utf-8")))


def _is_complete(path: Path) -> bool:
    """Whether every file is there in the size it was written in."""
    try:
        sizes = json.loads((path / COMPLETE).read_text(encoding="utf-8"))
        return all((path / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError):
        return False


# ------------------------------------------------------------------ saving


class Saver:
    """Writes states of one run, one at a time, in the background."""

    def __init__(self, folder: Path, config: CheckpointConfig, world: World) -> None:
        self.folder, self._config, self._world = folder, config, world
        self.failure: str | None = None
        """What went wrong with a save; it stays until whoever takes note of it sets it back to None."""
        self._group = world.new_cpu_group()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="saccade save")
        self._running: Future[None] | None = None
        self._buffers: dict[str, Tensor] = {}
        if world.is_main:
            folder.mkdir(parents=True, exist_ok=True)
            for leftover in folder.glob(".step-*"):
                shutil.rmtree(leftover, ignore_errors=True)
        world.barrier()

    def save(self, step: int, tensors: Mapping[str, Tensor], progress: Mapping[str, Any]) -> None:
        """Copy the state and write the copy. Returns after the copy, or when all is written if not in the background."""
        self.finish()
        name = f"step-{step:08d}"
        if self._lacks_space(tensors, name):
            return
        content = {PROGRESS: dict(progress), RANDOM: self._world.gather(random_state(self._world.device))}
        self._running = self._thread.submit(self._write, name, self._stage(tensors), content)
        if not self._config.background:
            self.finish()

    def finish(self) -> None:
        """Wait until the save under way is done."""
        if self._running is not None:
            self._running.result()
            self._running = None

    def finish_or_raise(self) -> None:
        """Wait until the save under way is done; if it failed on any rank, every rank raises."""
        self.finish()
        failures = [failure for failure in self._world.gather(self.failure) if failure is not None]
        if failures:
            raise CheckpointError(failures[0])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()
        self._thread.shutdown()

    def _stage(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A copy of every tensor in host memory: pinned where there is a GPU, and kept for the next save."""
        staged: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            buffer = self._buffers.get(name)
            if buffer is None or buffer.shape != local.shape or buffer.dtype != local.dtype:
                buffer = torch.empty(local.shape, dtype=local.dtype, pin_memory=local.is_cuda)
                self._buffers[name] = buffer
            buffer.copy_(local.detach(), non_blocking=True)
            staged[name] = _like(tensor, buffer)
        self._buffers = {name: self._buffers[name] for name in tensors}
        if self._world.device.type == "cuda":
            torch.cuda.synchronize(self._world.device)
        return staged

    def _write(self, name: str, staged: dict[str, Tensor], content: Mapping[str, Any]) -> None:
        """Write under a hidden name, then rename. Nothing that goes wrong here may end the run by itself."""
        partial = self.folder / f".{name}.partial"
        try:
            # One thread: errors of the writer's further threads would be printed and forgotten.
            writer = FileSystemWriter(partial, thread_count=1, per_thread_copy_ahead=0)
            save(staged, storage_writer=writer, process_group=self._group)
            if self._world.is_main:
                _complete(partial, self.folder / name, content)
                self._retire()
        except (OSError, RuntimeError, CheckpointException) as error:
            self._fail(name, _cause(error))
            if self._world.is_main:
                shutil.rmtree(partial, ignore_errors=True)

    def _lacks_space(self, tensors: Mapping[str, Tensor], name: str) -> bool:
        """Refuse, on all ranks alike and before anything is copied, what the disk cannot hold."""
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        free: int = self._world.share(shutil.disk_usage(self.folder).free)
        if num_bytes > free:
            self._fail(name, f"it takes {num_bytes / 2**30:.2f} GiB, the disk has {free / 2**30:.2f} GiB free")
        return num_bytes > free

    def _fail(self, name: str, cause: str) -> None:
        self.failure = f"{self.folder / name}: the state was not saved: {cause}. Free space, or choose another disk"
        if self._world.is_main:
            logger.error("%s. The states before it are whole", self.failure)

    def _retire(self) -> None:
        """Remove the states that are not to be kept."""
        found, every = states(self.folder), self._config.keep_every
        for state in found[: -self._config.keep_last]:
            if every is None or state.step % every:
                _remove(state.path)


def _like(tensor: Tensor, local: Tensor) -> Tensor:
    """`local` as this rank's part of a tensor cut like `tensor`. (`DTensor.from_local` would move it to the mesh's device.)"""
    if not isinstance(tensor, DTensor):
        return local
    return DTensor(local, tensor._spec, requires_grad=False)  # type: ignore[no-untyped-call]


def _complete(partial: Path, final: Path, content: Mapping[str, Any]) -> None:
    """Add what is not tensors, then the mark, then the name: after each of them the disk has it for certain."""
    for name, value in content.items():
        _write_json(partial / name, value)
    sizes = {file.name: file.stat().st_size for file in sorted(partial.iterdir())}
    _write_json(partial / COMPLETE, sizes)
    sync_to_disk(partial)
    if final.exists():
        _remove(final)
    partial.rename(final)
    sync_to_disk(final.parent)


def _remove(path: Path) -> None:
    """Hide first, so that a state that is half removed is not taken for one."""
    hidden = path.rename(path.with_name(f".{path.name}.retired"))
    shutil.rmtree(hidden, ignore_errors=True)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")
    sync_to_disk(path)


def _cause(error: BaseException) -> str:
    """The innermost reason: DCP wraps what happened on each rank."""
    if isinstance(error, CheckpointException):
        rank, (first, _) = min(error.failures.items())
        return f"rank {rank}: {_cause(first)}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if "inline_container" in str(error):  # torch's file writer, whose own reason is lost on the way
        return "a file broke off while it was written, as on a full disk"
    return str(error).splitlines()[0] if str(error) else repr(error)


# ------------------------------------------------------------------ loading


def stored_names(state: SavedState) -> set[str]:
    """The names of the tensors a state holds."""
    return set(_reader(state).read_metadata().state_dict_metadata)


def load_tensors(state: SavedState, tensors: Mapping[str, Tensor], world: World) -> None:
    """Read the tensors of these names into the ones given, each rank its part."""
    if missing := sorted(tensors.keys() - stored_names(state)):
        raise CheckpointError(
            f"{state.path}: {len(missing)} tensors are not in it, among them {', '.join(missing[:4])}. It is of a run with "
            "other settings: set them back, or give the run another folder"
        )
    _check_shapes(state, tensors)
    world.open_local_group()
    try:
        load(dict(tensors), storage_reader=_reader(state), process_group=world.cpu_group)
    except (RuntimeError, OSError, ValueError, CheckpointException) as error:
        raise CheckpointError(
            f"{state.path}: cannot be read: {_cause(error)}. Remove this folder to go on from the state before it"
        ) from error


def _check_shapes(state: SavedState, tensors: Mapping[str, Tensor]) -> None:
    """Refuse a state whose tensors have other shapes than ours, as after a change of the LoRA rank."""
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
        f"({len(changed)} tensors differ): {cause} since it was saved. Set it back to go on, or give the run another folder: --set run=NAME"
    )


def _shape(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "a single number"


def _reader(state: SavedState) -> FileSystemReader:
    return FileSystemReader(state.path)


# ------------------------------------------------------------------ random numbers


def random_state(device: torch.device) -> dict[str, Any]:
    """The state of every random generator of this process, as JSON."""
    version, numbers, gauss = random.getstate()
    kind, keys, *rest = cast(tuple[Any, ...], np.random.get_state(legacy=True))
    state = {
        "python": [version, list(numbers), gauss],
        "numpy": [kind, keys.tolist(), *rest],
        "torch": bytes(torch.get_rng_state().tolist()).hex(),
    }
    if device.type == "cuda":
        state["cuda"] = bytes(torch.cuda.get_rng_state(device).tolist()).hex()
    return state


def restore_random_state(state: SavedState, world: World, seed: int) -> None:
    """Go on with this rank's random numbers; a rank that was not there begins anew."""
    saved = json.loads((state.path / RANDOM).read_text(encoding="utf-8"))
    if world.rank >= len(saved):
        seed_everything(seed + world.rank)
        return
    mine = saved[world.rank]
    version, numbers, gauss = mine["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, *rest = mine["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(torch.frombuffer(bytearray.fromhex(mine["torch"]), dtype=torch.uint8))
    if world.device.type == "cuda" and "cuda" in mine:
        torch.cuda.set_rng_state(torch.frombuffer(bytearray.fromhex(mine["cuda"]), dtype=torch.uint8), world.device)


def seed_everything(seed: int) -> None:
    """Python's, numpy's and torch's generators."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
