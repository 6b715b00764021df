"""CUDA graphs of forward passes, captured lazily by size: one launch instead of hundreds.

A step is rounded up to one of a few sizes. A size is captured once it has occurred often enough for the capture to pay; the first
run is eager and compiles every kernel. Nothing is captured at start-up. Capturing a whole model takes 100 ms, during which the GPU
runs out of work, and saves a few to twenty milliseconds per step.
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
"""Token counts of captured steps with prompts. Larger steps keep the GPU busy long enough for the host to launch them."""
_REQUESTS = (4, 16, 64, 256, 1024)
_MIN_CONTEXT = 1024
_MAX_GRAPHS = 128

Size = TypeVar("Size", bound=Hashable)


class StepSize(NamedTuple):
    """Size of a captured step. `max_context` is the maximum context length."""

    num_tokens: int
    num_requests: int
    num_samples: int
    max_context: int

    @property
    def is_decode(self) -> bool:
        """Whether every request computes one token and samples after it."""
        return self.num_tokens == self.num_requests

    @property
    def num_eager_runs_before_capture(self) -> int:
        """Decode sizes occur again at once; a mix of prompts and decode may never."""
        return 1 if self.is_decode else 4


def decode_size(num_requests: int, max_context: int, max_length: int) -> StepSize:
    """The captured size for a decode step of this many requests."""
    if num_requests <= 8:
        rounded = 1 << (num_requests - 1).bit_length()
    elif num_requests <= 64:
        rounded = -(-num_requests // 8) * 8
    else:
        rounded = -(-num_requests // 32) * 32
    return StepSize(rounded, rounded, rounded, _context_bound(max_context, max_length))


def mixed_size(
    num_tokens: int, num_requests: int, num_samples: int, max_samples: int, max_context: int, max_length: int
) -> StepSize | None:
    """The captured size for a step with prompts or drafts. None: too large to be worth a graph.

    No step samples more than `max_samples` tokens.
    """
    if num_tokens > _TOKENS[-1] or num_requests > _REQUESTS[-1]:
        return None
    tokens = _TOKENS[bisect_left(_TOKENS, num_tokens)]
    requests = _REQUESTS[bisect_left(_REQUESTS, num_requests)]
    samples = requests
    while samples < num_samples:
        samples *= 2
    # One token more than requests at least, to differ from a decode step.
    tokens = max(tokens, requests + 1)
    return StepSize(tokens, requests, min(samples, tokens, max_samples), _context_bound(max_context, max_length))


def largest_size(max_tokens: int, max_requests: int, max_draft_tokens: int) -> tuple[int, int, int]:
    """Tokens, requests and sampled tokens of the largest step, rounded up."""
    requests = decode_size(max_requests, 1, 1).num_requests
    if max_requests <= _REQUESTS[-1]:
        requests = max(requests, _REQUESTS[bisect_left(_REQUESTS, max_requests)])
    tokens = max(max_tokens, _TOKENS[-1], requests + 1)
    return tokens, requests, min(tokens, requests * (1 + max_draft_tokens))


def _context_bound(max_context: int, max_length: int) -> int:
    bound = _MIN_CONTEXT
    while bound < max_context:
        bound *= 4
    return min(bound, max(max_length, max_context))


class CudaGraphs(Generic[Size]):
    """CUDA graphs of one forward function, by size. All run on one stream and share their memory."""

    def __init__(
        self, forward: Callable[[Size], Tensor], num_eager_runs_before_capture: Callable[[Size], int] = lambda _: 1
    ) -> None:
        """`forward` queues the work of a size on the current stream and returns its output."""
        self._forward, self._num_eager_runs_before_capture = forward, num_eager_runs_before_capture
        self._num_runs: Counter[Size] = Counter()
        self._captured: dict[Size, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._failed: set[Size] = set()
        self._pool: Any = None

    @property
    def num_captured(self) -> int:
        """Sizes captured so far."""
        return len(self._captured)

    def run(self, size: Size) -> Tensor:
        """Run the forward on the contents of its input buffers. The output is overwritten by the next run."""
        if size not in self._captured:
            is_due = self._num_runs[size] >= max(1, self._num_eager_runs_before_capture(size))
            is_wanted = is_due and size not in self._failed and len(self._captured) < _MAX_GRAPHS
            self._num_runs[size] += 1
            if not (is_wanted and self._try_capture(size)):
                return self._forward(size)
        graph, out = self._captured[size]
        graph.replay()
        return out

    def _try_capture(self, size: Size) -> bool:
        """False: the capture failed (out of memory, say), and the size runs eagerly from then on."""
        try:
            self._capture(size)
        except RuntimeError as error:
            logger.warning("CUDA graph capture of %s failed, it runs eagerly: %r", size, error)
            self._failed.add(size)
            return False
        return True

    def _capture(self, size: Size) -> None:
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        # Not torch's context manager: it collects garbage, empties the memory cache and synchronizes.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            out = self._forward(size)
        finally:
            graph.capture_end()
        self._captured[size] = graph, out
