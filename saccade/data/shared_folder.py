"""A folder that all machines of a job read and write: a path, or a URL of fsspec. A file appears complete."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from saccade.data import storage
from saccade.data.storage import StorageConfig, is_remote, shown
from saccade.errors import DataError
from saccade.files import atomic_write


@dataclass(frozen=True)
class SharedFolder:
    """Files by their path in the folder. Picklable."""

    url: str
    config: StorageConfig

    @property
    def is_remote(self) -> bool:
        """Whether it is reached through fsspec."""
        return is_remote(self.url)

    def sub(self, name: str) -> SharedFolder:
        """A folder in it."""
        return SharedFolder(f"{self.url}/{name}", self.config)

    def write(self, name: str, data: bytes | memoryview) -> None:
        """Write a file; replaces an earlier one."""
        if self.is_remote:
            storage.storage(self.config).write_file(f"{self.url}/{name}", bytes(data))
            return
        try:
            with atomic_write(Path(self.url, name)) as temporary:
                temporary.write_bytes(data)
        except OSError as error:
            raise DataError(
                f"{self.url}/{name}: cannot be written: {error.strerror or error}. Free space or give access; finished "
                "files are kept"
            ) from error

    def read(self, name: str) -> bytes | None:
        """The content of a file; None if there is none."""
        if self.is_remote:
            return storage.storage(self.config).read_file(f"{self.url}/{name}")
        try:
            return Path(self.url, name).read_bytes()
        except FileNotFoundError:
            return None

    def read_part(self, name: str, offset: int, size: int) -> bytes:
        """Bytes of a file that exists."""
        if self.is_remote:
            return storage.storage(self.config).read_part(f"{self.url}/{name}", offset, size)
        try:
            with Path(self.url, name).open("rb") as file:
                file.seek(offset)
                data = file.read(size)
        except OSError as error:
            raise DataError(f"{self.url}/{name}: {error.strerror}. Run the command again") from error
        if len(data) != size:
            raise DataError(f"{shown(self.url)}/{name}: is too short. Remove it and run the command again")
        return data

    def names(self, sub: str = "") -> set[str]:
        """Names of the files in a folder in it; none if there is no such folder."""
        at = f"{self.url}/{sub}" if sub else self.url
        if self.is_remote:
            return set(storage.storage(self.config).list_folder(at, missing_ok=True))
        return {path.name for path in Path(at).glob("*") if path.is_file()}

    def remove(self, name: str = "") -> None:
        """Remove a file or folder in it, or the whole folder, if it exists."""
        at = f"{self.url}/{name}" if name else self.url
        if self.is_remote:
            storage.storage(self.config).remove(at)
        elif Path(at).is_dir():
            shutil.rmtree(at, ignore_errors=True)
        else:
            Path(at).unlink(missing_ok=True)
