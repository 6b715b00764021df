"""The open requests of an engine, and the thread that follows each to its end.

    open -> OpenRequest -> preprocessed -> core -> outputs -> inbox -> OpenRequest -> callback

Any thread opens and cancels. One thread starts the requests whose prompts are ready and calls back with their output.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial

from saccade.engine.core.deadlines import Deadlines
from saccade.engine.core.messages import CoreInfo, Message
from saccade.engine.frontend.core_client import Connect, CoreClient
from saccade.engine.frontend.open_request import OpenRequest
from saccade.engine.request import Failure, RequestOutput, merge_outputs
from saccade.errors import RequestError

logger = logging.getLogger(__name__)

Command = Callable[[], None]
Outputs = Sequence[RequestOutput]

_CLOSED = Failure("running", "the engine was closed", "engine_stopped")


class OpenRequests:
    """Every accepted request ends exactly once: finished, cancelled, or failed with a reason. Thread-safe."""

    def __init__(self, connect: Connect) -> None:
        """`connect` starts the core."""
        self._ids = itertools.count()
        self._open: dict[str, OpenRequest] = {}
        self._replies: dict[str, Future[None]] = {}
        """Messages that the core has not answered, by reply id."""
        self._lock = threading.Lock()
        """Guards `_failure`, `_is_closed`, `_open` and what is added to `_replies`."""
        self._failure: Failure | None = None
        self._is_closed, self._is_serving = False, True
        self._pid = os.getpid()
        self._inbox = Inbox()
        self._deadlines = Deadlines()
        """Deadlines of requests in preprocessing, used by the front end's thread; the core has those of the others."""
        self._has_stopped = threading.Event()
        self._connect = partial(
            connect, self._inbox.put, lambda failure: self._inbox.put(partial(self._fail_all, failure))
        )
        self.core: CoreClient = self._connect()
        """The core that serves the requests now."""
        self._thread = threading.Thread(target=self._serve, name="saccade-front", daemon=True)
        self._thread.start()

    @property
    def info(self) -> CoreInfo:
        """Limits and sizes of the core."""
        return self.core.info

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._open)

    # -------------------------------------------------------------- from any thread

    def open(self, make: Callable[[CoreClient], OpenRequest]) -> OpenRequest:
        """Open the request that `make` returns for the core. RequestError: the core has stopped, or the id is taken."""
        with self._lock:
            self.check_open()
            opened = make(self.core)
            if opened.id in self._open:
                raise RequestError(f"a request with the id {opened.id} is open. Use another one")
            self._open[opened.id] = opened
        if opened.limits_s and not opened.prompt.done():
            self._inbox.put(partial(self._set_deadline, opened))
        opened.prompt.add_done_callback(lambda _: self._inbox.put(opened.start))
        return opened

    def all(self) -> list[OpenRequest]:
        """Requests that have not ended."""
        with self._lock:
            return list(self._open.values())

    def cancel(self, request_id: str) -> None:
        """Cancel a request; its last output has the finish reason `cancelled`. No effect if it has ended."""
        opened = self._open.get(request_id)
        if opened is not None:
            opened.cancel()

    def post(self, command: Command) -> None:
        """Run a command in the thread that calls back. RuntimeError: the engine is closed."""
        with self._lock:
            if self._is_closed:
                raise RuntimeError("the engine is closed")
            self._inbox.put(command)

    def send(self, message: Message) -> None:
        """Send a message that has no answer to the core."""
        self.core.send(message)

    def ask(self, message_of: Callable[[str], Message]) -> Future[None]:
        """Send a message with a reply id. The future gets the core's answer; a refusal is a RequestError."""
        reply: Future[None] = Future()
        reply_id = f"reply-{next(self._ids)}"
        with self._lock:
            self.check_open()
            self._replies[reply_id] = reply
        self.core.send(message_of(reply_id))
        return reply

    def check_open(self) -> None:
        """Raise RequestError if no request can be opened."""
        if os.getpid() != self._pid:
            raise RequestError("the engine was loaded before a fork, which its thread does not survive. Load one here")
        if self._failure is not None:
            raise RequestError(self._failure.message)

    def new_id(self) -> str:
        """An id that no other request has."""
        return f"request-{next(self._ids)}"

    def forget(self, request_id: str) -> None:
        """Forget a request that has ended."""
        with self._lock:
            self._open.pop(request_id, None)

    # -------------------------------------------------------------- the front end's thread

    def _serve(self) -> None:
        while self._is_serving:
            next_at = self._deadlines.next_at
            item = self._inbox.get(None if next_at == math.inf else max(0.0, next_at - time.perf_counter()))
            try:
                self._expire()
                if callable(item):
                    item()
                elif item is not None:
                    self.deliver(item)
            except BaseException:
                logger.exception("a command of the front end failed")

    def deliver(self, outputs: Iterable[RequestOutput]) -> None:
        """Give the outputs of the core to their requests."""
        for output in outputs:
            if (opened := self._open.get(output.request_id)) is not None:
                opened.on_output(output)
            elif (reply := self._replies.pop(output.request_id, None)) is not None:
                _answer(reply, output.failure)

    def _set_deadline(self, opened: OpenRequest) -> None:
        self._deadlines.add(opened.submitted_at + min(opened.limits_s), opened.id, "preprocessing")
        self._deadlines.prune(len(self._open), self._open.__contains__)

    def _expire(self) -> None:
        """End requests that are still being preprocessed when their deadline passes."""
        for request_id, _ in self._deadlines.pop_due(time.perf_counter()):
            if (opened := self._open.get(request_id)) is not None:
                opened.expire()

    def _fail_all(self, failure: Failure) -> None:
        with self._lock:
            self._failure = failure
            opened, replies = list(self._open.values()), list(self._replies.values())
            self._replies.clear()
        for request in opened:
            request.end_early("failed", failure)
        for reply in replies:
            _answer(reply, failure)
        self._has_stopped.set()

    # -------------------------------------------------------------- a core that stops

    @property
    def failure(self) -> Failure | None:
        """Why requests are refused; None while the core serves."""
        return self._failure

    @property
    def has_failed(self) -> bool:
        """Whether the core has died or the engine is closed. True before the first open request is failed for it."""
        return self._failure is not None

    def wait_until_stopped(self, timeout_s: float | None = None) -> bool:
        """Wait until the core has died or the engine is closed, and every request has ended. False: timeout."""
        return self._has_stopped.wait(timeout_s)

    def restart(self) -> None:
        """Start a new core in place of one that died."""
        if not self._has_stopped.is_set() or self._is_closed:
            raise RuntimeError("restart replaces a core that has stopped by itself")
        self.core.close()
        self.core = self._connect()
        with self._lock:
            self._failure = None
            self._has_stopped.clear()

    def close(self) -> bool:
        """Stop the core and the thread; open requests fail. False: closed already, or in a forked child."""
        if self._is_closed or os.getpid() != self._pid:
            return False
        if threading.current_thread() is self._thread:
            raise RuntimeError("the engine cannot be closed from one of its callbacks")
        with self._lock:
            self._is_closed = True
        self.core.close()
        self._inbox.put(self._stop)
        self._thread.join()
        return True

    def _stop(self) -> None:
        self._is_serving = False
        self._fail_all(_CLOSED)


def _answer(reply: Future[None], failure: Failure | None) -> None:
    if failure is None:
        reply.set_result(None)
    else:
        reply.set_exception(RequestError(failure.message))


class Inbox:
    """Commands of other threads and outputs of the core. Any thread may put, the front end's thread gets."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Command | Outputs] = queue.SimpleQueue()
        self._next: Command | None = None
        """A command that was found while outputs were merged."""
        self.put = self._queue.put

    def get(self, timeout_s: float | None = None) -> Command | Iterable[RequestOutput] | None:
        """Wait for the next command or outputs. None: neither arrived in time."""
        if self._next is not None:
            command, self._next = self._next, None
            return command
        try:
            item = self._queue.get(timeout=timeout_s)
        except queue.Empty:
            return None
        return item if callable(item) or self._queue.empty() else self._merged(item)

    def _merged(self, outputs: Outputs) -> Iterable[RequestOutput]:
        """These outputs and all later ones up to the next command, merged by request.

        A thread that is slower than the core detokenizes and calls back once for several steps, and so catches up.
        """
        merged = {output.request_id: output for output in outputs}
        while True:
            try:
                item = self._queue.get_nowait()
            except queue.Empty:
                return merged.values()
            if callable(item):
                self._next = item
                return merged.values()
            for output in item:
                earlier = merged.get(output.request_id)
                merged[output.request_id] = output if earlier is None else merge_outputs(earlier, output)
