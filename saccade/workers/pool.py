"""A pool of worker processes: jobs in, futures out; deadlines, retries after a crash, replacement of lost workers.

    submit(job) -> queue -> job.send -> worker process -> job.receive -> job.future

One thread owns the workers and their sockets. A job is retried on another worker when its worker crashes; after
`max_crashes` the job is taken to be the cause and fails. A job that exceeds its timeout fails at once. In both cases
the worker is replaced. A job whose future is cancelled before a worker starts it is dropped.
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import os
import selectors
import signal
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from saccade.workers.fork_server import ForkServer
from saccade.workers.messages import HEADER_BYTES, decode_error

logger = logging.getLogger(__name__)


_MIN_LIFE_S = 1.0
"""A worker that exits sooner is replaced after this time, or when there is a job: it may exit again at once."""


class Channel(Protocol):
    """Memory shared with one worker."""

    @property
    def fds(self) -> tuple[int, ...]:
        """File descriptors that are passed to the worker when it starts."""


_Channel = TypeVar("_Channel", bound=Channel)
_Result = TypeVar("_Result")


class WorkerLostError(Exception):
    """A worker exited, exceeded a timeout or sent an invalid message."""


class PoolClosedError(RuntimeError):
    """The pool is closed."""


@dataclass(eq=False)
class Worker(Generic[_Channel]):
    """A worker process, seen from its owner."""

    connection: socket.socket
    pid: int
    channel: _Channel
    jobs: deque[Job[_Channel, Any]] = field(default_factory=deque)
    """Jobs sent to the worker, which runs the first."""
    deadline: float | None = None
    """Deadline of the first job, in `time.monotonic` seconds."""
    has_exited: bool = False
    started_at: float = field(default_factory=time.monotonic)
    _received: bytearray = field(default_factory=bytearray)

    def read(self, max_message_bytes: int) -> Iterator[dict[str, Any]]:
        """Complete messages that have arrived. Never blocks, also on an incomplete message."""
        try:
            data = self.connection.recv(2**16, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.has_exited = True
            raise WorkerLostError("it exited (killed? out of memory?)")
        self._received += data
        while (message := self._next_message(max_message_bytes)) is not None:
            yield message

    def _next_message(self, max_bytes: int) -> dict[str, Any] | None:
        size = int.from_bytes(self._received[:HEADER_BYTES], "little")
        if len(self._received) >= HEADER_BYTES and size > max_bytes:
            raise WorkerLostError(f"it sent a message of {size} bytes")
        end = HEADER_BYTES + size
        if len(self._received) < end:
            return None
        try:
            message = json.loads(self._received[HEADER_BYTES:end])
        except (ValueError, RecursionError) as error:
            raise WorkerLostError(f"it sent an invalid message: {error}") from error
        if not isinstance(message, dict):
            raise WorkerLostError("it sent an invalid message: not an object")
        del self._received[:end]
        return message

    def start_clock(self) -> None:
        """Set the deadline of the job that it works on now."""
        timeout_s = self.jobs[0].timeout_s if self.jobs else None
        self.deadline = None if timeout_s is None else time.monotonic() + timeout_s


class Job(ABC, Generic[_Channel, _Result]):
    """Work for one worker. Subclasses define how it is sent and how its reply is read, both in the pool's thread."""

    timeout_s: float | None = None
    """Seconds a worker may work on it."""
    max_crashes = 3
    """Workers that may crash on it before it fails."""

    def __init__(self) -> None:
        self.future: Future[_Result] = Future()
        self.num_crashes = 0

    def start(self) -> bool:
        """Mark the job as running: it can no longer be cancelled. False if it was."""
        return self.future.running() or self.future.set_running_or_notify_cancel()

    def fail(self, error: Exception) -> None:
        """End the job with an error, unless it was cancelled."""
        if self.start():
            self.future.set_exception(error)

    @abstractmethod
    def send(self, worker: Worker[_Channel]) -> None:
        """Send the request. If it raises anything but a `ConnectionError`, nothing was sent."""

    @abstractmethod
    def receive(self, message: dict[str, Any], worker: Worker[_Channel]) -> _Result | None:
        """The result, or None if another message follows. Raises `WorkerLostError` if the message is invalid."""

    @abstractmethod
    def error(self, reason: str) -> Exception:
        """The exception of this job after `max_crashes` crashes or a timeout."""

    @abstractmethod
    def __str__(self) -> str:
        """Name of the job in log lines."""


class WorkerPool(Generic[_Channel]):
    """`num_workers` processes of a fork server. `submit` and `close` may be called from any thread.

    Several pools may share a fork server; they are closed together.
    """

    def __init__(
        self,
        fork_server: ForkServer,
        num_workers: int,
        open_channel: Callable[[], _Channel],
        *,
        queue_depth: int = 1,
        max_message_bytes: int = 2**30,
    ) -> None:
        """Start the workers without waiting for them.

        Each worker holds up to `queue_depth` jobs, so that it need not wait for the next.
        """
        self._fork_server, self._num_workers, self._open_channel = fork_server, num_workers, open_channel
        self._queue_depth, self._max_message_bytes = queue_depth, max_message_bytes
        self.metadata: Future[Any] = Future()
        """Returned by the fork server's `initialize`, or what it raised."""
        self.num_crashes = 0
        """Workers lost so far."""
        self._workers: list[Worker[_Channel]] = []
        self._queue: deque[Job[_Channel, Any]] = deque()
        self._lock = threading.RLock()  # reentrant: the garbage collector may call `close` anywhere
        """Guards `_queue` against its final emptying."""
        self._is_closed = False
        self._is_drained = False
        self._replace_at: float | None = None
        """When a lost worker is replaced, unless a job needs it before."""
        self._selector = selectors.DefaultSelector()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_writer.setblocking(False)
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="saccade-worker-pool", daemon=True)
        self._thread.start()

    @property
    def pids(self) -> list[int]:
        """Process ids of the running workers."""
        return [worker.pid for worker in list(self._workers)]

    def submit(self, job: Job[_Channel, _Result]) -> Future[_Result]:
        """Run a job; jobs start in the order of submission."""
        with self._lock:
            if self._is_drained:
                job.fail(PoolClosedError("the worker pool is closed"))
            else:
                self._queue.append(job)
                self._wake()
        return job.future

    def close(self) -> None:
        """Kill all processes. Unfinished jobs fail with `PoolClosedError`."""
        self._is_closed = True
        self._fork_server.kill()
        with self._lock:
            if not self._is_drained:
                self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # enough wake-ups are pending
            self._wake_writer.send(b"\0")

    # -------------------------------------------------------------- the pool's thread

    def _run(self) -> None:
        try:
            self._start_workers()
            while not self._is_closed:
                self._wait()
                self._remove_stuck()
                self._replace_lost()
                self._dispatch()
        except BaseException:
            logger.exception("the worker pool failed")
        finally:
            self._drain()

    def _start_workers(self) -> None:
        """Start missing workers. If that is impossible, queued jobs fail; the next ones try again."""
        try:
            while len(self._workers) < self._num_workers:
                channel = self._open_channel()
                worker = Worker(*self._fork_server.start_worker(*channel.fds), channel)
                self._workers.append(worker)
                self._selector.register(worker.connection, selectors.EVENT_READ, worker)
            if not self.metadata.done():
                self.metadata.set_result(self._fork_server.metadata)
        except Exception as error:
            failure = PoolClosedError("the worker pool is closed") if self._is_closed else error
            if not self.metadata.done():
                self.metadata.set_exception(failure)
            while self._queue:
                self._queue.popleft().fail(copy.copy(failure))  # each has a traceback of its own

    def _wait(self) -> None:
        """Wait for messages, new jobs or the next deadline, and handle the messages."""
        deadlines = [at for at in (self._replace_at, *(worker.deadline for worker in self._workers)) if at is not None]
        timeout = max(0.0, min(deadlines) - time.monotonic()) if deadlines else None
        for key, _ in self._selector.select(timeout):
            if key.data is None:
                self._wake_reader.recv(4096)
            else:
                self._receive(key.data)

    def _receive(self, worker: Worker[_Channel]) -> None:
        try:
            for message in worker.read(self._max_message_bytes):
                if not worker.jobs:
                    raise WorkerLostError("it sent a message without a job")
                self._handle(message, worker)
        except WorkerLostError as error:
            self._remove_worker(worker, str(error))

    def _handle(self, message: dict[str, Any], worker: Worker[_Channel]) -> None:
        """Finish the worker's first job, unless more messages of it follow."""
        job, result = worker.jobs[0], None
        failure: Exception | None = None
        try:
            if "error" in message:
                failure = decode_error(message, f"{job} failed")
            else:
                result = job.receive(message, worker)
        except WorkerLostError:
            raise
        except Exception as error:
            failure = error
        if result is None and failure is None:
            return
        worker.jobs.popleft()
        worker.start_clock()
        if failure is None:
            job.future.set_result(result)
        else:
            job.future.set_exception(failure)

    def _remove_stuck(self) -> None:
        now = time.monotonic()
        for worker in [worker for worker in self._workers if worker.deadline is not None and worker.deadline <= now]:
            self._remove_worker(worker, f"no result within {worker.jobs[0].timeout_s:g} s", is_final=True)

    def _replace_lost(self) -> None:
        """Replace workers before the next job comes."""
        if self._replace_at is not None and self._replace_at <= time.monotonic():
            self._replace_at = None
            self._start_workers()

    def _dispatch(self) -> None:
        """Send queued jobs to the workers with the fewest."""
        while self._queue and not self._is_closed:
            if len(self._workers) < self._num_workers:
                self._start_workers()
                continue
            worker = min(self._workers, key=lambda worker: len(worker.jobs))
            if len(worker.jobs) >= self._queue_depth:
                return
            if not worker.jobs:
                self._receive(worker)  # it may have exited after the last wait, which is not the next job's fault
                if worker not in self._workers:
                    continue
            job = self._queue.popleft()
            if not job.start():
                continue
            worker.jobs.append(job)
            if len(worker.jobs) == 1:
                worker.start_clock()
            try:
                job.send(worker)
            except ConnectionError:
                self._remove_worker(worker, "it exited (killed? out of memory?)")
            except Exception as error:  # nothing was sent
                worker.jobs.remove(job)
                worker.start_clock()
                job.future.set_exception(error)

    def _remove_worker(self, worker: Worker[_Channel], reason: str, *, is_final: bool = False) -> None:
        """Kill it and requeue its jobs. The one it worked on counts the crash, and fails if that `is_final`."""
        self._selector.unregister(worker.connection)
        worker.connection.close()
        self._workers.remove(worker)
        self._replace_at = worker.started_at + _MIN_LIFE_S
        if not worker.has_exited:  # else the process id may belong to another process
            with contextlib.suppress(OSError):
                os.kill(worker.pid, signal.SIGKILL)
        jobs = list(worker.jobs)
        if self._is_closed or self._fork_server.is_closed:  # perhaps by another pool, which is closed first
            self._queue.extendleft(reversed(jobs))
            return
        self.num_crashes += 1
        failed = None
        if jobs:
            jobs[0].num_crashes += 1
            if is_final or jobs[0].num_crashes == jobs[0].max_crashes:
                failed = jobs.pop(0)
        self._queue.extendleft(reversed(jobs))
        what = f"; failing {failed}" if failed else f"; retrying {jobs[0]}" if jobs else ""
        logger.warning("worker process %d was lost: %s%s", worker.pid, reason, what)
        if failed:
            failed.future.set_exception(failed.error(reason))

    def _drain(self) -> None:
        """Fail all unfinished jobs and close the sockets."""
        self._is_closed = True
        self._fork_server.close()
        self._selector.close()
        with self._lock:
            self._is_drained = True
            self._wake_reader.close()
            self._wake_writer.close()
        jobs = [job for worker in self._workers for job in worker.jobs] + list(self._queue)
        for worker in self._workers:
            worker.connection.close()
        self._workers.clear()
        self._queue.clear()
        if not self.metadata.done():
            self.metadata.set_exception(PoolClosedError("the worker pool is closed"))
        for job in jobs:
            job.fail(PoolClosedError("the worker pool is closed"))
