"""The models that an application serves, and which of them answers a request.

    name of the model, user -> Models.choose -> Service, adapter

`saccade serve` has one model. Other directories may have several, each with several versions, and may change them while
requests run: a route asks the directory once, when its request arrives.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from fastapi import Request

from saccade.serve.engine_owner import State, refusal_of
from saccade.serve.errors import ApiError
from saccade.serve.protocol.models import ServedModel
from saccade.serve.record import RequestRecord
from saccade.serve.service import Service


class Chosen(NamedTuple):
    """The model, version and adapter that answer a request."""

    service: Service
    """The model, or a version of it."""
    adapter: str | None
    """LoRA adapter; None: the base model."""
    experiment: str | None = None
    """Experiment that the user takes part in; None: in none."""
    variant: str | None = None
    """Variant of the experiment by which the service was chosen; None: it was not chosen by the experiment."""


class Models(ABC):
    """A directory of models. Used in the event loop."""

    @property
    @abstractmethod
    def services(self) -> Sequence[Service]:
        """Models and versions that can be chosen now."""

    @abstractmethod
    def choose(self, name: str | None, user: str) -> Chosen:
        """Return what answers a request of a user; raises ApiError for a name that is not served.

        `name` is None if the request names no model. The same user gets the same version (`RequestRecord.sticky_user`).
        """

    @property
    def state(self) -> State:
        """The state of the server: `ready` if any model is."""
        states: list[State] = [service.owner.state for service in self.services] or ["loading"]
        return "ready" if "ready" in states else states[0]

    @property
    def max_length(self) -> int | None:
        """Maximum tokens of a prompt for any of the models; None if it is not known of one."""
        lengths = [service.max_length for service in self.services]
        known = [length for length in lengths if length is not None]
        return max(known) if known and len(known) == len(lengths) else None

    def check_room(self) -> None:
        """Refuse a request before its body is read, if no model could serve any request now."""
        services = self.services
        if any(service.has_room for service in services):
            return
        for service in sorted(services, key=lambda one: one.owner.state != "ready"):
            service.check_room()  # says why, and counts the refusal
        raise refusal_of("loading")

    def listed(self) -> list[ServedModel]:
        """Return all models that requests can name, each followed by its adapters."""
        found: dict[str, ServedModel] = {}
        for service in self.services:
            for model in service.listed():
                found.setdefault(model.id, model)
        return list(found.values())

    def unknown(self, name: str | None) -> ApiError:
        """Return the error of a request for a model that is not served."""
        known = ", ".join(repr(model.id) for model in self.listed()[:16]) or "none: no model is ready"
        if name is None:
            return ApiError(400, f"model is required; use {known}", code="missing_required_parameter", param="model")
        return ApiError(
            404, f"the model {name[:100]!r} is not served here; use {known}", code="model_not_found", param="model"
        )


class OneModel(Models):
    """The directory of a server with one model and its adapters."""

    def __init__(self, service: Service) -> None:
        self._service = service

    @property
    def services(self) -> Sequence[Service]:
        """The only one."""
        return (self._service,)

    def choose(self, name: str | None, user: str) -> Chosen:
        """Return the model, or one of its adapters."""
        if name is None or name == self._service.model_name:
            return Chosen(self._service, None)
        if name in self._service.adapter_names:
            return Chosen(self._service, name)
        raise self.unknown(name)


def choose_model(
    models: Models, name: str | None, request: Request, *, user: str | None = None
) -> tuple[Service, str | None]:
    """Return the service and the adapter that answer a request; notes them in its record. `user`: of the body."""
    record: RequestRecord = request.state.record
    record.user = user
    service, adapter, record.experiment, record.variant = models.choose(name, record.sticky_user)
    record.model, record.version, record.adapter = service.model_name, service.version, adapter
    return service, adapter
