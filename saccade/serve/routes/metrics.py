"""`/metrics`: counters, gauges and histograms for Prometheus. `/metrics/history`: the last half hour of some of them.

The status view of the page shows the history. Both need a key, like the API.
"""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
from fastapi import APIRouter, Response

from saccade.serve.front import Front
from saccade.serve.metrics import CONTENT_TYPE
from saccade.serve.openapi import errors
from saccade.serve.protocol.metrics import HistoryOfMetrics

_PAGE: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/plain": {"schema": {"type": "string"}}}, "description": "Prometheus text format"}
}


def router(front: Front) -> APIRouter:
    """Return the metrics page and the history."""
    routes = APIRouter(tags=["metrics"])

    @routes.get(
        "/metrics", response_class=Response, responses=_PAGE | errors(401, 429), summary="Metrics for Prometheus"
    )
    async def metrics() -> Response:
        return Response(await asyncio.to_thread(front.metrics.render), media_type=CONTENT_TYPE)

    @routes.get(
        "/metrics/history",
        response_model=HistoryOfMetrics,
        responses=errors(400, 401, 429),
        summary="Recent metrics, as the status view of the page shows them",
    )
    async def history(after: float = 0.0) -> Response:
        """Return the samples later than the Unix time `after`."""
        content = {"started_at": front.created, **front.history.since(after)}
        return Response(orjson.dumps(content), media_type="application/json")

    return routes
