"""Parts of the OpenAPI document that the routes share."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

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
    """Return the error responses of a route."""
    return {status: {"model": ErrorBody, "description": _DESCRIPTIONS[status]} for status in statuses}


def describe(app: FastAPI, *, model_name: str | None, has_keys: bool) -> dict[str, Any]:
    """Return the OpenAPI document, made true: invalid requests are 400 and not 422, and keys are needed.

    The model is named if there is only one.
    """
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    for path in document["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)
            if has_keys and "401" in operation["responses"]:
                operation["security"] = [{"key": []}]
    schemas = document["components"]["schemas"]
    for name in ("ValidationError", "HTTPValidationError"):
        schemas.pop(name, None)
    for schema in schemas.values():
        model = schema.get("properties", {}).get("model")
        if model is not None and model_name is not None:
            nullable = [{"type": "null"}] if "anyOf" in model else []
            schema["properties"]["model"] = {"anyOf": [{"const": model_name, "type": "string"}, *nullable]}
    if has_keys:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return document


GENERATION_ERRORS = errors(400, 401, 404, 408, 413, 415, 429, 500, 503, 504)
"""Error responses of a route that uses the engine."""


_EVENT = {
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
    "additionalProperties": False,
}
"""One server-sent event; its data is JSON, or [DONE]."""


def event_stream(description: str) -> dict[int | str, dict[str, Any]]:
    """Return the response of a route that may answer with server-sent events."""
    return {200: {"content": {"text/event-stream": {"schema": _EVENT}}, "description": description}}
