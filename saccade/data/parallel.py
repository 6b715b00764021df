"""Run jobs in processes that end with their parent."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import connection, get_context, parent_process
from typing import Any, Generic, TypeVar

from saccade.errors import DataError

Job = TypeVar("Job")
Result = TypeVar("Result")
Shared = TypeVar("Shared")


_SMALL_BYTES = 256 * 2**20
"""Reading less than this takes less time than starting processes."""


def workers_for(num_bytes: int) -> int:
    """Number of processes to read this many bytes: one per core, or 1 (this process)."""
    return 1 if num_bytes < _SMALL_BYTES else len(os.sched_getaffinity(0))


def in_processes(
    function: Callable[[Shared, Job], Result], shared: Shared, jobs: Sequence[Job], num_workers: int
) -> Iterator[Result]:
    """Yield `function(shared, job)` for each job as they finish. `shared` is sent once to each process.

    With one worker, or one job, everything runs in this process. Processes are spawned, so function, shared and jobs
    must be picklable, and a script that calls this needs `if __name__ == "__main__"`.
    """
    num_workers = min(num_workers, len(jobs))
    if num_workers <= 1:
        for job in jobs:
            yield function(shared, job)
        return
    pool = ProcessPoolExecutor(
        num_workers, mp_context=get_context("spawn"), initializer=_begin_worker, initargs=(function, shared)
    )
    try:
        for future in as_completed([pool.submit(_run, job) for job in jobs]):
            yield future.result()
    except BrokenProcessPool as error:
        raise DataError(
            "a worker process exited unexpectedly: out of memory, or a script started it without "
            "if __name__ == '__main__'. Finished work is kept: run again, with fewer workers if memory ran out"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


class ChildLostError(Exception):
    """The child process ended during a job."""


class Child(Generic[Job, Result]):
    """A process that runs jobs one by one, and is replaced when one of them ends it."""

    def __init__(self, function: Callable[[Shared, Job], Result], shared: Shared) -> None:
        self._work = (function, shared)
        self._pool: ProcessPoolExecutor | None = None

    def run(self, job: Job) -> Result:
        """`function(shared, job)`, or what it raises; `ChildLostError` if the process ended."""
        if self._pool is None:
            self._pool = ProcessPoolExecutor(
                1, mp_context=get_context("spawn"), initializer=_begin_worker, initargs=self._work
            )
        try:
            result: Result = self._pool.submit(_run, job).result()
        except BrokenProcessPool as error:
            self.close()
            raise ChildLostError("its process ended: out of memory, or a crash in a library") from error
        return result

    def close(self) -> None:
        """End the process."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None


class Children(Generic[Job, Result]):
    """Child processes for any number of threads: as many as are used at once."""

    def __init__(self, function: Callable[[Shared, Job], Result], shared: Shared) -> None:
        self._work = (function, shared)
        self._idle: list[Child[Job, Result]] = []

    @contextmanager
    def one(self) -> Iterator[Child[Job, Result]]:
        """A child that no other thread uses meanwhile."""
        try:
            child = self._idle.pop()
        except IndexError:
            child = Child(*self._work)
        try:
            yield child
        finally:
            self._idle.append(child)


_WORK: list[Any] = []
"""The function and its shared argument, in a worker process."""


def _begin_worker(function: Callable[..., Any], shared: object) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and ends the pool
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _WORK[:] = [function, shared]


def _run(job: object) -> Any:
    function, shared = _WORK
    return function(shared, job)


def _end_with_parent() -> None:
    """Exit when the parent does, also after SIGKILL: its end of the pipe closes."""
    parent = parent_process()
    assert parent is not None, "workers have a parent"
    connection.wait([parent.sentinel])
    os._exit(1)
