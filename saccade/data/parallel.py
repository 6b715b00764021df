"""Jobs over processes of this machine, which never outlive the one that started them."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import connection, get_context, parent_process
from typing import Any, TypeVar

from saccade.errors import DataError

Job = TypeVar("Job")
Result = TypeVar("Result")
Shared = TypeVar("Shared")


_SMALL_BYTES = 256 * 2**20
"""Less than this is read sooner than other processes are started."""


def workers_for(num_bytes: int) -> int:
    """Processes worth starting to read so many bytes: one per core, or this one alone."""
    return 1 if num_bytes < _SMALL_BYTES else len(os.sched_getaffinity(0))


def in_processes(
    function: Callable[[Shared, Job], Result], shared: Shared, jobs: Sequence[Job], num_workers: int
) -> Iterator[Result]:
    """`function(shared, job)` for each job, in the order they finish. `shared` travels once to each process.

    With one worker, or one job, everything runs in this process. Processes are spawned, so function, shared and jobs must be
    picklable, and a script that calls this needs `if __name__ == "__main__"`.
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
            "a worker process ended unexpectedly: memory may have run out, or a script started it without "
            "if __name__ == '__main__'. What was finished is kept: run again, with fewer workers if memory was short"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


_WORK: list[Any] = []
"""In a worker: the function and what its jobs share."""


def _begin_worker(function: Callable[..., Any], shared: object) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears Ctrl-C and ends the pool
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _WORK[:] = [function, shared]


def _run(job: object) -> Any:
    function, shared = _WORK
    return function(shared, job)


def _end_with_parent() -> None:
    """A parent killed hard tells no one; its end of the pipe closes all the same."""
    parent = parent_process()
    assert parent is not None, "workers have a parent"
    connection.wait([parent.sentinel])
    os._exit(1)
