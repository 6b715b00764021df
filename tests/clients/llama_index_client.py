"""LlamaIndex's OpenAILike: messages, streams, structured output and tools, and what it makes of answers is sent
back."""

from typing import Literal

import pydantic
from checks import KEY, MODEL, URL, png, run
from llama_index.core.llms import ChatMessage, ImageBlock, TextBlock
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike


def model(**fields):
    given = {
        "model": MODEL,
        "api_base": URL,
        "api_key": KEY,
        "is_chat_model": True,
        "context_window": 4096,
        "max_retries": 0,
    }
    return OpenAILike(**given | {"is_function_calling_model": True, "max_tokens": 200} | fields)


class Sum(pydantic.BaseModel, extra="forbid"):
    """Two numbers."""

    a: Literal[1, 2]
    b: Literal[3, 4]


def add(a: Literal[1, 2], b: Literal[3, 4]) -> int:
    """Adds two numbers."""
    return a + b


ADD = FunctionTool.from_defaults(add, fn_schema=Sum)
HELLO = ChatMessage(role="user", content="hello")


def check_an_image():
    content = [TextBlock(text="what is it"), ImageBlock(image=png(), image_mimetype="image/png")]
    assert model(max_tokens=4).chat([ChatMessage(role="user", blocks=content)]).message.content is not None


def check_a_streamed_answer_is_sent_back():
    greedy = model(max_tokens=12, temperature=0)
    whole = greedy.chat([ChatMessage(role="system", content="be brief"), HELLO]).message
    *_, streamed = greedy.stream_chat([ChatMessage(role="system", content="be brief"), HELLO])
    assert streamed.message.content == whole.content
    for message in (whole, streamed.message):
        greedy.chat([HELLO, message, HELLO])


def check_tool_calls_are_sent_back():
    calling = model()
    *_, streamed = calling.stream_chat_with_tools([ADD], user_msg="hello", tool_required=True)
    for said in (calling.chat_with_tools([ADD], user_msg="hello", tool_required=True), streamed):
        calls = calling.get_tool_calls_from_response(said)
        assert {call.tool_name for call in calls} == {"add"}
        results = [
            ChatMessage(
                role="tool",
                content=str(ADD(**call.tool_kwargs)),
                additional_kwargs={"tool_call_id": call.tool_id, "name": call.tool_name},
            )
            for call in calls
        ]
        model(max_tokens=4).chat_with_tools([ADD], chat_history=[HELLO, said.message, *results])


def check_structured_output():
    for fields in ({}, {"should_use_structured_outputs": True}):
        found = model(**fields).structured_predict(Sum, PromptTemplate("Two numbers, please."))
        assert isinstance(found, Sum)


def check_text_completion():
    assert model(is_chat_model=False, max_tokens=4).complete("hello").text is not None


async def check_asynchronous_streams():
    stream = await model(max_tokens=4).astream_chat([HELLO])
    assert [chunk async for chunk in stream]


run(dict(globals()))
