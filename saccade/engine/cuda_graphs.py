"""CUDA graphs of forward passes by size: one launch instead of hundreds.

A step is rounded up to one of a declared set of sizes, all of which are captured before the engine reports ready; capturing takes about
25 ms each for a whole model. A size outside the set (a longer context than usual, say) is captured when it first occurs, which
delays that step and is counted. Of those late ones a fixed number is kept; the least recently used is dropped, a declared one never.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from saccade.log import log_once

logger = logging.getLogger(__name__)

PREFILL_TOKENS = (16, 32, 64, 128, 192, 256, 384, 512, 640, 768, 1024, 1280, 1536, 2048, 3072, 4096)
"""Prefill tokens of captured steps. Larger steps keep the GPU busy long enough for the host to launch them."""
MAX_CHUNKS = 32
"""Prefill requests of a step. All captured steps with prefill have room for so many: one without tokens costs next to nothing."""
MAX_DRAFTING = 8
"""Running requests up to which drafts pay (`prompt_lookup.py`)."""
_MIXED_DECODE = (0, 16, 32, 64, 96, 128, 192, 256)
"""Decode requests of captured steps with prefill."""
_MAX_OVERFLOW = 8
_CONTEXTS = (2048, 8192, 32768)
"""Context lengths of steps captured at start, of which those with prefill take the second at least; longer ones follow times four."""
_MAX_LATE_GRAPHS = 64
"""Graphs captured after start."""

Size = TypeVar("Size", bound=Hashable)


class StepSize(NamedTuple):
    """Size of a captured step: decode requests of one token each, then prefill tokens of several requests."""

    num_decode: int
    num_prefill_tokens: int
    num_prefill_requests: int
    num_prefill_samples: int
    """Tokens sampled after prefill tokens; every decode token samples."""
    max_context: int
    """Maximum context length."""

    @property
    def num_tokens(self) -> int:
        """Tokens computed."""
        return self.num_decode + self.num_prefill_tokens

    @property
    def num_requests(self) -> int:
        """Requests computed."""
        return self.num_decode + self.num_prefill_requests

    @property
    def num_samples(self) -> int:
        """Tokens sampled."""
        return self.num_decode + self.num_prefill_samples


def step_size(
    *, num_decode: int, num_tokens: int, num_chunks: int, num_samples: int, max_context: int, max_length: int
) -> StepSize | None:
    """The captured size for a step of this many decode requests and prefill tokens, chunks and samples. None: it runs eagerly."""
    if num_chunks == 0:
        return StepSize(_round_decode(num_decode), 0, 0, 0, _round_context(max_context, max_length))
    if num_tokens > PREFILL_TOKENS[-1] or num_chunks > MAX_CHUNKS or num_decode > _MIXED_DECODE[-1]:
        return None
    decode = _MIXED_DECODE[bisect_left(_MIXED_DECODE, num_decode)]
    tokens = PREFILL_TOKENS[bisect_left(PREFILL_TOKENS, max(num_tokens, _min_prefill(decode)))]
    context = _round_context(max(max_context, min(_CONTEXTS[1], max_length)), max_length)
    return StepSize(decode, tokens, MAX_CHUNKS, _round_samples(num_samples), context)


def decode_beside_prefill(num_decode: int, num_chunks: int) -> int:
    """How many decode requests a step with prefill computes as such. A few beyond a captured number are chunks of one token: padding up
    to the next number would cost more."""
    fewer = [n for n in _MIXED_DECODE if n <= num_decode]
    is_few = fewer and num_decode - fewer[-1] <= _MAX_OVERFLOW and num_decode - fewer[-1] + num_chunks <= MAX_CHUNKS
    return fewer[-1] if is_few else num_decode


def declared_sizes(max_requests: int, max_length: int, max_draft_tokens: int = 0) -> Iterator[StepSize]:
    """Sizes captured before the engine is ready: decode of any number of requests, alone and beside prefill, and drafts of few."""
    contexts = sorted({_round_context(min(context, max_length), max_length) for context in _CONTEXTS})
    decode = sorted({_round_decode(n) for n in range(1, max_requests + 1)})
    for context in contexts:
        yield from (StepSize(n, 0, 0, 0, context) for n in decode)
    context = _round_context(min(_CONTEXTS[1], max_length), max_length)
    for num_decode in _MIXED_DECODE[: bisect_left(_MIXED_DECODE, max_requests) + 1]:
        for tokens in PREFILL_TOKENS:
            if tokens >= _min_prefill(num_decode):
                yield StepSize(num_decode, tokens, MAX_CHUNKS, MAX_CHUNKS, context)
    drafting = [n * (1 + max_draft_tokens) for n in range(1, min(MAX_DRAFTING, max_requests) + 1)]
    sizes = {(PREFILL_TOKENS[bisect_left(PREFILL_TOKENS, tokens)], _round_samples(tokens)) for tokens in drafting}
    yield from (StepSize(0, tokens, MAX_CHUNKS, n, context) for tokens, n in sorted(sizes) if n > MAX_CHUNKS)


def _min_prefill(num_decode: int) -> int:
    """Prefill tokens below which no step with this many decode requests is captured."""
    return num_decode // 4


def _round_samples(num_samples: int) -> int:
    return MAX_CHUNKS if num_samples <= MAX_CHUNKS else 1 << (num_samples - 1).bit_length()


def _round_decode(num_requests: int) -> int:
    if num_requests <= 8:
        return 1 << (num_requests - 1).bit_length()
    step = 8 if num_requests <= 64 else 32
    return -(-num_requests // step) * step


def _round_context(max_context: int, max_length: int) -> int:
    bound = _CONTEXTS[0]
    while bound < max_context:
        bound *= 4
    return min(bound, max(max_length, max_context))


def largest_step(max_tokens: int, max_requests: int, max_draft_tokens: int) -> tuple[int, int, int]:
    """Tokens, requests and sampled tokens of the largest step, rounded up."""
    decode = max(
        _round_decode(max_requests),
        _MIXED_DECODE[min(bisect_left(_MIXED_DECODE, max_requests), len(_MIXED_DECODE) - 1)],
    )
    tokens = max(max_tokens, PREFILL_TOKENS[-1]) + decode
    requests = decode + max(MAX_CHUNKS, max_requests)
    drafting = MAX_CHUNKS * (1 + max_draft_tokens)
    return tokens, requests, min(tokens, max(requests + drafting - MAX_CHUNKS, decode + _round_samples(drafting)))


class CudaGraphs(Generic[Size]):
    """CUDA graphs of one forward function, by size. All run on one stream and share their memory."""

    def __init__(self, forward: Callable[[Size], Tensor]) -> None:
        """`forward` queues the work of a size on the current stream and returns its output."""
        self._forward = forward
        self._declared: dict[Size, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._late: OrderedDict[Size, tuple[torch.cuda.CUDAGraph, Tensor]] = OrderedDict()
        self._failed: set[Size] = set()
        self._pool: Any = None
        self.num_late_captures = 0
        """Graphs captured while serving."""
        self.num_eager_runs = 0
        """Runs of sizes that could not be captured."""

    @property
    def num_captured(self) -> int:
        """Sizes captured so far."""
        return len(self._declared) + len(self._late)

    def capture(self, size: Size) -> None:
        """Capture a size before serving. Its kernels must be compiled, or the input buffers hold a valid step of it."""
        captured = self._try_capture(size)
        if captured is not None:
            self._declared[size] = captured

    def run(self, size: Size) -> Tensor:
        """Run the forward on the contents of its input buffers. The output is overwritten by the next run."""
        captured = self._declared.get(size) or self._find_late(size)
        if captured is None:
            self.num_eager_runs += 1
            return self._forward(size)
        graph, out = captured
        graph.replay()
        return out

    def _find_late(self, size: Size) -> tuple[torch.cuda.CUDAGraph, Tensor] | None:
        if size in self._late:
            self._late.move_to_end(size)
            return self._late[size]
        if size in self._failed:
            return None
        self._forward(size)  # compiles its kernels; what it computes is computed again by the graph
        captured = self._try_capture(size)
        if captured is not None:
            self.num_late_captures += 1
            logger.info("CUDA graph of %s captured while serving", size)
            self._late[size] = captured
            if len(self._late) > _MAX_LATE_GRAPHS:
                log_once(
                    "engine", "more step sizes than CUDA graphs: the least recently used is dropped", logging.WARNING
                )
                self._late.popitem(last=False)
        return captured

    def _try_capture(self, size: Size) -> tuple[torch.cuda.CUDAGraph, Tensor] | None:
        """None: the capture failed (out of memory, say), and the size runs eagerly from then on."""
        try:
            return self._capture(size)
        except RuntimeError as error:
            logger.debug("CUDA graph capture of %s failed, it is tried again after an eager run: %r", size, error)
        try:
            self._pool = None  # the failed capture may not have left it
            self._forward(size)  # compiles kernels, which cannot be done in a capture
            return self._capture(size)
        except RuntimeError as error:
            logger.warning("CUDA graph capture of %s failed, it runs eagerly: %r", size, error)
            self._failed.add(size)
            return None

    def _capture(self, size: Size) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        # Not torch's context manager: it collects garbage, empties the memory cache and synchronizes.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            out = self._forward(size)
        finally:
            graph.capture_end()
        return graph, out
