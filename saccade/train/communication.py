"""How much of a step is communication that nothing hides, from the intervals of a profiler trace.

    trace events -> intervals of compute and of each kind of collective -> exposed time per kind, longest bubble

A collective is exposed while no compute runs: its intervals minus the union of all compute intervals. A bubble is an
interval in which neither runs. Intervals are (start, end) in any unit of time.

In a trace of a GPU, collectives are NCCL's kernels and compute is every other kernel. In a trace of a CPU, collectives
are the work of gloo's threads and compute is every operation of the other threads.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Intervals = npt.NDArray[np.float64]
"""[n, 2]: starts and ends."""
_NCCL = re.compile(r"^nccl(?:Dev)?Kernel_([A-Za-z]+)")
_GLOO = re.compile(r"^gloo:(\w+)")


@dataclass(frozen=True)
class Exposure:
    """Time of one kind of collective."""

    count: int
    """Number of collectives."""
    total: float
    """Time in which at least one of them ran."""
    exposed: float
    """The part of it in which no compute ran."""


@dataclass(frozen=True)
class CommunicationReport:
    """Where the time of the profiled steps went, on one rank. Times are in microseconds."""

    elapsed: float
    """Time from the first interval to the end of the last one."""
    compute: float
    """Time in which compute ran."""
    exposed: float
    """Time in which a collective ran and no compute."""
    longest_bubble: float
    """Longest time in which neither ran."""
    bubble_start: float
    """When the longest bubble started, counted from the first interval."""
    kinds: Mapping[str, Exposure]
    """Kinds of collectives, the most exposed first. Kinds may overlap each other."""

    def lines(self) -> list[str]:
        """The report as a table."""
        shares = f"compute {self._share(self.compute)}, exposed communication {self._share(self.exposed)}"
        bubble = f"longest bubble {self.longest_bubble / 1e3:.2f} ms at {self.bubble_start / 1e3:.1f} ms"
        table = [f"{'collective':<20}{'count':>7}{'total ms':>11}{'exposed ms':>12}"] if self.kinds else []
        table += [
            f"{kind:<20}{one.count:>7}{one.total / 1e3:>11.2f}{one.exposed / 1e3:>12.2f}"
            for kind, one in self.kinds.items()
        ]
        return [f"{self.elapsed / 1e3:.1f} ms: {shares}; {bubble}", *table]

    def _share(self, time: float) -> str:
        return f"{time / self.elapsed:.1%}" if self.elapsed else "0.0%"


def report_communication(events: Iterable[Mapping[str, Any]]) -> CommunicationReport:
    """Report on the events of a Chrome trace, as `torch.profiler` exports them."""
    compute, collectives = sort_events([event for event in events if event.get("ph") == "X"])
    return measure(compute, collectives)


def sort_events(events: Sequence[Mapping[str, Any]]) -> tuple[Intervals, dict[str, Intervals]]:
    """Intervals of compute, and of each kind of collective."""
    kernels = [event for event in events if event.get("cat") == "kernel"]
    if kernels:
        pattern, compute = _NCCL, [event for event in kernels if not _NCCL.match(event["name"])]
    else:
        kernels = [event for event in events if _GLOO.match(event["name"])]
        threads = {(event["pid"], event["tid"]) for event in kernels}
        operations = [event for event in events if event["name"].startswith("aten::")]
        pattern, compute = _GLOO, [event for event in operations if (event["pid"], event["tid"]) not in threads]
    kinds: dict[str, list[Mapping[str, Any]]] = {}
    for event in kernels:
        if found := pattern.match(event["name"]):
            kinds.setdefault(found[1], []).append(event)
    return _intervals(compute), {kind: _intervals(of_kind) for kind, of_kind in kinds.items()}


def measure(compute: Intervals, collectives: Mapping[str, Intervals]) -> CommunicationReport:
    """The report on these intervals."""
    every = np.concatenate([compute, *collectives.values()])
    if not len(every):
        return CommunicationReport(0.0, 0.0, 0.0, 0.0, 0.0, {})
    start, busy, computing = every[:, 0].min(), union(every), union(compute)
    kinds = {
        kind: Exposure(len(intervals), length(union(intervals)), length(without(intervals, compute)))
        for kind, intervals in collectives.items()
    }
    gaps = busy[1:, 0] - busy[:-1, 1]
    longest = int(gaps.argmax()) if len(gaps) else None
    return CommunicationReport(
        elapsed=float(every[:, 1].max() - start),
        compute=length(computing),
        exposed=length(busy) - length(computing),
        longest_bubble=0.0 if longest is None else float(gaps[longest]),
        bubble_start=0.0 if longest is None else float(busy[longest, 1] - start),
        kinds=dict(sorted(kinds.items(), key=lambda item: -item[1].exposed)),
    )


def union(intervals: Intervals) -> Intervals:
    """The same time as disjoint intervals, in order."""
    if not len(intervals):
        return intervals
    ordered = intervals[np.argsort(intervals[:, 0])]
    reached = np.maximum.accumulate(ordered[:, 1])
    is_first = np.concatenate([[True], ordered[1:, 0] > reached[:-1]])
    is_last = np.concatenate([is_first[1:], [True]])
    return np.stack([ordered[is_first, 0], reached[is_last]], axis=1)


def without(intervals: Intervals, others: Intervals) -> Intervals:
    """The time of the intervals that no other interval covers, as disjoint intervals."""
    kept, gone = union(intervals), union(others)
    cuts = np.unique(np.concatenate([kept.ravel(), gone.ravel()]))
    pieces = np.stack([cuts[:-1], cuts[1:]], axis=1)
    middles = pieces.mean(axis=1)
    return pieces[_covers(kept, middles) & ~_covers(gone, middles)]


def length(intervals: Intervals) -> float:
    """Total length of disjoint intervals."""
    return float((intervals[:, 1] - intervals[:, 0]).sum())


def _covers(disjoint: Intervals, times: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
    """Whether each time is in one of the disjoint intervals."""
    started = np.searchsorted(disjoint[:, 0], times, "right")
    ended = np.searchsorted(disjoint[:, 1], times, "right")
    return started > ended


def _intervals(events: Sequence[Mapping[str, Any]]) -> Intervals:
    table = [(float(event["ts"]), float(event["ts"]) + float(event["dur"])) for event in events]
    return np.array(table, np.float64).reshape(-1, 2)
