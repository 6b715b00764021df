"""Write a checkpoint folder: tensors -> shards of bounded size -> index -> rename the finished folder.

Memory: one shard.
"""

from __future__ import annotations

import json
import secrets
import shutil
from pathlib import Path
from types import TracebackType
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from saccade.errors import CheckpointError
from saccade.model.checkpoint_reader import INDEX_FILE, SINGLE_FILE


def check_new_folder(folder: Path) -> None:
    """Refuse a folder that exists and is not empty."""
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder} is a file. Choose another folder or remove it first")
    if folder.exists() and any(folder.iterdir()):
        raise CheckpointError(f"{folder} exists and is not empty. Choose another folder or remove it first")
    if folder.is_symlink() and not folder.exists():
        raise CheckpointError(f"{folder} is a broken link. Remove it or choose another folder")


class CheckpointWriter:
    """Writes a checkpoint folder under a temporary name and renames it when it is complete; an error removes it."""

    def __init__(self, folder: str | Path, *, max_shard_bytes: int = 2 * 2**30) -> None:
        self.folder = Path(folder)
        check_new_folder(self.folder)
        target = self.folder.resolve()
        self._partial = target.with_name(f".{target.name}.partial-{secrets.token_hex(4)}")
        self._max_shard_bytes = max_shard_bytes
        self._shard: dict[str, Tensor] = {}
        self._shard_bytes = 0
        self._shards: list[list[str]] = []
        self._total_bytes = 0

    def __enter__(self) -> CheckpointWriter:
        try:
            self._partial.mkdir(parents=True)
        except OSError as error:
            raise CheckpointError(
                f"{self.folder}: cannot be written: {error.strerror}. Choose another folder"
            ) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._finish()
            elif isinstance(error, OSError):
                raise self._failed(error) from error
        except OSError as failure:
            raise self._failed(failure) from failure
        finally:
            shutil.rmtree(self._partial, ignore_errors=True)

    def _failed(self, error: OSError) -> CheckpointError:
        return CheckpointError(f"{self.folder}: writing failed: {error.strerror}. Is the disk full?")

    def check_space(self, num_bytes: int) -> None:
        """Raise if the disk has less free space than this."""
        free = shutil.disk_usage(self._partial).free
        if num_bytes > free:
            raise CheckpointError(
                f"{self.folder}: the weights take {num_bytes / 2**30:.1f} GiB, the disk has {free / 2**30:.1f} GiB "
                "free. Choose another disk"
            )

    def add(self, name: str, tensor: Tensor) -> None:
        """Add one tensor. It must not change before the folder is complete."""
        if self._shard and self._shard_bytes + tensor.nbytes > self._max_shard_bytes:
            self._write_shard()
        self._shard[name] = tensor.cpu().contiguous()
        self._shard_bytes += tensor.nbytes
        self._total_bytes += tensor.nbytes

    def write_json(self, name: str, content: dict[str, Any]) -> None:
        """Write one JSON file of the folder."""
        self.write_text(name, json.dumps(content, indent=2, ensure_ascii=False) + "\n")

    def write_text(self, name: str, content: str) -> None:
        """Write one text file of the folder."""
        (self._partial / name).write_text(content, encoding="utf-8")

    def copy(self, file: Path) -> None:
        """Copy one file."""
        shutil.copyfile(file, self._partial / file.name)

    def _write_shard(self) -> None:
        self._shards.append(list(self._shard))
        file = self._partial / f"shard-{len(self._shards)}"
        try:
            save_file(self._shard, file, metadata={"format": "pt"})
        except SafetensorError as error:
            raise CheckpointError(
                f"{self.folder}: writing {self._shard_bytes} bytes failed: {error}. Is the disk full?"
            ) from error
        file.chmod(0o644)  # safetensors makes it readable by the owner alone
        self._shard, self._shard_bytes = {}, 0

    def _finish(self) -> None:
        """Give the shards their final names, write the index, rename the folder."""
        if self._shard:
            self._write_shard()
        count = len(self._shards)
        weight_map = {}
        for number, names in enumerate(self._shards, start=1):
            final = SINGLE_FILE if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
            (self._partial / f"shard-{number}").rename(self._partial / final)
            weight_map.update(dict.fromkeys(names, final))
        if count > 1:
            self.write_json(INDEX_FILE, {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map})
        if not self.folder.exists():
            self._partial.rename(self.folder)
            return
        files = sorted(self._partial.iterdir(), key=lambda file: file.name == "config.json")
        for file in files:  # into an existing empty folder; config.json, which makes it a checkpoint, comes last
            file.rename(self.folder / file.name)
