"""Deadlines of requests. Plain Python; the caller passes the time."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

_MAX_STALE = 1024
"""Deadlines of requests that have ended, kept before they are removed."""


class Deadlines:
    """Requests in the order in which their deadlines pass. Those that have ended are left out by the caller."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, str, str]] = []  # time, request id, kind

    @property
    def next_at(self) -> float | None:
        """The time of the first; None if there is none."""
        return self._heap[0][0] if self._heap else None

    def add(self, at: float, request_id: str, kind: str) -> None:
        """Add a deadline; `kind` says what must have happened by then."""
        heapq.heappush(self._heap, (at, request_id, kind))

    def pop_due(self, now: float) -> Iterator[tuple[str, str]]:
        """Remove those that have passed; request id and kind of each."""
        while self._heap and self._heap[0][0] <= now:
            _, request_id, kind = heapq.heappop(self._heap)
            yield request_id, kind

    def prune(self, num_open: int, is_open: Callable[[str], bool]) -> None:
        """Remove those of ended requests, if there are many more than open requests."""
        if len(self._heap) > _MAX_STALE + 2 * num_open:
            self._heap = [entry for entry in self._heap if is_open(entry[1])]
            heapq.heapify(self._heap)
