"""A socket that carries frames: a length and a msgpack message of plain data, never a pickle, and file descriptors."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Sequence
from typing import Any

from saccade.engine.frames.plain import packer, unpack
from saccade.engine.frames.shared_images import MAX_SEGMENTS

_HEADER_BYTES = 8


class Connection:
    """One end of a socket that carries frames. `send` may be called by several threads, `receive` by one."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket, self._lock = connection, threading.Lock()
        self._pack = packer()

    def send(self, message: Any, fds: Sequence[int] = ()) -> None:
        """Send a message and file descriptors. ConnectionError: the other end is gone. Other errors: nothing sent."""
        with self._lock:
            data = self._pack(message)
            header = len(data).to_bytes(_HEADER_BYTES, "little")
            if fds:
                socket.send_fds(self._socket, [header], fds)  # too short to be sent partially
                header = b""
            try:
                self._socket.sendall(header + data)
            except OSError as error:
                self.shut_down()  # no frame can follow a partial one
                raise ConnectionError("the other end is gone") from error

    def receive(self) -> tuple[Any, list[int]]:
        """The next message and its file descriptors, fewer if this process cannot open more. Arrays are tuples.

        EOFError: the other end is closed.
        """
        header, fds, _, _ = socket.recv_fds(self._socket, _HEADER_BYTES, MAX_SEGMENTS)
        header += self._read(_HEADER_BYTES - len(header))
        data = self._read(int.from_bytes(header, "little"))
        return unpack(data), list(fds)

    def _read(self, size: int) -> bytes:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            num_read = self._socket.recv_into(view)
            if num_read == 0:
                raise EOFError("the other end is gone")
            view = view[num_read:]
        return bytes(data)

    def shut_down(self, how: int = socket.SHUT_RDWR) -> None:
        """Shut down both directions, or one of them. Never waits; a `send` in progress fails."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(how)

    def close(self) -> None:
        """Shut down both directions and close the socket."""
        self.shut_down()
        self._socket.close()
