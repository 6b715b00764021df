"""The HTTP application: the routes that it serves and the errors that it answers with. Nothing else is served."""

from __future__ import annotations

import functools
from collections.abc import Container, Sequence, Set
from functools import partial

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.routing import Route
from starlette.types import Scope

from saccade import __version__
from saccade.serve.body_limits import BodyLimits
from saccade.serve.config import ServeConfig
from saccade.serve.errors import ApiError, validation_error
from saccade.serve.front import Front
from saccade.serve.gate import Gate
from saccade.serve.json_route import with_body_limits
from saccade.serve.models import Models, OneModel
from saccade.serve.openapi import describe
from saccade.serve.protocol.chat import CHAT_UNSUPPORTED
from saccade.serve.protocol.responses import RESPONSES_UNSUPPORTED
from saccade.serve.record import log_request
from saccade.serve.routes import admin, chat, completions, health, metrics, page, responses, tokenize
from saccade.serve.routes import models as listing
from saccade.serve.service import Service
from saccade.serve.supervisor import Supervisor

PUBLIC_PATHS = {"/health", "/ready", "/openapi.json", *page.PATHS}
"""Paths that need no key."""


def create_app(
    front: Front, models: Models, *, only_model: str | None = None, routers: Sequence[APIRouter] = (),
    public_paths: Set[str] = frozenset(),
) -> Gate:  # fmt: skip
    """Build the public application, wrapped in its gate.

    `only_model`: name of the only model that is ever served, which the OpenAPI document then states. `routers`: further
    routes, which need a key like the others, except for `public_paths`.
    """
    app = FastAPI(
        title="Saccade",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        openapi_url="/openapi.json",
        redirect_slashes=False,
    )
    for route in (health, listing, chat, completions, responses, tokenize):
        app.include_router(route.router(models))
    for router in (metrics.router(front), *routers):
        app.include_router(router)
    has_fleet = any(isinstance(route, Route) and route.path == "/fleet" for one in routers for route in one.routes)
    app.include_router(page.router(front.config.max_body_bytes, has_fleet=has_fleet))
    _answer_errors(app)
    document = functools.cache(partial(describe, app, model_name=only_model, has_keys=front.keys is not None))
    app.openapi = document  # type: ignore[method-assign]
    served = {route.path for route in app.routes if isinstance(route, Route)}

    return Gate(
        with_body_limits(app, partial(_body_limits, front.config, models)),
        front.config,
        keys=front.keys,
        scope="api",
        is_public=lambda path: path in PUBLIC_PATHS or path in public_paths,
        is_recorded=lambda path: path.startswith("/v1/") or path in ("/tokenize", "/detokenize"),
        check_room=models.check_room,
        observers=front.observers,
        on_response=lambda method, scope, status: front.metrics.observe_http(method, _route(scope, served), status),
        rates=front.rates,
    )


def create_admin_app(service: Service, supervisor: Supervisor) -> Gate:
    """Build the admin application of a server with one model, wrapped in a gate of its own.

    Every path needs an admin key.
    """
    front = service.front
    app = FastAPI(
        title="Saccade admin", version=__version__, docs_url=None, redoc_url=None, openapi_url="/openapi.json"
    )
    app.include_router(admin.router(service, supervisor))
    _answer_errors(app)
    document = functools.cache(partial(describe, app, model_name=None, has_keys=True))
    app.openapi = document  # type: ignore[method-assign]
    return Gate(
        with_body_limits(app, partial(_body_limits, front.config, OneModel(service))),
        front.config,
        keys=front.keys,
        scope="admin",
        is_public=lambda path: False,
        is_recorded=lambda path: path.startswith("/admin/"),
        check_room=lambda: None,
        observers=[log_request],
        on_response=lambda method, scope, status: None,
        rates=front.rates,
    )


def _body_limits(config: ServeConfig, models: Models, path: str) -> BodyLimits:
    """Return the limits on the body of a request for this path."""
    return BodyLimits(
        max_depth=config.max_json_depth,
        max_length=models.max_length,
        max_prompts=config.max_completions if path == "/v1/completions" else 1,
    )


def _route(scope: Scope, served: Container[str]) -> str:
    """Return the entry of the route table that a request is for, or "none".

    Metrics never see a path that a client made up.
    """
    if "route" in scope:
        return str(scope["route"].path)
    return scope["path"] if scope["path"] in served else "none"


def _answer_errors(app: FastAPI) -> None:
    """Answer every error in OpenAI's shape."""

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        if not isinstance(error, ApiError):
            message, code = _ROUTER_ERRORS.get(error.status_code, ("the request cannot be served", "bad_request"))
            error = ApiError(error.status_code, message, code=code, headers=error.headers)
        request.state.record.fail(error.code, error.status_code)
        return error.response()

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        unsupported = RESPONSES_UNSUPPORTED if request.url.path == "/v1/responses" else CHAT_UNSUPPORTED
        found = validation_error(error.errors(), error.body, unsupported)
        request.state.record.fail(found.code, found.status_code)
        return found.response()


_ROUTER_ERRORS = {
    404: ("there is no such path; /openapi.json lists what is served", "not_found"),
    405: ("this path does not take that method", "method_not_allowed"),
}
