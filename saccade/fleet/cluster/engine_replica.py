"""The Ray Serve deployment of engines: one replica is one engine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray import serve

from saccade.engine.host import EngineHost
from saccade.fleet.cluster.encoder_pool import EncoderPool
from saccade.fleet.cluster.engine_setup import EngineSetup
from saccade.fleet.cluster.names import ENCODER
from saccade.fleet.cluster.ray_calls import RayEncoderCalls
from saccade.fleet.cluster.replica_server import ReplicaServer
from saccade.fleet.cluster.replica_service import ReplicaService
from saccade.fleet.cluster.replica_tracing import replica_tracer
from saccade.fleet.cluster.running_replicas import watch
from saccade.fleet.config import VersionConfig
from saccade.log import set_up_logging
from saccade.serve.server import public_limits, with_media_workers

logger = logging.getLogger(__name__)


def open_pool(version: VersionConfig, encoders: Any) -> EncoderPool:
    """Connect to the encoder replicas of a version, in the event loop of an engine replica."""
    calls, loop = RayEncoderCalls(encoders), asyncio.get_running_loop()
    pool = EncoderPool(version, calls)

    def follow(names: frozenset[str]) -> None:
        loop.call_soon_threadsafe(pool.set_replicas, names)

    watch((encoders.app_name, ENCODER), follow)
    calls.wake()  # the first call makes the router, which notes the replicas
    return pool


class WrongReplicaError(Exception):
    """A call reached another replica than the one that it names, which is gone."""


class EngineReplica:
    """One engine. Every call names the replica that it is for: Ray routes by this argument."""

    def __init__(self, setup: str, encoders: Any | None = None) -> None:
        """Load the engine; Ray reports an error that this raises. `encoders`: the pool of the version, if any."""
        set_up_logging()
        made = EngineSetup.from_json(setup)
        version, self._name = made.version, serve.get_replica_context().replica_id.unique_id
        host = EngineHost.load(
            Path(version.checkpoint), device="auto" if version.gpus_per_replica else "cpu", dtype=None,
            config=replace(with_media_workers(version.engine), core_process=True), limits=public_limits(),
            adapters=version.adapters,
        )  # fmt: skip
        self._service = ReplicaService(
            self._name, version, host, tracer=replica_tracer(made, self._name),
            open_pool=None if encoders is None else partial(open_pool, version, encoders),
        )  # fmt: skip
        self._server = ReplicaServer(self._service, ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        logger.info("replica %s of %s %s is ready", self._name, made.model, version.name)

    async def channel(self, front: str, replica: str) -> AsyncIterator[bytes]:
        """Address at which a front connects. The call lasts until the front leaves: Ray stops no replica in a call."""
        if replica != self._name:
            raise WrongReplicaError(f"replica {replica} is gone; this is {self._name}")
        yield self._server.address().to_bytes()
        await self._service.hold(front)

    async def wake(self, replica: None) -> None:
        """Answer a call that starts a replica, if the pool has none."""

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Load of this replica; Ray passes it to the scaling policy."""
        return self._service.scaling_load()

    def check_health(self) -> None:
        """Raise if the engine has stopped; Ray replaces the replica."""
        if self._service.has_failed:
            raise RuntimeError("the engine core has stopped")

    def __del__(self) -> None:
        """Stop the engine; Ray calls this when it stops the replica."""
        if (service := getattr(self, "_service", None)) is not None:
            service.close()
