"""The Ray Serve deployment of encoders: one replica is one vision encoder, which engine replicas call."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ray import serve

from saccade.engine.encoder_host import EncoderHost
from saccade.fleet.cluster.encoder_service import EncoderService
from saccade.fleet.cluster.engine_setup import EngineSetup
from saccade.fleet.cluster.replica_tracing import replica_tracer
from saccade.log import set_up_logging
from saccade.serve.server import public_limits, with_media_workers

logger = logging.getLogger(__name__)


class EncoderReplica:
    """One vision encoder. Calls name the replica that the caller chose; if it is gone, any other one answers."""

    def __init__(self, setup: str, on_gpu: bool) -> None:
        """Load the encoder; Ray reports an error that this raises."""
        set_up_logging()
        made = EngineSetup.from_json(setup)
        version, name = made.version, serve.get_replica_context().replica_id.unique_id
        host = EncoderHost.load(
            Path(version.checkpoint), device="auto" if on_gpu else "cpu", config=with_media_workers(version.engine),
            limits=public_limits(),
        )  # fmt: skip
        self._service = EncoderService(version, host, replica_tracer(made, name))
        logger.info("encoder %s of %s %s is ready", name, made.model, version.name)

    async def encode(self, message: bytes, media: Sequence[Any], replica: str | None) -> tuple[bytes, bytes]:
        """Encode an image. `media` is a reference to its bytes in Ray's object store; `replica` is for the router."""
        del replica
        return await self._service.encode(message, media[0])

    async def wake(self, replica: None) -> None:
        """Answer a call that starts a replica, if the pool has none."""

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Load of this replica; Ray passes it to the scaling policy."""
        return self._service.scaling_load()

    def check_health(self) -> None:
        """Raise if the encoder has stopped; Ray replaces the replica."""
        if self._service.has_failed:
            raise RuntimeError("the encoder has stopped")

    def __del__(self) -> None:
        """Stop the encoder; Ray calls this when it stops the replica."""
        if (service := getattr(self, "_service", None)) is not None:
            service.close()
