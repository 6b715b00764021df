"""`/v1/chat/completions`: an answer to a conversation, at once or streamed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import orjson
from fastapi import APIRouter, Request, Response

from saccade.engine import CompletionDelta
from saccade.engine.request import Completion, TokenLogprobs
from saccade.errors import UserError
from saccade.processor.tools import check_tools
from saccade.serve.answer_writer import ChoicesWriter
from saccade.serve.conversation import conversation_of
from saccade.serve.errors import bad_request
from saccade.serve.generation import ChoiceDelta, Generation, error_of
from saccade.serve.json_route import JsonRoute
from saccade.serve.logprobs import chat_logprobs, prompt_logprobs
from saccade.serve.models import Models, choose_model
from saccade.serve.openapi import GENERATION_ERRORS, event_stream
from saccade.serve.prompt_input import conversation_input
from saccade.serve.protocol.chat import ChatCompletion, ChatRequest
from saccade.serve.record import RequestRecord
from saccade.serve.sampling import samplings_of, structured_field_of
from saccade.serve.service import Service
from saccade.serve.tool_calls import (
    ContentDelta,
    ParsedOutput,
    ToolCallDelta,
    ToolCallParser,
    knows_tools,
    merged,
    parse_tool_calls,
)
from saccade.serve.tool_choice import ToolChoice, choose_tools
from saccade.serve.tool_prompt import with_tools_described


def router(models: Models) -> APIRouter:
    """Return the endpoint."""
    routes = APIRouter(tags=["chat"], route_class=JsonRoute)

    @routes.post(
        "/v1/chat/completions",
        response_model=ChatCompletion,
        responses=GENERATION_ERRORS | event_stream("The answer, or its chunks as server-sent events"),
        summary="Answer a conversation",
    )
    async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
        service, adapter = choose_model(models, body.model, request, user=body.user)
        generation, tool_names = await _start(service, body, request, adapter)
        answer = _ChatWriter(service, body, request.state.record, generation, tool_names)
        return await answer.respond(request.receive, streams=body.stream or False)

    return routes


async def _start(
    service: Service, body: ChatRequest, request: Request, adapter: str | None
) -> tuple[Generation, frozenset[str]]:
    """Check what the schema cannot, and submit the request; return the names of the tools that it may call too."""
    if len(body.messages) > service.front.config.max_messages:
        raise bad_request(f"messages has more than {service.front.config.max_messages} entries", param="messages")
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_request("top_logprobs is only allowed with logprobs", param="top_logprobs")
    continues = body.continue_final_message or False
    if body.add_generation_prompt is not None and body.add_generation_prompt == continues:
        raise bad_request(
            "add_generation_prompt must be the opposite of continue_final_message", param="add_generation_prompt"
        )
    choice = _tool_choice(body)
    structured_field = structured_field_of(body.response_format, body.structured_outputs, choice.structured)
    samplings = samplings_of(
        body,
        max_tokens=body.max_completion_tokens or body.max_tokens or service.engine.max_length,
        max_completions=service.front.config.max_completions,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
        response_format=body.response_format,
        tool_grammar=choice.structured,
        structured_field=structured_field,
    )
    names, allows_remote = service.processor.template.names, service.front.remote_media is not None
    conversation = conversation_of(body.messages, names, allows_remote=allows_remote)
    tools = choice.tools
    if tools is not None and not knows_tools(service.processor.template, service.front.config.tool_call_format):
        if body.tool_choice in (None, "auto"):
            raise bad_request(
                "the model's chat template has no tool calls in a format that this server reads. Set tool_choice to "
                "required or a function, or have the operator serve it with --chat-template FILE",
                param="tools",
                code="unsupported_parameter",
            )
        conversation, tools = with_tools_described(conversation, check_tools(tools)), None
    prompt = conversation_input(
        conversation, continue_final_message=continues, tools=tools, remote_media=service.front.remote_media
    )
    generation = await service.start(
        request,
        [prompt],
        samplings,
        streams=body.stream or False,
        adapter=adapter,
        priority=body.priority,
        cache_salt=body.cache_salt,
        structured_field=structured_field,
    )
    return generation, choice.names


def _tool_choice(body: ChatRequest) -> ToolChoice:
    """Return the tools that the model sees, and the form they give to the output."""
    tools = None if body.tools is None else [tool.model_dump(exclude_none=True) for tool in body.tools]
    choice = body.tool_choice if isinstance(body.tool_choice, str | None) else body.tool_choice.model_dump()
    try:
        if tools is not None:
            check_tools(tools)
        return choose_tools(tools, choice, is_parallel=body.parallel_tool_calls is not False)
    except UserError as error:
        raise bad_request(str(error), param="tools") from error


class _ChatWriter(ChoicesWriter):
    """Writes messages of the assistant, with the tool calls that are found in their text."""

    def __init__(
        self,
        service: Service,
        body: ChatRequest,
        record: RequestRecord,
        generation: Generation,
        tool_names: frozenset[str],
    ) -> None:
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        super().__init__(service, body, record, generation, object=kind, id_prefix="chatcmpl-")
        self._body, self._processor, self._tool_names = body, service.processor, tool_names
        self.scores_prompt = body.prompt_logprobs is not None
        chunk = _ChunkWriter(self.fields, has_usage=self.has_usage)
        self._choices = [_ChoiceStream(self, chunk, index) for index in range(len(generation.completions))]

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """Return the whole answer."""
        scored = completions[0].prompt_logprobs
        extra = {} if scored is None else {"prompt_logprobs": prompt_logprobs(scored, self._processor)}
        return self.fields | {
            "choices": [self._choice(index, completion) for index, completion in enumerate(completions)],
            "usage": self.usage(),
            "service_tier": None,
            **extra,
        }

    def _choice(self, index: int, completion: Completion) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": completion.text, "refusal": None}
        parsed = parse_tool_calls(completion.text, self._tool_names) if self._tool_names else ParsedOutput()
        if parsed.tool_calls:
            calls = [_tool_call(call.id, call.name, call.arguments) for call in parsed.tool_calls]
            message |= {"content": parsed.content or None, "tool_calls": calls}
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(completion.logprobs),
            "finish_reason": _finish_reason(completion, len(parsed.tool_calls)),
        }

    def _logprobs(self, logprobs: Sequence[TokenLogprobs] | None) -> dict[str, Any] | None:
        if not self._body.logprobs or logprobs is None:
            return None
        return chat_logprobs(logprobs, self._processor)

    # -------------------------------------------------------------- streamed

    def first_chunk(self) -> bytes:
        """Return the chunks with the role of every choice."""
        return b"".join([choice.first() for choice in self._choices])

    def events(self, deltas: Sequence[ChoiceDelta], usage: dict[str, int] | None) -> list[bytes]:
        """Return the events of new deltas. Deltas of a completion that arrived together are one event."""
        return [one for index, own in _by_choice(deltas) for one in self._choices[index].events(own, usage)]

    def parser(self) -> ToolCallParser | None:
        """Return a parser of the calls of one completion, or None if there can be none."""
        return ToolCallParser(self._tool_names) if self._tool_names else None

    def delta_logprobs(self, deltas: Sequence[CompletionDelta]) -> dict[str, Any] | None:
        """Return the log-probabilities of new tokens, if requested."""
        logprobs = [one for delta in deltas for one in delta.logprobs] if self._body.logprobs else []
        return self._logprobs(logprobs) if logprobs else None


class _ChoiceStream:
    """Turns the deltas of one completion into events."""

    def __init__(self, answer: _ChatWriter, chunk: _ChunkWriter, index: int) -> None:
        self._answer, self._chunk, self._index = answer, chunk, index
        self._parser = answer.parser()

    def first(self) -> bytes:
        """Return the chunk with the role."""
        return self._chunk.first(self._index)

    def events(self, deltas: Sequence[CompletionDelta], usage: dict[str, int] | None) -> Iterator[bytes]:
        """Yield text, tool calls, and the end."""
        text, completion = "".join([delta.text for delta in deltas]), deltas[-1].completion
        calls: list[ToolCallDelta] = []
        if self._parser is not None:
            parsed = self._parser.push(text) + (self._parser.finish() if completion is not None else [])
            text = "".join([part.text for part in parsed if isinstance(part, ContentDelta)])
            calls = merged(part for part in parsed if isinstance(part, ToolCallDelta))
        logprobs = self._answer.delta_logprobs(deltas)
        may_be_empty = self._parser is None and completion is None  # tokens whose text is incomplete, or that have none
        if text or logprobs is not None or may_be_empty:
            yield self._chunk.text(self._index, text, logprobs, usage)
        if calls:
            yield self._chunk.tool_calls(self._index, calls, usage)
        if completion is not None:
            error = error_of(completion)
            yield self._answer.error_event(error) if error is not None else self._last(completion, usage)

    def _last(self, completion: Completion, usage: dict[str, int] | None) -> bytes:
        num_calls = 0 if self._parser is None else self._parser.num_calls
        return self._chunk.last(self._index, _finish_reason(completion, num_calls), usage)


def _finish_reason(completion: Completion, num_calls: int) -> str:
    return "tool_calls" if num_calls and completion.finish_reason == "stop" else completion.finish_reason


def _tool_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _by_choice(deltas: Sequence[ChoiceDelta]) -> list[tuple[int, list[CompletionDelta]]]:
    """Group new deltas by completion, in order."""
    if len(deltas) == 1:  # almost always
        return [(deltas[0].number, [deltas[0].delta])]
    found: dict[int, list[CompletionDelta]] = {}
    for number, delta in deltas:
        found.setdefault(number, []).append(delta)
    return list(found.items())


class _ChunkWriter:
    """Writes the chunks of one answer. It runs for every token, so what all chunks share is encoded once."""

    def __init__(self, fields: dict[str, Any], *, has_usage: bool) -> None:
        self._start = b"data: " + orjson.dumps(fields)[:-1] + b',"choices":[{"index":'
        self._end = b',"usage":null}\n\n' if has_usage else b"}\n\n"

    def _write(
        self, index: int, delta: bytes, logprobs: Any, finish_reason: str | None, usage: dict[str, int] | None
    ) -> bytes:
        return b"".join(
            (
                self._start,
                b"%d" % index,
                b',"delta":',
                delta,
                b',"logprobs":',
                b"null" if logprobs is None else orjson.dumps(logprobs),
                b',"finish_reason":',
                b"null" if finish_reason is None else orjson.dumps(finish_reason),
                b"}]",
                self._end if usage is None else b',"usage":' + orjson.dumps(usage) + b"}\n\n",
            )
        )

    def first(self, index: int) -> bytes:
        """Write the chunk with the role."""
        return self._write(index, b'{"role":"assistant","content":""}', None, None, None)

    def text(self, index: int, text: str, logprobs: Any, usage: dict[str, int] | None) -> bytes:
        """Write a chunk with text."""
        return self._write(index, b'{"content":' + orjson.dumps(text) + b"}", logprobs, None, usage)

    def tool_calls(self, index: int, calls: Sequence[ToolCallDelta], usage: dict[str, int] | None) -> bytes:
        """Write a chunk with new calls, or more of their arguments."""
        deltas = [
            {"index": call.index}
            | (
                {"function": {"arguments": call.arguments}}
                if call.id is None or call.name is None
                else _tool_call(call.id, call.name, call.arguments)
            )
            for call in calls
        ]
        return self._write(index, b'{"tool_calls":' + orjson.dumps(deltas) + b"}", None, None, usage)

    def last(self, index: int, finish_reason: str, usage: dict[str, int] | None) -> bytes:
        """Write the chunk with the finish reason."""
        return self._write(index, b"{}", None, finish_reason, usage)
