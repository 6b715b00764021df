"""`/v1/responses`: OpenAI's newer endpoint, for text and images. Nothing is stored."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Container, Sequence
from typing import Any

import orjson
from fastapi import APIRouter, Request, Response

from saccade.engine.request import Completion
from saccade.serve.answer_writer import AnswerWriter
from saccade.serve.conversation import check_media_url, extra_fields
from saccade.serve.errors import bad_request
from saccade.serve.generation import Generation, error_of
from saccade.serve.json_route import JsonRoute
from saccade.serve.models import Models, choose_model
from saccade.serve.openapi import GENERATION_ERRORS, event_stream
from saccade.serve.prompt_input import Conversation, conversation_input
from saccade.serve.protocol.chat import JsonSchema, JsonSchemaFormat, ResponseFormat
from saccade.serve.protocol.common import SamplingFields
from saccade.serve.protocol.responses import InputImage, NamedSchema, ResponsesAnswer, ResponsesRequest
from saccade.serve.record import RequestRecord
from saccade.serve.sampling import samplings_of
from saccade.serve.service import Service
from saccade.serve.sse import event


def router(models: Models) -> APIRouter:
    """Return the endpoint."""
    routes = APIRouter(tags=["responses"], route_class=JsonRoute)

    @routes.post(
        "/v1/responses",
        response_model=ResponsesAnswer,
        responses=GENERATION_ERRORS | event_stream("The answer, or its events"),
        summary="Answer a conversation (newer API)",
    )
    async def create_response(body: ResponsesRequest, request: Request) -> Response:
        service, adapter = choose_model(models, body.model, request, user=body.user)
        generation = await _start(service, body, request, adapter)
        answer = _ResponsesWriter(body, request.state.record, generation)
        return await answer.respond(request.receive, streams=body.stream or False)

    return routes


async def _start(service: Service, body: ResponsesRequest, request: Request, adapter: str | None) -> Generation:
    if not isinstance(body.input, str) and len(body.input) > service.front.config.max_messages:
        raise bad_request(f"input has more than {service.front.config.max_messages} entries", param="input")
    samplings = samplings_of(
        SamplingFields(temperature=body.temperature, top_p=body.top_p),
        max_tokens=body.max_output_tokens or service.engine.max_length,
        max_completions=1,
        response_format=_response_format(body),
        structured_field="text.format",
    )
    names, allows_remote = service.processor.template.names, service.front.remote_media is not None
    conversation = _conversation(body, names, allows_remote=allows_remote)
    return await service.start(
        request,
        [conversation_input(conversation, remote_media=service.front.remote_media)],
        samplings,
        streams=body.stream or False,
        adapter=adapter,
        priority=body.priority,
        structured_field="text.format",
    )


def _response_format(body: ResponsesRequest) -> ResponseFormat | None:
    """Return the form of the answer as the chat endpoint has it."""
    form = None if body.text is None else body.text.format
    if isinstance(form, NamedSchema):
        return JsonSchemaFormat(type="json_schema", json_schema=JsonSchema(name=form.name, schema=form.schema_))
    return form


def _conversation(body: ResponsesRequest, names: Container[str], *, allows_remote: bool) -> Conversation:
    conversation: Conversation = []
    if body.instructions is not None:
        conversation.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*conversation, {"role": "user", "content": body.input}]
    for number, message in enumerate(body.input):
        role = "system" if message.role == "developer" else message.role
        content: Any = message.content
        if not isinstance(content, str):
            where = f"input[{number}].content"
            content = [_part(part, f"{where}[{i}]", allows_remote) for i, part in enumerate(content)]
        conversation.append(extra_fields(message, names) | {"role": role, "content": content})
    return conversation


def _part(part: Any, where: str, allows_remote: bool) -> dict[str, Any]:
    if isinstance(part, InputImage):
        url = check_media_url(part.image_url, f"{where}.image_url", allows_remote)
        return {"type": "image_url", "image_url": url}
    return {"type": "text", "text": part.text}


class _ResponsesWriter(AnswerWriter):
    """Writes one message of the assistant."""

    def __init__(self, body: ResponsesRequest, record: RequestRecord, generation: Generation) -> None:
        super().__init__(record, generation)
        number = record.id.removeprefix("req-")
        self._item_id = f"msg_{number}"
        self._sequence_number = -1
        form = {"type": "text"} if body.text is None or body.text.format is None else _plain(body.text.format)
        self._fields: dict[str, Any] = {
            "id": f"resp_{number}",
            "object": "response",
            "created_at": int(time.time()),
            "completed_at": None,
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": body.model,
            "output": [],
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "store": False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": form},
            "tool_choice": "none",
            "tools": [],
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": body.user,
            "metadata": body.metadata or {},
        }

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """Return the whole answer."""
        [completion] = completions
        status = "incomplete" if completion.finish_reason == "length" else "completed"
        return self._fields | {
            "status": status,
            "completed_at": int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": [self._item(status, [_text(completion.text)])],
            "usage": _usage(self.record),
        }

    def _item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {"type": "message", "id": self._item_id, "status": status, "role": "assistant", "content": content}

    # -------------------------------------------------------------- streamed

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._sequence_number += 1
        return event(orjson.dumps({"type": kind, "sequence_number": self._sequence_number, **fields}), kind)

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the answer as server-sent events."""
        item, part = {"output_index": 0}, {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        yield b"".join(
            [
                self._event("response.created", response=self._fields),
                self._event("response.in_progress", response=self._fields),
                self._event("response.output_item.added", **item, item=self._item("in_progress", [])),
                self._event("response.content_part.added", **part, part=_text("")),
            ]
        )
        async for deltas in self.generation.deltas():
            if text := "".join([delta.text for _, delta in deltas]):
                yield self._event("response.output_text.delta", **part, delta=text, logprobs=[])
        [completion] = self.generation.completions
        assert completion is not None, "it has ended"
        if (error := error_of(completion)) is not None:
            self.record.fail(error.code, error.status_code)
            failed = self._fields | {"status": "failed", "error": {"code": "server_error", "message": error.detail}}
            yield self._event("response.failed", response=failed)
            return
        answer = self.whole([completion])
        [message] = answer["output"]
        yield b"".join(
            [
                self._event("response.output_text.done", **part, text=completion.text, logprobs=[]),
                self._event("response.content_part.done", **part, part=_text(completion.text)),
                self._event("response.output_item.done", **item, item=message),
                self._event(f"response.{answer['status']}", response=answer),
            ]
        )


def _plain(form: Any) -> dict[str, Any]:
    plain: dict[str, Any] = form.model_dump(by_alias=True, exclude_none=True)
    return plain


def _text(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(record: RequestRecord) -> dict[str, Any]:
    return {
        "input_tokens": record.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": record.num_cached_tokens, "cache_write_tokens": 0},
        "output_tokens": record.num_output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": record.num_prompt_tokens + record.num_output_tokens,
    }
