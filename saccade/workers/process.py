"""Start and end a process without garbage collections over everything that torch imports.

Collections took 2.0 of the 4.4 s of CPU time of a process that imports training and exits: 0.8 s while importing, 1.2 s
at the end.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

_THRESHOLD_WHILE_IMPORTING = 50_000
"""Net allocations between two collections while modules are imported; Python's default is 700."""

_INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells have it."""
_RESEND_S = 0.01
"""Seconds until a dropped Ctrl-C is sent again. If the collection has not ended by then, it is sent once more."""


def collect_rarely_while_importing() -> None:
    """Raise the threshold of the garbage collector until a collection finds no new module, then restore the default.

    Call it in the main thread. Python drops what a callback of the collector raises, so a Ctrl-C that arrives in it is
    sent again.
    """
    usual, num_modules, usual_hook = gc.get_threshold(), 0, sys.unraisablehook

    def restore_when_imported(phase: str, _info: Mapping[str, Any]) -> None:
        nonlocal num_modules
        if phase == "start":
            return
        if len(sys.modules) == num_modules:
            gc.set_threshold(*usual)
            gc.callbacks.remove(restore_when_imported)
            sys.unraisablehook = usual_hook
        num_modules = len(sys.modules)

    def interrupt_again(dropped: sys.UnraisableHookArgs) -> None:
        if dropped.object is restore_when_imported and dropped.exc_type is KeyboardInterrupt:
            threading.Timer(_RESEND_S, signal.pthread_kill, (threading.get_ident(), signal.SIGINT)).start()
        else:
            usual_hook(dropped)

    sys.unraisablehook = interrupt_again
    gc.callbacks.append(restore_when_imported)
    gc.set_threshold(_THRESHOLD_WHILE_IMPORTING, *usual[1:])


@contextmanager
def exit_on_interrupt() -> Iterator[None]:
    """End the process with status 130 at a Ctrl-C, without an exception.

    An exception in the initialization of torch's extensions would abort the process. Use it for imports at the
    beginning of a command, when there is nothing to clean up.
    """
    is_usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not is_usual or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, lambda *_: os._exit(_INTERRUPTED))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


class QuickExit:
    """Exits when threads have ended and exit handlers have run, without the interpreter's finalization.

    Make it before anything else registers an exit handler: the first to be registered is the last to be called. A
    process that has used a GPU is finalized as usual: libraries and profilers of the GPU may have exit handlers in C,
    which this would skip.
    """

    def __init__(self) -> None:
        self.status: int | None = None
        """Exit status of the process; None finalizes as usual, for example after an exception."""
        atexit.register(self._exit)

    def _exit(self) -> None:
        if self.status is None or _has_used_gpu():
            return
        try:
            for stream in filter(None, (sys.stdout, sys.stderr)):
                stream.flush()
        except (OSError, ValueError):  # the reader is gone: the interpreter reports it
            return
        os._exit(self.status)


def _has_used_gpu() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_initialized()


def follow_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent exits (Linux; elsewhere it exits when its socket closes).

    SIGINT and SIGTERM are left to the parent: Slurm sends them to every process of a job, and a parent that finishes
    what is in progress needs this process for it.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def keep_freed_memory(max_bytes: int = 2**30) -> None:
    """Have malloc keep up to `max_bytes` of freed memory for the next allocation instead of returning it to the kernel.

    By default image-sized allocations are mapped and unmapped each time, with a page fault per 4 KiB: reading a 90 KB
    sample took a worker 0.115 ms of CPU time, and 0.046 ms with this.
    """
    if sys.platform == "linux":
        m_trim_threshold, m_mmap_threshold = -1, -3
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # absent in musl
        if mallopt is not None:
            mallopt(m_trim_threshold, max_bytes)
            mallopt(m_mmap_threshold, 2**25)  # glibc's maximum: 32 MiB
