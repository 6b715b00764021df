"""A fork server: one process imports and loads everything once, then forks workers from it in a few milliseconds.

    owner  --config-->            fork server: import, load  --metadata-->  owner
    owner  --worker's socket-->   fork server: fork          -->            worker

Workers share the memory of the fork server and never import the owner's script. If the owner dies, even by SIGKILL, the
kernel kills the fork server, and with it the workers.
"""

from __future__ import annotations

import contextlib
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

from saccade.errors import UserError
from saccade.workers.messages import MAX_FDS, decode_error, encode_error, receive, send
from saccade.workers.process import follow_parent

RunWorker = Callable[..., None]
"""Main function of a worker: called with its socket and its file descriptors; returns when the socket is closed."""
Initialize = Callable[[Any], tuple[RunWorker, Any]]
"""Called once in the fork server with the config; returns the workers' main function and metadata for the owner.

Config and metadata are JSON.
"""

_SINGLE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}
"""Stops OpenMP, OpenBLAS, tokenizers and Arrow's allocator from starting threads.

A process with threads cannot fork safely.
"""
_MAX_STARTS = 3
"""Attempts to start the fork server for one worker."""


# ------------------------------------------------------------------ owner's process


class ForkServerError(RuntimeError):
    """The fork server is closed or cannot be started."""


class ForkServer:
    """Forks workers. Started with the first worker, restarted if it was killed.

    Any thread may use it, but those that call `start_worker` must outlive the workers: the kernel kills the fork server
    when the *thread* that started it exits.
    """

    metadata: Any
    """Returned by `initialize`; set once a worker has started."""

    def __init__(self, initialize: Initialize, config: Any) -> None:
        """`initialize` is a module-level function; its module is imported in the fork server."""
        self._initialize, self._config = initialize, config
        self._start_lock = threading.Lock()
        """Held while a worker is started; guards `_control`."""
        self._control: socket.socket | None = None
        self._error: UserError | RuntimeError | None = None
        """Raised by `initialize`; every further worker fails with it."""
        self._lock = threading.RLock()  # reentrant: the garbage collector may call `kill` anywhere
        """Guards the fields below."""
        self._process: subprocess.Popen[bytes] | None = None
        self._is_closed = False

    @property
    def is_closed(self) -> bool:
        """Whether it and its workers were killed for good."""
        return self._is_closed

    def start_worker(self, *fds: int) -> tuple[socket.socket, int]:
        """Fork a worker that inherits these descriptors; return its socket and process id.

        Raises what `initialize` raised.
        """
        with self._start_lock:
            if self._error:
                raise self._error
            for _ in range(_MAX_STARTS):
                if (worker := self._fork(fds)) is not None:
                    return worker
                self._start()  # not started yet, or killed, perhaps while it started
            if (worker := self._fork(fds)) is not None:
                return worker
        raise ForkServerError(f"the fork server exited {_MAX_STARTS} times while it started; its output is above")

    def kill(self) -> None:
        """Kill the fork server and its workers for good.

        A thread waiting in `start_worker` gets a `ForkServerError`.
        """
        with self._lock:
            self._is_closed = True
            self._kill()

    def close(self) -> None:
        """Kill it and close its socket."""
        self.kill()
        with self._start_lock:
            if self._control:
                self._control.close()

    def _start(self) -> None:
        """Start or restart the process and wait until it is initialized."""
        if self._control:
            self._control.close()
        with self._lock:
            self._kill()
            if self._is_closed:
                raise ForkServerError("the fork server was closed")
            self._control, child_end = socket.socketpair()
            with child_end:
                self._process = subprocess.Popen(  # noqa: S603
                    self._command(child_end.fileno()),
                    pass_fds=[child_end.fileno()],
                    env=os.environ | _SINGLE_THREAD,
                    stdin=subprocess.DEVNULL,
                    process_group=0,  # a Ctrl-C in the terminal reaches the owner alone
                )
        reply: Any = None
        with contextlib.suppress(OSError):  # it may have exited already, which `_fork` detects
            send(self._control, self._config)
            reply = receive(self._control)
        if reply is None:
            return
        if "error" in reply:
            self._error = decode_error(reply, "initializing the workers failed")
            raise self._error
        self.metadata = reply["metadata"]

    def _command(self, control_fd: int) -> list[str]:
        # Passing sys.path lets the fork server import this package from where the owner imported it.
        code = (
            "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
            "from saccade.workers.fork_server import serve; serve(*sys.argv[2:])"
        )
        function = [self._initialize.__module__, self._initialize.__name__]
        return [sys.executable, "-c", code, json.dumps(sys.path), *function, str(control_fd), str(os.getpid())]

    def _fork(self, fds: Sequence[int]) -> tuple[socket.socket, int] | None:
        """A new worker, or None if the fork server is not running."""
        if self._control is None:
            return None
        connection, child_end = socket.socketpair()
        reply: Any = None
        with contextlib.suppress(OSError), child_end:
            socket.send_fds(self._control, [b"w"], [child_end.fileno(), *fds])
            reply = receive(self._control)
        if reply is None:
            connection.close()
            return None
        return connection, reply["pid"]

    def _kill(self) -> None:
        if self._process:
            self._process.kill()
            self._process.wait()


# ------------------------------------------------------------------ fork server and workers


def serve(module: str, name: str, control_fd: str, owner_pid: str) -> None:
    """Main function of the fork server: initialize once, then fork a worker for each socket the owner sends."""
    follow_parent(int(owner_pid))
    gc.disable()  # collections while torch is imported take a seventh of the time and find nothing
    with socket.socket(fileno=int(control_fd)) as control, contextlib.suppress(ConnectionError):  # the owner has gone
        initialize: Initialize = getattr(importlib.import_module(module), name)
        config = receive(control)
        if config is None:
            return
        try:
            run_worker, metadata = initialize(config)
        except Exception as error:
            send(control, encode_error(error))
            return
        gc.freeze()  # existing objects stay in pages shared with the workers
        gc.enable()
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # reap workers automatically; the owner sees their socket close
        own_pid = os.getpid()
        send(control, {"metadata": metadata})
        while True:
            request, fds, _, _ = socket.recv_fds(control, 1, MAX_FDS)
            if not request:
                return
            if (pid := os.fork()) == 0:
                control.close()
                _run_forked(own_pid, run_worker, fds)
            for fd in fds:
                os.close(fd)
            send(control, {"pid": pid})


def _run_forked(fork_server_pid: int, run_worker: RunWorker, fds: Sequence[int]) -> NoReturn:
    """Run the worker's main function, then exit without the parent's exit handlers."""
    try:
        follow_parent(fork_server_pid)
        with contextlib.suppress(ConnectionError):  # the owner has gone
            run_worker(socket.socket(fileno=fds[0]), *fds[1:])
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)
