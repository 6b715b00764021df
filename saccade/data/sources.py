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

from saccade.config import decode, encode
from saccade.data.config import Source
from saccade.data.index import ShardIndex, open_index
from saccade.data.index_files import ShardProgress
from saccade.data.lengths import Lengths, Measurer
from saccade.data.order import Ints
from saccade.data.sample import Sample
from saccade.data.storage import StorageConfig
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

    # ---------------------------------------------------------------- for the batch sampler

    @property
    def sizes(self) -> Ints:
        """Kept samples of each shard."""
        return self.index.kept_sizes

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

    def read(self, shard: int, kept_row: int) -> Sample:
        """Read one sample and compare it with its checksum."""
        return self.index.read_sample(shard, self._row(shard, kept_row), verify=True)

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
) -> list[IndexedSource]:
    """Open sources for a checkpoint; a missing index and missing lengths are built, which may be done ahead of a job.

    `num_workers` None is one process per core for large folders. Several machines may measure the same folder at once:
    each takes the shards that are not measured yet.
    """
    several = [shards] if isinstance(shards, str | Path | Source) else shards
    configs = [one if isinstance(one, Source) else Source(path=one) for one in several]
    config = storage or StorageConfig()
    return [
        _open(one, Measurer(str(checkpoint), one.rules, pairs), num_workers, on_progress, config) for one in configs
    ]


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
