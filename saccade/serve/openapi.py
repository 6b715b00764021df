"""Parts of the OpenAPI document that the routes share."""

from __future__ import annotations

from typing import Any

from saccade.serve.protocol.common import ErrorBody

_DESCRIPTIONS = {
    400: "The request is not valid, or asks for what is not supported",
    401: "No valid API key",
    404: "Not served here",
    408: "The body did not arrive in time",
    413: "The body is too large",
    415: "The body is not JSON",
    421: "Another host name",
    429: "Too many requests: of this key, or of all clients; Retry-After says when to try again",
    500: "The server failed",
    503: "The model is being loaded or restarted, or the server is shutting down",
    504: "The request did not start or end in time",
}


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Error responses of a route."""
    return {status: {"model": ErrorBody, "description": _DESCRIPTIONS[status]} for status in statuses}


GENERATION_ERRORS = errors(400, 401, 404, 408, 413, 415, 429, 500, 503, 504)
"""Of a route that uses the engine."""


def event_stream(description: str) -> dict[int | str, dict[str, Any]]:
    """A route that may answer with server-sent events."""
    return {200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}, "description": description}}
