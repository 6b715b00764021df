"""Find tool calls in generated text, piece by piece as it streams.

    push(text) -> content and calls so far -> finish() -> the rest

The format is Hermes', which Qwen and many others are trained on: one block per call,

    <tool_call>
    {"name": "add", "arguments": {"a": 1, "b": 2}}
    </tool_call>

A call begins when its name is known; its arguments follow in fragments of JSON text, as the model wrote them. A block
that names no function of the request stays content, tags included. The result depends on the text alone, not on how it
was split: every decision is taken at the first character that settles it. Plain Python, no I/O.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

from saccade.processor.chat_template import ChatTemplate

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_HEADER = re.compile(
    r'\s{0,16}\{\s{0,16}"name"\s{0,16}:\s{0,16}"([A-Za-z0-9_-]{1,64})"\s{0,16},\s{0,16}"arguments"\s{0,16}:\s{0,16}(?=\{)'
)
_MAX_HEADER_LENGTH = 256
_JSON_EDGE = re.compile(r'["{}\[\]<]')
_STRING_EDGE = re.compile(r'["\\]')


@dataclass(frozen=True)
class ContentDelta:
    """Text for the user."""

    text: str


@dataclass(frozen=True)
class ToolCallDelta:
    """A new call, which has `id` and `name`, or more of the arguments of call number `index`."""

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


Delta = ContentDelta | ToolCallDelta


def merged(deltas: Iterable[ToolCallDelta]) -> list[ToolCallDelta]:
    """Merge the deltas of each call: clients do not expect two of one call in a chunk."""
    found: dict[int, ToolCallDelta] = {}
    for delta in deltas:
        before = found.get(delta.index)
        found[delta.index] = delta if before is None else replace(before, arguments=before.arguments + delta.arguments)
    return list(found.values())


@dataclass
class ParsedCall:
    """A whole call; the arguments are JSON text, which a model may get wrong."""

    id: str
    name: str
    arguments: str = ""


@dataclass
class ParsedOutput:
    """Content and calls of an output, added up from deltas."""

    content: str = ""
    tool_calls: list[ParsedCall] = field(default_factory=list)

    def add(self, deltas: Iterable[Delta]) -> None:
        """Append a delta."""
        for delta in deltas:
            if isinstance(delta, ContentDelta):
                self.content += delta.text
            elif delta.id is not None and delta.name is not None:
                self.tool_calls.append(ParsedCall(delta.id, delta.name, delta.arguments))
            else:
                self.tool_calls[delta.index].arguments += delta.arguments


def new_call_id() -> str:
    """Return an id that no other call has."""
    return f"call_{secrets.token_hex(12)}"


def has_known_format(template: str) -> bool:
    """Whether the chat template asks the model for calls in the format that is parsed here."""
    return _OPEN in template and "<function=" not in template  # Qwen3-Coder writes XML into the same tags


def knows_tools(template: ChatTemplate, tool_call_format: str | None) -> bool:
    """Whether the template renders tools and the model calls them in this format, which the operator may state."""
    is_hermes = has_known_format(template.source) if tool_call_format is None else tool_call_format == "hermes"
    return is_hermes and template.takes_tools


class ToolCallParser:
    """Splits the text of one output into content and calls of the functions `names`."""

    def __init__(self, names: Collection[str], make_id: Callable[[], str] = new_call_id) -> None:
        self._names, self._make_id = names, make_id
        self._state: Literal["content", "block", "arguments", "tail"] = "content"
        self._text = ""
        """Text that is not settled."""
        self._space = ""
        """White space after content, which is dropped before a call and kept before more content."""
        self._num_searched = 0
        """Characters of a block in which its end tag does not begin."""
        self._depth = 0
        self._is_in_string = False
        self.num_calls = 0
        """Calls so far."""

    def push(self, text: str) -> list[Delta]:
        """Add text; return the deltas that are settled."""
        self._text += text
        deltas: list[Delta] = []
        while self._text and self._advance(deltas):
            pass
        return deltas

    def finish(self) -> list[Delta]:
        """Settle the rest at the end of the text."""
        deltas: list[Delta] = []
        if self._state == "block" and not self._accept_block(self._text, deltas):
            self._emit(_OPEN + self._text, deltas)
        elif self._state == "content":
            self._emit(self._text, deltas)
        elif self._state == "arguments":
            self._emit_arguments(self._text, deltas)
        if self._space and not self.num_calls:
            deltas.append(ContentDelta(self._space))
        self._state, self._text, self._space = "content", "", ""
        return deltas

    def _advance(self, deltas: list[Delta]) -> bool:
        """Settle some of the text; False if more of it is needed."""
        if self._state == "content":
            return self._advance_content(deltas)
        if self._state == "block":
            return self._advance_block(deltas)
        if self._state == "arguments":
            return self._advance_arguments(deltas)
        return self._advance_tail()

    def _advance_content(self, deltas: list[Delta]) -> bool:
        before, tag, after = self._text.partition(_OPEN)
        if tag:
            self._emit(before, deltas)
            self._state, self._text, self._num_searched = "block", after, 0
            return True
        held = _partial_suffix(self._text, _OPEN)
        self._emit(self._text[: len(self._text) - held], deltas)
        self._text = self._text[len(self._text) - held :]
        return False

    def _advance_block(self, deltas: list[Delta]) -> bool:
        """Look for the name of a known function, or the end of the block, whichever comes first."""
        end = self._text.find(_CLOSE, self._num_searched)
        self._num_searched = max(0, len(self._text) - len(_CLOSE))
        header = _HEADER.match(self._text[:_MAX_HEADER_LENGTH])
        if header and header[1] in self._names and (end < 0 or header.end() < end):
            self._begin_call(header[1], "", deltas)
            self._state, self._text = "arguments", self._text[header.end() :]
            return True
        if end < 0:
            return False
        block, self._text = self._text[:end], self._text[end + len(_CLOSE) :]
        if not self._accept_block(block, deltas):
            self._emit(_OPEN + block + _CLOSE, deltas)
        self._state = "content"
        return True

    def _accept_block(self, block: str, deltas: list[Delta]) -> bool:
        """Emit the call of a whole block; False if it has none. Keys may be in any order."""
        try:
            call = json.loads(block)
        except (ValueError, RecursionError):
            return False
        if not isinstance(call, dict) or not isinstance(call.get("name"), str) or call["name"] not in self._names:
            return False
        arguments = call.get("arguments", call.get("parameters", {}))
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        self._begin_call(call["name"], arguments, deltas)
        return True

    def _begin_call(self, name: str, arguments: str, deltas: list[Delta]) -> None:
        deltas.append(ToolCallDelta(self.num_calls, arguments, self._make_id(), name))
        self.num_calls += 1
        self._space, self._depth, self._is_in_string = "", 0, False

    def _advance_arguments(self, deltas: list[Delta]) -> bool:
        """Emit the JSON value up to its last brace, or up to the end of the block if its braces do not match."""
        at = 0
        while edge := (_STRING_EDGE if self._is_in_string else _JSON_EDGE).search(self._text, at):
            at = edge.end()
            if edge[0] == "\\":
                if at == len(self._text):  # the escaped character is not here yet
                    at -= 1
                    break
                at += 1
            elif edge[0] == '"':
                self._is_in_string = not self._is_in_string
            elif edge[0] == "<":
                if self._text.startswith(_CLOSE, at - 1):
                    return self._end_arguments(at - 1, deltas)
                if _CLOSE.startswith(self._text[at - 1 :]):
                    at -= 1
                    break
            else:
                self._depth += 1 if edge[0] in "{[" else -1
                if self._depth <= 0:
                    return self._end_arguments(at, deltas)
        else:
            at = len(self._text)
        self._emit_arguments(self._text[:at], deltas)
        self._text = self._text[at:]
        return False

    def _end_arguments(self, end: int, deltas: list[Delta]) -> bool:
        self._emit_arguments(self._text[:end], deltas)
        self._state, self._text = "tail", self._text[end:]
        return True

    def _advance_tail(self) -> bool:
        """Skip the rest of the block, which a new block ends as well."""
        found = re.search(f"{_CLOSE}|{_OPEN}", self._text)
        if found is None:
            self._text = self._text[-max(len(_OPEN), len(_CLOSE)) :]
            return False
        self._state = "content"
        self._text = self._text[found.end() if found[0] == _CLOSE else found.start() :]
        return True

    def _emit(self, text: str, deltas: list[Delta]) -> None:
        """Emit content, without the white space at its end."""
        text = self._space + text
        kept = text.rstrip()
        self._space = text[len(kept) :]
        if kept:
            deltas.append(ContentDelta(kept))

    def _emit_arguments(self, text: str, deltas: list[Delta]) -> None:
        if text:
            deltas.append(ToolCallDelta(self.num_calls - 1, text))


def _partial_suffix(text: str, tag: str) -> int:
    """Return the length of the longest suffix of `text` with which `tag` begins."""
    return next((size for size in range(min(len(text), len(tag) - 1), 0, -1) if text.endswith(tag[:size])), 0)


def parse_tool_calls(text: str, names: Collection[str]) -> ParsedOutput:
    """Parse the content and calls of a whole output."""
    parser, parsed = ToolCallParser(names), ParsedOutput()
    parsed.add(parser.push(text))
    parsed.add(parser.finish())
    return parsed
