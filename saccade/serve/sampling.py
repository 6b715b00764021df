"""Turn the sampling fields of a request into the engine's sampling parameters."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from saccade.engine.sampling_params import SamplingParams
from saccade.engine.structured import StructuredOutput
from saccade.errors import ConfigError
from saccade.serve.errors import bad_request
from saccade.serve.protocol.chat import JsonObjectFormat, JsonSchemaFormat, ResponseFormat
from saccade.serve.protocol.common import SamplingFields, StructuredOutputs

_ENGINE_NAME = re.compile(r"(structured\.)?(json_schema|json_object|regex|choice|grammar)\b")
"""The engine's name of the form of an output, which begins a message."""
_DEFAULTS = {"temperature": 1.0}
_SAME = (
    "temperature", "top_p", "presence_penalty", "frequency_penalty", "min_p", "repetition_penalty", "min_tokens",
    "ignore_eos", "stop_token_ids",
)  # fmt: skip


def samplings_of(
    request: SamplingFields,
    *,
    max_tokens: int,
    max_completions: int,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    response_format: ResponseFormat | None = None,
    tool_grammar: StructuredOutput | None = None,
    structured_field: str | None = None,
) -> list[SamplingParams]:
    """Return the parameters of each of the `n` completions; completion i has seed + i.

    `structured_field`: the field that sets the form of the output, for messages.
    """
    num_completions = request.n or 1
    if num_completions > max_completions:
        raise bad_request(f"n is {num_completions}; this server makes up to {max_completions} completions", param="n")
    if request.stream_options is not None and not request.stream:
        raise bad_request("stream_options is only allowed with stream", param="stream_options")
    if prompt_logprobs is not None and (request.stream or num_completions > 1):
        raise bad_request(
            "prompt_logprobs and echo need stream false and n 1", param="stream" if request.stream else "n"
        )
    fields: dict[str, Any] = {name: getattr(request, name) for name in _SAME if getattr(request, name) is not None}
    if request.stop is not None:
        fields["stop"] = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop)
    if request.logit_bias:
        fields["logit_bias"] = {int(token_id): bias for token_id, bias in request.logit_bias.items()}
    if request.top_k is not None:
        fields["top_k"] = request.top_k or -1
    if request.seed is not None:
        fields["seed"] = request.seed % 2**63
    try:
        structured = structured_of(response_format, request.structured_outputs, tool_grammar)
    except ConfigError as error:
        raise bad_request(name_as_sent(str(error), structured_field), param=structured_field) from error
    try:
        one = SamplingParams(
            **_DEFAULTS | fields,
            max_tokens=max_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            structured=structured,
        )
    except ConfigError as error:
        raise bad_request(str(error)) from error
    if num_completions == 1 or one.seed is None:
        return [one] * num_completions
    return [dataclasses.replace(one, seed=(one.seed + i) % 2**63) for i in range(num_completions)]


def structured_field_of(
    response_format: ResponseFormat | None,
    structured: StructuredOutputs | None,
    tool_grammar: StructuredOutput | None = None,
) -> str | None:
    """Return the field of a request that sets the form of the output, as the client wrote it."""
    if tool_grammar is not None:
        return "tools"
    if structured is not None:
        given = _given(structured)
        return f"structured_outputs.{given[0]}" if len(given) == 1 else "structured_outputs"
    is_schema = isinstance(response_format, JsonSchemaFormat)
    return "response_format.json_schema" if is_schema else None if response_format is None else "response_format"


def _given(structured: StructuredOutputs) -> list[str]:
    """Return the fields that are set, as clients write them."""
    return [name for name, value in structured.model_dump(by_alias=True).items() if value not in (None, False)]


def name_as_sent(message: str, structured_field: str | None) -> str:
    """Begin a message of the engine about the form of the output with the name of the client's field."""
    if structured_field is None or (found := _ENGINE_NAME.match(message)) is None:
        return message
    return structured_field + message[found.end() :]


def structured_of(
    response_format: ResponseFormat | None,
    structured: StructuredOutputs | None,
    tool_grammar: StructuredOutput | None = None,
) -> StructuredOutput | None:
    """Return the form of the output, from the field that sets it."""
    form = tool_grammar
    if form is not None and (
        structured is not None or isinstance(response_format, JsonObjectFormat | JsonSchemaFormat)
    ):
        raise ConfigError(
            "tool_choice or strict tools set the form of the output; leave out response_format and structured_outputs"
        )
    if isinstance(response_format, JsonObjectFormat):
        form = StructuredOutput(json_object=True)
    elif isinstance(response_format, JsonSchemaFormat):
        form = StructuredOutput(json_schema=response_format.json_schema.schema_)
    if structured is None:
        return form
    if form is not None:
        raise ConfigError("response_format and structured_outputs both set the form of the output; set one")
    given = _given(structured)
    if len(given) != 1:
        names = ", ".join(field.alias or name for name, field in StructuredOutputs.model_fields.items())
        raise ConfigError(f"structured_outputs sets {' and '.join(given) or 'nothing'}; set exactly one of {names}")
    return StructuredOutput(
        json_schema=structured.json_,
        json_object=structured.json_object or False,
        regex=structured.regex,
        choice=None if structured.choice is None else tuple(structured.choice),
        grammar=structured.grammar,
    )
