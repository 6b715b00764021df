"""Check OpenAI-style messages: the input of a chat template, and images and videos in order."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np

from saccade.errors import ImageError, RequestError
from saccade.processor.image import ImageSource, to_image_source
from saccade.processor.tools import check_tool_calls, split_keys

Message = Mapping[str, Any]
"""`role` and `content`; content is text or a list of parts (`text`, `image_url` / `image`, `video_url` / `video`). An
assistant's message may have `tool_calls`, the result of a call `tool_call_id` and `name`. Any message may have further
keys that the template reads."""
ROLES = ("system", "user", "assistant", "tool")
DEFAULT_FPS = 2.0
"""Default frame rate of a list of frames, and default sampling rate of a video file."""
MIN_FPS, MAX_FPS = 0.01, 1000.0
"""Below the minimum, the time positions of a few frames exceed those that a model was trained for."""


@dataclass(frozen=True)
class ImageItem:
    """One image of a conversation, not yet decoded."""

    source: ImageSource


@dataclass(frozen=True)
class VideoItem:
    """One video of a conversation as a list of frames, `fps` of them per second."""

    frames: tuple[ImageSource, ...]
    fps: float


@dataclass(frozen=True)
class VideoFileItem:
    """One video of a conversation as a file (path, bytes or data URL), to be sampled at `fps`."""

    source: str | Path | bytes
    fps: float


VisualItem = ImageItem | VideoItem | VideoFileItem


def check_messages(
    messages: Sequence[Message], names: Container[str] | None = None
) -> tuple[list[dict[str, Any]], list[VisualItem]]:
    """Messages as the template takes them (an image is a part without its source), and the images and videos in order.

    `names`: further keys that a message, a tool call and its function may have (`ChatTemplate.names`). None: any,
    for a check without the template.
    """
    if not is_list(messages):
        raise RequestError("a conversation is a non-empty list of messages, each with role and content")
    checked: list[dict[str, Any]] = []
    visuals: list[VisualItem] = []
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        checked_message, found = _check_message(message, where, names)
        checked.append(checked_message)
        visuals += found
    return checked, visuals


_KEYS_OF_ROLE = {"tool": {"tool_call_id", "name"}, "assistant": {"tool_calls"}}
"""Keys of a message, apart from role and content, that are checked here."""


def _check_message(
    message: object, where: str, names: Container[str] | None
) -> tuple[dict[str, Any], list[VisualItem]]:
    if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys() | _optional_keys(message):
        raise RequestError(f"{where}: a message has role and content")
    if message["role"] not in ROLES:
        raise RequestError(f"{where}.role is {message['role']!r}. Use one of {', '.join(ROLES)}")
    ours = _KEYS_OF_ROLE.get(message["role"], set())
    if misplaced := sorted({"tool_calls", "tool_call_id"} & message.keys() - ours):
        raise RequestError(f"{where}: unknown key {misplaced[0]} in a message with role {message['role']}")
    _, extra = split_keys(message, {"role", "content"} | ours, names, where, "A message has role and content")
    extra |= {
        name: _check_text(message[name], f"{where}.{name}") for name in sorted(ours & message.keys() - {"tool_calls"})
    }
    if "tool_calls" in message:
        extra["tool_calls"] = check_tool_calls(message["tool_calls"], f"{where}.tool_calls", names)
    content = message.get("content")
    text, visuals = _check_content("" if content is None and "tool_calls" in message else content, where)
    return {"role": message["role"], "content": text} | extra, visuals


def _optional_keys(message: Mapping[Any, Any]) -> set[str]:
    """A message that calls tools need not have content."""
    return {"content"} if "tool_calls" in message else set()


def is_list(value: object) -> bool:
    """Whether the value is a non-empty list or tuple; a string is not."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes) and len(value) > 0


def _check_content(content: object, where: str) -> tuple[str | list[dict[str, Any]], list[VisualItem]]:
    if isinstance(content, str):
        return _check_text(content, where), []
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise RequestError(f"{where}.content is {type(content).__name__}, not text or a list of parts")
    parts: list[dict[str, Any]] = []
    visuals: list[VisualItem] = []
    for number, part in enumerate(content):
        placeholder, visual = _check_part(part, f"{where}.content[{number}]")
        parts.append(placeholder)
        if visual:
            visuals.append(visual)
    return parts, visuals


_PART_KEYS = {
    "text": {"text"},
    "image_url": {"image_url"},
    "image": {"image"},
    "video_url": {"video_url", "fps"},
    "video": {"video", "fps"},
}


def _check_part(part: object, where: str) -> tuple[dict[str, Any], VisualItem | None]:
    """One part of a message: the part as the template takes it, and its image or video."""
    if not isinstance(part, Mapping):
        raise RequestError(f"{where} is {type(part).__name__}, not a part with a type")
    kind = part.get("type")
    if not isinstance(kind, str) or kind not in _PART_KEYS:
        raise RequestError(f"{where}.type is {kind!r}. Use {', '.join(_PART_KEYS)}")
    if surplus := part.keys() - _PART_KEYS[kind] - {"type"}:
        raise RequestError(f"{where}: unknown key {', '.join(sorted(map(str, surplus)))} in a part of type {kind}")
    if kind == "text":
        return {"type": "text", "text": _check_text(part.get("text"), f"{where}.text")}, None
    if kind == "image_url":
        return {"type": "image"}, ImageItem(_check_url(part.get("image_url"), "image", f"{where}.image_url"))
    if kind == "image":
        return {"type": "image"}, ImageItem(_check_source(part.get("image"), "image", f"{where}.image"))
    if kind == "video_url":
        url = _check_url(part.get("video_url"), "video", f"{where}.video_url")
        return {"type": "video"}, VideoFileItem(url, _check_fps(part, where))
    return {"type": "video"}, _check_video(part, where)


def _check_text(text: object, where: str) -> str:
    if not isinstance(text, str):
        raise RequestError(f"{where} must be a string")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"{where} is not valid Unicode (half of a surrogate pair). Remove it") from error
    return text


def _check_url(url: object, kind: str, where: str) -> Any:
    """A URL, or OpenAI's object around it; of its `detail` only `auto` is supported."""
    if not isinstance(url, Mapping):
        return _check_source(url, kind, where)
    if surplus := url.keys() - {"url", "detail"}:
        raise RequestError(f"{where}: unknown key {', '.join(sorted(map(str, surplus)))}. It has url")
    if url.get("detail", "auto") != "auto":
        raise RequestError(f"{where}.detail is {url['detail']!r}; only auto is supported")
    return _check_source(url.get("url"), kind, where)


def _check_video(part: Mapping[str, Any], where: str) -> VideoItem | VideoFileItem:
    fps, video = _check_fps(part, where), part.get("video")
    if isinstance(video, np.ndarray) and video.ndim == 4:
        video = list(video)
    source = _check_source(video, "video", f"{where}.video")
    if isinstance(source, str | Path | bytes):
        return VideoFileItem(source, fps)
    if not isinstance(source, Sequence):
        raise RequestError(
            f"{where}.video is {type(source).__name__}. Use a video file (path, bytes, data URL), a list of frames or "
            "an array [frames, height, width, 3]"
        )
    return VideoItem(tuple(_convert(frame, f"{where}.video[{number}]") for number, frame in enumerate(source)), fps)


def _check_fps(part: Mapping[str, Any], where: str) -> float:
    fps = part.get("fps", DEFAULT_FPS)
    if isinstance(fps, bool) or not isinstance(fps, Real) or not MIN_FPS <= float(fps) <= MAX_FPS:
        raise RequestError(f"{where}.fps is {fps!r}. Use a number of frames per second from {MIN_FPS:g} to {MAX_FPS:g}")
    return float(fps)


def _check_source(source: Any, kind: str, where: str) -> Any:
    if source is None or (isinstance(source, str | bytes | Sequence) and not source):
        raise RequestError(
            f"{where}: {kind} placeholder without {'an image' if kind == 'image' else 'frames'}. "
            "Give it, or remove the part"
        )
    return _convert(source, where)


def _convert(source: Any, where: str) -> Any:
    try:
        return to_image_source(source)
    except ImageError as error:
        raise ImageError(f"{where}: {error}") from error
