"""The port of an engine replica: fronts connect there, send requests, and get outputs.

    front:    token, connect -> submit ... cancel ... heartbeat ...
                                  '-> need (an image that the engine does not have) -> media
    replica:  hello, then load and outputs; refused for a request that it cannot read

The port is open on the address of this machine in Ray's network, which is loopback for a local Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
import ssl
from collections.abc import Callable, Generator
from functools import partial
from typing import Any

from saccade.engine.transport.wire import decode_request
from saccade.errors import ConfigError
from saccade.fleet.cluster.connections import (
    BUFFER_BYTES,
    TOKEN_BYTES,
    Address,
    read_message,
    tls_context,
    write_message,
)
from saccade.fleet.cluster.messages import pack, unpack
from saccade.fleet.cluster.replica_service import ReplicaService

logger = logging.getLogger(__name__)

_GREETING_S = 10.0
"""Seconds in which a front says who it is."""


class ReplicaServer:
    """Listens for fronts. Made in any thread, used in one event loop."""

    def __init__(self, service: ReplicaService, host: str) -> None:
        """Open a port of the address `host`."""
        self._service = service
        self._socket = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._address = Address(host, self._socket.getsockname()[1], secrets.token_bytes(TOKEN_BYTES))
        self._starting: asyncio.Task[asyncio.Server] | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    def address(self) -> Address:
        """Address for a front. Connections are accepted from the first call on."""
        if self._starting is None:
            tls = tls_context(ssl.Purpose.CLIENT_AUTH)
            starting = asyncio.start_server(self._serve, sock=self._socket, limit=BUFFER_BYTES, ssl=tls)
            self._starting = asyncio.create_task(starting)
        return self._address

    def close(self) -> None:
        """Close the port and all connections."""
        if self._starting is None:
            self._socket.close()
        else:
            self._starting.add_done_callback(lambda started: started.result().close())
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a connection to its end."""
        self._writers.add(writer)
        try:
            front = await self._greeting(reader)
            if front is not None:
                await _FrontConnection(front, self._service, reader, writer).run()
        except (OSError, EOFError, TimeoutError):
            pass  # the front is gone
        except ConfigError as error:
            logger.warning("a front cannot be served: %s", error)
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _greeting(self, reader: asyncio.StreamReader) -> str | None:
        """Id of the front. None: the token is wrong."""
        async with asyncio.timeout(_GREETING_S):
            token = await reader.readexactly(TOKEN_BYTES)
            if not secrets.compare_digest(token, self._address.token):
                return None
            _, front = unpack(await read_message(reader))
        return str(front)


class _Media:
    """The data of one image or video of a request. The front is asked for it when it is first awaited."""

    def __init__(self, ask: Callable[[], None]) -> None:
        self._ask = ask
        self._data: asyncio.Future[bytes] | None = None
        self._chunks: list[bytes] = []

    def __await__(self) -> Generator[Any, None, bytes]:
        if self._data is None:
            self._data = asyncio.get_running_loop().create_future()
            self._ask()
        return asyncio.shield(self._data).__await__()  # others may await it too

    def add(self, chunk: bytes | None, *, is_last: bool) -> None:
        """Add a part of the data. None: the front does not have the request any more."""
        if self._data is None or self._data.done():
            return
        if chunk is None:
            self._data.set_exception(ConnectionError("the front has no such request"))
            self._data.exception()  # it may be that nothing awaits it any more
            return
        self._chunks.append(chunk)
        if is_last:
            self._data.set_result(self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks))
            self._chunks = []


class _FrontConnection:
    """The connection of one front."""

    def __init__(
        self, front: str, service: ReplicaService, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._front, self._service, self._reader, self._writer = front, service, reader, writer
        self._submitting: set[asyncio.Task[None]] = set()
        self._media: dict[str, list[_Media]] = {}
        """Media of requests that are being submitted."""

    async def run(self) -> None:
        """Serve until the front leaves."""
        both = asyncio.create_task(self._read()), asyncio.create_task(self._write())
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (*both, *self._submitting):
                task.cancel()
            results = await asyncio.gather(*both, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                raise result

    async def _write(self) -> None:
        async with contextlib.aclosing(self._service.channel(self._front)) as messages:
            async for message in messages:
                write_message(self._writer, message)
                await self._writer.drain()  # outputs that arrive meanwhile are sent together

    async def _read(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            kind, content = unpack(await read_message(self._reader))
            if kind == "submit":
                task = asyncio.create_task(self._submit(*content))
                self._submitting.add(task)
                task.add_done_callback(self._submitting.discard)
            elif kind == "media":
                request_id, number, chunk, is_last = content
                if (media := self._media.get(request_id)) is not None:
                    media[number].add(chunk, is_last=is_last)
            elif kind == "cancel":
                loop.call_soon(self._service.cancel, self._front, content)  # after the task that submits it has begun
            elif kind == "heartbeat":
                self._service.heartbeat(self._front)
            else:
                raise ConfigError(f"a front sent a message of the kind {kind}. Run one version of Saccade everywhere")

    async def _submit(self, request_id: str, message: bytes) -> None:
        try:
            sent = decode_request(message)
            media = [_Media(partial(self._ask_for, request_id, number)) for number in range(len(sent.tasks))]
            self._media[request_id] = media
            await self._service.submit(self._front, sent, media)
        except Exception as error:
            logger.warning("request %s is refused: %r", request_id, error)
            write_message(self._writer, pack("refused", (request_id, repr(error))))
        finally:
            self._media.pop(request_id, None)

    def _ask_for(self, request_id: str, number: int) -> None:
        write_message(self._writer, pack("need", (request_id, number)))
