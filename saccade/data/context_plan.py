"""Which tokens of a packed sequence each rank of context parallelism has: equal tokens and equal attention.

    lengths of the segments -> blocks -> greedy assignment by attention cost -> pieces -> rounds

The sequence is cut into blocks of at most `block_size` tokens, equally many for every rank. A block costs the pairs of
tokens that attend to each other in it; the costliest goes first, to the rank with least cost that has room. A piece is
a run of tokens of one segment on one rank: a row of packed attention whose keys are those from the start of the segment
to the end of the piece, with the last query aligned with the last key. Nothing is padded.

Keys of two pieces of one segment overlap, and those of a call of packed attention must not: the pieces of a rank are
divided into rounds, of which each has at most one piece per segment. A rank holds its tokens in the order of rounds, so
that the queries of a round are consecutive.

All of it is integers: 128k tokens on 8 ranks take about a millisecond.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from saccade.data.order import Ints

BLOCK_SIZE = 1024
"""Most tokens of a block: smaller ones balance better and make more rounds."""


class Piece(NamedTuple):
    """A run of tokens of one segment on one rank, as offsets in the packed sequence."""

    segment: int
    """Start of the segment, and of the keys."""
    start: int
    """First query."""
    end: int
    """The end of the queries, and of the keys."""


@dataclass(frozen=True)
class ContextShare:
    """The tokens of one rank."""

    rounds: list[list[Piece]]
    """At most one piece of each segment per round, ascending."""

    @property
    def tokens(self) -> Ints:
        """Tokens of this rank in the order in which it holds them, as offsets in the packed sequence."""
        runs = [np.arange(piece.start, piece.end) for pieces in self.rounds for piece in pieces]
        return np.concatenate([np.zeros(0, np.int64), *runs])

    @property
    def num_tokens(self) -> int:
        """Number of tokens of this rank."""
        return sum(piece.end - piece.start for pieces in self.rounds for piece in pieces)


def plan_context(
    lengths: Sequence[int], num_ranks: int, *, block_size: int = BLOCK_SIZE, window: int | None = None
) -> list[ContextShare]:
    """Divide a packed sequence of segments of these lengths; `window`: earlier tokens a token attends to, if limited.

    Numbers of tokens differ by less than the number of blocks of a rank: blocks are equal to a token.
    """
    num_tokens = sum(lengths)
    blocks_per_rank = -(-num_tokens // (num_ranks * block_size))
    num_blocks = max(1, blocks_per_rank) * num_ranks
    bounds = [num_tokens * number // num_blocks for number in range(num_blocks + 1)]
    pairs = np.concatenate([[0], attended(lengths, window).cumsum()])
    costs = np.diff(pairs[bounds]).tolist()
    starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).tolist()
    return [
        ContextShare(_rounds(_pieces([(bounds[block], bounds[block + 1]) for block in blocks], starts)))
        for blocks in _assign(costs, num_ranks)
    ]


def attended(lengths: Sequence[int], window: int | None = None) -> Ints:
    """[tokens]: keys that each token attends to, its own included."""
    if not len(lengths):
        return np.zeros(0, np.int64)
    sizes = np.asarray(lengths, np.int64)
    first = np.repeat(np.cumsum(sizes) - sizes, sizes)
    counts: Ints = np.arange(1, len(first) + 1) - first
    return counts if window is None else np.minimum(counts, window + 1)


def _assign(costs: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Block numbers of each rank, ascending, equally many."""
    room = len(costs) // num_ranks
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    work = [0] * num_ranks
    for block in sorted(range(len(costs)), key=lambda block: (-costs[block], block)):
        rank = min((rank for rank in range(num_ranks) if len(ranks[rank]) < room), key=lambda rank: (work[rank], rank))
        ranks[rank].append(block)
        work[rank] += costs[block]
    return [sorted(blocks) for blocks in ranks]


def _pieces(blocks: Sequence[tuple[int, int]], starts: Sequence[int]) -> list[Piece]:
    """The tokens of ascending blocks as pieces: adjacent blocks joined, cut at the starts of segments."""
    runs: list[tuple[int, int]] = []
    for start, end in blocks:
        if runs and runs[-1][1] == start:
            runs[-1] = (runs[-1][0], end)
        else:
            runs.append((start, end))
    pieces, segments = [], pairwise(starts)
    segment, segment_end = next(segments, (0, 0))
    for start, end in runs:
        while start < end:
            while segment_end <= start:
                segment, segment_end = next(segments)
            pieces.append(Piece(segment, start, min(end, segment_end)))
            start = pieces[-1].end
    return pieces


def _rounds(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """The n-th piece of every segment is in the n-th round."""
    rounds: list[list[Piece]] = []
    seen: dict[int, int] = {}
    for piece in pieces:
        number = seen.get(piece.segment, 0)
        seen[piece.segment] = number + 1
        if number == len(rounds):
            rounds.append([])
        rounds[number].append(piece)
    return rounds
