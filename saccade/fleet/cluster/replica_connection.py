"""A front's connection to an engine replica: requests, images that are asked for, and the replica's messages."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Sequence

from saccade.fleet.cluster.connections import BUFFER_BYTES, Address, read_message, tls_context, write_message
from saccade.fleet.cluster.messages import Kind, pack

_CONNECT_S = 10.0
_SILENT_S = 30.0
"""Seconds without a message after which a replica is lost; it reports its load every second."""
_CHUNK_BYTES = 2**20
"""Part of an image or video after which other messages may be sent."""


class ReplicaConnection:
    """An open connection. Used in one event loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Use `open`."""
        self._reader, self._writer = reader, writer

    @staticmethod
    async def open(address: Address, front: str) -> ReplicaConnection:
        """Connect as the front of this id. OSError: nothing listens there."""
        async with asyncio.timeout(_CONNECT_S):
            reader, writer = await asyncio.open_connection(
                address.host, address.port, limit=BUFFER_BYTES, ssl=tls_context(ssl.Purpose.SERVER_AUTH)
            )
        writer.write(address.token)
        connection = ReplicaConnection(reader, writer)
        connection._send("connect", front)
        return connection

    async def messages(self) -> AsyncIterator[bytes]:
        """Messages of the replica until it closes the connection. TimeoutError: it says nothing any more."""
        while True:
            try:
                async with asyncio.timeout(_SILENT_S):
                    message = await read_message(self._reader)
            except EOFError:
                return
            yield message

    def submit(self, request_id: str, message: bytes) -> None:
        """Send a request; nothing else is sent of its media than what the replica asks for."""
        self._send("submit", (request_id, message))

    async def send_media(self, request_id: str, number: int, data: bytes | None) -> None:
        """Send an image or video that the replica has asked for. None: the request has ended."""
        if data is None:
            self._send("media", (request_id, number, None, True))
            return
        for start in range(0, max(1, len(data)), _CHUNK_BYTES):
            chunk, is_last = data[start : start + _CHUNK_BYTES], start + _CHUNK_BYTES >= len(data)
            self._send("media", (request_id, number, chunk, is_last))
            await self._writer.drain()

    def cancel(self, request_ids: Sequence[str]) -> None:
        """Cancel requests."""
        self._send("cancel", list(request_ids))

    def heartbeat(self) -> None:
        """Say that this front is alive."""
        self._send("heartbeat", None)

    def close(self) -> None:
        """Close the connection."""
        self._writer.close()

    def _send(self, kind: Kind, content: object) -> None:
        write_message(self._writer, pack(kind, content))
