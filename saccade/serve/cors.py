"""Let pages of other web origins call the API from a browser: none unless configured, and never with cookies."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from saccade.errors import ConfigError

_ORIGIN = re.compile(r"([a-z][a-z0-9+.-]*)://([a-z0-9._-]+|\[[0-9a-f:]+\])(?::([0-9]{1,5}))?")
_DEFAULT_PORTS = {"http": "80", "https": "443"}
_HEADER_NAMES = re.compile(rb"[\t ]*[!#$%&'*+.^_`|~0-9A-Za-z-]+[\t ]*(?:,[\t ]*[!#$%&'*+.^_`|~0-9A-Za-z-]+[\t ]*)*")
_MAX_HEADER_NAMES_LENGTH = 2048
_USUAL_HEADERS = b"authorization, content-type"


def check_origins(origins: Sequence[object]) -> None:
    """Refuse an origin that no browser sends, since it would never match."""
    for origin in origins:
        found = _ORIGIN.fullmatch(origin) if isinstance(origin, str) else None
        if origin != "*" and (
            found is None or int(found[3] or 0) >= 2**16 or found[3] == _DEFAULT_PORTS.get(found[1], "")
        ):
            raise ConfigError(
                f"cors_origins has {origin!r}, which no browser sends; use https://HOST or https://HOST:PORT as "
                "browsers do (lower case, no path, no default port), or *"
            )


def cors_headers(origins: Sequence[str], headers: Mapping[bytes, bytes]) -> list[tuple[bytes, bytes]]:
    """Return the headers that let the page of an allowed origin read the response."""
    origin = headers.get(b"origin")
    if origin is None or not ("*" in origins or origin.decode("latin-1") in origins):
        return []
    return [
        (b"access-control-allow-origin", b"*" if "*" in origins else origin),
        (b"access-control-expose-headers", b"retry-after, saccade-version, x-request-id"),
        (b"vary", b"origin"),
        (b"cross-origin-resource-policy", b"cross-origin"),
    ]


def preflight_headers(
    origins: Sequence[str], method: str, headers: Mapping[bytes, bytes]
) -> list[tuple[bytes, bytes]] | None:
    """Return the headers that answer a preflight request, or None if this is none, or its origin is not allowed.

    A page may send any header: the API reads only those it knows, and client libraries add some (x-stainless-...).
    """
    allowed = cors_headers(origins, headers)
    if method != "OPTIONS" or b"access-control-request-method" not in headers or not allowed:
        return None
    return [
        *allowed,
        (b"vary", b"access-control-request-headers"),
        (b"access-control-allow-methods", b"GET, HEAD, POST"),
        (b"access-control-allow-headers", _allowed_headers(headers.get(b"access-control-request-headers", b""))),
        (b"access-control-max-age", b"600"),
    ]


def _allowed_headers(asked: bytes) -> bytes:
    """The requested names, if they are names of headers."""
    if len(asked) > _MAX_HEADER_NAMES_LENGTH or not _HEADER_NAMES.fullmatch(asked):
        return _USUAL_HEADERS
    return b", ".join(name.strip(b"\t ") for name in asked.split(b","))
