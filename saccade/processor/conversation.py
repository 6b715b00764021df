"""OpenAI-style messages to a prompt: pieces of text, control tokens, and images and videos in order.

    messages -> checked messages -> chat template (trusted) -> pieces

The template comes from the checkpoint and runs in Jinja's immutable sandbox. Its own output is trusted, message text is not:
before rendering, each character that could begin or end a control token is replaced by a *stand-in*, a Unicode noncharacter that
does not occur in the conversation, and restored after the control tokens have been split off. So text that spells `<|im_end|>`,
in one part or across two, stays text. The same holds for the descriptions of tools, the arguments of their calls (`tools.py`), and
every other key of a message that the template reads.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property, lru_cache, partial
from numbers import Real
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from saccade.errors import CheckpointError, ConfigError, ImageError, RequestError
from saccade.processor.folder import read_json
from saccade.processor.image import ImageSource, to_image_source
from saccade.processor.tokenizer import Tokenizer
from saccade.processor.tools import Tool, check_tool_calls, check_tools, split_keys, translate_json

Message = Mapping[str, Any]
"""`role` and `content`; content is text or a list of parts (`text`, `image_url` / `image`, `video_url` / `video`). An assistant's message
may have `tool_calls`, the result of a call `tool_call_id` and `name`. Any message may have further keys that the template reads."""

ROLES = ("system", "user", "assistant", "tool")

_NONCHARACTERS = [
    *map(chr, range(0xFDD0, 0xFDF0)),
    *(chr(plane * 0x10000 + last) for plane in range(17) for last in (0xFFFE, 0xFFFF)),
]
"""The 66 code points that Unicode reserves as noncharacters: never part of text."""

_PROBE = "saccade"
"""A text that no template has, to see what one writes."""
_MAX_WHOLE_RENDERINGS = 32
"""Turns of a request that may be rendered with all turns before them; each takes time in proportion to their length."""

DEFAULT_FPS = 2.0
"""Frame rate of a video that does not state one: its frames', or the sampling rate of a video file."""
MIN_FPS, MAX_FPS = 0.01, 1000.0
"""Below this the time positions of a few frames exceed what a model was trained for."""


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


@dataclass(frozen=True)
class Piece:
    """Part of a prompt: text, or one control token."""

    text: str
    control_id: int | None
    in_loss: bool
    """Whether its tokens are trained on, except a token that spans the start of the next piece."""
    starts_turn: bool = False
    """Whether it is the first piece of an assistant turn: no token spans its start."""


@dataclass(frozen=True)
class Prompt:
    """A rendered conversation: its pieces, and its images and videos in order."""

    pieces: tuple[Piece, ...]
    visuals: tuple[VisualItem, ...]


_Render = Callable[..., str]
"""`ChatTemplate.render` with the tools of the conversation."""


class _RefusedByTemplateError(jinja2.TemplateError):
    """The template called `raise_exception`; the text is its own."""


class _GenerationTag(Extension):
    """Ignores the `{% generation %}` tags of some templates: assistant turns are found without them."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """The content of the tag."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag]
    )
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    environment.globals["raise_exception"] = _raise_from_template
    environment.globals["strftime_now"] = lambda form: datetime.now().astimezone().strftime(form)
    return environment


@lru_cache(maxsize=16)
def _compile(source: str) -> jinja2.Template:
    """A compiled template. It takes 50 ms, and a run loads the processor of its checkpoint several times."""
    return _environment().from_string(source)


class ChatTemplate:
    """The Jinja chat template of a checkpoint."""

    def __init__(self, source: str, bos_token: str = "", eos_token: str = "") -> None:
        self.source = source
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        try:
            self._template = _compile(source)
        except jinja2.TemplateError as error:
            raise CheckpointError(f"the chat template does not parse: {error}") from error

    @staticmethod
    def load(folder: Path, source: str | None = None) -> ChatTemplate:
        """Read the template of a checkpoint folder, or take another one, with the bos and eos tokens it may use."""
        tokens = read_json(folder / "tokenizer_config.json")
        source = read_template(folder) if source is None else source
        return ChatTemplate(source, token_text(tokens, "bos_token"), token_text(tokens, "eos_token"))

    @cached_property
    def names(self) -> frozenset[str]:
        """All names that the template may look up in a message: its attributes and those of its strings that could be names."""
        tree = _environment().parse(self.source)
        found = [node.attr for node in tree.find_all(jinja2.nodes.Getattr)]
        found += [node.value for node in tree.find_all(jinja2.nodes.Const) if isinstance(node.value, str)]
        return frozenset(name for name in found if name.isidentifier())

    @cached_property
    def takes_parts(self) -> bool:
        """Whether content must be a list of parts: text that is a string would vanish."""
        return not self._writes(_PROBE) and self._writes([{"type": "text", "text": _PROBE}])

    @cached_property
    def takes_text(self) -> bool:
        """Whether the text of a message is part of the prompt: not so if this is no chat template."""
        return self.takes_parts or self._writes(_PROBE)

    @cached_property
    def takes_tools(self) -> bool:
        """Whether tools are part of the prompt."""
        tools = [{"type": "function", "function": {"name": _PROBE, "description": "", "parameters": {}}}]
        return self._writes([{"type": "text", "text": "x"}] if self.takes_parts else "x", tools)

    def _writes(self, content: str | list[dict[str, str]], tools: Sequence[Tool] | None = None) -> bool:
        try:
            messages = [{"role": "user", "content": content}]
            return _PROBE in self.render(messages, add_generation_prompt=False, tools=tools)
        except RequestError:
            return False

    def content_of(self, message: Message) -> str | list[dict[str, Any]]:
        """The content of a checked message as the template takes it: parts, or one string where there is text alone."""
        content = message["content"]
        if self.takes_parts:
            return [{"type": "text", "text": content}] if isinstance(content, str) else content
        if isinstance(content, str) or any(part["type"] != "text" for part in content):
            return content  # type: ignore[no-any-return]
        return "".join(part["text"] for part in content)

    def render(
        self, messages: Sequence[Message], *, add_generation_prompt: bool, tools: Sequence[Tool] | None = None
    ) -> str:
        """Render the conversation to one string, control tokens spelled out."""
        try:
            return self._template.render(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                tools=tools,  # None if there are none: templates ask "is not none", which an undefined name is
                documents=None,
                **self._tokens,
            )
        except _RefusedByTemplateError as error:
            raise RequestError(f"the chat template refuses this conversation: {error}") from error
        except TypeError as error:
            raise RequestError(
                "the chat template cannot render this conversation. A template for text alone takes no images: use a checkpoint made by saccade init"
            ) from error
        except (
            jinja2.TemplateError, ArithmeticError, LookupError, ValueError, AttributeError, RecursionError,
        ) as error:  # fmt: skip
            raise RequestError(
                f"the checkpoint's chat template fails on this conversation ({type(error).__name__})"
            ) from error


def render_prompt(
    messages: Sequence[Message],
    template: ChatTemplate,
    tokenizer: Tokenizer,
    *,
    add_generation_prompt: bool,
    continue_final_message: bool = False,
    tools: Sequence[Tool] | None = None,
) -> Prompt:
    """Render one conversation to pieces. Without a generation prompt the assistant turns are marked `in_loss`.

    `continue_final_message`: the prompt ends with the text of the final assistant message, for the model to continue.

    Text is split at the start of each assistant turn, in training and in serving: generation starts there, so no token may cross it.
    """
    checked, visuals = check_messages(messages, template.names)
    checked = [message | {"content": template.content_of(message)} for message in checked]
    checked_tools = None if tools is None else check_tools(tools)
    hide, restore = _stand_ins([checked, checked_tools], tokenizer.control_edges())
    hidden = _translate_text(checked, hide)
    render = partial(template.render, tools=translate_json(checked_tools, hide))
    if tools is not None and render(hidden, add_generation_prompt=False) == template.render(
        hidden, add_generation_prompt=False
    ):
        raise RequestError(
            "the checkpoint's chat template has no place for tools, so the model would not know them. Leave tools out, or use a checkpoint "
            "whose chat_template.jinja renders them"
        )
    is_training = not add_generation_prompt and not continue_final_message
    if continue_final_message:
        if add_generation_prompt:
            raise RequestError("add_generation_prompt and continue_final_message exclude each other")
        text = _render_prefill(hidden, render)
    else:
        text = render(hidden, add_generation_prompt=add_generation_prompt)
    turns = _assistant_turns(hidden, text, render, is_training=is_training)
    pieces: list[Piece] = []
    for part, is_turn in _split_turns(text, turns):
        in_loss = is_turn and is_training
        part_pieces = [
            Piece(piece.translate(restore), control, in_loss, starts_turn=is_turn and number == 0)
            for number, (piece, control) in enumerate(tokenizer.split_control(part))
        ]
        pieces += _mask_after_end(part_pieces) if in_loss else part_pieces
    return Prompt(tuple(pieces), tuple(visuals))


def _render_prefill(messages: Sequence[Message], render: _Render) -> str:
    """The prompt up to the end of the final assistant message's text."""
    final = messages[-1]
    text = _text_alone(final["content"])
    if final["role"] != "assistant" or text is None or "tool_calls" in final:
        raise RequestError(
            "continue_final_message continues a final message with role assistant and text alone. Add one, or leave it out"
        )
    rendered = render(messages, add_generation_prompt=False)
    begin = _turn_start(messages, len(messages) - 1, rendered, render)
    start = -1 if begin is None else rendered.find(text, begin)
    if start < 0 or rendered[begin:start].strip():  # behind the generation prompt there may be a space
        raise RequestError(
            "the chat template changes the final message (white space at its ends?), so it cannot be continued. Strip it"
        )
    return rendered[: start + len(text)] if text else render(messages[:-1], add_generation_prompt=True)


def _text_alone(content: str | list[dict[str, Any]]) -> str | None:
    """Content of one text; None if there is anything else."""
    if isinstance(content, str):
        return content
    return content[0]["text"] if len(content) == 1 and content[0]["type"] == "text" else None


def check_messages(
    messages: Sequence[Message], names: Container[str] | None = None
) -> tuple[list[dict[str, Any]], list[VisualItem]]:
    """Messages as the template takes them (an image is a part without its source), and the images and videos in order.

    `names`: keys that a message, a tool call and its function may have besides ours (`ChatTemplate.names`). None: any, for a check
    without the template.
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


_KEYS_OF_ROLE = {"tool": {"tool_call_id", "name"}, "assistant": {"tool_calls"}}
"""Keys of a message besides role and content that we check ourselves."""


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
            f"{where}.video is {type(source).__name__}. Use a video file (path, bytes, data URL), a list of frames or an array "
            "[frames, height, width, 3]"
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
            f"{where}: {kind} placeholder without {'an image' if kind == 'image' else 'frames'}. Give it, or remove the part"
        )
    return _convert(source, where)


def _convert(source: Any, where: str) -> Any:
    try:
        return to_image_source(source)
    except ImageError as error:
        raise ImageError(f"{where}: {error}") from error


def _stand_ins(conversation: Any, characters: str) -> tuple[dict[int, str], dict[int, str]]:
    """Translation tables from each character to a noncharacter that is not in the conversation, and back."""
    everything = json.dumps(conversation, ensure_ascii=False)
    free = [stand_in for stand_in in _NONCHARACTERS if stand_in not in everything]
    if len(free) < len(characters):
        raise RequestError(
            "the text uses all of the Unicode noncharacters (U+FDD0 to U+FDEF, U+FFFE, U+FFFF, ...). Remove them"
        )
    pairs = list(zip(characters, free, strict=False))
    return {ord(c): stand_in for c, stand_in in pairs}, {ord(stand_in): c for c, stand_in in pairs}


def _translate_text(messages: Sequence[Message], table: dict[int, str]) -> list[dict[str, Any]]:
    """The same messages with every text translated."""

    def translate(name: str, value: Any) -> Any:
        if name == "role":
            return value
        if name == "content" and not isinstance(value, str):
            return [part | {"text": part["text"].translate(table)} if "text" in part else part for part in value]
        return translate_json(value, table)

    return [{name: translate(name, value) for name, value in message.items()} for message in messages]


def _assistant_turns(
    messages: Sequence[Message], text: str, render: _Render, *, is_training: bool
) -> list[tuple[int, int]]:
    """Start and end of each assistant turn in `text`: after the generation prompt, up to the next message.

    A turn is located by rendering it after the turn before it, so that the cost is linear in the number of turns. Only where the
    template writes it differently there (numbered messages, for example) is it rendered after the whole conversation.
    With a template that rewrites earlier turns they are unknown: serving works without, training does not.
    """
    turns: list[tuple[int, int]] = []
    num_system = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
    num_whole, previous, first = (
        0,
        num_system,
        num_system,
    )  # indices of the first message of the turn before, and of this one
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        end = turns[-1][1] if turns else 0
        context = [*messages[:num_system], *messages[previous:first]]
        turn = _locate_turn(context, messages[first : number + 1], text, end, render)
        if turn is None and previous > num_system:
            num_whole += 1
            if not is_training and num_whole > _MAX_WHOLE_RENDERINGS:
                raise RequestError(
                    f"the chat template writes each turn depending on all earlier ones, which takes too long for {number + 1} "
                    "messages. Send fewer turns"
                )
            turn = _locate_turn(messages[:first], messages[first : number + 1], text, end, render)
        if turn is None:
            if not is_training:
                return []
            raise RequestError(
                f"messages[{number}]: the chat template rewrites earlier turns, so the tokens to train on "
                "cannot be found. End the conversation at this turn, or train with a template that only appends"
            )
        turns.append(turn)
        previous, first = first, number + 1
    return turns


def _locate_turn(
    context: Sequence[Message], turn: Sequence[Message], text: str, offset: int, render: _Render
) -> tuple[int, int] | None:
    """Start and end in `text` of the assistant's message that ends `turn`; `text` has the turn at `offset`, after what `context`
    renders to. None if it has something else there."""
    conversation = [*context, *turn]
    after = render(conversation, add_generation_prompt=False)
    start = _turn_start(conversation, len(conversation) - 1, after, render)
    before = render(context, add_generation_prompt=False) if offset else ""
    if start is None or start < len(before) or not after.startswith(before):
        return None
    written = after[len(before) :]
    start += offset - len(before)
    if len(text) >= start and written.startswith(text[offset:]):  # a turn to be continued
        return start, len(text)
    return (start, offset + len(written)) if text.startswith(written, offset) else None


def _turn_start(messages: Sequence[Message], number: int, after: str, render: _Render) -> int | None:
    """Where the text of an assistant's message begins in `after`, the conversation up to it; None if that is unknown.

    It is behind the generation prompt. In a past turn a template may write that with further spaces at its white space.
    """
    before = render(messages[:number], add_generation_prompt=True)
    if after.startswith(before):
        return len(before)
    past = render(messages[:number], add_generation_prompt=False)
    if not (before.startswith(past) and after.startswith(past)):
        return None
    pattern = "".join(f"[ \\t]*{re.escape(c)}" if c.isspace() else re.escape(c) for c in before[len(past) :])
    found = re.compile(pattern).match(after, len(past))
    return found.end() if found else None


def _split_turns(text: str, turns: Sequence[tuple[int, int]]) -> list[tuple[str, bool]]:
    """The text in parts: (part, whether it is an assistant turn)."""
    parts, end = [], 0
    for start, stop in turns:
        parts += [(text[end:start], False), (text[start:stop], True)]
        end = stop
    return [*parts, (text[end:], False)]


def _mask_after_end(pieces: Sequence[Piece]) -> list[Piece]:
    """Exclude from the loss what the template appends after the turn's last control token: it is never generated."""
    ends = [number for number, piece in enumerate(pieces) if piece.control_id is not None]
    last = ends[-1] if ends else len(pieces) - 1
    return [replace(piece, in_loss=number <= last) for number, piece in enumerate(pieces)]


def read_template(folder: Path) -> str:
    """The Jinja source: `chat_template.jinja`, or the files that other versions of `transformers` write."""
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


def check_template(path: Path) -> str:
    """The source of a template file that replaces the checkpoint's; raises `ConfigError` if it cannot be used."""
    try:
        source = path.read_text(encoding="utf-8")
        takes_text = ChatTemplate(source).takes_text
    except OSError as error:
        raise ConfigError(f"chat template {path}: {error.strerror}. Check the path") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"chat template {path}: not UTF-8 text. A chat template is a Jinja file") from error
    except CheckpointError as error:
        raise ConfigError(f"chat template {path}: {error}") from error
    if not takes_text:
        raise ConfigError(f"chat template {path}: it does not write the text of a message. Is it a chat template?")
    return source


def _raise_from_template(message: str) -> None:
    raise _RefusedByTemplateError(message)


def _read_text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8") if path.is_file() else None
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: not UTF-8 text: {error}. Copy it from the original again") from error


def token_text(config: Mapping[str, Any], name: str) -> str:
    """A special token of `tokenizer_config.json`, stored as a string or as an object with `content`."""
    token = config.get(name)
    text = token.get("content") if isinstance(token, Mapping) else token
    return text if isinstance(text, str) else ""
