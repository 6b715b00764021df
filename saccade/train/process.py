"""What the process does around the training loop: it holds the run folder, hears signals, and collects garbage when the loop says so."""

import contextlib
import fcntl
import gc
import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TextIO

from saccade.errors import ConfigError

logger = logging.getLogger(__name__)


def lock_folder(run: Path) -> TextIO:
    """Make the run folder and hold it until the file is closed or this process ends, however it ends."""
    try:
        run.mkdir(parents=True, exist_ok=True)
        file = (run / ".lock").open("a+", encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{run} cannot be the run folder: {error.strerror}. Choose one that can be written: --set run=NAME"
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
            f"{run} is in use by another process ({owner}). Wait for it, or give this run another folder: --set run=NAME"
        ) from error
    except OSError as error:
        logger.warning("%s cannot be locked (%s): see to it that no other run uses this folder", run, error.strerror)
    return file


@contextlib.contextmanager
def stop_requests() -> Iterator[threading.Event]:
    """An event that is set by SIGTERM or SIGINT. A second signal does what it does without us."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def ask(number: int, frame: FrameType | None) -> None:
        asked.set()
        for one, handler in before.items():
            signal.signal(one, handler)
        logger.info(
            "%s: what is under way is finished and saved, then the run ends; a second signal ends it at once",
            signal.Signals(number).name,
        )

    for number in before:
        signal.signal(number, ask)
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def garbage_by_hand() -> Iterator[None]:
    """No automatic garbage collection: it would pause ranks at different times, and every rank waits for the slowest."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()
