"""The replicas of a version as the core of a front's engine: the front end does not know that there are several."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from functools import partial

from saccade.engine.core.messages import AddAdapter, AddRequest, CoreInfo, EndRequest, Message, RemoveAdapter
from saccade.engine.core.statistics import Statistics
from saccade.engine.frontend.core_client import OnOutputs
from saccade.engine.request import Failure, RequestOutput
from saccade.fleet.cluster.replica_set import ReplicaSet

_ADAPTERS = Failure(
    "waiting", "adapters of a fleet are named in its file; change it and run saccade fleet update", "invalid_request"
)
_CLOSED = Failure("running", "this front is closed", "engine_stopped")


class FleetCore:
    """A `CoreClient`. Any thread may send; outputs come from the thread of the event loop."""

    def __init__(
        self, replicas: ReplicaSet, loop: asyncio.AbstractEventLoop, adapters: Set[str], on_outputs: OnOutputs,
        on_stop: Callable[[Failure], None],
    ) -> None:  # fmt: skip
        """`replicas` have been ready once and load the `adapters`. `on_stop` is never called: replicas are replaced."""
        assert replicas.info is not None, "a core is made when the first replica was ready"
        self.info: CoreInfo = replicas.info
        self._counted = Statistics()
        """What this front has sent and got; counted in the event loop."""
        self._replicas, self._loop, self._adapters, self._on_outputs = replicas, loop, adapters, on_outputs
        self._num_prompt_tokens: dict[str, int] = {}
        """Prompt tokens of open requests."""
        replicas.on_outputs_of_front = self._pass_on
        self._is_closed = False

    @property
    def statistics(self) -> Statistics:
        """Requests and tokens of this front. Steps, pages and caches are at the replicas, and stay zero here."""
        waiting = self._replicas.num_waiting
        return replace(self._counted, num_running=self._replicas.num_open - waiting, num_waiting=waiting)

    def send(self, message: Message) -> None:
        """Send a request to a replica, or end one."""
        match message:
            case AddRequest() if self._is_closed:
                self._on_outputs([_failed(message.request.id, _CLOSED)])
            case AddRequest():
                self._num_prompt_tokens[message.request.id] = len(message.request.token_ids)
                self._loop.call_soon_threadsafe(partial(self._replicas.send, message))
            case EndRequest() if not self._is_closed:
                self._loop.call_soon_threadsafe(partial(self._replicas.end, message.request_id, message.reason))
            case AddAdapter() if message.name in self._adapters:
                self._on_outputs([RequestOutput(request_id=message.reply_id, finish_reason="stop")])
            case AddAdapter() | RemoveAdapter():
                self._on_outputs([_failed(message.reply_id, _ADAPTERS)])

    def _pass_on(self, outputs: Sequence[RequestOutput]) -> None:
        """Count outputs of requests, and pass them on."""
        counted = self._counted
        for output in outputs:
            counted.num_output_tokens += len(output.token_ids)
            if output.finish_reason is not None:
                counted.num_failures += output.failure is not None
                counted.num_cached_tokens += output.num_cached_tokens
                num_prompt_tokens = self._num_prompt_tokens.pop(output.request_id)
                counted.num_prompt_tokens += num_prompt_tokens - output.num_cached_tokens
        self._on_outputs(outputs)

    def close(self) -> None:
        """Send nothing more. Open requests get no more output."""
        self._is_closed = True


def _failed(request_id: str, failure: Failure) -> RequestOutput:
    return RequestOutput(request_id=request_id, finish_reason="failed", failure=failure)
