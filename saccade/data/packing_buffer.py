"""Packed sequences of samples as flat tables: computed in one process, used in others.

PackingBuffer  --to_bytes-->  another process, another rank  --from_bytes-->  sequence(number)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from saccade.data.order import Ints


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


class SequenceRefs(NamedTuple):
    """The samples of a packed sequence that a rank collates."""

    samples: list[SampleRef]
    is_own: bool = True
    """Whether their data belongs in this node's cache; another node caches that of the others."""


Consumed = tuple[tuple[int, int, int], ...]
"""Sequences consumed under other limits: (max_seq_len, max_patches, number of sequences) each, in this order."""


class BufferId(NamedTuple):
    """Identity of a packing buffer."""

    round: int
    lane: int = 0
    consumed: Consumed = ()
    """Sequences of this buffer that were consumed under other limits."""
    limits: tuple[int, int] | None = None
    """max_seq_len and max_patches of the sequences of the other samples; None: those of the stream."""


@dataclass(frozen=True)
class BufferCosts:
    """What every rank needs to know of a packing buffer."""

    costs: Ints
    """Work of each sequence, for an even division over ranks: its tokens and patches."""
    num_too_large: int

    def to_bytes(self) -> bytes:
        """The costs in the machine's order of bytes."""
        return np.array([self.num_too_large, *self.costs], np.int32).tobytes()

    @staticmethod
    def from_bytes(data: bytes) -> BufferCosts:
        """What `to_bytes` wrote."""
        values = np.frombuffer(data, np.int32).astype(np.int64)
        return BufferCosts(values[1:], int(values[0]))


@dataclass(frozen=True)
class PackingBuffer:
    """Packed sequences in pseudo-random order, and the samples that exceed a limit by themselves."""

    table: NDArray[np.int32]
    """[samples, 6] `SampleRef`s of one sequence after another, then those that are too large."""
    starts: NDArray[np.int32]
    """[sequences + 1] first row of each sequence, and the end of the last one."""

    @staticmethod
    def of(table: Ints, sequences: Sequence[Sequence[int]], too_large: Sequence[int]) -> PackingBuffer:
        """Build a buffer from columns of `SampleRef`s and the columns of each sequence."""
        starts = np.cumsum([0, *map(len, sequences)], dtype=np.int32)
        columns = [column for sequence in sequences for column in sequence]
        return PackingBuffer(table[:, [*columns, *too_large]].T.astype(np.int32), starts)

    def __len__(self) -> int:
        return len(self.starts) - 1

    def sequence(self, number: int) -> SequenceSpec:
        """One of the sequences."""
        return SequenceSpec(self._refs(int(self.starts[number]), int(self.starts[number + 1])))

    @property
    def sequences(self) -> list[SequenceSpec]:
        """All sequences."""
        return [self.sequence(number) for number in range(len(self))]

    @property
    def too_large(self) -> list[SampleRef]:
        """The samples that exceed a limit by themselves."""
        return self._refs(int(self.starts[-1]), len(self.table))

    @cached_property
    def costs(self) -> BufferCosts:
        """Work of each sequence, and the number of samples that are too large."""
        before = np.concatenate([[0], np.cumsum(self.table[:, 4].astype(np.int64) + self.table[:, 5])])
        return BufferCosts(np.diff(before[self.starts]), len(self.table) - int(self.starts[-1]))

    def _refs(self, begin: int, end: int) -> list[SampleRef]:
        return [SampleRef(*row) for row in self.table[begin:end].tolist()]

    def to_bytes(self) -> bytes:
        """The tables in the machine's order of bytes."""
        return np.int32(len(self)).tobytes() + self.starts.tobytes() + self.table.tobytes()

    @staticmethod
    def from_bytes(data: bytes) -> PackingBuffer:
        """What `to_bytes` wrote."""
        values = np.frombuffer(data, np.int32)
        begin = int(values[0]) + 2
        return PackingBuffer(values[begin:].reshape(-1, len(SampleRef._fields)), values[1:begin])
