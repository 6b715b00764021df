"""What the front end knows of a running core: `saccade.engine.transport` has one in a thread and one in a process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from saccade.engine.core.messages import CoreInfo, Message
from saccade.engine.core.statistics import Statistics
from saccade.engine.request import Failure, RequestOutput


class CoreClient(Protocol):
    """A running core, in a thread or a process."""

    info: CoreInfo

    @property
    def statistics(self) -> Statistics:
        """Counters since the start."""

    def send(self, message: Message) -> None:
        """Send a message to the core."""

    def close(self) -> None:
        """Stop the core and free its memory. Open requests get no more output."""


OnOutputs = Callable[[Sequence[RequestOutput]], None]
"""Called from a thread of the core's client with the outputs of each step; it must return at once."""
OnStop = Callable[[Failure], None]
"""Called once, when the core has stopped by itself: no open request gets another output."""
Connect = Callable[[OnOutputs, OnStop], CoreClient]
"""Starts a core."""
