"""Messages of a request to a conversation of the engine. Images and videos are data URLs; nothing else is opened."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from saccade.serve.errors import ApiError, bad_request
from saccade.serve.protocol.chat import (
    ContentPart,
    ImagePart,
    Message,
    SystemMessage,
    TextPart,
    ToolMessage,
    VideoFramesPart,
    VideoUrlPart,
)


def conversation_of(messages: Sequence[Message]) -> tuple[list[dict[str, Any]], int]:
    """The conversation and the number of its images and videos."""
    conversation, num_images = [], 0
    for number, message in enumerate(messages):
        role = "system" if isinstance(message, SystemMessage) else message.role
        converted: dict[str, Any] = {"role": role}
        if isinstance(message.content, str):
            converted["content"] = message.content
        else:
            where = f"messages[{number}].content"
            converted["content"] = [_part(part, f"{where}[{i}]") for i, part in enumerate(message.content)]
            num_images += sum(not isinstance(part, TextPart) for part in message.content)
        if isinstance(message, ToolMessage):
            converted["tool_call_id"] = message.tool_call_id
        conversation.append(converted)
    return conversation, num_images


def _part(part: ContentPart, where: str) -> dict[str, Any]:
    if isinstance(part, TextPart):
        return {"type": "text", "text": part.text}
    if isinstance(part, ImagePart):
        return {"type": "image_url", "image_url": check_media_url(part.image_url.url, f"{where}.image_url.url")}
    fps = {} if part.fps is None else {"fps": part.fps}
    if isinstance(part, VideoUrlPart):
        return {"type": "video_url", "video_url": check_media_url(part.video_url.url, f"{where}.video_url.url"), **fps}
    assert isinstance(part, VideoFramesPart), "parts are of four types"
    frames = [check_media_url(url, f"{where}.video[{i}]") for i, url in enumerate(part.video)]
    return {"type": "video", "video": frames, **fps}


def check_media_url(url: str, where: str) -> str:
    """A data URL; any other is refused: the server opens no files and no connections for clients."""
    if url[:5].lower() == "data:":
        return url
    if url[:7].lower() in ("http://", "https:/"):
        raise ApiError(
            400,
            f"{where} is a remote URL, which this server does not fetch. Send the file as a data URL: data:image/png;base64,...",
            code="remote_url_not_allowed",
            param=where,
        )
    raise bad_request(
        f"{where} is not a data URL. Send the file as data:image/png;base64,...", param=where, code="invalid_media_url"
    )
