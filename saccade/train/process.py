"""What the process does around the training loop: it hears signals, and collects Python's garbage when the loop says so."""

import contextlib
import gc
import logging
import signal
import threading
from collections.abc import Iterator
from types import FrameType

logger = logging.getLogger(__name__)


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
        logger.info("%s: this step is finished and saved, then the run ends", signal.Signals(number).name)

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
