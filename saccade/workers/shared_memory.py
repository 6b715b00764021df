"""Memory shared between processes: an anonymous file, accessed with reads and writes or mapped."""

from __future__ import annotations

import ctypes
import functools
import mmap
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
        if hasattr(self, "fd"):  # else it could not be created
            os.close(self.fd)


class MappedMemory:
    """The memory of a file descriptor, mapped read-only.

    `np.asarray` gives its bytes, and the mapping lives as long as these arrays. It keeps no file descriptor.
    `mmap.mmap` keeps a duplicate, so that thousands of mappings would exceed the limit on open files.
    """

    def __init__(self, fd: int) -> None:
        """OSError: the system has no memory for the mapping, or too many mappings."""
        num_bytes = os.fstat(fd).st_size
        address = _libc().mmap(None, num_bytes, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
        if address == ctypes.c_void_p(-1).value:
            raise OSError(ctypes.get_errno(), f"{num_bytes} bytes of shared memory could not be mapped")
        self._unmap = functools.partial(_libc().munmap, address, num_bytes)
        self.__array_interface__ = {"version": 3, "typestr": "|u1", "shape": (num_bytes,), "data": (address, True)}

    def __del__(self) -> None:
        if hasattr(self, "_unmap"):  # else it could not be mapped
            self._unmap()


@functools.cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    return libc


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
