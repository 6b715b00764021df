"""The index of a shard folder: which samples there are, where their bytes lie, which are kept, how long they are.

    open_index(path)  ->  shards.json, nothing else  ->  ShardIndex  ->  a shard's Parquet file when it is first used

Opening costs the number of shards, never the number of samples. The layout is in docs/formats.md; `indexing.py` makes a shard's
rows, `places.py` knows where files lie, `sidecars.py` writes lengths and decisions.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from saccade.data import storage
from saccade.data.indexing import IndexJob, ShardEntry, checksum, index_shard
from saccade.data.parallel import in_processes, workers_for
from saccade.data.places import VERSION, Places, parquet_name
from saccade.data.sample import Sample
from saccade.data.shards import ShardFile, ShardPath, list_shards, read_range
from saccade.data.sidecars import (
    SUMMARY,
    Ints,
    Measure,
    Progress,
    Ragged,
    build_lengths,
    decided,
    finish_decisions,
    lengths_folder,
    write_decisions,
)
from saccade.data.storage import StorageConfig, shown
from saccade.errors import DataError

__all__ = [
    "IndexReport",
    "Measure",
    "Progress",
    "Ragged",
    "ShardIndex",
    "Spans",
    "build_index",
    "build_lengths",
    "decided",
    "finish_decisions",
    "open_index",
    "write_decisions",
]

_LOG = logging.getLogger(__name__)
_DEFAULT = StorageConfig()


@dataclass(frozen=True)
class IndexReport:
    """What an index holds after building it."""

    num_shards: int
    num_scanned: int
    """Shards that had to be scanned; the others were indexed before."""
    num_samples: int
    num_errors: int
    num_bytes: int
    damaged: dict[str, str]
    """Shards that break off, and where."""


# ------------------------------------------------------------------ build and open


def build_index(
    path: str | Path,
    *,
    num_workers: int | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    config: StorageConfig = _DEFAULT,
) -> IndexReport:
    """Index every shard that is new or has changed, in parallel. May be stopped at any time and goes on shard by shard.

    `num_workers` None is one process per core where there is much to read, else this one.
    """
    where = ShardPath.parse(path)
    files, places = list_shards(path, config), Places.of(where.folder, config)
    entries = places.entries_of(files)
    stale = [file for file in files if file.name not in entries]
    num_scanned = 0
    done = Progress(len(entries), len(files), *_totals(entries.values()))
    jobs = [IndexJob(file, places.own / parquet_name(file.name)) for file in stale]
    num_workers = num_workers or workers_for(sum(file.num_bytes for file in stale))
    for entry, is_scanned in in_processes(index_shard, (places.source, config), jobs, num_workers):
        entries[entry.name] = entry
        num_scanned += is_scanned
        if entry.damage and is_scanned:
            _LOG.warning("%s/%s: %s; the whole samples before are used", shown(where.folder), entry.name, entry.damage)
        done = Progress(
            done.num_done + 1, len(files), done.num_samples + entry.num_samples, done.num_bytes + entry.num_bytes
        )
        if on_progress:
            on_progress(done)
    if stale:
        places.write_entries(entries, keep_others=not where.is_whole_folder)
    num_samples, num_bytes = _totals(entries.values())
    return IndexReport(
        num_shards=len(files),
        num_scanned=num_scanned,
        num_samples=num_samples,
        num_errors=sum(entry.num_errors for entry in entries.values()),
        num_bytes=num_bytes,
        damaged={entry.name: entry.damage for entry in entries.values() if entry.damage},
    )


def _totals(entries: Iterable[ShardEntry]) -> tuple[int, int]:
    entries = list(entries)
    return sum(entry.num_samples for entry in entries), sum(entry.num_bytes for entry in entries)


def open_index(
    path: str | Path,
    *,
    build: bool = True,
    check_files: bool = True,
    num_workers: int | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    config: StorageConfig = _DEFAULT,
) -> ShardIndex:
    """The index of a shard folder, or of some of its shards.

    Shards that are new or have changed are indexed first; with `build` False they are an error. With `check_files` False the
    shards are not even listed: what the index says is taken as it stands.
    """
    where = ShardPath.parse(path)
    places = Places.of(where.folder, config)
    if not check_files:
        return ShardIndex(str(path), _trusted(where, places), places, config, trust=True)
    files = list_shards(path, config)
    entries = places.entries_of(files)
    stale = [file.name for file in files if file.name not in entries]
    if stale and not build:
        names = f"{', '.join(stale[:3])}{', ...' if len(stale) > 3 else ''}"
        raise DataError(
            f"{shown(str(path))}: {len(stale)} of {len(files)} shards are not indexed, or have changed since ({names}). "
            f"Run saccade data index {shown(str(path))}"
        )
    if stale:
        _LOG.info("%s: indexing %d of %d shards", shown(str(path)), len(stale), len(files))
        build_index(path, num_workers=num_workers, on_progress=on_progress, config=config)
        entries = places.entries_of(files)
    if changing := [file.name for file in files if file.name not in entries]:
        raise DataError(f"{shown(str(path))}: {', '.join(changing[:3])} changed while it was indexed. Open it again")
    return ShardIndex(str(path), [(file, entries[file.name]) for file in files], places, config, trust=False)


def _trusted(where: ShardPath, places: Places) -> list[tuple[ShardFile, ShardEntry]]:
    entries = {entry.name: entry for entry in places.known() if where.matches(entry.name)}
    if not entries or where.named() - entries.keys():
        raise DataError(f"{shown(where.folder)}: not indexed. Run saccade data index {shown(where.folder)}")
    return [
        (ShardFile(f"{where.folder}/{name}", name, entries[name].num_bytes), entries[name]) for name in sorted(entries)
    ]


# ------------------------------------------------------------------ use


class Spans(NamedTuple):
    """Where samples lie in their shard: bytes `begins[i]` to `ends[i]`, members `starts[i]` to `starts[i + 1]` of the lists."""

    begins: Ints
    ends: Ints
    starts: Ints
    names: list[str]
    offsets: Ints
    sizes: Ints


class ShardIndex:
    """An opened index. Cheap to pickle to other processes, safe with threads; what it has read stays in small caches."""

    def __init__(
        self,
        path: str,
        shards: Sequence[tuple[ShardFile, ShardEntry]],
        places: Places,
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
        self._places, self._config, self._trust = places, config, trust
        self._empty_caches()

    def __len__(self) -> int:
        return int(self.sizes.sum())

    @functools.cached_property
    def fingerprint(self) -> str:
        """Changes with the shards: their names, bytes and numbers of samples."""
        lines = [f"{entry.name}\t{entry.num_bytes}\t{entry.num_samples}\n" for entry in self.entries]
        return hashlib.sha256("".join(lines).encode()).hexdigest()[:16]

    @property
    def folder(self) -> Path:
        """Where the index is written: `index/`, or its place in the cache folder."""
        return self._places.own

    @property
    def source(self) -> str:
        """The source of samples that name none: the folder's name."""
        return self._places.source

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
        """The decisions' summary; None where the folder, or the part of it that was opened, has not been curated.

        Decisions without one are unfinished: to learn from all samples instead would be wrong, so that is an error.
        """
        return self._summaries.get(None, self._read_summary)

    def _read_summary(self) -> dict[str, Any] | None:
        if (self.folder / "decisions").is_dir():
            if not (self.folder / SUMMARY).is_file():
                raise DataError(
                    f"{self.folder / 'decisions'}: curation was not finished. "
                    f"Run saccade data curate {shown(self.path)} again, or remove this folder"
                )
            content: bytes | None = (self.folder / SUMMARY).read_bytes()
        else:
            content = self._places.read_shipped(SUMMARY)
        if content is None:
            return None
        summary: dict[str, Any] = json.loads(content)
        if summary.get("version") != VERSION:
            raise DataError(f"{self.folder / SUMMARY}: version {summary.get('version')}, only {VERSION} is read")
        return summary if any(entry.name in summary["bytes"] for entry in self.entries) else None

    @property
    def kept_sizes(self) -> Ints:
        """Kept samples of each shard, by the counts in shards.json and the decisions' summary; no shard is looked into."""
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
        """Row numbers to learn from: all but those with errors and those decided against."""
        return self._kept.get(shard, lambda: self._find_kept(shard))

    def _find_kept(self, shard: int) -> Ints:
        is_kept = self.read(shard, ["error"])["error"].is_null().to_numpy()
        decisions = self.decisions(shard)
        if decisions is not None:
            is_kept = is_kept & decisions["keep"].to_numpy()
        return np.flatnonzero(is_kept).astype(np.int64)

    # ---------------------------------------------------------------- samples

    def spans(self, shard: int, rows: Sequence[int] | Ints) -> Spans:
        """Where the members of these rows lie."""
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
        """One sample with all its bytes, by one read. With `verify` they are compared with the checksum."""
        layout = self._layout(shard)
        first, last = layout.starts[row : row + 2].tolist()
        offsets, sizes = layout.offsets[first:last].tolist(), layout.sizes[first:last].tolist()
        key, begin = layout.keys[row].as_py(), offsets[0]
        try:
            data = read_range(self.files[shard], begin, offsets[-1] + sizes[-1] - begin, self._config)
        except DataError as error:
            raise DataError(f"sample {key}: {error}") from error
        parts = [data[offset - begin : offset - begin + size] for offset, size in zip(offsets, sizes, strict=True)]
        if verify and checksum(parts) != layout.checksums[row].as_py():
            raise DataError(
                f"{shown(self.files[shard].url)}: sample {key} differs from its checksum: the shard was damaged or rewritten. "
                f"Restore it, or remove {self.folder / parquet_name(self.shards[shard])} and run saccade data index again"
            )
        names = [layout.names[code] for code in layout.codes[first:last].tolist()]
        return Sample(key, layout.sources[layout.source_codes[row]], dict(zip(names, parts, strict=True)))

    def read_samples(self, shard: int, rows: Iterable[int], *, verify: bool = False) -> list[Sample]:
        """Several samples of one shard, in the order of `rows`."""
        return [self.read_sample(shard, int(row), verify=verify) for row in rows]

    def prefetch(self, shard: int) -> None:
        """Bring a remote shard into the cache; a local one is where it is."""
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

    def length_errors(self, shard: int, fingerprint: str) -> dict[int, str]:
        """Why rows have no length."""
        errors = self._lengths_table(shard, fingerprint)["error"].to_pylist()
        return {row: error for row, error in enumerate(errors) if error is not None}

    def missing_lengths(self, fingerprint: str) -> list[int]:
        """Shards that `build_lengths` has still to measure."""
        sizes = {entry.name: None if self._trust else entry.num_bytes for entry in self.entries}
        missing = self._places.missing(lengths_folder(fingerprint), sizes)
        return [shard for shard, name in enumerate(self.shards) if name in missing]

    def _lengths_table(self, shard: int, fingerprint: str) -> pa.Table:
        name = f"{lengths_folder(fingerprint)}/{parquet_name(self.shards[shard])}"
        return self._table(name, shard, None, "build_lengths")

    # ---------------------------------------------------------------- files and caches

    def _table(self, relative: str, shard: int, columns: Sequence[str] | None, command: str) -> pa.Table:
        key = (relative, tuple(columns) if columns is not None else None)
        return self._tables.get(key, lambda: self._read_table(relative, shard, columns, command))

    def _read_table(self, relative: str, shard: int, columns: Sequence[str] | None, command: str) -> pa.Table:
        path = self._places.find(relative, None if self._trust else self.entries[shard].num_bytes)
        if path is None:
            raise DataError(
                f"{self.folder / relative}: not there, or made for another {self.shards[shard]}. "
                f"Run {command} {shown(self.path)} again"
            )
        try:
            with pq.ParquetFile(path, memory_map=True) as file:
                return file.read(list(columns) if columns is not None else None, use_threads=False)
        except (OSError, pa.ArrowException) as error:
            raise DataError(
                f"{path}: cannot be read: {error}. Remove it and run {command} {shown(self.path)}"
            ) from error

    def forget(self) -> None:
        """Drop what was read, after its files have changed."""
        self._empty_caches()

    def _empty_caches(self) -> None:
        self._tables: _Recent[pa.Table] = _Recent(16)
        self._layouts: _Recent[_Layout] = _Recent(64)
        self._kept: _Recent[Ints] = _Recent(64)
        self._lengths: _Recent[tuple[Ragged, NDArray[np.int32]]] = _Recent(64)
        self._summaries: _Recent[dict[str, Any] | None] = _Recent(1)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if not isinstance(value, _Recent)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._empty_caches()


_LAYOUT_COLUMNS = ("key", "names", "offsets", "sizes", "checksum", "source")


class _Layout(NamedTuple):
    """What reading a sample needs to know, as flat arrays."""

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


class _Recent(Generic[T]):
    """The values asked for last, a bounded number. Safe with threads and after a fork."""

    def __init__(self, max_items: int) -> None:
        self._max_items = max_items
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._items: OrderedDict[Hashable, T] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """The value, made if it is not there; two threads may both make it."""
        if self._pid != os.getpid():  # forked: a thread that is not here may have held the lock
            self._begin()
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
