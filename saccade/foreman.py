"""Worker processes: a *foreman* gets ready once and forks them; how they are talked with.

    owner  --setup-->  foreman: import, load  --facts-->  owner  --a connection for a worker-->  foreman: fork  -->  worker: work

The foreman imports torch and loads what all workers need, so that they start in a few milliseconds, again after a crash, and share
its memory. The owner's own script is not imported in them. If the owner dies, however suddenly, the kernel ends the foreman, and
with it the workers.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from saccade.errors import CheckpointError, ConfigError, DataError, ImageError, RequestError, UserError

Work = Callable[..., None]
"""A worker's life: takes its connection and the descriptors it was given, and returns when the connection has ended."""
GetReady = Callable[[Any], tuple[Work, Any]]
"""Called in the foreman with the setup: what workers are to do, and facts for the owner. Setup and facts are fit for JSON."""

_SINGLE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}
"""Keeps OpenMP, OpenBLAS, tokenizers and Arrow's allocator from starting threads in the foreman, which could not be forked
cleanly."""
_MAX_FDS = 4
"""Descriptors a worker may be given, its connection among them."""
_MAX_ERROR_LENGTH = 10_000
"""Characters of an error's text at most."""
_ERRORS = {
    kind.__name__: kind for kind in (ConfigError, DataError, CheckpointError, RequestError, ImageError, UserError)
}


# ------------------------------------------------------------------ seen from the owner


class ForemanError(Exception):
    """There is no foreman, and so no new worker."""


class Foreman:
    """The process that forks workers. It is started for the first of them, and again after it was killed.

    Used by one thread, which must live as long as the workers do: the kernel ends the foreman together with the *thread* that
    started it. Any thread may `end` it.
    """

    facts: Any
    """What `get_ready` has told; there once a worker is."""

    def __init__(self, get_ready: GetReady, setup: Any) -> None:
        """`get_ready` is a function of a module, which is imported in the foreman."""
        self._get_ready, self._setup = get_ready, setup
        self._control: socket.socket | None = None
        self._lock = threading.Lock()
        """For all below."""
        self._process: subprocess.Popen[bytes] | None = None
        self._is_ended = False

    def start_worker(self, *fds: int) -> tuple[socket.socket, int]:
        """The connection to a new worker, which gets these descriptors too, and its process id. Raises what `get_ready` raised."""
        worker = self._fork(fds)
        if worker is None:  # there is no foreman yet, or it was killed
            self._start()
            worker = self._fork(fds)
        if worker is None:
            raise ForemanError("the process that starts the workers died at once. Its last words are above")
        return worker

    def end(self) -> None:
        """End it, and with it the workers, for good. The thread that waits for a new one gets an error."""
        with self._lock:
            self._is_ended = True
            self._kill()

    def close(self) -> None:
        """End it and let go of it."""
        self.end()
        if self._control:
            self._control.close()

    def _start(self) -> None:
        """Start it, in place of one that was killed, and wait until it is ready."""
        if self._control:
            self._control.close()
        self._control, theirs = socket.socketpair()
        with self._lock, theirs:
            self._kill()
            if self._is_ended:
                raise ForemanError("the process that starts the workers was ended")
            self._process = subprocess.Popen(  # noqa: S603
                self._command(theirs.fileno()),
                pass_fds=[theirs.fileno()],
                env=os.environ | _SINGLE_THREAD,
                stdin=subprocess.DEVNULL,
            )
        answer: Any = None
        with contextlib.suppress(OSError):  # it may have died at once, as `_fork` will find
            send(self._control, self._setup)
            answer = receive(self._control)
        if answer is None:
            return
        if "error" in answer:
            raise told_error(answer, "the workers could not get ready")
        self.facts = answer["facts"]

    def _command(self, control_fd: int) -> list[str]:
        # The path is handed over so that the foreman finds this package wherever the owner found it.
        code = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from saccade.foreman import lead; lead(*sys.argv[2:])"
        function = [self._get_ready.__module__, self._get_ready.__name__]
        return [sys.executable, "-c", code, json.dumps(sys.path), *function, str(control_fd), str(os.getpid())]

    def _fork(self, fds: Sequence[int]) -> tuple[socket.socket, int] | None:
        """A new worker; None if there is no foreman."""
        if self._control is None:
            return None
        ours, theirs = socket.socketpair()
        answer: Any = None
        with contextlib.suppress(OSError), theirs:
            socket.send_fds(self._control, [b"w"], [theirs.fileno(), *fds])
            answer = receive(self._control)
        if answer is None:
            ours.close()
            return None
        return ours, answer["pid"]

    def _kill(self) -> None:
        if self._process:
            self._process.kill()
            self._process.wait()


# ------------------------------------------------------------------ in the other processes


def lead(module: str, name: str, control_fd: str, owner_pid: str) -> None:
    """Main function of the foreman: get ready once, then fork a worker whenever the owner sends a connection for one."""
    _die_with(int(owner_pid))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the owner, which then ends us
    with socket.socket(fileno=int(control_fd)) as control:
        get_ready: GetReady = getattr(importlib.import_module(module), name)
        try:
            work, facts = get_ready(receive(control))
        except Exception as error:
            send(control, describe_error(error))
            return
        gc.freeze()  # what is here now stays shared with the workers
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # dead workers vanish: the owner sees their connection end
        own_pid = os.getpid()
        send(control, {"facts": facts})
        while True:
            request, fds, _, _ = socket.recv_fds(control, 1, _MAX_FDS)
            if not request:
                return
            if (pid := os.fork()) == 0:
                control.close()
                _live(own_pid, work, fds)
            for fd in fds:
                os.close(fd)
            send(control, {"pid": pid})


def _live(foreman_pid: int, work: Work, fds: Sequence[int]) -> NoReturn:
    """A worker's life, from the fork on."""
    try:
        _die_with(foreman_pid)
        work(socket.socket(fileno=fds[0]), *fds[1:])
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _die_with(parent_pid: int) -> None:
    """Have the kernel end this process when its parent ends (Linux; elsewhere the end of the connection does)."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def keep_freed_memory(max_bytes: int = 2**30) -> None:
    """Have the C library keep so much freed memory instead of giving it back: the next picture needs it again at once.

    By default blocks of pictures' sizes are returned and fetched anew, a page fault for every 4 KiB: reading a sample of 90 KB
    took a worker 0.115 ms of CPU time, and takes 0.046 so.
    """
    if sys.platform == "linux":
        m_trim_threshold, m_mmap_threshold = -1, -3
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
        if mallopt is not None:
            mallopt(m_trim_threshold, max_bytes)
            mallopt(m_mmap_threshold, 2**25)  # the most it takes: 32 MiB


# ------------------------------------------------------------------ messages


def send(connection: socket.socket, message: Any) -> None:
    """A message in JSON, with its length before it."""
    body = json.dumps(message).encode()
    connection.sendall(len(body).to_bytes(8, "little") + body)


def receive(connection: socket.socket, max_bytes: int = 2**40) -> Any:
    """The next message, or None where the other side has ended."""
    head = _receive_bytes(connection, 8)
    if head is None:
        return None
    if (size := int.from_bytes(head, "little")) > max_bytes:
        raise ValueError(f"a message of {size} bytes")
    body = _receive_bytes(connection, size)
    return None if body is None else json.loads(body)


def _receive_bytes(connection: socket.socket, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            return None
        data += part
    return bytes(data)


def describe_error(error: Exception) -> dict[str, Any]:
    """An error as a message, which has `error` in it. `kind` is None for a bug of ours, whose text is the traceback."""
    if isinstance(error, UserError):
        return {"error": str(error)[:_MAX_ERROR_LENGTH], "kind": type(error).__name__}
    return {"error": "".join(traceback.format_exception(error))[-_MAX_ERROR_LENGTH:], "kind": None}


def told_error(description: dict[str, Any], failure: str) -> UserError | RuntimeError:
    """The error that another process has described. `failure` stands before the traceback of a bug."""
    kind, text = description.get("kind"), str(description["error"])
    if kind is None:
        return RuntimeError(f"{failure}:\n{text}")
    return _ERRORS.get(str(kind), UserError)(text)
