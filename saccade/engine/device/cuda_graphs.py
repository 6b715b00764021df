"""CUDA graphs of forward passes by size: one launch instead of hundreds.

A step is rounded up to one of a declared set of sizes, all of which are captured before the engine reports ready; capturing takes about
25 ms each for a whole model. A size outside the set (drafts of more requests than usual, say) is captured when it first occurs, which
delays that step and is counted. Of those late ones a fixed number is kept; the least recently used is dropped, a declared one never.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from saccade.log import log_once

logger = logging.getLogger(__name__)

STEP_TOKENS = (16, 32, 64, 96, 128, 192, 256, 384, 512, 640, 768, 896, 1024, 1280, 1536, 2048, 3072, 4096, 4352)
"""Tokens of captured steps with prefill. Larger steps keep the GPU busy long enough for the host to launch them."""
MAX_PREFILL = 4096
"""Prefill tokens of a step while no request decodes."""
MAX_CHUNKS = 32
"""Prefill requests of a step. All captured steps with prefill have room for so many: one without tokens costs next to nothing."""
MAX_DRAFTING = 8
"""Running requests up to which drafts pay on a GPU (`prompt_lookup.py`)."""
_MIXED_SAMPLES = 64
"""Samples of captured steps with prefill and decode, where not all requests decode."""
_MAX_LATE_GRAPHS = 64
"""Graphs captured after start."""

Size = TypeVar("Size", bound=Hashable)


class StepSize(NamedTuple):
    """Size of a captured step: upper bounds of its tokens, requests and samples. Contexts may have any length."""

    num_tokens: int
    num_decode: int
    """Decode requests, of one token each."""
    num_chunks: int
    """Prefill requests. 0: decode alone, which samples after every token."""
    num_samples: int

    @property
    def num_requests(self) -> int:
        """Requests computed."""
        return self.num_decode + self.num_chunks


def step_size(
    *, num_decode: int, num_tokens: int, num_chunks: int, num_samples: int, max_requests: int
) -> StepSize | None:
    """The captured size for a step of this many decode requests, prefill tokens, chunks and samples. None: it runs eagerly."""
    if num_chunks == 0:
        tokens = _round_decode(num_decode)
        return StepSize(tokens, tokens, 0, tokens)
    num_tokens += num_decode
    if num_tokens > STEP_TOKENS[-1] or num_chunks > MAX_CHUNKS:
        return None
    tokens = STEP_TOKENS[bisect_left(STEP_TOKENS, num_tokens)]
    if num_decode == 0:
        return StepSize(tokens, 0, MAX_CHUNKS, _round_samples(num_samples))
    return StepSize(tokens, max_requests, MAX_CHUNKS, _round_mixed_samples(num_samples, max_requests))


def prefill_beside_decode(budget: int, num_decode: int) -> int:
    """Up to `budget` prefill tokens which, with so many decode tokens, fill a captured step. Without decode there is no padding."""
    fitting = [tokens - num_decode for tokens in STEP_TOKENS if 0 < tokens - num_decode <= budget]
    return fitting[-1] if fitting else budget


def declared_sizes(max_requests: int, max_draft_tokens: int = 0) -> Iterator[StepSize]:
    """Sizes captured before the engine is ready: decode of any number of requests, alone and beside prefill, and drafts of few."""
    for tokens in sorted({_round_decode(n) for n in range(1, max_requests + 1)}):
        yield StepSize(tokens, tokens, 0, tokens)
    for tokens in STEP_TOKENS:
        yield StepSize(tokens, 0, MAX_CHUNKS, MAX_CHUNKS)
        most_samples = min(tokens, max_requests + MAX_CHUNKS)
        for samples in sorted({_round_mixed_samples(n, max_requests) for n in (1, most_samples)}):
            yield StepSize(tokens, max_requests, MAX_CHUNKS, samples)
    drafting = [n * (1 + max_draft_tokens) for n in range(1, min(MAX_DRAFTING, max_requests) + 1)]
    sizes = {(STEP_TOKENS[bisect_left(STEP_TOKENS, tokens)], _round_samples(tokens)) for tokens in drafting}
    yield from (StepSize(tokens, 0, MAX_CHUNKS, n) for tokens, n in sorted(sizes) if n > MAX_CHUNKS)


def _round_samples(num_samples: int) -> int:
    return MAX_CHUNKS if num_samples <= MAX_CHUNKS else 1 << (num_samples - 1).bit_length()


def _round_mixed_samples(num_samples: int, max_requests: int) -> int:
    without_drafts = max_requests + MAX_CHUNKS
    if num_samples <= min(_MIXED_SAMPLES, without_drafts):
        return min(_MIXED_SAMPLES, without_drafts)
    return without_drafts if num_samples <= without_drafts else _round_samples(num_samples)


def _round_decode(num_requests: int) -> int:
    if num_requests <= 8:
        return 1 << (num_requests - 1).bit_length()
    step = 8 if num_requests <= 64 else 32
    return -(-num_requests // step) * step


def largest_step(max_tokens: int, max_requests: int, max_draft_tokens: int) -> tuple[int, int, int]:
    """Tokens, requests and sampled tokens of the largest step, rounded up."""
    decode, most_samples = _round_decode(max_requests), max_requests + MAX_CHUNKS * (1 + max_draft_tokens)
    samples = max(decode, _round_mixed_samples(most_samples, max_requests))
    return max(max_tokens, STEP_TOKENS[-1], decode), max(decode, max_requests + MAX_CHUNKS), samples


class _Captured(NamedTuple):
    graphs: list[torch.cuda.CUDAGraph]
    """The parts, in order."""
    out: Tensor


class CudaGraphs(Generic[Size]):
    """CUDA graphs of one forward function, by size. All run on one stream and share their memory."""

    def __init__(self, forward: Callable[[Size], Tensor], split_before: Sequence[nn.Module] = ()) -> None:
        """`forward` queues the work of a size on the current stream and returns its output. It is captured in parts: another one begins
        with each module of `split_before`."""
        self._forward = forward
        self._split_before = split_before
        self._declared: dict[Size, _Captured] = {}
        self._late: OrderedDict[Size, _Captured] = OrderedDict()
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
        out = self.run_parts(size, 0, len(self._split_before) + 1)
        assert out is not None, "all parts were run"
        return out

    def run_parts(self, size: Size, first: int, num_parts: int) -> Tensor | None:
        """Run some parts of the forward; no other size may run between those of one. Returns the output after the last part. A size that
        is not captured runs whole."""
        captured = self._declared.get(size) or self._find_late(size)
        if captured is None:
            self.num_eager_runs += 1
            return self._forward(size)
        for graph in captured.graphs[first : first + num_parts]:
            graph.replay()
        return captured.out if first + num_parts >= len(captured.graphs) else None

    def _find_late(self, size: Size) -> _Captured | None:
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

    def _try_capture(self, size: Size) -> _Captured | None:
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

    def _capture(self, size: Size) -> _Captured:
        graphs = [self._begin_capture()]

        def split(*_: object) -> None:
            graphs[-1].capture_end()
            graphs.append(self._begin_capture())

        hooks = [module.register_forward_pre_hook(split) for module in self._split_before]
        try:
            out = self._forward(size)
        finally:
            for hook in hooks:  # first: ending a capture that failed may raise
                hook.remove()
            graphs[-1].capture_end()
        return _Captured(graphs, out)

    def _begin_capture(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        # Not torch's context manager: it collects garbage, empties the memory cache and synchronizes.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        return graph
