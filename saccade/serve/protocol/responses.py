"""Bodies of `/v1/responses`, as far as text and images need them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from saccade.serve.protocol.chat import JsonObjectFormat, TextFormat
from saccade.serve.protocol.common import UNSUPPORTED, Earlier, Items, JsonObject, NeutralFields, OnlyFalse, Wire


class InputText(Wire):
    """Text of a message."""

    type: Literal["input_text"]
    """input_text"""
    text: str
    """The text."""


class InputImage(Wire):
    """An image of a message."""

    type: Literal["input_image"]
    """input_image"""
    image_url: str
    """A data URL."""
    detail: Literal["auto", "low", "high", "original"] | None = None
    """No effect: images are always processed as the checkpoint says. Send a smaller image for fewer tokens."""
    file_id: None = None
    """Not supported."""


class OutputText(Earlier):
    """Text of an earlier answer."""

    type: Literal["output_text"]
    """output_text"""
    text: str
    """The text."""


class _Input(Earlier):
    type: Literal["message"] | None = None
    """message"""
    content: str | Items[Annotated[InputText | InputImage, Field(discriminator="type")]]
    """Text, or a list of text and images."""


class UserInput(_Input):
    """A message of the user."""

    role: Literal["user"]
    """user"""


class SystemInput(_Input):
    """Instructions."""

    role: Literal["system"]
    """system"""


class DeveloperInput(_Input):
    """Instructions, under OpenAI's newer name."""

    role: Literal["developer"]
    """developer"""


class EarlierAnswer(Earlier):
    """An earlier answer of the model. One that was received may be sent back as it is."""

    type: Literal["message"] | None = None
    """message"""
    role: Literal["assistant"]
    """assistant"""
    content: str | Items[OutputText]
    """The text."""


class NamedSchema(Wire):
    """JSON of a schema."""

    type: Literal["json_schema"]
    """json_schema"""
    name: Annotated[str, Field(min_length=1, max_length=64)]
    """Name of the schema."""
    schema_: JsonObject = Field(alias="schema")
    """The schema. It is always followed strictly."""
    description: str | None = None
    """Description of the schema."""
    strict: bool | None = None
    """The schema is always followed strictly."""


class TextConfig(Wire):
    """The form of the answer."""

    format: Annotated[TextFormat | JsonObjectFormat | NamedSchema, Field(discriminator="type")] | None = None
    """Text, JSON, or JSON of a schema."""
    verbosity: None = None
    """Not supported."""


class ResponseStreamOptions(Wire):
    """Options of a streamed answer."""

    include_obfuscation: bool | None = None
    """No effect: events are not padded."""


class ResponsesRequest(NeutralFields):
    """A request for an answer."""

    model: str
    """Name of the served model, as `/v1/models` lists it."""
    input: (
        str
        | Annotated[
            Items[Annotated[UserInput | SystemInput | DeveloperInput | EarlierAnswer, Field(discriminator="role")]],
            Field(min_length=1),
        ]
    )
    """Text of the user, or the conversation."""
    instructions: str | None = None
    """A system message before the input."""
    max_output_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    """Maximum output tokens. Default: what the context has room for."""
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    """0: greedy. Default 1."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Sample among the most likely tokens of this total probability. Default 1."""
    text: TextConfig | None = None
    """The form of the answer."""
    stream: bool | None = None
    """Send the answer as server-sent events while it is generated."""
    stream_options: ResponseStreamOptions | None = None
    """Options of a streamed answer. The usage is always part of the last event."""
    user: Annotated[str, Field(max_length=256)] | None = None
    """An identifier of the end user; it is written to the request log."""
    priority: Annotated[int, Field(ge=-1000, le=1000)] | None = None
    """Lower is scheduled earlier. Default 0."""
    background: OnlyFalse | None = None
    """Only false: the answer is sent on this connection."""
    truncation: Literal["disabled"] | None = None
    """Only disabled: a conversation that does not fit is refused."""
    parallel_tool_calls: bool | None = None
    """There are no tools."""
    include: Annotated[list[Any], Field(max_length=0)] | None = None
    """There is nothing more to include."""
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    """Use tools with `/v1/chat/completions`."""


RESPONSES_UNSUPPORTED = UNSUPPORTED | {
    "prompt_logprobs": "use /v1/chat/completions",
    "previous_response_id": "nothing is stored; send the whole conversation as input",
    "conversation": "nothing is stored; send the whole conversation as input",
    "tool_choice": "use tools with /v1/chat/completions",
    "max_tool_calls": "use tools with /v1/chat/completions",
    "reasoning": "the model has no reasoning levels",
    "prompt": "nothing is stored; send the text",
    "top_logprobs": "use /v1/chat/completions",
    "moderation": "nothing is moderated",
}


# ------------------------------------------------------------------ answers


class AnswerText(Wire):
    """Text of the answer."""

    type: Literal["output_text"]
    """output_text"""
    text: str
    """The text."""
    annotations: list[Any]
    """Always empty."""
    logprobs: list[Any]
    """Always empty."""


class AnswerItem(Wire):
    """The answer's message."""

    type: Literal["message"]
    """message"""
    id: str
    """Id of the message."""
    status: Literal["completed", "incomplete"]
    """Whether it is whole."""
    role: Literal["assistant"]
    """assistant"""
    content: list[AnswerText]
    """One text."""


class IncompleteDetails(Wire):
    """Why the answer is not whole."""

    reason: Literal["max_output_tokens"]
    """max_output_tokens"""


class InputTokensDetails(Wire):
    """Details of the input tokens."""

    cached_tokens: int
    """Tokens found in the prefix cache."""
    cache_write_tokens: int
    """Always 0: writing costs nothing."""


class OutputTokensDetails(Wire):
    """Details of the output tokens."""

    reasoning_tokens: int
    """Always 0."""


class ResponsesUsage(Wire):
    """Tokens of a request."""

    input_tokens: int
    """Tokens of the input, images included."""
    input_tokens_details: InputTokensDetails
    """Details of the input tokens."""
    output_tokens: int
    """Tokens of the answer."""
    output_tokens_details: OutputTokensDetails
    """Details of the output tokens."""
    total_tokens: int
    """Sum of input and output tokens."""


class ResponsesAnswer(Wire):
    """An answer."""

    id: str
    """Id of the request."""
    object: Literal["response"]
    """response"""
    created_at: int
    """Unix time."""
    completed_at: int | None
    """Unix time; null while in progress."""
    status: Literal["completed", "incomplete", "in_progress", "failed"]
    """Whether it is whole."""
    error: None
    """Errors have a status of their own."""
    incomplete_details: IncompleteDetails | None
    """Why it is not whole."""
    instructions: str | None
    """As requested."""
    max_output_tokens: int | None
    """As requested."""
    model: str
    """Name of the model."""
    output: list[AnswerItem]
    """One message."""
    parallel_tool_calls: bool
    """There are no tools."""
    previous_response_id: None
    """Nothing is stored."""
    store: Literal[False]
    """Nothing is stored."""
    temperature: float
    """As used."""
    text: dict[str, Any]
    """The form of the answer."""
    tool_choice: Literal["none"]
    """none"""
    tools: list[Any]
    """Always empty."""
    top_p: float
    """As used."""
    truncation: Literal["disabled"]
    """disabled"""
    usage: ResponsesUsage | None
    """Tokens; null while in progress."""
    user: str | None
    """As requested."""
    metadata: dict[str, str]
    """As requested."""
