"""When the operations of a recorded step run: one lane for computation, one for each communicator.

Collectives of one communicator run one after another. Those of FSDP overlap with computation, which waits for a gather
where the program copies its result, and for a reduce-scatter when the next one begins: FSDP keeps one. All others stop
computation. An all-reduce between copies follows its reduce-scatter.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from saccade.parallel_dims import Axis
from saccade.train.recorded_step import Collective, Operation, Wait

COMPUTE = "compute"


class Interval(NamedTuple):
    """One operation, or several of a phase, on a lane."""

    lane: str
    name: str
    start: float
    end: float


@dataclass
class Timeline:
    """A simulated micro-batch."""

    intervals: list[Interval] = field(default_factory=list)
    exposed: dict[str, float] = field(default_factory=dict)
    """Seconds in which computation waited, by collective."""
    compute: float = 0.0
    """Seconds of computation."""
    end: float = 0.0
    """When the last operation ends."""


def lane_of(axes: Sequence[Axis], *, overlaps: bool) -> str:
    """The name of a communicator."""
    if overlaps:
        return "copies" if tuple(axes) == ("replicate",) else "shards"
    return "context" if tuple(axes) == ("context",) else "tensor" if tuple(axes) == ("tensor",) else "all ranks"


def simulate(
    operations: Sequence[Operation],
    compute_s: Callable[[Operation], float],
    collective_s: Callable[[Collective], float],
) -> Timeline:
    """Run the operations in order."""
    return _Simulation(compute_s, collective_s).run(operations)


class _Simulation:
    def __init__(self, compute_s: Callable[[Operation], float], collective_s: Callable[[Collective], float]) -> None:
        self._compute_s, self._collective_s = compute_s, collective_s
        self._now = 0.0
        self._free: dict[str, float] = {}
        self._gathers: deque[tuple[float, str]] = deque()
        self._last_reduction = 0.0
        self._timeline = Timeline()

    def run(self, operations: Sequence[Operation]) -> Timeline:
        for operation in operations:
            if isinstance(operation, Collective):
                self._communicate(operation)
            elif isinstance(operation, Wait):
                self._wait(*(self._gathers.popleft() if self._gathers else (0.0, "")))
            else:
                self._compute(operation)
        self._wait(max([self._now, *self._free.values()]), "shards reduce-scatter")
        self._timeline.end = self._now
        return self._timeline

    def _compute(self, operation: Operation) -> None:
        seconds, found = self._compute_s(operation), self._timeline.intervals
        self._timeline.compute += seconds
        start, self._now = self._now, self._now + seconds
        last = found[-1] if found else None
        if last is not None and (last.lane, last.name, last.end) == (COMPUTE, operation.phase, start):
            found[-1] = last._replace(end=self._now)
        else:
            found.append(Interval(COMPUTE, operation.phase, start, self._now))

    def _communicate(self, one: Collective) -> None:
        lane = lane_of(one.axes, overlaps=one.overlaps)
        name = f"{lane} {one.kind}"
        start = max(self._now, self._free.get(lane, 0.0))
        if one.overlaps and one.kind == "reduce-scatter":
            self._wait(self._last_reduction, name)
            start = max(start, self._now)
        if one.overlaps and one.kind == "all-reduce":
            start = max(start, self._last_reduction)
        end = start + self._collective_s(one)
        self._free[lane] = end
        self._timeline.intervals.append(Interval(lane, f"{one.kind} in {one.phase}", start, end))
        if not one.overlaps:
            self._wait(end, name)
        elif one.kind == "all-gather":
            self._gathers.append((end, name))
        else:
            self._last_reduction = end

    def _wait(self, until: float, name: str) -> None:
        if until > self._now:
            exposed = self._timeline.exposed
            exposed[name] = exposed.get(name, 0.0) + until - self._now
            self._now = until
