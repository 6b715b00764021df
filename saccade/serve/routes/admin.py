"""Admin routes, on the admin port: status, log level, drain, caches, adapters, a profile of the live core."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import orjson
from fastapi import APIRouter, Response
from pydantic import Field

from saccade.errors import UserError
from saccade.serve.errors import ApiError, bad_request
from saccade.serve.json_route import JsonRoute
from saccade.serve.openapi import errors
from saccade.serve.protocol.common import Wire
from saccade.serve.service import Service
from saccade.serve.supervisor import Supervisor

_ERRORS = errors(400, 401, 408, 413, 415, 429, 503)


class LogLevel(Wire):
    """The least severe messages that are logged."""

    level: Literal["debug", "info", "warning", "error"]
    """Level of these messages."""


class ProfileRequest(Wire):
    """How long to profile."""

    seconds: Annotated[float, Field(gt=0, le=60)] = 2.0
    """Duration. The trace grows with it: about 10 MB per second under load."""


class AdapterRequest(Wire):
    """A LoRA adapter to serve."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    """The model that requests name."""
    folder: Annotated[str, Field(min_length=1, max_length=4096)]
    """Its folder on the server, in PEFT's layout."""


class Done(Wire):
    """Answer to an action."""

    status: str
    """State of the server."""


def router(service: Service, supervisor: Supervisor) -> APIRouter:
    """Return all admin routes of a server with one model, whose engine the supervisor owns."""
    routes = APIRouter(prefix="/admin", tags=["admin"], route_class=JsonRoute)
    profiling = asyncio.Lock()

    def done() -> Response:
        return Response(orjson.dumps({"status": supervisor.state}), media_type="application/json")

    @routes.get("/status", responses=_ERRORS, summary="State, queues and counters", response_model=dict[str, Any])
    async def status() -> Response:
        return Response(orjson.dumps(_status(service, supervisor)), media_type="application/json")

    @routes.post("/log-level", response_model=Done, responses=_ERRORS, summary="Change the log level of the front end")
    async def set_log_level(body: LogLevel) -> Response:
        logging.getLogger("saccade").setLevel(body.level.upper())
        return done()

    @routes.post("/drain", response_model=Done, responses=_ERRORS, summary="Refuse new requests; the server stays up")
    async def drain() -> Response:
        supervisor.drain()
        return done()

    @routes.post("/resume", response_model=Done, responses=_ERRORS, summary="Accept requests again after a drain")
    async def resume() -> Response:
        supervisor.resume()
        return done()

    @routes.post("/flush-caches", response_model=Done, responses=_ERRORS, summary="Forget prefixes and images")
    async def flush_caches() -> Response:
        service.engine.flush_caches()
        return done()

    @routes.post("/adapters", response_model=Done, responses=_ERRORS, summary="Serve a LoRA adapter as a model")
    async def add_adapter(body: AdapterRequest) -> Response:
        if body.name == service.model_name:
            raise bad_request("name is that of the base model; choose another one", param="name")
        await _change_adapters(partial(service.engine.add_adapter, body.name, body.folder))
        return done()

    @routes.delete(
        "/adapters/{name:path}", response_model=Done, responses=_ERRORS,
        summary="Take no new requests for an adapter; those that run end as usual",
    )  # fmt: skip
    async def remove_adapter(name: str) -> Response:
        await _change_adapters(partial(service.engine.remove_adapter, name))
        return done()

    @routes.post("/profile", responses=_ERRORS, summary="Profile the live core", response_model=dict[str, Any])
    async def profile(body: ProfileRequest) -> Response:
        engine = service.engine
        if profiling.locked():
            raise ApiError(429, "a profile is in progress; try again later", code="overloaded", retry_after_s=5)
        async with profiling:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "trace.json"
                if not await asyncio.to_thread(engine.profile, path, body.seconds):
                    raise ApiError(503, "the core wrote no profile; its log says why", code="engine_stopped")
                trace = await asyncio.to_thread(path.read_bytes)
        headers = {"content-disposition": 'attachment; filename="trace.json"'}
        return Response(trace, media_type="application/json", headers=headers)

    return routes


async def _change_adapters(change: Callable[[], None]) -> None:
    """Load or remove an adapter, in a thread."""
    try:
        await asyncio.to_thread(change)
    except UserError as error:
        raise bad_request(str(error)) from error


def _status(service: Service, supervisor: Supervisor) -> dict[str, Any]:
    engine, admission = supervisor.loaded_engine, service.admission
    found: dict[str, Any] = {
        "status": supervisor.state,
        "model": service.model_name,
        "num_restarts": supervisor.num_restarts,
        "loaded_s": supervisor.loaded_s,
        "restarted_s": supervisor.restarted_s,
    }
    if engine is not None:
        found |= {
            "core_pid": engine.core_pid,
            "worker_pids": engine.worker_pids,
            "max_length": engine.max_length,
            "num_pages": engine.num_pages,
            "adapters": {name: str(folder) for name, folder in engine.adapters.items()},
            "refused_adapters": engine.refused_adapters,
            "statistics": dataclasses.asdict(engine.statistics),
        }
    if admission is not None:
        found["admission"] = {
            "num_open": admission.num_open,
            "num_preprocessing": admission.num_preprocessing,
            "num_completions": admission.num_completions,
            "num_pages": admission.num_pages,
            "num_image_tokens": admission.num_image_tokens,
            "num_media_bytes": admission.num_media_bytes,
            "num_refused": admission.num_refused,
        }
    return found
