"""Request deadlines. Plain Python; the caller passes the time."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator

from saccade.engine.core.request_state import RequestState
from saccade.engine.request import Failure, Request

_MAX_STALE = 1024
"""Number of deadlines of ended requests that may be kept before they are removed."""


class Deadlines:
    """Deadlines of requests, in order of time. The caller ignores those of ended requests."""

    def __init__(self) -> None:
        self.next_at = math.inf
        """Time of the first deadline; infinite if there is none."""
        self._heap: list[tuple[float, str, str]] = []  # time, request id, kind

    def add(self, at: float, request_id: str, kind: str) -> None:
        """Add a deadline of a kind that the caller chooses."""
        heapq.heappush(self._heap, (at, request_id, kind))
        self._set_next()

    def pop_due(self, now: float) -> Iterator[tuple[str, str]]:
        """Remove the deadlines that have passed; yields the request id and kind of each."""
        while self._heap and self._heap[0][0] <= now:
            _, request_id, kind = heapq.heappop(self._heap)
            self._set_next()
            yield request_id, kind

    def prune(self, num_open: int, is_open: Callable[[str], bool]) -> None:
        """Remove deadlines of ended requests if there are many more deadlines than open requests."""
        if len(self._heap) > _MAX_STALE + 2 * num_open:
            self._heap = [entry for entry in self._heap if is_open(entry[1])]
            heapq.heapify(self._heap)
            self._set_next()

    def _set_next(self) -> None:
        self.next_at = self._heap[0][0] if self._heap else math.inf


class RequestDeadlines(Deadlines):
    """Deadlines of a core's requests: by when each must start (`queue`) and end (`total`)."""

    def add_request(self, request: Request, now: float, num_open: int, is_open: Callable[[str], bool]) -> None:
        """Add the deadlines of a request."""
        for kind, seconds in (("queue", request.queue_timeout_s), ("total", request.timeout_s)):
            if seconds is not None:
                self.add(now + seconds, request.id, kind)
        self.prune(num_open, is_open)

    def pop_failures(self, now: float, find: Callable[[str], RequestState | None]) -> Iterator[tuple[str, Failure]]:
        """Yields requests whose deadline has passed, with their failure. Some may have ended already."""
        for request_id, kind in self.pop_due(now):
            state = find(request_id)
            if kind == "total":
                yield request_id, Failure("running", "the request was not complete within its time limit", "timeout")
            elif state is None or (state.slot is None and not state.num_preemptions):
                yield request_id, Failure("waiting", "the request did not start within its time limit", "timeout")
