"""Which replica answers a request: the one that is expected to finish it first.

    expected finish = queued work + encoder work of images that are not resident + uncached prompt tokens + decode

Each term is a vector over all replicas: a decision takes the same few array operations for three replicas and for a
thousand. Images and prefixes that replicas have lower their terms (`residency.py`). Two rules hold affinity and load
together:

- A replica whose queue is longer than `load_bound` times the mean is not chosen, whatever it has. A hot image
  therefore becomes resident on a second replica instead of filling the queue of one.
- Among replicas that would finish at about the same time, rendezvous hashing decides. While no replica has an image or
  prefix, its key is hashed, so that fronts which do not know of each other choose the same home; otherwise the id of
  the request is hashed, so that requests spread.

A front adds each choice to the queue of its replica at once (a reservation), since statistics of the replica are
older. The time is a parameter; this module reads no clock.
"""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from saccade.fleet.rendezvous import digest, ranks
from saccade.fleet.replicas import PREFIX_BLOCK, Image, Replica, ReplicaState, ReplicaStatistics, RoutedRequest
from saccade.fleet.residency import NONE, Residency

_MAX_EVENTS = 1024
"""Reservations and endings of a replica that are remembered between two of its statistics."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class RoutingPolicy:
    """How affinity is weighed against load."""

    load_bound: float = 1.25
    """Queued seconds of a replica, as a multiple of the mean, above which it gets no request."""
    load_floor_s: float = 0.25
    """Queued seconds that are always allowed in addition."""
    work_price: float = 4.0
    """Seconds that one second of work counts: it delays the requests after it too, so repeating work costs more
    than the request's own time."""
    home_share: float = 0.25
    """Share of the work that a request may wait longer on the home of its image or prefix, while no replica has it."""
    tie_s: float = 0.002
    """Expected finishes that differ by no more than this are equal."""
    transit_s: float = 0.05
    """Seconds that a request takes to a replica: statistics older than a choice plus this do not have it yet."""


class Choice(NamedTuple):
    """The replica of a request and what is expected of it."""

    replica: str
    """Name of the replica."""
    first_token_s: float
    """Seconds until the first token."""
    finish_s: float
    """Seconds until the last token."""
    resident_patches: int
    """Patches of the request's images that the replica has."""


class _Open(NamedTuple):
    """Replicas that may answer requests of one version and adapter."""

    penalty: Floats
    """0 for each of them, infinity for the others."""
    share: Floats
    """1 / their number for each of them, 0 for the others."""


class _Event(NamedTuple):
    """A change of a replica's load that its next statistics may not have."""

    time: float
    work_s: float
    num_requests: int


class Router:
    """The replicas as one front sees them. `choose` reserves, `finish` releases; `update` takes statistics."""

    def __init__(self, policy: RoutingPolicy | None = None) -> None:
        self.policy = policy or RoutingPolicy()
        self._slots: dict[str, int] = {}
        self._replicas: list[Replica | None] = []
        self._states: list[ReplicaState] = []
        self._slot_of_request: dict[str, int] = {}
        self._num_running: list[int] = []
        self._events: list[deque[_Event]] = []
        self._images, self._prefixes = Residency(), Residency()
        self._open: dict[tuple[str, str | None], _Open | None] = {}
        self._digests = np.empty(0, np.uint64)
        self._free_at = np.empty(0)
        self._patch_s, self._token_s, self._request_s, self._step_s = (np.empty(0) for _ in range(4))

    # ------------------------------------------------------------------ replicas

    def add(self, replica: Replica) -> None:
        """Add a replica, ready and idle."""
        assert replica.name not in self._slots, f"replica {replica.name} is added twice"
        slot = self._free_slot()
        self._slots[replica.name] = slot
        self._replicas[slot], self._states[slot], self._num_running[slot] = replica, "ready", 0
        self._events[slot] = deque(maxlen=_MAX_EVENTS)
        self._images.add_replica(slot, replica.cached_patches)
        self._prefixes.add_replica(slot, replica.cached_tokens)
        self._digests[slot] = digest(replica.name.encode())
        self._free_at[slot] = 0.0
        self._set_speed(slot)
        self._open.clear()

    def remove(self, name: str) -> tuple[str, ...]:
        """Remove a replica. Returns the requests in progress there, which can be chosen for again."""
        slot = self._slots.pop(name)
        self._replicas[slot] = None
        self._images.remove_replica(slot)
        self._prefixes.remove_replica(slot)
        self._open.clear()
        orphans = tuple(request for request, where in self._slot_of_request.items() if where == slot)
        for request in orphans:
            del self._slot_of_request[request]
        return orphans

    def set_state(self, name: str, state: ReplicaState) -> None:
        """Open a replica for requests, or close it. Those in progress stay."""
        slot = self._slots[name]
        if self._states[slot] != state:
            self._states[slot] = state
            self._open.clear()

    def update(self, name: str, statistics: ReplicaStatistics) -> None:
        """Replace the load of a replica by its own statistics, and add what they do not have yet."""
        slot = self._slots[name]
        self.set_state(name, statistics.state)
        events = self._events[slot]
        while events and events[0].time <= statistics.as_of - self.policy.transit_s:
            events.popleft()
        self._free_at[slot] = statistics.as_of + statistics.queued_s
        self._num_running[slot] = max(0, statistics.num_running + sum(event.num_requests for event in events))
        for event in events:
            self._queue(slot, event.work_s, event.time)
        if statistics.costs is not None and (replica := self._replicas[slot]) is not None:
            self._replicas[slot] = replace(replica, costs=statistics.costs)
        self._set_speed(slot)
        for image in statistics.images:
            self._images.touch(slot, image.key, image.patches)
        self._prefixes.touch_all(slot, statistics.prefixes, PREFIX_BLOCK)

    def num_running(self, name: str) -> int:
        """Requests in progress on a replica, as far as this front knows."""
        return self._num_running[self._slots[name]]

    def queued_s(self, name: str, now: float) -> float:
        """Seconds of work that a replica is expected to do before a new request."""
        return max(0.0, float(self._free_at[self._slots[name]]) - now)

    # ------------------------------------------------------------------ requests

    def choose(self, request: RoutedRequest, now: float) -> Choice | None:
        """Choose and reserve a replica. None: none is ready that has the version and the adapter."""
        assert request.id not in self._slot_of_request, f"request {request.id} is in progress"
        candidates = self._candidates(request.version, request.adapter)
        if candidates is None:
            return None
        patches, tokens = self._missing(request)
        work = self._patch_s * patches  # in place from here on: a new array costs as much as the arithmetic
        work += self._token_s * tokens
        wait = self._free_at - now
        np.maximum(wait, 0.0, out=wait)
        cost = self.policy.work_price * work
        cost += wait
        cost += self._step_s * request.output_tokens
        cost += candidates.penalty
        longest = self.policy.load_bound * float(wait @ candidates.share) + self.policy.load_floor_s
        cost[wait > longest] = np.inf
        slot = self._settle_ties(request, cost, work)
        replica = self._replicas[slot]
        assert replica is not None, "a removed replica is no candidate"
        self._reserve(request, slot, float(self._request_s[slot] + work[slot]), now)
        ready_s = float(wait[slot] + self._request_s[slot] + work[slot])
        resident = sum(image.patches for image in request.images) - int(patches[slot])
        finish_s = ready_s + float(self._step_s[slot]) * request.output_tokens
        return Choice(replica.name, ready_s, finish_s, resident)

    def finish(self, request_id: str, now: float) -> None:
        """Note that a request ended, or was cancelled. Unknown ids are those of a removed replica."""
        slot = self._slot_of_request.pop(request_id, None)
        if slot is not None:
            self._events[slot].append(_Event(now, 0.0, -1))
            self._num_running[slot] = max(0, self._num_running[slot] - 1)
            self._set_speed(slot)

    def _candidates(self, version: str, adapter: str | None) -> _Open | None:
        """Replicas that may answer, computed again after each change of replicas and states."""
        key = version, adapter
        if key not in self._open:
            slots = [slot for slot in self._slots.values() if self._may_answer(slot, version, adapter)]
            penalty, share = np.full(len(self._replicas), np.inf), np.zeros(len(self._replicas))
            penalty[slots], share[slots] = 0.0, 1 / max(1, len(slots))
            self._open[key] = _Open(penalty, share) if slots else None
        return self._open[key]

    def _may_answer(self, slot: int, version: str, adapter: str | None) -> bool:
        replica = self._replicas[slot]
        if replica is None or self._states[slot] != "ready" or replica.version != version:
            return False
        return adapter is None or adapter in replica.adapters

    def _missing(self, request: RoutedRequest) -> tuple[Floats, Floats]:
        """Patches and prompt tokens of the request that each replica would compute."""
        prefix, counts = request.prefix, self._prefixes.counts_along(request.prefix)
        tokens = np.full(len(self._replicas), float(request.prompt_tokens))
        for depth, (count, deeper) in enumerate(itertools.pairwise([*counts, 0]), start=1):
            if count != deeper:  # otherwise the same replicas have more
                tokens[self._prefixes.holders(prefix[depth - 1])] = request.prompt_tokens - depth * PREFIX_BLOCK
        patches = np.full(len(self._replicas), float(sum([image.patches for image in request.images])))
        for image in request.images:
            block = image.last_block
            pages = self._prefixes.holders(prefix[block]) if block < len(counts) else NONE
            patches[_union(self._images.holders(image.key), pages)] -= image.patches
        return patches, tokens

    def _settle_ties(self, request: RoutedRequest, cost: Floats, work: Floats) -> int:
        """The slot of least cost; of several that are nearly equal, the one that rendezvous hashing ranks first."""
        best = int(cost.argmin())
        limit = float(cost[best]) + max(self.policy.tie_s, self.policy.home_share * float(work[best]))
        if len(near := (cost <= limit).nonzero()[0]) == 1:
            return best
        key = self._first_missing(request, best)
        if key is None:
            key, near = request.id.encode(), (cost <= cost[best] + self.policy.tie_s).nonzero()[0]
        return int(near[ranks(key, self._digests[near]).argmax()])

    def _first_missing(self, request: RoutedRequest, slot: int) -> bytes | None:
        """Key of the first image, or without images of the first prefix block, that a replica does not have."""
        if request.images:
            uncovered = (image.key for image in request.images if not self._covers(slot, request, image))
            return next((key for key in uncovered if not self._images.has(slot, key)), None)
        return next((key for key in request.prefix if not self._prefixes.has(slot, key)), None)

    def _covers(self, slot: int, request: RoutedRequest, image: Image) -> bool:
        """Whether a replica has the pages of an image's tokens, so that it does not need the image."""
        block = image.last_block
        return block < len(request.prefix) and self._prefixes.has(slot, request.prefix[block])

    def _reserve(self, request: RoutedRequest, slot: int, work_s: float, now: float) -> None:
        """Add a request to the load of its replica, and what it brings to the caches."""
        self._slot_of_request[request.id] = slot
        self._events[slot].append(_Event(now, work_s, 1))
        self._num_running[slot] += 1
        self._queue(slot, work_s, now)
        self._set_speed(slot)
        for image in request.images:
            if not self._covers(slot, request, image):
                self._images.touch(slot, image.key, image.patches)
        self._prefixes.touch_all(slot, request.prefix[::-1], PREFIX_BLOCK)  # the longest is the first to be forgotten

    def _queue(self, slot: int, work_s: float, now: float) -> None:
        self._free_at[slot] = max(self._free_at[slot], now) + work_s

    # ------------------------------------------------------------------ slots

    def _free_slot(self) -> int:
        """The slot of a removed replica, or a new one."""
        if None in self._replicas:
            return self._replicas.index(None)
        self._replicas.append(None)
        self._states.append("ready")
        self._num_running.append(0)
        self._events.append(deque())
        self._digests = np.append(self._digests, np.uint64(0))
        for name in ("_free_at", "_patch_s", "_token_s", "_request_s", "_step_s"):
            setattr(self, name, np.append(getattr(self, name), 0.0))
        return len(self._replicas) - 1

    def _set_speed(self, slot: int) -> None:
        """The coefficients of a replica for one more request, given how many decode there."""
        replica, num_running = self._replicas[slot], self._num_running[slot]
        assert replica is not None, "a removed replica has no speed"
        costs, share = replica.costs, replica.costs.prompt_share(num_running)
        self._patch_s[slot], self._token_s[slot] = costs.patch_s / share, costs.token_s / share
        self._request_s[slot] = costs.request_s / share
        self._step_s[slot] = costs.decode_step_s(num_running + 1)


def _union(first: NDArray[np.intp], second: NDArray[np.intp]) -> NDArray[np.intp]:
    """Elements of two short arrays, each once."""
    if not len(first) or not len(second):
        return first if len(first) else second
    return np.array(list({*first.tolist(), *second.tolist()}), np.intp)
