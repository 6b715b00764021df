"""Write tools into the prompt of a chat template that does not render them, in the format that `tool_calls.py` reads.

    with_tools_described    the functions, in the system message
    tool_turns_as_text      earlier calls as text of the assistant, their results as turns of the user

This is text of the conversation like any other: it never becomes control tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

Conversation = Sequence[Mapping[str, Any]]

_DESCRIPTION = """\
# Tools

The functions you may call, one per line:
<tools>
{tools}
</tools>

Call a function like this:
<tool_call>
{{"name": "its name", "arguments": {{"argument": "value"}}}}
</tool_call>"""


def with_tools_described(conversation: Conversation, tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Describe the tools at the end of the system message, which is added if there is none."""
    text = _DESCRIPTION.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    messages = [dict(message) for message in conversation]
    if not messages or messages[0]["role"] != "system":
        return [{"role": "system", "content": text}, *messages]
    content = messages[0]["content"]
    if isinstance(content, str):
        messages[0]["content"] = f"{content}\n\n{text}"
    else:
        messages[0]["content"] = [*content, {"type": "text", "text": f"\n\n{text}"}]
    return messages


def tool_turns_as_text(conversation: Conversation) -> list[dict[str, Any]]:
    """Write calls and results of a conversation as text. Consecutive results are one turn."""
    messages: list[dict[str, Any]] = []
    has_result = False
    """Whether the last message has results."""
    for message in conversation:
        if message["role"] == "tool":
            text = f"<tool_response>\n{_text(message['content'])}\n</tool_response>"
            if has_result:
                messages[-1]["content"] += f"\n{text}"
            else:
                messages.append({"role": "user", "content": text})
        elif "tool_calls" in message:
            others = {name: value for name, value in message.items() if name != "tool_calls"}
            said = [_text(message["content"])] if message["content"] else []
            text = "\n".join([*said, *(_call(call["function"]) for call in message["tool_calls"])])
            messages.append(others | {"content": text})
        else:
            messages.append(dict(message))
        has_result = message["role"] == "tool"
    return messages


def _text(content: str | Sequence[Mapping[str, Any]]) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _call(function: Mapping[str, Any]) -> str:
    arguments = function["arguments"].strip() or "{}"
    return f'<tool_call>\n{{"name": {json.dumps(function["name"])}, "arguments": {arguments}}}\n</tool_call>'
