"""Write completions in the shape of an endpoint, whole or as server-sent events."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

import orjson
from fastapi import Response
from starlette.types import Receive

from saccade.engine.request import Completion
from saccade.serve.errors import ApiError
from saccade.serve.generation import ChoiceDelta, Generation, cancelled_on_disconnect
from saccade.serve.protocol.common import StreamOptions
from saccade.serve.record import RequestRecord
from saccade.serve.service import Service
from saccade.serve.sse import DONE, EventStream, event


class AnswerWriter(ABC):
    """Writes the answer to one request. A subclass knows the shape of its endpoint."""

    scores_prompt = False
    """Whether the answer has an entry for each token of the prompt. Such an answer is made in a thread."""

    def __init__(self, record: RequestRecord, generation: Generation) -> None:
        self.record, self.generation = record, generation

    async def respond(self, receive: Receive, *, streams: bool) -> Response:
        """Return the response. The generation is cancelled when the client leaves."""
        if streams:
            return EventStream(self.generation, self.chunks())
        async with cancelled_on_disconnect(self.generation, receive):
            completions = await self.generation.wait()
        whole = await asyncio.to_thread(self.whole, completions) if self.scores_prompt else self.whole(completions)
        return Response(orjson.dumps(whole), media_type="application/json")

    @abstractmethod
    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """Return the whole answer as JSON."""

    @abstractmethod
    def chunks(self) -> AsyncIterator[bytes]:
        """Yield the answer as server-sent events; a chunk may have several."""

    def error_event(self, error: ApiError) -> bytes:
        """Return the event of an error that comes after the stream has begun."""
        self.record.fail(error.code, error.status_code)
        return event(orjson.dumps(error.body))


class AskedForChoices(Protocol):
    """The fields of a request that every answer with choices depends on."""

    model: str
    stream_options: StreamOptions | None


class ChoicesWriter(AnswerWriter):
    """Writes one choice per completion, as `/v1/chat/completions` and `/v1/completions` have it."""

    def __init__(
        self, service: Service, body: AskedForChoices, record: RequestRecord, generation: Generation, **kinds: str
    ) -> None:
        """`kinds`: the `object` of the answer, and the `id_prefix`."""
        super().__init__(record, generation)
        options = body.stream_options or StreamOptions()
        self.has_usage, self._repeats_usage = bool(options.include_usage), bool(options.continuous_usage_stats)
        self.fields = {
            "id": record.id.replace("req-", kinds["id_prefix"]),
            "object": kinds["object"],
            "created": int(time.time()),
            "model": body.model,
            "system_fingerprint": service.fingerprint,
        }

    def first_chunk(self) -> bytes:
        """Return what is sent before the first token."""
        return b""

    @abstractmethod
    def events(self, deltas: Sequence[ChoiceDelta], usage: dict[str, int] | None) -> list[bytes]:
        """Return the events of new deltas; each has the usage so far, if that is given."""

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the events of all deltas, the usage if it was requested, and the end."""
        num_tokens = 0
        if first := self.first_chunk():
            yield first
        async for deltas in self.generation.deltas():
            num_tokens += sum([len(delta.token_ids) for _, delta in deltas])
            usage = _usage(self.generation.num_prompt_tokens, num_tokens) if self._repeats_usage else None
            if events := self.events(deltas, usage):
                yield b"".join(events)
        if self.has_usage:
            yield event(orjson.dumps(self.fields | {"choices": [], "usage": self.usage()}))
        yield DONE

    def usage(self) -> dict[str, Any]:
        """Tokens of a request that has ended, as OpenAI's API reports them."""
        record = self.record
        cached = {"prompt_tokens_details": {"cached_tokens": record.num_cached_tokens}}
        return _usage(record.num_prompt_tokens, record.num_output_tokens) | cached


def _usage(num_prompt_tokens: int, num_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_tokens,
        "total_tokens": num_prompt_tokens + num_tokens,
    }
