"""The lease of a fleet: one controller at a time decides, and what an earlier one still writes has no effect.

    candidate = Candidate(objects, Owner.of_this_process("Ray at 10.0.0.1:6379"))
    lease = candidate.try_acquire()      # None: another controller holds it
    lease.renew()                        # every few seconds; raises LeaseLostError after another one has taken it

A lease is an epoch: `lease/000007.json`, created exclusively. Everything that a controller writes has its epoch, and
readers take the largest epoch, so a controller that wakes up after a pause changes nothing. The owner renews the lease
by changing a heartbeat. A candidate takes over when it has seen the same heartbeat for `LEASE_S` by its own clock:
clocks of two machines are never compared. An owner that could not renew for `LEASE_S` holds nothing any more.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from saccade import __version__
from saccade.fleet.objects import Objects

LEASE_S = 10.0
"""Seconds without a renewal after which another controller may take the lease."""
RENEW_S = 2.0
"""Seconds between two renewals."""
_HEARTBEAT = ".heartbeat"


class LeaseLostError(Exception):
    """Another controller holds the lease, or it could not be renewed in time."""


@dataclass(frozen=True, kw_only=True)
class Owner:
    """Who holds a lease."""

    cluster: str
    """The Ray cluster of the controller, in words. A controller takes over at once from one of the same cluster."""
    host: str
    """Name of the machine."""
    pid: int
    """Process id there."""
    saccade: str
    """Version of Saccade."""

    @staticmethod
    def of_this_process(cluster: str) -> Owner:
        """This process as an owner."""
        return Owner(cluster=cluster, host=socket.gethostname(), pid=os.getpid(), saccade=__version__)

    def __str__(self) -> str:
        return f"{self.cluster} (process {self.pid} on {self.host})"


@dataclass(frozen=True, kw_only=True)
class Holder:
    """The newest lease, as others see it."""

    epoch: int
    """Its epoch."""
    owner: Owner | None
    """Who took it; None: the record is damaged."""
    renewed_at: float | None
    """Time of the last renewal by the owner's clock; None: it was not renewed yet, or the heartbeat is damaged."""
    is_released: bool
    """Whether the owner has given it back."""
    heartbeat: bytes | None
    """The heartbeat as it is stored."""


def holder_of(objects: Objects) -> Holder | None:
    """The newest lease; None: there has been none."""
    epoch = newest_epoch(objects)
    if epoch is None:
        return None
    heartbeat = objects.read(_path(epoch, _HEARTBEAT))
    beat, record = _plain(heartbeat), _plain(objects.read(_path(epoch, ".json")))
    time_s = beat.get("time_s")
    return Holder(
        epoch=epoch, owner=_owner(record.get("owner")), heartbeat=heartbeat,
        is_released=beat.get("is_released") is True,
        renewed_at=float(time_s) if isinstance(time_s, int | float) else None,
    )  # fmt: skip


class Candidate:
    """A process that wants the lease. Ask again every few seconds: it has to see whether the owner renews."""

    def __init__(self, objects: Objects, owner: Owner, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._objects, self._owner, self._clock = objects, owner, clock
        self._seen: tuple[int, bytes | None] | None = None
        self._seen_at = 0.0

    def try_acquire(self, *, takes_over: bool = False) -> Lease | None:
        """Take the lease if it is free; `takes_over`: also from a controller of the same cluster, which has ended."""
        holder = holder_of(self._objects)
        if holder is not None and not self._is_free(holder, takes_over):
            return None
        epoch = 1 if holder is None else holder.epoch + 1
        began_s = self._clock()
        record = {"owner": asdict(self._owner), "time_s": time.time(), "id": secrets.token_hex(8)}
        if not self._objects.create(_path(epoch, ".json"), json.dumps(record).encode()):
            return None
        if newest_epoch(self._objects) != epoch:
            return None
        lease = Lease(self._objects, epoch, clock=self._clock, held_since_s=began_s)
        lease.renew()
        return lease

    def _is_free(self, holder: Holder, takes_over: bool) -> bool:
        is_ours = holder.owner is not None and holder.owner.cluster == self._owner.cluster
        if holder.is_released or (takes_over and is_ours):
            return True
        seen = (holder.epoch, holder.heartbeat)
        if seen != self._seen:
            self._seen, self._seen_at = seen, self._clock()
        return self._clock() - self._seen_at >= LEASE_S


class Lease:
    """The lease that this process holds, until another one takes it."""

    def __init__(self, objects: Objects, epoch: int, *, clock: Callable[[], float], held_since_s: float) -> None:
        self.epoch = epoch
        self._objects, self._clock, self._renewed_s = objects, clock, held_since_s
        self._number = 0

    @property
    def is_held(self) -> bool:
        """Whether no other process can hold the lease yet, as far as this one knows. Ask before acting."""
        return self._clock() - self._renewed_s < LEASE_S

    def renew(self, *, is_released: bool = False) -> None:
        """Renew the lease; LeaseLostError: act no more."""
        began_s = self._clock()
        newest = newest_epoch(self._objects)
        if newest != self.epoch:
            self._renewed_s = float("-inf")
            raise LeaseLostError(f"epoch {newest} has replaced epoch {self.epoch}")
        if not self.is_held:
            raise LeaseLostError(f"epoch {self.epoch} was not renewed for {LEASE_S:g} s")
        self._number += 1
        heartbeat = {"time_s": time.time(), "number": self._number, "is_released": is_released}
        self._objects.write(_path(self.epoch, _HEARTBEAT), json.dumps(heartbeat).encode(), sync=False)
        self._renewed_s = began_s

    def release(self) -> None:
        """Give the lease back, so that another controller need not wait."""
        self.renew(is_released=True)
        self._renewed_s = float("-inf")


def newest_epoch(objects: Objects) -> int | None:
    """The largest epoch; None: there has been no lease."""
    numbers = [number for name in objects.names("lease") if (number := number_of(name)) is not None]
    return max(numbers, default=None)


def number_of(name: str) -> int | None:
    """The number of an object such as 000012.json; None: a file of another kind."""
    stem, dot, kind = name.partition(".")
    return int(stem) if dot and kind == "json" and stem.isascii() and stem.isdigit() else None


def _path(epoch: int, kind: str) -> str:
    return f"lease/{epoch:06d}{kind}"


def _plain(content: bytes | None) -> dict[str, Any]:
    """A record; empty if it is absent or damaged."""
    try:
        plain = json.loads(content or b"{}")
    except ValueError:
        return {}
    return plain if isinstance(plain, dict) else {}


def _owner(plain: Any) -> Owner | None:
    try:
        return Owner(**plain)
    except TypeError:
        return None
