"""`/v1/models`: the model that is served, and its LoRA adapters."""

from __future__ import annotations

from typing import Any

import orjson
from fastapi import APIRouter, Response

from saccade.serve.openapi import errors
from saccade.serve.protocol.models import ModelList, ServedModel
from saccade.serve.service import Service


def router(service: Service) -> APIRouter:
    """Return the list, and one entry by name."""
    routes = APIRouter(tags=["models"])

    def model(adapter: str | None = None) -> dict[str, Any]:
        engine = service.supervisor.loaded_engine
        return {
            "id": adapter or service.model_name,
            "object": "model",
            "created": service.created,
            "owned_by": "saccade",
            "max_model_len": None if engine is None else engine.max_length,
            "parent": None if adapter is None else service.model_name,
        }

    @routes.get("/v1/models", response_model=ModelList, responses=errors(401, 429), summary="List the served models")
    async def list_models() -> Response:
        models = [model(), *(model(name) for name in service.adapter_names)]
        return Response(orjson.dumps({"object": "list", "data": models}), media_type="application/json")

    @routes.get(
        "/v1/models/{name:path}", response_model=ServedModel, responses=errors(401, 404, 429), summary="One model"
    )
    async def get_model(name: str) -> Response:
        return Response(orjson.dumps(model(service.check_model(name))), media_type="application/json")

    return routes
