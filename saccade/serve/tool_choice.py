"""Turn `tool_choice` into the tools that the model sees and a grammar for its output.

| `tool_choice` | the model sees the tools | its output |
|---|---|---|
| `none` | no | text |
| `auto` (default) | yes | text, calls, or text and then calls; arguments of `strict` functions follow their schemas |
| `required` | yes | one or more calls, arguments by their schemas |
| a function | yes | one call of this function, arguments by its schema |

With `parallel_tool_calls` false there is at most one call. Plain Python; `tool_calls.py` has the format,
`tool_prompt.py` the prompt for a chat template that renders no tools.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from saccade.engine.structured import StructuredOutput
from saccade.errors import ConfigError, RequestError

_WHITESPACE = r"[ \n\r\t]{1,8}"
"""White space between the JSON tokens of arguments. It is bounded, or a model may emit nothing else."""
_FREE_TEXT = """\
TEXT: /(?s:.+)/ & ~/(?s:.*)<tool_call>(?s:.*)/
lead[lazy]: /(?s:.*)<tool_call>/
"""


@dataclass(frozen=True)
class ToolChoice:
    """The tools of a request, as the engine and the parser take them."""

    tools: Sequence[Mapping[str, Any]] | None = None
    """Tools in the prompt; None: the model sees none."""
    structured: StructuredOutput | None = None
    """The form of the output; None: any."""
    names: frozenset[str] = frozenset()
    """Functions whose calls are found in the output."""


def choose_tools(
    tools: Sequence[Mapping[str, Any]] | None, choice: object = None, *, is_parallel: bool = True
) -> ToolChoice:
    """Interpret `tools`, which `processor/tools.py` has checked, `tool_choice` and `parallel_tool_calls`."""
    if tools is None:
        if choice not in (None, "none", "auto"):
            raise RequestError("tool_choice is set but tools is not. Send the tools, or leave tool_choice out")
        return ToolChoice()
    functions = {tool["function"]["name"]: tool["function"] for tool in tools}
    fields = {name: f"tools[{number}].function.parameters" for number, name in enumerate(functions)}
    more = ' ("\\n<tool_call>" rest)*' if is_parallel else ""
    structured = None
    if choice == "none":
        return ToolChoice()
    if choice in (None, "auto"):
        if not is_parallel or any(function.get("strict") for function in functions.values()):
            schemas = {
                name: _schema(function if function.get("strict") else {}, fields[name])
                for name, function in functions.items()
            }
            structured = _grammar(f"start: TEXT? | lead rest{more}\n{_FREE_TEXT}", schemas)
    elif choice == "required":
        schemas = {name: _schema(function, fields[name]) for name, function in functions.items()}
        structured = _grammar(f'start: "<tool_call>" rest{more}\n', schemas)
    else:
        name = _chosen_name(choice, functions)
        functions = {name: functions[name]}
        structured = _grammar('start: "<tool_call>" rest\n', {name: _schema(functions[name], fields[name])})
    return ToolChoice(tools, structured, frozenset(functions))


def _chosen_name(choice: object, names: Iterable[str]) -> str:
    if not isinstance(choice, Mapping) or choice.get("type") != "function":
        raise RequestError(
            f"tool_choice is {reprlib.repr(choice)}; use none, auto, required or "
            '{"type": "function", "function": {"name": "..."}}'
        )
    function = choice.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or name not in names:
        raise RequestError(
            f"tool_choice names the function {reprlib.repr(name)}, which is not in tools. Add it, or name another"
        )
    return name


def _schema(function: Mapping[str, Any], field: str) -> dict[str, Any]:
    """Return the schema of a function's arguments, checked like that of a structured output. It is an object's."""
    schema = {"type": "object"} | (function.get("parameters") or {})
    try:
        StructuredOutput(json_schema=schema)
    except ConfigError as error:
        raise ConfigError(str(error).replace("json_schema", field, 1)) from error
    return schema


def _grammar(start: str, schemas: Mapping[str, dict[str, Any]]) -> StructuredOutput:
    """Write a Lark grammar of calls. The line of a schema is JSON, which the compiler reads as JSON."""
    rules = [
        'rest: "\\n" call "\\n</tool_call>"',
        "call: " + " | ".join(f"call_{number}" for number in range(len(schemas))),
    ]
    for number, (name, schema) in enumerate(schemas.items()):
        guided = json.dumps({**schema, "x-guidance": {"whitespace_pattern": _WHITESPACE}})
        rules.append(f'call_{number}: "{{\\"name\\": \\"{name}\\", \\"arguments\\": " arguments_{number} "}}"')
        rules.append(f"arguments_{number}: %json {guided}")
    return StructuredOutput(grammar=start + "\n".join(rules) + "\n")
