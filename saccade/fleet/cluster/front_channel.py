"""The outputs of one front's requests on a replica, from the engine's thread to a stream of messages.

Outputs that arrive while a message is on its way are sent together, one per request: a message for every step costs the
same for one stream and for hundreds.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Callable

from saccade.engine.request import RequestOutput, merge_outputs
from saccade.engine.transport.wire import encode_outputs
from saccade.fleet.cluster.messages import pack
from saccade.fleet.replicas import LEAST_REPORT_S


class FrontChannel:
    """One front. The engine's thread puts outputs; everything else runs in the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._outputs: deque[RequestOutput] = deque()
        self._has_outputs = asyncio.Event()
        self._is_scheduled = self._is_report_due = False
        self.request_ids: set[str] = set()
        """Requests that have not ended."""
        self.accepted: list[str] = []
        """Requests that were accepted since the last report to this front."""
        self.heard_at = time.monotonic()
        """When the front last called."""
        self.closed = asyncio.Event()
        """Set when the front is gone."""

    def close(self) -> None:
        """End the stream of messages. A front that is alive after all opens another one."""
        self.closed.set()
        self._has_outputs.set()

    def put(self, output: RequestOutput) -> None:
        """Add an output, from any thread."""
        self._outputs.append(output)
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon_threadsafe(self._wake)

    def take_accepted(self) -> tuple[str, ...]:
        """Requests that were accepted since the last call."""
        accepted, self.accepted = self.accepted, []
        return tuple(accepted)

    def report_soon(self) -> None:
        """Report the load now, because it has changed by a request of another front."""
        self._is_report_due = True
        self._has_outputs.set()

    def _wake(self) -> None:
        self._is_scheduled = False
        self._has_outputs.set()

    async def messages(self, load: Callable[[], bytes | None], every_s: float) -> AsyncIterator[bytes]:
        """Messages of the channel: outputs as they come, and every so often the load of the replica if it changed."""
        report_at = reported_at = 0.0
        while not self.closed.is_set():
            if self._is_report_due:
                report_at = min(report_at, reported_at + LEAST_REPORT_S)
            if (wait_s := report_at - time.monotonic()) <= 0:
                self._is_report_due, reported_at = False, time.monotonic()
                report_at = reported_at + every_s
                if (report := load()) is not None:
                    yield report
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._has_outputs.wait()
            if outputs := self._take():
                yield pack("outputs", encode_outputs(outputs))

    def _take(self) -> list[RequestOutput]:
        """All outputs, those of a request as one."""
        self._has_outputs.clear()
        merged: dict[str, RequestOutput] = {}
        while self._outputs:
            output = self._outputs.popleft()
            earlier = merged.get(output.request_id)
            merged[output.request_id] = output if earlier is None else merge_outputs(earlier, output)
            if output.finish_reason is not None:
                self.request_ids.discard(output.request_id)
        return list(merged.values())
