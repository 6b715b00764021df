"""Where the index of a shard folder lies: `index/` beside the shards, or a folder of the cache.

Shards that are remote, or in a folder that cannot be written, get their index in the cache folder. An `index/` that was shipped
with them is read all the same; what is remote of it is copied when it is needed.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from saccade.data import storage
from saccade.data.indexing import ShardEntry, read_note, writing
from saccade.data.shards import ShardFile
from saccade.data.storage import StorageConfig, is_remote, shown
from saccade.errors import DataError

VERSION = 1
"""Of the shard folder's layout (docs/formats.md)."""


@dataclass(frozen=True)
class Places:
    """Where the index of a folder is written, and where else it may be read."""

    folder: str
    """The shards."""
    own: Path
    """Read and written."""
    shipped: str | None
    """`index/` beside shards that cannot be written: read where `own` has nothing."""
    config: StorageConfig

    @staticmethod
    def of(folder: str, config: StorageConfig) -> Places:
        """The places of a folder of shards."""
        if not is_remote(folder):
            beside = Path(folder) / "index"
            if os.access(beside if beside.exists() else folder, os.W_OK) or not Path(folder).exists():
                return Places(folder, beside, None, config)
            folder_id = str(Path(folder).resolve())
        else:
            folder_id = folder
        own = config.folder / "shards" / hashlib.sha256(folder_id.encode()).hexdigest()[:16]
        return Places(folder, own, f"{folder}/index", config)

    @property
    def source(self) -> str:
        """Name of the folder: the source of samples that name none."""
        name = shown(self.folder) if is_remote(self.folder) else str(Path(self.folder).resolve())
        return name.rstrip("/").rpartition("/")[2] or "shards"

    def known(self) -> list[ShardEntry]:
        """All entries there are; those of `own` come last and so win."""
        return self._shipped_entries() + self._own_entries()

    def entries_of(self, files: Iterable[ShardFile]) -> dict[str, ShardEntry]:
        """The entries that describe these files as they are now. Ours count only with their Parquet files in place."""
        sizes = {file.name: file.num_bytes for file in files}
        present = _names(self.own)
        entries = self._shipped_entries() + [e for e in self._own_entries() if parquet_name(e.name) in present]
        return {entry.name: entry for entry in entries if sizes.get(entry.name) == entry.num_bytes}

    def _own_entries(self) -> list[ShardEntry]:
        return _entries(_read_file(self.own / "shards.json"), f"{self.own}/shards.json")

    def _shipped_entries(self) -> list[ShardEntry]:
        return _entries(self.read_shipped("shards.json"), shown(f"{self.shipped}/shards.json"))

    def write_entries(self, entries: Mapping[str, ShardEntry], *, keep_others: bool) -> None:
        """Write shards.json, sorted by name."""
        others = {entry.name: entry for entry in self.known()} if keep_others else {}
        listed = [entry.to_json() for _, entry in sorted((others | dict(entries)).items())]
        write_json(self.own / "shards.json", {"version": VERSION, "shards": listed})

    def read_shipped(self, relative: str) -> bytes | None:
        """A file of the index beside shards that cannot be written."""
        if self.shipped is None:
            return None
        if is_remote(self.shipped):
            return storage.storage(self.config).read_file(f"{self.shipped}/{relative}")
        return _read_file(Path(self.shipped) / relative)

    def missing(self, folder: str, sizes: Mapping[str, int | None]) -> set[str]:
        """Which shards have no file in a folder of the index that was made for their size (None: any size).

        Remote files are taken by their names and not looked into.
        """
        far: set[str] = set()
        if self.shipped is not None and is_remote(self.shipped):
            far = set(storage.storage(self.config).list_folder(f"{self.shipped}/{folder}", missing_ok=True))
        near = {place / folder: _names(place / folder) for place in self._near()}

        def is_there(name: str, num_bytes: int | None) -> bool:
            return name in far or any(name in near[place] and _describes(place / name, num_bytes) for place in near)

        return {shard for shard, num_bytes in sizes.items() if not is_there(parquet_name(shard), num_bytes)}

    def _near(self) -> list[Path]:
        """The places on this machine, ours first."""
        return [self.own] if self.shipped is None or is_remote(self.shipped) else [self.own, Path(self.shipped)]

    def find(self, relative: str, num_bytes: int | None) -> Path | None:
        """The Parquet file made for a tar of this size (None: of any); a remote one is copied here first."""
        for place in self._near():
            if _describes(place / relative, num_bytes):
                return place / relative
        if self.shipped is None or not is_remote(self.shipped):
            return None
        data = self.read_shipped(relative)
        if data is None:
            return None
        copy = self.own / relative
        with writing(copy) as hidden:
            hidden.write_bytes(data)
        return copy if _describes(copy, num_bytes) else None


def _describes(path: Path, num_bytes: int | None) -> bool:
    if num_bytes is None:
        return path.is_file()
    note = read_note(path)
    return note is not None and note.get("bytes") == num_bytes


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


def write_json(path: Path, content: object) -> None:
    """A JSON file that appears whole."""
    with writing(path) as hidden:
        hidden.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def parquet_name(shard: str) -> str:
    """The file that describes a shard, in the index and in its sidecars."""
    return f"{shard.removesuffix('.tar')}.parquet"
