"""Replicas on Ray Serve with the time of a cost model, and fronts that send requests to them: `bench.fleet_routers`
and `bench.fleet_step`.

Our deployment has the parts of a fleet: `ReplicaSet` and its connections in a front, `ReplicaServer` and
`ReplicaService` in a replica. Ray's routers choose for calls through handles of Ray Serve.
"""

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from ray import serve

from bench.paced_engine import PacedEngine, PacedHost, Timing, timing_of
from saccade.engine.core.messages import AddRequest
from saccade.engine.request import RequestOutput
from saccade.fleet.cluster.names import ENGINE
from saccade.fleet.cluster.ray_calls import RayCalls
from saccade.fleet.cluster.replica_server import ReplicaServer
from saccade.fleet.cluster.replica_service import ReplicaService
from saccade.fleet.cluster.replica_set import ReplicaSet
from saccade.fleet.cluster.running_replicas import watch
from saccade.fleet.config import VersionConfig
from saccade.fleet.continuation import RetryBudget
from saccade.fleet.poison import PoisonList
from saccade.fleet.replicas import Replica, RoutedRequest
from saccade.fleet.routing import RoutingPolicy
from saccade.fleet.simulated_engine import Progress


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A request as a front sends it."""

    prompt: str
    """Its text, which Ray's prefix router reads from this attribute."""
    session: str
    """Group or conversation, which Ray's consistent-hash router hashes."""
    request: RoutedRequest
    """What it costs."""


class Asked(NamedTuple):
    """A request, and when it is due after the beginning."""

    due: float
    prompt: Prompt
    message: AddRequest
    """The same request for a fleet."""


class Answer(NamedTuple):
    """A request that has ended, as its front saw it."""

    replica: str
    """Replica that answered."""
    request: RoutedRequest
    """The request."""
    due: float
    """Time at which it was due at the front."""
    first_token: float
    """Time at which the front had the first token."""
    ended: float
    """Time at which the front had the last token."""
    timing: Timing
    """Times on the engine."""


_UNKNOWN = Timing(math.nan, math.nan, 0)
"""Times of a request whose replica has been stopped."""


class PacedReplica:
    """The deployment of Ray's routers: answers with two messages, at the first token and at the last."""

    def __init__(self, replica: Replica, load_s: float = 0.0) -> None:
        """Be ready after `load_s` seconds."""
        time.sleep(load_s)
        self._name = serve.get_replica_context().replica_id.unique_id
        self._paced = PacedEngine(replica, self._reply)
        self._replies: dict[str, asyncio.Queue[Progress]] = {}

    async def name(self) -> str:
        """Name of the replica."""
        return self._name

    async def answer(self, prompt: Prompt) -> AsyncIterator[tuple[str, Timing | None]]:
        """Compute a request. Each message has the name of the replica, the last one the times."""
        replies = self._replies[prompt.request.id] = asyncio.Queue()
        self._paced.accept(prompt.request)
        await replies.get()
        yield self._name, None
        yield self._name, timing_of(await replies.get())
        del self._replies[prompt.request.id]

    def _reply(self, progress: Progress) -> None:
        self._replies[progress.request.id].put_nowait(progress)


class PacedEngineReplica:
    """The deployment of our router: an `EngineReplica` whose engine is paced."""

    def __init__(self, version: VersionConfig, replica: Replica, report_s: float, load_s: float = 0.0) -> None:
        """Be ready after `load_s` seconds."""
        time.sleep(load_s)
        name = serve.get_replica_context().replica_id.unique_id
        self._host = PacedHost(replica)
        self._service = ReplicaService(name, version, self._host, report_s=report_s)  # type: ignore[arg-type]
        self._server = ReplicaServer(self._service, "127.0.0.1")

    async def channel(self, front: str, replica: str) -> AsyncIterator[bytes]:
        """Address at which a front connects."""
        yield self._server.address().to_bytes()
        await self._service.hold(front)

    async def wake(self, replica: None) -> None:
        """Answer a call by which a front begins to follow the replicas."""

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Load of this replica; Ray passes it to the scaling policy."""
        return self._service.scaling_load()

    async def timings(self, replica: str) -> dict[str, Timing]:
        """Times of the requests that have ended, by the id that they have here."""
        return self._host.timings


class Front:
    """An actor that sends its share of the requests to every deployment at the same times."""

    def __init__(self, number: int, apps: Sequence[str], ours: str, version: str, policy: RoutingPolicy) -> None:
        self._name, self._ours = f"front {number}", ours
        self._handles = {app: serve.get_deployment_handle("PacedReplica", app) for app in apps if app != ours}
        self._calls = RayCalls(self._name, ours)
        self._make_set = partial(ReplicaSet, version, self._name, self._calls, policy=policy)
        self._times: defaultdict[str, list[float]] = defaultdict(list)
        self._ended: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)

    async def prepare(self, num_replicas: int) -> None:
        """Connect to all replicas."""
        for handle in self._handles.values():
            found: set[str] = set()
            while len(found) < num_replicas:
                found.add(await handle.name.remote())
        loop = asyncio.get_running_loop()
        self._set = self._make_set(poison=PoisonList(time.monotonic), budget=RetryBudget())
        self._set.on_outputs_of_front = self._take
        watch((self._ours, ENGINE), lambda names: loop.call_soon_threadsafe(self._set.set_replicas, names))
        self._calls.wake()
        while self._set.num_ready < num_replicas:
            await asyncio.sleep(0.1)

    async def run(self, asked: Sequence[Asked], begin: float) -> dict[str, list[Answer]]:
        """Send requests at their times after `begin`; returns the answers by deployment."""
        apps = [app for app in self._handles for _ in asked]
        ours, answers = await asyncio.gather(
            self._ask_ours(asked, begin),
            asyncio.gather(*(self._ask(app, one, begin) for app in self._handles for one in asked)),
        )
        found: defaultdict[str, list[Answer]] = defaultdict(list, {self._ours: ours})
        for app, answer in zip(apps, answers, strict=True):
            found[app].append(answer)
        return dict(found)

    async def _ask(self, app: str, one: Asked, begin: float) -> Answer:
        """Have Ray choose a replica."""
        due, times, name, timing = begin + one.due, [], "", None
        await asyncio.sleep(due - time.monotonic())
        handle = self._handles[app].options(stream=True, session_id=one.prompt.session)
        async for name, timing in handle.answer.remote(one.prompt):  # noqa: B007
            times.append(time.monotonic())
        assert timing is not None, "the last message has the times"
        return Answer(name, one.prompt.request, due, *times, timing)

    async def _ask_ours(self, asked: Sequence[Asked], begin: float) -> list[Answer]:
        replicas = await asyncio.gather(*(self._send(one, begin) for one in asked))
        handle: Any = serve.get_deployment_handle(ENGINE, self._ours)
        timings: dict[str, Timing] = {}
        for name in set(replicas):
            timings |= await handle.timings.remote(replica=name)
        return [
            Answer(name, one.prompt.request, begin + one.due, *self._times[one.prompt.request.id],
                   timings.get(f"{self._name}/{one.prompt.request.id}/0", _UNKNOWN))
            for one, name in zip(asked, replicas, strict=True)
        ]  # fmt: skip

    async def _send(self, one: Asked, begin: float) -> str:
        """Send a request as a fleet's front does, and wait for its end. Returns the name of the replica."""
        await asyncio.sleep(begin + one.due - time.monotonic())
        self._set.send(one.message)
        request_id = one.prompt.request.id
        await self._ended[request_id].wait()
        return self._set.take_replicas(request_id)[-1]

    def _take(self, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            assert output.failure is None, output.failure
            self._times[output.request_id].append(time.monotonic())
            if output.finish_reason is not None:
                self._ended[output.request_id].set()
