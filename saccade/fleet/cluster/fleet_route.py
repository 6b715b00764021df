"""`/fleet`: versions, replicas and decisions, as one front knows them. The page shows them.

It needs a key, like the API. `/-/healthz` needs none: KubeRay asks there whether a pod gets requests, because Ray
Serve's HTTP proxy would answer there; fronts take its place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import APIRouter, Response

from saccade.fleet.cluster.view import DecisionView, ModelView, VersionState, VersionView
from saccade.serve.openapi import errors
from saccade.serve.protocol.common import JsonObject, Wire

if TYPE_CHECKING:
    from saccade.fleet.cluster.fleet_models import FleetModels
    from saccade.fleet.cluster.replica_set import ReplicaSet


PROXY_HEALTH = "/-/healthz"
"""Path that needs no key."""


class ReplicaStatus(Wire):
    """An engine replica."""

    name: str
    """Name of the replica."""
    is_draining: bool
    """Whether it gets no more requests."""
    requests: int
    """Requests on it."""
    queue_s: float
    """Seconds of work that wait on it."""
    pooled_patches: int
    """Patches of images that encoder replicas have encoded for it."""
    late_patches: int
    """Patches of images that it asked encoder replicas for, and encoded itself."""


class VersionStatus(Wire):
    """A version of a model. The counts are those of this front since it follows the version."""

    name: str
    """Name of the version."""
    state: VersionState
    """Its phase. Only a ready version has users."""
    share: float
    """Share of the model's users that it has, 0 to 1."""
    adapters: list[str]
    """Adapters that it serves."""
    replicas: list[ReplicaStatus] = []
    """Replicas that are connected."""
    encoders: int | None = None
    """Encoder replicas that serve; null: the model has none."""
    requests_continued: int = 0
    """Requests that lost their replica and continued on another one."""
    requests_lost: int = 0
    """Requests that lost their replica and could not continue."""
    patches: int = 0
    """Patches of images in requests."""
    patches_resident: int = 0
    """Patches of images that the replica had."""


class ModelStatus(Wire):
    """A model."""

    name: str
    """Name of the model in requests."""
    versions: list[VersionStatus]
    """Versions that run, start or drain."""
    experiments: list[JsonObject]
    """Experiments with their results, over all fronts, as `saccade fleet status --json` has them."""


class Decision(Wire):
    """A decision of the controller."""

    number: int
    """Number of the decision, from 1."""
    time: float
    """Unix time of the decision."""
    what: str
    """What happens."""
    reason: str
    """Why."""
    model: str | None
    """Model that it is about; null: the whole fleet."""
    version: str | None
    """Version that it is about; null: the whole model."""
    share: float | None
    """Share of users that the version has from then on; null: the decision is not about that."""


class FleetStatus(Wire):
    """A fleet, as one front knows it."""

    name: str
    """Name of the fleet."""
    front: str
    """Id of the front that answers."""
    num_fronts: int
    """Fronts that are alive."""
    generation: int
    """Number of the desired state that is followed; 0 before the controller has answered."""
    view_age_s: float
    """Seconds since the controller's last answer. It answers every second while it is there."""
    models: list[ModelStatus]
    """Models of the fleet."""
    decisions: list[Decision]
    """The newest decisions, oldest first."""


def router(fleet: str, front: str, models: FleetModels) -> APIRouter:
    """Return the routes. `fleet` is the fleet's name, `front` the id of this front."""
    routes = APIRouter(tags=["fleet"])

    @routes.get(
        "/fleet", response_model=FleetStatus, responses=errors(401, 429), summary="The fleet, as a front knows it"
    )
    async def status() -> Response:
        return Response(_status(fleet, front, models).model_dump_json(), media_type="application/json")

    @routes.get(PROXY_HEALTH, include_in_schema=False)
    async def proxy_health() -> Response:
        is_ready = models.state == "ready"
        return Response("success" if is_ready else models.state, 200 if is_ready else 503, media_type="text/plain")

    return routes


def _status(fleet: str, front: str, models: FleetModels) -> FleetStatus:
    view, replicas = models.view, models.replicas()
    return FleetStatus(
        name=fleet, front=front, num_fronts=view.num_fronts, generation=view.generation, view_age_s=models.view_age_s,
        models=[
            ModelStatus(
                name=model.name, versions=[_version(model, one, replicas) for one in model.versions],
                experiments=[dict(one) for one in view.reports.get(model.name, ())],
            )
            for model in view.models
        ],
        decisions=[_decision(one) for one in view.decisions],
    )  # fmt: skip


def _version(model: ModelView, version: VersionView, replicas: dict[tuple[str, str], ReplicaSet]) -> VersionStatus:
    name = version.config.name
    found = VersionStatus(
        name=name, state=version.state, share=model.shares.get(name, 0.0), adapters=sorted(version.config.adapters),
        encoders=version.num_encoders,
    )  # fmt: skip
    if (reached := replicas.get((model.name, name))) is not None:  # else this front cannot serve it
        found.replicas = [
            ReplicaStatus(
                name=one.name,
                is_draining=one.is_draining,
                requests=one.num_running,
                queue_s=one.queued_s,
                pooled_patches=one.pooled_patches,
                late_patches=one.late_patches,
            )
            for one in reached.loads()
        ]
        found.requests_continued, found.requests_lost = reached.num_continued, reached.num_lost
        found.patches, found.patches_resident = reached.num_patches, reached.num_resident_patches
    return found


def _decision(one: DecisionView) -> Decision:
    return Decision(
        number=one.number, time=one.time_s, what=one.what, reason=one.reason, model=one.model, version=one.version,
        share=one.share,
    )  # fmt: skip
