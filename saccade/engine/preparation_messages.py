"""How the engine and the processes that prepare for it talk: JSON on a socket, bytes in files in memory."""

from __future__ import annotations

import json
import os
import socket
import tempfile
from typing import Any

import numpy as np
from numpy.typing import NDArray


def send(connection: socket.socket, message: Any) -> None:
    """A message in JSON, with its length before it."""
    body = json.dumps(message).encode()
    connection.sendall(len(body).to_bytes(8, "little") + body)


def receive(connection: socket.socket, max_bytes: int = 2**40) -> Any:
    """The next message, or None where the other side has ended."""
    head = _receive_bytes(connection, 8)
    if head is None:
        return None
    if (size := int.from_bytes(head, "little")) > max_bytes:
        raise ValueError(f"a message of {size} bytes")
    body = _receive_bytes(connection, size)
    return None if body is None else json.loads(body)


def _receive_bytes(connection: socket.socket, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            return None
        data += part
    return bytes(data)


class MemoryFile:
    """A file without a name, in memory; where the system cannot, on disk. Gone with the last process that has it."""

    def __init__(self, fd: int | None = None) -> None:
        self.fd = _nameless_file() if fd is None else fd

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
        if os.fstat(self.fd).st_size > max_bytes:
            os.ftruncate(self.fd, 0)

    def __del__(self) -> None:
        os.close(self.fd)


def _nameless_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("saccade prompt", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def flat_bytes(data: bytes | NDArray[Any]) -> memoryview:
    """The same memory as plain bytes; an array's must lie in one piece."""
    if isinstance(data, bytes):
        return memoryview(data)
    assert data.flags.c_contiguous, "a copy would be written to or read instead"
    return data.reshape(-1).view(np.uint8).data
