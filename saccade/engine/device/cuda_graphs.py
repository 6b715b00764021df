"""CUDA graphs of forward passes by size: one launch instead of hundreds.

A step is rounded up to one of a declared set of sizes (`step_inputs.py`). Each capture takes about 30 ms for a whole
model, so only a part of them is captured before the engine reports ready. The others are postponed: they run as a
larger size until the engine is idle for a moment, or until that has cost about as much as the captures take.

A size outside the set (drafts of many requests, for example) is captured when it first occurs, which delays that step
and is counted. A fixed number of late captures is kept; the least recently used one is dropped.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from saccade.log import log_once

logger = logging.getLogger(__name__)

_MAX_LATE_GRAPHS = 64
"""Maximum number of graphs captured while serving."""
_WASTE_BEFORE_CAPTURE = 4096
"""Tokens of padding after which a postponed size is captured although the engine is busy.

To compute them takes a model of 3B parameters about 30 ms, as long as the capture.
"""

Size = TypeVar("Size", bound=Hashable)


class _Captured(NamedTuple):
    graphs: list[torch.cuda.CUDAGraph]
    """One graph for each part, in order."""
    out: Tensor


class CudaGraphs(Generic[Size]):
    """CUDA graphs of one forward function, by size. All run on one stream and share one memory pool."""

    def __init__(
        self,
        forward: Callable[[Size], Iterator[Tensor | None]],
        *,
        agree: Callable[[bool], bool] | None = None,
    ) -> None:
        """`forward` queues the work of a size on the current stream, in one or several parts.

        It yields None after each part but the last, and the output after the last. Each part is one CUDA graph.
        `agree`: for ranks that run `forward` together, whether a capture succeeded on all of them. They capture no size
        that was not declared.
        """
        self._forward, self._agree = forward, agree
        self._declared: dict[Size, _Captured] = {}
        self._late: OrderedDict[Size, _Captured] = OrderedDict()
        self._failed: set[Size] = set()
        self._covers: dict[Size, Size] = {}  # the captured size that runs instead of one that is not captured
        self._postponed: Counter[Size] = Counter()  # tokens of padding so far, of the sizes that are to be captured
        self._waste: dict[Size, int] = {}  # tokens of padding of each use
        self._pool: Any = None
        self.num_late_captures = 0
        """Number of sizes captured while serving."""
        self.num_eager_runs = 0
        """Number of runs of sizes that could not be captured."""

    @property
    def num_captured(self) -> int:
        """Number of sizes captured so far."""
        return len(self._declared) + len(self._late)

    def capture(self, size: Size) -> None:
        """Capture a size before serving. Its kernels must be compiled, or the input buffers hold a valid step of it."""
        captured = self._try_capture(size)
        if captured is not None:
            self._declared[size] = captured

    # -------------------------------------------------------------- postponed captures

    def postpone(self, size: Size, cover: Size, waste: int) -> None:
        """Capture a size later. Until then `cover` runs instead, which is captured and at least as large.

        `waste`: the tokens of padding that this adds to a run.
        """
        self._covers[size], self._waste[size] = cover, max(1, waste)
        self._postponed[size] = 0

    def fitting(self, size: Size) -> Size:
        """The size to run: `size`, or the one that covers it. Inputs are filled for the size that is returned."""
        if size not in self._covers:
            return size
        if size in self._postponed:
            self._postponed[size] += self._waste[size]
            if self._postponed[size] >= _WASTE_BEFORE_CAPTURE:
                self._capture_postponed(size)
                self.num_late_captures += 1
        return self._covers.get(size, size)

    def capture_next(self) -> bool:
        """Capture the postponed size that has wasted most. False: there is none."""
        if not self._postponed:
            return False
        [(size, _)] = self._postponed.most_common(1)
        self._capture_postponed(size)
        return True

    def _capture_postponed(self, size: Size) -> None:
        """Capture a postponed size. If that fails, its cover runs instead for good."""
        del self._postponed[size]
        try:
            self._declared[size] = self._capture_together(size)
            del self._covers[size]
        except RuntimeError as error:
            self._pool = None  # the failed capture may still use it
            logger.warning("CUDA graph capture of %s failed, it runs as %s: %r", size, self._covers[size], error)

    # -------------------------------------------------------------- run

    def run(self, size: Size) -> Tensor:
        """Run `forward` on the contents of its input buffers. The next run overwrites the output."""
        return _last(self.run_parts(size))

    def run_parts(self, size: Size) -> Iterator[Tensor | None]:
        """Run a part for each item that is consumed; see `__init__`. No other size may run between the parts of one."""
        captured = self._declared.get(size) or self._find_late(size)
        if captured is None:
            self.num_eager_runs += 1
            yield from self._forward(size)
            return
        for graph in captured.graphs[:-1]:
            graph.replay()
            yield None
        captured.graphs[-1].replay()
        yield captured.out

    def _find_late(self, size: Size) -> _Captured | None:
        if size in self._late:
            self._late.move_to_end(size)
            return self._late[size]
        if size in self._failed or self._agree is not None:
            return None
        _last(self._forward(size))  # compiles its kernels; the graph then computes the same
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
        """Capture a size. None: it failed (out of memory, for example), and the size runs eagerly from now on."""
        try:
            return self._capture_together(size)
        except RuntimeError as error:
            logger.debug("CUDA graph capture of %s failed, it is tried again after an eager run: %r", size, error)
        try:
            self._pool = None  # the failed capture may still use it
            _last(self._forward(size))  # compiles kernels, which cannot be done in a capture
            return self._capture_together(size)
        except RuntimeError as error:
            logger.warning("CUDA graph capture of %s failed, it runs eagerly: %r", size, error)
            self._failed.add(size)
            return None

    def _capture_together(self, size: Size) -> _Captured:
        """Capture a size. RuntimeError: that failed, here or on another rank."""
        if self._agree is None:
            return self._capture(size)
        captured: _Captured | None = None
        with contextlib.suppress(RuntimeError):
            captured = self._capture(size)
        if not self._agree(captured is not None) or captured is None:
            raise RuntimeError("a rank could not capture it")
        return captured

    def _capture(self, size: Size) -> _Captured:
        parts, graphs = self._forward(size), []
        out: Tensor | None = None
        while out is None:
            graphs.append(self._begin_capture())
            try:
                out = next(parts)
            except BaseException:
                with contextlib.suppress(RuntimeError):  # it only says that the capture failed, not why
                    graphs[-1].capture_end()
                raise
            graphs[-1].capture_end()
        return _Captured(graphs, out)

    def _begin_capture(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        # Each thread has its own cuBLAS handle. It needs a CUDA context and cannot be created in a capture.
        torch.cuda.current_stream().query()
        torch.cuda.current_blas_handle()  # type: ignore[no-untyped-call]
        # Torch's context manager would collect garbage, empty the memory cache and synchronize.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        return graph


def _last(parts: Iterator[Tensor | None]) -> Tensor:
    """Run all parts; returns the output of the last one."""
    *_, out = parts
    assert out is not None, "the last part returns the output"
    return out
