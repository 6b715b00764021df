"""`/v1/completions`: continue a text or tokens, without a chat template."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any

import orjson
from fastapi import APIRouter, Request, Response

from saccade.engine.request import Completion
from saccade.serve.errors import bad_request
from saccade.serve.generation import Generation, cancelled_on_disconnect, error_of
from saccade.serve.json_route import JsonRoute
from saccade.serve.logprobs import completion_logprobs, echoed_logprobs, prompt_logprobs
from saccade.serve.openapi import GENERATION_ERRORS, event_stream
from saccade.serve.protocol.completions import CompletionRequest, TextCompletion
from saccade.serve.record import RequestRecord
from saccade.serve.sampling import samplings_of, structured_field_of
from saccade.serve.service import PromptInput, Service, text_input, usage_of
from saccade.serve.sse import DONE, EventStream, event

_DEFAULT_MAX_TOKENS = 16
"""OpenAI's."""


def router(service: Service) -> APIRouter:
    """The endpoint."""
    routes = APIRouter(tags=["completions"], route_class=JsonRoute)

    @routes.post(
        "/v1/completions",
        response_model=TextCompletion,
        responses=GENERATION_ERRORS | event_stream("The completions, or their chunks as server-sent events"),
        summary="Continue a text",
    )
    async def create_completion(body: CompletionRequest, request: Request) -> Response:
        adapter = service.check_model(body.model)
        structured_field = structured_field_of(body.response_format, body.structured_outputs)
        samplings = samplings_of(
            body,
            max_tokens=body.max_tokens or _DEFAULT_MAX_TOKENS,
            max_completions=service.config.max_completions,
            logprobs=body.logprobs,
            prompt_logprobs=_num_prompt_logprobs(body),
            response_format=body.response_format,
            structured_field=structured_field,
        )
        prompts = _prompts(body)
        if len(prompts) * len(samplings) > service.config.max_completions:
            raise bad_request(
                f"{len(prompts)} prompts with n {len(samplings)}: a request may have {service.config.max_completions} completions",
                param="prompt",
            )
        request.state.record.user = body.user
        generation = await service.start(
            request,
            [_prompt_input(service, prompt) for prompt in prompts],
            samplings,
            streams=body.stream or False,
            adapter=adapter,
            priority=body.priority,
            cache_salt=body.cache_salt,
            structured_field=structured_field,
        )
        answer = _Answer(service, body, request.state.record, generation)
        if body.stream:
            return EventStream(generation, answer.chunks(generation))
        async with cancelled_on_disconnect(generation, request.receive):
            completions = await generation.wait()
        if samplings[0].prompt_logprobs is not None:  # one entry per token of the prompt: not on the event loop
            content = await asyncio.to_thread(answer.whole, completions)
        else:
            content = answer.whole(completions)
        return Response(orjson.dumps(content), media_type="application/json")

    return routes


def _num_prompt_logprobs(body: CompletionRequest) -> int | None:
    """Likely tokens to report in place of each token of the prompt; None: no log-probabilities."""
    if body.echo and body.stream:
        raise bad_request("echo needs stream false", param="stream")
    asked = [number for number in (body.prompt_logprobs, body.logprobs if body.echo else None) if number is not None]
    return max(asked, default=None)


def _prompts(body: CompletionRequest) -> list[str | list[int]]:
    """The prompts, from any of the four forms."""
    prompt = body.prompt
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        return [prompt]
    return list(prompt)


def _prompt_input(service: Service, prompt: str | list[int]) -> PromptInput:
    if isinstance(prompt, str):
        return text_input(service.supervisor.engine, prompt)
    return PromptInput(
        preprocess=lambda engine, salt: engine.preprocess_tokens(prompt, salt=salt), num_token_ids=len(prompt)
    )


class _Answer:
    """Puts completions into the shape of the API."""

    def __init__(
        self, service: Service, body: CompletionRequest, record: RequestRecord, generation: Generation
    ) -> None:
        self._body, self._record, self._generation, self._processor = body, record, generation, service.processor
        self._logprobs = partial(completion_logprobs, processor=service.processor)
        self._fields = {
            "id": record.id.replace("req-", "cmpl-"),
            "object": "text_completion",
            "created": int(time.time()),
            "model": body.model,
            "system_fingerprint": service.fingerprint,
        }

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """The answer at once."""
        choices = [self._whole_choice(index, one) for index, one in enumerate(completions)]
        return self._fields | {"choices": choices, "usage": usage_of(self._record)}

    def _whole_choice(self, index: int, completion: Completion) -> dict[str, Any]:
        choice = self._choice(index, completion.text, completion.logprobs, 0, completion.finish_reason)
        scored = completion.prompt_logprobs
        if self._body.prompt_logprobs is not None and scored is not None:
            choice["prompt_logprobs"] = prompt_logprobs(scored, self._processor)
        if self._body.echo:
            prompt = self._generation.prompt_token_ids[index // (self._body.n or 1)]
            choice["text"] = self._processor.tokenizer.decode(prompt, skip_special=False) + completion.text
            if choice["logprobs"] is not None and scored is not None:
                choice["logprobs"] = echoed_logprobs(prompt, scored, completion.logprobs or (), self._processor)
        return choice

    def _choice(self, index: int, text: str, logprobs: Any, offset: int, finish_reason: str | None) -> dict[str, Any]:
        has_logprobs = self._body.logprobs is not None and logprobs is not None
        return {
            "index": index,
            "text": text,
            "logprobs": self._logprobs(logprobs, offset=offset) if has_logprobs else None,
            "finish_reason": finish_reason,
        }

    async def chunks(self, generation: Generation) -> AsyncIterator[bytes]:
        """The answer as server-sent events."""
        has_usage = bool(self._body.stream_options and self._body.stream_options.include_usage)
        fields = self._fields | ({"usage": None} if has_usage else {})
        offsets = [0] * len(generation.completions)  # characters of the tokens before, of each completion
        async for deltas in generation.deltas():
            events = []
            for index, delta in deltas:
                error = None if delta.completion is None else error_of(delta.completion)
                if error is not None:
                    self._record.error_code = error.code
                    events.append(event(orjson.dumps(error.body)))
                    continue
                reason = None if delta.completion is None else delta.completion.finish_reason
                if delta.text or delta.token_ids or reason:  # tokens may have no text, or none yet
                    choice = self._choice(index, delta.text, delta.logprobs, offsets[index], reason)
                    events.append(event(orjson.dumps(fields | {"choices": [choice]})))
                    if choice["logprobs"] is not None:  # text of these tokens may be held back
                        offsets[index] += sum(map(len, choice["logprobs"]["tokens"]))
            if events:
                yield b"".join(events)
        if has_usage:
            yield event(orjson.dumps(self._fields | {"choices": [], "usage": usage_of(self._record)}))
        yield DONE
