"""Build the index of a shard folder: one Parquet file per tar, and shards.json.

    members of the tar -> samples (adjacent members of a key) -> checksum, image sizes, text, errors -> row of a table

Nothing is decoded; one core indexes some thousands of samples per second, mostly the time to read the tar. Shards are
indexed in parallel, and an interrupted build resumes shard by shard.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import xxhash

from saccade.data import storage
from saccade.data.header import upright_size
from saccade.data.index_files import (
    IndexLocation,
    ShardEntry,
    ShardProgress,
    parquet_name,
)
from saccade.data.jobs import Workers, run_jobs
from saccade.data.parallel import in_processes, workers_for
from saccade.data.sample import Sample, description, image_names, texts
from saccade.data.shard_table import ShardTable
from saccade.data.shards import ShardFile, ShardPath, list_shards, samples, window
from saccade.data.storage import StorageConfig, is_remote, shown
from saccade.data.tar import Gap, Member
from saccade.errors import DataError, ImageError, StorageError
from saccade.files import atomic_write

logger = logging.getLogger(__name__)
_DEFAULT = StorageConfig()
COLUMNS = "shards.arrow"
"""The list of shards as columns, within the index."""

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


@dataclass(frozen=True)
class IndexReport:
    """Contents of an index after building it."""

    num_shards: int
    num_scanned: int
    """Shards scanned now; the others were indexed before."""
    num_samples: int
    num_errors: int
    num_bytes: int
    damaged: dict[str, str]
    """Damaged or truncated shards, and where."""
    lost_bytes: int
    """Bytes that the damage made unreadable."""


def build_index(
    path: str | Path,
    *,
    num_workers: int | None = None,
    on_progress: Callable[[ShardProgress], None] | None = None,
    config: StorageConfig = _DEFAULT,
    ray_address: str | None = None,
    index_folder: str | None = None,
) -> IndexReport:
    """Index every shard that is new or has changed, in parallel. An interrupted build resumes shard by shard.

    `num_workers` None is one process per core for large folders, else this process. With `ray_address` the processes
    are those of that cluster. `index_folder`, a path or a URL, is the folder of the index if it is not `index/` next to
    the shards.
    """
    where = ShardPath.parse(path)
    files, location = list_shards(path, config), IndexLocation.of(where.folder, config, index_folder)
    entries = location.entries_of(files)
    stale = [file for file in files if file.name not in entries]
    num_scanned = 0
    done = ShardProgress.of(list(entries.values()), len(files))
    for entry, is_scanned in _index_shards(location, stale, num_workers, ray_address):
        entries[entry.name] = entry
        num_scanned += is_scanned
        if entry.damage and is_scanned:
            logger.warning(
                "%s/%s: %s; %d bytes lost, its complete samples are used",
                shown(where.folder), entry.name, entry.damage, entry.lost_bytes,
            )  # fmt: skip
        done = done.plus(entry)
        if on_progress:
            on_progress(done)
    if stale:
        write_entries(location, entries, keep_others=not where.is_whole_folder)
    return IndexReport(
        num_shards=len(files),
        num_scanned=num_scanned,
        num_samples=done.num_samples,
        num_errors=sum(entry.num_errors for entry in entries.values()),
        num_bytes=done.num_bytes,
        damaged={entry.name: entry.damage for entry in entries.values() if entry.damage},
        lost_bytes=sum(entry.lost_bytes for entry in entries.values()),
    )


# ------------------------------------------------------------------ the list of shards


def write_entries(location: IndexLocation, entries: Mapping[str, ShardEntry], *, keep_others: bool) -> None:
    """Write the list of shards, and the same as columns."""
    listed, num_bytes = location.write_entries(entries, keep_others=keep_others)
    location.written.write(COLUMNS, ShardTable.of(listed).to_bytes(num_bytes))


def open_table(location: IndexLocation) -> ShardTable | None:
    """The list of shards as columns, if it is up to date. One on a URL is copied into the folder of the cache."""
    own, shipped = location.folder / "shards.json", location.shipped
    if shipped is None or not is_remote(shipped):
        folder = location.folder if shipped is None else Path(shipped)
        listed = folder / "shards.json"
        if (shipped is not None and own.exists()) or not listed.exists():
            return None
        return ShardTable.open(folder / COLUMNS, listed.stat().st_size)
    if own.exists():
        return None
    try:
        num_bytes = storage.storage(location.config).num_bytes(f"{shipped}/shards.json")
    except StorageError:
        return None
    copy = location.folder / f"shards-{num_bytes}.arrow"
    if (table := ShardTable.open(copy, num_bytes)) is None:
        content = location.read_shipped(COLUMNS)
        if content is None:
            return None
        copy.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(copy) as temporary:
            temporary.write_bytes(content)
        table = ShardTable.open(copy, num_bytes)
    return table


# ------------------------------------------------------------------ one shard


def _index_shards(
    location: IndexLocation, files: list[ShardFile], num_workers: int | None, ray_address: str | None
) -> Iterator[tuple[ShardEntry, bool]]:
    """Index these shards: the entry of each, and whether it was scanned."""
    if ray_address is None:
        num_workers = num_workers or workers_for(sum(file.num_bytes for file in files))
        yield from in_processes(index_shard, location, files, num_workers)
        return
    for outcome in run_jobs(index_shard, location, files, Workers(num_workers=num_workers, ray_address=ray_address)):
        if outcome.has_crashed:
            yield write_unreadable(location, outcome.job, outcome.error or ""), True
        elif outcome.result is None:
            raise DataError(outcome.error)
        else:
            yield outcome.result


def index_shard(location: IndexLocation, file: ShardFile) -> tuple[ShardEntry, bool]:
    """Index one shard, unless its file exists already; returns whether it was scanned."""
    note = location.read_note(parquet_name(file.name))
    if note and note.get("bytes") == file.num_bytes and "num_errors" in note:
        return ShardEntry.from_json(note | {"name": file.name}), False
    rows, gaps = _scan(file, location.source, location.config)
    num_errors = sum(row["error"] is not None for row in rows)
    num_bytes, lost_bytes = file.num_bytes, sum(gap.end - gap.begin for gap in gaps)
    entry = ShardEntry(file.name, num_bytes, len(rows), num_errors, _damage(gaps, num_bytes), lost_bytes)
    location.write_table(parquet_name(file.name), pa.Table.from_pylist(rows, SCHEMA), entry.to_json())
    return entry, True


def write_unreadable(location: IndexLocation, file: ShardFile, reason: str) -> ShardEntry:
    """Index a shard that cannot be read as one without samples, and name it."""
    entry = ShardEntry(file.name, file.num_bytes, 0, 0, f"given up: {reason}", file.num_bytes)
    location.write_table(parquet_name(file.name), pa.Table.from_pylist([], SCHEMA), entry.to_json())
    return entry


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
    """Upright sizes in the order of the images, None if the header is bad; and the first error."""
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
