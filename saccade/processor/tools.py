"""Tools in a conversation, in OpenAI's format: functions that the model may call, its calls, and their arguments.

    tools=[{"type": "function", "function": {"name": "add", "description": "...", "parameters": {JSON schema}}}]
    {"role": "assistant", "content": None, "tool_calls": [{"id": "call_1", "type": "function",
                                                           "function": {"name": "add", "arguments": "{\\"a\\": 1}"}}]}
    {"role": "tool", "tool_call_id": "call_1", "content": "2"}

The chat template renders them. Templates take the arguments of a call as an object, so their JSON text is parsed here.
"""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Container, Mapping, Sequence, Set
from typing import Any

from saccade.errors import RequestError

Tool = Mapping[str, Any]
MAX_TOOLS = 128
MAX_TOOL_BYTES = 256 * 1024
"""JSON of all tools of a request, and of the arguments of one call."""
MAX_TOOL_DEPTH = 64
"""Levels of nesting of a schema or of arguments."""
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_TRUSTED_KEYS = frozenset(
    "type function name description parameters properties required items enum arguments id tool_calls".split()
)
"""Keys that a template looks up: they stay as they are, whatever characters control tokens begin with."""


def check_tools(tools: object) -> list[dict[str, Any]]:
    """Tools as the template takes them, without `strict`, which concerns decoding and not the prompt."""
    if not isinstance(tools, Sequence) or isinstance(tools, str | bytes) or not 0 < len(tools) <= MAX_TOOLS:
        raise RequestError(f"tools is {reprlib.repr(tools)}; use a list of 1 to {MAX_TOOLS} tools")
    checked = [_check_tool(tool, f"tools[{number}]") for number, tool in enumerate(_plain_json(tools, "tools"))]
    names = [tool["function"]["name"] for tool in checked]
    if repeated := {name for name in names if names.count(name) > 1}:
        raise RequestError(f"tools has the function {min(repeated)} twice. Give each a name of its own")
    return checked


def _check_tool(tool: Any, where: str) -> dict[str, Any]:
    split_keys(tool, {"type", "function"}, (), where, "A tool has type and function")
    if tool.get("type") != "function":
        raise RequestError(f"{where}.type is {reprlib.repr(tool.get('type'))}; only function is supported")
    function, where = tool.get("function"), f"{where}.function"
    names = {"name", "description", "parameters", "strict"}
    split_keys(function, names, (), where, f"A function has {', '.join(sorted(names))}")
    if not isinstance(function.get("name"), str) or not _NAME.fullmatch(function["name"]):
        raise RequestError(
            f"{where}.name is {reprlib.repr(function.get('name'))}; use 1 to 64 letters, digits, underscores and dashes"
        )
    if not isinstance(function.get("description"), str | None):
        raise RequestError(f"{where}.description must be a string")
    if not isinstance(function.get("parameters"), dict | None):
        raise RequestError(f"{where}.parameters must be a JSON schema, which is an object")
    kept = {name: value for name, value in function.items() if name != "strict" and value is not None}
    return {"type": "function", "function": kept}


def check_tool_calls(calls: object, where: str, names: Container[str] | None = None) -> list[dict[str, Any]]:
    """The calls of an assistant message, with their arguments as objects. `names`: further keys; None: any."""
    if not isinstance(calls, Sequence) or isinstance(calls, str | bytes) or not 0 < len(calls) <= MAX_TOOLS:
        raise RequestError(f"{where} is {reprlib.repr(calls)}; use a list of 1 to {MAX_TOOLS} calls, or leave it out")
    return [_check_call(call, f"{where}[{number}]", names) for number, call in enumerate(calls)]


def _check_call(call: object, where: str, names: Container[str] | None) -> dict[str, Any]:
    own, extra = split_keys(call, {"id", "type", "function"}, names, where, "A call has id, type and function")
    if own.get("type", "function") != "function":
        raise RequestError(f"{where}.type is {reprlib.repr(own['type'])}; only function is supported")
    if not isinstance(own.get("id", ""), str):
        raise RequestError(f"{where}.id must be a string")
    function, of_function = split_keys(
        own.get("function"), {"name", "arguments"}, names, f"{where}.function", "It has name and arguments"
    )
    if not isinstance(function.get("name"), str):
        raise RequestError(f"{where}.function.name must be a string")
    arguments = _check_arguments(function.get("arguments"), f"{where}.function.arguments")
    called = of_function | {"name": function["name"], "arguments": arguments}
    checked: dict[str, Any] = _plain_json(extra | own | {"type": "function", "function": called}, where)
    return checked


def _check_arguments(arguments: object, where: str) -> dict[str, Any]:
    if isinstance(arguments, str) and len(arguments) <= MAX_TOOL_BYTES:
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError) as error:
            raise RequestError(
                f"{where} is not JSON. Send the arguments as the model wrote them, or correct them"
            ) from error
    if not isinstance(arguments, Mapping):
        raise RequestError(f"{where} is not a JSON object of up to {MAX_TOOL_BYTES} bytes")
    return dict(arguments)


def split_keys(
    value: object, ours: Set[str], names: Container[str] | None, where: str, advice: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The values of our keys, and those of other keys, which may be any JSON and must be in `names` (None: any)."""
    if not isinstance(value, Mapping):
        raise RequestError(f"{where} is {reprlib.repr(value)}, not an object. {advice}")
    own = {name: value[name] for name in value if name in ours}
    others = {name: value[name] for name in value if name not in ours}
    if surplus := [] if names is None else sorted(str(name) for name in others if name not in names):
        raise RequestError(f"{where}: unknown key {', '.join(surplus)}. {advice}")
    return own, _plain_json(others, where) if others else {}


def _plain_json(value: Any, where: str) -> Any:
    """A copy of JSON types only, within the limits on size and depth."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        num_bytes = len(text.encode())
    except UnicodeEncodeError as error:
        raise RequestError(f"{where} is not valid Unicode (half of a surrogate pair). Remove it") from error
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"{where} is not JSON, has numbers that are not finite, or is nested too deeply") from error
    if num_bytes > MAX_TOOL_BYTES:
        raise RequestError(f"{where} has {num_bytes} bytes; at most {MAX_TOOL_BYTES} are supported. Send less")
    copy = json.loads(text)
    level = [copy]
    for _ in range(MAX_TOOL_DEPTH):
        level = [child for node in level for child in _children(node)]
        if not level:
            return copy
    raise RequestError(f"{where} is nested more than {MAX_TOOL_DEPTH} levels deep. Use $defs and $ref")


def _children(node: object) -> Sequence[Any]:
    if isinstance(node, dict):
        return list(node.values())
    return node if isinstance(node, list) else ()


def translate_json(value: Any, table: dict[int, str]) -> Any:
    """A copy with every string translated, keys included."""
    if isinstance(value, str):
        return value.translate(table)
    if isinstance(value, dict):
        return {
            key if key in _TRUSTED_KEYS else key.translate(table): translate_json(child, table)
            for key, child in value.items()
        }
    return [translate_json(child, table) for child in value] if isinstance(value, list) else value
