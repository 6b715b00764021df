"""Recorded steps: where every request computes one token, the whole forward is replayed from a CUDA graph.

A graph is recorded for a number of requests (rounded up) and a bound on their length (rounded up), when a step of that size comes
for the second time; the first has run as it is and thereby compiled every kernel. Recording runs nothing and takes a few
milliseconds, so starting up waits for none of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

_SHORTEST_BOUND = 1024


class GraphSize(NamedTuple):
    """What a recorded step is made for."""

    num_requests: int
    max_context: int


def graph_size(num_requests: int, longest: int, *, max_requests: int, max_length: int) -> GraphSize:
    """The smallest recorded size that takes this step. Few sizes, so that a size is soon seen again."""
    if num_requests <= 8:
        rounded = 1 << (num_requests - 1).bit_length()
    elif num_requests <= 64:
        rounded = -(-num_requests // 8) * 8
    else:
        rounded = -(-num_requests // 32) * 32
    bound = _SHORTEST_BOUND
    while bound < longest:
        bound *= 4
    return GraphSize(max(num_requests, min(rounded, max_requests)), min(bound, max(max_length, longest)))


class Graphs:
    """The recordings of one runner. All run on one stream and share their memory."""

    def __init__(self, forward: Callable[[GraphSize], Tensor]) -> None:
        """`forward` queues the step of a size on the current stream and returns its logits, in memory that stays."""
        self._forward = forward
        self._seen: set[GraphSize] = set()
        self._recorded: dict[GraphSize, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._pool: Any = None

    @property
    def num_recorded(self) -> int:
        """Sizes recorded so far."""
        return len(self._recorded)

    def run(self, size: GraphSize) -> Tensor:
        """The logits of the step whose numbers lie in the buffer. They are overwritten by the next step."""
        if size in self._recorded:
            graph, logits = self._recorded[size]
        elif size in self._seen:
            graph, logits = self._record(size)
        else:
            self._seen.add(size)
            return self._forward(size)
        graph.replay()
        return logits

    def _record(self, size: GraphSize) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        # Not the context manager of torch: it collects garbage, empties the memory cache and waits for the GPU.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            logits = self._forward(size)
        finally:
            graph.capture_end()
        self._recorded[size] = graph, logits
        return graph, logits
