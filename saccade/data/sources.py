"""Open sources: the index of their shards and the lengths of their samples, both built on first use.

Source -> index (built) -> lengths (measured) -> IndexedSource: sizes and lengths for the sampler, samples for the
collator
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from saccade.config import decode, encode
from saccade.data import storage
from saccade.data.config import Source
from saccade.data.index import ShardIndex, open_index
from saccade.data.index_files import ShardProgress
from saccade.data.lengths import Lengths, Measurer
from saccade.data.lru_cache import LRUCache
from saccade.data.order import Ints
from saccade.data.sample import Sample
from saccade.data.storage import Chunk, Region, StorageConfig
from saccade.data.takedown import Takedown
from saccade.data.units import Units, byte_range
from saccade.errors import ConfigError, DataError

logger = logging.getLogger(__name__)

Shards = str | Path | Source | Sequence[str | Path | Source]
"""One shard folder, or several that are mixed."""
OnProgress = Callable[[str, ShardProgress], None]
"""Called while something is built: what ("index of coco", "lengths of coco"), and how far it is."""


@dataclass(frozen=True)
class IndexedSource:
    """A source whose index is open and whose samples are measured.

    A sample is named by its shard and its number among the kept rows.
    """

    config: Source
    index: ShardIndex
    measured: Lengths
    num_measured: int = 0
    """Shards that were measured when the source was opened."""

    @functools.cached_property
    def name(self) -> str:
        """Name in sample ids and logs."""
        return self.config.name or self.index.source

    @property
    def weight(self) -> float | None:
        """Sampling weight, if one is given."""
        return self.config.weight

    @functools.cached_property
    def takedown(self) -> Takedown:
        """The samples that are not read."""
        return Takedown(self.index)

    # ---------------------------------------------------------------- for the batch sampler

    @functools.cached_property
    def sizes(self) -> Ints:
        """Kept samples of each shard."""
        return self.index.kept_sizes

    @property
    def num_bytes(self) -> Ints:
        """Bytes of each shard."""
        return self.index.num_bytes

    @property
    def fingerprint(self) -> str:
        """Changes with the shards, the curation decisions, and the lengths."""
        decisions = hashlib.sha256(json.dumps(self.index.summary(), sort_keys=True).encode()).hexdigest()
        return f"{self.index.fingerprint}-{decisions}-{self.measured.fingerprint}"

    def lengths(self, shard: int, kept_rows: Ints, epochs: Ints) -> tuple[Ints, Ints]:
        """Tokens and patches; 0 for samples that could not be measured, which the collator reports as bad."""
        rows = self.index.kept(shard)[kept_rows]
        tokens, patches = self.measured.of_shard(shard)
        return tokens.select(rows, epochs), patches[rows].astype("int64")

    # ---------------------------------------------------------------- for the collator

    def read(self, shard: int, kept_row: int, unit_bytes: int | None = None, *, is_cached: bool = True) -> Sample:
        """Read one sample and compare it with its checksum; `TakenDownError` if it was taken down.

        A remote one is read through the cache, whose chunks divide a unit of at most `unit_bytes`.
        """
        row, region = self._row(shard, kept_row), None
        self.takedown.check(shard, row)
        if unit_bytes is not None and is_cached and self.index.files[shard].is_remote:
            region = self.region(shard, kept_row, unit_bytes)
        return self.index.read_sample(shard, row, verify=True, region=region, is_cached=is_cached)

    def region(self, shard: int, kept_row: int, unit_bytes: int) -> Region:
        """The bytes of the unit that a sample is in."""
        units = self._units(unit_bytes)
        unit = int(units.of_samples(np.array([shard]), np.array([kept_row]))[0])
        return self._regions(shard, unit_bytes)[unit - units.of_shard(shard).start]

    def chunks(self, shard: int, kept_rows: Ints, unit_bytes: int | None) -> list[Chunk]:
        """The chunks of a remote shard that these samples are in, in the order of their first use."""
        file, config = self.index.files[shard], self.index.location.config
        begins, ends = self.index.byte_ranges(shard, self.index.kept(shard)[kept_rows])
        regions: list[Region | None] = [None] * len(kept_rows)
        if unit_bytes is not None:
            units = self._units(unit_bytes).of_samples(np.full(len(kept_rows), shard), kept_rows)
            first = self._units(unit_bytes).of_shard(shard).start
            regions = [self._regions(shard, unit_bytes)[unit - first] for unit in units.tolist()]
        ranges = zip(begins.tolist(), ends.tolist(), regions, strict=True)
        chunks = storage.storage(config).chunks
        found = (
            chunk
            for begin, end, region in ranges
            for chunk in chunks(file.url, file.num_bytes, begin, end - begin, region)
        )
        return list(dict.fromkeys(found))

    def _units(self, unit_bytes: int) -> Units:
        return self._cached_units.get(unit_bytes, lambda: Units(self.sizes, self.num_bytes, max_bytes=unit_bytes))

    @functools.cached_property
    def _cached_units(self) -> LRUCache[Units]:
        return LRUCache(1)

    @functools.cached_property
    def _cached_regions(self) -> LRUCache[list[Region]]:
        return LRUCache(64)

    def _regions(self, shard: int, unit_bytes: int) -> list[Region]:
        """The bytes of every unit of a shard."""
        return self._cached_regions.get((shard, unit_bytes), lambda: self._find_regions(shard, unit_bytes))

    def _find_regions(self, shard: int, unit_bytes: int) -> list[Region]:
        units = self._units(unit_bytes)
        rows = units.rows(np.array(units.of_shard(shard)))
        begins, ends = self.index.byte_ranges(shard, self.index.kept(shard))
        counts = zip(rows.first.tolist(), rows.counts.tolist(), strict=True)
        return [Region(*byte_range(begins, ends, first, count)) for first, count in counts if count]

    def sample_id(self, shard: int, kept_row: int) -> str:
        """source/shard/key of a sample."""
        key = self.index.read(shard, ["key"])["key"][self._row(shard, kept_row)].as_py()
        return f"{self.name}/{self.index.shards[shard].removesuffix('.tar')}/{key}"

    def _row(self, shard: int, kept_row: int) -> int:
        return int(self.index.kept(shard)[kept_row])

    # ---------------------------------------------------------------- messages and logs

    def to_json(self) -> dict[str, Any]:
        """The source in plain values, to open it again in a worker process."""
        return {"config": encode(self.config), "index": self.index.fingerprint, "lengths": self.measured.fingerprint}

    @staticmethod
    def from_json(content: dict[str, Any], storage: StorageConfig) -> IndexedSource:
        """Open a source in a worker process. Shard numbers must mean the same there."""
        config = decode(Source, content["config"])
        index = open_index(config.path, build=False, check_files=False, config=storage)
        if index.fingerprint != content["index"]:
            raise DataError(f"{config.path}: the index was rewritten while it was in use. Resume from the last state")
        return IndexedSource(config, index, Lengths(index, content["lengths"]))

    def log_contents(self) -> None:
        """Log how many samples the source has, and what is missing: the stream's opening line."""
        index = self.index
        num_kept, num_errors = int(self.sizes.sum()), sum(entry.num_errors for entry in index.entries)
        parts = [f"{num_kept:,} of {len(index):,} samples in {len(index.shards):,} shards"]
        if num_errors:
            parts.append(f"{num_errors:,} unusable")
        if len(self.takedown):
            parts.append(f"{len(self.takedown):,} taken down")
        if damaged := index.damaged:
            names = ", ".join(list(damaged)[:3]) + (", ..." if len(damaged) > 3 else "")
            parts.append(f"{len(damaged)} damaged shards ({names}), {index.lost_bytes:,} bytes lost")
        logger.log(logging.WARNING if damaged else logging.INFO, "source %s: %s", self.name, "; ".join(parts))


def open_sources(
    shards: Shards,
    *,
    checkpoint: str | Path,
    pairs: bool = False,
    num_workers: int | None = None,
    on_progress: OnProgress | None = None,
    storage: StorageConfig | None = None,
    check_files: bool = True,
) -> list[IndexedSource]:
    """Open sources for a checkpoint; a missing index and missing lengths are built, which may be done ahead of a job.

    With `check_files` False nothing is listed or built: another process of the job has done so. Where this machine does
    not see what it built, sources are opened as usual.

    `num_workers` None is one process per core for large folders. Several machines may measure the same folder at once:
    each takes the shards that are not measured yet.
    """
    several = [shards] if isinstance(shards, str | Path | Source) else shards
    configs = [one if isinstance(one, Source) else Source(path=one) for one in several]
    config = storage or StorageConfig()
    measurers = [Measurer(str(checkpoint), one.rules, pairs) for one in configs]
    if not check_files and (trusted := _open_trusted(configs, measurers, config)) is not None:
        return trusted
    return [
        _open(one, measurer, num_workers, on_progress, config) for one, measurer in zip(configs, measurers, strict=True)
    ]


def _open_trusted(
    configs: Sequence[Source], measurers: Sequence[Measurer], storage: StorageConfig
) -> list[IndexedSource] | None:
    """Sources whose index and lengths were built and checked elsewhere; None if any is not seen here."""
    sources = []
    for config, measurer in zip(configs, measurers, strict=True):
        try:
            index = open_index(config.path, build=False, check_files=False, config=storage)
            lengths = Lengths(index, measurer.fingerprint)
            lengths.of_shard(len(index.shards) - 1)
        except DataError:
            return None
        sources.append(IndexedSource(config, index, lengths))
    return sources


def _open(
    config: Source, measurer: Measurer, num_workers: int | None, on_progress: OnProgress | None, storage: StorageConfig
) -> IndexedSource:
    def report(what: str) -> Callable[[ShardProgress], None] | None:
        return on_progress and (lambda progress: on_progress(f"{what} of {config.name or config.path}", progress))

    index = open_index(config.path, num_workers=num_workers, on_progress=report("index"), config=storage)
    measured = Lengths(index, measurer.fingerprint)
    num_measured = measured.build(measurer, num_workers=num_workers, on_progress=report("lengths"))
    source = IndexedSource(config, index, measured, num_measured)
    if "/" in source.name or not source.name:
        raise ConfigError(f"{source.name!r} cannot be a source's name: sample ids are source/shard/key")
    return source
