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
import shutil
import zlib
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from saccade.errors import CheckpointError
from saccade.files import atomic_write, sync_to_disk
from saccade.train.random_state import random_state
from saccade.train.run_config import CheckpointConfig
from saccade.train.saved_state import COMPLETE, PROGRESS, RANDOM, checksum_of, folder_name, reason_of, states
from saccade.world import World

logger = logging.getLogger(__name__)


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
        name = folder_name(step)
        if self._lacks_space(tensors, name):
            return
        content = {PROGRESS: dict(progress), RANDOM: self._random_states()}
        self._running = self._thread.submit(self._write, name, self._copy_to_host(tensors), content)
        if not self._config.background:
            self.finish()

    def _random_states(self) -> list[Any]:
        """State of the random generators of every data rank."""
        mine = random_state(self._world.device) if self._world.counts_data else None
        return [state for state in self._world.gather(mine) if state is not None]

    def has(self, step: int) -> bool:
        """Whether the state of a step is on disk, the same on every rank. Waits for the running save."""
        self.finish()
        return bool(self._world.broadcast((self.folder / folder_name(step) / COMPLETE).is_file()))

    def update(self, step: int, progress: Mapping[str, Any]) -> None:
        """Replace the progress in the state of a step once its save is complete; without such a state, do nothing."""
        if self._world.is_main:
            self._running = self._thread.submit(self._write_progress, folder_name(step), dict(progress), self._running)

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
            self._fail(name, reason_of(error))
            if self._world.is_main:
                shutil.rmtree(partial, ignore_errors=True)

    def _write_progress(self, name: str, progress: dict[str, Any], before: Future[None] | None) -> None:
        if before is not None:
            before.result()
        try:
            if (self.folder / name / COMPLETE).is_file():
                _replace_progress(self.folder / name, progress)
        except OSError as error:
            self._fail(name, reason_of(error))

    def _checksums(self, partial: Path) -> dict[str, int]:
        """Checksums of DCP's files, each rank reading the ones it wrote; .metadata by the main rank."""
        rank = self._world.rank
        mine = list(partial.glob(f"__{rank}_*")) + ([partial / ".metadata"] if rank == 0 else [])
        found: dict[str, int] | str
        try:
            found = {file.name: checksum_of(file) for file in mine}
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
