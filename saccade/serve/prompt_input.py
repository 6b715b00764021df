"""The prompts of a request: how each is preprocessed, and the sizes by which it is admitted."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from saccade.engine import Engine
from saccade.engine.prompt import TokenPrompt
from saccade.serve.body_limits import MAX_CHARACTERS_PER_TOKEN, too_long
from saccade.serve.remote_media import RemoteMedia, is_remote

Conversation = list[dict[str, Any]]
_CHARACTERS_PER_TOKEN = 4
"""Characters of a token of text, for estimates."""


@dataclass(frozen=True, kw_only=True)
class PromptInput:
    """One prompt of a request, before preprocessing."""

    preprocess: Callable[[Engine, bytes], Future[TokenPrompt]]
    """Start preprocessing, with the salt of the request."""
    prepare: Callable[[Callable[[int], None]], Awaitable[None]] | None = None
    """Work that must end before; it is given a function that counts the bytes of fetched media."""
    num_characters: int = 0
    """Characters of its text."""
    num_token_ids: int = 0
    """Tokens that the client sent as ids."""
    num_images: int = 0
    """Images and videos."""
    num_media_bytes: int = 0
    """Encoded size of the images and videos."""

    @property
    def num_tokens(self) -> int:
        """Estimated tokens of its text."""
        return self.num_characters // _CHARACTERS_PER_TOKEN + 1 + self.num_token_ids

    def check_length(self, max_length: int) -> None:
        """Refuse a text that cannot fit before time is spent on its tokens."""
        if self.num_characters > max_length * MAX_CHARACTERS_PER_TOKEN:
            raise too_long(max_length, f"the prompt has about {self.num_characters} characters")


def text_input(engine: Engine, text: str) -> PromptInput:
    """Return the prompt of a plain text."""
    token_ids: list[int] = []

    async def encode(_: Callable[[int], None]) -> None:
        encoded = await asyncio.wrap_future(engine.encode_text(text))
        if len(encoded) >= engine.max_length:
            raise too_long(engine.max_length, f"the prompt has {len(encoded)}")
        token_ids.extend(encoded)

    return PromptInput(
        prepare=encode,
        preprocess=lambda engine, salt: engine.preprocess_tokens(token_ids, salt=salt),
        num_characters=len(text),
    )


def conversation_input(
    conversation: Conversation,
    *,
    continue_final_message: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    remote_media: RemoteMedia | None = None,
) -> PromptInput:
    """Return the prompt of a conversation, with the sizes that admission needs.

    `remote_media` fetches files named by URL.
    """
    num_characters = count_characters(tools)
    urls: list[list[str]] = []
    """URLs of each image and video."""
    for message in conversation:
        content = message["content"]
        num_characters += count_characters({name: value for name, value in message.items() if name != "content"})
        for part in content if isinstance(content, list) else [{"type": "text", "text": content}]:
            if part["type"] == "text":
                num_characters += count_characters(part["text"])
            else:
                source = part[part["type"]]
                urls.append(source if isinstance(source, list) else [source])
    is_remote_any = any(is_remote(url) for each in urls for url in each)
    return PromptInput(
        prepare=partial(remote_media.fetch_all, conversation) if remote_media is not None and is_remote_any else None,
        preprocess=lambda engine, salt: engine.preprocess(
            conversation, continue_final_message=continue_final_message, tools=tools, salt=salt
        ),
        num_characters=num_characters,
        num_images=len(urls),
        num_media_bytes=sum(len(url) * 3 // 4 for each in urls for url in each),
    )


def count_characters(value: Any) -> int:
    """Count the characters of all texts and keys of a JSON value, and one for any other value."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum([len(name) + count_characters(child) for name, child in value.items()])
    if isinstance(value, list | tuple):
        return sum([count_characters(child) for child in value])
    return 0 if value is None else 1
