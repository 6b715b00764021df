"""One rank's share of every batch, computed from the packing buffers that it needs.

    own lanes: planned here  --put-->  exchange  --get-->  costs of all lanes, buffers of this node's lanes

Which sequence is where in a batch follows from the number of sequences of every lane; a rank plans its own lanes and
gets the others from the ranks that plan them. What another rank gives is what this rank would compute: a value that
does not come in time is computed here, so the exchange saves work and never decides anything.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol

import numpy as np

from saccade.data.batch_sampler import BatchOutline, BatchSampler, Position
from saccade.data.lanes import Owners
from saccade.data.packing_buffer import BufferCosts, BufferId, PackingBuffer, SampleRef, SequenceSpec
from saccade.errors import DataError
from saccade.log import log_once

_PATIENCE_S = 120.0
"""How long a rank waits for the others' part of a round before it computes that part itself."""
_POLL_S = 0.02
_KEPT_BATCHES = 32
"""The other ranks lag by fewer batches than this: what they may still ask for is kept."""


class Exchange(Protocol):
    """A store that all ranks of a job reach, such as the one of torch.distributed."""

    def put(self, key: str, value: bytes) -> None:
        """Store a value."""

    def get(self, keys: Sequence[str]) -> list[bytes] | None:
        """The values of all these keys; None if any is missing. Does not wait."""

    def remove(self, key: str) -> None:
        """Remove a value, if there is one."""


@dataclass(frozen=True)
class RankBatch:
    """This rank's share of a batch."""

    number: int
    sequences: list[SequenceSpec]
    is_own: list[bool]
    """Whether a sequence comes from a lane of this node, whose data the node caches."""
    num_sequences: int
    """Packed sequences over all ranks."""
    too_large: list[SampleRef]
    """This rank's share of the samples that exceed a limit."""
    after: Position


class RankBatches:
    """The batches of a stream as one rank reads them. Used by one thread; `close` may be called from another."""

    def __init__(
        self,
        sampler: BatchSampler,
        compute: Callable[[BufferId], Future[PackingBuffer]],
        exchange: Exchange | None,
        *,
        plans_ahead: bool = False,
    ) -> None:
        """`compute` computes a packing buffer; with `plans_ahead` it does so concurrently with the batches before."""
        config = sampler.config
        self._sampler, self._compute, self._plans_ahead = sampler, compute, plans_ahead
        self._owners = Owners(config.num_lanes, config.num_ranks, config.ranks_per_node or config.num_ranks)
        self._rank, self._node = config.rank, self._owners.node_of(config.rank)
        is_shared = exchange is not None and config.num_lanes > 1 and config.num_ranks > 1
        self._exchange = exchange if is_shared else None
        self._prefix = f"plans/{sampler.fingerprint}/{config.max_seq_len}/{config.patch_limit}"
        self._own = frozenset(np.flatnonzero(self._owners.planners == self._rank).tolist())
        self._planned: dict[BufferId, Future[PackingBuffer]] = {}
        self._costs: dict[BufferId, BufferCosts] = {}
        self._buffers: dict[BufferId, PackingBuffer] = {}
        self._given: deque[BufferId] = deque()
        self._recent: deque[int] = deque(maxlen=_KEPT_BATCHES)
        self._is_closed = threading.Event()

    def read(self, position: Position) -> Iterator[RankBatch]:
        """The batches from `position`."""
        for outline in self._sampler.outlines(position, self._costs_of):
            yield self._share(outline)
            self._forget(outline.after.buffer)

    def close(self) -> None:
        """End a wait for other ranks."""
        self._is_closed.set()

    # ---------------------------------------------------------------- this rank's share

    def _share(self, outline: BatchOutline) -> RankBatch:
        lanes = outline.lanes
        nodes = self._owners.nodes_of(lanes)
        chosen = self._owners.assign(nodes, outline.costs, self._node)[self._rank - self._members.start]
        own = self._owners.is_own(lanes[chosen], self._node).tolist()
        sequences = [self._buffer(key).sequence(number) for key, number in outline.places(chosen.tolist())]
        return RankBatch(outline.number, sequences, own, len(lanes), self._too_large(outline.begun), outline.after)

    @property
    def _members(self) -> range:
        return self._owners.nodes[self._node]

    def _too_large(self, begun: Sequence[Sequence[BufferId]]) -> list[SampleRef]:
        """This rank's part of the samples over a limit in the lanes of its node."""
        lanes = set(self._owners.lanes_of(self._node).tolist())
        buffers = [key for each in begun for key in each if key.lane in lanes and self._costs[key].num_too_large]
        found = [sample for key in buffers for sample in self._buffer(key).too_large]
        return found[self._rank - self._members.start :: len(self._members)]

    # ---------------------------------------------------------------- packing buffers

    def _costs_of(self, ids: Sequence[BufferId]) -> list[BufferCosts]:
        """The costs of all lanes of a round."""
        for key in ids:
            if self._exchange is None or key.lane in self._own:
                self._begin(key)
        missing = [key for key in ids if key not in self._planned]
        for key, data in zip(missing, self._wait_for(missing, "costs"), strict=True):
            if data is None:
                self._begin(key)
            else:
                self._costs[key] = BufferCosts.from_bytes(data)
        for key in ids:
            if key in self._planned:
                self._costs[key] = self._planned[key].result().costs
        if self._plans_ahead and self._sampler.has_round(ids[0].round + 1):
            for lane in self._own:
                self._begin(BufferId(ids[0].round + 1, lane))
        return [self._costs[key] for key in ids]

    def _begin(self, key: BufferId) -> None:
        """Plan a buffer, and give it to the other ranks once it is there."""
        if key in self._planned:
            return
        planned = self._planned[key] = self._compute(key)
        exchange = self._exchange
        if exchange is not None:
            planned.add_done_callback(lambda done: self._give(exchange, key, done))
            self._given.append(key)

    def _give(self, exchange: Exchange, key: BufferId, planned: Future[PackingBuffer]) -> None:
        if not planned.cancelled() and planned.exception() is None and not self._is_closed.is_set():
            buffer = planned.result()
            exchange.put(self._name(key, "buffer"), buffer.to_bytes())
            exchange.put(self._name(key, "costs"), buffer.costs.to_bytes())

    def _buffer(self, key: BufferId) -> PackingBuffer:
        if key in self._planned:
            return self._planned[key].result()
        if key not in self._buffers:
            [data] = self._wait_for([key], "buffer")
            self._buffers[key] = PackingBuffer.from_bytes(data) if data else self._compute(key).result()
        return self._buffers[key]

    def _wait_for(self, ids: Sequence[BufferId], what: str) -> list[bytes | None]:
        """The values of these buffers from the other ranks; None for those that do not come."""
        if self._exchange is None or not ids:
            return [None] * len(ids)
        names, deadline = [self._name(key, what) for key in ids], time.monotonic() + _PATIENCE_S
        while (found := self._exchange.get(names)) is None:
            if self._is_closed.wait(_POLL_S):
                raise DataError("the stream was closed")
            if time.monotonic() > deadline:
                log_once("data", "other ranks are late with their part of the order: it is computed here",
                         logging.WARNING)  # fmt: skip
                single = [self._exchange.get([name]) for name in names]
                return [each[0] if each else None for each in single]
        return list(found)

    def _name(self, key: BufferId, what: str) -> str:
        return f"{self._prefix}/{blake2b(repr(tuple(key)).encode(), digest_size=12).hexdigest()}/{what}"

    def _forget(self, turn: int) -> None:
        """Drop the rounds before this one, and what the slowest rank has read."""
        for known in (self._planned, self._costs, self._buffers):
            for key in [key for key in known if key.round < turn]:
                del known[key]
        oldest = self._recent[0] if len(self._recent) == _KEPT_BATCHES else -1
        self._recent.append(turn)
        while self._exchange is not None and self._given and self._given[0].round < oldest:
            key = self._given.popleft()
            for what in ("costs", "buffer"):
                self._exchange.remove(self._name(key, what))
