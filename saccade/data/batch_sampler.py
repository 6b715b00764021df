"""The whole stream as a function of a position: which samples make up which row of which global batch.

    draws of the mixture -> samples of each source's order -> their lengths -> packed rows -> global batches

The stream is cut into blocks of `packing_buffer_size` draws; each block is planned from its number alone and packed by itself. Batches take
rows in sequence and run across blocks. A plan knows no ranks and no workers: they share out the rows of a batch (`BatchSpec.ranks`),
so the batches are the same for any number of them, and `Position` is all that is needed to go on.

Planning a block of 4096 samples takes about 30 ms, at any position of a stream of any length, plus what `lengths` takes. The rows of
a block hold all of its samples, so what the last one lacks is spread as slack: r rows lose about 1/(2r) of their fill. Fifty rows to
a block keep 99 %; raise `packing_buffer_size` with the token budget.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from hashlib import blake2b
from typing import NamedTuple, Protocol

import numpy as np

from saccade.data.mixture import MAX_DRAWS, Mixture
from saccade.data.order import EpochOrder, Ints, Permutation, key_of
from saccade.data.packing import assign, pack
from saccade.errors import ConfigError, DataError


class Source(Protocol):
    """One source of samples. Shards and kept rows are numbers; what they name is the reader's business."""

    @property
    def name(self) -> str:
        """Unique in the mixture; part of the key of its order."""

    @property
    def sizes(self) -> Ints:
        """Number of kept samples of each shard."""

    @property
    def weight(self) -> float | None:
        """Share of the draws, in proportion to the other sources' weights. None, in every source: the number of samples."""

    @property
    def fingerprint(self) -> str:
        """Changes when the samples, their order or their lengths do."""

    def lengths(self, shard: int, kept_rows: Ints, epochs: Ints) -> tuple[Ints, Ints]:
        """Tokens and patches of these samples of the shard, each in its epoch (which may choose among captions)."""


class SampleRef(NamedTuple):
    """One sample of a row. `kept_row` counts the kept samples of the shard, `epoch` the passes over its source."""

    source: int
    shard: int
    kept_row: int
    epoch: int
    tokens: int
    patches: int


@dataclass(frozen=True)
class SequenceSpec:
    """One packed row: its samples, in the order they were drawn."""

    samples: list[SampleRef]

    @property
    def tokens(self) -> int:
        """Tokens of the row."""
        return sum(sample.tokens for sample in self.samples)

    @property
    def patches(self) -> int:
        """Patches of the row."""
        return sum(sample.patches for sample in self.samples)


@dataclass(frozen=True)
class PackingBuffer:
    """One block: its rows in pseudo-random order, and the samples that exceed a budget by themselves."""

    sequences: list[SequenceSpec]
    too_large: list[SampleRef]


@dataclass(frozen=True)
class Position:
    """The next batch of a stream: its number, and the block and row where it begins."""

    buffer: int = 0
    sequence: int = 0
    batch: int = 0


@dataclass(frozen=True)
class BatchSpec:
    """One global batch, the same for any number of ranks."""

    number: int
    sequences: list[SequenceSpec]
    too_large: list[SampleRef]
    """Samples left out of the blocks that this batch opens."""
    after: Position
    """Where the stream goes on after this batch."""

    def ranks(self, num_ranks: int, *, patch_cost: float = 1.0, token_cost: float = 1.0) -> list[list[SequenceSpec]]:
        """The batch's rows by rank: numbers of rows that differ by one at most, work that is even."""
        costs = [patch_cost * row.patches + token_cost * row.tokens for row in self.sequences]
        return [[self.sequences[number] for number in numbers] for numbers in assign(costs, num_ranks)]


@dataclass(frozen=True, kw_only=True, eq=False)
class BatchSampler:
    """Every batch of the stream, by position. An epoch of a source costs O(shards) to open, nothing per sample."""

    sources: Sequence[Source] = field(kw_only=False)
    """What is mixed."""
    seed: int
    """Chooses the order of samples and of rows."""
    max_seq_len: int
    """Most tokens of a row."""
    max_patches: int
    """Most image patches of a row."""
    global_batch_size: int
    """Rows of a global batch, over all ranks."""
    packing_buffer_size: int = 4096
    """Samples packed together: more fill the rows better, and take longer to plan, also after a restart."""
    window_shards: int = 16
    """Shards of a source whose samples are shuffled together: more mix better, and are in use at a time."""
    num_epochs: int | None = None
    """Passes over all samples; None goes on for ever. Only for sources without weights."""
    num_samples: int | None = None
    """Draws after which the stream ends; None goes on for ever."""

    def __post_init__(self) -> None:
        for name, value in self._settings.items():
            least = 0 if name == "seed" else 1
            if value is not None and value < least:
                raise ConfigError(f"{name} is {value}; it must be at least {least}")
        if self.packing_buffer_size > MAX_DRAWS // 2:
            raise ConfigError(f"packing_buffer_size is {self.packing_buffer_size}; use at most {MAX_DRAWS // 2}")
        if self.num_epochs is not None and self.num_samples is not None:
            raise ConfigError("num_epochs and num_samples both say where the stream ends; give one of them")
        names = [source.name for source in self.sources]
        if len(set(names)) < len(names):
            raise ConfigError(
                f"two sources have one name: {', '.join(sorted(names))}; name them apart, or list a folder once"
            )
        for name, size in zip(names, self._totals, strict=True):
            if not size:
                raise DataError(f"source {name} has no samples; leave it out, or look at what its decisions keep")
        self._mixture  # noqa: B018 - checks the weights

    @cached_property
    def fingerprint(self) -> str:
        """Equal for plans with the same batches: one half for the settings, one for the sources."""
        sources = [(source.name, source.fingerprint) for source in self.sources]
        sizes = [_digest(sizes.tobytes()) for sizes in self._sizes]
        return f"{_digest(repr(self._settings).encode())}-{_digest(repr((sources, sizes, self._mixture.weights)).encode())}"

    @cached_property
    def num_packing_buffers(self) -> int | None:
        """Blocks of the stream, the last one longer by what is left over; None when it goes on for ever."""
        return None if self._num_draws is None else max(1, self._num_draws // self.packing_buffer_size)

    def batches(self, position: Position | None = None) -> Iterator[BatchSpec]:
        """The batches from `position` on, or from the start; the last of a stream that ends may have fewer rows."""
        here = position or Position()
        block, skip, number = here.buffer, here.sequence, here.batch
        rows: list[SequenceSpec] = []
        too_large: list[SampleRef] = []
        while self.num_packing_buffers is None or block < self.num_packing_buffers:
            buffer = self.packing_buffer(block)
            if skip == 0:
                too_large += buffer.too_large
            for row in range(skip, len(buffer.sequences)):
                rows.append(buffer.sequences[row])
                if len(rows) == self.global_batch_size:
                    next_block, next_row = (block, row + 1) if row + 1 < len(buffer.sequences) else (block + 1, 0)
                    yield BatchSpec(number, rows, too_large, after=Position(next_block, next_row, number + 1))
                    number, rows, too_large = number + 1, [], []
            block, skip = block + 1, 0
        if rows:
            yield BatchSpec(number, rows, too_large, after=Position(block, 0, number + 1))

    def packing_buffer(self, number: int) -> PackingBuffer:
        """The rows of one block, planned from its number alone."""
        begin, end = number * self.packing_buffer_size, (number + 1) * self.packing_buffer_size
        if self._num_draws is not None and number + 1 == self.num_packing_buffers:
            end = self._num_draws
        table = self._samples(begin, end)
        packing = pack(table[4], table[5], max_seq_len=self.max_seq_len, max_patches=self.max_patches)
        samples = [SampleRef(*column) for column in table.T.tolist()]
        if not packing.sequences:
            raise DataError(
                f"none of {len(samples)} samples in sequence fits a row of {self.max_seq_len} tokens and {self.max_patches} patches; "
                f"the first has {samples[0].tokens} and {samples[0].patches}. Raise the budgets, or make images and texts smaller"
            )
        order = Permutation(len(packing.sequences), key_of("rows", self.seed, number))
        rows = [packing.sequences[row] for row in order(np.arange(len(order)))]
        return PackingBuffer(
            [SequenceSpec([samples[i] for i in row]) for row in rows], [samples[i] for i in packing.too_large]
        )

    def save(self, position: Position) -> dict[str, int | str]:
        """The position in plain values, with the fingerprint of the plan it belongs to."""
        return {"plan": self.fingerprint, **asdict(position)}

    def restore(self, state: Mapping[str, object]) -> Position:
        """The position that `save` wrote, if it was one of an equal plan."""
        plan, block, row, batch = (state.get(name) for name in ("plan", "buffer", "sequence", "batch"))
        if not (isinstance(plan, str) and isinstance(block, int) and isinstance(row, int) and isinstance(batch, int)):
            raise DataError(
                f"not the position of a data stream: {dict(state)}; expected plan, buffer, sequence and batch"
            )
        if plan != self.fingerprint:
            raise DataError(
                f"the saved position belongs to another data stream: {self._difference(plan)}. Its samples are not the ones read "
                "next here. Set back what changed, leave the saved position out to start the data anew, or give the run another folder"
            )
        return Position(block, row, batch)

    def _difference(self, fingerprint: str) -> str:
        if fingerprint.split("-")[0] != self.fingerprint.split("-")[0]:
            return "settings differ, now " + ", ".join(f"{name} {value}" for name, value in self._settings.items())
        names = ", ".join(source.name for source in self.sources)
        return f"shards, kept samples, weights or lengths differ in sources {names}"

    def _samples(self, begin: int, end: int) -> Ints:
        """The fields of the samples of draws begin .. end - 1, one row of the table for each field."""
        sources, draws = self._mixture.draws(begin, end)
        shards, kept_rows, epochs, tokens, patches = np.zeros((5, end - begin), np.int64)
        for number, drawn in _groups(sources):
            epochs[drawn], positions = np.divmod(draws[drawn], self._totals[number])
            for epoch, at in _groups(epochs[drawn]):
                shards[drawn[at]], kept_rows[drawn[at]] = self._order(number, epoch).locate(positions[at])
            for shard, at in _groups(shards[drawn]):
                of_shard = drawn[at]
                tokens[of_shard], patches[of_shard] = self.sources[number].lengths(
                    shard, kept_rows[of_shard], epochs[of_shard]
                )
        return np.stack([sources, shards, kept_rows, epochs, tokens, patches])

    def _order(self, source: int, epoch: int) -> EpochOrder:
        """The order of an epoch; it is kept while its neighbours are in use."""
        if (source, epoch) not in self._orders:
            for key in [key for key in self._orders if key[0] == source and abs(key[1] - epoch) > 1]:
                del self._orders[key]
            name, sizes = self.sources[source].name, self._sizes[source]
            order = EpochOrder(sizes, seed=self.seed, epoch=epoch, window_shards=self.window_shards, source=name)
            self._orders[source, epoch] = order
        return self._orders[source, epoch]

    @property
    def _settings(self) -> dict[str, int | None]:
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "sources"}

    @cached_property
    def _orders(self) -> dict[tuple[int, int], EpochOrder]:
        return {}

    @cached_property
    def _sizes(self) -> list[Ints]:
        return [np.array(source.sizes, np.int64) for source in self.sources]

    @cached_property
    def _totals(self) -> list[int]:
        return [int(sizes.sum()) for sizes in self._sizes]

    @cached_property
    def _mixture(self) -> Mixture:
        weights = [source.weight for source in self.sources if source.weight is not None]
        if len(weights) not in (0, len(self.sources)):
            missing = ", ".join(source.name for source in self.sources if source.weight is None)
            raise ConfigError(
                f"no weight for {missing}; give every source a weight, or none to mix by number of samples"
            )
        if weights and self.num_epochs is not None:
            raise ConfigError(
                f"num_epochs is {self.num_epochs}, but sources with weights end their epochs at different times; "
                "say how long the stream is with num_samples, or leave the weights out"
            )
        return Mixture(weights or self._totals)

    @cached_property
    def _num_draws(self) -> int | None:
        return self.num_samples if self.num_epochs is None else self.num_epochs * sum(self._totals)


def _groups(values: Ints) -> Iterator[tuple[int, Ints]]:
    """Each different value with the places it stands at, ascending."""
    order = np.argsort(values, kind="stable")
    different, begins = np.unique(values[order], return_index=True)
    yield from zip(different.tolist(), np.split(order, begins[1:]), strict=False)


def _digest(data: bytes) -> str:
    return blake2b(data, digest_size=6).hexdigest()
