"""`/v1/models`: the models that are served, and their LoRA adapters."""

from __future__ import annotations

import orjson
from fastapi import APIRouter, Response

from saccade.serve.models import Models
from saccade.serve.openapi import errors
from saccade.serve.protocol.models import ModelList, ServedModel


def router(models: Models) -> APIRouter:
    """Return the list, and one entry by name."""
    routes = APIRouter(tags=["models"])

    @routes.get("/v1/models", response_model=ModelList, responses=errors(401, 429), summary="List the served models")
    async def list_models() -> Response:
        data = [model.model_dump() for model in models.listed()]
        return Response(orjson.dumps({"object": "list", "data": data}), media_type="application/json")

    @routes.get(
        "/v1/models/{name:path}", response_model=ServedModel, responses=errors(401, 404, 429), summary="One model"
    )
    async def get_model(name: str) -> Response:
        for model in models.listed():
            if model.id == name:
                return Response(orjson.dumps(model.model_dump()), media_type="application/json")
        raise models.unknown(name)

    return routes
