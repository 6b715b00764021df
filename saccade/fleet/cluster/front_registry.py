"""The fronts that are alive, as the controller knows them: their reports once each, and what each one is owed.

A front's rate limits hold over all fronts together, so what requests took at one front is charged at the others. An
answer may be lost; the front then sends its report again, and gets what the lost answer had.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from saccade.fleet.cluster.view import FrontReport
from saccade.fleet.objectives import Outcome
from saccade.serve.rate_limit import Consumption

ALIVE_S = 5.0
"""Seconds after its last report for which a front counts as alive."""
_POISON_S = 600.0
_MAX_POISON = 4096
_MAX_OUTCOMES = 200_000
"""Outcomes that wait for the next decision; more are dropped."""


class _Front:
    """A front that reports."""

    def __init__(self, url: str, now: float) -> None:
        self.url, self.heard_s = url, now
        self.number = 0
        self.sent: dict[str, Consumption] = {}
        """What the last answer had."""
        self.owed: dict[str, Consumption] = {}
        """What other fronts have reported since."""


class FrontRegistry:
    """Takes reports. Not thread-safe: the caller locks."""

    def __init__(self) -> None:
        self._fronts: dict[str, _Front] = {}
        self._poison: dict[bytes, float] = {}
        self._outcomes: dict[str, list[Outcome]] = defaultdict(list)
        self._num_outcomes = 0

    def take(self, report: FrontReport, now: float) -> Mapping[str, Consumption]:
        """Count a report, unless it was counted before; returns what other fronts took from rate limits."""
        front = self._fronts.setdefault(report.front, _Front(report.url, now))
        front.url, front.heard_s = report.url, now
        if report.number != front.number:  # a repeated one lost its answer
            front.number, front.sent = report.number, {}
            self._count(report, now)
        front.sent = _sum(front.sent, front.owed)
        front.owed = {}
        return front.sent

    def _count(self, report: FrontReport, now: float) -> None:
        for model, outcomes in report.outcomes.items():
            if self._num_outcomes < _MAX_OUTCOMES:
                self._outcomes[model].extend(outcomes)
                self._num_outcomes += len(outcomes)
        for name, front in self._fronts.items():
            if name != report.front and report.consumption:
                front.owed = _sum(front.owed, report.consumption)
        for digest in report.poison:
            self._poison.setdefault(digest, now + _POISON_S)

    def take_outcomes(self) -> Mapping[str, list[Outcome]]:
        """Outcomes by model since the last call."""
        taken, self._outcomes, self._num_outcomes = self._outcomes, defaultdict(list), 0
        return taken

    def forget(self, now: float) -> None:
        """Forget fronts that are gone, and requests that have been refused for long enough."""
        self._fronts = {name: one for name, one in self._fronts.items() if now - one.heard_s < ALIVE_S}
        self._poison = {digest: until for digest, until in self._poison.items() if until > now}
        while len(self._poison) > _MAX_POISON:
            del self._poison[next(iter(self._poison))]

    @property
    def num_alive(self) -> int:
        """Fronts that are alive."""
        return len(self._fronts)

    @property
    def urls(self) -> list[str]:
        """Addresses of the fronts."""
        return sorted({front.url for front in self._fronts.values()})

    @property
    def poison(self) -> frozenset[bytes]:
        """Digests of requests that are refused."""
        return frozenset(self._poison)

    def to_plain(self) -> dict[str, Any]:
        """What another controller needs to continue."""
        return {
            "fronts": {name: [front.url, front.number] for name, front in self._fronts.items()},
            "poison": {digest.hex(): until for digest, until in self._poison.items()},
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any], now: float) -> FrontRegistry:
        """Continue from `to_plain()`. Fronts count as alive until they have had time to report."""
        registry = cls()
        for name, (url, number) in plain["fronts"].items():
            registry._fronts[name] = _Front(url, now)
            registry._fronts[name].number = number
        registry._poison = {bytes.fromhex(digest): until for digest, until in plain["poison"].items()}
        return registry


def _sum(first: Mapping[str, Consumption], second: Mapping[str, Consumption]) -> dict[str, Consumption]:
    return {
        key: first[key].plus(second[key]) if key in first and key in second else first.get(key) or second[key]
        for key in first.keys() | second.keys()
    }
