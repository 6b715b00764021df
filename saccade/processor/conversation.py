"""OpenAI-style messages to a prompt: pieces of text, control tokens, and images and videos in order.

    messages -> checked messages -> chat template (trusted) -> pieces

The template comes from the checkpoint and runs in Jinja's immutable sandbox. Its own output is trusted, message text is
not: before rendering, each character that could begin or end a control token is replaced by a *stand-in*, a Unicode
noncharacter that does not occur in the conversation, and restored after the control tokens have been split off. Text
that spells `<|im_end|>`, in one part or across two, therefore stays text. The same holds for descriptions of tools, the
arguments of their calls (`tools.py`), and every other key of a message that the template reads.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from saccade.errors import RequestError
from saccade.processor.assistant_turns import Render, assistant_turns, split_turns, turn_start
from saccade.processor.chat_template import ChatTemplate
from saccade.processor.messages import Message, VisualItem, check_messages
from saccade.processor.tokenizer import Tokenizer
from saccade.processor.tools import Tool, check_tools, translate_json

_NONCHARACTERS = [
    *map(chr, range(0xFDD0, 0xFDF0)),
    *(chr(plane * 0x10000 + last) for plane in range(17) for last in (0xFFFE, 0xFFFF)),
]
"""The 66 code points that Unicode reserves as noncharacters: never part of text."""


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

    Text is split at the start of each assistant turn, in training and in serving: generation starts there, so no token
    may cross it.
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
            "the checkpoint's chat template has no place for tools, so the model would not know them. Leave tools out, "
            "or use a checkpoint whose chat_template.jinja renders them"
        )
    is_training = not add_generation_prompt and not continue_final_message
    if continue_final_message:
        if add_generation_prompt:
            raise RequestError("add_generation_prompt and continue_final_message exclude each other")
        text = _render_prefill(hidden, render)
    else:
        text = render(hidden, add_generation_prompt=add_generation_prompt)
    turns = assistant_turns(hidden, text, render, is_training=is_training)
    pieces: list[Piece] = []
    for part, is_turn in split_turns(text, turns):
        in_loss = is_turn and is_training
        part_pieces = [
            Piece(piece.translate(restore), control, in_loss, starts_turn=is_turn and number == 0)
            for number, (piece, control) in enumerate(tokenizer.split_control(part))
        ]
        pieces += _mask_after_end(part_pieces) if in_loss else part_pieces
    return Prompt(tuple(pieces), tuple(visuals))


def _render_prefill(messages: Sequence[Message], render: Render) -> str:
    """The prompt up to the end of the final assistant message's text."""
    final = messages[-1]
    text = _text_alone(final["content"])
    if final["role"] != "assistant" or text is None or "tool_calls" in final:
        raise RequestError(
            "continue_final_message continues a final message with role assistant and text alone. "
            "Add one, or leave it out"
        )
    rendered = render(messages, add_generation_prompt=False)
    begin = turn_start(messages, len(messages) - 1, rendered, render)
    start = -1 if begin is None else rendered.find(text, begin)
    if start < 0 or rendered[begin:start].strip():  # a space may follow the generation prompt
        raise RequestError(
            "the chat template changes the final message (white space at its ends?), so it cannot be continued. "
            "Strip it"
        )
    return rendered[: start + len(text)] if text else render(messages[:-1], add_generation_prompt=True)


def _text_alone(content: str | list[dict[str, Any]]) -> str | None:
    """The text of content with a single text; None for other content."""
    if isinstance(content, str):
        return content
    return content[0]["text"] if len(content) == 1 and content[0]["type"] == "text" else None


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


def _mask_after_end(pieces: Sequence[Piece]) -> list[Piece]:
    """Exclude the text after the turn's last control token from the loss: the template appends it."""
    ends = [number for number, piece in enumerate(pieces) if piece.control_id is not None]
    last = ends[-1] if ends else len(pieces) - 1
    return [replace(piece, in_loss=number <= last) for number, piece in enumerate(pieces)]
