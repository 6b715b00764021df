"""The Ray Serve deployment of fronts: one replica is one HTTP server, on a port that fronts of a machine share."""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from dataclasses import dataclass
from typing import Any

from ray import serve

from saccade.config import decode, encode
from saccade.fleet.cluster.front_server import FrontServer
from saccade.fleet.cluster.names import CONTROLLER, controller_app
from saccade.fleet.cluster.ray_calls import RayCalls
from saccade.fleet.probes import Probe
from saccade.log import set_up_logging
from saccade.serve.config import ServeConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class FrontSetup:
    """What a front needs to know before it hears from the controller. Fronts restart when it changes."""

    fleet: str
    """Name of the fleet."""
    server: ServeConfig
    """Address, access and limits."""
    num_workers: int
    """Processes that read the headers of images."""

    def to_json(self) -> str:
        """The setup as JSON text."""
        return json.dumps(encode(self))

    @staticmethod
    def from_json(text: str) -> FrontSetup:
        """Inverse of `to_json`."""
        return decode(FrontSetup, json.loads(text), "setup of a front")


class Front:
    """Accepts requests and sends them to engines. It follows the controller's view of the fleet."""

    def __init__(self, setup: str) -> None:
        """Listen; Ray reports an error that this raises."""
        set_up_logging()
        made = FrontSetup.from_json(setup)
        self._controller: Any = None
        self._app = controller_app(made.fleet)
        self._server = FrontServer(
            uuid.uuid4().hex, made.fleet, made.server, self._sync, RayCalls, num_workers=made.num_workers
        )
        logger.info("front listens at %s", self._server.url)

    async def _sync(self, report: bytes) -> bytes:
        if self._controller is None:
            self._controller = serve.get_deployment_handle(CONTROLLER, self._app)
        answer: bytes = await self._controller.sync.remote(report)
        return answer

    async def probe(self, model: str, version: str, probe: str) -> str:
        """Answer of a version to a probe, given as JSON."""
        asked = decode(Probe, json.loads(probe), "probe")
        return await asyncio.wrap_future(self._server.probe(model, version, asked))

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Load of this front; Ray passes it to the scaling policy."""
        return self._server.scaling_load()

    def check_health(self) -> None:
        """Raise if the server has stopped; Ray replaces the replica."""
        if not self._server.is_alive:
            raise RuntimeError("the front has stopped")

    def __del__(self) -> None:
        """Drain and stop; Ray calls this when it stops the replica."""
        if (server := getattr(self, "_server", None)) is not None:
            server.stop()
