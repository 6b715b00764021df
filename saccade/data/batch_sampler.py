"""The samples of every packed sequence and global batch, as a function of a position in the stream.

    rounds and lanes (draws.py) -> packing buffers -> packed sequences -> one order of a round (lanes.py) -> batches

Each packing buffer, one per lane and round, is packed by itself. Batches take the sequences of a round one after
another, and continue with the next round. The sampler knows nothing of ranks and workers: they divide the sequences of
a batch, so the batches are the same for any number of them, and a `Position` is all that is needed to resume. Which
batches there are follows from the number of sequences in every packing buffer (`outlines`); what is in them needs the
packing buffers themselves (`batches`), of which a rank computes only some (`rank_batches.py`).

Packing a buffer of 4096 samples takes about 30 ms, at any position of a stream of any length, plus the time of
`lengths`. The sequences of a buffer hold all of its samples, so r sequences lose about 1/(2r) of their fill: fifty per
buffer are 99 % full. Raise `packing_buffer_size` with `max_seq_len`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Any

import numpy as np

from saccade.data.config import StreamConfig
from saccade.data.draws import Draws, SamplerSource
from saccade.data.lanes import Owners, RoundOrder, round_order
from saccade.data.order import Ints, Permutation, key_of
from saccade.data.packing import pack
from saccade.data.packing_buffer import BufferCosts, BufferId, Consumed, PackingBuffer, SampleRef, SequenceSpec
from saccade.errors import ConfigError, DataError


@dataclass(frozen=True)
class Position:
    """The next batch of a stream: its number, and the round and sequence where it begins."""

    buffer: int = 0
    """Number of the round."""
    sequence: int = 0
    batch: int = 0
    consumed: Consumed = ()
    """Sequences of this round consumed under other limits."""


@dataclass(frozen=True)
class BatchOutline:
    """One global batch: where its sequences are."""

    number: int
    parts: list[tuple[list[BufferId], RoundOrder]]
    """Packing buffers of a round by lane, and the lanes and numbers of its sequences in this batch."""
    costs: Ints
    """Work of each sequence."""
    begun: list[list[BufferId]]
    """The packing buffers of every round that begins in this batch: their samples over a limit are reported with it."""
    after: Position
    """The position of the next batch."""

    @cached_property
    def lanes(self) -> Ints:
        """The lane of each sequence."""
        return np.concatenate([order.lanes for _, order in self.parts])

    def places(self, chosen: Iterable[int]) -> list[tuple[BufferId, int]]:
        """The packing buffer of each of these sequences, and its number there."""
        ends, found = np.cumsum([len(order.lanes) for _, order in self.parts]), []
        for sequence in chosen:
            part = int(np.searchsorted(ends, sequence, side="right"))
            buffers, order = self.parts[part]
            at = sequence - int(ends[part]) + len(order.lanes)
            found.append((buffers[int(order.lanes[at])], int(order.numbers[at])))
        return found


@dataclass(frozen=True)
class BatchSpec:
    """One global batch, the same for any number of ranks."""

    number: int
    sequences: list[SequenceSpec]
    lanes: list[int]
    """The lane of each sequence."""
    too_large: list[SampleRef]
    """Samples that exceed a limit, from the rounds that begin with this batch."""
    after: Position
    """The position of the next batch."""

    def per_rank(
        self, num_ranks: int, ranks_per_node: int | None = None, num_lanes: int = 1
    ) -> list[list[SequenceSpec]]:
        """The batch's sequences by rank: balanced work, and numbers of sequences that differ by one at most."""
        owners = Owners(num_lanes, num_ranks, ranks_per_node or num_ranks)
        costs = np.array([sequence.tokens + sequence.patches for sequence in self.sequences])
        nodes = owners.nodes_of(np.array(self.lanes))
        ranks = [chosen for node in range(len(owners.nodes)) for chosen in owners.assign(nodes, costs, node)]
        return [[self.sequences[i] for i in chosen] for chosen in ranks]


class _Pending:
    """The batch that is being filled."""

    def __init__(self) -> None:
        self._parts: list[tuple[list[BufferId], RoundOrder]] = []
        self._costs: list[Ints] = []
        self._length = 0
        self.begun: list[list[BufferId]] = []

    def __len__(self) -> int:
        return self._length

    def begin(self, buffers: list[BufferId]) -> None:
        """Note that a round begins."""
        self.begun.append(buffers)

    def add(self, buffers: list[BufferId], order: RoundOrder, costs: Ints) -> None:
        """Add sequences of a round."""
        self._parts.append((buffers, order))
        self._costs.append(costs)
        self._length += len(costs)

    def finish(self, number: int, after: Position) -> BatchOutline:
        """The batch."""
        return BatchOutline(number, self._parts, np.concatenate(self._costs), self.begun, after)


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
        self._draws = Draws(sources, config)

    # ---------------------------------------------------------------- batches

    def batches(self, position: Position | None = None) -> Iterator[BatchSpec]:
        """The batches from `position`, or from the start; the last one of a finite stream may have fewer sequences.

        Every packing buffer is computed here.
        """
        buffers: dict[BufferId, PackingBuffer] = {}

        def costs_of(ids: Sequence[BufferId]) -> list[BufferCosts]:
            buffers.update({key: self.packing_buffer(*key) for key in ids})
            return [buffers[key].costs for key in ids]

        for batch in self.outlines(position, costs_of):
            places = batch.places(range(len(batch.costs)))
            sequences = [buffers[key].sequence(number) for key, number in places]
            too_large = [sample for begun in batch.begun for key in begun for sample in buffers[key].too_large]
            yield BatchSpec(batch.number, sequences, batch.lanes.tolist(), too_large, batch.after)
            for key in [key for key in buffers if key.round < batch.after.buffer]:
                del buffers[key]

    def outlines(
        self, position: Position | None, costs_of: Callable[[Sequence[BufferId]], list[BufferCosts]]
    ) -> Iterator[BatchOutline]:
        """The batches from `position`. `costs_of` is asked for all packing buffers of a round when it is needed."""
        here = position or Position()
        turn, skip, number = here.buffer - 1, here.sequence, here.batch
        pending = _Pending()
        num_unfit = num_samples = 0
        for turn, buffers in self._rounds(here, costs_of):
            costs = costs_of(buffers)
            counts = [len(each.costs) for each in costs]
            order = round_order(counts)
            work = np.concatenate([each.costs for each in costs])
            work = work[(np.cumsum(counts) - counts)[order.lanes] + order.numbers]
            if skip == 0:
                pending.begin(buffers)
            num_too_large = sum(each.num_too_large for each in costs)
            has_fit = len(order.lanes) or any(key.consumed for key in buffers)
            num_unfit = 0 if has_fit else num_unfit + num_too_large
            num_samples += num_too_large
            if 2 * num_unfit >= min(self.config.packing_buffer_size, self._draws.num_samples):
                raise self._nothing_fits(buffers, num_unfit)
            at = skip
            while at < len(order.lanes):
                taken = min(self.config.global_batch_size - len(pending), len(order.lanes) - at)
                part = slice(at, at + taken)
                pending.add(buffers, RoundOrder(order.lanes[part], order.numbers[part]), work[part])
                at += taken
                if len(pending) == self.config.global_batch_size:
                    is_last = at == len(order.lanes)
                    consumed = here.consumed if turn == here.buffer else ()
                    after = Position(turn + 1, 0, number + 1) if is_last else Position(turn, at, number + 1, consumed)
                    yield pending.finish(number, after)
                    number, pending = number + 1, _Pending()
            skip = 0
        if len(pending):
            yield pending.finish(number, Position(turn + 1, 0, number + 1))
        elif pending.begun and number == 0 and num_samples:
            raise self._nothing_fits(pending.begun[0], num_samples)

    def _rounds(
        self, position: Position, costs_of: Callable[[Sequence[BufferId]], list[BufferCosts]]
    ) -> Iterator[tuple[int, list[BufferId]]]:
        """Every round from a position, with its packing buffers by lane."""
        turn, lanes = position.buffer, range(self.config.num_lanes)
        while self.has_round(turn):
            buffers = [BufferId(turn, lane) for lane in lanes]
            for limits in position.consumed if turn == position.buffer else ():
                buffers = self._consume(buffers, limits, costs_of)
            yield turn, buffers
            turn += 1

    def _consume(
        self,
        buffers: list[BufferId],
        entry: tuple[int, int, int],
        costs_of: Callable[[Sequence[BufferId]], list[BufferCosts]],
    ) -> list[BufferId]:
        """The packing buffers of a round without the sequences that were consumed under other limits."""
        if len(buffers) == 1:
            return [buffers[0]._replace(consumed=(*buffers[0].consumed, entry))]
        max_seq_len, max_patches, num_sequences = entry
        packed = costs_of([key._replace(limits=(max_seq_len, max_patches)) for key in buffers])
        order = round_order([len(each.costs) for each in packed])
        taken = np.bincount(order.lanes[:num_sequences], minlength=len(buffers)).tolist()
        return [
            key._replace(consumed=(*key.consumed, (max_seq_len, max_patches, number)))
            for key, number in zip(buffers, taken, strict=True)
        ]

    def has_round(self, number: int) -> bool:
        """Whether the stream has this round."""
        return self._draws.has_round(number)

    def packing_buffer(
        self, number: int, lane: int = 0, consumed: Consumed = (), limits: tuple[int, int] | None = None
    ) -> PackingBuffer:
        """The packed sequences of one lane in one round, computed from their numbers; see `BufferId`."""
        draws = self._draws.range_of(number, lane)
        if draws is None:
            assert self.has_round(number), f"round {number} is after the end of the stream"
            return PackingBuffer.of(np.zeros((6, 0), np.int64), [], [])
        table = self._draws.samples(lane, *draws)
        for *earlier, num_sequences in consumed:
            sequences, _ = self._pack(table, number, lane, *earlier)
            table = table[:, sorted(i for sequence in sequences[num_sequences:] for i in sequence)]
        max_seq_len, max_patches = limits or (self.config.max_seq_len, self.config.patch_limit)
        sequences, too_large = self._pack(table, number, lane, max_seq_len, max_patches)
        return PackingBuffer.of(table, sequences, too_large)

    def _pack(
        self, table: Ints, number: int, lane: int, max_seq_len: int, max_patches: int
    ) -> tuple[list[list[int]], list[int]]:
        """Columns of the table packed into sequences, in pseudo-random order, and those that are too large."""
        packing = pack(table[4], table[5], max_seq_len=max_seq_len, max_patches=max_patches)
        named = (number, lane) if self.config.num_lanes > 1 else (number,)
        order = Permutation(len(packing.sequences), key_of("sequences", self.config.seed, *named))
        return [packing.sequences[i] for i in order(np.arange(len(order)))], packing.too_large

    def _nothing_fits(self, buffers: Sequence[BufferId], num_samples: int) -> DataError:
        first = next(sample for key in buffers for sample in self.packing_buffer(*key).too_large)
        return DataError(
            f"none of {num_samples} consecutive samples fits a packed sequence of max_seq_len "
            f"{self.config.max_seq_len} and max_patches {self.config.patch_limit}; the first has {first.tokens} "
            f"tokens and {first.patches} patches. Raise the limits, or shorten texts and shrink images"
        )

    # ---------------------------------------------------------------- state

    @cached_property
    def fingerprint(self) -> str:
        """Equal for samplers with the same samples in the same packing buffers.

        The first half depends on the settings, the second on the sources, so that an error can name what differs.
        """
        sources = [(source.name, source.fingerprint) for source in self.sources]
        sizes = [_digest(sizes.astype(np.int64).tobytes()) for sizes in self._draws.sizes]
        settings = repr(self.config.order_settings).encode()
        return f"{_digest(settings)}-{_digest(repr((sources, sizes, self._draws.mixture.weights)).encode())}"

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


def _digest(data: bytes) -> str:
    return blake2b(data, digest_size=6).hexdigest()
