"""Carries out the driver's actions on Ray Serve, and says what runs there."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ray import serve
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview, DeploymentStatusOverview

from saccade.config import encode
from saccade.errors import ConfigError
from saccade.fleet.actions import AppHealth, AskProbe, DeleteEngines, DeployEngines, DeployFronts
from saccade.fleet.cluster.deployments import delete_app, deploy_engines, deploy_fronts
from saccade.fleet.cluster.names import ENCODER, FRONT, engine_app, front_app, model_and_version
from saccade.fleet.config import FleetConfig

logger = logging.getLogger(__name__)

_PROBE_TIMEOUT_S = 60.0
_NUM_PROBES = 4
"""Probes that are asked at the same time."""
_MAX_REASON = 500


class RayCluster:
    """The Ray Serve of the cluster that this process is connected to. Calls block: use it from a thread."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_NUM_PROBES, thread_name_prefix="saccade-probe")

    def observe(self, fleet: str) -> tuple[dict[tuple[str, str], AppHealth], AppHealth | None]:
        """Applications of engines by model and version, and that of the fronts."""
        apps = serve.status().applications
        engines = {key: _health(app) for name, app in apps.items() if (key := model_and_version(fleet, name))}
        front = apps.get(front_app(fleet))
        return engines, None if front is None else _health(front)

    def deploy_engines(self, fleet: FleetConfig, action: DeployEngines) -> None:
        """Create an application of engines, or change its bounds."""
        try:
            deploy_engines(fleet, action.model, action.version, *action.bounds)
        except (ValueError, TypeError) as error:  # Ray refuses it; other faults are Ray's own, and may pass
            name = f"version {action.version.name} of model {action.model.name}"
            raise ConfigError(f"{name} cannot be deployed: {_one_line(str(error))}") from error

    def deploy_fronts(self, action: DeployFronts) -> None:
        """Create the fronts, or change them."""
        deploy_fronts(action.fleet)

    def delete_engines(self, fleet: str, action: DeleteEngines) -> None:
        """Delete an application of engines."""
        delete_app(engine_app(fleet, action.model, action.version))

    def delete_fronts(self, fleet: str) -> None:
        """Delete the fronts."""
        delete_app(front_app(fleet))

    def ask(self, fleet: str, action: AskProbe, on_answer: Callable[[str | None], None]) -> None:
        """Ask a probe through a front."""
        self._threads.submit(self._ask, fleet, action, on_answer)

    def _ask(self, fleet: str, action: AskProbe, on_answer: Callable[[str | None], None]) -> None:
        answer: str | None = None
        try:
            handle = serve.get_deployment_handle(FRONT, front_app(fleet))
            probe = json.dumps(encode(action.probe))
            answer = handle.probe.remote(action.model, action.version, probe).result(timeout_s=_PROBE_TIMEOUT_S)
        except Exception as error:  # it is asked again, until the rollout's probe_timeout_s
            logger.warning(
                "probe %s of %s %s has no answer: %s", action.probe.name, action.model, action.version,
                _one_line(str(error)) or type(error).__name__,
            )  # fmt: skip
        on_answer(answer)

    def close(self) -> None:
        """Wait for no more answers."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _health(app: ApplicationStatusOverview) -> AppHealth:
    counts = {name: _counts(deployment) for name, deployment in app.deployments.items()}
    encoders = counts.pop(ENCODER, None)
    num_ready, num_starting = next(iter(counts.values()), (0, 0))
    is_failed = app.status is ApplicationStatus.DEPLOY_FAILED
    return AppHealth(
        num_ready=num_ready, num_starting=num_starting, encoders=encoders,
        failure=_failure(app) if is_failed else None, is_deleting=app.status is ApplicationStatus.DELETING,
    )  # fmt: skip


def _counts(deployment: DeploymentStatusOverview) -> tuple[int, int]:
    """Replicas that serve, and those that start."""
    states = {str(state): count for state, count in deployment.replica_states.items()}
    return states.get("RUNNING", 0), sum(states.get(state, 0) for state in ("STARTING", "UPDATING", "RECOVERING"))


def _failure(app: ApplicationStatusOverview) -> str:
    """The error of a replica, without its traceback."""
    messages = [deployment.message for deployment in app.deployments.values()] + [app.message]
    for message in messages:
        errors = re.findall(r"^\s*((?:[\w.]+\.)?\w+(?:Error|Exception): .*)$", message, re.MULTILINE)
        if errors:
            _, is_ours, text = errors[-1].rpartition("saccade.errors.")
            return _one_line(text.partition(": ")[2] if is_ours else text)
    return _one_line(next((message for message in messages if message), "Ray could not deploy it"))


def _one_line(text: Any) -> str:
    return " ".join(str(text).split())[:_MAX_REASON]
