"""Checks before every route (host, key, rate limit, size and time of the body), and headers and the log line after it.

This is plain ASGI, because it runs for every request. Every path needs a key unless it is listed as public; a path that
is not served is the router's 404.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Callable, Iterator, Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from saccade.serve.config import ServeConfig
from saccade.serve.cors import cors_headers, preflight_headers
from saccade.serve.errors import CLOSE, ApiError
from saccade.serve.keys import ApiKey, KeyRing
from saccade.serve.keys import Scope as KeyScope
from saccade.serve.rate_limit import RateLimiter
from saccade.serve.record import Observer, RequestRecord

logger = logging.getLogger(__name__)

Headers = dict[bytes, bytes]
_MAX_LENGTH_DIGITS = 15

_HEADERS = [
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
]
"""Headers of every response that does not set them itself."""


class Gate:
    """Checks requests and passes them to the application."""

    def __init__(
        self,
        app: ASGIApp,
        config: ServeConfig,
        *,
        keys: KeyRing | None,
        scope: KeyScope,
        is_public: Callable[[str], bool],
        is_recorded: Callable[[str], bool],
        check_room: Callable[[], None],
        observers: Sequence[Observer],
        on_response: Callable[[str, Scope, int], None],
        rates: RateLimiter,
    ) -> None:
        """`is_public`: whether a path needs no key. `is_recorded`: whether it is for the engine and logged.

        `check_room` raises before the body of a recorded request is read if no request can be served. `on_response` is
        called with the method and the scope of every request and the status of its response, 0 if the client left
        before it.
        """
        self._app, self._config, self._keys, self._scope = app, config, keys, scope
        self._is_public, self._is_recorded, self._check_room = is_public, is_recorded, check_room
        self._observers, self._on_response, self._rates = observers, on_response, rates
        self.num_open = 0
        """Recorded requests in progress."""
        self._num_body_bytes = 0
        """Bytes received so far of the bodies of all requests in progress."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request. A lifespan scope is passed on, any other than HTTP is ignored."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        headers, method = dict(scope["headers"]), scope["method"]
        if method == "HEAD":  # it is answered as GET, and uvicorn sends no body
            scope = {**scope, "method": "GET"}
        record = RequestRecord(id=f"req-{uuid.uuid4().hex}", route=scope["path"])
        response = _Response(send, record, cors_headers(self._config.cors_origins, headers))
        is_recorded = self._is_recorded(scope["path"])
        self.num_open += is_recorded
        try:
            with self._body(receive) as body:
                await self._serve(scope, headers, body, response, record)
        except ApiError as error:
            record.fail(error.code, error.status_code)
            await _send_error(response, scope, error)
        except Exception:
            logger.exception("request %s failed", record.id)
            record.fail("internal_error", 500)
            await _send_error(response, scope, _internal_error())
        finally:
            record.ended_at = time.perf_counter()
            self.num_open -= is_recorded
            self._on_response(method, scope, record.status)
            if is_recorded:
                for observe in self._observers:
                    observe(record)

    async def _serve(
        self, scope: Scope, headers: Headers, receive: Receive, response: _Response, record: RequestRecord
    ) -> None:
        self._check_host(headers)
        preflight = preflight_headers(self._config.cors_origins, scope["method"], headers)
        if preflight is not None:
            await response({"type": "http.response.start", "status": 204, "headers": preflight})
            await response({"type": "http.response.body", "body": b""})
            return
        if trace := headers.get(b"traceparent"):
            record.traceparent = trace.decode("latin-1")
        key = None
        if self._keys is not None and not self._is_public(scope["path"]):
            key = self._authenticate(self._keys, headers)
            record.key_name = key.name
        self._check_length(headers)
        if scope["method"] == "POST" and self._is_recorded(scope["path"]):
            self._check_room()
        scope.setdefault("state", {}).update(record=record, key=key)
        await self._app(scope, receive, response)

    def _check_host(self, headers: Headers) -> None:
        allowed = self._config.checked_hosts
        if allowed and _host_name(headers.get(b"host", b"").decode("latin-1")) not in allowed:
            raise ApiError(
                421,
                "this server does not serve that host name; its operator can allow it with allowed_hosts",
                code="unknown_host",
            )

    def _authenticate(self, keys: KeyRing, headers: Headers) -> ApiKey:
        kind, _, secret = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
        key = keys.find(secret.strip(), self._scope) if kind.lower() == "bearer" else None
        if key is None:
            raise ApiError(
                401,
                "no valid API key: send it as the header Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        wait_s = self._rates.take_request(key, time.monotonic())
        if wait_s:
            limit = key.requests_per_minute
            message = f"the key {key.name} may send {limit} requests per minute; try again in {wait_s:.1f} s"
            raise ApiError(429, message, code="rate_limit_exceeded", retry_after_s=wait_s)
        return key

    def _check_length(self, headers: Headers) -> None:
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or len(length) > _MAX_LENGTH_DIGITS or int(length) > self._config.max_body_bytes:
            raise self._too_large()

    def _too_large(self) -> ApiError:
        limit = self._config.max_body_bytes
        return ApiError(413, f"the body has more than {limit} bytes", code="body_too_large", headers=CLOSE)

    @contextlib.contextmanager
    def _body(self, receive: Receive) -> Iterator[Receive]:
        """Bound the body of one request: its bytes, those of all requests together, and the time it takes to arrive."""
        config, deadline = self._config, time.monotonic() + self._config.body_timeout_s
        num_bytes, is_complete = 0, False

        async def limited() -> Message:
            nonlocal num_bytes, is_complete
            if is_complete:
                return await receive()
            try:
                async with asyncio.timeout(deadline - time.monotonic()):
                    message = await receive()
            except TimeoutError as error:
                raise ApiError(
                    408,
                    f"the body did not arrive within {config.body_timeout_s:g} s",
                    code="body_timeout",
                    headers=CLOSE,
                ) from error
            is_complete = not message.get("more_body", False)
            num_new = len(message.get("body", b""))
            num_bytes += num_new
            self._num_body_bytes += num_new
            if num_bytes > config.max_body_bytes:
                raise self._too_large()
            if self._num_body_bytes > config.max_open_body_bytes and num_bytes > config.body_share:
                raise ApiError(
                    503,
                    "the server holds too many large requests; try again later",
                    code="overloaded",
                    retry_after_s=2.0,
                    headers=CLOSE,
                )
            return message

        try:
            yield limited
        finally:
            self._num_body_bytes -= num_bytes


def _host_name(host: str) -> str:
    """Return the name in a Host header, without its port."""
    name = host.partition("]")[0].removeprefix("[") if host.startswith("[") else host.partition(":")[0]
    return name.lower().rstrip(".")


def _internal_error() -> ApiError:
    return ApiError(500, "the server failed on this request; it was logged", code="internal_error")


class _Response:
    """Sends a response with the headers of the server, and records its status."""

    def __init__(self, send: Send, record: RequestRecord, more_headers: list[tuple[bytes, bytes]]) -> None:
        self._send, self._record, self._more_headers = send, record, more_headers
        self.has_started = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.has_started = True
            self._record.status = message["status"]
            headers = list(message.get("headers", []))
            headers += [header for header in self._more_headers if header not in headers]
            present = {name for name, _ in headers}
            headers += [header for header in _HEADERS if header[0] not in present]
            headers.append((b"x-request-id", self._record.id.encode()))
            if self._record.version is not None:
                headers.append((b"saccade-version", self._record.version.encode()))
            message = {**message, "headers": headers}
        await self._send(message)


async def _send_error(response: _Response, scope: Scope, error: ApiError) -> None:
    """Send the error. If the response has begun, raise it instead, which closes the connection."""
    if response.has_started:
        raise error

    async def never() -> Message:
        return {"type": "http.disconnect"}

    await error.response()(scope, never, response)
