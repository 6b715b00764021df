"""The index of a shard folder: its samples, where their bytes are, which are kept, how long they are.

    open_index(path)  ->  shards.json only  ->  ShardIndex  ->  a shard's Parquet files when first used

Opening costs the number of shards, never the number of samples. Lengths depend on the processor: its fingerprint names their folder.
Decisions of a curation count once their summary is written, so that an interrupted curation is detected and never read as "keep all".
The layout is in docs/formats.md; `indexing.py` builds the file of a shard.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import random
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from saccade.data import storage
from saccade.data.indexing import (
    VERSION,
    IndexJob,
    IndexLocation,
    ShardEntry,
    checksum,
    index_shard,
    parquet_name,
    read_note,
    write_json,
    write_table,
)
from saccade.data.order import Ints
from saccade.data.parallel import in_processes, workers_for
from saccade.data.sample import Sample
from saccade.data.shards import ShardFile, ShardPath, list_shards, read_range
from saccade.data.storage import StorageConfig, shown
from saccade.errors import ConfigError, DataError, StorageError, UserError

logger = logging.getLogger(__name__)
_DEFAULT = StorageConfig()
_SUMMARY = "decisions/summary.json"


@dataclass(frozen=True)
class Progress:
    """Progress of a build."""

    num_done: int
    """Shards finished."""
    num_shards: int
    num_samples: int
    """Samples in the finished shards."""
    num_bytes: int
    """Bytes of the finished shards."""

    @staticmethod
    def of(finished: Sequence[ShardEntry], num_shards: int) -> Progress:
        """With these shards finished."""
        num_samples, num_bytes = sum(e.num_samples for e in finished), sum(e.num_bytes for e in finished)
        return Progress(len(finished), num_shards, num_samples, num_bytes)

    def plus(self, entry: ShardEntry) -> Progress:
        """With one more shard finished."""
        return Progress(
            self.num_done + 1, self.num_shards, self.num_samples + entry.num_samples, self.num_bytes + entry.num_bytes
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


# ------------------------------------------------------------------ build and open


def build_index(
    path: str | Path,
    *,
    num_workers: int | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    config: StorageConfig = _DEFAULT,
) -> IndexReport:
    """Index every shard that is new or has changed, in parallel. An interrupted build resumes shard by shard.

    `num_workers` None is one process per core for large folders, else this process.
    """
    where = ShardPath.parse(path)
    files, location = list_shards(path, config), IndexLocation.of(where.folder, config)
    entries = location.entries_of(files)
    stale = [file for file in files if file.name not in entries]
    num_scanned = 0
    done = Progress.of(list(entries.values()), len(files))
    jobs = [IndexJob(file, location.folder / parquet_name(file.name)) for file in stale]
    num_workers = num_workers or workers_for(sum(file.num_bytes for file in stale))
    for entry, is_scanned in in_processes(index_shard, (location.source, config), jobs, num_workers):
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
        location.write_entries(entries, keep_others=not where.is_whole_folder)
    return IndexReport(
        num_shards=len(files),
        num_scanned=num_scanned,
        num_samples=done.num_samples,
        num_errors=sum(entry.num_errors for entry in entries.values()),
        num_bytes=done.num_bytes,
        damaged={entry.name: entry.damage for entry in entries.values() if entry.damage},
        lost_bytes=sum(entry.lost_bytes for entry in entries.values()),
    )


def open_index(
    path: str | Path,
    *,
    build: bool = True,
    check_files: bool = True,
    num_workers: int | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    config: StorageConfig = _DEFAULT,
) -> ShardIndex:
    """Open the index of a shard folder, or of some of its shards.

    Shards that are new or have changed are indexed first; with `build` False they are an error. With `check_files` False the
    shards are not listed: the index is used as it is.
    """
    where = ShardPath.parse(path)
    location = IndexLocation.of(where.folder, config)
    if not check_files:
        return ShardIndex(str(path), _trusted(where, location), location, config, trust=True)
    files = list_shards(path, config)
    entries = location.entries_of(files)
    stale = [file.name for file in files if file.name not in entries]
    if stale and not build:
        names = f"{', '.join(stale[:3])}{', ...' if len(stale) > 3 else ''}"
        raise DataError(
            f"{shown(str(path))}: {len(stale)} of {len(files)} shards are not indexed, or have changed since ({names}). "
            f"Run saccade data index {shown(str(path))}"
        )
    if stale:
        logger.info("%s: indexing %d of %d shards", shown(str(path)), len(stale), len(files))
        build_index(path, num_workers=num_workers, on_progress=on_progress, config=config)
        entries = location.entries_of(files)
    if changing := [file.name for file in files if file.name not in entries]:
        raise DataError(f"{shown(str(path))}: {', '.join(changing[:3])} changed while it was indexed. Open it again")
    return ShardIndex(str(path), [(file, entries[file.name]) for file in files], location, config, trust=False)


def _trusted(where: ShardPath, location: IndexLocation) -> list[tuple[ShardFile, ShardEntry]]:
    entries = {entry.name: entry for entry in location.all_entries() if where.matches(entry.name)}
    if not entries or where.named() - entries.keys():
        raise DataError(f"{shown(where.folder)}: not indexed. Run saccade data index {shown(where.folder)}")
    return [
        (ShardFile(f"{where.folder}/{name}", name, entries[name].num_bytes), entries[name]) for name in sorted(entries)
    ]


# ------------------------------------------------------------------ use


class Spans(NamedTuple):
    """Byte ranges of samples in their shard: `begins[i]` to `ends[i]`, members `starts[i]` to `starts[i + 1]` of the lists."""

    begins: Ints
    ends: Ints
    starts: Ints
    names: list[str]
    offsets: Ints
    sizes: Ints


class Ragged:
    """A list of numbers per row, stored flat: `ragged[row]`, `len`, and `select` for many rows at once."""

    def __init__(self, values: NDArray[np.int32], starts: NDArray[Any]) -> None:
        self._values, self._starts = values, starts

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, row: int) -> NDArray[np.int32]:
        return self._values[self._starts[row] : self._starts[row + 1]]

    def counts(self, rows: NDArray[Any]) -> Ints:
        """Length of each row's list."""
        counts: Ints = (self._starts[rows + 1] - self._starts[rows]).astype(np.int64)
        return counts

    def select(self, rows: NDArray[Any], choices: NDArray[Any] | int) -> Ints:
        """One number of each row, `choices` modulo the list's length; 0 for an empty list."""
        counts = self.counts(rows)
        at = self._starts[rows] + choices % np.maximum(counts, 1)
        selected = np.zeros(len(rows), dtype=np.int64)
        selected[counts > 0] = self._values[at[counts > 0]]
        return selected


class ShardIndex:
    """An open index. Cheap to pickle, safe with threads; tables are kept in small LRU caches."""

    def __init__(
        self,
        path: str,
        shards: Sequence[tuple[ShardFile, ShardEntry]],
        location: IndexLocation,
        config: StorageConfig,
        *,
        trust: bool,
    ) -> None:
        self.path = path
        self.files = [file for file, _ in shards]
        self.entries = [entry for _, entry in shards]
        self.shards = [entry.name for entry in self.entries]
        self.sizes: Ints = np.array([entry.num_samples for entry in self.entries], dtype=np.int64)
        """Samples of each shard, usable or not."""
        self._location, self._config, self._trust = location, config, trust
        self._clear_caches()

    def __len__(self) -> int:
        return int(self.sizes.sum())

    @functools.cached_property
    def fingerprint(self) -> str:
        """Changes with the names, sizes and numbers of samples of the shards."""
        lines = [f"{entry.name}\t{entry.num_bytes}\t{entry.num_samples}\n" for entry in self.entries]
        return hashlib.sha256("".join(lines).encode()).hexdigest()[:16]

    @property
    def folder(self) -> Path:
        """Folder of the index: `index/` beside the shards, or one in the cache."""
        return self._location.folder

    @property
    def source(self) -> str:
        """The folder's name: the source of samples that state none."""
        return self._location.source

    @property
    def damaged(self) -> dict[str, str]:
        """Damaged or truncated shards, and where."""
        return {entry.name: entry.damage for entry in self.entries if entry.damage}

    @property
    def lost_bytes(self) -> int:
        """Bytes that the damage made unreadable."""
        return sum(entry.lost_bytes for entry in self.entries)

    def read(self, shard: int, columns: Sequence[str] | None = None) -> pa.Table:
        """Rows of one shard in the order of the tar; all columns, or these."""
        return self._table(parquet_name(self.shards[shard]), shard, columns, "saccade data index")

    # ---------------------------------------------------------------- what is kept

    def decisions(self, shard: int) -> pa.Table | None:
        """`keep`, `reason` and scores of one shard; None where the folder has not been curated."""
        if self.summary() is None:
            return None
        return self._table(f"decisions/{parquet_name(self.shards[shard])}", shard, None, "saccade data curate")

    def summary(self) -> dict[str, Any] | None:
        """Summary of the curation; None where the folder, or the part of it that was opened, has not been curated.

        Decisions without a summary are unfinished: training on all samples instead would be wrong, so that is an error.
        """
        return self._summaries.get(None, self._read_summary)

    def _read_summary(self) -> dict[str, Any] | None:
        if (self.folder / "decisions").is_dir():
            if not (self.folder / _SUMMARY).is_file():
                raise DataError(
                    f"{self.folder / 'decisions'}: curation was not finished. "
                    f"Run saccade data curate {shown(self.path)} again, or remove this folder"
                )
            content: bytes | None = (self.folder / _SUMMARY).read_bytes()
        else:
            content = self._location.read_shipped(_SUMMARY)
        if content is None:
            return None
        summary: dict[str, Any] = json.loads(content)
        if summary.get("version") != VERSION:
            raise DataError(f"{self.folder / _SUMMARY}: version {summary.get('version')}, only {VERSION} is read")
        return summary if any(entry.name in summary["bytes"] for entry in self.entries) else None

    @property
    def kept_sizes(self) -> Ints:
        """Kept samples of each shard, from the counts in shards.json and the summary; no Parquet file is read."""
        summary = self.summary()
        if summary is None:
            return np.array([entry.num_samples - entry.num_errors for entry in self.entries], dtype=np.int64)
        uncovered = [entry.name for entry in self.entries if summary["bytes"].get(entry.name) != entry.num_bytes]
        if uncovered:
            raise DataError(
                f"{shown(self.path)}: {len(uncovered)} shards were added or changed after curation "
                f"({', '.join(uncovered[:3])}). Run saccade data curate {shown(self.path)} again"
            )
        return np.array([summary["kept"][entry.name] for entry in self.entries], dtype=np.int64)

    def kept(self, shard: int) -> Ints:
        """Rows to train on: those without an error that curation keeps."""
        return self._kept.get(shard, lambda: self._find_kept(shard))

    def _find_kept(self, shard: int) -> Ints:
        is_kept = self.read(shard, ["error"])["error"].is_null().to_numpy()
        decisions = self.decisions(shard)
        if decisions is not None:
            is_kept = is_kept & decisions["keep"].to_numpy()
        return np.flatnonzero(is_kept).astype(np.int64)

    # ---------------------------------------------------------------- samples

    def spans(self, shard: int, rows: Sequence[int] | Ints) -> Spans:
        """Byte ranges of the members of these rows."""
        layout = self._layout(shard)
        rows = np.asarray(rows, dtype=np.int64)
        first, last = layout.starts[rows], layout.starts[rows + 1]
        starts = np.concatenate([[0], np.cumsum(last - first)])
        picked = np.repeat(first - starts[:-1], last - first) + np.arange(starts[-1])
        return Spans(
            begins=layout.offsets[first],
            ends=layout.offsets[last - 1] + layout.sizes[last - 1],
            starts=starts,
            names=[layout.names[code] for code in layout.codes[picked].tolist()],
            offsets=layout.offsets[picked],
            sizes=layout.sizes[picked],
        )

    def read_sample(self, shard: int, row: int, *, verify: bool = False) -> Sample:
        """Read one sample, with one request. With `verify` its bytes are compared with the checksum."""
        layout = self._layout(shard)
        first, last = layout.starts[row : row + 2].tolist()
        offsets, sizes = layout.offsets[first:last].tolist(), layout.sizes[first:last].tolist()
        key, begin = layout.keys[row].as_py(), offsets[0]
        try:
            data = read_range(self.files[shard], begin, offsets[-1] + sizes[-1] - begin, self._config)
        except DataError as error:
            raise type(error)(f"sample {key}: {error}") from error
        parts = [data[offset - begin : offset - begin + size] for offset, size in zip(offsets, sizes, strict=True)]
        if verify and checksum(parts) != layout.checksums[row].as_py():
            raise DataError(
                f"{shown(self.files[shard].url)}: sample {key} differs from its checksum: the shard was damaged or rewritten. "
                f"Restore it, or remove {self.folder / parquet_name(self.shards[shard])} and run saccade data index again"
            )
        names = [layout.names[code] for code in layout.codes[first:last].tolist()]
        return Sample(key, layout.sources[layout.source_codes[row]], dict(zip(names, parts, strict=True)))

    def prefetch(self, shard: int) -> None:
        """Download a remote shard into the cache."""
        file = self.files[shard]
        if file.is_remote:
            storage.storage(self._config).prefetch(file.url, file.num_bytes)

    def _layout(self, shard: int) -> _Layout:
        return self._layouts.get(shard, lambda: self._read_layout(shard))

    def _read_layout(self, shard: int) -> _Layout:
        name = parquet_name(self.shards[shard])
        return _Layout.of(self._read_table(name, shard, _LAYOUT_COLUMNS, "saccade data index"))

    # ---------------------------------------------------------------- lengths

    def lengths(self, shard: int, fingerprint: str) -> tuple[Ragged, NDArray[np.int32]]:
        """Tokens of each text variant, and patches, by row; a row that cannot be used has no variant and no patches."""
        return self._lengths.get((shard, fingerprint), lambda: self._read_lengths(shard, fingerprint))

    def _read_lengths(self, shard: int, fingerprint: str) -> tuple[Ragged, NDArray[np.int32]]:
        table = self._lengths_table(shard, fingerprint)
        tokens = table["tokens"].combine_chunks()
        return Ragged(tokens.values.to_numpy(), tokens.offsets.to_numpy()), table["patches"].to_numpy()

    def missing_lengths(self, fingerprint: str) -> list[int]:
        """Shards that `build_lengths` has not measured."""
        missing = self._location.missing(_lengths_folder(fingerprint), self.entries, trust=self._trust)
        return [shard for shard, name in enumerate(self.shards) if name in missing]

    def _lengths_table(self, shard: int, fingerprint: str) -> pa.Table:
        name = f"{_lengths_folder(fingerprint)}/{parquet_name(self.shards[shard])}"
        return self._table(name, shard, None, "build_lengths")

    # ---------------------------------------------------------------- files and caches

    def _table(self, relative: str, shard: int, columns: Sequence[str] | None, command: str) -> pa.Table:
        key = (relative, tuple(columns) if columns is not None else None)
        return self._tables.get(key, lambda: self._read_table(relative, shard, columns, command))

    def _read_table(self, relative: str, shard: int, columns: Sequence[str] | None, command: str) -> pa.Table:
        path = self._location.find(relative, None if self._trust else self.entries[shard])
        if path is None:
            raise DataError(
                f"{self.folder / relative}: missing, or made for another {self.shards[shard]}. "
                f"Run {command} {shown(self.path)} again"
            )
        try:
            with pq.ParquetFile(path, memory_map=True) as file:
                return file.read(list(columns) if columns is not None else None, use_threads=False)
        except (OSError, pa.ArrowException) as error:
            is_storage = isinstance(error, OSError) and error.errno is not None
            raise (StorageError if is_storage else DataError)(
                f"{path}: cannot be read: {error}. Remove it and run {command} {shown(self.path)}"
            ) from error

    def forget(self) -> None:
        """Clear the caches, after files have changed."""
        self._clear_caches()

    def _clear_caches(self) -> None:
        self._tables: _LRU[pa.Table] = _LRU(16)
        self._layouts: _LRU[_Layout] = _LRU(64)
        self._kept: _LRU[Ints] = _LRU(64)
        self._lengths: _LRU[tuple[Ragged, NDArray[np.int32]]] = _LRU(64)
        self._summaries: _LRU[dict[str, Any] | None] = _LRU(1)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if not isinstance(value, _LRU)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._clear_caches()


_LAYOUT_COLUMNS = ("key", "names", "offsets", "sizes", "checksum", "source")


class _Layout(NamedTuple):
    """Columns needed to read samples, as flat arrays."""

    keys: pa.StringArray
    starts: Ints
    names: list[str]
    codes: NDArray[np.int32]
    offsets: Ints
    sizes: Ints
    checksums: pa.FixedSizeBinaryArray
    sources: list[str]
    source_codes: NDArray[np.int32]

    @staticmethod
    def of(table: pa.Table) -> _Layout:
        columns = {name: table[name].combine_chunks() for name in _LAYOUT_COLUMNS}
        names, sources = columns["names"].values.dictionary_encode(), columns["source"].dictionary_encode()
        return _Layout(
            keys=columns["key"],
            starts=columns["offsets"].offsets.to_numpy().astype(np.int64),
            names=names.dictionary.to_pylist(),
            codes=names.indices.to_numpy(),
            offsets=columns["offsets"].values.to_numpy(),
            sizes=columns["sizes"].values.to_numpy(),
            checksums=columns["checksum"],
            sources=sources.dictionary.to_pylist(),
            source_codes=sources.indices.to_numpy(),
        )


T = TypeVar("T")


class _LRU(Generic[T]):
    """An LRU cache. Safe with threads and after a fork."""

    def __init__(self, max_items: int) -> None:
        self._max_items = max_items
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._items: OrderedDict[Hashable, T] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """The value, made if missing; two threads may both make it."""
        if self._pid != os.getpid():  # forked: a thread of the parent may have held the lock
            self._reset()
        with self._lock:
            if key in self._items:
                self._items.move_to_end(key)
                return self._items[key]
        value = make()
        with self._lock:
            self._items[key] = value
            if len(self._items) > self._max_items:
                self._items.popitem(last=False)
        return value


# ------------------------------------------------------------------ lengths

Measure = Callable[[Sample], tuple[Sequence[int], int]]
"""Tokens of each text variant of a sample, and its patches; raises `UserError` for a sample without a length. Picklable."""

_LENGTHS_SCHEMA = pa.schema(
    [
        pa.field("tokens", pa.list_(pa.int32()), nullable=False),
        pa.field("patches", pa.int32(), nullable=False),
        pa.field("error", pa.string()),
    ]
)


def _lengths_folder(fingerprint: str) -> str:
    """Folder of the lengths within the index."""
    if not re.fullmatch(r"[A-Za-z0-9_-]+", fingerprint):
        raise ConfigError(f"{fingerprint!r} cannot be a fingerprint: it names a folder. Use letters, digits, - and _")
    return f"lengths-{fingerprint}"


def build_lengths(
    index: ShardIndex,
    measure: Measure,
    fingerprint: str,
    *,
    num_workers: int | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> int:
    """Measure every sample of the shards that have no lengths yet, in parallel. Returns the number of shards measured.

    An interrupted build resumes shard by shard, and several machines may measure one folder at once: each takes shards in random
    order and skips those that another one has finished. `num_workers` None is one process per core for large folders, else this process.
    """
    missing = index.missing_lengths(fingerprint)
    absent, num_measured = set(missing), 0
    done = Progress.of([e for shard, e in enumerate(index.entries) if shard not in absent], len(index.shards))
    num_workers = num_workers or workers_for(sum(index.entries[shard].num_bytes for shard in missing))
    random.shuffle(missing)
    for shard, is_measured in in_processes(_measure_shard, (index, measure, fingerprint), missing, num_workers):
        num_measured += is_measured
        done = done.plus(index.entries[shard])
        if on_progress:
            on_progress(done)
    return num_measured


def _measure_shard(shared: tuple[ShardIndex, Measure, str], shard: int) -> tuple[int, bool]:
    """Write the lengths of one shard, unless another machine has; returns whether it was measured."""
    index, measure, fingerprint = shared
    entry = index.entries[shard]
    target = index.folder / _lengths_folder(fingerprint) / parquet_name(entry.name)
    note = read_note(target) or {}
    if (note.get("bytes"), note.get("num_rows")) == (entry.num_bytes, entry.num_samples):
        return shard, False
    rows = [
        _measured(index, measure, shard, row, error)
        for row, error in enumerate(index.read(shard, ["error"])["error"].to_pylist())
    ]
    table = pa.Table.from_pylist(rows, _LENGTHS_SCHEMA)
    write_table(target, table, {"name": entry.name, "bytes": entry.num_bytes})
    return shard, True


def _measured(index: ShardIndex, measure: Measure, shard: int, row: int, error: str | None) -> dict[str, Any]:
    """One row; samples with an error in the index are not read."""
    if error is None:
        sample = index.read_sample(shard, row)
        try:
            tokens, patches = measure(sample)
            return {"tokens": list(tokens), "patches": patches, "error": None}
        except UserError as reason:
            error = str(reason)
    return {"tokens": [], "patches": 0, "error": error}


# ------------------------------------------------------------------ decisions


def write_decisions(index: ShardIndex, shard: int, table: pa.Table) -> int:
    """Write the decisions on one shard; returns the number of samples kept. Invalidates the summary.

    `table` has one row per sample: keep (bool), reason (string, null where kept), and any scores.
    """
    entry = index.entries[shard]
    columns = dict(zip(table.schema.names, table.schema.types, strict=True))
    if columns.get("keep") != pa.bool_() or columns.get("reason") != pa.string() or len(table) != entry.num_samples:
        raise DataError(
            f"{entry.name}: decisions are {entry.num_samples} rows with keep (bool) and reason (string), "
            f"not {len(table)} rows with {', '.join(f'{name} ({kind})' for name, kind in columns.items())}"
        )
    (index.folder / _SUMMARY).unlink(missing_ok=True)
    is_usable = index.read(shard, ["error"])["error"].is_null()
    num_kept: int = pc.sum(pc.and_(table["keep"], is_usable)).as_py() or 0
    note = {"name": entry.name, "bytes": entry.num_bytes, "kept": num_kept}
    write_table(index.folder / "decisions" / parquet_name(entry.name), table, note)
    index.forget()
    return num_kept


def decided(index: ShardIndex) -> dict[str, int]:
    """Samples kept of each shard with decisions, also of an unfinished curation; without shards that changed since."""
    kept = {}
    for entry in index.entries:
        note = read_note(index.folder / "decisions" / parquet_name(entry.name)) or {}
        if (note.get("bytes"), note.get("num_rows")) == (entry.num_bytes, entry.num_samples) and "kept" in note:
            kept[entry.name] = int(note["kept"])
    return kept


def finish_decisions(index: ShardIndex, *, settings: Mapping[str, Any], counts: Mapping[str, int]) -> None:
    """Write the summary that makes the decisions valid. Every shard must have decisions.

    Decisions on other shards of the folder stay valid; settings and counts are those of the last curation.
    """
    kept = decided(index)
    if missing := [entry.name for entry in index.entries if entry.name not in kept]:
        raise DataError(f"{len(missing)} shards have no decisions: {', '.join(missing[:3])}. Write them first")
    sizes = {entry.name: entry.num_bytes for entry in index.entries}
    for path in sorted((index.folder / "decisions").glob("*.parquet")):
        note = read_note(path) or {}
        if "kept" in note and note["name"] not in sizes:
            kept[note["name"]], sizes[note["name"]] = int(note["kept"]), int(note["bytes"])
    summary = {"version": VERSION, "settings": dict(settings), "kept": kept, "bytes": sizes, "counts": dict(counts)}
    write_json(index.folder / _SUMMARY, summary)
    index.forget()
