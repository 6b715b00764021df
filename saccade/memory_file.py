"""Bytes shared between processes: a file without a name, read and written in place or mapped."""

from __future__ import annotations

import os
import tempfile
from typing import Any

import numpy as np
from numpy.typing import NDArray


class MemoryFile:
    """A file in memory; where the system cannot, on disk.

    Nothing in /dev/shm, no limit of its size, gone with the last process that has it.
    """

    def __init__(self, fd: int | None = None) -> None:
        """A new one, or one that another process has handed over."""
        self.fd = _nameless_file() if fd is None else fd

    def num_bytes(self) -> int:
        """Its size."""
        return os.fstat(self.fd).st_size

    def write(self, data: bytes | NDArray[Any], position: int) -> int:
        """Write all of it; how many bytes that were."""
        rest = flat_bytes(data)
        num_bytes = len(rest)
        while rest:
            written = os.pwrite(self.fd, rest, position)
            rest, position = rest[written:], position + written
        return num_bytes

    def read_into(self, array: NDArray[Any], position: int = 0) -> bool:
        """Fill the array; False if the file is too short."""
        rest = flat_bytes(array)
        while rest:
            if not (num_read := os.preadv(self.fd, [rest], position)):
                return False
            rest, position = rest[num_read:], position + num_read
        return True

    def shrink(self, max_bytes: int) -> None:
        """Give all its memory back if that is more."""
        if self.num_bytes() > max_bytes:
            os.ftruncate(self.fd, 0)

    def __del__(self) -> None:
        os.close(self.fd)


def flat_bytes(data: bytes | NDArray[Any]) -> memoryview:
    """The same memory as plain bytes; an array's must lie in one piece."""
    if isinstance(data, bytes):
        return memoryview(data)
    assert data.flags.c_contiguous, "a copy would be written to or read instead"
    return data.reshape(-1).view(np.uint8).data


def _nameless_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("saccade", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
