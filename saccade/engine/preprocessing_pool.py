"""Processes that prepare prompts, seen from the engine: images are decoded in them, not beside it.

    engine  --a description on a socket, bytes in the worker's inbox-->  worker  --a description, bytes in its outbox-->  engine

`saccade.fork_server` starts the workers, and ends them with the engine. They decode what strangers send, so the engine takes nothing
from them on trust. Descriptions are JSON of a bounded size, and checked. Inbox and outbox are files in memory without a name; the
engine reads and writes them but does not map them: memory that another process can cut off would end this one when it is touched,
and pixels could change after they were checked.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import queue
import re
import select
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from saccade.engine.preprocessing_work import Facts, ImageWork, Source, VisualFacts, WorkSetup
from saccade.engine.preprocessing_worker import get_ready
from saccade.engine.processed_images import ProcessedImage
from saccade.errors import ImageError, RequestError
from saccade.fork_server import ForkServer, ForkServerError, decode_error, receive, send
from saccade.processor.conversation import Message
from saccade.shared_memory import SharedMemory

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 2
"""Workers an image or a text may end; then it is its fault, not theirs."""
PATIENCE_S = 600.0
"""A worker that takes longer for one image or text is taken for stuck and ended."""
_KEPT_BYTES = 32 * 2**20
"""Larger inboxes and outboxes are emptied after use; smaller ones stay, since fresh memory is slow."""
_MAX_TOKENS = 2**24
"""No text has more."""
_MAX_ANSWER_BYTES = 2**20
"""No description a worker gives is longer."""
_Result = TypeVar("_Result")
_Number = TypeVar("_Number", np.int64, np.uint8)


class WorkerLostError(Exception):
    """A worker died, hung, or answered what makes no sense."""


class WorkerPool:
    """Does a workshop's work in `num_workers` processes. As many threads may ask at once."""

    def __init__(self, setup: WorkSetup, num_workers: int) -> None:
        """Starts the processes, but does not wait for them."""
        self._num_workers = num_workers
        self._idle: queue.LifoQueue[_Worker | None] = queue.LifoQueue()
        """Workers that have nothing to do, the last used on top. None is one that is to be started."""
        self._lock = threading.Lock()
        self._workers: set[_Worker] = set()
        self._fork_server = ForkServer(get_ready, setup.to_json())
        self._is_closed = False
        self.num_lost = 0
        """Workers that died or had to be ended."""
        # The kernel ends the fork server together with the *thread* that started it, so one thread does that and lives on.
        self._starter = ThreadPoolExecutor(1, "saccade-fork-server")
        self._facts = self._starter.submit(self._start_all)

    @property
    def pids(self) -> list[int]:
        """The worker processes at present."""
        with self._lock:
            return [worker.pid for worker in self._workers]

    @property
    def facts(self) -> Facts:
        """What the fork server has read in the checkpoint folder. Waits for it."""
        return self._facts.result()

    def tokens(self, messages: Sequence[Message]) -> list[int]:
        """As `Workshop.tokens`."""
        vocab_size = self.facts.vocab_size

        def read(answer: dict[str, Any], worker: _Worker) -> list[int]:
            ids = worker.read_outbox((_whole(answer.get("num_tokens"), _MAX_TOKENS),), np.int64)
            if len(ids) and not 0 <= ids.min() <= ids.max() < vocab_size:
                raise WorkerLostError("it gave tokens that are not in the vocabulary")
            found: list[int] = ids.tolist()
            return found

        return self._ask({"messages": messages}, [], read)

    def image(self, work: ImageWork) -> ProcessedImage:
        """As `Workshop.image`."""
        facts = self.facts.of(work.kind)

        def read(answer: dict[str, Any], worker: _Worker) -> ProcessedImage:
            grid, time_step = _check_image(answer, work, facts)
            patches = worker.read_outbox((math.prod(grid), facts.patch_dim), np.uint8)
            patches.flags.writeable = False
            return ProcessedImage(_check_key(worker.hear()), grid, time_step, patches)

        return self._ask({"image": work.describe()}, work.sources, read)

    def close(self) -> None:
        """End all processes; those who wait for one get an error."""
        with self._lock:
            self._is_closed = True
            for worker in self._workers:
                worker.hang_up()
            self._fork_server.kill()
            self._close_idle()
            for _ in range(self._num_workers):
                self._idle.put(None)
        self._starter.shutdown(cancel_futures=True)
        self._fork_server.close()

    def _close_idle(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                if worker := self._idle.get_nowait():
                    worker.close()

    def _ask(
        self,
        question: dict[str, Any],
        sources: Sequence[Source],
        read: Callable[[dict[str, Any], _Worker], _Result],
    ) -> _Result:
        """Have a worker do it; if it is lost over it, another one."""
        for _ in range(MAX_ATTEMPTS):
            worker = self._take()
            try:
                answer = worker.ask(question, sources)
                result = None if "error" in answer else read(answer, worker)
                worker.tidy()
            except WorkerLostError as error:
                self._bury(worker, error)
                continue
            except BaseException as error:
                self._bury(worker, error)
                raise
            self._give_back(worker)
            if result is None:
                raise decode_error(answer, "a prompt could not be prepared")
            return result
        happened = (
            f"preparing it killed its worker process {MAX_ATTEMPTS} times: memory ran out or a decoder crashed. "
            "Send less, or save the image again as PNG or JPEG"
        )
        raise ImageError(happened) if "image" in question else RequestError(f"text: {happened}")

    def _take(self) -> _Worker:
        """An idle worker that is alive."""
        while (worker := self._idle.get()) is not None:
            if worker.is_waiting():
                return worker
            self._bury(worker, WorkerLostError("it died while it had nothing to do"))
        try:
            return self._starter.submit(self._start_worker).result()
        except BaseException:
            self._idle.put(None)
            raise

    def _give_back(self, worker: _Worker) -> None:
        with self._lock:
            if not self._is_closed:
                self._idle.put(worker)
                return
        self._bury(worker, WorkerLostError("closed"))

    def _bury(self, worker: _Worker, error: BaseException) -> None:
        """End it, if it has not ended, and have another one started when it is needed."""
        with self._lock:
            self._workers.discard(worker)
            if not self._is_closed:
                self.num_lost += 1
                logger.warning("process %d that prepares prompts is lost, another takes over: %s", worker.pid, error)
        worker.kill()
        worker.close()
        self._idle.put(None)

    def _start_all(self) -> Facts:
        num_open = self._num_workers
        try:
            while num_open:
                self._idle.put(self._start_worker())
                num_open -= 1
        finally:
            for _ in range(num_open):
                self._idle.put(None)
        return Facts.from_json(self._fork_server.metadata)

    def _start_worker(self) -> _Worker:
        """Only in the starter's thread."""
        inbox, outbox = SharedMemory(), SharedMemory()
        try:
            worker = _Worker(*self._fork_server.start_worker(inbox.fd, outbox.fd), inbox, outbox)
        except ForkServerError as error:
            raise RuntimeError("the preprocessor is closed" if self._is_closed else str(error)) from error
        with self._lock:
            if not self._is_closed:
                self._workers.add(worker)
                return worker
        worker.close()
        raise RuntimeError("the preprocessor is closed")


class _Worker:
    """A worker process, seen from the engine. Used by one thread at a time."""

    def __init__(self, connection: socket.socket, pid: int, inbox: SharedMemory, outbox: SharedMemory) -> None:
        self.pid = pid
        self._connection, self._inbox, self._outbox = connection, inbox, outbox
        self._has_ended = False
        connection.settimeout(PATIENCE_S)

    def ask(self, question: dict[str, Any], sources: Sequence[Source]) -> dict[str, Any]:
        """Its answer. What belongs to it lies in the outbox."""
        position = 0
        for source in sources:
            position += self._inbox.write(source.data, position)
        with contextlib.suppress(OSError):  # if it has died, there will be no answer
            send(self._connection, question)
        return self.hear()

    def hear(self) -> dict[str, Any]:
        """What it says next."""
        try:
            answer = receive(self._connection, _MAX_ANSWER_BYTES)
        except TimeoutError as error:
            raise WorkerLostError(f"no answer in {PATIENCE_S:.0f} s") from error
        except OSError:
            answer = None
        except (ValueError, RecursionError) as error:
            raise WorkerLostError(f"it gave an answer that cannot be read: {error}") from error
        if answer is None:
            self._has_ended = True
            raise WorkerLostError("it died (killed? out of memory?)")
        if not isinstance(answer, dict):
            raise WorkerLostError("it gave an answer that makes no sense")
        return answer

    def read_outbox(self, shape: tuple[int, ...], dtype: type[_Number]) -> NDArray[_Number]:
        """A copy of what lies in it."""
        array = np.empty(shape, dtype)
        if not self._outbox.read_into(array):
            raise WorkerLostError("it gave less than it said")
        return array

    def tidy(self) -> None:
        """Give the memory of unusually large images back."""
        self._inbox.free_if_larger(_KEPT_BYTES)
        self._outbox.free_if_larger(_KEPT_BYTES)

    def is_waiting(self) -> bool:
        """Whether it is alive and has nothing to say, as it should be when it was asked nothing."""
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        if not poll.poll(0):
            return True
        try:
            self._has_ended = not self._connection.recv(1, socket.MSG_PEEK)
        except OSError:
            self._has_ended = True
        return False

    def hang_up(self) -> None:
        """End the conversation; another thread that waits for an answer gets an error."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def kill(self) -> None:
        """End the process unless it is known to have ended; its number may belong to another one then."""
        if not self._has_ended:
            with contextlib.suppress(OSError):
                os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Let go of it. Without a connection it ends by itself."""
        self._connection.close()


# ------------------------------------------------------------------ checking what workers say


def _whole(value: object, maximum: int) -> int:
    """A count."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= maximum:
        raise WorkerLostError("it gave something else than a count")
    return value


def _check_image(answer: dict[str, Any], work: ImageWork, facts: VisualFacts) -> tuple[tuple[int, int, int], float]:
    """Grid and time step, if such an image can have come of the work."""
    grid, time_step = answer.get("grid"), answer.get("time_step")
    if not isinstance(grid, list) or len(grid) != 3:
        raise WorkerLostError("it gave no grid")
    pairs, rows, columns = (_whole(number, _MAX_TOKENS) for number in grid)
    is_possible = (
        pairs == math.ceil(len(work.sources) / facts.frames_per_patch)
        and 0 < rows * columns <= facts.max_patches
        and rows % facts.merge_size == columns % facts.merge_size == 0
    )
    if not is_possible:
        raise WorkerLostError(f"it gave the grid {grid}, which no such image has")
    if not isinstance(time_step, float) or not 0 < time_step < 2**31:
        raise WorkerLostError("it gave no time step")
    return (pairs, rows, columns), time_step


def _check_key(answer: dict[str, Any]) -> bytes:
    key = answer.get("key")
    if not isinstance(key, str) or not re.fullmatch("[0-9a-f]{64}", key):
        raise WorkerLostError("it gave no key")
    return bytes.fromhex(key)
