"""A refused request names the wrong field, also if the field may have several types."""

import pytest

CHAT, COMPLETIONS, RESPONSES, TOKENIZE = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize"
BODIES = {
    CHAT: {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1},
    COMPLETIONS: {"model": "tiny", "prompt": "hi", "max_tokens": 1},
    RESPONSES: {"model": "tiny", "input": "hi", "max_output_tokens": 1},
    TOKENIZE: {},
    "/detokenize": {},
}
TEXT_OR_LIST = "must be a string or a list"


def message(**fields):
    return {"messages": [{"role": "user", **fields}]}


def said(**fields):
    return {"messages": [{"role": "assistant", **fields}]}


CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CASES = [
    (TOKENIZE, {"messages": 5}, "messages must be a list"),
    (TOKENIZE, {"messages": []}, "messages has too few entries; at least 1 are needed"),
    (TOKENIZE, {"messages": [{"role": "user", "content": 5}]}, f"messages[0].content {TEXT_OR_LIST}"),
    (TOKENIZE, {"messages": [{"role": "user", "content": "x"}], "foo": 1}, "foo is not a field of this request"),
    (TOKENIZE, {"prompt": 5}, "prompt must be a string"),
    (TOKENIZE, {"prompt": "x", "foo": 1}, "foo is not a field of this request"),
    (TOKENIZE, {}, "the body must have prompt or messages, one of them"),
    (TOKENIZE, {"foo": 1}, "the body must have prompt or messages, one of them"),
    (TOKENIZE, {"prompt": "x", "messages": []}, "the body must have prompt or messages, one of them"),
    (CHAT, {"stop": 5}, f"stop {TEXT_OR_LIST}"),
    (CHAT, {"stop": {}}, f"stop {TEXT_OR_LIST}"),
    (CHAT, {"stop": {"str": 1}}, f"stop {TEXT_OR_LIST}"),
    (CHAT, {"stop": ""}, "stop must have at least 1 characters"),
    (CHAT, {"stop": ["a", 5]}, "stop[1] must be a string"),
    (CHAT, {"stop": ["a", ""]}, "stop[1] must have at least 1 characters"),
    (CHAT, {"stop": ["a"] * 17}, "stop has too many entries; at most 16 are allowed"),
    (CHAT, message(content=5), f"messages[0].content {TEXT_OR_LIST}"),
    (CHAT, message(content={}), f"messages[0].content {TEXT_OR_LIST}"),
    (CHAT, message(content={"str": {}, "text": 1}), f"messages[0].content {TEXT_OR_LIST}"),
    (CHAT, message(content=None), f"messages[0].content {TEXT_OR_LIST}"),
    (CHAT, message(), "messages[0].content is required"),
    (CHAT, message(user={"content": 3}, content=5), f"messages[0].content {TEXT_OR_LIST}"),
    (CHAT, message(content=[5]), "messages[0].content[0] must be an object"),
    (CHAT, message(content=["a"]), "messages[0].content[0] must be an object"),
    (CHAT, message(content=[{}]), "messages[0].content[0] has no 'type'"),
    (CHAT, message(content=[{"type": "text", "text": {"text": 5}}]), "messages[0].content[0].text must be a string"),
    (CHAT, message(content=[{"type": "text"}]), "messages[0].content[0].text is required"),
    (CHAT, message(content=[{"type": "image_url", "image_url": {"image_url": 5}}]),
        "messages[0].content[0].image_url.url is required"),
    (CHAT, message(content=[{"type": "image_url", "image_url": "data:"}]),
        "messages[0].content[0].image_url must be an object"),
    (CHAT, message(content=[{"type": "video", "video": 5}]), "messages[0].content[0].video must be a list"),
    (CHAT, said(content=5), f"messages[0].content {TEXT_OR_LIST}"),
    (CHAT, said(content=[{"type": "text", "text": 5}]), "messages[0].content[0].text must be a string"),
    (CHAT, said(content=[5]), "messages[0].content[0] must be an object"),
    (CHAT, said(tool_calls=5), "messages[0].tool_calls must be a list"),
    (CHAT, said(tool_calls=[CALL, CALL | {"function": 5}]), "messages[0].tool_calls[1].function must be an object"),
    (CHAT, said(content="", audio={"audio": 1}), "messages[0].audio is not supported; leave it out"),
    (CHAT, {"messages": [{"role": 5}]},
        "messages[0] has 'role' 5; use one of 'system', 'developer', 'user', 'assistant', 'tool'"),
    (CHAT, {"tool_choice": 5}, "tool_choice must be 'none', 'auto' or 'required', or an object"),
    (CHAT, {"tool_choice": "foo"}, "tool_choice must be 'none', 'auto' or 'required', or an object"),
    (CHAT, {"tool_choice": {"type": "function"}}, "tool_choice.function is required"),
    (CHAT, {"tool_choice": {"type": "auto", "function": {"name": "f"}}}, "tool_choice.type must be 'function'"),
    (CHAT, {"tool_choice": {"type": "function", "function": {"name": 5}}},
        "tool_choice.function.name must be a string"),
    (CHAT, {"tools": [{"type": "function", "function": {"name": 5}}]}, "tools[0].function.name must be a string"),
    (CHAT, {"structured_outputs": {"json": 5}}, "structured_outputs.json must be an object or a string"),
    (CHAT, {"structured_outputs": {"json": []}}, "structured_outputs.json must be an object or a string"),
    (CHAT, {"response_format": 5}, "response_format must be an object"),
    (CHAT, {"response_format": {"type": "json_schema"}}, "response_format.json_schema is required"),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": 5}}},
        "response_format.json_schema.schema must be an object"),
    (CHAT, {"logit_bias": {"a": 1}}, "logit_bias.a has characters that are not allowed, or too many"),
    (CHAT, {"logit_bias": {"1": "x"}}, "logit_bias.1 must be a number"),
    (CHAT, {"metadata": {"a": 5}}, "metadata.a must be a string"),
    (COMPLETIONS, {"prompt": 5}, f"prompt {TEXT_OR_LIST}"),
    (COMPLETIONS, {"prompt": ""}, "prompt must have at least 1 characters"),
    (COMPLETIONS, {"prompt": []}, "prompt has too few entries; at least 1 are needed"),
    (COMPLETIONS, {"prompt": ["a", 5]}, "prompt[1] must be a string"),
    (COMPLETIONS, {"prompt": ["a", ""]}, "prompt[1] must have at least 1 characters"),
    (COMPLETIONS, {"prompt": [1, "a"]}, "prompt[1] must be an integer"),
    (COMPLETIONS, {"prompt": [-1]}, "prompt[0] must be at least 0"),
    (COMPLETIONS, {"prompt": [None]}, "prompt[0] must be a string, an integer or a list"),
    (COMPLETIONS, {"prompt": [[1, "a"]]}, "prompt[0][1] must be an integer"),
    (COMPLETIONS, {"prompt": [[1], []]}, "prompt[1] has too few entries; at least 1 are needed"),
    (COMPLETIONS, {"prompt": ["a"] * 200}, "prompt has too many entries; at most 128 are allowed"),
    (COMPLETIONS, {"echo": 5}, "echo must be true or false"),
    (RESPONSES, {"input": 5}, f"input {TEXT_OR_LIST}"),
    (RESPONSES, {"input": []}, "input has too few entries; at least 1 are needed"),
    (RESPONSES, {"input": [5]}, "input[0] must be an object"),
    (RESPONSES, {"input": [{"role": "user", "content": 5}]}, f"input[0].content {TEXT_OR_LIST}"),
    (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_text", "text": 5}]}]},
        "input[0].content[0].text must be a string"),
    (RESPONSES, {"input": [{"role": "assistant", "content": [5]}]}, "input[0].content[0] must be an object"),
    (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema is required"),
    (RESPONSES, {"background": True}, "background must be false or left out"),
    ("/detokenize", {"tokens": "a"}, "tokens must be a list"),
    ("/detokenize", {"tokens": ["a"]}, "tokens[0] must be an integer"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "fields", "expected"), CASES, ids=range(len(CASES)))
def test_the_field_that_is_wrong_is_named_with_what_it_may_be(server, path, fields, expected):
    answer = server.http.post(path, json=BODIES[path] | fields)
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, expected)
    param = answer.json()["error"]["param"]
    assert expected.startswith("the body" if param is None else f"{param} ")
