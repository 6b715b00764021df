"""Pages of other web origins that may call the API from a browser: none unless configured, and never with cookies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

_ALLOWED = [
    (b"access-control-allow-methods", b"GET, POST"),
    (b"access-control-allow-headers", b"authorization, content-type"),
    (b"access-control-max-age", b"600"),
]


def cors_headers(origins: Sequence[str], headers: Mapping[bytes, bytes]) -> list[tuple[bytes, bytes]]:
    """Headers that let the page of an allowed origin read the response."""
    origin = headers.get(b"origin")
    if origin is None or origin.decode("latin-1") not in origins:
        return []
    return [
        (b"access-control-allow-origin", origin),
        (b"access-control-expose-headers", b"retry-after, x-request-id"),
        (b"vary", b"origin"),
        (b"cross-origin-resource-policy", b"cross-origin"),
    ]


def preflight_headers(
    origins: Sequence[str], method: str, headers: Mapping[bytes, bytes]
) -> list[tuple[bytes, bytes]] | None:
    """The answer to a browser that asks before it calls; None: this is no such question, or of an origin that may not."""
    allowed = cors_headers(origins, headers)
    if method != "OPTIONS" or b"access-control-request-method" not in headers or not allowed:
        return None
    return allowed + _ALLOWED
