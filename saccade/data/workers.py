"""Processes that make rows, and the pool that keeps them busy, in order and alive.

    trainer  --plan of a row-->  worker: read, decode, pack into shared memory  --where it lies-->  trainer

`saccade.fork_server` starts the workers, and ends them with the trainer.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import mmap
import os
import selectors
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from saccade.data.batch_sampler import SampleRef
from saccade.data.collate import CollateResult, Collator, CollatorConfig
from saccade.data.row_memory import RowFile, read_row
from saccade.errors import DataError, UserError
from saccade.fork_server import ForkServer, ForkServerError, RunWorker, keep_freed_memory, receive, send

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 3
"""Workers a row may outlive; then it is the row's fault, not theirs."""
_QUEUED = 2
"""Rows a worker holds: the one it makes and the next, so that it never waits for the trainer's attention."""
_ANSWER = struct.Struct("=QQ")
"""A worker's answer: where in its memory the description of the row lies, and how long it is. It always fits into a socket, so
that a worker never waits for the trainer to read."""


# ------------------------------------------------------------------ the pool, in the trainer's process


@dataclasses.dataclass(eq=False)
class _Task:
    number: int
    picks: Sequence[SampleRef]
    attempts: int = 0
    memory: int | None = None
    """Number of the memory it is to lie in; None: in new memory."""


@dataclasses.dataclass(eq=False)
class _Worker:
    connection: socket.socket
    pid: int
    tasks: deque[_Task] = dataclasses.field(default_factory=deque)
    memories: list[mmap.mmap] = dataclasses.field(default_factory=list)
    """Of all it has made, by number."""
    free: list[int] = dataclasses.field(default_factory=list)
    """Numbers of those whose row is gone."""

    def take(self, task: _Task, fds: Sequence[int], begin: int, size: int) -> CollateResult:
        """The row it has answered with. A descriptor comes with memory that is new or has grown."""
        number = len(self.memories) if task.memory is None else task.memory
        for fd in fds:
            self.memories[number : number + 1] = [mmap.mmap(fd, 0)]
            os.close(fd)
        return read_row(self.memories[number], begin, size, when_gone=functools.partial(self.free.append, number))


class WorkerPool:
    """Makes rows in `num_workers` processes. Used by one thread, which must live as long as the pool does."""

    def __init__(self, setup: CollatorConfig, num_workers: int, name_of: Callable[[SampleRef], str]) -> None:
        """`name_of` names a sample in messages."""
        self._num_workers, self._name_of = num_workers, name_of
        self._workers: list[_Worker] = []
        self._selector = selectors.DefaultSelector()
        self._fork_server = ForkServer(get_ready, setup.to_json())
        self._is_closed = False

    @property
    def pids(self) -> list[int]:
        """The processes that make rows at present."""
        return [worker.pid for worker in self._workers]

    def make(self, rows: Iterable[Sequence[SampleRef]]) -> Iterator[CollateResult]:
        """The rows in the order of their plans. At most two a worker are under way or waiting to be taken."""
        plans = enumerate(rows)
        made: dict[int, CollateResult] = {}
        unsent: deque[_Task] = deque()
        next_number, num_open = 0, 0
        try:
            while True:
                while num_open < _QUEUED * self._num_workers and (plan := next(plans, None)) is not None:
                    unsent.append(_Task(*plan))
                    num_open += 1
                if num_open == 0:
                    return
                self._send(unsent)
                if next_number in made:
                    yield made.pop(next_number)
                    next_number, num_open = next_number + 1, num_open - 1
                else:
                    self._receive(made, unsent)
        finally:
            self.close()
            self._disconnect()

    def close(self) -> None:
        """End all processes; also from another thread, whose `make` then ends with an error."""
        self._is_closed = True
        self._fork_server.kill()

    def _disconnect(self) -> None:
        self._fork_server.close()
        self._selector.close()
        for worker in self._workers:
            worker.connection.close()
        self._workers.clear()

    def _send(self, unsent: deque[_Task]) -> None:
        """Give rows to the workers with the fewest."""
        while len(self._workers) < self._num_workers:
            self._start_worker()
        while unsent:
            worker = min(self._workers, key=lambda worker: len(worker.tasks))
            if len(worker.tasks) == _QUEUED:
                return
            task = unsent.popleft()
            task.memory = worker.free.pop() if worker.free else None
            worker.tasks.append(task)
            try:
                send(worker.connection, {"picks": task.picks, "memory": task.memory})
            except OSError:
                unsent.extendleft(reversed(self._bury(worker)))
                self._start_worker()

    def _receive(self, made: dict[int, CollateResult], unsent: deque[_Task]) -> None:
        """Wait for a worker; take its row, or take back its rows if it has died."""
        for key, _ in self._selector.select():
            worker: _Worker = key.data
            try:
                answer = _receive_answer(worker.connection)
            except OSError:
                answer = None
            if answer is None:
                unsent.extendleft(reversed(self._bury(worker)))
            else:
                task = worker.tasks.popleft()
                made[task.number] = worker.take(task, *answer)

    def _start_worker(self) -> None:
        try:
            worker = _Worker(*self._fork_server.start_worker())
        except (ForkServerError, UserError) as error:
            raise DataError("the stream was closed" if self._is_closed else str(error)) from error
        self._workers.append(worker)
        self._selector.register(worker.connection, selectors.EVENT_READ, worker)

    def _bury(self, worker: _Worker) -> list[_Task]:
        """Forget a dead worker; what it had to do, to be done again. The row it was at counts it as an attempt."""
        self._selector.unregister(worker.connection)
        worker.connection.close()
        self._workers.remove(worker)
        if self._is_closed:
            raise DataError("the stream was closed")
        tasks = list(worker.tasks)
        if tasks:
            self._blame(tasks[0], worker)
        return tasks

    def _blame(self, task: _Task, worker: _Worker) -> None:
        task.attempts += 1
        samples = ", ".join(map(self._name_of, task.picks))
        if task.attempts == MAX_ATTEMPTS:
            raise DataError(
                f"{MAX_ATTEMPTS} worker processes died at the same row. If memory ran out, use fewer workers or a smaller "
                f"max_seq_len; otherwise take the sample away that crashes them, one of: {samples}"
            )
        logger.warning(
            "worker process %d died (killed? out of memory?); another one makes its row again: %s", worker.pid, samples
        )


def _receive_answer(connection: socket.socket) -> tuple[list[int], int, int] | None:
    """The memory a worker has made, if any, and where the row's description lies; None where the worker has died."""
    data, fds, _, _ = socket.recv_fds(connection, _ANSWER.size, 1)
    return (list(fds), *_ANSWER.unpack(data)) if len(data) == _ANSWER.size else None


# ------------------------------------------------------------------ in the workers' processes


def get_ready(setup: Any) -> tuple[RunWorker, None]:
    """What the workers are forked with, loaded once."""
    torch.set_num_threads(1)
    keep_freed_memory()
    return functools.partial(_work, Collator(CollatorConfig.from_json(setup))), None


def _work(collator: Collator, connection: socket.socket) -> None:
    """A worker's life: one row after the other until the connection ends."""
    files: list[RowFile] = []
    while (request := receive(connection)) is not None:
        if request["memory"] is None:
            file, num_known_bytes = RowFile(), 0
            files.append(file)
        else:
            file = files[request["memory"]]
            num_known_bytes = file.num_bytes()
        picks = [SampleRef(*pick) for pick in request["picks"]]
        make = functools.partial(collator.make, picks)
        answer = file.write(make, sum(pick.patches for pick in picks), collator.patch_dim)
        try:
            socket.send_fds(
                connection, [_ANSWER.pack(*answer)], [file.fd] if file.num_bytes() > num_known_bytes else []
            )
        except OSError:
            return
