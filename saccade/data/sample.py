"""A sample: a key, the files of a tar that share it, and the conversations they form.

    members  ->  images in order, text in one of seven forms  ->  one conversation per variant of the text

The forms, first match wins: json `chosen` and `rejected` (a preference pair), json `messages` (OpenAI), json
`conversations` (LLaVA), json `questions`, json `captions`, a `txt` member or json `caption` / `text`, a `cls` member. A
pair is two conversations where pairs are trained on (`preference_pair`), and its chosen conversation everywhere else. A
sample without images is a text-only conversation; one without text, or with an image in an unsupported format, is a
`DataError`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from saccade.data.image_formats import IMAGE_EXTENSIONS, UNSUPPORTED_EXTENSIONS
from saccade.errors import ConfigError, DataError

if TYPE_CHECKING:
    from saccade.processor.messages import Message

IMAGE_MARK = "<image>"

_SURROGATE_ESCAPE, _SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]"), re.compile("[\ud800-\udfff]")
_ROLES = {"system": "system", "user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant"}


@dataclass(frozen=True, slots=True)
class Sample:
    """The members of one key, by extension ("jpg", "0.jpg", "txt", "json"), in the order of the tar."""

    key: str
    source: str
    members: dict[str, bytes]


@dataclass(frozen=True, kw_only=True)
class TextRules:
    """How text that is not a conversation becomes one."""

    caption_prompt: str = "Describe the image."
    """The user's turn before a caption."""
    text_prompt: str = "Write a text."
    """The user's turn before text without an image."""
    system_prompt: str | None = None
    """A system message for conversations that have none; None leaves it to the chat template."""

    def __post_init__(self) -> None:
        for name in ("caption_prompt", "text_prompt", "system_prompt"):
            if IMAGE_MARK in (getattr(self, name) or ""):
                raise ConfigError(f"{name} contains {IMAGE_MARK}; the sample places its images. Remove the mark")


_NO_PROMPTS = TextRules(caption_prompt="", text_prompt="")


def split_name(name: str) -> tuple[str, str] | None:
    """Key and extension of a member's path: split at the first dot of its last part.

    None without a key or an extension.

    >>> split_name("./train/0001.0.JPG")
    ('train/0001', '0.jpg')
    """
    name = name.removeprefix("./")
    folder, slash, file = name.rpartition("/")
    stem, dot, extension = file.partition(".")
    return (f"{folder}{slash}{stem}", extension.lower()) if stem and dot and extension else None


def image_names(names: Iterable[str]) -> list[str]:
    """The members that are images, in the order of the tar; numbered ones ("2.jpg", "10.jpg") by number."""
    found = [name for name in names if name.rpartition(".")[2] in IMAGE_EXTENSIONS]
    return sorted(found, key=_number) if len(found) > 1 else found


def _number(name: str) -> int:
    number = name.partition(".")[0]
    return int(number) if number.isascii() and number.isdigit() else 0


def images(sample: Sample) -> list[bytes]:
    """The encoded images of a sample, in the order of its `<image>` marks."""
    return [sample.members[name] for name in image_names(sample.members)]


def conversations(sample: Sample, rules: TextRules) -> list[list[Message]]:
    """The variants of a sample's text, each a conversation with the image bytes in its `image` parts."""
    pictures = _pictures(sample)
    return [_with_images(turns, pictures, sample, rules) for turns in _variants(sample, rules, bool(pictures))]


def preference_pair(sample: Sample, rules: TextRules) -> tuple[list[Message], list[Message]]:
    """The chosen and the rejected conversation of a sample, each with all of its images."""
    pictures, fields = _pictures(sample), description(sample)
    if not (fields.get("chosen") and fields.get("rejected")):
        raise DataError(f"{_where(sample)}: no preference pair. Give its json member the fields chosen and rejected")
    chosen, rejected = (
        _with_images(_answer_turns(fields, name, sample, rules, bool(pictures)), pictures, sample, rules)
        for name in ("chosen", "rejected")
    )
    if chosen == rejected:
        raise DataError(f"{_where(sample)}: chosen and rejected are equal. Remove the sample")
    return chosen, rejected


def training_conversations(sample: Sample, rules: TextRules, *, pairs: bool) -> list[list[list[Message]]]:
    """The variants of a sample, each the conversations that are trained on together: one, or with `pairs` two."""
    if pairs:
        return [[*preference_pair(sample, rules)]]
    return [[conversation] for conversation in conversations(sample, rules)]


def _pictures(sample: Sample) -> list[bytes]:
    """The encoded images; an unsupported format is an error."""
    if unsupported := [name for name in sample.members if name.rpartition(".")[2] in UNSUPPORTED_EXTENSIONS]:
        kind = unsupported[0].rpartition(".")[2].upper()
        raise DataError(
            f"{_where(sample)}: {unsupported[0]}: {kind} images are not supported. Convert to JPEG, PNG or WebP"
        )
    return images(sample)


def texts(sample: Sample) -> list[str]:
    """All text of a sample without the prompts of `TextRules`: captions, questions and answers, messages."""
    contents = [message["content"] for messages in conversations(sample, _NO_PROMPTS) for message in messages]
    parts = [part for content in contents for part in ([{"text": content}] if isinstance(content, str) else content)]
    return [part["text"] for part in parts if part.get("text")]


def description(sample: Sample) -> dict[str, Any]:
    """The sample's json member; empty if it has none."""
    if "json" not in sample.members:
        return {}
    try:
        content = json.loads(sample.members["json"])
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{_where(sample)}: the json member cannot be read: {error}. Write it again as UTF-8"
        ) from error
    if not isinstance(content, dict):
        raise DataError(f"{_where(sample)}: the json member is a {type(content).__name__}, not an object with fields")
    if _SURROGATE_ESCAPE.search(sample.members["json"]) and _SURROGATE.search(json.dumps(content, ensure_ascii=False)):
        raise DataError(
            f"{_where(sample)}: the json member contains half of a surrogate pair, which is invalid text. Remove it"
        )
    return content


# ------------------------------------------------------------------ the seven forms of text

_Turn = tuple[str, list[str | None]]
"""Role and content: texts, and None for each image."""


def _variants(sample: Sample, rules: TextRules, has_image: bool) -> list[list[_Turn]]:
    """The text of a sample as turns, images not yet bound."""
    fields = description(sample)
    if fields.get("chosen"):
        return [_answer_turns(fields, "chosen", sample, rules, has_image)]
    for name in ("messages", "conversations"):
        if fields.get(name):
            return [_listed_turns(fields[name], name, sample)]
    if fields.get("questions"):
        return [_question_turns(fields["questions"], sample)]
    prompt = rules.caption_prompt if has_image else rules.text_prompt
    captions = _captions(fields, sample)
    if not captions:
        raise DataError(f"{_where(sample)}: no text. Give it a txt member, or json with caption or messages")
    return [[("user", [prompt]), ("assistant", [caption])] for caption in captions]


def _answer_turns(
    fields: Mapping[str, Any], name: str, sample: Sample, rules: TextRules, has_image: bool
) -> list[_Turn]:
    """The shared beginning of a preference pair (`messages` or `prompt`), then one of its answers: a text, or messages.

    An answer that starts with a system or user turn is a whole conversation and has no shared beginning.
    """
    answer = fields[name]
    if isinstance(answer, str):
        turns: list[_Turn] = [("assistant", [answer.strip()])]
    else:
        turns = _listed_turns(answer, name, sample)
    if not any("".join(part or "" for part in content).strip() for role, content in turns if role == "assistant"):
        raise DataError(f"{_where(sample)}: {name} has no text")
    if turns[0][0] != "assistant":
        return turns
    prompt = (
        fields.get("messages") or fields.get("prompt") or (rules.caption_prompt if has_image else rules.text_prompt)
    )
    if isinstance(prompt, str):
        return [("user", _cut_marks(prompt)), *turns]
    return [*_listed_turns(prompt, "messages" if fields.get("messages") else "prompt", sample, is_prompt=True), *turns]


def _captions(fields: Mapping[str, Any], sample: Sample) -> list[str]:
    """Plain text in order of preference; blank texts do not count."""
    listed = fields.get("captions") or []
    if not isinstance(listed, list) or not all(isinstance(caption, str) for caption in listed):
        raise DataError(f"{_where(sample)}: captions is not a list of texts")
    if captions := [text for caption in listed if (text := caption.strip())]:
        return captions
    for text in (_decoded(sample, "txt"), fields.get("caption"), fields.get("text"), _decoded(sample, "cls")):
        if isinstance(text, str) and text.strip():
            return [text.strip()]
    return []


def _decoded(sample: Sample, name: str) -> str | None:
    if name not in sample.members:
        return None
    try:
        return sample.members[name].decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{_where(sample)}: the {name} member is not UTF-8: {error}. Encode it again") from error


def _question_turns(questions: object, sample: Sample) -> list[_Turn]:
    turns: list[_Turn] = []
    for number, entry in enumerate(_items(questions, "questions", sample)):
        for role, name in (("user", "question"), ("assistant", "answer")):
            text = entry.get(name)
            if not isinstance(text, str) or not text.strip():
                raise DataError(f"{_where(sample)}: questions[{number}].{name} is not a text")
            turns.append((role, _cut_marks(text) if role == "user" else [text.strip()]))
    return turns


def _listed_turns(messages: object, name: str, sample: Sample, *, is_prompt: bool = False) -> list[_Turn]:
    """OpenAI's role and content, or LLaVA's from and value. `is_prompt`: the answer is given elsewhere."""
    turns = []
    for number, entry in enumerate(_items(messages, name, sample)):
        where = f"{_where(sample)}: {name}[{number}]"
        role, content = entry.get("role", entry.get("from")), entry.get("content", entry.get("value"))
        if not isinstance(role, str) or role not in _ROLES:
            raise DataError(f"{where}: the role is {role!r}. Use one of {', '.join(_ROLES)}")
        turns.append((_ROLES[role], _parts(content, where)))
    if not is_prompt and not any(role == "assistant" for role, _ in turns):
        raise DataError(f"{_where(sample)}: {name} has no assistant turn, so there is nothing to train on")
    return turns


def _items(value: object, name: str, sample: Sample) -> list[Mapping[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise DataError(f"{_where(sample)}: {name} is not a list of objects")
    return value


def _parts(content: object, where: str) -> list[str | None]:
    """A message's content as texts and image marks.

    An image part is a mark, whatever it refers to: the images are members.
    """
    if isinstance(content, str):
        return _cut_marks(content)
    if not isinstance(content, list):
        raise DataError(f"{where}: the content is {type(content).__name__}, not text or a list of parts")
    parts: list[str | None] = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "text" and isinstance(part.get("text"), str):
            parts += _cut_marks(part["text"])
        elif kind in ("image", "image_url"):
            parts.append(None)
        else:
            raise DataError(f"{where}: a part of type {kind!r} is not supported. Use text and image")
    return parts


def _cut_marks(text: str) -> list[str | None]:
    """Split text at its `<image>` marks; line breaks next to a mark are dropped."""
    if IMAGE_MARK not in text:
        return [text]
    parts: list[str | None] = []
    for piece in text.split(IMAGE_MARK):
        parts += [piece.strip("\n"), None]
    return [part for part in parts[:-1] if part != ""]


# ------------------------------------------------------------------ binding images


def _with_images(turns: Sequence[_Turn], pictures: list[bytes], sample: Sample, rules: TextRules) -> list[Message]:
    """Bind images to marks in order; without marks they precede the text of the first user turn."""
    num_marks = sum(part is None for _, content in turns for part in content)
    if num_marks == 0 and pictures:
        first = next((number for number, (role, _) in enumerate(turns) if role == "user"), None)
        if first is None:
            raise DataError(f"{_where(sample)}: {len(pictures)} images and no user turn to put them in")
        marks: list[str | None] = [None] * len(pictures)
        turns = [
            (role, marks + content if number == first else content) for number, (role, content) in enumerate(turns)
        ]
    elif num_marks != len(pictures):
        raise DataError(
            f"{_where(sample)}: {num_marks} {IMAGE_MARK} marks and {len(pictures)} images. Their numbers must be equal"
        )
    unbound = iter(pictures)
    messages: list[Message] = [{"role": role, "content": _content(content, unbound)} for role, content in turns]
    if rules.system_prompt is not None and turns[0][0] != "system":
        messages.insert(0, {"role": "system", "content": rules.system_prompt})
    return messages


def _content(parts: Sequence[str | None], unbound: Iterator[bytes]) -> str | list[dict[str, Any]]:
    """Text alone as a string; with images as parts, without blank texts."""
    if None not in parts:
        return "".join(part for part in parts if part)
    return [
        {"type": "image", "image": next(unbound)} if part is None else {"type": "text", "text": part}
        for part in parts
        if part != ""
    ]


def _where(sample: Sample) -> str:
    return f"sample {sample.key} of {sample.source}"
