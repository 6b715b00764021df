"""Messages of a request to a conversation of the engine. Images and videos are data URLs, or URLs that the operator allows to fetch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from saccade.serve.errors import ApiError, bad_request
from saccade.serve.protocol.chat import (
    AssistantMessage,
    ContentPart,
    ImagePart,
    Message,
    TextPart,
    ToolMessage,
    VideoFramesPart,
    VideoUrlPart,
)
from saccade.serve.remote_media import is_remote
from saccade.serve.service import PromptInput, estimated_tokens

Conversation = list[dict[str, Any]]


def conversation_of(messages: Sequence[Message], *, allows_remote: bool = False) -> Conversation:
    """The conversation as the engine takes it; remote URLs are still to be fetched."""
    conversation = []
    for number, message in enumerate(messages):
        converted: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role}
        if isinstance(message, AssistantMessage) and message.tool_calls is not None:
            converted["tool_calls"] = [call.model_dump() for call in message.tool_calls]
        if message.content is None and "tool_calls" not in converted:
            raise bad_request(f"messages[{number}] has neither content nor tool_calls", param=f"messages[{number}]")
        if message.content is None or isinstance(message.content, str):
            converted["content"] = message.content
        else:
            where = f"messages[{number}].content"
            converted["content"] = [
                _part(part, f"{where}[{i}]", allows_remote) for i, part in enumerate(message.content)
            ]
        if isinstance(message, ToolMessage):
            converted["tool_call_id"] = message.tool_call_id
        conversation.append(converted)
    return conversation


def _part(part: ContentPart, where: str, allows_remote: bool) -> dict[str, Any]:
    if isinstance(part, TextPart):
        return {"type": "text", "text": part.text}
    if isinstance(part, ImagePart):
        url = check_media_url(part.image_url.url, f"{where}.image_url.url", allows_remote)
        return {"type": "image_url", "image_url": url}
    fps = {} if part.fps is None else {"fps": part.fps}
    if isinstance(part, VideoUrlPart):
        url = check_media_url(part.video_url.url, f"{where}.video_url.url", allows_remote)
        return {"type": "video_url", "video_url": url, **fps}
    assert isinstance(part, VideoFramesPart), "parts are of four types"
    frames = [check_media_url(url, f"{where}.video[{i}]", allows_remote) for i, url in enumerate(part.video)]
    return {"type": "video", "video": frames, **fps}


def check_media_url(url: str, where: str, allows_remote: bool = False) -> str:
    """A data URL, or a remote URL if those are fetched; any other is refused: the server opens no files for clients."""
    if url[:5].lower() == "data:" or (allows_remote and is_remote(url)):
        return url
    if is_remote(url):
        raise ApiError(
            400,
            f"{where} is a remote URL, which this server does not fetch. Send the file as a data URL: data:image/png;base64,...",
            code="remote_url_not_allowed",
            param=where,
        )
    raise bad_request(
        f"{where} is not a data URL. Send the file as data:image/png;base64,...", param=where, code="invalid_media_url"
    )


def prompt_input(
    conversation: Conversation,
    *,
    continue_final_message: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> PromptInput:
    """The prompt of a conversation, with what admission needs to know of it."""
    texts = [] if tools is None else [json.dumps(tools)]
    media = []
    for message in conversation:
        texts += [call["function"]["arguments"] for call in message.get("tool_calls", ())]
        content = message["content"] or ""
        for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
            if part["type"] == "text":
                texts.append(part["text"])
            else:
                source = part[part["type"]]
                media.append(source if isinstance(source, list) else [source])
    return PromptInput(
        preprocess=lambda engine, salt: engine.preprocess(
            conversation, continue_final_message=continue_final_message, tools=tools, salt=salt
        ),
        num_tokens=sum(map(estimated_tokens, texts)),
        num_images=len(media),
        num_media_bytes=sum(len(url) * 3 // 4 for urls in media for url in urls),
    )
