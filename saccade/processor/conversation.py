"""OpenAI-style messages to the pieces of a prompt: text, control tokens and images in their places.

    messages -> checked messages -> chat template (trusted) -> pieces

The template comes from the checkpoint and runs in Jinja's immutable sandbox. Its output is trusted, the users' words in it are
not: before rendering, each of their characters that could begin or end a control token is replaced by a *stand-in*, a Unicode
noncharacter that occurs nowhere in the conversation; after the control tokens have been cut out, the characters are put back.
So text that spells `<|im_end|>`, whole or split over two parts, stays text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from saccade.errors import CheckpointError, RequestError
from saccade.processor.folder import read_json
from saccade.processor.image import ImageSource
from saccade.processor.tokenizer import Tokenizer

Message = Mapping[str, Any]
"""`role` and `content`; content is text or a list of parts (`text`, `image_url` / `image`, `video`)."""

ROLES = ("system", "user", "assistant")

_NONCHARACTERS = [
    *map(chr, range(0xFDD0, 0xFDF0)),
    *(chr(plane * 0x10000 + last) for plane in range(17) for last in (0xFFFE, 0xFFFF)),
]
"""The 66 code points that Unicode keeps free of characters: never exchanged as text."""

DEFAULT_FPS = 2.0
"""Frames a second of a video that does not state its own."""


@dataclass(frozen=True)
class ImageItem:
    """One image of a conversation, still as the user gave it."""

    source: ImageSource


@dataclass(frozen=True)
class VideoItem:
    """One video of a conversation: its frames and how many of them a second."""

    frames: tuple[ImageSource, ...]
    fps: float


VisualItem = ImageItem | VideoItem


@dataclass(frozen=True)
class Piece:
    """A stretch of the prompt: text, or one control token."""

    text: str
    control_id: int | None
    is_learned: bool


@dataclass(frozen=True)
class Prompt:
    """A rendered conversation: its pieces, and its images and videos in the order of their placeholders."""

    pieces: tuple[Piece, ...]
    visuals: tuple[VisualItem, ...]


class _GenerationTag(Extension):
    """Some templates wrap the assistant's words in `{% generation %}`; we find them ourselves, so the tag is transparent."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """The block's content, as it stands."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """The checkpoint's Jinja template: how this model wants a conversation written."""

    def __init__(self, source: str, bos_token: str = "", eos_token: str = "") -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag]
        )
        environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
        environment.globals["raise_exception"] = _raise_from_template
        environment.globals["strftime_now"] = lambda form: datetime.now().astimezone().strftime(form)
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise CheckpointError(f"the checkpoint's chat template does not parse: {error}") from error

    @staticmethod
    def load(folder: Path) -> ChatTemplate:
        """The template of a checkpoint folder, with the tokens it may name."""
        tokens = read_json(folder / "tokenizer_config.json")
        return ChatTemplate(read_template(folder), token_text(tokens, "bos_token"), token_text(tokens, "eos_token"))

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        """The conversation as one string, control tokens spelled out."""
        try:
            return self._template.render(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                tools=None,  # templates ask "is not none", which an undefined name is
                documents=None,
                **self._tokens,
            )
        except jinja2.TemplateError as error:
            raise RequestError(f"the chat template refuses this conversation: {error}") from error
        except TypeError as error:
            raise RequestError(
                f"the chat template cannot write this conversation: {error}. "
                "A template made for text alone takes no images: use a checkpoint made by saccade init"
            ) from error
        except (ArithmeticError, LookupError, ValueError, AttributeError, RecursionError) as error:
            raise RequestError(f"the checkpoint's chat template fails on this conversation: {error!r}") from error


def render_prompt(
    messages: Sequence[Message], template: ChatTemplate, tokenizer: Tokenizer, *, add_generation_prompt: bool
) -> Prompt:
    """One conversation as pieces. Without a generation prompt the assistant's turns are marked as learned.

    Text is cut where an assistant's turn begins, in training and in serving alike: that is where generation starts, so no
    token may reach across.
    """
    checked, visuals = _check(messages)
    hide, restore = _stand_ins(checked, tokenizer.control_edges())
    hidden = _translate_text(checked, hide)
    text = template.render(hidden, add_generation_prompt=add_generation_prompt)
    turns = _assistant_turns(hidden, text, template, must_learn=not add_generation_prompt)
    pieces: list[Piece] = []
    for part, is_turn in _cut_turns(text, turns):
        is_learned = is_turn and not add_generation_prompt
        part_pieces = [
            Piece(piece.translate(restore), control, is_learned) for piece, control in tokenizer.split_control(part)
        ]
        pieces += _unlearn_after_end(part_pieces) if is_learned else part_pieces
    return Prompt(tuple(pieces), tuple(visuals))


def _check(messages: Sequence[Message]) -> tuple[list[dict[str, Any]], list[VisualItem]]:
    """Messages as the template takes them (images as bare placeholders), and the images in order."""
    if not is_list(messages):
        raise RequestError("a conversation is a non-empty list of messages, each with role and content")
    checked: list[dict[str, Any]] = []
    visuals: list[VisualItem] = []
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
            raise RequestError(f"{where}: a message has role and content")
        if surplus := message.keys() - {"role", "content"}:
            raise RequestError(
                f"{where}: unknown key {', '.join(sorted(map(str, surplus)))}. A message has role and content"
            )
        if message["role"] not in ROLES:
            raise RequestError(f"{where}.role is {message['role']!r}. Use one of {', '.join(ROLES)}")
        content, found = _check_content(message["content"], where)
        checked.append({"role": message["role"], "content": content})
        visuals += found
    return checked, visuals


def is_list(value: object) -> bool:
    """A list or tuple with something in it; a string is none."""
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
    if not visuals:  # text parts alone are one text, so that templates made for text take them
        return "".join(part["text"] for part in parts), []
    return parts, visuals


_PART_KEYS = {"text": {"text"}, "image_url": {"image_url"}, "image": {"image"}, "video": {"video", "fps"}}


def _check_part(part: object, where: str) -> tuple[dict[str, Any], VisualItem | None]:
    """One part of a message: what the template sees of it, and its image or video."""
    if not isinstance(part, Mapping):
        raise RequestError(f"{where} is {type(part).__name__}, not a part with a type")
    kind = part.get("type")
    if not isinstance(kind, str) or kind not in _PART_KEYS:
        raise RequestError(f"{where}.type is {kind!r}. Use text, image_url, image or video")
    if surplus := part.keys() - _PART_KEYS[kind] - {"type"}:
        raise RequestError(f"{where}: unknown key {', '.join(sorted(map(str, surplus)))} in a part of type {kind}")
    if kind == "text":
        return {"type": "text", "text": _check_text(part.get("text"), f"{where}.text")}, None
    if kind == "image_url":
        return {"type": "image"}, ImageItem(_check_image_url(part.get("image_url"), f"{where}.image_url"))
    if kind == "image":
        return {"type": "image"}, ImageItem(_present(part.get("image"), "image", f"{where}.image"))
    return {"type": "video"}, _check_video(part, where)


def _check_text(text: object, where: str) -> str:
    if not isinstance(text, str):
        raise RequestError(f"{where} must be a string")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"{where} is not valid Unicode (half of a surrogate pair). Remove it") from error
    return text


def _check_image_url(url: object, where: str) -> Any:
    """A URL, or OpenAI's object around it; of its `detail` only `auto` can be honoured."""
    if not isinstance(url, Mapping):
        return _present(url, "image", where)
    if surplus := url.keys() - {"url", "detail"}:
        raise RequestError(f"{where}: unknown key {', '.join(sorted(map(str, surplus)))}. It has url")
    if url.get("detail", "auto") != "auto":
        raise RequestError(f"{where}.detail is {url['detail']!r}; only auto is supported")
    return _present(url.get("url"), "image", where)


def _check_video(part: Mapping[str, Any], where: str) -> VideoItem:
    frames = _present(part.get("video"), "video", f"{where}.video")
    if isinstance(frames, str | bytes) or not isinstance(frames, Sequence):
        raise RequestError(f"{where}.video must be a list of frames (images). Cut a video file into frames first")
    fps = part.get("fps", DEFAULT_FPS)
    if isinstance(fps, bool) or not isinstance(fps, int | float) or not 0 < fps < 1000:
        raise RequestError(f"{where}.fps is {fps!r}, not a number of frames a second above 0")
    return VideoItem(tuple(frames), float(fps))


def _present(source: Any, kind: str, where: str) -> Any:
    if source is None or (isinstance(source, str | bytes | Sequence) and not source):
        raise RequestError(
            f"{where}: {kind} placeholder without {'an image' if kind == 'image' else 'frames'}. Give it, or remove the part"
        )
    return source


def _stand_ins(messages: Sequence[Message], characters: str) -> tuple[dict[int, str], dict[int, str]]:
    """Translations to and from noncharacters that no text of the conversation contains, one for each character."""
    everything = json.dumps(messages, ensure_ascii=False)
    free = [stand_in for stand_in in _NONCHARACTERS if stand_in not in everything]
    if len(free) < len(characters):
        raise RequestError(
            "the text uses all of the Unicode noncharacters (U+FDD0 to U+FDEF, U+FFFE, U+FFFF, ...). Remove them"
        )
    pairs = list(zip(characters, free, strict=False))
    return {ord(c): stand_in for c, stand_in in pairs}, {ord(stand_in): c for c, stand_in in pairs}


def _translate_text(messages: Sequence[Message], table: dict[int, str]) -> list[dict[str, Any]]:
    """The same messages with every text translated."""

    def translate(content: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
        if isinstance(content, str):
            return content.translate(table)
        return [part | {"text": part["text"].translate(table)} if "text" in part else part for part in content]

    return [{"role": message["role"], "content": translate(message["content"])} for message in messages]


def _assistant_turns(
    messages: Sequence[Message], text: str, template: ChatTemplate, *, must_learn: bool
) -> list[tuple[int, int]]:
    """Where in `text` each assistant turn begins and ends: after the generation prompt, up to the next message.

    A template that rewrites earlier turns hides that; serving goes on without the cuts, learning cannot.
    """
    turns = []
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = template.render(messages[:number], add_generation_prompt=True)
        after = template.render(messages[: number + 1], add_generation_prompt=False)
        if not (after.startswith(before) and text.startswith(after)):
            if not must_learn:
                return []
            raise RequestError(
                f"messages[{number}]: the chat template rewrites earlier turns, so the words the assistant is to learn "
                "cannot be told apart. End the conversation at this turn, or train with a template that only appends"
            )
        turns.append((len(before), len(after)))
    return turns


def _cut_turns(text: str, turns: Sequence[tuple[int, int]]) -> list[tuple[str, bool]]:
    """The text in parts: (part, whether it is an assistant's turn)."""
    parts, end = [], 0
    for start, stop in turns:
        parts += [(text[end:start], False), (text[start:stop], True)]
        end = stop
    return [*parts, (text[end:], False)]


def _unlearn_after_end(pieces: Sequence[Piece]) -> list[Piece]:
    """What the template writes behind the turn's last control token is never generated, so it is not learned."""
    ends = [number for number, piece in enumerate(pieces) if piece.control_id is not None]
    last = ends[-1] if ends else len(pieces) - 1
    return [Piece(piece.text, piece.control_id, number <= last) for number, piece in enumerate(pieces)]


def read_template(folder: Path) -> str:
    """The Jinja source: `chat_template.jinja`, or where other versions keep it."""
    source: Any = _read_text(folder / "chat_template.jinja")
    for file in ("chat_template.json", "processor_config.json", "tokenizer_config.json"):
        source = source or read_json(folder / file).get("chat_template")
    if isinstance(source, list):  # several templates by name
        source = next((entry.get("template") for entry in source if entry.get("name") == "default"), None)
    if not isinstance(source, str):
        raise CheckpointError(
            f"{folder}: no chat_template.jinja. Copy it from the original model: it defines the prompt"
        )
    return source


def _raise_from_template(message: str) -> None:
    raise jinja2.TemplateError(message)


def _read_text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8") if path.is_file() else None
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: not UTF-8 text: {error}. Copy it from the original again") from error


def token_text(config: Mapping[str, Any], name: str) -> str:
    """bos and eos are stored as a string, or as a description of one."""
    token = config.get(name)
    text = token.get("content") if isinstance(token, Mapping) else token
    return text if isinstance(text, str) else ""
