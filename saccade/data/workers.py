"""Processes that make rows, and the pool that keeps them busy, in order and alive.

    trainer  --plan of a row-->  worker: read, decode, pack into shared memory  --where it lies-->  trainer

One *foreman* process imports torch, loads the processor and forks the workers: they start in a few milliseconds, again after a
crash, and share its memory. The trainer's own script is not imported in them. If the trainer dies, however suddenly, the kernel
ends the foreman, and with it the workers.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import gc
import json
import logging
import mmap
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from saccade.data.collate import Collator, MadeRow, RowSetup
from saccade.data.plan import Pick
from saccade.data.row_memory import RowFile, read_row
from saccade.errors import DataError, UserError

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 3
"""Workers a row may outlive; then it is the row's fault, not theirs."""
_QUEUED = 2
"""Rows a worker holds: the one it makes and the next, so that it never waits for the trainer's attention."""
_SINGLE_THREAD = {"OMP_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
"""Keeps OpenMP, OpenBLAS and Arrow's allocator from starting threads in the foreman, which could not be forked cleanly."""
_ANSWER = struct.Struct("=QQ")
"""A worker's answer: where in its memory the description of the row lies, and how long it is. It always fits into a socket, so
that a worker never waits for the trainer to read."""


# ------------------------------------------------------------------ the pool, in the trainer's process


@dataclasses.dataclass(eq=False)
class _Task:
    number: int
    picks: Sequence[Pick]
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

    def take(self, task: _Task, fds: Sequence[int], begin: int, size: int) -> MadeRow:
        """The row it has answered with. A descriptor comes with memory that is new or has grown."""
        number = len(self.memories) if task.memory is None else task.memory
        for fd in fds:
            self.memories[number : number + 1] = [mmap.mmap(fd, 0)]
            os.close(fd)
        return read_row(self.memories[number], begin, size, when_gone=functools.partial(self.free.append, number))


class WorkerPool:
    """Makes rows in `num_workers` processes. Used by one thread, which must live as long as the pool does."""

    def __init__(self, setup: RowSetup, num_workers: int, name_of: Callable[[Pick], str]) -> None:
        """`name_of` names a sample in messages."""
        self._setup, self._num_workers, self._name_of = setup, num_workers, name_of
        self._workers: list[_Worker] = []
        self._selector = selectors.DefaultSelector()
        self._foreman: _Foreman | None = None
        self._is_closed = False

    @property
    def pids(self) -> list[int]:
        """The processes that make rows at present."""
        return [worker.pid for worker in self._workers]

    def make(self, rows: Iterable[Sequence[Pick]]) -> Iterator[MadeRow]:
        """The rows in the order of their plans. At most two a worker are under way or waiting to be taken."""
        plans = enumerate(rows)
        made: dict[int, MadeRow] = {}
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
        if self._foreman:
            self._foreman.close()

    def _disconnect(self) -> None:
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
                _send(worker.connection, {"picks": task.picks, "memory": task.memory})
            except OSError:
                unsent.extendleft(reversed(self._bury(worker)))
                self._start_worker()

    def _receive(self, made: dict[int, MadeRow], unsent: deque[_Task]) -> None:
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
        if self._is_closed:
            raise DataError("the stream was closed")
        worker = self._foreman.start_worker() if self._foreman else None
        if worker is None and not self._is_closed:  # there is no foreman yet, or it was killed
            self._foreman = _Foreman(self._setup)
            worker = self._foreman.start_worker()
        if worker is None:
            raise DataError("the process that starts the workers died at once. Its last words are above")
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
                f"token_budget; otherwise take the sample away that crashes them, one of: {samples}"
            )
        logger.warning(
            "worker process %d died (killed? out of memory?); another one makes its row again: %s", worker.pid, samples
        )


class _Foreman:
    """The process that forks workers, seen from the trainer."""

    def __init__(self, setup: RowSetup) -> None:
        self._control, theirs = socket.socketpair()
        # The path is handed over so that the foreman finds this package wherever the trainer found it.
        code = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from saccade.data.workers import foreman; foreman(int(sys.argv[2]), int(sys.argv[3]))"
        command = [sys.executable, "-c", code, json.dumps(sys.path), str(theirs.fileno()), str(os.getpid())]
        environment = os.environ | _SINGLE_THREAD
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment)  # noqa: S603
        theirs.close()
        with contextlib.suppress(OSError):  # it may have died at once, as `start_worker` will find
            _send(self._control, setup.to_json())

    def start_worker(self) -> _Worker | None:
        """A new worker; None if the foreman is no more."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                socket.send_fds(self._control, [b"w"], [theirs.fileno()])
            answer = _receive(self._control)
        except OSError:
            answer = None
        if answer and "pid" in answer:
            return _Worker(ours, answer["pid"])
        ours.close()
        self.close()
        if answer:
            raise DataError(answer["error"])
        return None

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._control.close()


# ------------------------------------------------------------------ in the other processes


def foreman(control_fd: int, trainer_pid: int) -> None:
    """Main function of the foreman: get ready once, then fork a worker whenever the trainer sends a connection for one."""
    _die_with(trainer_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the trainer, which then ends us
    signal.signal(
        signal.SIGCHLD, signal.SIG_IGN
    )  # dead workers are not waited for: the trainer sees their connection end
    torch.set_num_threads(1)
    keep_freed_memory()
    with socket.socket(fileno=control_fd) as control:
        setup = _receive(control)
        try:
            collator = Collator(RowSetup.from_json(setup))
        except UserError as error:
            _send(control, {"error": str(error)})
            return
        gc.freeze()  # what is here now stays shared with the workers
        while True:
            request, fds, _, _ = socket.recv_fds(control, 1, 1)
            if not request:
                return
            if (pid := os.fork()) == 0:
                control.close()
                _die_with(os.getppid())
                _work(socket.socket(fileno=fds[0]), collator)
                os._exit(0)
            os.close(fds[0])
            _send(control, {"pid": pid})


def keep_freed_memory() -> None:
    """Have the C library keep memory that is freed instead of giving it back: the next picture needs it again at once.

    By default blocks of pictures' sizes are returned and fetched anew, a page fault for every 4 KiB: reading a sample of 90 KB
    took a worker 0.115 ms of CPU time, and takes 0.046 so.
    """
    if sys.platform == "linux":
        m_trim_threshold, m_mmap_threshold, num_bytes = -1, -3, 2**30
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
        if mallopt is not None:
            mallopt(m_trim_threshold, num_bytes)
            mallopt(m_mmap_threshold, 2**25)  # the most it takes: 32 MiB


def _die_with(parent_pid: int) -> None:
    """Have the kernel end this process when its parent ends (Linux; elsewhere the end of the connection does)."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def _work(connection: socket.socket, collator: Collator) -> None:
    """A worker's life: one row after the other until the connection ends."""
    files: list[RowFile] = []
    while (request := _receive(connection)) is not None:
        if request["memory"] is None:
            file, num_known_bytes = RowFile(), 0
            files.append(file)
        else:
            file = files[request["memory"]]
            num_known_bytes = file.num_bytes()
        picks = [Pick(*pick) for pick in request["picks"]]
        make = functools.partial(collator.make, picks)
        answer = file.write(make, sum(pick.patches for pick in picks), collator.patch_dim)
        try:
            socket.send_fds(
                connection, [_ANSWER.pack(*answer)], [file.fd] if file.num_bytes() > num_known_bytes else []
            )
        except OSError:
            return


# ------------------------------------------------------------------ messages


def _send(connection: socket.socket, message: Any) -> None:
    body = json.dumps(message).encode()
    connection.sendall(len(body).to_bytes(8, "little") + body)


def _receive(connection: socket.socket) -> Any:
    """The next message, or None where the other side has ended."""
    size = _receive_bytes(connection, 8)
    body = size and _receive_bytes(connection, int.from_bytes(size, "little"))
    return json.loads(body) if body else None


def _receive_bytes(connection: socket.socket, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            return None
        data += part
    return bytes(data)


def _receive_answer(connection: socket.socket) -> tuple[list[int], int, int] | None:
    """The memory a worker has made, if any, and where the row's description lies; None where the worker has died."""
    data, fds, _, _ = socket.recv_fds(connection, _ANSWER.size, 1)
    return (list(fds), *_ANSWER.unpack(data)) if len(data) == _ANSWER.size else None
