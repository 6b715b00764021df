"""Routes with a JSON body, parsed in one place: strict JSON, bounded depth, no NaN, and errors in OpenAI's shape."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from typing import Any

import numpy as np
import orjson
from fastapi import Request, Response
from fastapi.routing import APIRoute
from numpy.typing import NDArray
from starlette.types import ASGIApp, Receive, Scope, Send

from saccade.serve.body_limits import BodyLimits, TextCounter
from saccade.serve.errors import ApiError, bad_request

_MAX_VALUES = 2**19
"""Maximum values of a body; each may take 100 times its size in memory."""
_MARKS = b",[{"
"""Characters that precede a value."""
_STEP = 2**20
"""Bytes that are counted at once."""
_LARGE_BYTES = 2**14
"""Larger bodies may take milliseconds to parse and check."""
_MAX_FIELDS = 10_000
"""Maximum fields of one object: validation makes an error for each that is unknown."""


def with_body_limits(app: ASGIApp, limits_of: Callable[[str], BodyLimits]) -> ASGIApp:
    """Pass the limits of bodies to the JSON routes of an application."""
    large_bodies = asyncio.Lock()

    async def with_state(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope["state"].update(body_limits=limits_of(scope["path"]), large_bodies=large_bodies)
        await app(scope, receive, send)

    return with_state


class JsonRoute(APIRoute):
    """A route whose body is parsed by `parse_json`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler with our request class."""
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(_JsonRequest(request.scope, request.receive))

        return handle


class _JsonRequest(Request):
    async def body(self) -> bytes:
        """Read the body. It must be JSON by its content type, and its text must fit into the context."""
        kind = self.headers.get("content-type", "").partition(";")[0].strip().lower()
        if self.method == "POST" and kind != "application/json":
            raise ApiError(415, "send the body as content-type application/json", code="unsupported_media_type")
        if not hasattr(self, "_body"):
            text, parts = TextCounter(), []
            async with aclosing(self.stream()) as stream:
                async for part in stream:
                    self._limits.check_text(text.add(part))
                    parts.append(part)
            self._body = b"".join(parts)
        return self._body

    @property
    def _limits(self) -> BodyLimits:
        limits: BodyLimits = self.scope["state"]["body_limits"]
        return limits

    async def json(self) -> Any:
        """Parse the body."""
        body = await self.body()
        if len(body) > _LARGE_BYTES:
            async with self.scope["state"]["large_bodies"]:
                await asyncio.sleep(0)  # the event loop serves other requests between any two
        return await parse_json(body, max_depth=self._limits.max_depth)


async def parse_json(body: bytes, *, max_depth: int) -> Any:
    """Parse JSON. NaN, infinities, invalid UTF-8, lone surrogates, deep nesting and very many values are refused."""
    await check_num_values(body)
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise bad_request(f"the body is not JSON (character {error.pos})", code="invalid_json") from error
    level = [value]
    for _ in range(max_depth):
        level = [child for node in level for child in _children(node)]
        if not level:
            return value
    raise bad_request(f"the body is nested more than {max_depth} levels deep", code="invalid_json")


async def check_num_values(body: bytes) -> None:
    """Refuse a body of very many values. If it has many separators, values are counted in a thread."""
    if _has_many_marks(body) and await asyncio.to_thread(count_values, body) > _MAX_VALUES:
        raise bad_request(f"the body has more than {_MAX_VALUES} values", code="invalid_json")


def _has_many_marks(body: bytes) -> bool:
    """Whether there are more marks, in texts or between values, than values are allowed.

    `bytes.count` would take four times as long.
    """
    num_marks, characters = 0, np.frombuffer(body, np.uint8)
    for start in range(0, len(body), _STEP) if len(body) > _MAX_VALUES else ():
        part = characters[start : start + _STEP]
        num_marks += sum(int(np.count_nonzero(part == mark)) for mark in _MARKS)
        if num_marks > _MAX_VALUES:
            return True
    return False


def count_values(body: bytes, step: int = _STEP) -> int:
    """Count the marks outside of strings, `step` bytes at a time, until there are more than allowed."""
    num_values, in_string, is_escaped = 0, False, False
    characters = np.frombuffer(body, np.uint8)
    for start in range(0, len(body), step):
        part = characters[start : start + step]
        is_quote = part == ord('"')
        escaped = _escaped(part, is_escaped)
        is_escaped = len(escaped) > 0 and int(escaped[-1]) == len(part)
        is_quote[escaped[: len(escaped) - is_escaped]] = False
        is_inside = (np.cumsum(is_quote, dtype=np.uint8) + in_string) & 1  # parity survives an overflow
        is_mark = functools.reduce(np.logical_or, [part == mark for mark in _MARKS])
        num_values += int(np.count_nonzero(is_mark & (is_inside == 0)))
        if num_values > _MAX_VALUES:
            break
        in_string = bool(is_inside[-1])
    return num_values


def _escaped(part: NDArray[np.uint8], is_first_escaped: bool) -> NDArray[np.int64]:
    """Return the offsets of escaped characters, each after every second backslash of a run.

    The last may be in the next part.
    """
    backslashes = np.flatnonzero(part == ord("\\"))
    if is_first_escaped:
        first = np.zeros(1, np.int64)
        return np.concatenate([first, _escaped(part[1:], False) + 1])
    if not len(backslashes):
        return backslashes
    number = np.arange(len(backslashes))
    starts_run = np.diff(backslashes, prepend=-2) > 1
    in_run = number - np.maximum.accumulate(np.where(starts_run, number, 0))
    escaping: NDArray[np.int64] = backslashes[in_run % 2 == 0]
    return escaping + 1


def _children(node: Any) -> Any:
    if isinstance(node, dict):
        if len(node) > _MAX_FIELDS:
            raise bad_request(f"the body has an object of more than {_MAX_FIELDS} fields", code="invalid_json")
        return [child for child in node.values() if isinstance(child, dict | list)]
    return [child for child in node if isinstance(child, dict | list)] if isinstance(node, list) else ()
