"""The controller of a fleet: a Ray Serve deployment of one replica. Ray starts it again when it dies."""

from __future__ import annotations

import logging
import threading

from ray import serve

from saccade.fleet.cluster.control_loop import ControlLoop
from saccade.fleet.cluster.names import CONTROLLER, controller_app
from saccade.fleet.cluster.ray_cluster import RayCluster
from saccade.fleet.lease import Owner
from saccade.fleet.state import FleetState
from saccade.log import set_up_logging

logger = logging.getLogger(__name__)

_EVERY_S = 1.0
_MAX_CALLS = 10_000


class Controller:
    """Runs the control loop in a thread, and answers fronts."""

    def __init__(self, fleet: str, state: str, cluster: str) -> None:
        """`cluster`: the Ray cluster in words, the same for every controller on it."""
        set_up_logging()
        self._fleet = fleet
        self._cluster = RayCluster()
        self._loop = ControlLoop(FleetState(state), self._cluster, Owner.of_this_process(cluster))
        self._is_stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="saccade-controller", daemon=True)
        self._thread.start()

    async def sync(self, report: bytes) -> bytes:
        """Answer the report of a front with the view that it should follow."""
        return self._loop.sync(report)

    def check_health(self) -> None:
        """Raise if the thread has ended; Ray replaces the replica."""
        if not self._thread.is_alive() and not self._loop.has_ended:
            raise RuntimeError("the controller has stopped")

    def _run(self) -> None:
        is_failing = False
        while not self._is_stopping.wait(_EVERY_S):
            try:
                self._loop.tick()
            except Exception as error:  # of the store or of Ray: both may come back
                if not is_failing:
                    logger.exception("the controller cannot decide, and tries again: %s", error)
                is_failing = True
                continue
            if is_failing:
                logger.warning("the controller decides again")
            is_failing = False
            if self._loop.has_ended:
                serve.delete(controller_app(self._fleet), _blocking=False)
                return

    def __del__(self) -> None:
        """Stop; Ray calls this when it stops the replica."""
        self._is_stopping.set()
        self._cluster.close()


def controller_application(fleet: str, state: str, cluster: str) -> serve.Application:
    """Return the controller as an application of Ray Serve."""
    deployment = serve.deployment(
        name=CONTROLLER, num_replicas=1, max_ongoing_requests=_MAX_CALLS, graceful_shutdown_timeout_s=2.0,
        health_check_period_s=1.0, health_check_timeout_s=30.0, ray_actor_options={"num_cpus": 0},
    )  # fmt: skip
    return deployment(Controller).bind(fleet, state, cluster)


def deploy_controller(fleet: str, state: str, cluster: str) -> None:
    """Deploy the controller, in place of one that runs. Does not wait for it."""
    application = controller_application(fleet, state, cluster)
    serve.run_many(
        [serve.RunTarget(application, controller_app(fleet), route_prefix=None)],
        wait_for_ingress_deployment_creation=False, wait_for_applications_running=False,
    )  # fmt: skip
