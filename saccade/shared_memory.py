"""Memory shared between processes: an anonymous file, accessed with reads and writes or mapped."""

from __future__ import annotations

import os
import tempfile
from typing import Any

import numpy as np
from numpy.typing import NDArray


class SharedMemory:
    """An anonymous in-memory file (on disk where memfd is missing), passed to other processes by file descriptor.

    It uses nothing in /dev/shm, has no size limit, and is freed with the last process that holds it.
    """

    def __init__(self, fd: int | None = None) -> None:
        """Create one, or open one received from another process."""
        self.fd = _anonymous_file() if fd is None else fd

    def num_bytes(self) -> int:
        """Current size."""
        return os.fstat(self.fd).st_size

    def write(self, data: bytes | NDArray[Any], offset: int) -> int:
        """Write all of `data`; return the number of bytes."""
        rest = byte_view(data)
        num_bytes = len(rest)
        while rest:
            written = os.pwrite(self.fd, rest, offset)
            rest, offset = rest[written:], offset + written
        return num_bytes

    def read_into(self, array: NDArray[Any], offset: int = 0) -> bool:
        """Fill the array; False if the file is too short."""
        rest = byte_view(array)
        while rest:
            if not (num_read := os.preadv(self.fd, [rest], offset)):
                return False
            rest, offset = rest[num_read:], offset + num_read
        return True

    def free_if_larger(self, max_bytes: int) -> None:
        """Free all of its memory if it holds more than `max_bytes`."""
        if self.num_bytes() > max_bytes:
            os.ftruncate(self.fd, 0)

    def __del__(self) -> None:
        os.close(self.fd)


def byte_view(data: bytes | NDArray[Any]) -> memoryview:
    """The same memory as bytes; an array must be contiguous."""
    if isinstance(data, bytes):
        return memoryview(data)
    assert data.flags.c_contiguous, "array is not contiguous: a copy would be used instead"
    return data.reshape(-1).view(np.uint8).data


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("saccade", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
