"""One shard to one Parquet file of its index: scan the tar once, look at each sample, remember where it lies.

    members -> samples (neighbours of one key) -> checksum, image sizes, text, what is wrong -> rows -> file

Nothing is decoded; one core indexes some thousands of samples a second, mostly the time to read the tar. The file carries in its
metadata which tar it describes, so that building goes on where it stopped and a tar that changed is noticed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from saccade.data.header import upright_size
from saccade.data.sample import Sample, description, image_names, split_name, texts
from saccade.data.shards import ShardFile, window
from saccade.data.storage import StorageConfig
from saccade.data.tar import Member, TarDamageError, members
from saccade.errors import DataError, ImageError
from saccade.files import atomic_write

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
_MARK = b"saccade"
"""Key of our note in a Parquet file's metadata."""


@dataclass(frozen=True)
class ShardEntry:
    """What `shards.json` says of a shard."""

    name: str
    num_bytes: int
    num_samples: int
    num_errors: int
    damage: str | None = None

    def to_json(self) -> dict[str, Any]:
        """As it stands in the file."""
        damage = {"damage": self.damage} if self.damage else {}
        counts = {"bytes": self.num_bytes, "num_samples": self.num_samples, "num_errors": self.num_errors}
        return {"name": self.name, **counts, **damage}

    @staticmethod
    def from_json(entry: Mapping[str, Any]) -> ShardEntry:
        """Raises KeyError or TypeError where it is none."""
        return ShardEntry(
            entry["name"], int(entry["bytes"]), int(entry["num_samples"]), int(entry["num_errors"]), entry.get("damage")
        )


@dataclass(frozen=True)
class IndexJob:
    """One shard to index, and where its rows go."""

    file: ShardFile
    target: Path


def index_shard(shared: tuple[str, StorageConfig], job: IndexJob) -> tuple[ShardEntry, bool]:
    """Index one shard, unless its file is there already; tells whether it was scanned."""
    source, config = shared
    note = read_note(job.target)
    if note and note.get("bytes") == job.file.num_bytes and "num_errors" in note:
        return ShardEntry.from_json(note | {"name": job.file.name}), False
    rows, damage = _rows(job.file, source, config)
    num_errors = sum(row["error"] is not None for row in rows)
    entry = ShardEntry(job.file.name, job.file.num_bytes, len(rows), num_errors, damage)
    write_table(job.target, pa.Table.from_pylist(rows, SCHEMA), entry.to_json())
    return entry, True


def write_table(target: Path, table: pa.Table, note: Mapping[str, Any]) -> None:
    """A Parquet file that appears whole, with a note of what it describes."""
    table = table.replace_schema_metadata({_MARK: json.dumps(note)})
    with writing(target) as hidden:
        pq.write_table(table, hidden, compression="zstd")


@contextmanager
def writing(target: Path) -> Iterator[Path]:
    """`atomic_write`, with an error that says what to do when the disk is full or closed to us."""
    try:
        with atomic_write(target) as hidden:
            yield hidden
    except OSError as error:
        raise DataError(
            f"{target}: cannot be written: {error.strerror or error}. Make room or give access; what is finished is kept"
        ) from error


def read_note(path: Path) -> dict[str, Any] | None:
    """The note of a Parquet file; None where there is no such file, or it is not ours."""
    try:
        return note_of(pq.read_schema(path))
    except (OSError, pa.ArrowException):
        return None


def note_of(schema: pa.Schema) -> dict[str, Any]:
    """The note in a schema's metadata."""
    note: dict[str, Any] = json.loads((schema.metadata or {}).get(_MARK, b"{}"))
    return note


def checksum(datas: list[bytes]) -> bytes:
    """xxh3_128 over the members' bytes in the order of the tar."""
    digest = xxhash.xxh3_128()
    for data in datas:
        digest.update(data)
    return digest.digest()


def _rows(file: ShardFile, source: str, config: StorageConfig) -> tuple[list[dict[str, Any]], str | None]:
    """One row per whole sample, and what broke the scan off."""
    rows: list[dict[str, Any]] = []
    seen: set[str] = set()
    try:
        for key, parts in _samples(file, config):
            row = _row(key, parts, source)
            if key in seen:
                row["error"] = "key appears twice, not adjacent"
            seen.add(key)
            rows.append(row)
    except TarDamageError as damage:
        return rows, str(damage)
    return rows, None


def _samples(file: ShardFile, config: StorageConfig) -> Iterator[tuple[str, list[tuple[str, Member, bytes]]]]:
    """Keys with their members and bytes. A sample counts when the next one, or the end of the tar, shows it to be whole."""
    tar = window(file, config)
    key: str | None = None
    parts: list[tuple[str, Member, bytes]] = []
    for member in members(tar):
        named = split_name(member.name)
        if named is None:
            continue
        if named[0] != key:
            if key is not None:
                yield key, parts
            key, parts = named[0], []
        parts.append((named[1], member, tar.get(member.offset, member.size)))
    if key is not None:
        yield key, parts


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
    """Upright sizes in the order of the images, unknown for those whose header is bad; and the first complaint."""
    sizes: list[tuple[int | None, int | None]] = []
    complaint = None
    for name in image_names(sample.members):
        try:
            sizes.append(upright_size(sample.members[name]))
        except ImageError as error:
            sizes.append((None, None))
            complaint = complaint or f"{name}: {error}"
    return sizes, complaint


def _text(value: object) -> str | None:
    return value.strip() or None if isinstance(value, str) else None
