"""Units: shards cut into parts of 64 to 128 MB, the pieces in which an order shuffles and a node stores its data.

A shard of more than `max_bytes` is cut into the fewest parts of at most that size, with equal numbers of consecutive
samples; a smaller one is a unit by itself. Only numbers of samples and bytes per shard are needed, so cutting reads no
file, and a table of 585,000 shards takes 5 MB and milliseconds. The exact bytes of a unit are known from the index of
its shard (`byte_range`).

Samples are kept samples, numbered in their shard as `SampleRef.kept_row` is; units are numbered by shard.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from saccade.data.order import Ints

MAX_UNIT_BYTES = 128 << 20
"""Maximum bytes of a unit whose samples are of one size: large enough for fast requests, small enough to shuffle."""

_CHUNK = 1 << 16


class UnitRows(NamedTuple):
    """Samples of units: arrays with one entry per unit."""

    shards: Ints
    first: Ints
    """Number of the unit's first sample among the kept ones of its shard."""
    counts: Ints
    """Number of samples; 0 for a shard without any."""


class Units:
    """The units of a source."""

    def __init__(self, num_samples: npt.ArrayLike, num_bytes: npt.ArrayLike | None, *, max_bytes: int | None) -> None:
        """`num_samples` and `num_bytes` of each shard; both may be memory-mapped. `max_bytes` None: unit = shard."""
        self._num_samples = np.asarray(num_samples)
        num_parts = np.ones(len(self._num_samples), np.int64)
        if max_bytes is not None:
            if max_bytes < 1 or num_bytes is None:
                raise ValueError(f"units of {max_bytes} bytes: at least 1, and the bytes of every shard, are needed")
            num_parts = np.maximum(-(-np.asarray(num_bytes, np.int64) // max_bytes), 1)
            num_parts = np.minimum(num_parts, np.maximum(self._num_samples, 1))
        self._starts = np.concatenate([[0], np.cumsum(num_parts)])  # first unit of each shard, and the end

    def __len__(self) -> int:
        return int(self._starts[-1])

    def rows(self, units: npt.ArrayLike) -> UnitRows:
        """Shard, first sample and number of samples of each of these units."""
        flat = np.atleast_1d(np.asarray(units, np.int64))
        if len(flat) and not 0 <= flat.min() <= flat.max() < len(self):
            raise IndexError(f"units {flat.min()} to {flat.max()} of {len(self)}")
        shards = np.searchsorted(self._starts, flat, side="right") - 1
        return UnitRows(shards, *self._rows(shards, flat))

    def sizes(self) -> npt.NDArray[np.int32]:
        """Number of samples of every unit."""
        sizes = np.empty(len(self), np.int32)
        for begin in range(0, len(self), _CHUNK):
            sizes[begin : begin + _CHUNK] = self.rows(np.arange(begin, min(begin + _CHUNK, len(self)))).counts
        return sizes

    def of_samples(self, shards: npt.ArrayLike, kept_rows: npt.ArrayLike) -> Ints:
        """The unit of each of these samples."""
        shards, kept_rows = np.asarray(shards, np.int64), np.asarray(kept_rows, np.int64)
        num_parts = self._starts[shards + 1] - self._starts[shards]
        units: Ints = self._starts[shards] + ((kept_rows + 1) * num_parts - 1) // self._num_samples[shards]
        return units

    def of_shard(self, shard: int) -> range:
        """The units of one shard."""
        return range(int(self._starts[shard]), int(self._starts[shard + 1]))

    def _rows(self, shards: Ints, units: Ints) -> tuple[Ints, Ints]:
        """First sample and number of samples: part i of n holds samples i/n to (i + 1)/n of the shard."""
        sizes, parts = self._num_samples[shards].astype(np.int64), units - self._starts[shards]
        num_parts = self._starts[shards + 1] - self._starts[shards]
        first = parts * sizes // num_parts
        return first, (parts + 1) * sizes // num_parts - first


def byte_range(begins: Ints, ends: Ints, first: int, count: int) -> tuple[int, int]:
    """First byte of a unit in its shard and the one after its last, from those of every kept sample of the shard.

    Ranges of different units do not overlap; dropped samples between two units are in neither.
    """
    return int(begins[first]), int(ends[first + count - 1])
