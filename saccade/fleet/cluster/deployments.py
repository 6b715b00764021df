"""Applications of a fleet on Ray Serve: engines of each version, fronts, controller. The cluster is connected already.

Fronts listen on a port of their own, so Ray Serve has no HTTP proxy. Fronts of one machine share the port.
"""

from __future__ import annotations

import hashlib

from ray import serve
from ray.serve.api import RunTarget
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.schema import LoggingConfig

from saccade import __version__
from saccade.config import encode
from saccade.fleet.bounds import Bounds, encoder_bounds
from saccade.fleet.cluster.encoder_replica import EncoderReplica
from saccade.fleet.cluster.engine_replica import EngineReplica
from saccade.fleet.cluster.engine_setup import EngineSetup
from saccade.fleet.cluster.front import Front, FrontSetup
from saccade.fleet.cluster.names import ENCODER, ENGINE, FRONT, engine_app, front_app
from saccade.fleet.cluster.ray_router import ChosenReplicaRouter
from saccade.fleet.config import FleetConfig, ModelConfig, VersionConfig
from saccade.fleet.scaling import ScalingPolicy

_UNLIMITED = 1_000_000
"""Calls that a replica takes at a time: admission is the front's."""
_METRICS_S = 1.0
"""Seconds between two reports of a replica's load to the scaling policy."""
_HEALTH_S, _HEALTH_TIMEOUT_S = 1.0, 30.0
_ENCODER_GRACE_S = 20.0
"""Seconds in which an encoder finishes the images that it has; engines encode the others themselves."""
_FRONT_GRACE_S = 5.0
"""Seconds for which a front finishes answers after its drain."""


def deploy_engines(
    fleet: FleetConfig, model: ModelConfig, version: VersionConfig, min_replicas: int, max_replicas: int
) -> None:
    """Deploy the engines of a version with their encoders, or change their bounds. Replicas that run stay.

    Does not wait for replicas.
    """
    setup = EngineSetup(
        model=model.name, version=version, has_encoders=model.encoders is not None,
        otlp_endpoint=fleet.server.otlp_endpoint,
    ).to_json()  # fmt: skip
    encoders = _encoders(model, setup, encoder_bounds(model, (min_replicas, max_replicas)))
    deployment = serve.deployment(
        name=ENGINE,
        ray_actor_options={"num_cpus": model.engines.cpus_per_replica, "num_gpus": version.gpus_per_replica},
        max_ongoing_requests=_UNLIMITED,
        graceful_shutdown_timeout_s=fleet.server.request_timeout_s,
        graceful_shutdown_wait_loop_s=0.5,
        health_check_period_s=_HEALTH_S,
        health_check_timeout_s=_HEALTH_TIMEOUT_S,
        request_router_config=RequestRouterConfig(request_router_class=ChosenReplicaRouter),  # type: ignore[arg-type]
        autoscaling_config=scaling_config(model.engines.scaling, min_replicas, max_replicas),
    )
    engines = _with_version(deployment(EngineReplica), setup).bind(setup, encoders)
    _run(engines, engine_app(fleet.name, model.name, version.name))


def _encoders(model: ModelConfig, setup: str, bounds: Bounds | None) -> serve.Application | None:
    """The encoder replicas of a version, which its engines call. None: the model has none."""
    pool = model.encoders
    if pool is None or bounds is None:
        return None
    deployment = serve.deployment(
        name=ENCODER,
        ray_actor_options={"num_cpus": pool.cpus_per_replica, "num_gpus": pool.gpus_per_replica},
        max_ongoing_requests=_UNLIMITED,
        graceful_shutdown_timeout_s=_ENCODER_GRACE_S,
        health_check_period_s=_HEALTH_S,
        health_check_timeout_s=_HEALTH_TIMEOUT_S,
        request_router_config=RequestRouterConfig(request_router_class=ChosenReplicaRouter),  # type: ignore[arg-type]
        autoscaling_config=scaling_config(pool.scaling, *bounds),
    )
    return _with_version(deployment(EncoderReplica), setup).bind(setup, pool.gpus_per_replica > 0)


def deploy_fronts(fleet: FleetConfig) -> None:
    """Deploy the fronts, or change how many there are."""
    deployment = serve.deployment(
        name=FRONT,
        ray_actor_options={"num_cpus": fleet.front.cpus_per_replica},
        max_ongoing_requests=_UNLIMITED,
        graceful_shutdown_timeout_s=fleet.server.drain_timeout_s + _FRONT_GRACE_S,
        health_check_period_s=_HEALTH_S,
        health_check_timeout_s=_HEALTH_TIMEOUT_S,
        autoscaling_config=scaling_config(fleet.front.scaling, fleet.front.min_replicas, fleet.front.max_replicas),
    )
    num_workers = max(1, round(fleet.front.cpus_per_replica))
    setup = FrontSetup(fleet=fleet.name, server=fleet.server, num_workers=num_workers)
    _run(_with_version(deployment(Front), setup.to_json()).bind(setup.to_json()), front_app(fleet.name))


def scaling_config(policy: ScalingPolicy, min_replicas: int, max_replicas: int) -> AutoscalingConfig:
    """Have Ray ask our policy for the number of replicas."""
    return AutoscalingConfig(
        min_replicas=min_replicas,
        max_replicas=max_replicas,
        initial_replicas=max(1, min_replicas),
        policy=AutoscalingPolicy(  # type: ignore[no-untyped-call]
            policy_function="saccade.fleet.cluster.ray_scaling:PredictedQueueTime",
            policy_kwargs={"policy": encode(policy), "min_replicas": min_replicas, "max_replicas": max_replicas},
        ),
        metrics_interval_s=_METRICS_S,
        look_back_period_s=2 * _METRICS_S,
        upscale_delay_s=0,
        downscale_delay_s=0,
    )


def delete_app(name: str) -> None:
    """Delete an application; its replicas finish what they have. No effect if there is none."""
    serve.delete(name, _blocking=False)


def _with_version(deployment: serve.Deployment, setup: str) -> serve.Deployment:
    """A deployment whose replicas stay as long as its setup does.

    Without a version of ours Ray makes a random one, and restarts all replicas when their number may change.
    """
    version = hashlib.sha256(f"{__version__} {setup}".encode()).hexdigest()
    return deployment.options(version=version, _internal=True)


def _run(application: serve.Application, name: str) -> None:
    serve.run_many(
        [RunTarget(application, name=name, route_prefix=None, logging_config=LoggingConfig(enable_access_log=False))],
        wait_for_ingress_deployment_creation=False,
        wait_for_applications_running=False,
    )
