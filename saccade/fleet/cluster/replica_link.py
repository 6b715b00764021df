"""One engine replica as a front sees it.

A front connects when the replica runs; Ray tells the address. The connection breaks when the replica dies; then every
request there is lost. A replica that Ray stops no longer gets requests, and is left when its last request has ended.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from saccade.engine.request import RequestOutput
from saccade.engine.transport.wire import decode_outputs
from saccade.fleet.cluster.connections import Address
from saccade.fleet.cluster.messages import Hello, load_from_plain, unpack
from saccade.fleet.cluster.replica_connection import ReplicaConnection
from saccade.fleet.replicas import ReplicaStatistics

logger = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
"""Seconds between calls by which a replica knows that a front is alive."""


class Calls(Protocol):
    """Calls to the replicas of one version; `ray_calls.py` makes them through Ray's handle."""

    def channel(self, replica: str) -> Any:
        """Ask a replica for its address: an asynchronous iterator with one item, which ends when this front leaves.

        It has `cancel()`. The replica is kept until then.
        """

    def wake(self) -> None:
        """Have a replica started, if the pool has none. May be called as often as one likes."""

    def close(self) -> None:
        """Stop waiting for a replica."""


class LinkEvents(Protocol):
    """Calls that the owner of a link gets."""

    def on_hello(self, link: ReplicaLink, hello: Hello) -> None:
        """The replica has said what it is, and can get requests."""

    def on_load(self, link: ReplicaLink, load: ReplicaStatistics) -> None:
        """The replica has reported its load."""

    def on_outputs(self, link: ReplicaLink, outputs: Sequence[RequestOutput]) -> None:
        """Outputs have arrived."""

    def on_need(self, link: ReplicaLink, request_id: str, number: int) -> None:
        """The replica needs an image or video of a request."""

    def on_refused(self, link: ReplicaLink, request_id: str, reason: str) -> None:
        """The replica cannot read a request."""

    def on_lost(self, link: ReplicaLink) -> None:
        """The connection is broken; no more output comes from it."""


class ReplicaLink:
    """Follows one replica in the event loop that made it."""

    def __init__(self, name: str, front: str, calls: Calls, events: LinkEvents) -> None:
        self.name = name
        self.hello: Hello | None = None
        """What the replica is; None until it is connected."""
        self.is_stopping = False
        """Whether Ray stops the replica."""
        self.pooled_patches = 0, 0
        """Patches that encoder replicas encoded for it, and those that it asked for in vain, as last reported."""
        self._front, self._calls, self._events = front, calls, events
        self._channel: Any = None
        self._connection: ReplicaConnection | None = None
        self._is_closed = False
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._beat())]

    def close(self) -> None:
        """Leave the replica. No event follows."""
        self._is_closed = True
        for task in self._tasks:
            task.cancel()
        if self._connection is not None:
            self._connection.close()
        if self._channel is not None:
            self._channel.cancel()

    # ------------------------------------------------------------------ once the replica has said hello

    @property
    def connection(self) -> ReplicaConnection:
        """Takes requests."""
        assert self._connection is not None, "requests are sent to replicas that are connected"
        return self._connection

    # ------------------------------------------------------------------ tasks

    async def _read(self) -> None:
        try:
            self._channel = self._calls.channel(self.name)
            address = Address.from_bytes(await anext(aiter(self._channel)))
            self._connection = await ReplicaConnection.open(address, self._front)
            async for message in self._connection.messages():
                self._take(message)
            reason: object = "its connection has ended"
        except asyncio.CancelledError:
            return
        except Exception as error:
            reason = type(error).__name__
        if not self._is_closed:
            logger.warning("replica %s is lost: %s", self.name, reason)
            self.close()
            self._events.on_lost(self)

    def _take(self, message: bytes) -> None:
        kind, content = unpack(message)
        handlers: dict[str, Callable[[Any], None]] = {
            "hello": self._take_hello, "load": self._take_load, "outputs": self._take_outputs,
            "need": lambda content: self._events.on_need(self, *content),
            "refused": lambda content: self._events.on_refused(self, *content),
        }  # fmt: skip
        handlers[kind](content)

    def _take_hello(self, content: dict[str, Any]) -> None:
        self.hello = Hello.from_plain(content)
        self._events.on_hello(self, self.hello)

    def _take_load(self, content: dict[str, Any]) -> None:
        self._events.on_load(self, load_from_plain(content))

    def _take_outputs(self, content: bytes) -> None:
        self._events.on_outputs(self, decode_outputs(content))

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            if self._connection is not None:
                self._connection.heartbeat()
