"""One engine replica as a front sees it: its channel of outputs, and calls to it.

The channel opens when the replica runs. It breaks when the replica dies; then every request there is lost. A replica
that Ray stops no longer gets requests, and its channel is closed when its last request has ended.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from saccade.engine.request import RequestOutput
from saccade.engine.transport.wire import decode_outputs
from saccade.fleet.cluster.messages import Hello, load_from_plain, unpack
from saccade.fleet.cluster.patience import within
from saccade.fleet.replicas import ReplicaStatistics

logger = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
"""Seconds between calls by which a replica knows that a front is alive."""


class Calls(Protocol):
    """Calls to the replicas of one version; `ray_calls.py` makes them through Ray's handle."""

    def channel(self, replica: str) -> Any:
        """Open the channel of a replica: an asynchronous iterator of messages, which can be cancelled."""

    async def submit(self, replica: str, message: bytes, media: Sequence[Any]) -> None:
        """Send a request with references to the bytes of its media."""

    async def cancel(self, replica: str, request_ids: Sequence[str]) -> None:
        """Cancel requests."""

    async def heartbeat(self, replica: str) -> None:
        """Say that this front is alive."""

    def wake(self) -> None:
        """Have a replica started, if the pool has none. May be called as often as one likes."""

    def close(self) -> None:
        """Stop waiting for a replica."""


class LinkEvents(Protocol):
    """Calls that the owner of a link gets."""

    def on_hello(self, link: ReplicaLink, hello: Hello) -> None:
        """The channel is open."""

    def on_load(self, link: ReplicaLink, load: ReplicaStatistics) -> None:
        """The replica has reported its load."""

    def on_outputs(self, link: ReplicaLink, outputs: Sequence[RequestOutput]) -> None:
        """Outputs have arrived."""

    def on_lost(self, link: ReplicaLink) -> None:
        """The channel is broken; no more output comes from it."""


class ReplicaLink:
    """Follows one replica in the event loop that made it."""

    def __init__(self, name: str, calls: Calls, events: LinkEvents) -> None:
        self.name = name
        self.hello: Hello | None = None
        """What the replica is; None until its channel is open."""
        self.is_stopping = False
        """Whether Ray stops the replica."""
        self.pooled_patches = 0, 0
        """Patches that encoder replicas encoded for it, and those that it asked for in vain, as last reported."""
        self._calls, self._events = calls, events
        self._channel: Any = None
        self._is_closed = False
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._beat())]

    def close(self) -> None:
        """Close the channel. No event follows."""
        self._is_closed = True
        for task in self._tasks:
            task.cancel()
        if self._channel is not None:
            self._channel.cancel()

    async def _read(self) -> None:
        try:
            self._channel = self._calls.channel(self.name)
            async for message in self._channel:
                self._take(message)
            reason: object = "its channel has ended"
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
            try:
                await within(HEARTBEAT_S, self._calls.heartbeat(self.name))
            except Exception as error:  # the channel says whether the replica is lost
                logger.debug("replica %s did not answer a heartbeat: %r", self.name, error)
