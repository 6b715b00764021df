"""Turn the messages of a request into a conversation of the engine.

Images and videos are data URLs, or remote URLs that the operator allows to fetch.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

from saccade.serve.errors import ApiError, bad_request
from saccade.serve.prompt_input import Conversation
from saccade.serve.protocol.chat import (
    AssistantMessage,
    ContentPart,
    EarlierCall,
    ImagePart,
    Message,
    TextPart,
    ToolMessage,
    VideoFramesPart,
    VideoUrlPart,
)
from saccade.serve.protocol.common import Earlier
from saccade.serve.remote_media import is_remote
from saccade.serve.tool_prompt import tool_turns_as_text


def conversation_of(messages: Sequence[Message], names: Container[str], *, allows_remote: bool = False) -> Conversation:
    """Return the conversation for the engine; remote URLs are fetched later.

    `names`: the names that the chat template reads.
    """
    conversation = []
    for number, message in enumerate(messages):
        converted: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role}
        if isinstance(message, AssistantMessage) and message.tool_calls:
            converted["tool_calls"] = [_call(call, names) for call in message.tool_calls]
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
        conversation.append(extra_fields(message, names) | converted)
    return conversation if "tool_calls" in names else tool_turns_as_text(conversation)


def extra_fields(earlier: Earlier, names: Container[str]) -> dict[str, Any]:
    """Fields beyond those of the API that the chat template reads."""
    extra = earlier.model_extra or {}
    return {name: value for name, value in extra.items() if name in names and value is not None}


def _call(call: EarlierCall, names: Container[str]) -> dict[str, Any]:
    function = {"name": call.function.name, "arguments": call.function.arguments}
    return extra_fields(call, names) | {
        "id": call.id,
        "type": call.type,
        "function": extra_fields(call.function, names) | function,
    }


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
    """Accept a data URL, and a remote URL if those are fetched.

    Any other is refused: the server opens no files for clients.
    """
    if url[:5].lower() == "data:" or (allows_remote and is_remote(url)):
        return url
    if is_remote(url):
        raise ApiError(
            400,
            f"{where} is a remote URL, which this server does not fetch. Send the file as a data URL: "
            "data:image/png;base64,...",
            code="remote_url_not_allowed",
            param=where,
        )
    raise bad_request(
        f"{where} is not a data URL. Send the file as data:image/png;base64,...", param=where, code="invalid_media_url"
    )
