"""Training state on disk: save asynchronously, verify, resume on any number of ranks and with any strategy.

    RUN/state/step-00000100/   *.distcp, .metadata   tensors (torch.distributed.checkpoint); every rank writes its shard
                               progress.json         step, stage, data position, guard, config fingerprint
                               random.json           random generator states of every rank
                               complete.json         size and CRC-32 of every file; written last, it marks the end

    save:  copy to host memory
           -> in the background: write to a hidden folder -> checksums -> fsync -> rename -> delete old states

Training waits only for the copy. A state is saved before validation, export and evaluation of its step. As each ends,
progress.json is replaced (`Saver.update`); a run that resumes from the state does what is missing.

A failed save is reported and leaves earlier states untouched. On start, the newest state is verified; a damaged one is
announced, renamed to rejected-step-..., and the previous one is used. Tensors are stored under their parameter's name
and loaded into whatever sharding the resumed run has.

DCP's `.metadata` is a pickle: resume only runs that you trust.
"""

from __future__ import annotations

import json
import logging
import random
import shutil
import zlib
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
from saccade.files import atomic_write, sync_to_disk
from saccade.train.run_config import CheckpointConfig
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
        found = world.gather(_defect(path, rank=world.rank, num_ranks=world.size, with_checksums=verify))
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
    path = folder / _folder_name(step)
    return _read(path) if _defect(path) is None else None


def _folder_name(step: int) -> str:
    return f"step-{step:08d}"


def _read(path: Path) -> SavedState:
    return SavedState(path, json.loads((path / PROGRESS).read_text(encoding="utf-8")))


def _defect(path: Path, *, rank: int = 0, num_ranks: int = 1, with_checksums: bool = False) -> str | None:
    """Return the first defect of a state, or None; checksums are compared for every `num_ranks`-th file."""
    try:
        files = json.loads((path / COMPLETE).read_text(encoding="utf-8"))
        for number, (name, (size, checksum)) in enumerate(files.items()):
            if (actual := (path / name).stat().st_size) != size:
                return f"{name} has {actual} bytes instead of {size}"
            if with_checksums and number % num_ranks == rank and _checksum(path / name) != checksum:
                return f"{name} does not match its checksum"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (ValueError, TypeError, AttributeError) as error:
        return f"{COMPLETE} cannot be read ({error})"
    return None


def _checksum(path: Path) -> int:
    """CRC-32 of a file: about 1 GB/s per core, and zlib releases the GIL."""
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(2**24):
            checksum = zlib.crc32(block, checksum)
    return checksum


# ------------------------------------------------------------------ save


class Saver:
    """Saves the states of a run asynchronously, one at a time."""

    def __init__(self, folder: Path, config: CheckpointConfig, world: World) -> None:
        self.folder, self._config, self._world = folder, config, world
        self.failure: str | None = None
        """Why the last save failed; the trainer resets it to None once it has reacted."""
        self.kept_step: int | None = None
        """A state that is not deleted however old it is: what the stage started from, if the objective needs it."""
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
        """Copy the state to host memory and write the copy, in the background if configured."""
        self.finish()
        name = _folder_name(step)
        if self._lacks_space(tensors, name):
            return
        content = {PROGRESS: dict(progress), RANDOM: self._world.gather(random_state(self._world.device))}
        self._running = self._thread.submit(self._write, name, self._copy_to_host(tensors), content)
        if not self._config.background:
            self.finish()

    def has(self, step: int) -> bool:
        """Whether the state of a step is on disk, the same on every rank. Waits for the running save."""
        self.finish()
        return bool(self._world.broadcast((self.folder / _folder_name(step) / COMPLETE).is_file()))

    def update(self, step: int, progress: Mapping[str, Any]) -> None:
        """Replace the progress in the state of a step once its save is complete; without such a state, do nothing."""
        if self._world.is_main:
            self._running = self._thread.submit(self._write_progress, _folder_name(step), dict(progress), self._running)

    def finish(self) -> None:
        """Wait for the running save."""
        if self._running is not None:
            self._running.result()
            self._running = None

    def finish_or_raise(self) -> None:
        """Wait for the running save; if it failed on any rank, every rank raises."""
        self.finish()
        failures = [failure for failure in self._world.gather(self.failure) if failure is not None]
        if failures:
            raise CheckpointError(failures[0])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Close the thread, then its process group: after the last save no other rank waits for this one."""
        try:
            self.finish()
        finally:
            self._thread.shutdown()
            torch.distributed.destroy_process_group(self._group)
            del self._group  # its threads end with the last reference

    def _copy_to_host(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy every tensor to host memory; pinned buffers are reused by the next save."""
        staged: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            buffer = self._buffers.get(name)
            if buffer is None or buffer.shape != local.shape or buffer.dtype != local.dtype:
                buffer = torch.empty(local.shape, dtype=local.dtype, pin_memory=local.is_cuda)
                self._buffers[name] = buffer
            buffer.copy_(local.detach(), non_blocking=True)
            staged[name] = _wrap_like(tensor, buffer)
        self._buffers = {name: self._buffers[name] for name in tensors}
        if self._world.device.type == "cuda":
            torch.cuda.synchronize(self._world.device)
        return staged

    def _write(self, name: str, staged: dict[str, Tensor], content: Mapping[str, Any]) -> None:
        """Write to a hidden folder, then rename it. No error here may end the run by itself."""
        partial = self.folder / f".{name}.partial"
        try:
            # One thread: DCP prints and drops the errors of further writer threads.
            writer = FileSystemWriter(partial, thread_count=1, per_thread_copy_ahead=0)
            save(staged, storage_writer=writer, process_group=self._group)
            checksums = self._checksums(partial)
            if self._world.is_main:
                _complete(partial, self.folder / name, content, checksums)
                self._delete_old()
        except (OSError, RuntimeError, CheckpointException) as error:
            self._fail(name, _cause(error))
            if self._world.is_main:
                shutil.rmtree(partial, ignore_errors=True)

    def _write_progress(self, name: str, progress: dict[str, Any], before: Future[None] | None) -> None:
        if before is not None:
            before.result()
        try:
            if (self.folder / name / COMPLETE).is_file():
                _replace_progress(self.folder / name, progress)
        except OSError as error:
            self._fail(name, _cause(error))

    def _checksums(self, partial: Path) -> dict[str, int]:
        """Checksums of DCP's files, each rank reading the ones it wrote; .metadata by the main rank."""
        rank = self._world.rank
        mine = list(partial.glob(f"__{rank}_*")) + ([partial / ".metadata"] if rank == 0 else [])
        found: dict[str, int] | str
        try:
            found = {file.name: _checksum(file) for file in mine}
        except OSError as error:
            found = str(error)  # gathered first: a rank that raised here would leave the others waiting
        gathered = self._world.gather(found, group=self._group)
        if failures := [one for one in gathered if isinstance(one, str)]:
            raise OSError(failures[0])
        return {name: checksum for one in gathered for name, checksum in one.items()}

    def _lacks_space(self, tensors: Mapping[str, Tensor], name: str) -> bool:
        """Refuse a state that does not fit on the disk, on all ranks alike and before anything is copied."""
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        free: int = self._world.broadcast(shutil.disk_usage(self.folder).free)
        if num_bytes > free:
            self._fail(name, f"it needs {num_bytes / 2**30:.2f} GiB, the disk has {free / 2**30:.2f} GiB free")
        return num_bytes > free

    def _fail(self, name: str, cause: str) -> None:
        self.failure = f"{self.folder / name}: the state was not saved: {cause}. Free space, or choose another disk"
        if self._world.is_main:
            logger.error("%s. Earlier states are intact", self.failure)

    def _delete_old(self) -> None:
        """Delete the states that are not kept."""
        found, every = states(self.folder), self._config.keep_every
        for state in found[: -self._config.keep_last]:
            if state.step != self.kept_step and (every is None or state.step % every):
                _remove(state.path)


def _wrap_like(tensor: Tensor, local: Tensor) -> Tensor:
    """Wrap `local` as this rank's shard of a DTensor like `tensor`.

    `DTensor.from_local` would move it to the mesh's device.
    """
    if not isinstance(tensor, DTensor):
        return local
    return DTensor(local, tensor._spec, requires_grad=False)  # type: ignore[no-untyped-call]


def _complete(partial: Path, final: Path, content: Mapping[str, Any], checksums: dict[str, int]) -> None:
    """Add the JSON files, then complete.json, then rename; each is synced to disk before the next."""
    for name, value in content.items():
        checksums[name] = _write_json(partial / name, value)
    files = {file.name: (file.stat().st_size, checksums[file.name]) for file in sorted(partial.iterdir())}
    _write_json(partial / COMPLETE, files)
    sync_to_disk(partial)
    if final.exists():
        _remove(final)
    partial.rename(final)
    sync_to_disk(final.parent)


def _replace_progress(path: Path, progress: dict[str, Any]) -> None:
    """Replace progress.json of a state. Meanwhile complete.json does not list it, so the state is always complete."""
    files = json.loads((path / COMPLETE).read_text(encoding="utf-8"))
    files.pop(PROGRESS, None)
    _replace_json(path / COMPLETE, files)
    checksum = _replace_json(path / PROGRESS, progress)
    files[PROGRESS] = ((path / PROGRESS).stat().st_size, checksum)
    _replace_json(path / COMPLETE, files)


def _replace_json(path: Path, value: Any) -> int:
    """Replace a file at once; returns the checksum."""
    with atomic_write(path, sync=True) as temporary:
        return _write_json(temporary, value)


def _remove(path: Path) -> None:
    """Rename first, so that a partly deleted state is never found."""
    hidden = path.rename(path.with_name(f".{path.name}.deleted"))
    shutil.rmtree(hidden, ignore_errors=True)


def _write_json(path: Path, value: Any) -> int:
    """Write and sync; returns the checksum."""
    data = json.dumps(value).encode()
    path.write_bytes(data)
    sync_to_disk(path)
    return zlib.crc32(data)


def _cause(error: BaseException) -> str:
    """The innermost reason: DCP wraps the errors of each rank."""
    if isinstance(error, CheckpointException):
        rank, (first, _) = min(error.failures.items())
        return f"rank {rank}: {_cause(first)}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if "inline_container" in str(error):  # torch's file writer drops the original reason
        return "a write failed part way, as on a full disk"
    return str(error).splitlines()[0] if str(error) else repr(error)


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
            f"{state.path}: cannot be read: {_cause(error)}. Delete this folder to resume from the state before it"
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


# ------------------------------------------------------------------ random numbers


def random_state(device: torch.device) -> dict[str, Any]:
    """State of all random generators of this process, as JSON."""
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
    """Restore this rank's random generators; a rank without a saved state is seeded."""
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
    """Seed the generators of Python, numpy and torch."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
