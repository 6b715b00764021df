"""Bodies of `/v1/completions`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from saccade.engine.sampling_params import MAX_COMPLETIONS, MAX_LOGPROBS
from saccade.serve.protocol.chat import ResponseFormat
from saccade.serve.protocol.common import Items, PromptLogprobs, SamplingFields, TokenId, Usage, Wire

TokenIds = Annotated[Items[TokenId], Field(min_length=1)]
Text = Annotated[str, Field(min_length=1)]


class CompletionRequest(SamplingFields):
    """A request to continue a text."""

    model: str
    """Name of the served model, as `/v1/models` lists it."""
    prompt: (
        Text
        | Annotated[Items[Text], Field(min_length=1, max_length=MAX_COMPLETIONS)]
        | TokenIds
        | Annotated[Items[TokenIds], Field(min_length=1, max_length=MAX_COMPLETIONS)]
    )
    """Text, token ids, or a list of either. Text is continued as it is, without a chat template; it never becomes
    control tokens."""
    max_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    """Maximum output tokens. Default 16."""
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """Return log-probabilities of each output token and of this many most likely ones."""
    echo: bool | None = None
    """Repeat the prompt before the completion, with the log-probabilities of both if requested. Without `stream`."""
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """Return the log-probability of each token of the prompt, and of this many most likely ones. Without `stream`, and
    with `n` 1."""
    best_of: Annotated[int, Field(ge=1, le=1)] | None = None
    """Candidates per completion: one."""
    suffix: None = None
    """Not supported."""
    response_format: ResponseFormat | None = None
    """The form of the text."""


class CompletionLogprobs(Wire):
    """Log-probabilities of a choice."""

    tokens: list[str]
    """Text of each token."""
    token_logprobs: list[float | None]
    """Log-probability of each token; null for the first token of a repeated prompt."""
    top_logprobs: list[dict[str, float] | None]
    """The most likely tokens at each position, by text."""
    text_offset: list[int]
    """Where each token begins in the text, in characters."""


class CompletionChoice(Wire):
    """One completion."""

    index: int
    """Number of the completion; those of the first prompt come first."""
    text: str
    """The text."""
    logprobs: CompletionLogprobs | None
    """Log-probabilities, if requested."""
    finish_reason: Literal["stop", "length"]
    """Why it ended."""
    prompt_logprobs: PromptLogprobs | None = None
    """Log-probabilities of the prompt, if requested."""


class TextCompletion(Wire):
    """Completions of a text."""

    id: str
    """Id of the request."""
    object: Literal["text_completion"]
    """text_completion"""
    created: int
    """Unix time of the answer."""
    model: str
    """Name of the model."""
    choices: list[CompletionChoice]
    """Completions."""
    usage: Usage
    """Tokens of the request."""
    system_fingerprint: str
    """A fingerprint that changes with the model and the version of the server."""
