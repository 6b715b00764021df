"""Which samples a packing buffer holds: draws of the mixture, looked up in the order of their source.

    round, lane -> draws -> sources and positions -> shards and rows -> lengths

The stream is a sequence of rounds. In each, every lane has a packing buffer of at most `packing_buffer_size` draws,
computed from the numbers of round and lane alone. A lane draws from its own part of each source. Without weights a
round never crosses the end of an epoch: every sample of an epoch comes before the first of the next. With weights each
lane repeats its own part of every source, which ends anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np

from saccade.data.config import StreamConfig
from saccade.data.order import EpochOrder, Ints, Mixture, part
from saccade.data.units import Units
from saccade.errors import ConfigError, DataError


class SamplerSource(Protocol):
    """A source as the sampler sees it: shards and kept rows are numbers. `IndexedSource` is one."""

    @property
    def name(self) -> str:
        """Unique in the mixture; part of the key of its order."""

    @property
    def sizes(self) -> Ints:
        """Number of kept samples of each shard."""

    @property
    def num_bytes(self) -> Ints:
        """Bytes of each shard; needed only to cut shards into units."""

    @property
    def weight(self) -> float | None:
        """Share of the draws, relative to the other sources' weights. None, in every source: the number of samples."""

    @property
    def fingerprint(self) -> str:
        """Changes when the samples, their order or their lengths do."""

    def lengths(self, shard: int, kept_rows: Ints, epochs: Ints) -> tuple[Ints, Ints]:
        """Tokens and patches of these samples of the shard, each in its epoch (which may choose among captions)."""


class _LaneParts(NamedTuple):
    """What a lane draws from."""

    begins: list[int]
    """First position of the lane in each source."""
    sizes: list[int]
    """Number of samples in each source."""
    present: Ints
    """Sources of which the lane has any samples."""
    mixture: Mixture
    """Their proportions."""


class Draws:
    """The samples of every round and lane. An epoch of a source costs O(shards) to open, nothing per sample."""

    def __init__(self, sources: Sequence[SamplerSource], config: StreamConfig) -> None:
        self._sources, self._config = sources, config
        self.sizes = [np.asarray(source.sizes) for source in sources]
        """Kept samples of each shard, by source."""
        self._totals = [int(sizes.sum()) for sizes in self.sizes]
        for source, size in zip(sources, self._totals, strict=True):
            if not size:
                raise DataError(f"source {source.name} has no samples; remove it, or check what its curation keeps")
        self._weights = _weights(sources, config.num_epochs)
        smallest = min(self._totals, default=1)
        if self._weights and smallest < config.num_lanes:
            name = sources[self._totals.index(smallest)].name
            raise ConfigError(
                f"source {name} has {smallest} samples for {config.num_lanes} lanes; every lane needs one of each "
                f"weighted source. Set num_lanes to {smallest} at most, or leave the source out"
            )
        self.mixture = Mixture(self._weights or self._totals)
        """The proportions of the sources."""
        self._lanes: dict[int, _LaneParts] = {}
        self._orders: dict[tuple[int, int], EpochOrder] = {}

    @property
    def num_samples(self) -> int:
        """Samples of an epoch."""
        return sum(self._totals)

    def range_of(self, number: int, lane: int = 0) -> tuple[int, int] | None:
        """First draw of a lane in a round, and the one after its last; None after the end of the lane."""
        size, num_lanes = self._config.packing_buffer_size, self._config.num_lanes
        total = sum(self._lane(lane).sizes)
        if self._weights:
            begin, end = number * size, (number + 1) * size
        else:  # an epoch in equal parts
            per_epoch = -(-self.num_samples // (size * num_lanes))
            epoch, at = divmod(number, per_epoch)
            begin, end = (epoch * total + each for each in part(total, at, per_epoch))
        if self._config.num_epochs is not None:
            num_draws: int | None = self._config.num_epochs * total
        elif self._config.num_samples is not None:
            first, after = part(self._config.num_samples, lane, num_lanes)
            num_draws = after - first
        else:
            num_draws = None
        if num_draws is None:
            return begin, end
        return (begin, min(end, num_draws)) if begin < num_draws else None

    def has_round(self, number: int) -> bool:
        """Whether the stream has this round: any lane has samples in it."""
        return any(self.range_of(number, lane) is not None for lane in range(self._config.num_lanes))

    def samples(self, lane: int, begin: int, end: int) -> Ints:
        """The `SampleRef`s of draws begin .. end - 1 of a lane, one row of the table per field."""
        first, sizes, present, mixture = self._lane(lane)
        sources, draws = mixture.draws(begin, end)
        sources = present[sources]
        shards, kept_rows, epochs, tokens, patches = np.zeros((5, end - begin), np.int64)
        for number, drawn in _groups(sources):
            epochs[drawn], positions = np.divmod(draws[drawn], sizes[number])
            positions += first[number]
            for epoch, at in _groups(epochs[drawn]):
                shards[drawn[at]], kept_rows[drawn[at]] = self._locate(number, epoch, positions[at])
            for shard, at in _groups(shards[drawn]):
                of_shard = drawn[at]
                tokens[of_shard], patches[of_shard] = self._sources[number].lengths(
                    shard, kept_rows[of_shard], epochs[of_shard]
                )
        return np.stack([sources, shards, kept_rows, epochs, tokens, patches])

    def _lane(self, lane: int) -> _LaneParts:
        if lane not in self._lanes:
            parts = [part(total, lane, self._config.num_lanes) for total in self._totals]
            sizes = [end - begin for begin, end in parts]
            present = [number for number, size in enumerate(sizes) if size] or [0]
            weights = [(self._weights or sizes)[number] for number in present]
            mixture = Mixture(weights) if any(sizes) else self.mixture
            self._lanes[lane] = _LaneParts([begin for begin, _ in parts], sizes, np.array(present), mixture)
        return self._lanes[lane]

    def _locate(self, source: int, epoch: int, positions: Ints) -> tuple[Ints, Ints]:
        """Shard and kept row of the samples at these positions of an epoch."""
        found, rows = self._order(source, epoch).locate(positions)
        if self._config.unit_bytes is None:
            return found, rows
        units = self._units[source].rows(found)
        return units.shards, units.first + rows

    @cached_property
    def _units(self) -> list[Units]:
        return [
            Units(sizes, source.num_bytes, max_bytes=self._config.unit_bytes)
            for sizes, source in zip(self.sizes, self._sources, strict=True)
        ]

    def _order(self, source: int, epoch: int) -> EpochOrder:
        """The order of an epoch, cached with its neighbours."""
        if (source, epoch) not in self._orders:
            for key in [key for key in self._orders if key[0] == source and abs(key[1] - epoch) > 1]:
                del self._orders[key]
            config = self._config
            sizes = self.sizes[source] if config.unit_bytes is None else self._units[source].sizes()
            self._orders[source, epoch] = EpochOrder(
                sizes,
                seed=config.seed,
                epoch=epoch,
                window_shards=config.window_shards,
                source=self._sources[source].name,
                num_lanes=config.num_lanes,
            )
        return self._orders[source, epoch]


def _weights(sources: Sequence[SamplerSource], num_epochs: int | None) -> list[float]:
    """The weights of the sources; empty if they are mixed by their numbers of samples, as a single one always is."""
    weights = [source.weight for source in sources if source.weight is not None]
    if len(weights) not in (0, len(sources)):
        missing = ", ".join(source.name for source in sources if source.weight is None)
        raise ConfigError(f"no weight for {missing}; give every source a weight, or none to mix by number of samples")
    if len(weights) > 1 and num_epochs is not None:
        raise ConfigError(
            f"num_epochs is {num_epochs}, but sources with weights end their epochs at different times; "
            "set num_samples instead, or remove the weights"
        )
    return weights if len(weights) > 1 else []


def _groups(values: Ints) -> Iterator[tuple[int, Ints]]:
    """Each distinct value with the indices where it occurs, ascending."""
    order = np.argsort(values, kind="stable")
    distinct, begins = np.unique(values[order], return_index=True)
    yield from zip(distinct.tolist(), np.split(order, begins[1:]), strict=False)
