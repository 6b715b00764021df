"""`/v1/chat/completions`: the answers of the engine, over HTTP."""

import pytest
from serve.running import image_part

from saccade.engine import Engine, EngineConfig, SamplingParams

PROMPTS = [
    "hello",
    [image_part(), {"type": "text", "text": "what is it"}],
    [{"type": "text", "text": "two"}, image_part(56, 56, 2), image_part(28, 84, 3)],
]


@pytest.fixture(scope="module")
def expected(checkpoint):
    """Return completions of the engine in this process."""
    config = EngineConfig(num_workers=0, max_length=800, num_pages=200)
    conversations = [[{"role": "user", "content": content}] for content in PROMPTS]
    with Engine.load(checkpoint, device="cpu", config=config) as engine:
        return engine.generate(conversations, SamplingParams(max_tokens=8, ignore_eos=True))


@pytest.mark.parametrize("number", range(len(PROMPTS)))
def test_answers_over_http_are_those_of_the_engine_and_streamed_is_not_streamed(server, expected, number):
    answer = server.chat(PROMPTS[number], ignore_eos=True).json()
    chunks = server.chunks(PROMPTS[number], ignore_eos=True, stream_options={"include_usage": True})
    [choice] = answer["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (expected[number].text, "length")
    assert answer["usage"]["prompt_tokens"] == expected[number].num_prompt_tokens
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks[:-1]) == expected[number].text
    assert chunks[-2]["choices"][0]["finish_reason"] == "length"
    assert chunks[-1]["usage"]["completion_tokens"] == 8
    assert chunks[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_tokens_without_text_are_streamed_as_they_come(server):
    """Clients that measure see the first token when it comes, not at the end."""
    chunks = server.chunks(max_tokens=100, ignore_eos=True, logit_bias={"310": 100})  # this token has no text
    first, *others, last = [chunk["choices"][0] for chunk in chunks]
    assert first["delta"]["role"] == "assistant"
    assert others, "as many as tokens, unless some arrive together; before, all came with the last"
    assert {choice["delta"]["content"] for choice in others} == {""}
    assert last["finish_reason"] == "length"


def test_an_unknown_field_is_refused_by_name(server):
    response = server.chat(foo=1)
    assert response.status_code == 400
    assert response.json()["error"] == {
        "message": "foo is not a field of this request",
        "type": "invalid_request_error",
        "param": "foo",
        "code": "unknown_parameter",
    }


@pytest.mark.parametrize("path", ["/tokenize", "/v1/chat/completions"])
@pytest.mark.parametrize("where", ["content", "tool call", "tool call id"])
def test_text_that_cannot_fit_is_refused_before_it_is_tokenized_wherever_it_is(server, path, where):
    long = "x" * 60_000  # the context has 800 tokens of at most 64 characters
    call = {
        "id": "1",
        "type": "function",
        "function": {"name": long if where == "tool call" else "f", "arguments": "{}"},
    }
    messages = [
        {"role": "user", "content": long if where == "content" else "hi"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": long if where == "tool call id" else "1", "content": "x"},
    ]
    answer = server.http.post(path, json={"model": "tiny", "messages": messages})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert "Shorten it" in answer.json()["error"]["message"]


def test_tokens_of_a_text_are_those_of_the_tokenizer(server, checkpoint):
    from saccade.processor import Processor

    tokenizer = Processor.load(checkpoint).tokenizer
    for text in ("hello <|im_end|> world", "é🙂 " * 50):
        answer = server.http.post("/tokenize", json={"model": "tiny", "prompt": text}).json()
        assert answer["tokens"] == [*tokenizer.prefix_ids, *tokenizer.encode_text(text)]
        back = server.http.post("/detokenize", json={"tokens": answer["tokens"]}).json()
        assert back["prompt"].endswith(text)
    too_many = server.http.post("/detokenize", json={"tokens": [1] * 801})
    assert (too_many.status_code, too_many.json()["error"]["param"]) == (400, "tokens")
