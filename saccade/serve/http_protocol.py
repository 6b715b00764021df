"""Limits of connections: their number, the size and time of headers, the time of a stalled write.

uvicorn bounds none of these with its fast parser. The limits work with both of its parsers.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from saccade.serve.config import ServeConfig

_CLOSE_S = 5.0
"""Time for the last bytes of a connection that is being closed."""


def _raw_error(status: str, message: str, code: str) -> bytes:
    body = f'{{"error":{{"message":"{message}","type":"invalid_request_error","param":null,"code":"{code}"}}}}'
    head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
    return f"{head}retry-after: 5\r\nconnection: close\r\n\r\n{body}".encode()


_TOO_MANY = _raw_error("503 Service Unavailable", "too many connections", "too_many_connections")
_TOO_LARGE = _raw_error("431 Request Header Fields Too Large", "the headers are too large", "headers_too_large")
_BAD_REQUEST = _raw_error("400 Bad Request", "the request is not valid HTTP", "invalid_http")
_TOO_SLOW = _raw_error("408 Request Timeout", "the headers did not arrive in time", "header_timeout")

if TYPE_CHECKING:
    _Base = asyncio.Protocol
else:
    try:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol as _Base
    except ImportError:
        from uvicorn.protocols.http.h11_impl import H11Protocol as _Base


def guarded_protocol(config: ServeConfig, max_connections: int) -> type[asyncio.Protocol]:
    """Return uvicorn's HTTP protocol with the limits of a server. `max_connections`: what the system allows."""

    class Guarded(_Base):
        transport: asyncio.Transport
        connections: set[Any]
        cycle: Any

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._num_header_bytes = 0
            self._ignores_input = False
            self._seen_cycle: Any = None
            self._stall_timer: asyncio.TimerHandle | None = None
            loop = asyncio.get_running_loop()
            self._header_timer: asyncio.TimerHandle | None = loop.call_later(
                config.header_timeout_s, self._refuse, _TOO_SLOW
            )
            if len(self.connections) > max_connections:
                self._refuse(_TOO_MANY)

        def connection_lost(self, exc: Exception | None) -> None:
            for timer in (self._header_timer, self._stall_timer):
                if timer is not None:
                    timer.cancel()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if self.transport.is_closing() or self._ignores_input:
                return
            is_between = (
                self.cycle is None or not self.cycle.more_body
            )  # bytes of the next request, which may arrive while this one is answered
            if is_between and self._header_timer is None:
                loop = asyncio.get_running_loop()
                self._header_timer = loop.call_later(config.header_timeout_s, self._refuse, _TOO_SLOW)
            super().data_received(data)
            if self.cycle is not self._seen_cycle:
                self._seen_cycle = self.cycle
                self._num_header_bytes = 0
                if self._header_timer is not None:
                    self._header_timer.cancel()
                    self._header_timer = None
            elif is_between:
                self._num_header_bytes += len(data)
                if self._num_header_bytes > config.max_header_bytes:
                    self._refuse(_TOO_LARGE)

        def pause_writing(self) -> None:
            super().pause_writing()
            loop = asyncio.get_running_loop()
            self._stall_timer = loop.call_later(config.write_timeout_s, self.transport.abort)

        def resume_writing(self) -> None:
            if self._stall_timer is not None:
                self._stall_timer.cancel()
                self._stall_timer = None
            super().resume_writing()

        def timeout_keep_alive_handler(self) -> None:
            self._close()

        def send_400_response(self, msg: str) -> None:
            self._refuse(_BAD_REQUEST)

        def _refuse(self, response: bytes) -> None:
            """Refuse what the client sends.

            A request that arrived whole before it is still answered; then the connection closes.
            """
            if self.transport.is_closing():
                return
            cycle = self.cycle
            has_request = cycle is not None and (cycle.response_started or not cycle.more_body)
            if has_request and not cycle.response_complete:
                self._ignores_input = True
                cycle.keep_alive = False
                return
            self.transport.write(response)
            self._close()

        def _close(self) -> None:
            """Close after the last bytes are sent, or without sending them if the client does not read."""
            if not self.transport.is_closing():
                self.transport.close()
                asyncio.get_running_loop().call_later(_CLOSE_S, self.transport.abort)

    return Guarded
