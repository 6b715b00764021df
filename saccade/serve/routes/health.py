"""`/health`: the process lives. `/ready`: requests can be served."""

from __future__ import annotations

from typing import Any, Literal

import orjson
from fastapi import APIRouter, Response

from saccade.serve.models import Models
from saccade.serve.protocol.common import Wire


class Health(Wire):
    """Whether the server can do its work."""

    status: Literal["ok", "ready", "loading", "restarting", "draining", "failed", "stopped"]
    """State of the server."""


def router(models: Models) -> APIRouter:
    """Return both endpoints. They need no key."""
    routes = APIRouter(tags=["health"])

    @routes.get("/health", response_model=Health, summary="Whether the process is alive")
    async def health() -> Response:
        return _answer(200, "ok")

    unavailable: dict[int | str, dict[str, Any]] = {503: {"model": Health, "description": "Not ready"}}

    @routes.get("/ready", response_model=Health, responses=unavailable, summary="Whether requests are served")
    async def ready() -> Response:
        state = models.state
        return _answer(200 if state == "ready" else 503, state)

    return routes


def _answer(status: int, state: str) -> Response:
    return Response(orjson.dumps({"status": state}), status, media_type="application/json")
