"""The HTTP server of a front: the routes of `saccade serve` over the models of a fleet, in a thread of its own.

    client -> gate, routes -> FleetModels.choose -> ServedVersion.engine -> ReplicaSet -> replicas

The thread has an event loop of its own, so that nothing that Ray does in the process delays a client.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path

from saccade.engine.sampling_params import SamplingParams
from saccade.engine.structured import StructuredOutput
from saccade.errors import ConfigError
from saccade.fleet.cluster.controller_link import ControllerLink
from saccade.fleet.cluster.fleet_models import FleetModels
from saccade.fleet.cluster.fleet_route import PROXY_HEALTH, router
from saccade.fleet.cluster.served_version import Connect, FrontContext
from saccade.fleet.cluster.view import FleetView
from saccade.fleet.continuation import RetryBudget
from saccade.fleet.outcomes import outcome_of
from saccade.fleet.poison import PoisonList
from saccade.fleet.probes import Probe
from saccade.serve.app import create_app
from saccade.serve.config import ServeConfig
from saccade.serve.front import Front
from saccade.serve.keys import KeyRing
from saccade.serve.record import RequestRecord
from saccade.serve.remote_media import RemoteMedia
from saccade.serve.server import Listener, event_loop_factory, listen, public_limits, traced, url_of

logger = logging.getLogger(__name__)

Sync = Callable[[bytes], Awaitable[bytes]]
"""Sends a report to the controller; returns its answer."""
_RETRIES_OF_A_FLEET = 512.0
"""Retries that all fronts together can save up."""


class FrontServer:
    """Serves until `stop`. Any thread may call it."""

    def __init__(
        self, front: str, fleet: str, config: ServeConfig, sync: Sync, connect: Connect, *, num_workers: int
    ) -> None:
        """Listen and start the thread. ConfigError: the address or the key file cannot be used."""
        self._front_id, self._fleet, self._config = front, fleet, config
        self._sync, self._connect, self._num_workers = sync, connect, num_workers
        self._limits = public_limits()
        remote = None
        if config.allow_remote_media:
            remote = RemoteMedia(
                config.allow_remote_media, limits=self._limits, timeout_s=config.remote_media_timeout_s
            )
        keys = None if config.api_keys is None else KeyRing(Path(config.api_keys))
        self._front = Front(config=config, keys=keys, remote_media=remote, has_versions=True)
        self._socket = listen(config.host, config.port, shares_port=True)
        self.url = url_of(self._socket)
        """Address at which this front accepts requests."""
        self._started: Future[tuple[asyncio.AbstractEventLoop, FleetModels]] = Future()
        self._listener: Listener | None = None
        self._started_cpu_s, self._num_requests = time.process_time(), 0
        self._thread = threading.Thread(target=self._run, name="saccade-front-server", daemon=True)
        self._thread.start()
        self._started.result()

    @property
    def is_alive(self) -> bool:
        """Whether the server runs."""
        return self._thread.is_alive()

    def scaling_load(self) -> dict[str, float]:
        """Load for the scaling of the fronts. A front's work is its CPU time, since it runs one interpreter."""
        cpu_s = time.process_time() - self._started_cpu_s
        return {
            "arrived_s": cpu_s,
            "waiting_s": 0.0,
            "num_running": float(self._gate.num_open),
            "slots": 1.0,
            "request_s": cpu_s / max(1, self._num_requests),
        }

    def probe(self, model: str, version: str, probe: Probe) -> Future[str]:
        """Ask a version a probe; the future gets the text of the answer, or why there is none."""
        loop, models = self._started.result()
        return asyncio.run_coroutine_threadsafe(_answer(models, model, version, probe), loop)

    def stop(self) -> None:
        """Drain, then stop. Requests that take longer than `drain_timeout_s` are cancelled."""
        loop, _ = self._started.result()
        with contextlib.suppress(RuntimeError):  # the loop has ended already
            asyncio.run_coroutine_threadsafe(self._drain(), loop)
        self._thread.join()

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            with contextlib.ExitStack() as opened:
                opened.enter_context(contextlib.closing(self._socket))
                opened.enter_context(traced(self._front))
                opened.enter_context(asyncio.Runner(loop_factory=event_loop_factory())).run(self._serve())
        except BaseException as error:
            logger.exception("the front has failed")
            if not self._started.done():
                self._started.set_exception(error)

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        poison, budget = PoisonList(time.monotonic), RetryBudget()
        context = FrontContext(
            fleet=self._fleet, front=self._front_id, connect=self._connect, loop=loop, poison=poison, budget=budget,
            limits=self._limits, num_workers=self._num_workers,
        )  # fmt: skip
        models = FleetModels(self._front, context)
        routers = [router(self._fleet, self._front_id, models)]
        self._gate = create_app(self._front, models, routers=routers, public_paths={PROXY_HEALTH})
        self._listener = Listener(self._config, self._gate, self._socket)
        link = ControllerLink(
            self._front_id, self.url, self._sync, partial(self._follow, models, context),
            take_consumption=self._front.rates.take_consumption, take_poison=poison.take_unreported,
        )  # fmt: skip
        self._front.observers.insert(0, partial(_note_replicas, models))  # before the log and the tracer
        self._front.observers.append(partial(self._observe, link))
        tasks = [asyncio.create_task(link.run()), asyncio.create_task(self._front.record_history())]
        self._models = models
        self._started.set_result((loop, models))
        try:
            await self._listener.listen()
        finally:
            for task in tasks:
                task.cancel()
            models.close()
            await self._front.close()

    def _follow(self, models: FleetModels, context: FrontContext, view: FleetView) -> None:
        """Follow a view of the controller."""
        context.poison.add_known(view.poison)
        context.budget.most = _RETRIES_OF_A_FLEET / max(1, view.num_fronts)
        self._front.charge(view.consumption)
        models.follow(view)

    def _observe(self, link: ControllerLink, record: RequestRecord) -> None:
        """Count a request that has ended, and report how."""
        self._num_requests += 1
        if (outcome := outcome_of(record)) is not None:
            link.observe(record.model, outcome)

    async def _drain(self) -> None:
        """Accept no more connections, wait for requests in progress, and stop."""
        assert self._listener is not None
        self._models.is_draining = True
        deadline = time.monotonic() + self._config.drain_timeout_s
        while self._gate.num_open and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        for service in self._models.services:
            service.cancel_all()
        self._listener.should_exit = True


def _note_replicas(models: FleetModels, record: RequestRecord) -> None:
    """Note which replicas had a request."""
    served = None if record.version is None else models.version(record.model, record.version)
    if served is not None:
        routes = [served.replicas.take_replicas(request_id) for request_id in record.request_ids]
        record.replicas = tuple(dict.fromkeys(name for route in routes for name in route))
        record.num_continuations = sum(max(0, len(route) - 1) for route in routes)


async def _answer(models: FleetModels, model: str, version: str, probe: Probe) -> str:
    """The answer of a version to a probe."""
    served = models.version(model, version)
    engine = None if served is None else served.loaded_engine
    if engine is None:
        raise ConfigError(f"version {version} of model {model} is not ready at this front")
    content: list[dict[str, object]] = [{"type": "text", "text": probe.question}]
    if probe.image is not None:
        content.insert(0, {"type": "image", "image": await asyncio.to_thread(Path(probe.image).read_bytes)})
    structured = None if probe.schema is None else StructuredOutput(json_schema=probe.schema)
    sampling = SamplingParams(temperature=0.0, max_tokens=probe.max_tokens, structured=structured)
    [completion] = await asyncio.to_thread(engine.generate, [{"role": "user", "content": content}], sampling)
    if completion.failure is not None:
        raise ConfigError(completion.failure.message)
    return completion.text
