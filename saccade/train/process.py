"""Process-level services of training: run-folder lock, stop signals, manual garbage collection, watchdog."""

import contextlib
import faulthandler
import fcntl
import gc
import json
import logging
import math
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self, TextIO

import torch

from saccade.errors import ConfigError

logger = logging.getLogger(__name__)

EXIT_STATUS = 75
"""Exit status of a hung process: `EX_TEMPFAIL`, try again."""


def lock_folder(run: Path) -> TextIO:
    """Create the run folder and lock it until the file is closed or this process ends."""
    try:
        run.mkdir(parents=True, exist_ok=True)
        file = (run / ".lock").open("a+", encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{run} cannot be the run folder: {error.strerror}. Choose a writable one: --set run=NAME"
        ) from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        file.truncate(0)
        file.write(f"pid {os.getpid()} on {socket.gethostname()}")
        file.flush()
    except BlockingIOError as error:
        file.seek(0)
        with file:
            owner = file.read()
        raise ConfigError(
            f"{run} is in use by another process ({owner}). Wait for it, or use another run folder: --set run=NAME"
        ) from error
    except OSError as error:
        logger.warning("%s cannot be locked (%s): make sure that no other run uses this folder", run, error.strerror)
    return file


@contextlib.contextmanager
def catch_stop_signals() -> Iterator[threading.Event]:
    """An event that is set by the first SIGTERM or SIGINT. A second signal has its default effect."""
    requested = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield requested
        return
    previous = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def request_stop(number: int, frame: FrameType | None) -> None:
        requested.set()
        for one, handler in previous.items():
            signal.signal(one, handler)
        again = "press Ctrl-C again" if number == signal.SIGINT else "send it again"
        logger.info("%s: finishing this step and saving; %s to quit now", signal.Signals(number).name, again)

    for number in previous:
        signal.signal(number, request_stop)
    try:
        yield requested
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def manual_gc() -> Iterator[None]:
    """Disable automatic garbage collection, which would pause ranks at different times: all wait for the slowest."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def _exit_process() -> None:
    logging.shutdown()
    os._exit(EXIT_STATUS)


class Watchdog:
    """Ends a process that makes no progress, after dumping where it hangs.

    A dead peer, an unresponsive file system and a deadlock look alike: nothing happens. After `timeout_s` without
    `feed`, a thread writes the Python stacks of all threads, and NCCL's flight record if there is one, into the run
    folder and exits the process; `torchrun --max-restarts` then restarts the run from its last saved state.
    """

    def __init__(
        self, folder: Path, timeout_s: float, *, rank: int = 0, on_hang: Callable[[], None] = _exit_process
    ) -> None:
        self._folder, self._timeout_s, self._rank, self._on_hang = folder, timeout_s, rank, on_hang
        self._fed_at = time.monotonic()
        self._is_paused = False
        self._watched = threading.get_ident()
        self._is_done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="saccade watchdog", daemon=True)

    def feed(self) -> None:
        """Report progress."""
        self._fed_at = time.monotonic()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Pause during work of unknown duration between two steps: validation, a save, an export."""
        self._is_paused = True
        try:
            yield
        finally:
            self.feed()
            self._is_paused = False

    def __enter__(self) -> Self:
        self.feed()
        self._watched = threading.get_ident()
        if math.isfinite(self._timeout_s):
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_done.set()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        while not self._is_done.wait(min(1.0, self._timeout_s / 4)):
            if not self._is_paused and time.monotonic() - self._fed_at > self._timeout_s:
                file = dump_stacks(self._folder, self._rank)
                logger.error(
                    "rank %d: no step for %.0f s: exiting so that torchrun can restart. It is %s. Stacks: %s",
                    self._rank, self._timeout_s, where(self._watched), file,
                )  # fmt: skip
                self._on_hang()
                return


def dump_stacks(folder: Path, rank: int) -> Path:
    """Write the stacks of all threads and NCCL's flight record; returns the file of the stacks."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"stacks-rank{rank}.txt"
    with file.open("w") as out:
        faulthandler.dump_traceback(out, all_threads=True)
    record = _flight_record()
    if record is not None:
        (folder / f"collectives-rank{rank}.json").write_text(record, encoding="utf-8")
    return file


def where(thread: int) -> str:
    """Where a thread is, for people: in which collective of torch, if in one, and in which line of ours.

    The rank that is in none is the one that the others wait for. On a GPU ranks wait for the device, and the collective
    is the oldest that has not ended in NCCL's flight record.
    """
    frames = traceback.extract_stack(sys._current_frames()[thread])
    ours = [frame for frame in frames if "/torch/" not in frame.filename and Path(frame.filename) != Path(__file__)]
    line = f"{ours[-1].name} ({Path(ours[-1].filename).name}:{ours[-1].lineno})" if ours else "no Python code"
    if collectives := [frame.name for frame in frames if frame.filename.endswith("distributed_c10d.py")]:
        return f"in the collective {collectives[-1]}, in {line}"
    if (pending := _pending_collective(_flight_record())) is not None:
        return f"in {line}, with the collective {pending} pending"
    return f"in {line}, in no collective"


def _pending_collective(record: str | None) -> str | None:
    """The oldest collective of a flight record that runs on the device; with gloo none does."""
    entries = json.loads(record).get("entries", []) if record else []
    return next((str(one.get("profiling_name")) for one in entries if one.get("state") == "started"), None)


def _flight_record() -> str | None:
    """The last collectives of this rank as JSON, if this torch records them."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    c10d = torch._C._distributed_c10d
    names = ("_dump_nccl_trace_json", "_dump_fr_trace_json")  # with NCCL, and without
    dump = next((getattr(c10d, name) for name in names if hasattr(c10d, name)), None)
    try:
        return None if dump is None else json.dumps(json.loads(dump()), indent=1)
    except (RuntimeError, ValueError) as error:
        logger.warning("the flight record of collectives could not be read: %s", error)
        return None
