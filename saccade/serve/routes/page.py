"""`/`: the page to talk to the model, and its files. Static, without a key; the page itself asks for one.

Its policy allows the server's own files only: no inline script or style, no other host, no HTML made of strings.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NamedTuple

import orjson
from fastapi import APIRouter, Request, Response

from saccade.serve.errors import ApiError

FOLDER = Path(__file__).parents[1] / "page"
_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data: blob:",
        "media-src blob:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "cross-origin-opener-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "cache-control": "no-cache",
}


class _File(NamedTuple):
    content: bytes
    media_type: str
    etag: str


def _read(path: Path) -> _File:
    content = path.read_bytes()
    return _File(content, _TYPES[path.suffix], f'"{hashlib.sha256(content).hexdigest()[:32]}"')


_FILES = {path.name: _read(path) for path in sorted(FOLDER.iterdir())}
_SERVER = "/page/server.json"
PATHS = frozenset({"/", _SERVER, *(f"/page/{name}" for name in _FILES)})
"""Paths of the page; they need no key."""


def router(max_body_bytes: int, *, has_fleet: bool) -> APIRouter:
    """Return the page, its files, and what it has to know of the server.

    That is the limit that it checks before it uploads a video, and whether it shows the fleet that `/fleet` describes.
    """
    routes = APIRouter(include_in_schema=False)
    server = orjson.dumps({"max_body_bytes": max_body_bytes, "has_fleet": has_fleet})

    @routes.get("/")
    async def index(request: Request) -> Response:
        return _answer(request, _FILES["index.html"])

    @routes.get(_SERVER)
    async def about_the_server() -> Response:
        return Response(server, media_type="application/json")

    @routes.get("/page/{name}")
    async def file(request: Request, name: str) -> Response:
        if name not in _FILES:
            raise ApiError(404, "the page has no such file", code="not_found")
        return _answer(request, _FILES[name])

    return routes


def _answer(request: Request, file: _File) -> Response:
    headers = _HEADERS | {"etag": file.etag}
    if request.headers.get("if-none-match") == file.etag:
        return Response(status_code=304, headers=headers)
    return Response(file.content, headers=headers, media_type=file.media_type)
