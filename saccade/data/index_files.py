"""The files of an index: where they are, which shard each describes, and how they are read and written.

An index is the folder `index/` next to the shards, or a folder of the cache if the shards are remote or read-only
(docs/formats.md). Each Parquet file records in its metadata which tar it describes, so that building resumes where it
stopped and a changed tar is detected.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from saccade.data import storage
from saccade.data.shards import ShardFile
from saccade.data.shared_folder import SharedFolder
from saccade.data.storage import StorageConfig, is_remote, shown
from saccade.errors import DataError
from saccade.files import atomic_write

VERSION = 1
"""Version of the shard folder's layout (docs/formats.md)."""

_NOTE_KEY = b"saccade"
"""Key of our note in a Parquet file's metadata."""


@dataclass(frozen=True)
class ShardEntry:
    """One shard in `shards.json`."""

    name: str
    num_bytes: int
    num_samples: int
    num_errors: int
    damage: str | None = None
    """Where the tar is damaged or truncated."""
    lost_bytes: int = 0
    """Bytes of the tar that the damage made unreadable. Samples on either side of it are lost as well."""

    def to_json(self) -> dict[str, Any]:
        """The entry as the file has it."""
        damage = {"damage": self.damage, "lost_bytes": self.lost_bytes} if self.damage else {}
        counts = {"bytes": self.num_bytes, "num_samples": self.num_samples, "num_errors": self.num_errors}
        return {"name": self.name, **counts, **damage}

    @staticmethod
    def from_json(entry: Mapping[str, Any]) -> ShardEntry:
        """Raises KeyError or TypeError if it is not an entry."""
        num_bytes, num_samples, num_errors = (int(entry[name]) for name in ("bytes", "num_samples", "num_errors"))
        damage, lost_bytes = entry.get("damage"), int(entry.get("lost_bytes", 0))
        return ShardEntry(entry["name"], num_bytes, num_samples, num_errors, damage, lost_bytes)


@dataclass(frozen=True)
class ShardProgress:
    """The shards of a folder that a build has finished."""

    num_done: int
    """Shards finished."""
    num_shards: int
    num_samples: int
    """Samples in the finished shards."""
    num_bytes: int
    """Bytes of the finished shards."""

    @staticmethod
    def of(finished: Sequence[ShardEntry], num_shards: int) -> ShardProgress:
        """The progress with these shards finished."""
        num_samples, num_bytes = sum(e.num_samples for e in finished), sum(e.num_bytes for e in finished)
        return ShardProgress(len(finished), num_shards, num_samples, num_bytes)

    def plus(self, entry: ShardEntry) -> ShardProgress:
        """The progress with one more shard finished."""
        return ShardProgress(
            self.num_done + 1, self.num_shards, self.num_samples + entry.num_samples, self.num_bytes + entry.num_bytes
        )


# ------------------------------------------------------------------ location


@dataclass(frozen=True)
class IndexLocation:
    """The folder of an index, and where else its files are read."""

    shards: str
    """The folder of the shards."""
    folder: Path
    """Read and written."""
    shipped: str | None
    """`index/` next to shards that are remote or read-only: it is read if `folder` lacks a file."""
    config: StorageConfig
    shared: str | None = None
    """URL that is written instead of `folder`, so that all machines of a job see the files; it is read before
    `shipped`."""

    @staticmethod
    def of(shards: str, config: StorageConfig, index_folder: str | None = None) -> IndexLocation:
        """The location for a folder of shards, or another one that is named: a path or a URL."""
        address = shards if is_remote(shards) else str(Path(shards).resolve())
        shipped, folder = f"{shards}/index", Path(shards) / "index"
        if index_folder is not None and not is_remote(index_folder):
            return IndexLocation(shards, Path(index_folder).absolute(), shipped, config)
        is_writable = not is_remote(shards) and (
            os.access(folder if folder.exists() else shards, os.W_OK) or not Path(shards).exists()
        )
        if is_writable and index_folder is None:
            return IndexLocation(shards, folder, None, config)
        named = f"{address} {index_folder}" if index_folder not in (None, shipped) else address
        cached = config.folder / "shards" / hashlib.sha256(named.encode()).hexdigest()[:16]
        return IndexLocation(shards, cached, shipped, config, index_folder)

    @property
    def written(self) -> SharedFolder:
        """The folder that is written."""
        return SharedFolder(self.shared or str(self.folder), self.config)

    @property
    def _remotes(self) -> list[str]:
        """URLs that are read if `folder` lacks a file."""
        return [url for url in dict.fromkeys((self.shared, self.shipped)) if url is not None and is_remote(url)]

    @property
    def source(self) -> str:
        """Name of the shard folder: the source of samples that state none."""
        name = shown(self.shards) if is_remote(self.shards) else str(Path(self.shards).resolve())
        return name.rstrip("/").rpartition("/")[2] or "shards"

    def all_entries(self) -> list[ShardEntry]:
        """All entries, shipped ones first: later ones take precedence."""
        return self._shipped_entries() + ([] if self.shared else self._own_entries())

    def entries_of(self, files: Iterable[ShardFile]) -> dict[str, ShardEntry]:
        """The entries that describe these files as they are now.

        Own ones count only if their Parquet file exists.
        """
        sizes = {file.name: file.num_bytes for file in files}
        entries = self._shipped_entries()
        if self.shared is None:  # other machines do not see own ones
            present = _names(self.folder)
            entries += [entry for entry in self._own_entries() if parquet_name(entry.name) in present]
        return {entry.name: entry for entry in entries if sizes.get(entry.name) == entry.num_bytes}

    def _own_entries(self) -> list[ShardEntry]:
        return _entries(_read_file(self.folder / "shards.json"), f"{self.folder}/shards.json")

    def _shipped_entries(self) -> list[ShardEntry]:
        return _entries(self.read_shipped("shards.json"), shown(f"{self.shipped}/shards.json"))

    def write_entries(self, entries: Mapping[str, ShardEntry], *, keep_others: bool) -> tuple[list[ShardEntry], int]:
        """Write shards.json, sorted by name; returns its entries and its size."""
        others = {entry.name: entry for entry in self.all_entries()} if keep_others else {}
        listed = [entry for _, entry in sorted((others | dict(entries)).items())]
        content = {"version": VERSION, "shards": [entry.to_json() for entry in listed]}
        return listed, self.write_json("shards.json", content)

    def write_json(self, relative: str, content: object) -> int:
        """Write a JSON file; returns its size."""
        data = (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode()
        self.written.write(relative, data)
        return len(data)

    def write_table(self, relative: str, table: pa.Table, note: Mapping[str, Any]) -> None:
        """Write a Parquet file, with a note of what it describes."""
        if self.shared is None:
            write_table(self.folder / relative, table, note)
            return
        buffer = pa.BufferOutputStream()
        pq.write_table(_with_note(table, note), buffer, compression="zstd")
        self.written.write(relative, memoryview(buffer.getvalue()))

    def read_shipped(self, relative: str) -> bytes | None:
        """A file of the shared or the shipped index."""
        for url in self._remotes:
            if (content := storage.storage(self.config).read_file(f"{url}/{relative}")) is not None:
                return content
        return None if self.shipped is None or is_remote(self.shipped) else _read_file(Path(self.shipped) / relative)

    def read_note(self, relative: str) -> dict[str, Any] | None:
        """The note of a Parquet file that this location has written, and its `num_rows`; None if there is none."""
        if self.shared is None:
            return read_note(self.folder / relative)
        content = self.written.read(relative)
        return read_note(pa.BufferReader(content)) if content is not None else None

    def missing(self, subfolder: str, entries: Iterable[ShardEntry], *, trust: bool) -> set[str]:
        """Shards without a file in `subfolder` that describes them (`trust`: without any file).

        Remote files count by their names.
        """
        remote = self.remote_names(subfolder)
        folders = [] if self.shared else self._local_folders()
        local = {folder / subfolder: _names(folder / subfolder) for folder in folders}

        def is_there(name: str, entry: ShardEntry | None) -> bool:
            return name in remote or any(name in names and _describes(at / name, entry) for at, names in local.items())

        return {entry.name for entry in entries if not is_there(parquet_name(entry.name), None if trust else entry)}

    def remote_names(self, subfolder: str) -> set[str]:
        """Names of the files in `subfolder` on a URL."""
        urls = [f"{url}/{subfolder}" for url in self._remotes]
        return {name for url in urls for name in storage.storage(self.config).list_folder(url, missing_ok=True)}

    def _local_folders(self) -> list[Path]:
        return [self.folder] if self.shipped is None or is_remote(self.shipped) else [self.folder, Path(self.shipped)]

    def find(self, relative: str, entry: ShardEntry | None, copied: str | None = None) -> Path | None:
        """The Parquet file that describes a shard (None: any file of that name).

        A remote one is copied into `folder` first, as `copied` or under its own name.
        """
        copy = self.folder / (copied or relative)
        for path in (*(folder / relative for folder in self._local_folders()), copy):
            if _describes(path, entry):
                return path
        data = self.read_shipped(relative) if self._remotes else None
        if data is None:
            return None
        with _writing(copy) as temporary:
            temporary.write_bytes(data)
        return copy if _describes(copy, entry) else None


def _describes(path: Path, entry: ShardEntry | None) -> bool:
    """Whether a Parquet file was made for this shard; `entry` None: whether it exists."""
    return path.is_file() if entry is None else note_for(path, entry) is not None


def _entries(content: bytes | None, where: str) -> list[ShardEntry]:
    if content is None:
        return []
    try:
        listed = json.loads(content)
        if listed["version"] == VERSION:
            return [ShardEntry.from_json(entry) for entry in listed["shards"]]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{where}: damaged ({error!r}). Remove it and run saccade data index again") from error
    raise DataError(f"{where}: version {listed['version']}, only {VERSION} is read. Use the saccade that wrote it")


def _names(folder: Path) -> set[str]:
    try:
        with os.scandir(folder) as entries:
            return {entry.name for entry in entries}
    except FileNotFoundError:
        return set()


def _read_file(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def parquet_name(shard: str) -> str:
    """The file that describes a shard, in the index and in its subfolders."""
    return f"{shard.removesuffix('.tar')}.parquet"


def write_table(target: Path, table: pa.Table, note: Mapping[str, Any]) -> None:
    """Write a Parquet file atomically, with a note of what it describes."""
    with _writing(target) as temporary:
        pq.write_table(_with_note(table, note), temporary, compression="zstd")


def _with_note(table: pa.Table, note: Mapping[str, Any]) -> pa.Table:
    return table.replace_schema_metadata({_NOTE_KEY: json.dumps(note)})


@contextmanager
def _writing(target: Path) -> Iterator[Path]:
    """`atomic_write`, with an error that says what to do when the disk is full or read-only."""
    try:
        with atomic_write(target) as temporary:
            yield temporary
    except OSError as error:
        raise DataError(
            f"{target}: cannot be written: {error.strerror or error}. Free space or give access; finished files are "
            "kept"
        ) from error


def read_note(file: Path | pa.BufferReader) -> dict[str, Any] | None:
    """The note of a Parquet file, and its `num_rows`; None if there is no such file, or another program wrote it."""
    try:
        metadata = pq.read_metadata(file)
    except (OSError, pa.ArrowException):
        return None
    note: dict[str, Any] = json.loads((metadata.metadata or {}).get(_NOTE_KEY, b"{}"))
    return note | {"num_rows": metadata.num_rows}


def note_for(file: Path | pa.BufferReader, entry: ShardEntry) -> dict[str, Any] | None:
    """The note of a Parquet file if it was made for this shard as it is, with a row for each sample; else None."""
    note = read_note(file)
    is_current = note is not None and (note.get("bytes"), note["num_rows"]) == (entry.num_bytes, entry.num_samples)
    return note if is_current else None
