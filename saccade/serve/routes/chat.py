"""`/v1/chat/completions`: an answer to a conversation, at once or streamed."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

import orjson
from fastapi import APIRouter, Request, Response

from saccade.engine.request import Completion, TokenLogprobs
from saccade.serve.conversation import conversation_of
from saccade.serve.errors import bad_request
from saccade.serve.generation import Generation, cancelled_on_disconnect, error_of
from saccade.serve.json_route import JsonRoute
from saccade.serve.logprobs import chat_logprobs
from saccade.serve.openapi import GENERATION_ERRORS, event_stream
from saccade.serve.protocol.chat import ChatCompletion, ChatRequest
from saccade.serve.record import RequestRecord
from saccade.serve.sampling import samplings_of
from saccade.serve.service import Service, usage_of
from saccade.serve.sse import DONE, EventStream, event


def router(service: Service) -> APIRouter:
    """The endpoint."""
    routes = APIRouter(tags=["chat"], route_class=JsonRoute)

    @routes.post(
        "/v1/chat/completions",
        response_model=ChatCompletion,
        responses=GENERATION_ERRORS | event_stream("The answer, or its chunks as server-sent events"),
        summary="Answer a conversation",
    )
    async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
        service.check_model(body.model)
        generation = _start(service, body, request)
        answer = _Answer(service, body, request.state.record)
        if body.stream:
            return EventStream(generation, answer.chunks(generation))
        async with cancelled_on_disconnect(generation, request.receive):
            completions = await generation.wait()
        return Response(orjson.dumps(answer.whole(completions)), media_type="application/json")

    return routes


def _start(service: Service, body: ChatRequest, request: Request) -> Generation:
    """Check what the schema cannot, and hand the request to the engine."""
    if len(body.messages) > service.config.max_messages:
        raise bad_request(f"messages has more than {service.config.max_messages} entries", param="messages")
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_request("top_logprobs is only allowed with logprobs", param="top_logprobs")
    continues = body.continue_final_message or False
    if body.add_generation_prompt is not None and body.add_generation_prompt == continues:
        raise bad_request(
            "add_generation_prompt must be the opposite of continue_final_message", param="add_generation_prompt"
        )
    engine = service.supervisor.engine
    samplings = samplings_of(
        body,
        max_tokens=body.max_completion_tokens or body.max_tokens or engine.max_length,
        max_completions=service.config.max_completions,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        response_format=body.response_format,
    )
    conversation, request.state.record.num_images = conversation_of(body.messages)
    request.state.record.user = body.user
    return service.start(
        request,
        lambda engine: engine.preprocess(conversation, continue_final_message=continues),
        samplings,
        streams=body.stream or False,
        priority=body.priority,
        cache_salt=body.cache_salt,
    )


class _Answer:
    """Puts completions into the shape of the API."""

    def __init__(self, service: Service, body: ChatRequest, record: RequestRecord) -> None:
        self._service, self._body, self._record = service, body, record
        self._id, self._created = record.id.replace("req-", "chatcmpl-"), int(time.time())
        options = body.stream_options
        self._sends_usage = bool(options and options.include_usage)
        self._repeats_usage = bool(options and options.continuous_usage_stats)

    def whole(self, completions: list[Completion]) -> dict[str, Any]:
        """The answer at once."""
        return self._fields("chat.completion") | {
            "choices": [self._choice(index, completion) for index, completion in enumerate(completions)],
            "usage": usage_of(self._record),
            "service_tier": None,
        }

    def _fields(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._service.model_name,
            "system_fingerprint": self._service.fingerprint,
        }

    def _choice(self, index: int, completion: Completion) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": completion.text, "refusal": None},
            "logprobs": self._logprobs(completion.logprobs),
            "finish_reason": completion.finish_reason,
        }

    def _logprobs(self, logprobs: Any) -> dict[str, Any] | None:
        if not self._body.logprobs or logprobs is None:
            return None
        return chat_logprobs(logprobs, self._service.processor)

    # -------------------------------------------------------------- streamed

    async def chunks(self, generation: Generation) -> AsyncIterator[bytes]:
        """The answer as server-sent events. Deltas of a completion that arrived together are one chunk."""
        num_choices = len(generation.completions)
        num_tokens = [0] * num_choices
        yield b"".join(self._chunk(index, {"role": "assistant", "content": ""}) for index in range(num_choices))
        async for deltas in generation.deltas():
            events = []
            for index in dict.fromkeys(index for index, _ in deltas):
                own = [delta for number, delta in deltas if number == index]
                num_tokens[index] += sum(len(delta.token_ids) for delta in own)
                logprobs = [one for delta in own for one in delta.logprobs] if self._body.logprobs else None
                events += self._delta_chunks(index, "".join(delta.text for delta in own), logprobs, num_tokens)
                if (completion := own[-1].completion) is None:
                    continue
                if (error := error_of(completion)) is not None:
                    self._record.error_code = error.code
                    events.append(event(orjson.dumps(error.body)))
                else:
                    events.append(self._chunk(index, {}, finish_reason=completion.finish_reason))
            if events:
                yield b"".join(events)
        if self._sends_usage:
            yield event(
                orjson.dumps(self._fields("chat.completion.chunk") | {"choices": [], "usage": usage_of(self._record)})
            )
        yield DONE

    def _delta_chunks(
        self, index: int, text: str, logprobs: list[TokenLogprobs] | None, num_tokens: list[int]
    ) -> list[bytes]:
        if not text and not logprobs:
            return []
        usage = None
        if self._repeats_usage:
            usage = usage_of(self._record) | {"completion_tokens": sum(num_tokens)}
            usage["total_tokens"] = usage["prompt_tokens"] + usage["completion_tokens"]
        return [self._chunk(index, {"content": text}, logprobs=logprobs, usage=usage)]

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        *,
        logprobs: list[TokenLogprobs] | None = None,
        finish_reason: str | None = None,
        usage: dict[str, Any] | None = None,
    ) -> bytes:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": None if logprobs is None else self._logprobs(logprobs),
            "finish_reason": finish_reason,
        }
        fields = self._fields("chat.completion.chunk") | {"choices": [choice]}
        if self._sends_usage or usage is not None:
            fields["usage"] = usage
        return event(orjson.dumps(fields))
