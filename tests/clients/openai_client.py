"""OpenAI's Python client: what it returns is sent back as it is."""

import warnings
from typing import Literal

import openai
import pydantic
from checks import ADD, IMAGE, KEY, MODEL, URL, run

warnings.filterwarnings("ignore", "Pydantic serializer warnings")  # its own, of messages that it has parsed
client = openai.OpenAI(base_url=URL, api_key=KEY, max_retries=0)
HELLO = {"role": "user", "content": "hello"}


class Sum(pydantic.BaseModel):
    """Adds."""

    a: Literal[1, 2]
    b: Literal[3, 4]


def ask(*messages, **fields):
    return client.chat.completions.create(model=MODEL, messages=[HELLO, *messages], **{"max_tokens": 4} | fields)


def check_models_are_listed():
    assert [model.id for model in client.models.list()] == [MODEL]


def check_an_image_at_low_detail():
    image = {"type": "image_url", "image_url": {"url": IMAGE, "detail": "low"}}
    assert ask({"role": "user", "content": [{"type": "text", "text": "what is it"}, image]}).choices[0].message.content


def check_a_stream_is_the_whole_answer():
    whole = ask(temperature=0, max_tokens=12).choices[0].message.content
    chunks = list(ask(temperature=0, max_tokens=12, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == whole
    assert chunks[-1].usage.completion_tokens == 12
    ask({"role": "assistant", "content": whole}, HELLO)


def check_a_parsed_answer_is_sent_back():
    fields = {"model": MODEL, "messages": [HELLO], "response_format": Sum}
    message = client.chat.completions.parse(**fields).choices[0].message
    assert isinstance(message.parsed, Sum)
    ask(message, HELLO)
    ask(message.model_dump(), HELLO)
    with client.chat.completions.stream(**fields) as stream:
        ask(stream.get_final_completion().choices[0].message.model_dump(warnings=False), HELLO)


def check_parsed_tool_calls_are_sent_back():
    tools = {"tools": [openai.pydantic_function_tool(Sum)], "tool_choice": "required", "parallel_tool_calls": False}
    with client.chat.completions.stream(model=MODEL, messages=[HELLO], **tools) as stream:
        streamed = stream.get_final_completion().choices[0].message
    for message in (client.chat.completions.parse(model=MODEL, messages=[HELLO], **tools).choices[0].message, streamed):
        assert all(isinstance(call.function.parsed_arguments, Sum) for call in message.tool_calls)
        results = [{"role": "tool", "tool_call_id": call.id, "content": "5"} for call in message.tool_calls]
        ask(message, *results, tools=[ADD])
        ask(message.model_dump(), *results, tools=[ADD])


def check_fields_that_change_nothing_are_accepted():
    ask(metadata={"a": "b"}, store=True, service_tier="flex", safety_identifier="x", prompt_cache_key="y")


def check_a_parsed_response_is_sent_back():
    said = client.responses.parse(model=MODEL, input=[HELLO], text_format=Sum)
    assert isinstance(said.output_parsed, Sum)
    again = client.responses.create(model=MODEL, input=[HELLO, *said.output, HELLO], max_output_tokens=16, store=True)
    assert again.output_text is not None


def check_errors_have_the_clients_classes():
    for fields, error in (({"model": "gpt-7"}, openai.NotFoundError), ({"max_tokens": 0}, openai.BadRequestError)):
        try:
            ask(**fields) if "model" not in fields else client.chat.completions.create(messages=[HELLO], **fields)
        except error:
            continue
        raise AssertionError(f"{fields} is not refused")


async def check_the_asynchronous_client():
    async with openai.AsyncOpenAI(base_url=URL, api_key=KEY) as many:
        stream = await many.chat.completions.create(model=MODEL, messages=[HELLO], max_tokens=4, stream=True)
        assert [chunk async for chunk in stream]


run(dict(globals()))
