"""Replicas on Ray Serve with the time of a cost model, and fronts that send requests to them: `bench.fleet_routers`.

A replica runs `SimulatedEngine` in real time: the work of a request takes as long as the cost model says, however busy
the machine is; only messages are delayed.
"""

import asyncio
import contextlib
import time
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ray import serve

from saccade.fleet.cluster.running_replicas import watch
from saccade.fleet.replicas import Image, Replica, ReplicaStatistics, RoutedRequest
from saccade.fleet.routing import Router, RoutingPolicy
from saccade.fleet.simulated_engine import Progress, SimulatedEngine


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A request as a front sends it."""

    prompt: str
    """Its text, which Ray's prefix router reads from this attribute."""
    session: str
    """Group or conversation, which Ray's consistent-hash router hashes."""
    request: RoutedRequest
    """What it costs."""


class Reply(NamedTuple):
    """A first or last token."""

    replica: str
    """Name of the replica."""
    load: ReplicaStatistics
    """Its load."""
    engine_s: float
    """Seconds since the request came there."""
    resident_images: int
    """Images that were not encoded."""


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
    first_token_s: float
    """Seconds on the engine until the first token."""
    last_token_s: float
    """Seconds on the engine until the last."""
    resident_images: int
    """Images that were not encoded."""


class PacedEngine:
    """A simulated engine that works in real time. Work is never late; what it delivers is, if the process is busy."""

    def __init__(self, replica: Replica, deliver: Callable[[Progress], None]) -> None:
        self.engine, self._deliver = SimulatedEngine(replica), deliver
        self._timer: asyncio.TimerHandle | None = None

    def accept(self, request: RoutedRequest) -> None:
        """Begin a request now."""
        self.catch_up()
        self.engine.accept(Progress(request, self.engine.now))
        self.catch_up()

    def catch_up(self) -> None:
        """Do the work that is due, and wake up for the next event."""
        now = time.monotonic()
        while (when := self.engine.next_event()) <= now:
            self._advance(when)
        self._advance(now)
        if self._timer is not None:
            self._timer.cancel()
        if (when := self.engine.next_event()) < float("inf"):
            self._timer = asyncio.get_running_loop().call_later(max(0.0, when - time.monotonic()), self.catch_up)

    def _advance(self, when: float) -> None:
        for progress in self.engine.advance(max(when, self.engine.now)):
            self._deliver(progress)


class PacedReplica:
    """The Ray deployment: answers with two messages, one at the first token and one at the last."""

    def __init__(self, replica: Replica) -> None:
        self._name = serve.get_replica_context().replica_id.unique_id
        self._paced = PacedEngine(replace(replica, name=self._name), self._reply)
        self._replies: dict[str, asyncio.Queue[Reply]] = {}
        self._news: dict[int, deque[ReplicaStatistics]] = {}
        self._changed: dict[int, asyncio.Event] = {}

    async def name(self) -> str:
        """Name of the replica."""
        return self._name

    async def answer(self, prompt: Prompt, replica: str | None = None) -> AsyncIterator[Reply]:
        """Compute a request. `replica` is for the router."""
        del replica
        replies = self._replies[prompt.request.id] = asyncio.Queue()
        self._paced.accept(prompt.request)
        for changed in self._changed.values():
            changed.set()
        yield await replies.get()
        yield await replies.get()
        del self._replies[prompt.request.id]

    async def report(self, front: int, replica: str, wait_s: float) -> ReplicaStatistics:
        """Load, and what became resident since the last report to this front; now if a request has come since."""
        del replica
        changed = self._changed.setdefault(front, asyncio.Event())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await changed.wait()
        changed.clear()
        self._paced.catch_up()
        latest = self._paced.engine.statistics()
        self._news.setdefault(front, deque(maxlen=16))
        for news in self._news.values():
            news.append(latest)
        unread = [*self._news[front]]
        self._news[front].clear()
        images: tuple[Image, ...] = tuple(image for one in unread for image in one.images)
        return replace(latest, images=images, prefixes=tuple(key for one in unread for key in one.prefixes))

    def _reply(self, progress: Progress) -> None:
        load = self._paced.engine.load()
        reply = Reply(self._name, load, load.as_of - progress.arrived, progress.resident_images)
        self._replies[progress.request.id].put_nowait(reply)


class Front:
    """An actor that sends its share of the requests to every deployment at the same times.

    The deployment `OURS` gets the choices of a `Router` of this front; the others are chosen by Ray.
    """

    def __init__(self, number: int, apps: Sequence[str], ours: str, policy: RoutingPolicy, report_s: float) -> None:
        self._number, self._ours, self._report_s = number, ours, report_s
        self._handles = {app: serve.get_deployment_handle("PacedReplica", app) for app in apps}
        self._router = Router(policy)
        self._names: set[str] = set()

    async def prepare(self, replica: Replica, num_replicas: int) -> None:
        """Find the replicas, and connect to all of them."""
        watch((self._ours, "PacedReplica"), lambda names: self._names.update(names))
        for app, handle in self._handles.items():
            found: set[str] = set()
            while app != self._ours and len(found) < num_replicas:
                found.add(await handle.name.remote())
        handle = self._handles[self._ours]
        await handle.name.remote()
        while len(self._names) < num_replicas:
            await asyncio.sleep(0.1)
        for name in sorted(self._names):
            self._router.add(replace(replica, name=name))
            await handle.report.remote(front=self._number, replica=name, wait_s=0.0)

    async def run(self, prompts: Sequence[tuple[float, Prompt]], begin: float) -> dict[str, list[Answer]]:
        """Send requests at their times after `begin`; returns the answers by deployment."""
        polls = [asyncio.create_task(self._poll(name)) for name in self._names]
        apps = [app for app in self._handles for _ in prompts]
        answers = await asyncio.gather(
            *(self._ask(app, prompt, begin + when) for app in self._handles for when, prompt in prompts)
        )
        for poll in polls:
            poll.cancel()
        found: dict[str, list[Answer]] = defaultdict(list)
        for app, answer in zip(apps, answers, strict=True):
            found[app].append(answer)
        return dict(found)

    async def _ask(self, app: str, prompt: Prompt, due: float) -> Answer:
        await asyncio.sleep(due - time.monotonic())
        handle = self._handles[app].options(stream=True, session_id=prompt.session)
        if app != self._ours:
            return await self._receive(handle.answer.remote(prompt), prompt, due)
        choice = self._router.choose(prompt.request, time.monotonic())
        assert choice is not None, "paced replicas are always ready"
        answer = await self._receive(handle.answer.remote(prompt, replica=choice.replica), prompt, due, self._update)
        self._router.finish(prompt.request.id, time.monotonic())
        return answer

    async def _receive(
        self, stream: Any, prompt: Prompt, due: float, callback: Callable[[Reply], None] | None = None
    ) -> Answer:
        times, engine_s = [], []
        async for reply in stream:
            times.append(time.monotonic())
            engine_s.append(reply.engine_s)
            if callback is not None:
                callback(reply)
        return Answer(reply.replica, prompt.request, due, *times, *engine_s, reply.resident_images)

    def _update(self, reply: Reply) -> None:
        self._router.update(reply.replica, reply.load)

    async def _poll(self, name: str) -> None:
        while True:
            handle = self._handles[self._ours]
            report = await handle.report.remote(front=self._number, replica=name, wait_s=self._report_s)
            self._router.update(name, report)
