"""`/metrics`: counters, gauges and histograms for Prometheus and the status view. It needs a key like the API does."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Response

from saccade.serve.metrics import CONTENT_TYPE
from saccade.serve.openapi import errors
from saccade.serve.service import Service

_PAGE: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/plain": {"schema": {"type": "string"}}}, "description": "Prometheus text format"}
}


def router(service: Service) -> APIRouter:
    """The metrics page."""
    routes = APIRouter(tags=["metrics"])

    @routes.get(
        "/metrics", response_class=Response, responses=_PAGE | errors(401, 429), summary="Metrics for Prometheus"
    )
    async def metrics() -> Response:
        return Response(await asyncio.to_thread(service.metrics.render), media_type=CONTENT_TYPE)

    return routes
