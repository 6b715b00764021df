"""TCP connections between fronts and engine replicas: messages with their length before them, TLS where Ray has it.

A replica tells its address to a front through Ray, with a token that opens it. Ray's own security therefore decides who
can connect: whoever may not call a replica gets no token.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from typing import NamedTuple

from saccade.errors import ConfigError
from saccade.fleet.cluster.messages import pack, unpack

TOKEN_BYTES = 32
"""Bytes of a token. They are the first ones on a connection, and nothing else is read without them."""
BUFFER_BYTES = 2**20
"""Bytes that wait to be read before the other end is slowed down."""
_LENGTH_BYTES = 8


class Address(NamedTuple):
    """Where a replica listens."""

    host: str
    """IP address."""
    port: int
    """TCP port."""
    token: bytes
    """Bytes that open it."""

    def to_bytes(self) -> bytes:
        """The address as a message."""
        return pack("address", tuple(self))

    @classmethod
    def from_bytes(cls, message: bytes) -> Address:
        """Inverse of `to_bytes`. ConfigError: the replica runs another version of Saccade."""
        _, (host, port, token) = unpack(message)
        return cls(host, port, token)


async def read_message(reader: asyncio.StreamReader) -> bytes:
    """The next message. EOFError: the other end is closed."""
    length = int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "little")
    return await reader.readexactly(length)


def write_message(writer: asyncio.StreamWriter, message: bytes) -> None:
    """Send a message, after those before it. No effect if the connection is closed."""
    if not writer.is_closing():
        writer.write(len(message).to_bytes(_LENGTH_BYTES, "little") + message)


def tls_context(purpose: ssl.Purpose) -> ssl.SSLContext | None:
    """TLS with the certificates that Ray uses, which both ends show each other. None: Ray's own ports have none."""
    if os.environ.get("RAY_USE_TLS", "0").lower() not in ("1", "true"):
        return None
    try:
        context = ssl.create_default_context(purpose, cafile=os.environ["RAY_TLS_CA_CERT"])
        context.load_cert_chain(os.environ["RAY_TLS_SERVER_CERT"], os.environ["RAY_TLS_SERVER_KEY"])
    except (KeyError, OSError) as error:
        raise ConfigError(
            f"RAY_USE_TLS is set, but the certificates cannot be used ({error!r}). Set RAY_TLS_CA_CERT, "
            "RAY_TLS_SERVER_CERT and RAY_TLS_SERVER_KEY to files on this machine"
        ) from error
    context.check_hostname = False  # certificates of a cluster are for all its machines
    context.verify_mode = ssl.CERT_REQUIRED
    return context
