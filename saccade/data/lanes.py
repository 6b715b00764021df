"""Lanes: an epoch as equal parts that are read side by side, so that a node reads every byte of its lanes once.

    epoch -> num_lanes parts -> rounds, each lane packed by itself -> one order of a round's sequences -> batches
          -> a batch's sequences to nodes, by the owners of their lanes -> to the ranks of a node, by work

Lanes are a setting of the order, so batches are the same for any number of nodes; nodes only decide who reads what. A
node takes the sequences of its own lanes up to its share of the batch, and the few above it go to the nearest node that
lacks some. Everything here is integer arithmetic, the same on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from saccade.data.order import Ints
from saccade.data.packing import assign


class RoundOrder(NamedTuple):
    """The packed sequences of a round in the order of the stream: lane of each, and its number in the lane."""

    lanes: Ints
    numbers: Ints


def round_order(counts: Sequence[int]) -> RoundOrder:
    """The order of a round's sequences, from their number in each lane: one of every lane in turn.

    The lanes come in van der Corput order (0, 1/2, 1/4, 3/4, ...), so that any part of a turn has sequences of every
    node.
    """
    lanes = np.repeat(np.arange(len(counts)), counts)
    ends = np.cumsum(counts)
    numbers = np.arange(len(lanes)) - np.repeat(ends - counts, counts)
    order = np.lexsort((_corput_ranks(len(counts))[lanes], numbers))
    return RoundOrder(lanes[order], numbers[order])


def _corput_ranks(num_lanes: int) -> Ints:
    """Position of each lane in the order of its number's bits reversed."""
    width = max(num_lanes - 1, 1).bit_length()
    reversed_bits = sum(((np.arange(num_lanes) >> bit) & 1) << (width - 1 - bit) for bit in range(width))
    ranks = np.empty(num_lanes, np.int64)
    ranks[np.argsort(reversed_bits, kind="stable")] = np.arange(num_lanes)
    return ranks


@dataclass(frozen=True)
class Owners:
    """Which rank plans a lane, and which node reads it."""

    num_lanes: int
    num_ranks: int
    ranks_per_node: int
    """Consecutive ranks of a node; the last node may have fewer."""

    @cached_property
    def planners(self) -> Ints:
        """[lanes] the rank that plans each lane."""
        ranks: Ints = (2 * np.arange(self.num_lanes) + 1) * self.num_ranks // (2 * self.num_lanes)
        return ranks

    @cached_property
    def nodes(self) -> list[range]:
        """The ranks of each node. With fewer lanes than nodes every node reads every lane, as one node would."""
        size = self.ranks_per_node if self.is_divided else self.num_ranks
        return [range(begin, min(begin + size, self.num_ranks)) for begin in range(0, self.num_ranks, size)]

    @property
    def is_divided(self) -> bool:
        """Whether every lane belongs to one machine."""
        return self.num_lanes * self.ranks_per_node >= self.num_ranks

    def node_of(self, rank: int) -> int:
        """Number of a rank's node."""
        return rank // len(self.nodes[0])

    def lanes_of(self, node: int) -> Ints:
        """The lanes that a node reads."""
        return np.flatnonzero(self._lane_nodes == node)

    @cached_property
    def _lane_nodes(self) -> Ints:
        nodes: Ints = self.planners // len(self.nodes[0])
        return nodes

    def is_own(self, lanes: Ints, node: int) -> NDArray[np.bool_]:
        """Whether a node reads these lanes by itself."""
        own: NDArray[np.bool_] = self._lane_nodes[lanes] == node
        return own

    @cached_property
    def _first_ranks(self) -> list[int]:
        return [members.start for members in self.nodes] + [self.num_ranks]

    def nodes_of(self, lanes: Ints) -> Ints:
        """The node that reads each sequence of a batch, given the lane of each.

        Every node gets the share of its ranks, whatever the lanes.
        """
        owners: Ints = self._lane_nodes[lanes]
        if len(self.nodes) == 1:
            return owners
        # Rounded as `planners` is, so that a batch with one sequence of every lane has no surplus.
        bounds = (2 * np.array(self._first_ranks) * len(lanes) + self.num_ranks) // (2 * self.num_ranks)
        missing = np.diff(bounds) - np.bincount(owners, minlength=len(self.nodes))
        for node in np.flatnonzero(missing < 0).tolist():
            for sequence in np.flatnonzero(owners == node)[missing[node] :].tolist():
                below = np.flatnonzero(missing > 0)
                nearest = int(below[np.abs(below - node).argmin()])
                owners[sequence] = nearest
                missing[nearest] -= 1
        return owners

    def assign(self, nodes: Ints, costs: Ints, node: int) -> list[Ints]:
        """The sequences of a batch for each rank of a node, ascending, given node and cost of all of them.

        Work is even within every node, and numbers of sequences differ by one at most over all ranks.
        """
        here = np.flatnonzero(nodes == node)
        return [here[chosen] for chosen in assign(costs[here].tolist(), len(self.nodes[node]))]
