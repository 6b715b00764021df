"""Bodies of `/tokenize` and `/detokenize`, as vLLM has them."""

from __future__ import annotations

from typing import Annotated

from pydantic import Discriminator, Field, Tag

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


def _kind(body: object) -> str | None:
    kinds = [kind for kind in ("prompt", "messages") if isinstance(body, dict) and kind in body]
    return kinds[0] if len(kinds) == 1 else None


TokenizeRequest = Annotated[
    Annotated[TokenizeTextRequest, Tag("prompt")] | Annotated[TokenizeChatRequest, Tag("messages")],
    Discriminator(_kind, custom_error_type="prompt_or_messages", custom_error_message="-"),
]


class TokenizeResponse(Wire):
    """Tokens of a prompt."""

    count: int
    """Number of tokens."""
    max_model_len: int
    """Maximum tokens of prompt and output together."""
    tokens: list[int]
    """Token ids; an image is its placeholder, repeated."""


class DetokenizeRequest(Wire):
    """Tokens to decode."""

    model: str | None = None
    """Name of the served model."""
    tokens: Annotated[Items[TokenId], Field(max_length=2**20)]
    """Ids of the tokens."""


class DetokenizeResponse(Wire):
    """Text of tokens."""

    prompt: str
    """The text, with control tokens spelled out."""
