"""The files of an index: where they are, and how one is built from a shard.

    members of the tar -> samples (adjacent members of one key) -> checksum, image sizes, text, errors -> rows -> Parquet file

An index is the folder `index/` beside the shards, or a folder of the cache where the shards are remote or read-only (docs/formats.md).
Nothing is decoded; one core indexes some thousands of samples per second, mostly the time to read the tar. Each file records in its
metadata which tar it describes, so that building resumes where it stopped and a changed tar is detected.
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
import xxhash

from saccade.data import storage
from saccade.data.header import upright_size
from saccade.data.sample import Sample, description, image_names, texts
from saccade.data.shards import ShardFile, samples, window
from saccade.data.storage import StorageConfig, is_remote, shown
from saccade.data.tar import Gap, Member
from saccade.errors import DataError, ImageError
from saccade.files import atomic_write

VERSION = 1
"""Of the shard folder's layout (docs/formats.md)."""

SCHEMA = pa.schema(
    [
        pa.field("key", pa.string(), nullable=False),
        pa.field("names", pa.list_(pa.string()), nullable=False),
        pa.field("offsets", pa.list_(pa.int64()), nullable=False),
        pa.field("sizes", pa.list_(pa.int64()), nullable=False),
        pa.field("checksum", pa.binary(16), nullable=False),
        pa.field("widths", pa.list_(pa.int32()), nullable=False),
        pa.field("heights", pa.list_(pa.int32()), nullable=False),
        pa.field("text_bytes", pa.int32(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        pa.field("licence", pa.string()),
        pa.field("error", pa.string()),
    ]
)
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
        """As in the file."""
        damage = {"damage": self.damage, "lost_bytes": self.lost_bytes} if self.damage else {}
        counts = {"bytes": self.num_bytes, "num_samples": self.num_samples, "num_errors": self.num_errors}
        return {"name": self.name, **counts, **damage}

    @staticmethod
    def from_json(entry: Mapping[str, Any]) -> ShardEntry:
        """Raises KeyError or TypeError where it is none."""
        num_bytes, num_samples, num_errors = (int(entry[name]) for name in ("bytes", "num_samples", "num_errors"))
        damage, lost_bytes = entry.get("damage"), int(entry.get("lost_bytes", 0))
        return ShardEntry(entry["name"], num_bytes, num_samples, num_errors, damage, lost_bytes)


def _is_outdated(entry: Mapping[str, Any]) -> bool:
    """Whether it was made before a damaged tar was read beyond the damage."""
    return "damage" in entry and "lost_bytes" not in entry


# ------------------------------------------------------------------ location


@dataclass(frozen=True)
class IndexLocation:
    """The folder of an index, and a read-only index shipped with the shards."""

    shards: str
    """The folder of the shards."""
    folder: Path
    """Read and written."""
    shipped: str | None
    """`index/` beside shards that are remote or read-only: read where `folder` has no file."""
    config: StorageConfig

    @staticmethod
    def of(shards: str, config: StorageConfig) -> IndexLocation:
        """The location for a folder of shards."""
        if not is_remote(shards):
            beside = Path(shards) / "index"
            if os.access(beside if beside.exists() else shards, os.W_OK) or not Path(shards).exists():
                return IndexLocation(shards, beside, None, config)
        address = shards if is_remote(shards) else str(Path(shards).resolve())
        cached = config.folder / "shards" / hashlib.sha256(address.encode()).hexdigest()[:16]
        return IndexLocation(shards, cached, f"{shards}/index", config)

    @property
    def source(self) -> str:
        """Name of the shard folder: the source of samples that state none."""
        name = shown(self.shards) if is_remote(self.shards) else str(Path(self.shards).resolve())
        return name.rstrip("/").rpartition("/")[2] or "shards"

    def all_entries(self) -> list[ShardEntry]:
        """All entries, shipped ones first: later ones take precedence."""
        return self._shipped_entries() + self._own_entries()

    def entries_of(self, files: Iterable[ShardFile]) -> dict[str, ShardEntry]:
        """The entries that describe these files as they are now. Own ones count only where their Parquet file exists."""
        sizes = {file.name: file.num_bytes for file in files}
        present = _names(self.folder)
        entries = self._shipped_entries() + [e for e in self._own_entries() if parquet_name(e.name) in present]
        return {entry.name: entry for entry in entries if sizes.get(entry.name) == entry.num_bytes}

    def _own_entries(self) -> list[ShardEntry]:
        return _entries(_read_file(self.folder / "shards.json"), f"{self.folder}/shards.json")

    def _shipped_entries(self) -> list[ShardEntry]:
        return _entries(self.read_shipped("shards.json"), shown(f"{self.shipped}/shards.json"))

    def write_entries(self, entries: Mapping[str, ShardEntry], *, keep_others: bool) -> None:
        """Write shards.json, sorted by name."""
        others = {entry.name: entry for entry in self.all_entries()} if keep_others else {}
        listed = [entry.to_json() for _, entry in sorted((others | dict(entries)).items())]
        write_json(self.folder / "shards.json", {"version": VERSION, "shards": listed})

    def read_shipped(self, relative: str) -> bytes | None:
        """A file of the shipped index."""
        if self.shipped is None:
            return None
        if is_remote(self.shipped):
            return storage.storage(self.config).read_file(f"{self.shipped}/{relative}")
        return _read_file(Path(self.shipped) / relative)

    def missing(self, subfolder: str, entries: Iterable[ShardEntry], *, trust: bool) -> set[str]:
        """Shards without a file in `subfolder` that describes them (`trust`: without any file). Remote files count by their names."""
        remote: set[str] = set()
        if self.shipped is not None and is_remote(self.shipped):
            remote = set(storage.storage(self.config).list_folder(f"{self.shipped}/{subfolder}", missing_ok=True))
        local = {folder / subfolder: _names(folder / subfolder) for folder in self._local_folders()}

        def is_there(name: str, entry: ShardEntry | None) -> bool:
            return name in remote or any(name in names and _describes(at / name, entry) for at, names in local.items())

        return {entry.name for entry in entries if not is_there(parquet_name(entry.name), None if trust else entry)}

    def _local_folders(self) -> list[Path]:
        return [self.folder] if self.shipped is None or is_remote(self.shipped) else [self.folder, Path(self.shipped)]

    def find(self, relative: str, entry: ShardEntry | None) -> Path | None:
        """The Parquet file that describes a shard (None: any file of that name); a remote one is copied first."""
        for folder in self._local_folders():
            if _describes(folder / relative, entry):
                return folder / relative
        if self.shipped is None or not is_remote(self.shipped):
            return None
        data = self.read_shipped(relative)
        if data is None:
            return None
        copy = self.folder / relative
        with _writing(copy) as temporary:
            temporary.write_bytes(data)
        return copy if _describes(copy, entry) else None


def _describes(path: Path, entry: ShardEntry | None) -> bool:
    """Whether a Parquet file was made for this shard and has a row for each of its samples."""
    if entry is None:
        return path.is_file()
    note = read_note(path)
    return note is not None and (note.get("bytes"), note["num_rows"]) == (entry.num_bytes, entry.num_samples)


def _entries(content: bytes | None, where: str) -> list[ShardEntry]:
    if content is None:
        return []
    try:
        listed = json.loads(content)
        if listed["version"] == VERSION:
            return [ShardEntry.from_json(entry) for entry in listed["shards"] if not _is_outdated(entry)]
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


def write_json(path: Path, content: object) -> None:
    """Write a JSON file atomically."""
    with _writing(path) as temporary:
        temporary.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def write_table(target: Path, table: pa.Table, note: Mapping[str, Any]) -> None:
    """Write a Parquet file atomically, with a note of what it describes."""
    table = table.replace_schema_metadata({_NOTE_KEY: json.dumps(note)})
    with _writing(target) as temporary:
        pq.write_table(table, temporary, compression="zstd")


@contextmanager
def _writing(target: Path) -> Iterator[Path]:
    """`atomic_write`, with an error that says what to do when the disk is full or read-only."""
    try:
        with atomic_write(target) as temporary:
            yield temporary
    except OSError as error:
        raise DataError(
            f"{target}: cannot be written: {error.strerror or error}. Free space or give access; finished files are kept"
        ) from error


def read_note(path: Path) -> dict[str, Any] | None:
    """The note of a Parquet file, and its `num_rows`; None where there is no such file, or it is not ours."""
    try:
        metadata = pq.read_metadata(path)
    except (OSError, pa.ArrowException):
        return None
    note: dict[str, Any] = json.loads((metadata.metadata or {}).get(_NOTE_KEY, b"{}"))
    return note | {"num_rows": metadata.num_rows}


# ------------------------------------------------------------------ one shard


@dataclass(frozen=True)
class IndexJob:
    """One shard to index, and the file to write."""

    file: ShardFile
    target: Path


def index_shard(shared: tuple[str, StorageConfig], job: IndexJob) -> tuple[ShardEntry, bool]:
    """Index one shard, unless its file exists already; returns whether it was scanned."""
    source, config = shared
    note = read_note(job.target)
    if note and note.get("bytes") == job.file.num_bytes and "num_errors" in note and not _is_outdated(note):
        return ShardEntry.from_json(note | {"name": job.file.name}), False
    rows, gaps = _scan(job.file, source, config)
    num_errors = sum(row["error"] is not None for row in rows)
    num_bytes, lost_bytes = job.file.num_bytes, sum(gap.end - gap.begin for gap in gaps)
    entry = ShardEntry(job.file.name, num_bytes, len(rows), num_errors, _damage(gaps, num_bytes), lost_bytes)
    write_table(job.target, pa.Table.from_pylist(rows, SCHEMA), entry.to_json())
    return entry, True


def checksum(datas: list[bytes]) -> bytes:
    """xxh3_128 over the members' bytes in the order of the tar."""
    digest = xxhash.xxh3_128()
    for data in datas:
        digest.update(data)
    return digest.digest()


def _scan(file: ShardFile, source: str, config: StorageConfig) -> tuple[list[dict[str, Any]], list[Gap]]:
    """One row per complete sample, and the damage."""
    rows: list[dict[str, Any]] = []
    gaps: list[Gap] = []
    seen: set[str] = set()
    tar = window(file, config)
    for item in samples(tar, lambda _, member: tar.get(member.offset, member.size)):
        if isinstance(item, Gap):
            gaps.append(item)
            continue
        key, parts = item
        row = _row(key, parts, source)
        if key in seen:
            row["error"] = "key appears twice, not adjacent"
        seen.add(key)
        rows.append(row)
    return rows, gaps


def _damage(gaps: Sequence[Gap], num_bytes: int) -> str | None:
    described = [gap.reason + (f", resumed at byte {gap.end}" if gap.end < num_bytes else "") for gap in gaps[:3]]
    return "; ".join(described + ([f"{len(gaps) - 3} more"] if len(gaps) > 3 else [])) or None


def _row(key: str, parts: list[tuple[str, Member, bytes]], source: str) -> dict[str, Any]:
    names = [name for name, _, _ in parts]
    sample = Sample(key, source, {name: data for name, _, data in parts})
    row: dict[str, Any] = {
        "key": key,
        "names": names,
        "offsets": [member.offset for _, member, _ in parts],
        "sizes": [member.size for _, member, _ in parts],
        "checksum": checksum([data for _, _, data in parts]),
        "text_bytes": 0,
        "source": source,
        "licence": None,
        "error": None,
    }
    sizes, image_error = _image_sizes(sample)
    row["widths"], row["heights"] = [width for width, _ in sizes], [height for _, height in sizes]
    try:
        fields = description(sample)
        row["source"] = _text(fields.get("source")) or source
        row["licence"] = _text(fields.get("license")) or _text(fields.get("licence"))
        row["text_bytes"] = sum(len(text.encode()) for text in texts(sample))
    except DataError as error:
        row["error"] = str(error).removeprefix(f"sample {key} of {source}: ")
    if len(sample.members) < len(names):
        row["error"] = f"member {max(names, key=names.count)} appears twice"
    row["error"] = image_error or row["error"]
    return row


def _image_sizes(sample: Sample) -> tuple[list[tuple[int | None, int | None]], str | None]:
    """Upright sizes in the order of the images, None where the header is bad; and the first error."""
    sizes: list[tuple[int | None, int | None]] = []
    first_error = None
    for name in image_names(sample.members):
        try:
            sizes.append(upright_size(sample.members[name]))
        except ImageError as error:
            sizes.append((None, None))
            first_error = first_error or f"{name}: {error}"
    return sizes, first_error


def _text(value: object) -> str | None:
    return value.strip() or None if isinstance(value, str) else None
