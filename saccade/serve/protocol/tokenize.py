"""Bodies of `/tokenize` and `/detokenize`, as vLLM has them."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from saccade.serve.protocol.chat import Message
from saccade.serve.protocol.common import Items, TokenId, Wire


class TokenizeTextRequest(Wire):
    """Text to tokenize."""

    model: str | None = None
    """Name of the served model."""
    prompt: str
    """The text. It never becomes control tokens."""


class TokenizeChatRequest(Wire):
    """A conversation to tokenize, as a prompt."""

    model: str | None = None
    """Name of the served model."""
    messages: Annotated[Items[Message], Field(min_length=1)]
    """The conversation."""


class TokenizeResponse(Wire):
    """Tokens of a prompt."""

    count: int
    """How many."""
    max_model_len: int
    """Maximum tokens of prompt and output together."""
    tokens: list[int]
    """Their ids; an image is its placeholder, repeated."""


class DetokenizeRequest(Wire):
    """Tokens to decode."""

    model: str | None = None
    """Name of the served model."""
    tokens: Annotated[Items[TokenId], Field(max_length=2**20)]
    """Their ids."""


class DetokenizeResponse(Wire):
    """Text of tokens."""

    prompt: str
    """The text, control tokens spelled out."""
