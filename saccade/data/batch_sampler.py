"""The samples of every packed sequence and global batch, as a function of a position in the stream.

    draws of the mixture -> samples of each source's order -> their lengths -> packed sequences -> global batches

The stream is divided into packing buffers of at most `packing_buffer_size` samples; each is computed from its number
alone and packed by itself. Without weights a buffer never crosses the end of an epoch: every sample of an epoch comes
before the first of the next. With weights each source repeats its own epochs, which end anywhere. Batches take packed
sequences one after another, across buffers. The sampler knows nothing of ranks and workers: they divide the sequences
of a batch (`BatchSpec.per_rank`), so the batches are the same for any number of them, and a `Position` is all that is
needed to resume.

Packing a buffer of 4096 samples takes about 30 ms, at any position of a stream of any length, plus the time of
`lengths`. The sequences of a buffer hold all of its samples, so r sequences lose about 1/(2r) of their fill: fifty per
buffer are 99 % full. Raise `packing_buffer_size` with `max_seq_len`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Any, NamedTuple, Protocol

import numpy as np

from saccade.data.config import StreamConfig
from saccade.data.order import EpochOrder, Ints, Mixture, Permutation, key_of
from saccade.data.packing import assign, pack
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
    def weight(self) -> float | None:
        """Share of the draws, relative to the other sources' weights. None, in every source: the number of samples."""

    @property
    def fingerprint(self) -> str:
        """Changes when the samples, their order or their lengths do."""

    def lengths(self, shard: int, kept_rows: Ints, epochs: Ints) -> tuple[Ints, Ints]:
        """Tokens and patches of these samples of the shard, each in its epoch (which may choose among captions)."""


class SampleRef(NamedTuple):
    """One sample of a packed sequence.

    `kept_row` counts the kept samples of the shard, `epoch` the passes over its source.
    """

    source: int
    shard: int
    kept_row: int
    epoch: int
    tokens: int
    patches: int


@dataclass(frozen=True)
class SequenceSpec:
    """The samples of one packed sequence, in the order of the stream."""

    samples: list[SampleRef]

    @property
    def tokens(self) -> int:
        """Length of the packed sequence."""
        return sum(sample.tokens for sample in self.samples)

    @property
    def patches(self) -> int:
        """Vision patches of the packed sequence."""
        return sum(sample.patches for sample in self.samples)


@dataclass(frozen=True)
class PackingBuffer:
    """Packed sequences in pseudo-random order, and the samples that exceed a limit by themselves."""

    sequences: list[SequenceSpec]
    too_large: list[SampleRef]


@dataclass(frozen=True)
class Position:
    """The next batch of a stream: its number, and the packing buffer and sequence where it begins."""

    buffer: int = 0
    sequence: int = 0
    batch: int = 0
    consumed: tuple[tuple[int, int, int], ...] = ()
    """Sequences of this buffer consumed under other limits, (max_seq_len, max_patches, number of sequences) each; the
    other samples are packed under the present limits."""


@dataclass(frozen=True)
class BatchSpec:
    """One global batch, the same for any number of ranks."""

    number: int
    sequences: list[SequenceSpec]
    too_large: list[SampleRef]
    """Samples that exceed a limit, from the packing buffers in which this batch begins."""
    after: Position
    """The position of the next batch."""

    def per_rank(self, num_ranks: int) -> list[list[SequenceSpec]]:
        """The batch's sequences by rank: balanced work, and numbers of sequences that differ by one at most."""
        costs = [sequence.patches + sequence.tokens for sequence in self.sequences]
        return [[self.sequences[number] for number in numbers] for numbers in assign(costs, num_ranks)]


class BatchSampler:
    """Every batch of the stream, by position. An epoch of a source costs O(shards) to open, nothing per sample."""

    def __init__(self, sources: Sequence[SamplerSource], config: StreamConfig) -> None:
        self.sources, self.config = sources, config
        names = [source.name for source in sources]
        if len(set(names)) < len(names):
            raise ConfigError(
                f"two sources have one name: {', '.join(sorted(names))}; give them different names, or list a folder "
                "once"
            )
        self._sizes = [np.array(source.sizes, np.int64) for source in sources]
        self._totals = [int(sizes.sum()) for sizes in self._sizes]
        for name, size in zip(names, self._totals, strict=True):
            if not size:
                raise DataError(f"source {name} has no samples; remove it, or check what its curation keeps")
        self._weights = _weights(sources, config.num_epochs)
        self._mixture = Mixture(self._weights or self._totals)
        self._orders: dict[tuple[int, int], EpochOrder] = {}

    # ---------------------------------------------------------------- batches

    def batches(self, position: Position | None = None) -> Iterator[BatchSpec]:
        """The batches from `position`, or from the start; the last one of a finite stream may have fewer sequences."""
        here = position or Position()
        buffer, skip, number, consumed = here.buffer, here.sequence, here.batch, here.consumed
        sequences: list[SequenceSpec] = []
        too_large: list[SampleRef] = []
        num_unfit = 0
        while self._draw_range(buffer) is not None:
            packed = self.packing_buffer(buffer, consumed)
            if skip == 0:
                too_large += packed.too_large
            num_unfit = 0 if packed.sequences or consumed else num_unfit + len(packed.too_large)
            if 2 * num_unfit >= min(self.config.packing_buffer_size, sum(self._totals)):
                raise self._nothing_fits(too_large)
            for at in range(skip, len(packed.sequences)):
                sequences.append(packed.sequences[at])
                if len(sequences) == self.config.global_batch_size:
                    is_last = at + 1 == len(packed.sequences)
                    after = (
                        Position(buffer + 1, 0, number + 1)
                        if is_last
                        else Position(buffer, at + 1, number + 1, consumed)
                    )
                    yield BatchSpec(number, sequences, too_large, after)
                    number, sequences, too_large = number + 1, [], []
            buffer, skip, consumed = buffer + 1, 0, ()
        if sequences:
            yield BatchSpec(number, sequences, too_large, after=Position(buffer, 0, number + 1))
        elif too_large and number == 0:
            raise self._nothing_fits(too_large)

    def packing_buffer(self, number: int, consumed: Sequence[tuple[int, int, int]] = ()) -> PackingBuffer:
        """The packed sequences of one buffer, computed from its number; see `Position.consumed`."""
        draws = self._draw_range(number)
        assert draws is not None, f"packing buffer {number} is after the end of the stream"
        table = self._samples(*draws)
        for max_seq_len, max_patches, num_sequences in consumed:
            sequences, _ = self._pack(table, number, max_seq_len, max_patches)
            table = table[:, sorted(i for sequence in sequences[num_sequences:] for i in sequence)]
        sequences, too_large = self._pack(table, number, self.config.max_seq_len, self.config.patch_limit)
        refs = [SampleRef(*column) for column in table.T.tolist()]
        return PackingBuffer(
            [SequenceSpec([refs[i] for i in sequence]) for sequence in sequences], [refs[i] for i in too_large]
        )

    def _pack(self, table: Ints, number: int, max_seq_len: int, max_patches: int) -> tuple[list[list[int]], list[int]]:
        """Columns of the table packed into sequences, in pseudo-random order, and those that are too large."""
        packing = pack(table[4], table[5], max_seq_len=max_seq_len, max_patches=max_patches)
        order = Permutation(len(packing.sequences), key_of("sequences", self.config.seed, number))
        return [packing.sequences[i] for i in order(np.arange(len(order)))], packing.too_large

    def _nothing_fits(self, samples: Sequence[SampleRef]) -> DataError:
        return DataError(
            f"none of {len(samples)} consecutive samples fits a packed sequence of max_seq_len "
            f"{self.config.max_seq_len} and max_patches {self.config.patch_limit}; the first has {samples[0].tokens} "
            f"tokens and {samples[0].patches} patches. Raise the limits, or shorten texts and shrink images"
        )

    # ---------------------------------------------------------------- state

    @cached_property
    def fingerprint(self) -> str:
        """Equal for samplers with the same samples in the same packing buffers.

        The first half depends on the settings, the second on the sources, so that an error can name what differs.
        """
        sources = [(source.name, source.fingerprint) for source in self.sources]
        sizes = [_digest(sizes.tobytes()) for sizes in self._sizes]
        settings = repr(self.config.order_settings).encode()
        return f"{_digest(settings)}-{_digest(repr((sources, sizes, self._mixture.weights)).encode())}"

    def save(self, position: Position) -> dict[str, Any]:
        """The position in plain values, with the fingerprint and the limits it belongs to."""
        state: dict[str, Any] = {
            "fingerprint": self.fingerprint,
            "buffer": position.buffer,
            "sequence": position.sequence,
            "batch": position.batch,
            "max_seq_len": self.config.max_seq_len,
            "max_patches": self.config.patch_limit,
        }
        return state | ({"consumed": [list(entry) for entry in position.consumed]} if position.consumed else {})

    def restore(self, state: Mapping[str, Any]) -> Position:
        """The position that `save` wrote.

        `max_seq_len`, `max_patches`, `global_batch_size` and `num_epochs` may have changed since.

        Samples of the present packing buffer that were not consumed are packed again under the new limits.
        """
        try:
            fingerprint, limits = str(state["fingerprint"]), (int(state["max_seq_len"]), int(state["max_patches"]))
            consumed = tuple((int(a), int(b), int(c)) for a, b, c in state.get("consumed", ()))
            position = Position(int(state["buffer"]), int(state["sequence"]), int(state["batch"]), consumed)
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"not the state of a data stream: {dict(state)}. States of earlier versions cannot be resumed: leave "
                "it out to start the data from the beginning"
            ) from error
        if fingerprint != self.fingerprint:
            raise DataError(
                f"the saved state belongs to another data stream: {self._difference(fingerprint)}. Its samples are not "
                "the ones read next here. Undo the change, leave the state out to start the data from the beginning, "
                "or use another run folder"
            )
        if limits == (self.config.max_seq_len, self.config.patch_limit) or not position.sequence:
            return position
        return Position(position.buffer, 0, position.batch, (*consumed, (*limits, position.sequence)))

    def _difference(self, fingerprint: str) -> str:
        if fingerprint.split("-")[0] != self.fingerprint.split("-")[0]:
            return "settings differ, now " + ", ".join(
                f"{name} {value}" for name, value in self.config.order_settings.items()
            )
        names = ", ".join(source.name for source in self.sources)
        return f"shards, kept samples, weights or lengths differ in sources {names}"

    # ---------------------------------------------------------------- samples

    def _draw_range(self, buffer: int) -> tuple[int, int] | None:
        """First draw of a packing buffer, and the one after its last; None after the end of the stream."""
        size, total = self.config.packing_buffer_size, sum(self._totals)
        if self._weights:
            begin, end = buffer * size, (buffer + 1) * size
        else:  # an epoch in equal parts
            per_epoch = -(-total // size)
            epoch, part = divmod(buffer, per_epoch)
            begin, end = epoch * total + part * total // per_epoch, epoch * total + (part + 1) * total // per_epoch
        num_draws = self.config.num_samples if self.config.num_epochs is None else self.config.num_epochs * total
        if num_draws is None:
            return begin, end
        return (begin, min(end, num_draws)) if begin < num_draws else None

    def _samples(self, begin: int, end: int) -> Ints:
        """The `SampleRef`s of draws begin .. end - 1, one row of the table per field."""
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
        """The order of an epoch, cached with its neighbours."""
        if (source, epoch) not in self._orders:
            for key in [key for key in self._orders if key[0] == source and abs(key[1] - epoch) > 1]:
                del self._orders[key]
            name, sizes = self.sources[source].name, self._sizes[source]
            order = EpochOrder(
                sizes, seed=self.config.seed, epoch=epoch, window_shards=self.config.window_shards, source=name
            )
            self._orders[source, epoch] = order
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


def _digest(data: bytes) -> str:
    return blake2b(data, digest_size=6).hexdigest()
