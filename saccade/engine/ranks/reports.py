"""Followers report to the leader in shared memory: which command they have finished, and whether it failed.

A report is one number of 8 bytes, which a process writes and reads at once. So waiting for all ranks takes microseconds
and needs no lock.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable

from saccade.workers.shared_memory import SharedMemory

_WORDS = 8
"""Words per rank: a cache line, so that ranks do not write to the same one."""
_NUM_SPINS, _SLEEP_S = 100, 50e-6
"""Times that a report is polled without sleeping, and the sleep after that."""


class Reports:
    """Two words per rank: twice the number of the last command that it has finished, plus 1 if that failed; memory."""

    def __init__(self, num_ranks: int, fd: int | None = None) -> None:
        """Create the memory, or open that of the leader."""
        self._memory = SharedMemory(fd)
        if fd is None:
            os.ftruncate(self._memory.fd, num_ranks * _WORDS * 8)
        self._map = mmap.mmap(self._memory.fd, num_ranks * _WORDS * 8)
        self._words = memoryview(self._map).cast("q")
        self._num_ranks = num_ranks
        self.wait_s = [0.0] * num_ranks
        """Seconds that the leader has waited for each rank, when the ranks before it had finished."""

    @property
    def fd(self) -> int:
        """File descriptor of the memory, for another process."""
        return self._memory.fd

    def report(self, rank: int, command: int, *, has_failed: bool) -> None:
        """Report that a rank has finished a command."""
        self._words[rank * _WORDS] = 2 * command + has_failed

    def last_command(self, rank: int) -> int:
        """Number of the last command that a rank has finished."""
        return self._words[rank * _WORDS] // 2

    def set_bytes(self, rank: int, num_bytes: int) -> None:
        """Report the memory that a rank has allocated."""
        self._words[rank * _WORDS + 1] = num_bytes

    def num_bytes(self, rank: int) -> int:
        """The memory that a rank has reported."""
        return self._words[rank * _WORDS + 1]

    def wait(self, command: int, check: Callable[[], None]) -> list[int]:
        """Wait until all followers have finished a command; returns those that failed. `check` is called meanwhile."""
        failed, begin = [], time.perf_counter()
        for rank in range(1, self._num_ranks):
            num_polls = 0
            while (word := self._words[rank * _WORDS]) // 2 < command:
                num_polls += 1
                time.sleep(0 if num_polls < _NUM_SPINS else _SLEEP_S)
                if num_polls >= _NUM_SPINS:
                    check()
            if num_polls:
                now = time.perf_counter()
                self.wait_s[rank] += now - begin
                begin = now
            if word % 2:
                failed.append(rank)
        return failed

    def close(self) -> None:
        """Unmap the memory."""
        self._words.release()
        self._map.close()
