"""Tools over HTTP: which functions the model may, must or must not call, streamed and not."""

import asyncio
import json

import openai
import pytest
from serve.running import TIMEOUT_S

from saccade.engine import Engine, EngineConfig, SamplingParams
from saccade.serve.tool_choice import choose_tools

HELLO = [{"role": "user", "content": "hello"}]


def tool(name, values, **fields):
    schema = {"type": "object", "properties": {"x": {"enum": values}}, "required": ["x"], "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "parameters": schema, **fields}}


TOOLS = [tool("add", [1, 2]), tool("look", ["a", "b"])]
LOOK = {"type": "function", "function": {"name": "look"}}


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S) as client:
        yield client


def ask(client, **fields):
    return client.chat.completions.create(
        model="tiny", messages=HELLO, **{"tools": TOOLS, "seed": 3, "max_tokens": 200} | fields
    )


def test_a_named_function_is_called_by_every_completion(client):
    answer = ask(client, tool_choice=LOOK, n=2)
    calls = [choice.message.tool_calls for choice in answer.choices]
    assert [len(one) for one in calls] == [1, 1]
    assert {one[0].function.name for one in calls} == {"look"}
    assert all(json.loads(one[0].function.arguments)["x"] in ("a", "b") for one in calls)
    assert {choice.finish_reason for choice in answer.choices} == {"tool_calls"}
    streamed = {0: "", 1: ""}
    for chunk in ask(client, tool_choice=LOOK, n=2, stream=True):
        for choice in chunk.choices:
            for delta in choice.delta.tool_calls or ():
                streamed[choice.index] += delta.function.arguments
    assert streamed == {index: one[0].function.arguments for index, one in enumerate(calls)}


def test_without_a_choice_or_with_none_the_output_is_text(client):
    for choice in ({}, {"tool_choice": "none"}, {"tool_choice": "auto"}):
        answer = ask(client, max_tokens=5, temperature=0, **choice).choices[0]
        assert answer.message.tool_calls is None
        assert answer.message.content is not None
    with_tools = ask(client, max_tokens=1, temperature=0).usage.prompt_tokens
    assert with_tools > ask(client, max_tokens=1, temperature=0, tool_choice="none").usage.prompt_tokens + 50


def test_the_name_of_a_streamed_call_comes_first_and_once(client):
    deltas = [
        delta
        for chunk in ask(client, tool_choice="required", parallel_tool_calls=False, stream=True)
        for delta in chunk.choices[0].delta.tool_calls or ()
    ]
    assert deltas[0].function.name in ("add", "look")
    assert deltas[0].id.startswith("call_")
    assert all((delta.index, delta.id, delta.function.name) == (0, None, None) for delta in deltas[1:])
    assert set(json.loads("".join(delta.function.arguments for delta in deltas))) == {"x"}


def test_a_chunk_has_each_call_once(client):
    """Clients keep the last of two entries with one index, or the first."""
    for fields in ({"parallel_tool_calls": False}, {"max_tokens": 300}):
        for chunk in ask(client, tool_choice="required", stream=True, **fields):
            indices = [delta.index for delta in chunk.choices[0].delta.tool_calls or ()]
            assert len(set(indices)) == len(indices)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "rm"}}}, "'rm', which is not in tools"),
        ({"tools": openai.omit, "tool_choice": "required"}, "tool_choice is set but tools is not"),
        ({"tools": [TOOLS[0]] * 2}, "tools has the function add twice"),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "leave out response_format"),
    ],
)
def test_what_cannot_be_chosen_is_refused_by_name(client, fields, said):
    with pytest.raises(openai.BadRequestError, match=said):
        ask(client, **fields)


def test_the_python_api_takes_tools_too(checkpoint):
    choice = choose_tools(TOOLS, LOOK)
    sampling = SamplingParams(max_tokens=100, structured=choice.structured)

    async def streamed(engine):
        return [delta async for delta in engine.stream(HELLO, sampling, tools=TOOLS)][-1].completion

    with Engine.load(checkpoint, device="cpu", config=EngineConfig(num_workers=0, num_pages=100)) as engine:
        [completion] = engine.generate(HELLO, sampling, tools=TOOLS)
        assert completion.text.startswith('<tool_call>\n{"name": "look", "arguments": {')
        assert asyncio.run(streamed(engine)).text == completion.text
        assert completion.num_prompt_tokens > engine.generate(HELLO, {"max_tokens": 1})[0].num_prompt_tokens + 50
