"""Recorded steps: a forward that has been run before is replayed from a CUDA graph, one launch instead of hundreds.

A step is rounded up to one of a few sizes. A size is recorded when it has come so often that recording will pay; the first time
has run as it is and thereby compiled every kernel. Starting up waits for no recording. One of a whole model takes 100 ms, in which
the GPU runs out of work, and saves a few to twenty a step.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

_TOKENS = (16, 32, 64, 128, 256, 384, 512, 640, 768, 1024, 1280, 1536, 2048)
"""Tokens of recorded steps with prompts. Larger ones keep the GPU busy long enough for the host to launch them."""
_REQUESTS = (4, 16, 64, 256, 1024)
_SHORTEST_BOUND = 1024
_MAX_RECORDED = 128

Size = TypeVar("Size", bound=Hashable)


class StepSize(NamedTuple):
    """What a recorded step is made for: so many tokens, requests and sampled places, of requests up to a length."""

    num_tokens: int
    num_requests: int
    num_samples: int
    max_context: int

    @property
    def is_answers(self) -> bool:
        """Whether every request computes one token, and samples behind it."""
        return self.num_tokens == self.num_requests

    @property
    def times_before(self) -> int:
        """How often it is run before it is recorded. Answers come again at once; a mix of prompts and answers may never."""
        return 1 if self.is_answers else 4


def answers_size(num_requests: int, longest: int, max_length: int) -> StepSize:
    """The recorded size that takes a step of this many answers."""
    if num_requests <= 8:
        rounded = 1 << (num_requests - 1).bit_length()
    elif num_requests <= 64:
        rounded = -(-num_requests // 8) * 8
    else:
        rounded = -(-num_requests // 32) * 32
    return StepSize(rounded, rounded, rounded, _length_bound(longest, max_length))


def mixed_size(num_tokens: int, num_requests: int, num_samples: int, longest: int, max_length: int) -> StepSize | None:
    """The recorded size that takes a step with prompts or guesses. None: it is too large to be worth it."""
    if num_tokens > _TOKENS[-1] or num_requests > _REQUESTS[-1]:
        return None
    tokens = _TOKENS[bisect_left(_TOKENS, num_tokens)]
    requests = _REQUESTS[bisect_left(_REQUESTS, num_requests)]
    samples = requests if num_samples <= requests else tokens
    # One token more than requests at least, or it would be taken for a step of answers.
    return StepSize(max(tokens, requests + 1), requests, samples, _length_bound(longest, max_length))


def most_places(max_tokens: int, max_requests: int) -> tuple[int, int]:
    """Tokens and requests of the largest step there can be, rounded up."""
    requests = answers_size(max_requests, 1, 1).num_requests
    if max_requests <= _REQUESTS[-1]:
        requests = max(requests, _REQUESTS[bisect_left(_REQUESTS, max_requests)])
    return max(max_tokens, _TOKENS[-1], requests + 1), requests


def _length_bound(longest: int, max_length: int) -> int:
    bound = _SHORTEST_BOUND
    while bound < longest:
        bound *= 4
    return min(bound, max(max_length, longest))


class Graphs(Generic[Size]):
    """The recordings of one kind of forward, by size. All run on one stream and share their memory."""

    def __init__(self, forward: Callable[[Size], Tensor], times_before: Callable[[Size], int] = lambda _: 1) -> None:
        """`forward` queues the work of a size on the current stream and returns what it gives. It is run as it is `times_before`
        a size is recorded."""
        self._forward, self._times_before = forward, times_before
        self._times: Counter[Size] = Counter()
        self._recorded: dict[Size, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._failed: set[Size] = set()
        self._pool: Any = None

    @property
    def num_recorded(self) -> int:
        """Sizes recorded so far."""
        return len(self._recorded)

    def run(self, size: Size) -> Tensor:
        """What the forward gives for the numbers that lie in its buffers. It is overwritten by the next run."""
        if size not in self._recorded:
            is_due = self._times[size] >= max(1, self._times_before(size))
            is_wanted = is_due and size not in self._failed and len(self._recorded) < _MAX_RECORDED
            self._times[size] += 1
            if not (is_wanted and self._record(size)):
                return self._forward(size)
        graph, out = self._recorded[size]
        graph.replay()
        return out

    def _record(self, size: Size) -> bool:
        """Whether that went well; else (there is no memory for it, say) the size is run as it is from then on."""
        try:
            self._capture(size)
        except RuntimeError as error:
            logger.warning("a step of %s could not be recorded: %r", size, error)
            self._failed.add(size)
            return False
        return True

    def _capture(self, size: Size) -> None:
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        # Not the context manager of torch: it collects garbage, empties the memory cache and waits for the GPU.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            out = self._forward(size)
        finally:
            graph.capture_end()
        self._recorded[size] = graph, out
