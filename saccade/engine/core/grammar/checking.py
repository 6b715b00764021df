"""Check grammars of clients in child processes before they are compiled in this one.

A schema of 1 KB can occupy the library for hours, and a grammar of 40 KB can overflow the stack; a thread cannot be
stopped, nor survive that. So every new grammar is compiled in a child process first, with a deadline and a memory
limit.

    new grammar -> quick lane: check for 0.25 s, compile  -- it takes longer -->  slow lane: check, compile

Most grammars compile in milliseconds. So that slow grammars do not delay them, each lane has its own checking
processes and threads. No thread waits for a check.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from saccade.engine.core.grammar.vocabulary import Vocabulary
from saccade.errors import RequestError
from saccade.workers.fork_server import ForkServer
from saccade.workers.messages import encode_error, receive, send
from saccade.workers.pool import Job, Worker, WorkerPool
from saccade.workers.sandbox import ResourceLimits, seal

_STACK_BYTES = 2**28
"""Stack of a compiling thread. The deepest grammars within a request's size limits use up to 64 MB."""
_CHECK_STACK_BYTES = _STACK_BYTES * 7 // 8
_CHECK_MEMORY_BYTES = 2**32
"""Address space of a checking process."""
_CHECK_NICENESS = 10
"""Niceness of a checking process: a hostile grammar may use a CPU core for seconds, and running requests come first."""
_CHECK_CPU_S = 3600
"""CPU time after which a checking process is replaced."""

_stack_lock = threading.Lock()
_T = TypeVar("_T")


def make_checker(config: dict[str, Any]) -> tuple[Callable[[socket.socket], None], None]:
    """The `initialize` function of the fork server."""
    return partial(_check_grammars, Vocabulary(**config)), None


def _check_grammars(vocabulary: Vocabulary, connection: socket.socket) -> None:
    """Compile one grammar after another and reply with the error, if any."""
    resource.setrlimit(resource.RLIMIT_AS, (_CHECK_MEMORY_BYTES, _CHECK_MEMORY_BYTES))
    os.nice(_CHECK_NICENESS)
    seal(ResourceLimits(memory_bytes=_CHECK_MEMORY_BYTES, file_bytes=0, cpu_s=_CHECK_CPU_S))
    while (request := receive(connection)) is not None:
        with ThreadPoolExecutor(1) as executor:
            compiled = _with_stack(_CHECK_STACK_BYTES, lambda: executor.submit(vocabulary.check, **request))
        try:
            compiled.result()
            send(connection, {})
        except RequestError as error:
            send(connection, encode_error(error))


class _NoChannel:
    """No shared memory: grammars are sent through the socket."""

    fds = ()


class SlowGrammarError(RequestError):
    """A check in the quick lane exceeded its time."""


class _Check(Job[_NoChannel, bool]):
    """Compiles a grammar in a child process, which may crash or be killed."""

    def __init__(self, kind: str, source: str, timeout_s: float, *, is_quick: bool) -> None:
        super().__init__()
        self.timeout_s, self._message = timeout_s, {"kind": kind, "source": source}
        self._is_quick = is_quick
        self.max_crashes = 1 if is_quick else Job.max_crashes

    def send(self, worker: Worker[_NoChannel]) -> None:
        send(worker.connection, self._message)

    def receive(self, message: dict[str, Any], worker: Worker[_NoChannel]) -> bool:
        return True

    def error(self, reason: str) -> RequestError:
        kind = SlowGrammarError if self._is_quick else RequestError
        return kind(f"structured.{self._message['kind']}: it is too large or too complex to be compiled")

    def __str__(self) -> str:
        return f"the compilation of a {self._message['kind']}"


class Lane:
    """Processes that check grammars, and threads that compile checked grammars."""

    def __init__(self, fork_server: ForkServer, num_workers: int, check_s: float, *, is_quick: bool) -> None:
        self._check_s, self._is_quick = check_s, is_quick
        self._checkers = WorkerPool(fork_server, num_workers, _NoChannel)
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="grammar")

    @property
    def checker_pids(self) -> list[int]:
        """Process ids of the running checking processes."""
        return self._checkers.pids

    def check(self, kind: str, source: str) -> Future[bool]:
        """Compile a grammar in a child process."""
        return self._checkers.submit(_Check(kind, source, self._check_s, is_quick=self._is_quick))

    def run(self, call: Callable[[], None]) -> None:
        """Call `call` in a thread of this lane, which has a large stack. No effect if the lane is closed."""
        with contextlib.suppress(RuntimeError):
            _with_stack(_STACK_BYTES, lambda: self._threads.submit(call))

    def close(self) -> None:
        """Stop threads and child processes."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._checkers.close()


def _with_stack(num_bytes: int, start: Callable[[], _T]) -> _T:
    """Call `start`, which starts a thread; the thread gets a stack of this size."""
    with _stack_lock:
        before = threading.stack_size(num_bytes)
        try:
            return start()
        finally:
            threading.stack_size(before)
