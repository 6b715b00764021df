"""Scaling on simulated traces: requests within the objective, and replica-hours, with Ray Serve's default as peer.

    python -m bench.fleet_scaling [--traces step day encoder] [--seeds 3]

The peer is a model of Ray Serve's documented default: replicas = ongoing requests, averaged over 30 s, divided by
`target_ongoing_requests`, after 30 s of wanting more, or 600 s of wanting fewer. Its target has several values, Ray's
default of 2 among them.

A replica runs a number of requests at a time; a step of all of them takes a time that grows with their number, and
further ones wait in one queue.
"""

import argparse
import heapq
import math
import random
import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from saccade.fleet.scaling import Autoscaler, CostReport, PoolLoad, ScalingPolicy

Policy = Callable[[PoolLoad, int], int]
"""From the load and the number of waiting requests to the replicas wanted."""
WARM_UP_S = 60.0
MAX_REPLICAS = 24


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Times of one kind of replica."""

    slots: int
    """Requests at a time."""
    step_s: float
    """Time of a step without requests."""
    request_step_s: float
    """Time that each request adds to it."""
    first_steps: int
    """Steps until the first token."""
    mean_steps: float
    """Mean further steps of a request, exponentially distributed."""
    tick_s: float
    """Resolution of the simulation."""
    objective_s: float
    """Time to the first token that counts as within the objective."""

    def step(self, num_requests: int) -> float:
        """Time of a step with so many requests."""
        return self.step_s + self.request_step_s * num_requests

    def work_s(self, steps: float) -> float:
        """Work of a request: its share of the steps of a full replica."""
        return steps * self.step(self.slots) / self.slots


ENGINE = Shape(
    slots=64, step_s=0.008, request_step_s=0.00025, first_steps=5, mean_steps=400, tick_s=0.1, objective_s=1.0
)
ENCODER = Shape(slots=1, step_s=0.0, request_step_s=0.08, first_steps=1, mean_steps=0, tick_s=0.02, objective_s=0.5)


def step_rate(time_s: float) -> float:
    """Requests per second of the step trace: four times the load within a second."""
    return 24.0 if 1500 <= time_s < 2400 else 6.0


def day_rate(time_s: float) -> float:
    """Requests per second of the day trace: a quiet night, a busy day, and twice the load for ten minutes at 14:00."""
    hour = time_s / 3600
    rate = 1.0 + 14.0 * max(0.0, math.sin(math.pi * (hour - 6) / 16)) if 6 <= hour < 22 else 1.0
    return rate * (2.0 if 14 <= hour < 14 + 1 / 6 else 1.0)


def encoder_rate(time_s: float) -> float:
    """Images per second of the encoder trace."""
    return 60.0 if 1500 <= time_s < 2400 else 15.0


def sparse_rate(time_s: float) -> float:
    """Requests per second of the sparse trace: five minutes of every hour."""
    return 4.0 if 1800 <= time_s % 3600 < 2100 else 0.0


TRACES: dict[str, tuple[Shape, Callable[[float], float], float, int]] = {
    "step": (ENGINE, step_rate, 3600.0, 1),
    "day": (ENGINE, day_rate, 86400.0, 1),
    "encoder": (ENCODER, encoder_rate, 3600.0, 1),
    "sparse": (ENGINE, sparse_rate, 4 * 3600.0, 0),
}
"""Kind of replica, requests per second, seconds, fewest replicas."""


@dataclass
class _Replica:
    """One replica: its requests share the steps."""

    ready_s: float
    steps: float = 0.0
    """Steps made so far."""
    ends: list[float] = field(default_factory=list)
    """Steps at which its requests end, as a heap."""
    is_draining: bool = False


class Predicting:
    """The policy of `saccade.fleet.scaling`."""

    def __init__(self, shape: Shape, max_replicas: int, min_replicas: int = 1) -> None:
        policy = ScalingPolicy(warm_up_s=WARM_UP_S, max_queue_s=shape.objective_s / 2)
        self.autoscaler = Autoscaler(policy, min_replicas=min_replicas, max_replicas=max_replicas)
        self.last_s = -5.0
        self.arrived_s = 0.0
        self.wanted = 2 * min_replicas

    def __call__(self, load: PoolLoad, num_waiting: int) -> int:
        """Decide every five seconds; at once if there is no replica."""
        self.arrived_s += load.arrived_s
        if load.time_s - self.last_s >= 5.0 or (num_waiting and not load.num_present):
            self.wanted = self.autoscaler.decide(replace(load, arrived_s=self.arrived_s)).num_replicas
            self.last_s, self.arrived_s = load.time_s, 0.0
        return self.wanted


class OngoingRequests:
    """Ray Serve's default policy."""

    def __init__(self, target: float, max_replicas: int, min_replicas: int = 1) -> None:
        self.target, self.min_replicas, self.max_replicas = target, min_replicas, max_replicas
        self.recent: deque[int] = deque(maxlen=30)
        self.wanted = 2 * min_replicas
        self.more_s = self.fewer_s = 0

    def __call__(self, load: PoolLoad, num_waiting: int) -> int:
        """Decide every second; from zero replicas, at once."""
        self.recent.append(load.num_running + num_waiting)
        desired = math.ceil(statistics.fmean(self.recent) / self.target)
        desired = min(max(desired, self.min_replicas), self.max_replicas)
        if not self.wanted and num_waiting:
            self.wanted = max(1, desired)
        self.more_s = self.more_s + 1 if desired > self.wanted else 0
        self.fewer_s = self.fewer_s + 1 if desired < self.wanted else 0
        if self.more_s > 30 or self.fewer_s > 600:
            self.wanted, self.more_s, self.fewer_s = desired, 0, 0
        return self.wanted


class Simulation:
    """One pool under a trace."""

    def __init__(self, shape: Shape, policy: Policy, seed: int, num_replicas: int = 1) -> None:
        self.shape, self.policy, self.random = shape, policy, random.Random(seed)
        self.replicas = [_Replica(ready_s=0.0) for _ in range(num_replicas)]
        self.queue: deque[tuple[float, float]] = deque()
        """(time of arrival, steps)."""
        self.waiting_steps = self.arrived_steps = 0.0
        self.costs = CostReport()
        self.ttfts: list[float] = []

    def run(self, rate: Callable[[float], float], seconds: float) -> None:
        """Run a trace of requests per second to its end."""
        ticks_per_s = round(1 / self.shape.tick_s)
        for second in range(int(seconds)):
            for tick in range(ticks_per_s):
                now = second + tick * self.shape.tick_s
                self._arrive(rate(now), now)
                self._advance(now)
            self._scale(float(second + 1))

    def _arrive(self, rate: float, now: float) -> None:
        """Poisson arrivals of one tick."""
        time = self.random.expovariate(rate) if rate else math.inf
        while time < self.shape.tick_s:
            further = self.random.expovariate(1 / self.shape.mean_steps) if self.shape.mean_steps else 0.0
            steps = self.shape.first_steps + further
            self.queue.append((now + time, steps))
            self.waiting_steps += steps
            self.arrived_steps += steps
            time += self.random.expovariate(rate)

    def _advance(self, now: float) -> None:
        """Run all replicas for one tick. Of replicas with free slots, the one with fewest requests takes the next."""
        end = now + self.shape.tick_s
        for replica in self.replicas:
            if replica.ends:
                self._run(replica)
        free = [(len(one.ends), number) for number, one in enumerate(self.replicas) if self._is_free(one, now)]
        heapq.heapify(free)
        while self.queue and free:
            count, number = heapq.heappop(free)
            arrived, steps = self.queue.popleft()
            replica = self.replicas[number]
            heapq.heappush(replica.ends, replica.steps + steps)
            self.waiting_steps -= steps
            ttft = max(0.0, end - arrived - self.shape.tick_s) + self.shape.first_steps * self.shape.step(count + 1)
            self.ttfts.append(ttft)
            self.costs.finish(is_within_objective=ttft <= self.shape.objective_s)
            if count + 1 < self.shape.slots:
                heapq.heappush(free, (count + 1, number))

    def _run(self, replica: _Replica) -> None:
        """Make the steps of one tick; they get shorter as requests end."""
        left = self.shape.tick_s
        while replica.ends and left > 0:
            step_s = self.shape.step(len(replica.ends))
            made = min(left / step_s, replica.ends[0] - replica.steps)
            replica.steps += made
            left -= made * step_s
            while replica.ends and replica.ends[0] <= replica.steps + 1e-9:
                heapq.heappop(replica.ends)

    def _is_free(self, replica: _Replica, now: float) -> bool:
        return replica.ready_s <= now and not replica.is_draining and len(replica.ends) < self.shape.slots

    def _scale(self, now: float) -> None:
        """Report, decide, and start or drain replicas."""
        self.replicas = [one for one in self.replicas if one.ends or not one.is_draining]
        active = [one for one in self.replicas if not one.is_draining]
        ready = [one for one in active if one.ready_s <= now]
        draining = len(self.replicas) - len(active)
        self.costs.observe(now, num_ready=len(ready) + draining, num_starting=len(active) - len(ready))
        load = PoolLoad(
            time_s=now,
            num_ready=len(ready),
            starting_s=tuple(one.ready_s - now for one in active if one.ready_s > now),
            arrived_s=self.shape.work_s(self.arrived_steps),
            waiting_s=self.shape.work_s(self.waiting_steps) if self.queue else 0.0,
            num_running=sum(len(one.ends) for one in self.replicas),
            slots=self.shape.slots,
            request_s=(self.shape.first_steps + self.shape.mean_steps) * self.shape.step(self.shape.slots),
        )
        self.arrived_steps = 0.0
        wanted = self.policy(load, len(self.queue))
        self.replicas += [_Replica(ready_s=now + WARM_UP_S) for _ in range(wanted - len(active))]
        for replica in sorted(active, key=lambda one: (one.ready_s <= now, len(one.ends)))[
            : max(0, len(active) - wanted)
        ]:
            replica.is_draining = True


def policies(shape: Shape, *, min_replicas: int) -> dict[str, Callable[[], Policy]]:
    """Policies by name: ours, and the peer with several targets."""
    targets = (2.0, *(share * shape.slots for share in (0.4, 0.6, 0.8, 1.0)))

    def ongoing(target: float) -> Callable[[], Policy]:
        return lambda: OngoingRequests(target, MAX_REPLICAS, min_replicas)

    ours = {"predicted queue time": lambda: Predicting(shape, MAX_REPLICAS, min_replicas)}
    return ours | {f"ongoing requests, target {target:g}": ongoing(target) for target in targets}


def main() -> None:
    """Print a line per trace and policy: medians over the seeds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", nargs="+", default=list(TRACES), choices=list(TRACES))
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    for trace in options.traces:
        shape, rate, seconds, min_replicas = TRACES[trace]
        for name, policy in policies(shape, min_replicas=min_replicas).items():
            rows = []
            for seed in range(options.seeds):
                simulation = Simulation(shape, policy(), seed, num_replicas=2 * min_replicas)
                simulation.run(rate, seconds)
                report = simulation.costs.report()
                p99 = sorted(simulation.ttfts)[int(0.99 * len(simulation.ttfts))]
                rows.append((report["within_objective"], report["replica_hours"], p99, simulation.ttfts[0]))
            within, hours, p99, first = (statistics.median(column) for column in zip(*rows, strict=True))
            print(
                f"{trace:8s} {name:30s} within the objective {within:.1%}, {hours:.2f} replica-hours, "
                f"TTFT p99 {p99:.2f} s, of the first request {first:.2f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
