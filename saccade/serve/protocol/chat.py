"""Bodies of `/v1/chat/completions`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from saccade.engine.sampling_params import MAX_LOGPROBS
from saccade.processor.messages import MAX_FPS, MIN_FPS
from saccade.processor.tools import MAX_TOOLS
from saccade.serve.protocol.common import (
    UNSUPPORTED,
    Earlier,
    Items,
    JsonObject,
    NeutralFields,
    PromptLogprobs,
    SamplingFields,
    Usage,
    Wire,
)

Fps = Annotated[float, Field(ge=MIN_FPS, le=MAX_FPS)]


class TextPart(Wire):
    """Text of a message."""

    type: Literal["text"]
    """text"""
    text: str
    """The text."""


class ImageUrl(Wire):
    """An image as a data URL."""

    url: str
    """A data URL, such as data:image/png;base64,..."""
    detail: Literal["auto", "low", "high", "original"] | None = None
    """No effect: images are always processed as the checkpoint says. Send a smaller image for fewer tokens."""


class ImagePart(Wire):
    """An image of a message."""

    type: Literal["image_url"]
    """image_url"""
    image_url: ImageUrl
    """The image."""


class VideoUrl(Wire):
    """A video file as a data URL."""

    url: str
    """A data URL, such as data:video/mp4;base64,..."""


class VideoUrlPart(Wire):
    """A video file of a message."""

    type: Literal["video_url"]
    """video_url"""
    video_url: VideoUrl
    """The video."""
    fps: Fps | None = None
    """Frames per second to sample. Default 2."""


class VideoFramesPart(Wire):
    """A video of a message as its frames."""

    type: Literal["video"]
    """video"""
    video: Annotated[Items[str], Field(min_length=1)]
    """Frames as data URLs of images, all of one size."""
    fps: Fps | None = None
    """Frames per second of the frames. Default 2."""


ContentPart = Annotated[TextPart | ImagePart | VideoUrlPart | VideoFramesPart, Field(discriminator="type")]
TextContent = str | Items[TextPart]


class _Message(Earlier):
    function_call: None = None
    """Not supported: use tool_calls."""
    audio: None = None
    """Not supported."""


class _Instructions(_Message):
    content: TextContent
    """The text."""


class SystemMessage(_Instructions):
    """Instructions."""

    role: Literal["system"]
    """system"""


class DeveloperMessage(_Instructions):
    """Instructions, under OpenAI's newer name."""

    role: Literal["developer"]
    """developer"""


class UserMessage(_Message):
    """A turn of the user."""

    role: Literal["user"]
    """user"""
    content: str | Items[ContentPart]
    """Text, or a list of text, images and videos."""


class CalledFunction(Wire):
    """A call of a function."""

    name: str
    """Name of the function."""
    arguments: str
    """JSON, as the model wrote it."""


class ToolCall(Wire):
    """A call of a tool."""

    id: str
    """Id of the call, which its result repeats."""
    type: Literal["function"]
    """function"""
    function: CalledFunction
    """The call."""


class EarlierFunction(CalledFunction, Earlier):
    """A call of a function in an earlier turn."""


class EarlierCall(ToolCall, Earlier):
    """A call of a tool in an earlier turn."""

    function: EarlierFunction
    """The call."""


class AssistantMessage(_Message):
    """An earlier turn of the model, as it was answered or as a client's library made it."""

    role: Literal["assistant"]
    """assistant"""
    content: TextContent | None = None
    """The text. May be null if there are tool calls."""
    tool_calls: Annotated[Items[EarlierCall], Field(max_length=MAX_TOOLS)] | None = None
    """Calls of tools."""
    refusal: None = None
    """Always null."""


class ToolMessage(_Message):
    """The result of a tool."""

    role: Literal["tool"]
    """tool"""
    content: TextContent
    """The result."""
    tool_call_id: str
    """Id of the call that it answers."""


Message = Annotated[
    SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")
]


class Function(Wire):
    """A function that the model may call."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    """Name of the function."""
    description: str | None = None
    """What it does, for the model."""
    parameters: JsonObject | None = None
    """JSON schema of its arguments, an object."""
    strict: bool | None = None
    """Whether the arguments must follow the schema."""


class Tool(Wire):
    """A tool that the model may call."""

    type: Literal["function"]
    """function"""
    function: Function
    """The function."""


class ChosenFunction(Wire):
    """The name of a function."""

    name: str
    """Name of the function."""


class ChosenTool(Wire):
    """The tool that the model must call."""

    type: Literal["function"]
    """function"""
    function: ChosenFunction
    """The function."""


class TextFormat(Wire):
    """Any text."""

    type: Literal["text"]
    """text"""


class JsonObjectFormat(Wire):
    """Any JSON object."""

    type: Literal["json_object"]
    """json_object"""


class JsonSchema(Wire):
    """A JSON schema with a name."""

    name: Annotated[str, Field(min_length=1, max_length=64)]
    """Name of the schema."""
    description: str | None = None
    """Description of the schema."""
    schema_: JsonObject = Field(alias="schema")
    """The schema. It is always followed strictly."""
    strict: bool | None = None
    """The schema is always followed strictly."""


class JsonSchemaFormat(Wire):
    """JSON of a schema."""

    type: Literal["json_schema"]
    """json_schema"""
    json_schema: JsonSchema
    """The schema."""


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class ChatRequest(SamplingFields, NeutralFields):
    """A request for an answer to a conversation."""

    model: str
    """Name of the served model, as `/v1/models` lists it."""
    messages: Annotated[Items[Message], Field(min_length=1)]
    """The conversation."""
    max_completion_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    """Maximum output tokens. Default: what the context has room for."""
    max_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    """Older name of max_completion_tokens."""
    logprobs: bool | None = None
    """Return the log-probability of each output token."""
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """Return the log-probabilities of this many most likely tokens too; only with `logprobs`."""
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """Return the log-probability of each token of the prompt, and of this many most likely ones. Without `stream`, and
    with `n` 1."""
    response_format: ResponseFormat | None = None
    """The form of the answer."""
    continue_final_message: bool | None = None
    """Continue a final assistant message instead of answering it."""
    add_generation_prompt: bool | None = None
    """Must be the opposite of continue_final_message, if given."""
    modalities: Annotated[Items[Literal["text"]], Field(min_length=1, max_length=1)] | None = None
    """Kinds of output: text alone."""
    tools: Annotated[Items[Tool], Field(min_length=1, max_length=MAX_TOOLS)] | None = None
    """Functions that the model may call."""
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    """Whether it may, must or must not call them. Default auto."""
    parallel_tool_calls: bool | None = None
    """Whether an answer may have several calls. Default true."""


CHAT_UNSUPPORTED = UNSUPPORTED | {"moderation": "nothing is moderated"}


# ------------------------------------------------------------------ answers


class TopLogprob(Wire):
    """A likely token."""

    token: str
    """Text of the token."""
    logprob: float
    """Log-probability of the token."""
    bytes: list[int] | None
    """Bytes of the token; null for a control token."""


class TokenLogprob(TopLogprob):
    """An output token."""

    top_logprobs: list[TopLogprob]
    """The most likely tokens at its position."""


class ChoiceLogprobs(Wire):
    """Log-probabilities of a choice."""

    content: list[TokenLogprob]
    """Log-probabilities of each token."""
    refusal: None
    """Always null."""


class AnswerMessage(Wire):
    """The answer."""

    role: Literal["assistant"]
    """assistant"""
    content: str | None
    """The text; null if there are only tool calls."""
    refusal: None
    """Always null."""
    tool_calls: list[ToolCall] = []
    """Calls of tools, if there are any."""


class ChatChoice(Wire):
    """One completion."""

    index: int
    """Number of the completion."""
    message: AnswerMessage
    """The answer."""
    logprobs: ChoiceLogprobs | None
    """Log-probabilities, if requested."""
    finish_reason: Literal["stop", "length", "tool_calls"]
    """Why it ended."""


class ChatCompletion(Wire):
    """An answer to a conversation."""

    id: str
    """Id of the request."""
    object: Literal["chat.completion"]
    """chat.completion"""
    created: int
    """Unix time of the answer."""
    model: str
    """Name of the model."""
    choices: list[ChatChoice]
    """Completions."""
    usage: Usage
    """Tokens of the request."""
    system_fingerprint: str
    """A fingerprint that changes with the model and the version of the server."""
    service_tier: None
    """Always null."""
    prompt_logprobs: PromptLogprobs | None = None
    """Log-probabilities of the prompt, if requested."""
