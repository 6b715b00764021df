"""`/v1/completions`: continue a text or tokens, without a chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson
from fastapi import APIRouter, Request, Response

from saccade.engine.request import Completion
from saccade.serve.answer_writer import ChoicesWriter
from saccade.serve.errors import bad_request
from saccade.serve.generation import ChoiceDelta, Generation, error_of
from saccade.serve.json_route import JsonRoute
from saccade.serve.logprobs import completion_logprobs, echoed_logprobs, prompt_logprobs
from saccade.serve.models import Models, choose_model
from saccade.serve.openapi import GENERATION_ERRORS, event_stream
from saccade.serve.prompt_input import PromptInput, text_input
from saccade.serve.protocol.completions import CompletionRequest, TextCompletion
from saccade.serve.record import RequestRecord
from saccade.serve.sampling import samplings_of, structured_field_of
from saccade.serve.service import Service
from saccade.serve.sse import event

_DEFAULT_MAX_TOKENS = 16
"""OpenAI's default."""


def router(models: Models) -> APIRouter:
    """Return the endpoint."""
    routes = APIRouter(tags=["completions"], route_class=JsonRoute)

    @routes.post(
        "/v1/completions",
        response_model=TextCompletion,
        responses=GENERATION_ERRORS | event_stream("The completions, or their chunks as server-sent events"),
        summary="Continue a text",
    )
    async def create_completion(body: CompletionRequest, request: Request) -> Response:
        service, adapter = choose_model(models, body.model, request, user=body.user)
        structured_field = structured_field_of(body.response_format, body.structured_outputs)
        samplings = samplings_of(
            body,
            max_tokens=body.max_tokens or _DEFAULT_MAX_TOKENS,
            max_completions=service.front.config.max_completions,
            logprobs=body.logprobs,
            prompt_logprobs=_num_prompt_logprobs(body),
            response_format=body.response_format,
            structured_field=structured_field,
        )
        prompts = _prompts(body)
        if len(prompts) * len(samplings) > service.front.config.max_completions:
            raise bad_request(
                f"{len(prompts)} prompts with n {len(samplings)}: a request may have "
                f"{service.front.config.max_completions} completions",
                param="prompt",
            )
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
        answer = _CompletionWriter(service, body, request.state.record, generation)
        return await answer.respond(request.receive, streams=body.stream or False)

    return routes


def _num_prompt_logprobs(body: CompletionRequest) -> int | None:
    """Return how many likely tokens to report for each token of the prompt; None: no log-probabilities."""
    if body.echo and body.stream:
        raise bad_request("echo needs stream false", param="stream")
    asked = [number for number in (body.prompt_logprobs, body.logprobs if body.echo else None) if number is not None]
    return max(asked, default=None)


def _prompts(body: CompletionRequest) -> list[str | list[int]]:
    """Return the prompts, from any of the four forms."""
    prompt = body.prompt
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        return [prompt]
    return list(prompt)


def _prompt_input(service: Service, prompt: str | list[int]) -> PromptInput:
    if isinstance(prompt, str):
        return text_input(service.engine, prompt)
    return PromptInput(
        preprocess=lambda engine, salt: engine.preprocess_tokens(prompt, salt=salt), num_token_ids=len(prompt)
    )


class _CompletionWriter(ChoicesWriter):
    """Writes texts that continue the prompts."""

    def __init__(
        self, service: Service, body: CompletionRequest, record: RequestRecord, generation: Generation
    ) -> None:
        super().__init__(service, body, record, generation, object="text_completion", id_prefix="cmpl-")
        self._body, self._processor = body, service.processor
        self.scores_prompt = _num_prompt_logprobs(body) is not None
        self._chunk_fields = self.fields | ({"usage": None} if self.has_usage else {})
        self._offsets = [0] * len(generation.completions)
        """Characters of the tokens that were sent, of each completion."""

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """Return the whole answer."""
        choices = [self._whole_choice(index, one) for index, one in enumerate(completions)]
        return self.fields | {"choices": choices, "usage": self.usage()}

    def _whole_choice(self, index: int, completion: Completion) -> dict[str, Any]:
        choice = self._choice(index, completion.text, completion.logprobs, 0, completion.finish_reason)
        scored = completion.prompt_logprobs
        if self._body.prompt_logprobs is not None and scored is not None:
            choice["prompt_logprobs"] = prompt_logprobs(scored, self._processor)
        if self._body.echo:
            prompt = self.generation.prompt_token_ids[index // (self._body.n or 1)]
            choice["text"] = self._processor.tokenizer.decode(prompt, skip_special=False) + completion.text
            if choice["logprobs"] is not None and scored is not None:
                choice["logprobs"] = echoed_logprobs(prompt, scored, completion.logprobs or (), self._processor)
        return choice

    def _choice(self, index: int, text: str, logprobs: Any, offset: int, finish_reason: str | None) -> dict[str, Any]:
        has_logprobs = self._body.logprobs is not None and logprobs is not None
        return {
            "index": index,
            "text": text,
            "logprobs": completion_logprobs(logprobs, processor=self._processor, offset=offset)
            if has_logprobs
            else None,
            "finish_reason": finish_reason,
        }

    def events(self, deltas: Sequence[ChoiceDelta], usage: dict[str, int] | None) -> list[bytes]:
        """Return an event for every delta with new tokens or an end."""
        events, fields = [], self._chunk_fields | ({} if usage is None else {"usage": usage})
        for index, delta in deltas:
            if delta.completion is not None and (error := error_of(delta.completion)) is not None:
                events.append(self.error_event(error))
                continue
            reason = None if delta.completion is None else delta.completion.finish_reason
            if delta.text or delta.token_ids or reason:  # tokens may have no text, or none yet
                choice = self._choice(index, delta.text, delta.logprobs, self._offsets[index], reason)
                events.append(event(orjson.dumps(fields | {"choices": [choice]})))
                if choice["logprobs"] is not None:  # text of these tokens may be held back
                    self._offsets[index] += sum(map(len, choice["logprobs"]["tokens"]))
        return events
