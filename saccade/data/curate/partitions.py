"""The samples of a folder in partitions: which shards each has, which of their samples are kept, and what was dropped.

A partition is a run of shards with about `PARTITION_SAMPLES` samples, small enough for the memory of one job. Steps of
curation (rules, duplicates, ...) send what they drop to the partition of the sample; the next step sees the others.
A sample is identified by one number, shard and row, and an image of it by that plus its position. Nothing depends on
the number of partitions.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from saccade.data.curate.exchange import Exchange, Rows, Sender
from saccade.data.curate.rules import REASONS
from saccade.data.curate.sample_table import SampleTable, first_of_shard, load_samples, rows_of, shards_of
from saccade.data.curate.settings import CurationSettings
from saccade.data.index import ShardIndex
from saccade.data.order import Ints
from saccade.data.shared_folder import SharedFolder

PARTITION_SAMPLES = 2**18
"""Samples of a partition, about: a job needs up to 1 GB."""

_DROPPED = np.dtype([("sample", "u8"), ("reason", "u2"), ("repeats", "?"), ("original", "u8")])


@dataclass(frozen=True)
class Partitions:
    """A folder that is being curated, as the jobs see it. Picklable."""

    index: ShardIndex
    settings: CurationSettings
    folder: SharedFolder
    """Files of the stages."""
    num_partitions: int

    @staticmethod
    def needed(num_samples: int) -> int:
        """Number of partitions for this many samples."""
        return max(1, -(-num_samples // PARTITION_SAMPLES))

    @functools.cached_property
    def _of_shard(self) -> Ints:
        """[shards]: the partition of each."""
        ends = np.cumsum(self.index.sizes)
        middles = ends - self.index.sizes // 2 - 1
        total = max(1, int(ends[-1]) if len(ends) else 1)
        return np.asarray(np.clip(middles * self.num_partitions // total, 0, self.num_partitions - 1))

    def shards(self, partition: int) -> list[int]:
        """The shards of a partition."""
        found: list[int] = np.flatnonzero(self._of_shard == partition).tolist()
        return found

    def of_ids(self, ids: NDArray[np.uint64]) -> Ints:
        """The partitions of samples or images."""
        return self._of_shard[shards_of(ids)]

    def of_keys(self, *keys: NDArray[np.uint64]) -> Ints:
        """A partition for each key: the same one for equal keys."""
        mixed = np.zeros(len(keys[0]), np.uint64)
        for key in keys:
            mixed = (mixed ^ key) * np.uint64(0x9E3779B97F4A7C15)
            mixed ^= mixed >> np.uint64(29)
        return (mixed % np.uint64(self.num_partitions)).astype(np.int64)

    def exchange(self, name: str, dtype: np.dtype[np.void]) -> Exchange:
        """Rows between two stages."""
        return Exchange(self.folder, name, dtype, self.num_partitions)

    # ---------------------------------------------------------------- what is kept

    @functools.cached_property
    def reasons(self) -> list[str]:
        """Names of all reasons, in the order of the rules; a score has one of its own."""
        scores = [f"score {name}" for name in sorted(self.settings.scores)]
        before, after = REASONS[: REASONS.index("score")], REASONS[REASONS.index("score") + 1 :]
        return [*before, *scores, *after]

    def dropper(self, step: str, job: int) -> Dropper:
        """What a job of a step drops samples with."""
        return Dropper(self, self._dropped(step).sender(job))

    def dropped(self, partition: int, steps: tuple[str, ...]) -> Rows:
        """The samples of a partition that these steps dropped, by number."""
        found = np.concatenate([np.zeros(0, _DROPPED), *(self._dropped(step).rows(partition) for step in steps)])
        return found[np.argsort(found["sample"], kind="stable")]

    def _dropped(self, step: str) -> Exchange:
        return self.exchange(f"dropped-{step}", _DROPPED)

    def kept(self, partition: int, steps: tuple[str, ...]) -> Iterator[SampleTable]:
        """The samples of each shard of a partition that none of these steps dropped."""
        dropped = self.dropped(partition, steps)["sample"]
        for shard in self.shards(partition):
            is_in = np.ones(int(self.index.sizes[shard]), bool)
            first, last = np.searchsorted(dropped, [first_of_shard(shard), first_of_shard(shard + 1)])
            is_in[rows_of(dropped[first:last])] = False
            if is_in.any():
                yield load_samples(self.index, {shard: is_in})


class Dropper:
    """Drops samples, for a reason; they may repeat another one."""

    def __init__(self, partitions: Partitions, sender: Sender) -> None:
        self._partitions, self._sender = partitions, sender
        self.num_dropped = 0

    def drop(self, samples: NDArray[np.uint64], reason: str, originals: NDArray[np.uint64] | None = None) -> None:
        """Drop these samples."""
        rows = np.zeros(len(samples), _DROPPED)
        rows["sample"], rows["reason"] = samples, self._partitions.reasons.index(reason)
        if originals is not None:
            rows["repeats"], rows["original"] = True, originals
        self._sender.send(self._partitions.of_ids(samples), rows)
        self.num_dropped += len(rows)

    def close(self) -> dict[str, int]:
        """Write what is pending; returns the count."""
        self._sender.close()
        return {"dropped": self.num_dropped}
