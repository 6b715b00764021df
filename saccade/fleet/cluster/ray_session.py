"""Connects this process to Ray: a local one that ends with it, or a cluster that runs.

Ray's ports run code for whoever reaches them. A local Ray listens on loopback, has no dashboard, and asks every caller
for a token that only its own processes have: replicas of Ray Serve listen on all addresses, whatever one says.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from saccade.errors import ConfigError
from saccade.fleet.cluster.names import CONTROLLER, controller_app
from saccade.fleet.config import FleetConfig

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # read when Ray is imported
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's default gives everything else on the machine priority

import ray
from ray import serve
from ray._private import ray_constants

_NAMESPACE = "saccade"
_LOOPBACK = "127.0.0.1"
_CONNECT_S = 5.0


@contextmanager
def local_ray() -> Iterator[None]:
    """Start a Ray on this machine, and end it with everything that runs there."""
    os.environ.pop("RAY_AUTH_MODE", None)  # a new Ray then asks for a token; a mode that is set is read at import only
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))  # inherited by Ray's processes, stored nowhere
    _keep_loopback()
    try:
        ray.init(
            address="local", include_dashboard=False, _node_ip_address=_LOOPBACK, namespace=_NAMESPACE,
            log_to_driver=False, logging_level=logging.ERROR,
        )  # fmt: skip
    except Exception as error:  # Ray raises no narrower class when its processes do not start in time
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"Ray does not start on this machine: {reason} Look at its logs in /tmp/ray") from error
    try:
        host = ray.get_runtime_context().gcs_address.rpartition(":")[0]
        assert host == _LOOPBACK, f"Ray listens at {host}, which other machines may reach"
        _start_serve()
        yield
    finally:
        ray.shutdown()


@contextmanager
def connected_ray(address: str) -> Iterator[None]:
    """Connect to a cluster that runs."""
    host, separator, port = address.rpartition(":")
    if not separator or not port.isdigit():
        raise ConfigError(f"address is {address!r}. Use HOST:PORT of the cluster's head, such as 10.0.0.1:6379")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()  # Ray itself tries for 80 s
    except OSError as error:
        raise ConfigError(f"no Ray cluster answers at {address} ({error}). Check the address, or ray start") from error
    if host == _LOOPBACK:
        _keep_loopback()
    try:
        ray.init(address=address, namespace=_NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"the Ray cluster at {address} refuses the connection ({reason}). Use the same versions of Ray and Python; "
            "if it asks for a token, set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN, or have the token in ~/.ray/auth_token"
        ) from error
    try:
        _start_serve()
        yield
    finally:
        ray.shutdown()


def _keep_loopback() -> None:
    """Keep Ray from replacing a loopback address by the machine's own, as it does on Linux for clusters."""
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"], ray_constants.ENABLE_RAY_CLUSTER = "0", False


def _start_serve() -> None:
    """Start Ray Serve without its HTTP proxies: fronts listen themselves."""
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    serve.start(proxy_location="Disabled")


def cluster_name() -> str:
    """The cluster in words, the same for all its controllers."""
    return f"Ray at {ray.get_runtime_context().gcs_address}"


def log_folder() -> str:
    """Folder of the logs of all processes of this Ray, on this machine."""
    node: Any = ray._private.worker._global_node
    return str(node.get_logs_dir_path())


def check_resources(fleet: FleetConfig) -> None:
    """Refuse a fleet whose smallest form needs more than the cluster has."""
    found: Mapping[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    least, _ = fleet.resources()
    needed = {"CPU": least.cpus, "GPU": least.gpus}
    lacking = [
        f"{needed[name]:g} {name}s and has {found.get(name, 0):g}"
        for name in needed
        if needed[name] > found.get(name, 0) + 1e-6
    ]
    if lacking:
        raise ConfigError(
            f"the cluster is too small: the smallest form of the fleet needs {', '.join(lacking)}. "
            "Lower replicas, cpus_per_replica or gpus_per_replica, or add machines"
        )


def controller_failure(fleet: str) -> str | None:
    """Why the controller does not run; None: it runs, or starts."""
    app = serve.status().applications.get(controller_app(fleet))
    if app is None or app.status != "DEPLOY_FAILED":
        return None
    message = app.deployments[CONTROLLER].message if CONTROLLER in app.deployments else app.message
    return message.strip().splitlines()[-1]


def has_controller(fleet: str) -> bool:
    """Whether the cluster runs a controller of the fleet."""
    app = serve.status().applications.get(controller_app(fleet))
    return app is not None and app.status != "DELETING"
