"""Scaling of one pool (fronts, engines or encoders): as many replicas as the predicted queue time needs.

    autoscaler = Autoscaler(ScalingPolicy(warm_up_s=90.0), min_replicas=1, max_replicas=16)
    decision = autoscaler.decide(load)    # every few seconds, with what the pool reports

Work is counted in seconds that one fully loaded replica needs for it, by the cost models of engine and encoder: a
replica does one second of work per second. A decision takes effect after the warm-up. Three things are predicted:

    arrivals    work per second: level and trend (Holt's method), plus a margin for how wrong earlier forecasts were
    backlog     work that waits by then, with the replicas that are ready or starting
    pages       KV cache pages in use, which grow with the arrivals (Little's law)

A backlog adds replicas until it is cleared; otherwise replicas are removed after fewer have sufficed for
`shrink_after_s`. Time is a number in the load; nothing here reads a clock.
"""

import math
from collections import deque
from dataclasses import dataclass
from typing import Any

from saccade.errors import ConfigError

_LEVEL_S, _TREND_S, _ERROR_S = 20.0, 60.0, 120.0
"""Time constants of the forecast's level, of its trend, and of its mean squared error."""
_JUMP = 4.0
"""Standard errors above the forecast at which a rate is a new level at once."""
_MAX_PAGES = 0.9
"""Share of pages that a pool may use, so that requests are not preempted."""


@dataclass(frozen=True, kw_only=True)
class ScalingPolicy:
    """When replicas of a pool are added and removed."""

    max_queue_s: float = 0.5
    """Predicted seconds that a request may wait for a replica."""
    warm_up_s: float = 60.0
    """Seconds from the request for a replica until it serves."""
    margin: float = 2.0
    """Standard errors of the forecast that are added to it."""
    clear_s: float = 20.0
    """Seconds in which the backlog of a warm-up is cleared. Smaller: more replicas for a short time."""
    shrink_after_s: float = 300.0
    """Seconds for which fewer replicas must have sufficed before any is removed."""
    idle_s: float = 900.0
    """Seconds without any work after which a pool with `min_replicas = 0` has no replicas."""

    def __post_init__(self) -> None:
        for name in ("warm_up_s", "margin", "shrink_after_s", "idle_s"):
            if not 0 <= (value := getattr(self, name)) < math.inf:
                raise ConfigError(f"{name} is {value:g}. Use a number from 0")
        for name in ("max_queue_s", "clear_s"):
            if not 0 < (value := getattr(self, name)) < math.inf:
                raise ConfigError(f"{name} is {value:g}. Use seconds above 0")


@dataclass(frozen=True, kw_only=True)
class PoolLoad:
    """What a pool reports."""

    time_s: float
    """Time of the report."""
    num_ready: int
    """Replicas that serve."""
    starting_s: tuple[float, ...]
    """For each replica that warms up, seconds until it is expected to serve."""
    arrived_s: float
    """Work that has arrived since the report before, in seconds."""
    waiting_s: float
    """Work that waits for a replica, in seconds."""
    num_running: int
    """Requests on replicas."""
    slots: int
    """Requests that one replica runs at a time."""
    request_s: float
    """Mean time that a request runs, in seconds."""
    pages_used: int = 0
    """KV cache pages in use on all replicas."""
    pages_per_replica: int = 0
    """KV cache pages of one replica; 0 for pools without a KV cache."""

    @property
    def num_present(self) -> int:
        """Replicas that serve or warm up."""
        return self.num_ready + len(self.starting_s)

    @property
    def has_work(self) -> bool:
        """Whether anything arrives, waits or runs."""
        return bool(self.arrived_s or self.waiting_s or self.num_running)


@dataclass(frozen=True, kw_only=True)
class ScalingDecision:
    """How many replicas a pool should have, and why."""

    num_replicas: int
    """Replicas wanted, those that are ready or starting included."""
    reason: str
    """What the number follows from: arrivals, backlog, pages, recent need, idle, minimum, maximum."""
    forecast: float
    """Work per second that is expected after the warm-up, with the margin."""
    predicted_queue_s: float
    """Predicted queue time after the warm-up with this many replicas."""


class Forecast:
    """Short forecast of the work that arrives per second."""

    def __init__(self) -> None:
        self.level: float | None = None
        self.trend = 0.0
        self.squared_error = 0.0

    def observe(self, rate: float, elapsed_s: float) -> None:
        """Count the rate of the last interval. One far above the forecast is a new level, not noise."""
        if self.level is None:
            self.level = rate
            return
        expected = self.level + self.trend * elapsed_s
        error, largest = rate - expected, _JUMP * math.sqrt(self.squared_error) or math.inf
        self.squared_error += _weight(elapsed_s, _ERROR_S) * (min(abs(error), largest) ** 2 - self.squared_error)
        if error > largest:
            self.level = rate
            return
        level = expected + _weight(elapsed_s, _LEVEL_S) * error
        self.trend += _weight(elapsed_s, _TREND_S) * ((level - self.level) / elapsed_s - self.trend)
        self.level = level

    def after(self, seconds: float, margin: float, interval_s: float) -> float:
        """Expected rate at a time ahead, plus so many standard errors of the level. The trend fades out with time."""
        level = self.level or 0.0
        change = self.trend * _TREND_S * _weight(seconds, _TREND_S)
        error = math.sqrt(self.squared_error * _weight(interval_s, _LEVEL_S))
        return max(0.0, level + min(change, level) + margin * error)


def _weight(elapsed_s: float, constant_s: float) -> float:
    """Weight of a value that is averaged exponentially."""
    return 1 - math.exp(-elapsed_s / constant_s)


def queue_time_s(rate: float, num_replicas: int, slots: int, request_s: float) -> float:
    """Mean queue time of Poisson arrivals in a steady state (Sakasegawa's approximation for G/G/c, equal variances)."""
    if num_replicas <= 0 or rate >= num_replicas:
        return math.inf if rate > 0 else 0.0
    servers, utilization = num_replicas * slots, rate / num_replicas
    waiting = math.pow(utilization, math.sqrt(2 * (servers + 1)) - 1) / (1 - utilization)
    return request_s * waiting / servers


class Autoscaler:
    """Decides the number of replicas of one pool."""

    def __init__(self, policy: ScalingPolicy, *, min_replicas: int, max_replicas: int) -> None:
        self.policy, self.min_replicas, self.max_replicas = policy, min_replicas, max_replicas
        self.forecast = Forecast()
        self._needs: deque[tuple[float, int]] = deque()
        """(time, replicas needed), decreasing; the first is the largest need of the last `shrink_after_s`."""
        self._last_s: float | None = None
        self._last_work_s: float | None = None

    def decide(self, load: PoolLoad) -> ScalingDecision:
        """Replicas that the pool should have from now on."""
        elapsed_s = load.time_s - (load.time_s if self._last_s is None else self._last_s)
        if self._last_s is None:  # replicas that an earlier controller wanted
            self._needs.append((load.time_s, load.num_present))
        if elapsed_s > 0:
            self.forecast.observe(load.arrived_s / elapsed_s, elapsed_s)
        self._last_s = load.time_s
        if self._last_work_s is None or load.has_work or any(load.starting_s):  # what starts was asked for
            self._last_work_s = load.time_s
        rate = self.forecast.after(self.policy.warm_up_s, self.policy.margin, elapsed_s or 1.0)
        number, reason = self._wanted(load, rate)
        predicted = self.predicted_queue_s(load, rate, number)
        return ScalingDecision(num_replicas=number, reason=reason, forecast=rate, predicted_queue_s=predicted)

    def note_work(self, time_s: float) -> None:
        """Note that the pool was asked for at this time, so that it is not idle."""
        self._last_work_s = time_s

    def predicted_queue_s(self, load: PoolLoad, rate: float, num_replicas: int) -> float:
        """Queue time after the warm-up: the backlog of then, and the random waiting of a steady state."""
        if num_replicas <= 0:
            return math.inf if rate > 0 else 0.0
        backlog_s = self._backlog_s(load, rate) / num_replicas
        return backlog_s + queue_time_s(rate, num_replicas, load.slots, load.request_s)

    def _wanted(self, load: PoolLoad, rate: float) -> tuple[int, str]:
        """Replicas wanted, with the reason."""
        assert self._last_work_s is not None
        if self.min_replicas == 0 and load.time_s - self._last_work_s >= self.policy.idle_s:
            self._needs.clear()
            return 0, "idle"
        needed, reason = max(self._needed_for_arrivals(load, rate), self._needed_for_pages(load, rate))
        if (recent := self._largest_need(load.time_s, needed)) > needed:
            needed, reason = recent, "recent need"
        needed, reason = max((needed, reason), self._needed_for_backlog(load, rate))
        if needed > self.max_replicas:
            return self.max_replicas, "maximum"
        least = max(self.min_replicas, 1 if load.has_work or load.num_present else 0)
        return (least, "minimum") if needed < least else (needed, reason)

    def _needed_for_arrivals(self, load: PoolLoad, rate: float) -> tuple[int, str]:
        """Fewest replicas whose steady state keeps the queue time."""
        number = math.ceil(rate)
        while queue_time_s(rate, number, load.slots, load.request_s) > self.policy.max_queue_s:
            number += 1
        return number, "arrivals"

    def _needed_for_backlog(self, load: PoolLoad, rate: float) -> tuple[int, str]:
        """Present replicas until the backlog is cleared, and new ones if it is not cleared after the warm-up."""
        if load.waiting_s <= load.num_present * self.policy.max_queue_s:
            return 0, "backlog"
        return max(load.num_present, math.ceil(rate + self._backlog_s(load, rate) / self.policy.clear_s)), "backlog"

    def _needed_for_pages(self, load: PoolLoad, rate: float) -> tuple[int, str]:
        """Replicas whose pages hold the requests in flight after the warm-up."""
        if not load.pages_per_replica:
            return 0, "pages"
        growth = max(1.0, rate / self.forecast.level) if self.forecast.level else 1.0
        return math.ceil(load.pages_used * growth / (load.pages_per_replica * _MAX_PAGES)), "pages"

    def _backlog_s(self, load: PoolLoad, rate: float) -> float:
        """Work that waits after a warm-up from now, with the replicas that are ready or starting."""
        warm_up_s = self.policy.warm_up_s
        served_s = load.num_ready * warm_up_s + sum(max(0.0, warm_up_s - left_s) for left_s in load.starting_s)
        return max(0.0, load.waiting_s + rate * warm_up_s - served_s)

    def _largest_need(self, now: float, needed: int) -> int:
        """Largest need of the last `shrink_after_s`."""
        while self._needs and self._needs[-1][1] <= needed:
            self._needs.pop()
        self._needs.append((now, needed))
        while self._needs[0][0] < now - self.policy.shrink_after_s:
            self._needs.popleft()
        return self._needs[0][1]


class CostReport:
    """Replica-hours of a pool, and the share of requests within the objective that they bought."""

    def __init__(self) -> None:
        self._last_s: float | None = None
        self._replica_s = self._starting_s = 0.0
        self._num_requests = self._num_within = 0

    def observe(self, time_s: float, *, num_ready: int, num_starting: int) -> None:
        """Count the replicas since the last report."""
        elapsed_s = 0.0 if self._last_s is None else time_s - self._last_s
        self._last_s = time_s
        self._replica_s += elapsed_s * (num_ready + num_starting)
        self._starting_s += elapsed_s * num_starting

    def finish(self, *, is_within_objective: bool) -> None:
        """Count a request."""
        self._num_requests += 1
        self._num_within += is_within_objective

    def report(self) -> dict[str, Any]:
        """Figures as plain data."""
        hours = self._replica_s / 3600
        return {
            "replica_hours": hours,
            "starting_hours": self._starting_s / 3600,
            "requests": self._num_requests,
            "within_objective": self._num_within / self._num_requests if self._num_requests else None,
            "replica_hours_per_1000_within": 1000 * hours / self._num_within if self._num_within else None,
        }
