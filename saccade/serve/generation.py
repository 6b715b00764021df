"""One request to the engine, seen from the event loop: its completions in progress, their deltas, cancellation.

    submit -> engine threads call back -> DeltaHub -> event loop -> deltas() of the request

The hub wakes the event loop once per batch of deltas, however many requests they belong to. Deltas that arrive while
the event loop is busy are sent together: a slow loop sends fewer and larger chunks.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeVar

from starlette.types import Receive

from saccade.engine import CompletionDelta, Engine, RequestOptions
from saccade.engine.prompt import TokenPrompt
from saccade.engine.request import Completion
from saccade.engine.sampling_params import SamplingParams
from saccade.serve.errors import ApiError, error_of_failure
from saccade.serve.record import RequestRecord
from saccade.serve.sampling import name_as_sent

_Result = TypeVar("_Result")
_ENDINGS = ("stop", "length", "cancelled", "failed")
"""Finish reasons, from good to bad."""


class ChoiceDelta(NamedTuple):
    """New output of one completion."""

    number: int
    """Index of the completion."""
    delta: CompletionDelta


class DeltaHub:
    """Passes deltas from the engine's thread to requests in the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._ready: deque[Generation] = deque()
        self._is_scheduled = False

    def notify(self, generation: Generation) -> None:
        """Wake a request.

        Called from the engine's thread; raises when the event loop has ended, which cancels the request.
        """
        self._ready.append(generation)
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        self._is_scheduled = False
        while self._ready:
            self._ready.popleft().wake()


class Generation:
    """The completions of one request: each prompt has one per sampling.

    Only the engine's callback runs outside the event loop.
    """

    def __init__(
        self,
        engine: Engine,
        hub: DeltaHub,
        record: RequestRecord,
        *,
        max_unsent_tokens: int,
        on_end: Callable[[Generation], None],
        structured_field: str | None = None,
    ) -> None:
        """`on_end` is called once, when every completion has ended, whether or not anyone reads the deltas.

        `structured_field`: the field of the request that sets the form of the output, for messages.
        """
        self._structured_field = structured_field
        self._engine, self._hub, self._record, self._on_end = engine, hub, record, on_end
        self._max_unsent_tokens = max_unsent_tokens
        self._ids: list[str] = []
        self._buffer: deque[ChoiceDelta] = deque()
        self._num_unsent = 0
        self._waiter: asyncio.Future[None] | None = None
        self._num_open = self._num_untaken = 0
        self._has_ended = False
        self._last_delta_at: list[float] = []
        self._submitted_at = 0.0
        self._ended_at: list[float] = []
        self._num_per_prompt = 1
        self._prompts: Sequence[Future[TokenPrompt]] = ()
        self.completions: list[Completion | None] = []
        """Completions ordered by prompt, then sampling; None while in progress."""

    def start(
        self,
        prompts: Sequence[Future[TokenPrompt]],
        samplings: Sequence[SamplingParams],
        options: RequestOptions,
        *,
        streams: bool,
    ) -> None:
        """Submit the completions of all prompts."""
        count = len(prompts) * len(samplings)
        self.completions, self._num_per_prompt = [None] * count, len(samplings)
        self._prompts = prompts
        self._last_delta_at, self._ended_at = [0.0] * count, [0.0] * count
        self._record.num_completions = self._num_open = self._num_untaken = count
        self._record.request_ids = self._ids
        self._submitted_at = time.perf_counter()
        try:
            for prompt in prompts:
                for sampling in samplings:
                    on_delta = partial(self._on_delta, len(self._ids))
                    self._ids.append(self._engine.submit(prompt, sampling, on_delta, options=options, streams=streams))
        except BaseException:
            for prompt in prompts:
                prompt.cancel()
            self.cancel()
            raise

    def _on_delta(self, number: int, delta: CompletionDelta) -> None:
        """Take a delta from the engine's thread."""
        if delta.completion is not None:
            if (failure := delta.completion.failure) is not None:
                named = replace(failure, message=name_as_sent(failure.message, self._structured_field))
                delta = replace(delta, completion=replace(delta.completion, failure=named))
            self.completions[number] = delta.completion
            self._ended_at[number] = time.perf_counter()
            self._num_open -= 1
        self._buffer.append(ChoiceDelta(number, delta))
        self._num_unsent += len(delta.token_ids)
        if self._num_unsent > self._max_unsent_tokens and delta.completion is None:
            self.cancel()
        self._hub.notify(self)

    def wake(self) -> None:
        """Handle new deltas."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        if self._num_open == 0:
            self._end()

    def cancel(self) -> None:
        """End all completions; each still has its last delta. Any thread may call this."""
        for request_id in self._ids:
            self._engine.cancel(request_id)

    @property
    def prompt_token_ids(self) -> list[Sequence[int]]:
        """Tokens of each prompt; all are ready when a completion has ended without a failure."""
        return [prompt.result().token_ids for prompt in self._prompts]

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompts that are ready."""
        ready = [prompt for prompt in self._prompts if prompt.done() and not prompt.cancelled()]
        return sum(len(prompt.result().token_ids) for prompt in ready if prompt.exception() is None)

    # -------------------------------------------------------------- output

    async def _wait(self) -> None:
        """Wait until there are deltas."""
        while not self._buffer:
            self._waiter = asyncio.get_running_loop().create_future()
            if not self._buffer:  # the engine's thread may have added one meanwhile
                await self._waiter
            self._waiter = None

    async def started(self) -> ApiError | None:
        """Wait for the first output; return the error if the request failed before it had any."""
        await self._wait()
        _, delta = self._buffer[0]
        return None if delta.completion is None or delta.completion.token_ids else error_of(delta.completion)

    async def deltas(self) -> AsyncIterator[list[ChoiceDelta]]:
        """Yield all new deltas at once, until every completion has ended."""
        while self._num_untaken:
            await self._wait()
            yield self._take()
        self._end()

    def _take(self) -> list[ChoiceDelta]:
        now = time.perf_counter()
        deltas = []
        self._num_unsent = 0
        while self._buffer:
            number, delta = choice = self._buffer.popleft()
            deltas.append(choice)
            self._num_untaken -= delta.completion is not None
            if delta.token_ids:
                if self._last_delta_at[number]:
                    self._record.token_gaps_s.append(now - self._last_delta_at[number])
                self._last_delta_at[number] = now
        return deltas

    async def wait(self) -> list[Completion]:
        """Wait for all completions; raise the error of one that failed."""
        async for _ in self.deltas():
            pass
        completions = [one for one in self.completions if one is not None]
        for completion in completions:
            if (error := error_of(completion)) is not None:
                raise error
        return completions

    # -------------------------------------------------------------- the end

    def _end(self) -> None:
        """Fill the record of the request, once."""
        if self._has_ended:
            return
        self._has_ended = True
        record, submitted_s = self._record, self._submitted_at - self._record.arrived_at
        for number, completion in enumerate(self.completions):
            assert completion is not None, "every completion has ended"
            is_first = number % self._num_per_prompt == 0
            record.num_prompt_tokens += completion.num_prompt_tokens if is_first else 0
            record.num_cached_tokens += completion.num_cached_tokens if is_first else 0
            record.num_output_tokens += len(completion.token_ids)
            if _ENDINGS.index(completion.finish_reason) >= _ENDINGS.index(record.ending or "stop"):
                record.ending = completion.finish_reason
            record.preprocess_s = completion.timings.preprocessed_s
            if completion.timings.first_token_s is not None:
                first = submitted_s + completion.timings.first_token_s
                record.first_token_s = first if record.first_token_s is None else min(first, record.first_token_s)
                record.decode_s = max(record.decode_s, self._ended_at[number] - record.arrived_at - first)
        self._on_end(self)


def error_of(completion: Completion) -> ApiError | None:
    """Return the error of a completion that was not finished, or None."""
    if completion.failure is not None:
        return error_of_failure(completion.failure)
    if completion.finish_reason == "cancelled":
        return ApiError(503, "the request was cancelled", code="cancelled", retry_after_s=2.0)
    return None


async def unless_disconnected(work: asyncio.Future[_Result], receive: Receive) -> _Result:
    """Return the result of some work, which is cancelled as soon as the client leaves."""
    leaving = asyncio.create_task(_wait_for_disconnect(receive))
    try:
        await asyncio.wait((work, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise ApiError(503, "the client is gone", code="cancelled")
        return work.result()
    finally:
        leaving.cancel()
        work.cancel()


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


@contextlib.asynccontextmanager
async def cancelled_on_disconnect(generation: Generation, receive: Receive) -> AsyncIterator[None]:
    """Cancel the generation as soon as the client leaves, or when the block is left early."""

    async def watch() -> None:
        await _wait_for_disconnect(receive)
        generation.cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()
        generation.cancel()
