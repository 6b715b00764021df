"""Which replica answers a request: the one that is expected to finish it first.

    expected finish = queued work + encoder work of images that are not resident + uncached prompt tokens + decode

The sum is a vector over all replicas, first as if no replica had anything: a decision takes the same few array
operations for three replicas and for a thousand. Then the few replicas that have images or a prefix of the request are
corrected (`residency.py`). Two rules hold affinity and load together:

- A replica whose queue is longer than `load_bound` times the mean is not chosen, whatever it has. A hot image
  therefore becomes resident on a second replica instead of filling the queue of one.
- Among replicas that would finish at about the same time, rendezvous hashing decides. While no replica has an image or
  prefix, its key is hashed, so that fronts which do not know of each other choose the same home; otherwise the id of
  the request is hashed, so that requests spread.

A front adds each choice to the queue of its replica at once (a reservation), until a report of the replica says that
it has accepted the request. The time is a parameter; this module reads no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from saccade.fleet.rendezvous import digest, ranks
from saccade.fleet.replicas import PREFIX_BLOCK, Image, Replica, ReplicaState, ReplicaStatistics, RoutedRequest
from saccade.fleet.residency import Residency, replicas_in

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
    home_share: float = 0.05
    """Share of the work that a request may wait longer on the home of its image or prefix, while no replica has it."""
    tie_s: float = 0.002
    """Expected finishes that differ by no more than this are equal."""


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


class _Reservation(NamedTuple):
    """A request that its replica has not reported as accepted."""

    time: float
    work_s: float


class _Saved(NamedTuple):
    """What some replicas have of a request: a set of replicas as bits, and work that they need not do."""

    replicas: int
    patches: int
    tokens: int


class _Work(NamedTuple):
    """The work of a request on a replica, and what it need not encode."""

    seconds: float
    resident_patches: int


class Router:
    """The replicas as one front sees them. `choose` reserves, `finish` releases; `update` takes statistics."""

    def __init__(self, policy: RoutingPolicy | None = None) -> None:
        self.policy = policy or RoutingPolicy()
        self._slots: dict[str, int] = {}
        self._replicas: list[Replica | None] = []
        self._states: list[ReplicaState] = []
        self._slot_of_request: dict[str, int] = {}
        self._num_running: list[int] = []
        self._reserved: list[dict[str, _Reservation]] = []
        self._images, self._prefixes = Residency(), Residency()
        self._open: dict[tuple[str, str | None], _Open | None] = {}
        self._digests = np.empty(0, np.uint64)
        self._free_at = np.empty(0)
        self._request_s = np.empty(0)
        self._speeds = np.empty((0, 3))
        """A row for each replica: seconds per patch, per prompt token and per output token of a new request."""

    # ------------------------------------------------------------------ replicas

    def add(self, replica: Replica) -> None:
        """Add a replica, ready and idle."""
        assert replica.name not in self._slots, f"replica {replica.name} is added twice"
        slot = self._free_slot()
        self._slots[replica.name] = slot
        self._replicas[slot], self._states[slot], self._num_running[slot] = replica, "ready", 0
        self._reserved[slot] = {}
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
        self._reserved[slot].clear()
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
        """Replace the load of a replica by its own statistics, and add the requests that these do not have yet."""
        slot = self._slots[name]
        self.set_state(name, statistics.state)
        reserved = self._reserved[slot]
        for request_id in statistics.accepted:
            reserved.pop(request_id, None)
        self._free_at[slot] = statistics.as_of + statistics.queued_s
        self._num_running[slot] = statistics.num_running + len(reserved)
        for reservation in reserved.values():
            self._queue(slot, reservation.work_s, reservation.time)
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
        wait = self._free_at - now
        np.maximum(wait, 0.0, out=wait)
        saved = self._saved(request)
        cost = self._costs(request, wait, saved)
        cost += candidates.penalty
        longest = self.policy.load_bound * float(wait @ candidates.share) + self.policy.load_floor_s
        np.putmask(cost, wait > longest, np.inf)
        slot, work = self._settle_ties(request, cost, saved)
        replica = self._replicas[slot]
        assert replica is not None, "a removed replica is no candidate"
        work_s = float(self._request_s[slot]) + work.seconds
        ready_s = float(wait[slot]) + work_s
        self._reserve(request, slot, work_s, now)
        finish_s = ready_s + float(self._speeds[slot, 2]) * request.output_tokens
        return Choice(replica.name, ready_s, finish_s, work.resident_patches)

    def finish(self, request_id: str) -> None:
        """Note that a request ended, or was cancelled. Unknown ids are those of a removed replica."""
        slot = self._slot_of_request.pop(request_id, None)
        if slot is not None:
            self._reserved[slot].pop(request_id, None)
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

    def _costs(self, request: RoutedRequest, wait: Floats, saved: Sequence[_Saved]) -> Floats:
        """Expected finish on each replica, with work at its price."""
        price = self.policy.work_price
        factors = (price * _num_patches(request), price * request.prompt_tokens, request.output_tokens)
        cost: Floats = self._speeds @ np.array(factors, np.float64)
        cost += wait  # in place: a new array costs as much as the arithmetic
        for one in saved:
            slots = replicas_in(one.replicas)
            cost[slots] -= self._speeds[slots] @ np.array((price * one.patches, price * one.tokens, 0.0))
        return cost

    def _saved(self, request: RoutedRequest) -> list[_Saved]:
        """Patches and prompt tokens that replicas need not compute. A replica that is named twice saves both."""
        runs = self._prefixes.holders_along(request.prefix)
        patches: dict[int, int] = {}
        for image in request.images:
            if holders := self._images.holders(image.key) | _holders_beyond(runs, image.last_block):
                patches[holders] = patches.get(holders, 0) + image.patches
        saved, longer = [], 0
        for length, holders in reversed(runs):
            if only := holders & ~longer:
                saved.append(_Saved(only, patches.pop(only, 0), length * PREFIX_BLOCK))
                longer |= only
        saved += [_Saved(holders, count, 0) for holders, count in patches.items()]
        return saved

    def _work(self, request: RoutedRequest, slot: int, saved: Sequence[_Saved]) -> _Work:
        """The work of a request on one replica."""
        here = [one for one in saved if one.replicas >> slot & 1]
        resident = sum([one.patches for one in here])
        patches, tokens = _num_patches(request) - resident, request.prompt_tokens - sum([one.tokens for one in here])
        patch_s, token_s, _ = self._speeds[slot].tolist()
        return _Work(patch_s * patches + token_s * tokens, resident)

    def _settle_ties(self, request: RoutedRequest, cost: Floats, saved: Sequence[_Saved]) -> tuple[int, _Work]:
        """The slot of least cost; of several that are nearly equal, the one that rendezvous hashing ranks first."""
        best = int(cost.argmin())
        work, least = self._work(request, best, saved), float(cost[best])
        near = (cost <= least + max(self.policy.tie_s, self.policy.home_share * work.seconds)).nonzero()[0]
        if len(near) == 1:
            return best, work
        key = self._first_missing(request, best)
        if key is None:
            key, near = request.id.encode(), near[cost[near] <= least + self.policy.tie_s]
        slot = int(near[ranks(key, self._digests[near]).argmax()])
        return slot, self._work(request, slot, saved)

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
        self._reserved[slot][request.id] = _Reservation(now, work_s)
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
        self._reserved.append({})
        self._digests = np.append(self._digests, np.uint64(0))
        self._free_at, self._request_s = np.append(self._free_at, 0.0), np.append(self._request_s, 0.0)
        self._speeds = np.append(self._speeds, np.zeros((1, 3)), axis=0)
        return len(self._replicas) - 1

    def _set_speed(self, slot: int) -> None:
        """The coefficients of a replica for one more request, given how many decode there."""
        replica, num_running = self._replicas[slot], self._num_running[slot]
        assert replica is not None, "a removed replica has no speed"
        costs, share = replica.costs, replica.costs.prompt_share(num_running)
        self._speeds[slot] = costs.patch_s / share, costs.token_s / share, costs.decode_step_s(num_running + 1)
        self._request_s[slot] = costs.request_s / share


def _holders_beyond(runs: Sequence[tuple[int, int]], block: int) -> int:
    """The replicas that have more blocks than so many."""
    for length, holders in runs:
        if length > block:
            return holders
    return 0


def _num_patches(request: RoutedRequest) -> int:
    return sum([image.patches for image in request.images])
