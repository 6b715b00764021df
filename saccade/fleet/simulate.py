"""A fleet in simulated time: the real routing policy, and simpler ones, over engines with the time of a cost model.

    for policy in POLICIES: result = simulate(arrivals, replicas, policy, num_fronts=4)

Events are arrivals, the next event of each engine, and reports of statistics. Requests come to a random front. A front
knows its own requests at once, and the rest from the reports of each replica: one every `REPORT_S`, and one after each
request, but not sooner than `LEAST_REPORT_S` after the last.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from saccade.fleet.replicas import LEAST_REPORT_S, REPORT_S, Replica, ReplicaStatistics, RoutedRequest
from saccade.fleet.routing import Router
from saccade.fleet.simulated_encoders import SimulatedEncoders
from saccade.fleet.simulated_engine import Progress, SimulatedEngine
from saccade.fleet.workloads import Arrival

PolicyName = Literal["oracle", "expected-finish", "power-of-two", "round-robin"]
POLICIES: tuple[PolicyName, ...] = ("oracle", "expected-finish", "power-of-two", "round-robin")
"""`oracle` is `expected-finish` with one front that gets the statistics of a replica at each of its events."""


class _Policy(Protocol):
    """What the simulation asks of a policy."""

    def choose(self, request: RoutedRequest, now: float) -> str: ...
    def finish(self, request: RoutedRequest) -> None: ...
    def update(self, name: str, statistics: ReplicaStatistics) -> None: ...


class _RoundRobin:
    """Replicas in turn, each front from a place of its own."""

    def __init__(self, names: Sequence[str], num_fronts: int, seed: int) -> None:
        self._rng = random.Random(seed)  # noqa: S311
        starts = [self._rng.randrange(len(names)) for _ in range(num_fronts)]
        self._fronts = [itertools.cycle([*names[start:], *names[:start]]) for start in starts]

    def choose(self, request: RoutedRequest, now: float) -> str:
        del request, now
        return next(self._rng.choice(self._fronts))

    def finish(self, request: RoutedRequest) -> None: ...
    def update(self, name: str, statistics: ReplicaStatistics) -> None: ...


class _PowerOfTwo:
    """Choose the one of two random replicas that has fewer requests in progress, which is always known."""

    def __init__(self, names: Sequence[str], seed: int) -> None:
        self._names, self._rng = names, random.Random(seed)  # noqa: S311
        self._running = dict.fromkeys(names, 0)
        self._where: dict[str, str] = {}

    def choose(self, request: RoutedRequest, now: float) -> str:
        del now
        pair = self._rng.sample(self._names, min(2, len(self._names)))
        name = self._where[request.id] = min(pair, key=self._running.__getitem__)
        self._running[name] += 1
        return name

    def finish(self, request: RoutedRequest) -> None:
        self._running[self._where.pop(request.id)] -= 1

    def update(self, name: str, statistics: ReplicaStatistics) -> None: ...


class _Fronts:
    """Several fronts, each with a router of its own."""

    def __init__(self, replicas: Sequence[Replica], count: int, seed: int) -> None:
        self._rng = random.Random(seed)  # noqa: S311
        self._routers = [Router() for _ in range(count)]
        self._where: dict[str, Router] = {}
        for router, replica in itertools.product(self._routers, replicas):
            router.add(replica)

    def choose(self, request: RoutedRequest, now: float) -> str:
        router = self._where[request.id] = self._rng.choice(self._routers)
        choice = router.choose(request, now)
        assert choice is not None, "simulated replicas are always ready"
        return choice.replica

    def finish(self, request: RoutedRequest) -> None:
        self._where.pop(request.id).finish(request.id)

    def update(self, name: str, statistics: ReplicaStatistics) -> None:
        for router in self._routers:
            router.update(name, statistics)


@dataclass(frozen=True, kw_only=True)
class SimulationResult:
    """What one policy does with one load."""

    policy: PolicyName
    """Policy."""
    requests: int
    """Requests, all of which ended."""
    image_hit_rate: float | None
    """Share of images that were not encoded, because the replica had them. None: no images."""
    pooled_share: float | None
    """Share of images for which engines asked encoder replicas. None: there are none."""
    max_over_mean_load: float
    """Requests in progress on the busiest replica over the mean, both averaged over time."""
    ttft_p50_s: float
    """Median time to the first token."""
    ttft_p90_s: float
    """90 % quantile of it."""
    ttft_p99_s: float
    """99 % quantile of it."""
    output_tokens_per_s: float
    """Tokens of all answers over the time from the first arrival to the last token."""
    decision_p50_us: float
    """Median time of a decision on this machine, in microseconds."""
    decision_p99_us: float
    """99 % quantile of it."""


def simulate(
    arrivals: Sequence[Arrival], replicas: Sequence[Replica], policy: PolicyName, *, num_fronts: int = 4,
    num_encoders: int = 0, seed: int = 0, clock: Callable[[], float] = lambda: 0.0,
) -> SimulationResult:  # fmt: skip
    """Run all requests to their end. `clock` measures the decisions, in seconds; the simulation has its own time."""
    run = _Run(replicas, policy, num_fronts, num_encoders, seed, clock)
    for arrival in arrivals:
        run.until(arrival.time)
        run.arrive(arrival)
    run.until(float("inf"))
    return run.result()


class _Run:
    """The state of one simulation."""

    def __init__(
        self, replicas: Sequence[Replica], policy: PolicyName, num_fronts: int, num_encoders: int, seed: int,
        clock: Callable[[], float],
    ) -> None:  # fmt: skip
        names = [replica.name for replica in replicas]
        self._name, self._clock = policy, clock
        self._policy: _Policy
        match policy:
            case "round-robin":
                self._policy = _RoundRobin(names, num_fronts, seed)
            case "power-of-two":
                self._policy = _PowerOfTwo(names, seed)
            case _:
                self._policy = _Fronts(replicas, 1 if policy == "oracle" else num_fronts, seed)
        first = replicas[0]
        self._encoders = SimulatedEncoders(num_encoders, first.costs, first.cached_patches) if num_encoders else None
        self._engines = {replica.name: SimulatedEngine(replica, self._encoders) for replica in replicas}
        self._wake: list[tuple[float, str]] = []  # an entry that is not the engine's next event is out of date
        self._next = dict.fromkeys(names, float("inf"))
        self._report_at = {name: REPORT_S * number / len(names) for number, name in enumerate(names)}
        self._reported_at = dict.fromkeys(names, float("-inf"))
        self._reports = sorted((when, name) for name, when in self._report_at.items())  # likewise
        self._ended: list[Progress] = []
        self._decisions: list[float] = []

    def arrive(self, arrival: Arrival) -> None:
        """Route a request and hand it to its engine."""
        begun = self._clock()
        name = self._policy.choose(arrival.request, arrival.time)
        self._decisions.append(self._clock() - begun)
        engine = self._engines[name]
        self._advance(name, arrival.time)
        engine.accept(Progress(arrival.request, arrival.time))
        self._schedule(name)
        self._report_at_latest(name, max(arrival.time, self._reported_at[name] + LEAST_REPORT_S))

    def until(self, time: float) -> None:
        """Run events in order up to a time; to infinity: until every request has ended."""
        while self._wake and self._wake[0][0] <= time:
            when, name = heapq.heappop(self._wake)
            if when == self._next[name]:
                self._report_until(when)
                self._advance(name, when)
                self._schedule(name)
        if time < float("inf"):
            self._report_until(time)

    def _advance(self, name: str, now: float) -> None:
        engine = self._engines[name]
        for progress in engine.advance(now):
            if progress.end:
                self._policy.finish(progress.request)
                self._ended.append(progress)
        if self._name == "oracle":
            self._policy.update(name, engine.statistics())

    def _schedule(self, name: str) -> None:
        when = self._next[name] = self._engines[name].next_event()
        if when < float("inf"):
            heapq.heappush(self._wake, (when, name))

    def _report_at_latest(self, name: str, when: float) -> None:
        if self._name == "expected-finish" and when < self._report_at[name]:
            self._report_at[name] = when
            heapq.heappush(self._reports, (when, name))

    def _report_until(self, time: float) -> None:
        while self._name == "expected-finish" and self._reports[0][0] <= time:
            when, name = heapq.heappop(self._reports)
            if when == self._report_at[name]:
                self._advance(name, when)
                self._schedule(name)
                self._policy.update(name, self._engines[name].statistics())
                self._reported_at[name], self._report_at[name] = when, float("inf")
                self._report_at_latest(name, when + REPORT_S)

    def result(self) -> SimulationResult:
        """Figures of the requests that ended."""
        assert len(self._ended) == len(self._decisions), "every request ends exactly once"
        waits = [progress.first_token - progress.arrived for progress in self._ended]
        p50, p90, p99 = map(float, np.percentile(waits, [50, 90, 99]))
        decision = np.percentile(self._decisions, [50, 99]) * 1e6
        num_images = sum(len(progress.request.images) for progress in self._ended)
        resident = sum(progress.resident_images for progress in self._ended)
        pooled = sum(len(progress.pooled) for progress in self._ended)
        loads = [engine.request_seconds for engine in self._engines.values()]
        tokens = sum(progress.request.output_tokens for progress in self._ended)
        span = max(progress.end for progress in self._ended) - min(progress.arrived for progress in self._ended)
        return SimulationResult(
            policy=self._name, requests=len(self._ended), image_hit_rate=resident / num_images if num_images else None,
            pooled_share=pooled / num_images if num_images and self._encoders is not None else None,
            max_over_mean_load=max(loads) / (sum(loads) / len(loads)), ttft_p50_s=p50, ttft_p90_s=p90, ttft_p99_s=p99,
            output_tokens_per_s=tokens / span, decision_p50_us=float(decision[0]), decision_p99_us=float(decision[1]),
        )  # fmt: skip
