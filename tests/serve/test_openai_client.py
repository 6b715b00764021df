"""The official client of OpenAI's API against a running server."""

import json

import openai
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
