"""The official client of OpenAI's API against a running server."""

import json
from typing import Literal

import openai
import pydantic
import pytest
from model.hugging_face import picture
from serve.running import TIMEOUT_S, data_url, image_part

SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue"]}, "count": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["colour", "count"],
    "additionalProperties": False,
}
LOOK = [{"role": "user", "content": [{"type": "text", "text": "look"}, image_part()]}]
HELLO = [{"role": "user", "content": "hello"}]
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"enum": [1, 2]}, "b": {"enum": [3, 4]}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S) as client:
        yield client


def test_models_are_listed(client):
    [model] = client.models.list().data
    assert client.models.retrieve("tiny") == model
    assert model.id == "tiny"
    with pytest.raises(openai.NotFoundError, match="not served here"):
        client.models.retrieve("gpt-7")


def test_chat_with_an_image_streamed_and_not(client):
    fields = {"model": "tiny", "messages": LOOK, "max_completion_tokens": 12, "temperature": 0}
    answer = client.chat.completions.create(**fields)
    chunks = list(client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == answer.choices[0].message.content
    assert answer.usage.prompt_tokens == chunks[-1].usage.prompt_tokens > 6
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens > 0
    assert {chunk.id for chunk in chunks} == {chunks[0].id}


def test_a_json_schema_is_followed(client):
    form = {"type": "json_schema", "json_schema": {"name": "things", "schema": SCHEMA, "strict": True}}
    answer = client.chat.completions.create(model="tiny", messages=HELLO, response_format=form, seed=3)
    found = json.loads(answer.choices[0].message.content)
    assert set(found) == {"colour", "count"}
    assert answer.choices[0].finish_reason == "stop"


def test_log_probabilities_have_the_bytes_of_the_text(client):
    fields = {"model": "tiny", "messages": HELLO, "max_tokens": 9, "temperature": 0}
    answer = client.chat.completions.create(**fields, logprobs=True, top_logprobs=3)
    content = answer.choices[0].logprobs.content
    said = b"".join(bytes(token.bytes) for token in content if token.bytes is not None)
    assert said.decode(errors="replace") == answer.choices[0].message.content
    assert all(len(token.top_logprobs) == 3 and token.logprob <= 0 for token in content)
    assert all(token.top_logprobs[0].logprob >= token.logprob for token in content)
    chunks = client.chat.completions.create(**fields, logprobs=True, top_logprobs=3, stream=True)
    streamed = [token for chunk in chunks if chunk.choices[0].logprobs for token in chunk.choices[0].logprobs.content]
    assert [token.token for token in streamed] == [token.token for token in content]


def test_two_completions_differ_when_sampled_and_are_equal_when_greedy(client):
    sampled = client.chat.completions.create(model="tiny", messages=HELLO, n=2, max_tokens=16, seed=1)
    again = client.chat.completions.create(model="tiny", messages=HELLO, n=2, max_tokens=16, seed=1)
    greedy = client.chat.completions.create(model="tiny", messages=HELLO, n=2, max_tokens=16, temperature=0)
    texts = [[choice.message.content for choice in answer.choices] for answer in (sampled, again, greedy)]
    assert texts[0] == texts[1]
    assert texts[0][0] != texts[0][1]
    assert texts[2][0] == texts[2][1]
    assert sampled.usage.completion_tokens <= 32


def test_a_required_tool_is_called_and_its_result_is_accepted(client):
    fields = {"model": "tiny", "messages": HELLO, "tools": [ADD], "tool_choice": "required", "seed": 5}
    fields["parallel_tool_calls"] = False
    answer = client.chat.completions.create(**fields).choices[0]
    [call] = answer.message.tool_calls
    assert (answer.finish_reason, answer.message.content, call.function.name) == ("tool_calls", None, "add")
    assert set(json.loads(call.function.arguments)) == {"a", "b"}
    chunks = list(client.chat.completions.create(**fields, stream=True))
    deltas = [delta for chunk in chunks for delta in chunk.choices[0].delta.tool_calls or ()]
    assert (deltas[0].function.name, deltas[0].type, deltas[0].id is not None) == ("add", "function", True)
    assert "".join(delta.function.arguments for delta in deltas) == call.function.arguments
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    result = {"role": "tool", "tool_call_id": call.id, "content": "5"}
    messages = [*HELLO, answer.message.model_dump(), result]
    assert client.chat.completions.create(model="tiny", messages=messages, max_tokens=2).choices


class Sum(pydantic.BaseModel):
    """Adds."""

    a: Literal[1, 2]
    b: Literal[3, 4]


PARSED = {"model": "tiny", "messages": HELLO, "seed": 5, "max_tokens": 200}


def answer_to(client, *messages, **fields):
    """Return the answer to the conversation after these messages, which are sent as they are."""
    said = client.chat.completions.create(model="tiny", messages=[*HELLO, *messages], max_tokens=2, **fields)
    assert said.choices[0].finish_reason in ("stop", "length")
    return said


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # the client adds it to a message that it has parsed
def test_parsed_messages_can_be_sent_back_as_they_are(client):
    more = {"role": "user", "content": "and now?", "name": "alice"}
    whole = client.chat.completions.parse(**PARSED, response_format=Sum).choices[0].message
    with client.chat.completions.stream(**PARSED, response_format=Sum) as stream:
        streamed = stream.get_final_completion().choices[0].message
    assert whole.parsed == streamed.parsed
    plain = client.chat.completions.create(**PARSED).choices[0].message
    for message in (whole, streamed, plain):
        answer_to(client, message, more)
        answer_to(client, message.model_dump(), more)
    alone = {"role": "assistant", "content": whole.content}
    assert answer_to(client, whole, more).usage.prompt_tokens == answer_to(client, alone, more).usage.prompt_tokens


def test_parsed_tool_calls_can_be_sent_back_as_they_are(client):
    tools = {"tools": [openai.pydantic_function_tool(Sum)], "tool_choice": "required", "parallel_tool_calls": False}
    whole = client.chat.completions.parse(**PARSED, **tools).choices[0].message
    with client.chat.completions.stream(**PARSED, **tools) as stream:
        streamed = stream.get_final_completion().choices[0].message
    for message in (whole, streamed):
        [call] = message.tool_calls
        assert isinstance(call.function.parsed_arguments, Sum)
        result = {"role": "tool", "tool_call_id": call.id, "content": "5", "name": "Sum"}
        answer_to(client, message, result)
        answer_to(client, message.model_dump(), result)
    assert whole.tool_calls[0].function == streamed.tool_calls[0].function


def test_fields_of_other_libraries_in_earlier_messages_change_nothing(client):
    said = {"role": "assistant", "content": "yes"}
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    called = said | {"tool_calls": [call]}
    more = {"role": "user", "content": "more"}
    expected = answer_to(client, said, more).usage.prompt_tokens
    for fields in (
        {"tool_calls": []},
        {"reasoning_content": "hm", "reasoning": "hm", "refusal": None, "annotations": [{"type": "url_citation"}]},
        {"provider_specific_fields": {"a": 1}, "thinking_blocks": [{"thinking": "hm"}], "images": [], "name": "bob"},
        {"function_call": None, "audio": None, "tool_calls": None, "parsed": {"a": [1]}},
    ):
        assert answer_to(client, said | fields, more).usage.prompt_tokens == expected, fields
    expected = answer_to(client, called, more).usage.prompt_tokens
    extra = {"index": 0, "provider_specific_fields": None, "function": call["function"] | {"parsed_arguments": {}}}
    assert answer_to(client, said | {"tool_calls": [call | extra]}, more).usage.prompt_tokens == expected
    for field in ("function_call", "audio"):
        with pytest.raises(openai.BadRequestError, match=rf"messages\[1\]\.{field} is not supported"):
            answer_to(client, said | {field: {"name": "f", "arguments": "{}", "id": "a"}}, more)


def test_fields_that_change_nothing_in_the_answer_are_accepted(client):
    fields = {
        "metadata": {"user": "7"},
        "store": True,
        "safety_identifier": "u-7",
        "prompt_cache_key": "k",
        "prompt_cache_retention": "24h",
        "extra_body": {"prompt_cache_options": {"mode": "implicit"}},
    }
    plain = client.chat.completions.create(model="tiny", messages=HELLO, temperature=0, max_tokens=6)
    for tier in ("auto", "default", "flex", "scale", "priority", "fast"):
        one = client.chat.completions.create(
            model="tiny", messages=HELLO, temperature=0, max_tokens=6, service_tier=tier, **fields
        )
        assert one.choices == plain.choices
    low = [{"role": "user", "content": [image_part() | {"image_url": image_part()["image_url"] | {"detail": "low"}}]}]
    assert client.chat.completions.create(model="tiny", messages=low, max_tokens=1).choices
    options = {"include_obfuscation": False}
    assert list(
        client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=2, stream=True, stream_options=options)
    )
    said = client.responses.create(
        model="tiny", input="hi", max_output_tokens=16, service_tier="flex", store=True, metadata={"a": "b"}
    )
    assert (said.store, said.metadata) == (False, {"a": "b"})
    with pytest.raises(openai.BadRequestError, match="metadata has too many entries"):
        answer_to(client, metadata={str(number): "" for number in range(17)})


def test_a_parsed_response_can_be_sent_back_as_it_is(client):
    said = client.responses.parse(model="tiny", input="hello", text_format=Sum)
    assert isinstance(said.output_parsed, Sum)
    question = {"role": "user", "content": "hello"}
    client.responses.create(model="tiny", input=[question, *said.output, question], max_output_tokens=16)
    dumped = [one.model_dump() for one in said.output]
    client.responses.create(model="tiny", input=[question, *dumped, question], max_output_tokens=16)


def test_a_stream_that_is_left_is_cancelled(client, server):
    stream = client.chat.completions.create(
        model="tiny", messages=HELLO, stream=True, max_tokens=700, extra_body={"ignore_eos": True}
    )
    assert next(iter(stream)).choices
    stream.close()
    assert client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=2).choices
    server.wait_for_log("ending cancelled")


def test_completions_of_text_and_of_tokens(client, server):
    answer = client.completions.create(model="tiny", prompt=["ab", "cd"], max_tokens=4, temperature=0, n=2, logprobs=1)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.choices[0].text == answer.choices[1].text
    assert answer.usage.prompt_tokens == 4
    assert len(answer.choices[0].logprobs.tokens) <= 4
    tokens = server.http.post("/tokenize", json={"prompt": "ab"}).json()
    again = client.completions.create(model="tiny", prompt=tokens["tokens"], max_tokens=4, temperature=0)
    assert again.choices[0].text == answer.choices[0].text
    streamed = client.completions.create(model="tiny", prompt="ab", max_tokens=4, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == answer.choices[0].text
    assert server.http.post("/detokenize", json={"tokens": tokens["tokens"]}).json() == {"prompt": "ab"}


def test_responses_of_text_and_images_streamed_and_not(client):
    question = {
        "role": "user",
        "content": [
            {"type": "input_text", "text": "what is it"},
            {"type": "input_image", "image_url": data_url(picture(56, 56, 1)), "detail": "auto"},
        ],
    }
    fields = {
        "model": "tiny",
        "input": [question],
        "instructions": "Be brief.",
        "max_output_tokens": 10,
        "temperature": 0,
    }
    answer = client.responses.create(**fields)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.usage.output_tokens == 10
    events = list(client.responses.create(**fields, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == answer.output_text
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.output_text == answer.output_text
    more = {"role": "user", "content": "and now?"}
    schema = {"type": "json_schema", "name": "things", "schema": SCHEMA}
    later = client.responses.create(model="tiny", input=[question, *answer.output, more], text={"format": schema})
    assert set(json.loads(later.output_text)) == {"colour", "count"}
    assert later.status == "completed"


def test_errors_are_the_clients_classes(client):
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="tiny", messages=HELLO, reasoning_effort="high")
    assert (refused.value.code, refused.value.param) == ("unsupported_parameter", "reasoning_effort")
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-7", messages=HELLO)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="maximum context length is 800") as too_long:
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x" * 900}])
    assert too_long.value.code == "context_length_exceeded"
