"""Compute the token masks of many requests in parallel, off the core's thread."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from saccade.engine.core.grammar.state import GrammarState
from saccade.engine.core.grammar.vocabulary import library

if TYPE_CHECKING:
    from saccade.engine.core.grammar.grammars import Grammars


class MaskPool:
    """Computes the masks of many states in parallel, off the caller's thread."""

    def __init__(self, num_threads: int | None = None) -> None:
        """`num_threads` is by default half of the CPU cores, at most 8."""
        num_threads = num_threads or max(1, min(8, (os.cpu_count() or 2) // 2))
        self._library_executor = library().LLExecutor(num_threads)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="masks")

    def fill(self, out_NW: NDArray[np.int32], states: Sequence[GrammarState]) -> Future[None]:
        """Write the mask of each state's next token into its row of `out_NW`, which is contiguous.

        Neither states nor rows may be used until the future is done. Then a state with `error` set has failed.
        """
        assert out_NW.flags.c_contiguous, "masks are written through a pointer"
        return self._thread.submit(self._fill, out_NW, states)

    def close(self) -> None:
        """Stop the thread."""
        self._thread.shutdown()

    def _fill(self, out_NW: NDArray[np.int32], states: Sequence[GrammarState]) -> None:
        assert len(states) == len(out_NW), "one row per state"
        work = [(state, row) for row, state in enumerate(states) if state.error is None]
        work.sort(key=lambda entry: entry[0].lexer_id)  # neighbours run in one thread, so none waits for a lexer
        try:
            self._compute(out_NW, work)
        except BaseException:  # a panic is no Exception, and does not say which mask failed
            for state, row in work:
                try:
                    self._compute(out_NW, [(state, row)])
                except BaseException as error:
                    state.fail_by(error)
        for row, state in enumerate(states):
            if state.error is not None:
                out_NW[row] = 0
        finish_masks(out_NW, states)

    def _compute(self, out_NW: NDArray[np.int32], work: Sequence[tuple[GrammarState, int]]) -> None:
        """Write the masks of (state, row) pairs."""
        rows_at = (out_NW.ctypes.data, out_NW.shape[1] * 4, len(out_NW))
        self._library_executor.unsafe_compute_mask_ptr([(state.matcher, row) for state, row in work], *rows_at)


def finish_masks(out_NW: NDArray[np.int32], states: Sequence[GrammarState]) -> None:
    """Remove control tokens, which a Lark grammar can name, and fail states that no token can follow."""
    if not states:
        return
    vocabulary = states[0].vocabulary
    np.bitwise_and(out_NW, vocabulary.allowed_W, out=out_NW)
    is_empty_N = np.logical_not(out_NW.any(axis=1))
    out_NW[is_empty_N] = vocabulary.eos_W
    for row, state in enumerate(states):
        state.check()
        if is_empty_N[row]:
            state.fail("no token can follow")


class GrammarMasks(NamedTuple):
    """Allowed next tokens of requests with a grammar."""

    request_ids: tuple[str, ...]
    words: NDArray[np.int32]
    """[requests, ceil(vocabulary / 32)]: one bit per token."""


class NextMasks:
    """Masks of the next tokens of requests, from when their previous tokens are read until they are sampled."""

    def __init__(self, grammars: Grammars, clock: Callable[[], float]) -> None:
        self._grammars, self._clock = grammars, clock
        self._computed: dict[str, Future[GrammarMasks]] = {}  # by request id; several share one future
        self.last_duration_s = 0.0
        """Time that the last masks took."""

    def start(self, states: Mapping[str, GrammarState]) -> None:
        """Start computing the masks of requests that have none. Until they are computed the states may not be used."""
        missing = {request_id: state for request_id, state in states.items() if request_id not in self._computed}
        if missing:
            begin, computed = self._clock(), self._grammars.masks(missing)
            computed.add_done_callback(lambda _: self._set_duration(self._clock() - begin))
            self._computed |= dict.fromkeys(missing, computed)

    def are_ready(self, request_ids: Iterable[str]) -> bool:
        """Whether the masks of all these requests are computed."""
        return all(one in self._computed and self._computed[one].done() for one in request_ids)

    def take(self, request_ids: Sequence[str]) -> GrammarMasks | None:
        """The masks of requests that are sampled now. Waits until they are computed."""
        found = [self._computed.pop(request_id).result() for request_id in request_ids]
        if not found or (all(masks is found[0] for masks in found) and len(found) == len(found[0].request_ids)):
            return found[0] if found else None
        rows = [masks.words[masks.request_ids.index(one)] for one, masks in zip(request_ids, found, strict=True)]
        return GrammarMasks(tuple(request_ids), np.stack(rows))

    def forget(self, request_id: str) -> None:
        """Drop the mask of an ended request."""
        self._computed.pop(request_id, None)

    def _set_duration(self, seconds: float) -> None:
        self.last_duration_s = seconds
