"""LiteLLM: its messages are sent back as it makes them, also those it adds fields to."""

import json
import os
from typing import Literal

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would fetch a table of prices

import litellm
import pydantic
from checks import ADD, IMAGE, KEY, MODEL, SCHEMA, URL, run

litellm.suppress_debug_info = True
HELLO = {"role": "user", "content": "hello"}


class Sum(pydantic.BaseModel, extra="forbid"):
    a: Literal[1, 2]
    b: Literal[3, 4]


def ask(*messages, **fields):
    given = {"model": f"openai/{MODEL}", "api_base": URL, "api_key": KEY, "max_tokens": 4, "num_retries": 0}
    return litellm.completion(messages=[HELLO, *messages], **given | fields)


def check_an_image():
    image = {"type": "image_url", "image_url": {"url": IMAGE}}
    assert ask({"role": "user", "content": [{"type": "text", "text": "what is it"}, image]}).choices[0].message.content


def check_an_answer_is_sent_back():
    message = ask().choices[0].message
    ask(message, HELLO)
    ask(message.model_dump(), HELLO)
    ask(json.loads(message.model_dump_json()), HELLO)


def check_a_streamed_answer_is_sent_back():
    whole = ask(temperature=0, max_tokens=12).choices[0].message.content
    chunks = list(ask(temperature=0, max_tokens=12, stream=True, stream_options={"include_usage": True}))
    message = litellm.stream_chunk_builder(chunks, messages=[HELLO]).choices[0].message
    assert message.content == whole
    ask(message.model_dump(), HELLO)


def check_tool_calls_are_sent_back():
    for streams in (False, True):
        answer = ask(tools=[ADD], tool_choice="required", parallel_tool_calls=False, max_tokens=200, stream=streams)
        if streams:
            answer = litellm.stream_chunk_builder(list(answer), messages=[HELLO])
        message = answer.choices[0].message
        assert all(set(json.loads(call.function.arguments)) == set(SCHEMA["required"]) for call in message.tool_calls)
        results = [
            {"role": "tool", "tool_call_id": call.id, "name": call.function.name, "content": "5"}
            for call in message.tool_calls
        ]
        ask(message, *results, tools=[ADD])
        ask(message.model_dump(), *results, tools=[ADD])


def check_thinking_of_another_model_is_dropped():
    thought = {
        "role": "assistant", "content": "yes", "reasoning_content": "hm", "images": [],
        "provider_specific_fields": {"a": 1},
        "thinking_blocks": [{"type": "thinking", "thinking": "hm", "signature": "x"}],
    }  # fmt: skip
    ask(thought, HELLO)


def check_structured_output():
    form = {"type": "json_schema", "json_schema": {"name": "sum", "schema": SCHEMA, "strict": True}}
    for wanted in (form, Sum):
        answer = ask(response_format=wanted, max_tokens=200)
        found = json.loads(answer.choices[0].message.content)
        assert set(found) == {"a", "b"}


def check_text_completion():
    found = litellm.text_completion(
        model=f"text-completion-openai/{MODEL}", prompt="hello", api_base=URL, api_key=KEY, max_tokens=4
    )
    assert found.choices[0].text is not None


def check_a_prompt_that_is_too_long_has_its_own_class():
    try:
        ask({"role": "user", "content": "x" * 9000})
    except litellm.ContextWindowExceededError:
        return
    raise AssertionError("it is not refused")


async def check_the_asynchronous_client():
    answer = await litellm.acompletion(
        model=f"openai/{MODEL}", messages=[HELLO], api_base=URL, api_key=KEY, max_tokens=4, metadata={"a": "b"}
    )
    assert answer.usage.completion_tokens


run(dict(globals()))
