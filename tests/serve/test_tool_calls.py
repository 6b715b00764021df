"""Tool calls are found in the output however it is split; everything else stays content."""

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from saccade.processor.chat_template import ChatTemplate
from saccade.serve.tool_calls import (
    ContentDelta,
    ParsedOutput,
    ToolCallDelta,
    ToolCallParser,
    has_known_format,
    knows_tools,
    merged,
    parse_tool_calls,
)

NAMES = {"add", "look"}


def call(name="add", arguments='{"a": 1, "b": 2}'):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def parsed(pieces):
    parser, output = ToolCallParser(NAMES), ParsedOutput()
    for piece in pieces:
        output.add(parser.push(piece))
    output.add(parser.finish())
    return output.content, [(one.name, one.arguments) for one in output.tool_calls]


ADD = ("add", '{"a": 1, "b": 2}')
CASES = {
    "text": ("hello", ("hello", [])),
    "nothing": ("", ("", [])),
    "text with space": (" a \n b \n\n", (" a \n b \n\n", [])),
    "a call": (call(), ("", [ADD])),
    "two calls": (call() + "\n" + call("look", "{}"), ("", [ADD, ("look", "{}")])),
    "text and a call": ("Let me see.\n\n" + call() + "\n", ("Let me see.", [ADD])),
    "text after a call": (call() + "\nDone.", ("\nDone.", [ADD])),
    "no white space": ('<tool_call>{"name":"add","arguments":{"a":1}}</tool_call>', ("", [("add", '{"a":1}')])),
    "another order": (
        '<tool_call>{"arguments": {"a": "ü"}, "name": "add"}</tool_call>',
        ("", [("add", '{"a": "ü"}')]),
    ),
    "parameters": ('<tool_call>{"name": "add", "parameters": {"a": 1}}</tool_call>', ("", [("add", '{"a": 1}')])),
    "no arguments": ('<tool_call>{"name": "add"}</tool_call>', ("", [("add", "{}")])),
    "arguments as text": (call(arguments=json.dumps('{"a": 1}')), ("", [("add", '{"a": 1}')])),
    "nested arguments": (
        call(arguments='{"a": {"b": [{"c": "}"}]}, "d": "\\"}"}'),
        ("", [("add", '{"a": {"b": [{"c": "}"}]}, "d": "\\"}"}')]),
    ),
    "a tag in a string": (
        call(arguments='{"a": "</tool_call><tool_call>"}'),
        ("", [("add", '{"a": "</tool_call><tool_call>"}')]),
    ),
    "no end": (call()[: -len("\n</tool_call>")], ("", [ADD])),
    "no end, another order": ('<tool_call>{"arguments": {}, "name": "add"}', ("", [("add", "{}")])),
    "cut in the arguments": (
        call()[:45],
        ("", [("add", call()[len('<tool_call>\n{"name": "add", "arguments": ') : 45])]),
    ),
    "a missing brace": (call(arguments='{"a": 1')[:-14] + "</tool_call>ok", ("ok", [("add", '{"a": 1')])),
    "two without an end between": (call()[: -len("</tool_call>")] + call("look"), ("", [ADD, ("look", ADD[1])])),
    "an unknown function": ("so " + call("rm") + " ok", ("so " + call("rm") + " ok", [])),
    "not JSON": ("<tool_call>add(1, 2)</tool_call>", ("<tool_call>add(1, 2)</tool_call>", [])),
    "not an object": ("<tool_call>[1]</tool_call>", ("<tool_call>[1]</tool_call>", [])),
    "half a header": ('a <tool_call>{"name": "ad', ('a <tool_call>{"name": "ad', [])),
    "a nested block": ("<tool_call>" * 3, ("<tool_call>" * 3, [])),
    "deep": ("<tool_call>" + "[" * 9999, ("<tool_call>" + "[" * 9999, [])),
    "half a tag": ("a < b <tool_cal", ("a < b <tool_cal", [])),
    "the wrong tag": ("</tool_call> <tool_call", ("</tool_call> <tool_call", [])),
    "an end tag in the name": ('<tool_call>{"name": "</tool_call>', ('<tool_call>{"name": "</tool_call>', [])),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("size", [1, 2, 7, 10**6])
def test_content_and_calls_are_told_apart(name, size):
    text, expected = CASES[name]
    assert parsed([text[at : at + size] for at in range(0, len(text), size)]) == expected


FRAGMENTS = st.sampled_from([
    "<tool_call>", "</tool_call>", "\n", " ", "{", "}", '"', "\\", '"name"', ":", '"add"', ",", '"arguments"', "[", "]",
    "<", "é", "x",
    '{"name": "add", "arguments": ', '{"name": "rm", "arguments": ', '{"a": 1}', call(), call("rm"),
])  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(st.lists(FRAGMENTS, max_size=14).map("".join), st.lists(st.integers(1, 12), min_size=1, max_size=30))
@example('<tool_call>{"name": "add", "arguments": {</tool_call', [3])
@example('<tool_call>{"name": "add", "arguments": {"\\', [1])
def test_any_cut_of_a_text_gives_the_same_result(text, sizes):
    pieces, at = [], 0
    while at < len(text):
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(text[at : at + size])
        at += size
    assert parsed(pieces) == parsed([text])


@settings(max_examples=200, deadline=None)
@given(st.text(st.sampled_from("<tool_cal>/ \n{}ab"), max_size=40).filter(lambda text: "<tool_call>" not in text))
def test_text_without_a_call_comes_back_unchanged(text):
    assert parsed(text) == (text, [])


SCALARS = st.none() | st.booleans() | st.floats(allow_nan=False) | st.text(max_size=5)


def nested(values):
    return st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=5), values, max_size=3)


@settings(max_examples=100, deadline=None)
@given(st.recursive(SCALARS, nested, max_leaves=8))
def test_any_arguments_come_back_as_they_were_written(value):
    text = json.dumps({"value": value}, ensure_ascii=False)
    assert parsed(call("look", text)) == ("", [("look", text)])


def test_a_call_begins_with_its_name_and_its_arguments_stream():
    parser = ToolCallParser(NAMES, make_id=lambda: "call_x")
    deltas = [delta for character in "Hm.\n" + call() for delta in parser.push(character)]
    assert all(isinstance(delta, ContentDelta) for delta in deltas[:3])
    first, *others = deltas[3:]
    assert (first.index, first.id, first.name, first.arguments) == (0, "call_x", "add", "")
    assert [delta.arguments for delta in others] == list('{"a": 1, "b": 2}')
    assert all((delta.index, delta.id, delta.name) == (0, None, None) for delta in others)
    assert parser.finish() == []


def test_ids_of_calls_are_unique():
    calls = parse_tool_calls(call() * 50, NAMES).tool_calls
    assert len({one.id for one in calls}) == 50
    assert all(one.id.startswith("call_") for one in calls)


def test_a_long_output_takes_linear_time():
    text = "<tool_call>" + "x" * 50_000
    assert parsed(text[at : at + 4] for at in range(0, len(text), 4)) == (text, [])


def test_the_format_is_known_from_the_template():
    assert has_known_format("... <tool_call>\n{{ ... }}")
    assert not has_known_format("no tools")
    assert not has_known_format("<tool_call>\n<function=name>")


def test_deltas_of_a_call_that_arrive_together_are_one():
    first, more, second = ToolCallDelta(0, "{", "a", "f"), ToolCallDelta(0, "}"), ToolCallDelta(1, "", "b", "g")
    assert merged([first, more, second, ToolCallDelta(1, "{"), ToolCallDelta(1, "}")]) == [
        ToolCallDelta(0, "{}", "a", "f"),
        ToolCallDelta(1, "{}", "b", "g"),
    ]
    assert merged([more, more]) == [ToolCallDelta(0, "}}")]
    assert merged([]) == []


def test_the_operator_may_say_how_the_model_calls_tools():
    hermes = ChatTemplate("{{ tools }}{{ messages[0].content }} as <tool_call>")
    xml = ChatTemplate("{{ tools }}{{ messages[0].content }} as <tool_call><function=")
    silent = ChatTemplate("{{ messages[0].content }} <tool_call>")
    parts = ChatTemplate("{{ tools }}{% for part in messages[0].content %}{{ part.text }}{% endfor %}<tool_call>")
    assert [knows_tools(one, None) for one in (hermes, xml, silent, parts)] == [True, False, False, True]
    assert [knows_tools(one, "hermes") for one in (hermes, xml, silent)] == [True, True, False]
    assert not any(knows_tools(one, "none") for one in (hermes, xml, silent))
