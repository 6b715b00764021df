"""LangChain's ChatOpenAI: messages, streams, structured output and tools, and what it makes of answers is sent back."""

from typing import Literal

import pydantic
from checks import IMAGE, KEY, MODEL, URL, run
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


def model(**fields):
    return ChatOpenAI(model=MODEL, base_url=URL, api_key=KEY, max_retries=0, **{"max_tokens": 200} | fields)


class Sum(pydantic.BaseModel, extra="forbid"):
    """Two numbers."""

    a: Literal[1, 2]
    b: Literal[3, 4]


@tool
def add(a: Literal[1, 2], b: Literal[3, 4]) -> int:
    """Adds two numbers."""
    return a + b


def check_an_image():
    content = [{"type": "text", "text": "what is it"}, {"type": "image_url", "image_url": {"url": IMAGE}}]
    assert model(max_tokens=4).invoke([SystemMessage("be brief"), HumanMessage(content)]).usage_metadata["input_tokens"]


def check_a_streamed_answer_is_sent_back():
    greedy = model(max_tokens=12, temperature=0)
    whole = greedy.invoke("hello")
    streamed = None
    for chunk in greedy.stream("hello", stream_usage=True):
        streamed = chunk if streamed is None else streamed + chunk
    assert streamed.content == whole.content
    for message in (whole, streamed):
        greedy.invoke([HumanMessage("hello", name="alice"), message, HumanMessage("more")])


def check_structured_output_by_schema_and_by_call():
    for method in ("json_schema", "function_calling"):
        found = model().with_structured_output(Sum, method=method, include_raw=True).invoke("hello")
        assert isinstance(found["parsed"], Sum), found
        model(max_tokens=4).invoke(
            [HumanMessage("hello"), found["raw"], *results_of(found["raw"]), HumanMessage("more")]
        )


def results_of(message):
    return [ToolMessage("5", tool_call_id=call["id"], name=call["name"]) for call in message.tool_calls]


def check_tool_calls_are_sent_back():
    required = model().bind_tools([add], tool_choice="required", strict=True, parallel_tool_calls=False)
    streamed = None
    for chunk in required.stream("hello"):
        streamed = chunk if streamed is None else streamed + chunk
    for said in (required.invoke("hello"), streamed):
        assert said.tool_calls
        results = [add.invoke(call) for call in said.tool_calls]
        assert all(isinstance(result, ToolMessage) for result in results)
        answer = model(max_tokens=4).bind_tools([add]).invoke([HumanMessage("hello"), said, *results])
        assert isinstance(answer, AIMessage)


def check_a_named_tool_is_called():
    said = model().bind_tools([add], tool_choice="add", strict=True, parallel_tool_calls=False).invoke("hello")
    assert [call["name"] for call in said.tool_calls] == ["add"]


def check_reasoning_of_another_model_is_dropped():
    said = AIMessage(
        "yes", additional_kwargs={"reasoning_content": "hm"}, response_metadata={"x": 1}, id="a", name="bob"
    )
    model(max_tokens=4).invoke([HumanMessage("hello"), said, HumanMessage("more")])


def check_a_batch():
    assert len(model(max_tokens=4).batch(["one", "two", "three"])) == 3


def check_the_responses_api():
    modern = model(max_tokens=16, use_responses_api=True)
    said = modern.invoke("hello")
    modern.invoke([HumanMessage("hello"), said, HumanMessage("more")])


async def check_asynchronous_streams():
    assert [chunk async for chunk in model(max_tokens=4).astream("hello")]


run(dict(globals()))
