"""The index of a shard folder, open for reading: its samples, where their bytes are, and which are kept.

    open_index(path)  ->  shards.json only  ->  ShardIndex  ->  a shard's Parquet files when first used

Opening costs the number of shards, never the number of samples. `index_builder.py` builds the files and
`index_files.py` finds them; `lengths.py` and `decisions.py` add to them. The layout is in docs/formats.md.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from saccade.data import storage
from saccade.data.index_builder import build_index, checksum, open_table
from saccade.data.index_files import VERSION, IndexLocation, ShardEntry, ShardProgress, parquet_name
from saccade.data.lru_cache import LRUCache
from saccade.data.order import Ints
from saccade.data.sample import Sample
from saccade.data.shard_table import Rows, ShardTable
from saccade.data.shards import ShardFile, ShardPath, list_shards, read_range
from saccade.data.storage import Region, StorageConfig, shown
from saccade.errors import DataError, StorageError

logger = logging.getLogger(__name__)
_DEFAULT = StorageConfig()
SUMMARY = "decisions/summary.json"
"""Summary of a curation, within the index."""


def open_index(
    path: str | Path,
    *,
    build: bool = True,
    check_files: bool = True,
    num_workers: int | None = None,
    on_progress: Callable[[ShardProgress], None] | None = None,
    config: StorageConfig = _DEFAULT,
    ray_address: str | None = None,
    index_folder: str | None = None,
) -> ShardIndex:
    """Open the index of a shard folder, or of some of its shards.

    Shards that are new or have changed are indexed first, by the cluster at `ray_address` if there is one; with `build`
    False they are an error. With `check_files` False the shards are not listed: the index is used as it is.
    `index_folder`, a path or a URL, is the folder of the index if it is not `index/` next to the shards.
    """
    where = ShardPath.parse(path)
    location = IndexLocation.of(where.folder, config, index_folder)
    if not check_files:
        return ShardIndex(str(path), _trusted(where, location), location, config, trust=True)
    files = list_shards(path, config)
    entries = location.entries_of(files)
    stale = [file.name for file in files if file.name not in entries]
    if stale and not build:
        names = f"{', '.join(stale[:3])}{', ...' if len(stale) > 3 else ''}"
        raise DataError(
            f"{shown(str(path))}: {len(stale)} of {len(files)} shards are not indexed, or have changed since "
            f"({names}). Run saccade data index {shown(str(path))}"
        )
    if stale:
        logger.info("%s: indexing %d of %d shards", shown(str(path)), len(stale), len(files))
        build_index(
            path,
            num_workers=num_workers,
            on_progress=on_progress,
            config=config,
            ray_address=ray_address,
            index_folder=index_folder,
        )
        entries = location.entries_of(files)
    if changing := [file.name for file in files if file.name not in entries]:
        raise DataError(f"{shown(str(path))}: {', '.join(changing[:3])} changed while it was indexed. Open it again")
    table = ShardTable.of([entries[file.name] for file in files])
    return ShardIndex(str(path), table, location, config, trust=False)


def _trusted(where: ShardPath, location: IndexLocation) -> ShardTable:
    if where.is_whole_folder and (table := open_table(location)) is not None:
        return table
    entries = {entry.name: entry for entry in location.all_entries() if where.matches(entry.name)}
    if not entries or where.named() - entries.keys():
        raise DataError(f"{shown(where.folder)}: not indexed. Run saccade data index {shown(where.folder)}")
    return ShardTable.of([entries[name] for name in sorted(entries)])


class ShardIndex:
    """An open index. Cheap to pickle, safe with threads; tables are kept in small LRU caches."""

    def __init__(
        self,
        path: str,
        table: ShardTable,
        location: IndexLocation,
        config: StorageConfig,
        *,
        trust: bool,
    ) -> None:
        self.path = path
        self._table = table
        self.sizes: Ints = table.num_samples
        """Samples of each shard, usable or not."""
        self.num_bytes: Ints = table.num_bytes
        """Bytes of each shard."""
        self._location, self._config, self._trust = location, config, trust
        self._shipped_decisions: str | None = None  # which ones: they are copied under a name of their own
        self._clear_caches()

    def __len__(self) -> int:
        return int(self.sizes.sum())

    @property
    def shards(self) -> Rows[str]:
        """Names of the shards."""
        return self._table.names

    @property
    def entries(self) -> Rows[ShardEntry]:
        """The shards as the list of shards has them."""
        return self._table.entries

    @property
    def files(self) -> Rows[ShardFile]:
        """The tars."""
        return Rows(len(self._table), self._file)

    def _file(self, shard: int) -> ShardFile:
        name = self.shards[shard]
        return ShardFile(f"{self._location.shards}/{name}", name, int(self.num_bytes[shard]))

    @property
    def fingerprint(self) -> str:
        """Changes with the names, sizes and numbers of samples of the shards."""
        return self._table.fingerprint

    @property
    def folder(self) -> Path:
        """Folder of the index: `index/` next to the shards, or one in the cache."""
        return self._location.folder

    @property
    def location(self) -> IndexLocation:
        """Where the index is read and written."""
        return self._location

    def only(self, shards: Sequence[int]) -> ShardIndex:
        """The index of some of the shards, in this order."""
        return ShardIndex(self.path, self._table.take(shards), self._location, self._config, trust=self._trust)

    @property
    def source(self) -> str:
        """The folder's name: the source of samples that state none."""
        return self._location.source

    @property
    def damaged(self) -> dict[str, str]:
        """Damaged or truncated shards, and where."""
        return self._table.damaged()

    @property
    def lost_bytes(self) -> int:
        """Bytes that the damage made unreadable."""
        return self._table.lost_bytes

    def read(self, shard: int, columns: Sequence[str] | None = None) -> pa.Table:
        """Rows of one shard in the order of the tar; all columns, or these."""
        return self.read_file(parquet_name(self.shards[shard]), shard, columns, "saccade data index")

    # ---------------------------------------------------------------- what is kept

    def decisions(self, shard: int) -> pa.Table | None:
        """`keep`, `reason` and scores of one shard; None if the folder has not been curated."""
        if self.summary() is None:
            return None
        name = parquet_name(self.shards[shard])
        copied = f"decisions-{self._shipped_decisions}/{name}" if self._shipped_decisions else None
        return self.read_file(f"decisions/{name}", shard, None, "saccade data curate", copied)

    def summary(self) -> dict[str, Any] | None:
        """Summary of the curation; None if the folder, or the opened part of it, has not been curated.

        Decisions without a summary are unfinished: training on all samples instead would be wrong, so that is an error.
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
            self._shipped_decisions = None
        else:
            content = self._location.read_shipped(SUMMARY)
            self._shipped_decisions = hashlib.sha256(content).hexdigest()[:16] if content is not None else None
        if content is None:
            return None
        summary: dict[str, Any] = json.loads(content)
        if summary.get("version") != VERSION:
            raise DataError(f"{self.folder / SUMMARY}: version {summary.get('version')}, only {VERSION} is read")
        return summary if any(entry.name in summary["bytes"] for entry in self.entries) else None

    @property
    def kept_sizes(self) -> Ints:
        """Kept samples of each shard, from the counts in shards.json and the summary; no Parquet file is read."""
        summary = self.summary()
        if summary is None:
            return self.sizes - self._table.num_errors
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

    def read_sample(
        self, shard: int, row: int, *, verify: bool = False, region: Region | None = None, is_cached: bool = True
    ) -> Sample:
        """Read one sample, with one request. With `verify` its bytes are compared with the checksum.

        `region`: the part of a remote shard with the sample whose chunks are cached; by default all of it.
        """
        layout = self._layout(shard)
        first, last = layout.starts[row : row + 2].tolist()
        offsets, sizes = layout.offsets[first:last].tolist(), layout.sizes[first:last].tolist()
        key, begin = layout.keys[row].as_py(), offsets[0]
        num_bytes = offsets[-1] + sizes[-1] - begin
        try:
            data = read_range(layout.file, begin, num_bytes, self._config, region, is_cached=is_cached)
        except DataError as error:
            raise type(error)(f"sample {key}: {error}") from error
        parts = [data[offset - begin : offset - begin + size] for offset, size in zip(offsets, sizes, strict=True)]
        if verify and checksum(parts) != layout.checksums[row].as_py():
            data = self._read_again(shard, key, begin, num_bytes, region)
            parts = [data[offset - begin : offset - begin + size] for offset, size in zip(offsets, sizes, strict=True)]
            self._check(shard, row, key, parts)
        names = [layout.names[code] for code in layout.codes[first:last].tolist()]
        return Sample(key, layout.sources[layout.source_codes[row]], dict(zip(names, parts, strict=True)))

    def _read_again(self, shard: int, key: str, begin: int, size: int, region: Region | None) -> bytes:
        """The bytes of a sample that differed from its checksum, from the store: the cached copy may be damaged."""
        file = self.files[shard]
        try:
            if file.is_remote:
                storage.storage(self._config).forget(file.url, file.num_bytes, begin, size, region)
                logger.warning("%s: the cached copy of sample %s is damaged; it is read again", shown(file.url), key)
            return read_range(file, begin, size, self._config, is_cached=False)
        except DataError as error:
            raise type(error)(f"sample {key}: {error}") from error

    def _check(self, shard: int, row: int, key: str, parts: list[bytes]) -> None:
        if checksum(parts) != self._layout(shard).checksums[row].as_py():
            raise DataError(
                f"{shown(self.files[shard].url)}: sample {key} differs from its checksum: the shard was damaged or "
                f"rewritten. Restore it, or remove {self.folder / parquet_name(self.shards[shard])} and run saccade "
                "data index again"
            )

    def identity(self, shard: int, row: int) -> tuple[str, bytes]:
        """Key and checksum of a sample."""
        layout = self._layout(shard)
        return layout.keys[row].as_py(), layout.checksums[row].as_py()

    def byte_ranges(self, shard: int, rows: Ints) -> tuple[Ints, Ints]:
        """First byte of each of these samples in its shard, and the one after its last."""
        layout = self._layout(shard)
        last = layout.starts[rows + 1] - 1
        return layout.offsets[layout.starts[rows]], layout.offsets[last] + layout.sizes[last]

    def prefetch(self, shard: int) -> None:
        """Download a remote shard into the cache."""
        file = self.files[shard]
        if file.is_remote:
            storage.storage(self._config).prefetch(file.url, file.num_bytes)

    def _layout(self, shard: int) -> _Layout:
        return self._layouts.get(shard, lambda: self._read_layout(shard))

    def _read_layout(self, shard: int) -> _Layout:
        name = parquet_name(self.shards[shard])
        return _Layout.of(self.files[shard], self._read_table(name, shard, _LAYOUT_COLUMNS, "saccade data index"))

    # ---------------------------------------------------------------- files and caches

    def read_file(
        self, relative: str, shard: int, columns: Sequence[str] | None, command: str, copied: str | None = None
    ) -> pa.Table:
        """A Parquet file of the index that describes this shard; `command` creates a missing one, in errors.

        `copied`: the name of its copy in the cache, if files of this name differ between versions of a remote index.
        """
        key = (relative, tuple(columns) if columns is not None else None)
        return self._tables.get(key, lambda: self._read_table(relative, shard, columns, command, copied))

    def _read_table(
        self, relative: str, shard: int, columns: Sequence[str] | None, command: str, copied: str | None = None
    ) -> pa.Table:
        path = self._location.find(relative, None if self._trust else self.entries[shard], copied)
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

    def shards_without(self, subfolder: str) -> list[int]:
        """Shards without a file in this folder of the index."""
        missing = self._location.missing(subfolder, self.entries, trust=self._trust)
        return [shard for shard, name in enumerate(self.shards) if name in missing]

    def forget(self) -> None:
        """Clear the caches, after files have changed."""
        self._clear_caches()

    def _clear_caches(self) -> None:
        self._tables: LRUCache[pa.Table] = LRUCache(16)
        self._layouts: LRUCache[_Layout] = LRUCache(64)
        self._kept: LRUCache[Ints] = LRUCache(64)
        self._summaries: LRUCache[dict[str, Any] | None] = LRUCache(1)


_LAYOUT_COLUMNS = ("key", "names", "offsets", "sizes", "checksum", "source")


class _Layout(NamedTuple):
    """Columns needed to read samples, as flat arrays."""

    file: ShardFile
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
    def of(file: ShardFile, table: pa.Table) -> _Layout:
        columns = {name: table[name].combine_chunks() for name in _LAYOUT_COLUMNS}
        names, sources = columns["names"].values.dictionary_encode(), columns["source"].dictionary_encode()
        return _Layout(
            file=file,
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
