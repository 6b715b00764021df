"""Ends a process that makes no progress, after it has said where it stands.

A rank that waits for a dead one, a file system that does not answer, a deadlock: all look the same, nothing happens. After
`timeout_s` without a sign of life a thread writes the Python stacks of all threads, and NCCL's record of the last collectives
where there is one, into the run folder, and ends the process; `torchrun --max-restarts` then starts the run again from its last
saved state.
"""

import contextlib
import faulthandler
import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

logger = logging.getLogger(__name__)

EXIT_STATUS = 75
"""`EX_TEMPFAIL`: try again."""


def _end_process() -> None:
    logging.shutdown()
    os._exit(EXIT_STATUS)


class Watchdog:
    """Watches while it is entered; `feed` says that all is well."""

    def __init__(
        self, folder: Path, timeout_s: float, *, rank: int = 0, on_hang: Callable[[], None] = _end_process
    ) -> None:
        self._folder, self._timeout_s, self._rank, self._on_hang = folder, timeout_s, rank, on_hang
        self._fed_at = time.monotonic()
        self._is_paused = False
        self._is_done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="saccade watchdog", daemon=True)

    def feed(self) -> None:
        """A step was made."""
        self._fed_at = time.monotonic()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """For work between two steps whose length nobody knows: a probe, a save, an export."""
        self._is_paused = True
        try:
            yield
        finally:
            self.feed()
            self._is_paused = False

    def __enter__(self) -> Self:
        self.feed()
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
                file = write_stacks(self._folder, self._rank)
                logger.error(
                    "no step for %.0f s: this process ends, so that torchrun can start it again. Where it stood: %s",
                    self._timeout_s,
                    file,
                )
                self._on_hang()
                return


def write_stacks(folder: Path, rank: int) -> Path:
    """Write where every thread stands, and what NCCL did last; the file of the stacks."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"stacks-rank{rank}.txt"
    with file.open("w") as out:
        faulthandler.dump_traceback(out, all_threads=True)
    record = _flight_record()
    if record is not None:
        (folder / f"collectives-rank{rank}.json").write_text(record, encoding="utf-8")
    return file


def _flight_record() -> str | None:
    """The last collectives of this rank as JSON, where this torch records them."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    c10d = torch._C._distributed_c10d
    names = ("_dump_nccl_trace_json", "_dump_fr_trace_json")  # as it is called in a torch with NCCL, and in one without
    dump = next((getattr(c10d, name) for name in names if hasattr(c10d, name)), None)
    try:
        return None if dump is None else json.dumps(json.loads(dump()), indent=1)
    except (RuntimeError, ValueError) as error:
        logger.warning("the record of collectives could not be read: %s", error)
        return None
