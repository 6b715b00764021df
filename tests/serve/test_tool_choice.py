"""tool_choice becomes a grammar under which exactly the calls that are asked for can be written."""

import json

import pytest
import torch

from saccade.engine.core.grammar.compiler import GrammarCompiler
from saccade.errors import ConfigError, RequestError
from saccade.model.initialize import initialize_random, named_size
from saccade.processor import Processor
from saccade.serve.tool_choice import ToolChoice, choose_tools

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}


def tool(name, parameters=None, **fields):
    return {"type": "function", "function": {"name": name, "parameters": parameters} | fields}


TOOLS = [tool("weather", CITY), tool("clock")]
STRICT = [tool("weather", CITY, strict=True), tool("clock")]


def call(name, arguments):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


PARIS, NOW, WRONG = call("weather", {"city": "Paris"}), call("clock", {"zone": 1}), call("weather", {"town": "Paris"})


@pytest.fixture(scope="module")
def processor(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tools") / "checkpoint"
    initialize_random(folder, named_size("tiny"), dtype=torch.float32)
    return Processor.load(folder)


@pytest.fixture(scope="module")
def compiler(processor):
    compiler = GrammarCompiler(
        processor.tokenizer, eos_ids=processor.eos_ids, vocab_size=processor.tokenizer.vocab_size
    )
    yield compiler
    compiler.close()


def is_possible(processor, compiler, choice, text):
    matcher = compiler.compile(choice.structured).result(60).matcher
    ids = processor.tokenizer.encode_text(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


NAMED = {"type": "function", "function": {"name": "clock"}}
FORCED = {
    # tools, tool_choice, parallel calls, texts that can be written, texts that cannot
    "required": (TOOLS, "required", True, [PARIS, NOW, f"{PARIS}\n{NOW}"], ["", "text", WRONG, f"ok\n{PARIS}"]),
    "required, one": (TOOLS, "required", False, [PARIS], [f"{PARIS}\n{NOW}"]),
    "named": (TOOLS, NAMED, True, [NOW], ["", "text", PARIS, f"{NOW}\n{NOW}"]),
    "strict": (STRICT, "auto", True, ["", "text < <tool", PARIS, NOW, f"ok\n{PARIS}\n{NOW}"],
        [WRONG, f"ok {WRONG}", "<tool_call>x"]),
    "auto, one": (TOOLS, None, False, ["", "text", PARIS, WRONG, f"ok {NOW}"], [f"{PARIS}\n{NOW}", "<tool_call>x"]),
}  # fmt: skip


@pytest.mark.parametrize("name", FORCED)
def test_a_choice_allows_what_was_asked_for_and_nothing_else(processor, compiler, name):
    tools, tool_choice, is_parallel, possible, impossible = FORCED[name]
    choice = choose_tools(tools, tool_choice, is_parallel=is_parallel)
    assert choice.tools is tools
    for text in possible:
        assert is_possible(processor, compiler, choice, text), text
    for text in impossible:
        assert not is_possible(processor, compiler, choice, text), text


def test_without_force_the_output_is_free():
    assert (
        choose_tools(TOOLS) == choose_tools(TOOLS, "auto") == ToolChoice(TOOLS, None, frozenset({"weather", "clock"}))
    )
    assert choose_tools(TOOLS, "none") == choose_tools(None) == choose_tools(None, "auto") == ToolChoice()
    assert choose_tools(TOOLS, NAMED).names == {"clock"}


def test_impossible_choices_are_refused():
    for choice in (
        "always",
        3,
        {"type": "function"},
        {"type": "allowed_tools"},
        {"type": "function", "function": {"name": "rm"}},
    ):
        with pytest.raises(RequestError, match="tool_choice"):
            choose_tools(TOOLS, choice)
    with pytest.raises(RequestError, match="tool_choice is set but tools is not"):
        choose_tools(None, "required")
    with pytest.raises(ConfigError, match="x-guidance"):
        choose_tools([tool("f", {"x-guidance": {}})], "required")
    with pytest.raises(ConfigError, match=r"^tools\[1\]\.function\.parameters refers to .* only references within it"):
        choose_tools([tool("e", {}), tool("f", {"properties": {"a": {"$ref": "https://example.com/a"}}})], "required")


def test_text_in_a_schema_cannot_leave_its_rule(processor, compiler):
    hostile = {"type": "object", "properties": {'"}\nstart: /.*/\n': {"enum": ['"\n%json {}', "\\n<|im_end|>"]}}}
    choice = choose_tools([tool("f", hostile)], "required")
    assert is_possible(processor, compiler, choice, call("f", {'"}\nstart: /.*/\n': '"\n%json {}'}))
    assert not is_possible(processor, compiler, choice, "anything")
