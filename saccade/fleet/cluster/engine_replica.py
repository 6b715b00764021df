"""The Ray Serve deployment of engines: one replica is one engine."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ray import serve

from saccade.config import decode, encode
from saccade.engine.host import EngineHost
from saccade.fleet.cluster.replica_service import ReplicaService
from saccade.fleet.config import VersionConfig
from saccade.log import set_up_logging
from saccade.serve.server import public_limits, with_media_workers

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class EngineSetup:
    """What a replica loads."""

    model: str
    """Name of the model."""
    version: VersionConfig
    """Checkpoint, adapters and engine settings."""

    def to_json(self) -> str:
        """The setup as JSON text."""
        return json.dumps(encode(self))

    @staticmethod
    def from_json(text: str) -> EngineSetup:
        """Inverse of `to_json`."""
        return decode(EngineSetup, json.loads(text), "setup of a replica")


class WrongReplicaError(Exception):
    """A call reached another replica than the one that it names, which is gone."""


class EngineReplica:
    """One engine. Every call names the replica that it is for: Ray routes by this argument."""

    def __init__(self, setup: str) -> None:
        """Load the engine; Ray reports an error that this raises."""
        set_up_logging()
        made = EngineSetup.from_json(setup)
        version, self._name = made.version, serve.get_replica_context().replica_id.unique_id
        host = EngineHost.load(
            Path(version.checkpoint), device="auto" if version.gpus_per_replica else "cpu", dtype=None,
            config=replace(with_media_workers(version.engine), core_process=True), limits=public_limits(),
            adapters=version.adapters,
        )  # fmt: skip
        self._service = ReplicaService(self._name, version, host)
        logger.info("replica %s of %s %s is ready", self._name, made.model, version.name)

    async def channel(self, front: str, replica: str) -> AsyncIterator[bytes]:
        """Messages for a front, until it leaves."""
        self._check(replica)
        async for message in self._service.channel(front):
            yield message

    async def submit(self, front: str, message: bytes, media: Sequence[Any], replica: str) -> None:
        """Take a request. Media are references to bytes in Ray's object store."""
        self._check(replica)
        await self._service.submit(front, message, media)

    async def cancel(self, front: str, request_ids: Sequence[str], replica: str) -> None:
        """Cancel requests of a front."""
        self._check(replica)
        await self._service.cancel(front, request_ids)

    async def heartbeat(self, front: str, replica: str | None) -> None:
        """Note that a front is alive. A call that names no replica starts one, if the pool has none."""
        if replica is not None:
            self._check(replica)
            await self._service.heartbeat(front)

    def _check(self, replica: str) -> None:
        if replica != self._name:
            raise WrongReplicaError(f"replica {replica} is gone; this is {self._name}")

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
