"""Streamed answers equal whole ones in text, tokens, log-probabilities and usage, with stop strings too."""

import pytest
from serve.running import chat_body, events

LOGPROBS = {"chat/completions": {"logprobs": True, "top_logprobs": 2}, "completions": {"logprobs": 2}}


def body_of(route, **fields):
    """Return a body whose text repeats one letter, which is drafted: several tokens come at once."""
    fields = {"max_tokens": 60, "ignore_eos": True, "logit_bias": {"64": 100}, **LOGPROBS[route], **fields}
    body = chat_body("repeat", **fields)
    if route == "completions":
        del body["messages"]
        body["prompt"] = "repeat"
    return body


def stream(server, route, body):
    with server.http.stream("POST", f"/v1/{route}", json=body) as response:
        assert response.status_code == 200, response.read()
        return events(response.iter_lines())


def text_of(choice):
    return choice["text"] if "text" in choice else choice.get("message", choice.get("delta"))["content"]


def entries_of(choice):
    """Return token, log-probability and the remaining fields of each token."""
    logprobs = choice["logprobs"] or {}
    if "content" in logprobs:
        return [(one["token"], one["logprob"], one["bytes"]) for one in logprobs["content"]]
    return list(zip(*(logprobs.get(name, ()) for name in ("tokens", "token_logprobs", "text_offset")), strict=True))


@pytest.mark.parametrize("route", LOGPROBS)
@pytest.mark.parametrize("stop", ["a" * length for length in (1, 9, 10, 11, 12, 13, 14, 15, 16)], ids=len)
def test_streamed_equals_not_streamed_up_to_a_stop_string(server, route, stop):
    whole = server.http.post(f"/v1/{route}", json=body_of(route, stop=stop)).json()
    [choice] = whole["choices"]
    assert (text_of(choice), len(entries_of(choice)), choice["finish_reason"]) == ("", len(stop), "stop")
    options = {"include_usage": True}
    *chunks, last = stream(server, route, body_of(route, stop=stop, stream=True, stream_options=options))
    choices = [one for chunk in chunks for one in chunk["choices"]]
    assert "".join(text_of(one) or "" for one in choices if "text" in one or one["delta"]) == text_of(choice)
    entries = [entry for one in choices for entry in entries_of(one)]
    assert [(token, other) for token, _, other in entries] == [(token, other) for token, _, other in entries_of(choice)]
    assert [one[1] for one in entries] == pytest.approx([one[1] for one in entries_of(choice)], abs=1e-3)
    assert choices[-1]["finish_reason"] == "stop"
    assert last["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"] == len(stop)


@pytest.mark.parametrize("route", LOGPROBS)
def test_usage_that_is_streamed_counts_the_tokens_of_the_answer(server, route):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = stream(server, route, body_of(route, stop="a" * 11, stream=True, stream_options=options))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks if chunk["usage"]]
    assert len(counts) > 1, "with every chunk, not at the end alone"
    assert counts == sorted(counts)
    assert counts[-1] == 11
