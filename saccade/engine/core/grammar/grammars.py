"""The interface of grammars that an engine core uses: compile, then compute masks."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from saccade.engine.core.grammar.compiler import GrammarCompiler
from saccade.engine.core.grammar.masks import GrammarMasks, MaskPool
from saccade.engine.core.grammar.state import GrammarState
from saccade.engine.structured import StructuredOutput


class Grammars:
    """Compiles the grammars of an engine core off its thread, and computes their masks in parallel."""

    def __init__(self, make_compiler: Callable[[], GrammarCompiler]) -> None:
        self._make_compiler = make_compiler
        self._lock = threading.Lock()
        self._compiler: GrammarCompiler | None = None
        self._pool: MaskPool | None = None
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="grammars")

    def compile(self, structured: StructuredOutput) -> Future[GrammarState]:
        """Compile a grammar. The future has a state at the start of the text, or a `UserError` with the reason.

        Cancelling the future stops the compilation.
        """
        if self._compiler is not None:
            return self._compiler.compile(structured)
        future: Future[GrammarState] = Future()
        self._executor.submit(self._compile, structured, future)
        return future

    def prepare(self) -> None:
        """Set up the compiler in a thread, so that the first request does not wait for it.

        Takes two seconds for 150,000 tokens. No effect without llguidance.
        """
        if importlib.util.find_spec("llguidance") is not None:
            self._executor.submit(self._open_compiler)

    def _open_compiler(self) -> GrammarCompiler:
        with self._lock:
            if self._compiler is None:
                self._compiler, self._pool = self._make_compiler(), MaskPool()
            return self._compiler

    def _compile(self, structured: StructuredOutput, future: Future[GrammarState]) -> None:
        """Compile a grammar once the compiler is set up."""
        try:
            compiled = self._open_compiler().compile(structured)
        except BaseException as error:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
            return
        future.add_done_callback(lambda done: compiled.cancel() if done.cancelled() else None)
        compiled.add_done_callback(lambda done: _copy_result(done, future))

    def masks(self, states: Mapping[str, GrammarState]) -> Future[GrammarMasks]:
        """Compute the masks of the next tokens. The states, by request id, may not be used until the future is done."""
        assert self._compiler is not None, "a state was compiled"
        assert self._pool is not None, "a state was compiled"
        mask_NW = np.empty((len(states), self._compiler.num_words), np.int32)
        computed: Future[GrammarMasks] = Future()
        filled = self._pool.fill(mask_NW, list(states.values()))
        filled.add_done_callback(lambda done: _pass_on(done, computed, GrammarMasks(tuple(states), mask_NW)))
        return computed

    def close(self) -> None:
        """Stop threads and child processes."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        if self._compiler is not None:
            self._compiler.close()
        if self._pool is not None:
            self._pool.close()


def _pass_on(done: Future[None], computed: Future[GrammarMasks], masks: GrammarMasks) -> None:
    if (error := done.exception()) is not None:
        computed.set_exception(error)
    else:
        computed.set_result(masks)


def _copy_result(done: Future[GrammarState], future: Future[GrammarState]) -> None:
    if done.cancelled() or not future.set_running_or_notify_cancel():
        return
    if (error := done.exception()) is not None:
        future.set_exception(error)
    else:
        future.set_result(done.result())
