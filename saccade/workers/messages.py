"""Messages between an owner and its workers: JSON with a length prefix, file descriptors, and errors as values."""

from __future__ import annotations

import json
import socket
import traceback
from collections.abc import Sequence
from typing import Any

from saccade.errors import CheckpointError, ConfigError, DataError, ImageError, RequestError, StorageError, UserError

HEADER_BYTES = 8
"""Length prefix of a message."""
MAX_FDS = 4
"""Maximum number of file descriptors passed at once, the socket of a new worker included."""
_MAX_ERROR_LENGTH = 10_000
"""Maximum characters of an error message."""
_ERRORS = {
    kind.__name__: kind
    for kind in (ConfigError, DataError, StorageError, CheckpointError, RequestError, ImageError, UserError)
}


def send(connection: socket.socket, message: Any, fds: Sequence[int] = ()) -> None:
    """Send a JSON message, prefixed with its length, and file descriptors."""
    body = json.dumps(message).encode()
    data = len(body).to_bytes(HEADER_BYTES, "little") + body
    num_sent = socket.send_fds(connection, [data], fds) if fds else 0
    connection.sendall(data[num_sent:])


def receive(connection: socket.socket) -> Any:
    """Receive a message; None when the peer has closed its end."""
    message, _ = receive_with_fds(connection)
    return message


def receive_with_fds(connection: socket.socket) -> tuple[Any, list[int]]:
    """Receive a message and its file descriptors; the message is None when the peer has closed its end."""
    first, fds, _, _ = socket.recv_fds(connection, HEADER_BYTES, MAX_FDS)
    header = _receive_bytes(connection, HEADER_BYTES - len(first)) if first else None
    if header is None:
        return None, []
    body = _receive_bytes(connection, int.from_bytes(first + header, "little"))
    return None if body is None else json.loads(body), list(fds)


def _receive_bytes(connection: socket.socket, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        chunk = connection.recv(size - len(data))
        if not chunk:
            return None
        data += chunk
    return bytes(data)


def encode_error(error: Exception) -> dict[str, Any]:
    """An exception as a message with the key `error`.

    `kind` is None for an internal error, whose text is the traceback.
    """
    if isinstance(error, UserError):
        return {"error": str(error)[:_MAX_ERROR_LENGTH], "kind": type(error).__name__}
    return {"error": "".join(traceback.format_exception(error))[-_MAX_ERROR_LENGTH:], "kind": None}


def decode_error(message: dict[str, Any], failure: str) -> UserError | RuntimeError:
    """The exception another process sent. `failure` precedes the traceback of an internal error."""
    kind, text = message.get("kind"), str(message["error"])
    if kind is None:
        return RuntimeError(f"{failure}:\n{text}")
    return _ERRORS.get(str(kind), UserError)(text)
