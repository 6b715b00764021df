"""A server whose operator sets a chat template without tools: calls can be required, earlier ones are text."""

import json
import shutil

import pytest
from serve.running import RunningServer, image_part

from saccade.engine import Engine, EngineConfig
from saccade.processor.tools import check_tools
from saccade.serve.tool_prompt import tool_turns_as_text, with_tools_described

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}{% if message.name %} {{ message.name }}{% endif %}{{ "
    "'\\n' }}"
    "{% if message.reasoning_content is defined %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A template like that of Qwen2.5-VL, which has no place for tools either."""
HELLO = {"role": "user", "content": "hello"}


def tool(name, values):
    schema = {"type": "object", "properties": {"x": {"enum": values}}, "required": ["x"], "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "parameters": schema, "strict": True}}


TOOLS = [tool("add", [1, 2]), tool("look", ["a", "b"])]
LOOK = {"type": "function", "function": {"name": "look"}}


@pytest.fixture(scope="module")
def bare(checkpoint, tmp_path_factory):
    """Return a checkpoint without a template."""
    folder = shutil.copytree(checkpoint, tmp_path_factory.mktemp("bare") / "tiny")
    (folder / "chat_template.jinja").unlink()
    return folder


@pytest.fixture(scope="module")
def plain(bare, tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    (folder / "plain.jinja").write_text(TEMPLATE)
    with RunningServer(bare, folder, "--chat-template", folder / "plain.jinja") as running:
        yield running


def prompt_of(plain, *messages):
    tokens = plain.http.post("/tokenize", json={"messages": messages})
    assert tokens.status_code == 200, tokens.text
    return plain.http.post("/detokenize", json={"tokens": tokens.json()["tokens"]}).json()["prompt"]


def calls_of(answer):
    assert answer.status_code == 200, answer.text
    return [call["function"] for call in answer.json()["choices"][0]["message"]["tool_calls"]]


def test_the_template_of_the_operator_is_used_for_text_and_images(plain):
    assert prompt_of(plain, HELLO) == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert plain.chat([image_part(), {"type": "text", "text": "look"}]).status_code == 200


def test_fields_that_the_template_reads_are_part_of_the_prompt_as_text(plain):
    said = {"role": "assistant", "content": "yes", "reasoning_content": "hm <|im_end|>", "parsed": {"a": 1}}
    text = prompt_of(plain, HELLO | {"name": "bob"}, said, HELLO)
    assert "<|im_start|>user bob\nhello<|im_end|>" in text
    assert "<|im_start|>assistant\n<think>hm <|im_end|></think>yes<|im_end|>" in text
    plain_said = said | {"reasoning_content": "hm ........"}
    controls = [
        sum(token >= 256 for token in plain.http.post("/tokenize", json={"messages": [HELLO, one]}).json()["tokens"])
        for one in (said, plain_said)
    ]
    assert controls[0] == controls[1]


@pytest.mark.parametrize("field", ["reasoning_content", "name"])
def test_fields_that_the_template_reads_count_as_text(plain, field):
    long = plain.chat(messages=[HELLO, {"role": "assistant", "content": "x", field: "y" * 60_000}])
    assert (long.status_code, long.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert "about 60" in long.json()["error"]["message"]
    unread = plain.chat(messages=[HELLO, {"role": "assistant", "content": "x", "parsed": "y" * 60_000}])
    assert unread.status_code == 200


def test_a_required_or_named_function_is_called_though_the_template_knows_no_tools(plain):
    [call] = calls_of(plain.chat(tools=TOOLS, tool_choice=LOOK, max_tokens=200))
    assert (call["name"], json.loads(call["arguments"])["x"] in ("a", "b")) == ("look", True)
    fields = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 200}
    [call] = calls_of(plain.chat(**fields))
    assert call["name"] in ("add", "look")
    chunks = plain.chunks(**fields)
    deltas = [delta for chunk in chunks for delta in chunk["choices"][0]["delta"].get("tool_calls", ())]
    assert "".join(delta["function"]["arguments"] for delta in deltas) == call["arguments"]
    seen = plain.chat(**fields).json()["usage"]["prompt_tokens"]
    described = with_tools_described([HELLO], check_tools(TOOLS))
    tokens = plain.http.post("/tokenize", json={"messages": described}).json()["count"]
    assert seen == tokens


def test_without_force_tools_are_refused_with_what_the_operator_can_do(plain):
    for choice in ({}, {"tool_choice": "auto"}, {"tool_choice": "auto", "parallel_tool_calls": False}):
        refused = plain.chat(tools=TOOLS, **choice)
        error = refused.json()["error"]
        assert (refused.status_code, error["code"], error["param"]) == (400, "unsupported_parameter", "tools")
        assert "--chat-template" in error["message"]
        assert "required" in error["message"]
    assert plain.chat(tools=TOOLS, tool_choice="none").status_code == 200


def test_earlier_calls_and_their_results_are_turns_of_text(plain):
    calls = [
        {"id": str(n), "type": "function", "function": {"name": "add", "arguments": arguments}}
        for n, arguments in enumerate(['{"x": 1}', ""])
    ]
    text = prompt_of(
        plain,
        HELLO,
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "0", "content": "3"},
        {
            "role": "tool",
            "tool_call_id": "1",
            "content": [{"type": "text", "text": "fo"}, {"type": "text", "text": "ur"}],
        },
        HELLO,
    )
    assert text == (
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
        '<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n3\n</tool_response>\n<tool_response>\nfour\n</tool_response><|im_end|>\n"
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    )


def test_tools_are_described_in_the_system_message():
    for content in ("be brief", [{"type": "text", "text": "be brief"}]):
        first, second = with_tools_described([{"role": "system", "content": content}, HELLO], check_tools(TOOLS))
        text = first["content"] if isinstance(content, str) else "".join(part["text"] for part in first["content"])
        assert text.startswith("be brief\n\n# Tools")
        assert second == HELLO
        listed = text.partition("<tools>\n")[2].partition("\n</tools>")[0].splitlines()
        assert [json.loads(line) for line in listed] == check_tools(TOOLS)
    [added, _] = with_tools_described([HELLO], check_tools(TOOLS))
    assert (added["role"], added["content"]) == ("system", text.removeprefix("be brief\n\n"))


def test_a_conversation_without_calls_stays_as_it_is():
    conversation = [
        {"role": "system", "content": "s"},
        HELLO,
        {"role": "assistant", "content": [{"type": "text", "text": "a"}]},
    ]
    assert tool_turns_as_text(conversation) == conversation
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{"}}
    [said] = tool_turns_as_text([conversation[2] | {"tool_calls": [call], "reasoning": "hm"}])
    assert said == {
        "role": "assistant",
        "reasoning": "hm",
        "content": 'a\n<tool_call>\n{"name": "f", "arguments": {}\n</tool_call>',
    }


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_engine_takes_another_template_and_refuses_what_it_does_not_read(bare, num_workers):
    config = EngineConfig(num_workers=num_workers, num_pages=50, chat_template=TEMPLATE)
    with Engine.load(bare, device="cpu", config=config) as engine:
        [named, plain] = engine.generate([[HELLO | {"name": "bob"}], [HELLO]], {"max_tokens": 1})
        assert named.num_prompt_tokens == plain.num_prompt_tokens + len(" bob")
        [refused] = engine.generate([HELLO | {"weight": 1}], {"max_tokens": 1})
        assert refused.failure.message == "messages[0]: unknown key weight. A message has role and content"


def test_a_template_that_cannot_be_used_is_refused_before_anything_starts(command, checkpoint, tmp_path):
    files = {
        "missing.jinja": None,
        "latin.jinja": "é".encode("latin-1"),
        "broken.jinja": b"{% for message in messages %}{{ message.content }}",
        "config.json": b'{"model_type": "qwen2_5_vl"}',
    }
    words = {
        "missing.jinja": "No such file",
        "latin.jinja": "not UTF-8",
        "broken.jinja": "does not parse",
        "config.json": "does not write the text of a message",
    }
    for name, content in files.items():
        if content is not None:
            (tmp_path / name).write_bytes(content)
        ended = command("serve", checkpoint, "--chat-template", tmp_path / name)
        assert (ended.status, ended.err.count("\n")) == (2, 1), ended.err
        assert str(tmp_path / name) in ended.err
        assert words[name] in ended.err
    ended = command("serve", checkpoint, "--tool-call-format", "xml")
    assert (ended.status, ended.err.count("\n")) == (2, 1), ended.err
    assert "use hermes or none" in ended.err
