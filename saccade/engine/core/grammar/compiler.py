"""Compile grammars off the core's thread, and cache the most recently used ones."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import CancelledError, Future
from functools import partial
from typing import Any

from saccade.engine.core.grammar.checking import Lane, SlowGrammarError, make_checker
from saccade.engine.core.grammar.state import GrammarState
from saccade.engine.core.grammar.vocabulary import Vocabulary, source_of
from saccade.engine.structured import StructuredOutput
from saccade.errors import RequestError
from saccade.processor.tokenizer import Tokenizer
from saccade.workers.fork_server import ForkServer

_QUICK_CHECK_S = 0.25
"""Time limit of a check in the quick lane."""
_OWN_LEXER_S = 0.02
"""A grammar that compiles in less time gets several lexers."""


class CompiledGrammar:
    """A compiled grammar.

    States copied from one matcher share its lexer, which is locked while its automaton grows. A grammar that compiles
    quickly gets several matchers, so that masks of requests with the same schema are computed in parallel.
    """

    def __init__(self, key: bytes, vocabulary: Vocabulary, structured: StructuredOutput) -> None:
        self.key, self.vocabulary, self.kind, self._structured = key, vocabulary, structured.kind, structured
        self.waiting: list[Future[GrammarState]] = []
        """Futures of requests that wait until it is compiled."""
        self.check: Future[bool] | None = None
        """The check in a child process, while it runs."""
        self.is_growing = False
        self.is_broken = False
        """Whether a lexer, which several states share, exceeded a limit."""
        self._matchers: list[Any] = []
        self._seconds = 0.0
        self._num_states = 0

    @property
    def is_compiled(self) -> bool:
        """Whether `new_state` can be called."""
        return bool(self._matchers)

    def can_grow(self, max_matchers: int) -> bool:
        """Whether compiling another matcher is worth its time."""
        return self._seconds < _OWN_LEXER_S and len(self._matchers) < max_matchers

    def source(self) -> str:
        """The grammar in the library's form."""
        return source_of(self._structured)

    def grow(self) -> None:
        """Compile one more matcher."""
        begin = time.perf_counter()
        self._matchers.append(self.vocabulary.compile(self.kind, self.source()))
        self._seconds = time.perf_counter() - begin

    def _break(self) -> None:
        """Have the grammar compiled again for the next request: a lexer, which states share, exceeded a limit."""
        self.is_broken = True

    def new_state(self) -> GrammarState:
        """A state at the start of the text. Takes 0.01 ms."""
        matcher = self._matchers[self._num_states % len(self._matchers)]
        self._num_states += 1
        return GrammarState(matcher, self.vocabulary, self.kind, self._break)


class GrammarCompiler:
    """Compiles grammars in its own threads and caches the most recently used ones. Any thread may use it."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        eos_ids: Iterable[int],
        vocab_size: int,
        timeout_s: float = 5.0,
        num_threads: int = 2,
        max_cached: int = 256,
        max_pending: int = 256,
        max_lexers: int = 8,
    ) -> None:
        """`vocab_size`: the model's; `max_lexers`: maximum per grammar. Takes about a second for 150,000 tokens."""
        config: dict[str, Any] = {
            "tokenizer_json": tokenizer.to_json(),
            "control_ids": sorted(tokenizer.special_ids),
            "eos_ids": sorted(eos_ids),
            "vocab_size": vocab_size,
        }
        self._vocabulary = Vocabulary(**config)
        self._max_cached, self._max_pending, self._max_lexers = max_cached, max_pending, max_lexers
        self._lock = threading.Lock()
        """Guards the cache, the number of pending grammars, and the futures that wait for them."""
        self._cache: OrderedDict[bytes, CompiledGrammar] = OrderedDict()
        self._num_pending = 0
        fork_server = ForkServer(make_checker, config)
        self._quick = Lane(fork_server, num_threads, min(_QUICK_CHECK_S, timeout_s), is_quick=True)
        self._slow = Lane(fork_server, 1, timeout_s, is_quick=False)

    @property
    def num_words(self) -> int:
        """Words of a mask: ceil(vocab_size / 32)."""
        return len(self._vocabulary.allowed_W)

    @property
    def num_cached(self) -> int:
        """Number of cached grammars."""
        return len(self._cache)

    @property
    def checker_pids(self) -> list[int]:
        """Process ids of the running checking processes."""
        return [pid for lane in (self._quick, self._slow) for pid in lane.checker_pids]

    def compile(self, structured: StructuredOutput) -> Future[GrammarState]:
        """Compile a grammar. The future has a state at the start of the text, or a `RequestError` with the reason.

        The grammar is dropped if all futures that wait for it are cancelled.
        """
        key = hashlib.sha256(json.dumps(structured.to_dict()).encode()).digest()
        future: Future[GrammarState] = Future()
        with self._lock:
            grammar = self._cache.get(key)
            is_new = grammar is None or grammar.is_broken
            if grammar is None or is_new:
                if self._num_pending >= self._max_pending:
                    future.set_exception(RequestError("too many grammars are waiting to be compiled. Try again later"))
                    return future
                grammar = self._cache[key] = CompiledGrammar(key, self._vocabulary, structured)
                self._num_pending += 1
            self._cache.move_to_end(key)
            while len(self._cache) > self._max_cached:
                self._cache.popitem(last=False)
            is_compiled = grammar.is_compiled
            if not is_compiled:
                grammar.waiting.append(future)
        if is_compiled:
            future.set_result(grammar.new_state())
            self._grow(grammar)
            return future
        future.add_done_callback(partial(self._leave, grammar))
        if is_new:
            self._quick.run(partial(self._check, grammar, self._quick))
        return future

    def close(self) -> None:
        """Stop the threads and child processes. Cancels pending grammars."""
        self._quick.close()
        self._slow.close()

    def _check(self, grammar: CompiledGrammar, lane: Lane) -> None:
        try:
            grammar.check = lane.check(grammar.kind, grammar.source())
        except Exception as error:
            self._end(grammar, error)
            return
        grammar.check.add_done_callback(partial(self._checked, grammar, lane))
        if not grammar.waiting:
            grammar.check.cancel()

    def _checked(self, grammar: CompiledGrammar, lane: Lane, check: Future[bool]) -> None:
        """Continue after a check. Runs in the thread that manages the checking processes."""
        error = CancelledError() if check.cancelled() or not grammar.waiting else check.exception()
        if error is None:
            lane.run(partial(self._compile, grammar))
        elif isinstance(error, SlowGrammarError):
            self._slow.run(partial(self._check, grammar, self._slow))
        else:
            self._end(grammar, error)

    def _compile(self, grammar: CompiledGrammar) -> None:
        """Compile a checked grammar; if that is quick, with a matcher for each request that waits for it."""
        try:
            grammar.grow()
            while grammar.can_grow(min(self._max_lexers, len(grammar.waiting))):
                grammar.grow()
        except BaseException as error:
            self._end(grammar, error)
        else:
            self._end(grammar, None)

    def _end(self, grammar: CompiledGrammar, error: BaseException | None) -> None:
        """Set the result of all futures that wait for a grammar."""
        with self._lock:
            waiting, grammar.waiting = grammar.waiting, []
            self._num_pending -= 1
            if error is not None:
                self._remove(grammar)
        for future in waiting:
            if not future.set_running_or_notify_cancel():
                continue
            if error is None:
                future.set_result(grammar.new_state())
            else:
                future.set_exception(copy.copy(error))  # each future gets its own traceback

    def _leave(self, grammar: CompiledGrammar, future: Future[GrammarState]) -> None:
        """Drop a grammar that is not compiled when its last future is cancelled.

        If its check is running, it is dropped when the check ends.
        """
        if not future.cancelled():
            return
        with self._lock:
            if future not in grammar.waiting:
                return
            grammar.waiting.remove(future)
            is_last = not grammar.waiting
            if is_last:
                self._remove(grammar)
        if is_last and grammar.check is not None:
            grammar.check.cancel()

    def _remove(self, grammar: CompiledGrammar) -> None:
        if self._cache.get(grammar.key) is grammar:
            del self._cache[grammar.key]

    def _grow(self, grammar: CompiledGrammar) -> None:
        """Start compiling another matcher of a cached grammar, if that is worth its time."""
        with self._lock:
            if grammar.is_growing or not grammar.can_grow(self._max_lexers):
                return
            grammar.is_growing = True
        self._quick.run(partial(self._compile_more, grammar))

    @staticmethod
    def _compile_more(grammar: CompiledGrammar) -> None:
        with contextlib.suppress(RequestError):  # it has a matcher that works
            grammar.grow()
        grammar.is_growing = False
