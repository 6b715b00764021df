"""Malformed messages are refused with their path; templates may read further keys."""

import numpy as np
import pytest
from hypothesis import given
from PIL import Image
from processor.messages import (
    PICTURE,
    assistant,
    control_names,
    image_part,
    repeatable,
    text_part,
    tricky_text,
    user,
    whole_text,
    with_template,
)

from saccade.errors import RequestError
from saccade.processor.chat_template import ChatTemplate


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "a conversation is a non-empty list of messages"),
        ("hello", "a conversation is a non-empty list of messages"),
        ({"role": "user", "content": "hi"}, "a conversation is a non-empty list of messages"),
        (["hi"], "messages[0]: a message has role and content"),
        ([None], "messages[0]: a message has role and content"),
        ([{"role": "user"}], "messages[0]: a message has role and content"),
        ([{"content": "hi"}], "messages[0]: a message has role and content"),
        ([user("a"), {"role": "user", "content": "b", "weight": "x", "id": 1}], "messages[1]: unknown key id, weight"),
        ([user("a") | {3: 4}], "messages[0]: unknown key 3"),
        ([{"role": "robot", "content": "a"}], "messages[0].role is 'robot'. Use one of system, user, assistant, tool"),
        ([{"role": "tool", "content": "a", "name": 3}], "messages[0].name must be a string"),
        (
            [{"role": "assistant", "content": "", "tool_calls": []}],
            "messages[0].tool_calls is []; use a list of 1 to 128 calls",
        ),
        ([{"role": ["user"], "content": "a"}], "messages[0].role is ['user']"),
        ([user(None)], "messages[0].content is NoneType, not text or a list of parts"),
        ([user(b"bytes")], "messages[0].content is bytes, not text or a list of parts"),
        ([user({"type": "text", "text": "a"})], "messages[0].content is dict, not text or a list of parts"),
        ([user(7)], "messages[0].content is int"),
        ([user(["a"])], "messages[0].content[0] is str, not a part with a type"),
        ([user([text_part("a"), None])], "messages[0].content[1] is NoneType, not a part with a type"),
        ([user([{"text": "a"}])], "messages[0].content[0].type is None. Use text, image_url, image, video_url, video"),
        ([user([{"type": "audio"}])], "messages[0].content[0].type is 'audio'"),
        ([user([{"type": ["text"]}])], "messages[0].content[0].type is ['text']"),
        ([user([{"type": "text"}])], "messages[0].content[0].text must be a string"),
        ([user([{"type": "text", "text": 5}])], "messages[0].content[0].text must be a string"),
        ([user([{"type": "image"}])], "messages[0].content[0].image: image placeholder without an image"),
        ([user([{"type": "image", "image": ""}])], "messages[0].content[0].image: image placeholder without an image"),
        ([user([{"type": "image", "image": b""}])], "image placeholder without an image. Give it, or remove the part"),
        ([user([{"type": "image", "image": []}])], "messages[0].content[0].image: image placeholder without an image"),
        ([user([{"type": "image_url"}])], "messages[0].content[0].image_url: image placeholder without an image"),
        ([user([{"type": "image_url", "image_url": {}}])], "messages[0].content[0].image_url: image placeholder"),
        ([user([{"type": "image_url", "image_url": {"url": ""}}])], "messages[0].content[0].image_url: image"),
        (
            [user("a"), user([text_part("b"), {"type": "video"}])],
            "messages[1].content[1].video: video placeholder without frames",
        ),
        ([user([{"type": "video", "video": []}])], "messages[0].content[0].video: video placeholder without frames"),
        (
            [user([{"type": "video", "video": 5}])],
            "messages[0].content[0].video is int. Use a video file (path, bytes, data URL)",
        ),
        (
            [user([{"type": "image", "image": np.zeros((4, 4, 3))}])],
            "messages[0].content[0].image: an image array is float64 [4, 4, 3]; use uint8",
        ),
        ([user([{"type": "image", "image": np.zeros((4, 4, 2), np.uint8)}])], "an image array is uint8 [4, 4, 2]"),
        ([user([{"type": "image", "image": np.zeros((0, 4, 3), np.uint8)}])], "an image array is uint8 [0, 4, 3]"),
        *(
            ([user([{"type": "video", "video": [PICTURE], "fps": fps}])], f"messages[0].content[0].fps is {fps!r}")
            for fps in (0, -1, 1e-9, 1e-300, 0.009, "2", True, None, float("nan"), float("inf"), 1001)
        ),
    ],
    ids=lambda value: repr(value)[:60] if isinstance(value, str) else "",
)  # fmt: skip
def test_malformed_messages_are_refused_with_their_path(processor, messages, words):
    with pytest.raises(RequestError) as caught:
        processor.preprocess(messages)
    assert words in str(caught.value)


THINKING = (
    "{%- macro why(message) %}{% if 'thought' in message %}<think>{{ message['thought'] }}</think>{% endif %}{% "
    "endmacro %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ why(message) }}{{ message.get('tags', "
    "[])|tojson }}"
    "{% for call in message.tool_calls %}{{ call.index }}{{ call.function.note|tojson }}{% endfor %}"
    "{{ message.content }}<|im_end|>\n{% endfor %}"
)


def test_a_template_names_what_it_reads():
    names = ChatTemplate(THINKING).names
    assert {"thought", "tags", "index", "note", "content", "tool_calls"} <= names
    assert not {"why", "weight", "<think>", "<|im_start|>"} & names, "neither its own names nor its text"


def test_keys_that_the_template_reads_are_part_of_the_prompt_and_others_are_refused(processor):
    thinking = with_template(processor, THINKING)
    call = {"index": 7, "function": {"name": "f", "arguments": "{}", "note": {"a": [1]}}}
    said = assistant("x") | {"thought": "because", "tags": ["a", {"b": None}], "tool_calls": [call]}
    text = thinking.tokenizer.decode(thinking.tokenize([user("hi"), said]), skip_special=False)
    assert text.endswith('assistant\n<think>because</think>["a", {"b": null}]7{"a": [1]}x<|im_end|>\n')
    for wrong, words in [
        (said | {"weight": 1}, "messages[0]: unknown key weight"),
        (said | {"tool_calls": [call | {"weight": 1}]}, "messages[0].tool_calls[0]: unknown key weight"),
        (
            said | {"tool_calls": [{"function": call["function"] | {"weight": 1}}]},
            "tool_calls[0].function: unknown key weight",
        ),
        (user("x") | {"tool_calls": [call]}, "messages[0]: unknown key tool_calls"),
        (said | {"thought": "x" * 300_000}, "messages[0] has 300"),
        (said | {"tags": object()}, "messages[0] is not JSON"),
        (said | {"tags": "\ud800"}, "messages[0] is not valid Unicode"),
    ]:  # fmt: skip
        with pytest.raises(RequestError) as caught:
            thinking.tokenize([wrong])
        assert words in str(caught.value)


@repeatable
@given(tricky_text, tricky_text)
def test_text_of_such_keys_never_becomes_a_control_token(processor, text, other):
    thinking = with_template(processor, THINKING)
    call = {"index": other, "function": {"name": "f", "arguments": "{}", "note": {text: other}}}
    said = assistant("x") | {"thought": text, "tags": [other, {text: other}], "tool_calls": [call]}
    inputs = thinking.preprocess([user("hi"), said], add_generation_prompt=True)
    assert control_names(processor, inputs) == ["<|im_start|>", "<|im_end|>"] * 2
    assert f"<think>{text}</think>" in whole_text(processor, inputs)


@pytest.mark.parametrize("messages", [5, None, 2.5, True], ids=repr)
def test_what_is_no_list_of_messages_is_refused(processor, messages):
    with pytest.raises(RequestError, match="list of messages"):
        processor.preprocess(messages)
    with pytest.raises(RequestError, match="list of "):
        processor([messages])


@pytest.mark.parametrize("conversations", [[], None, "hi", {}, [user("hi")], ["hi"], 5], ids=repr)
def test_what_is_no_list_of_conversations_is_refused(processor, conversations):
    with pytest.raises(
        RequestError, match=r"list of conversations, each a list of messages: processor\(\[messages\]\)"
    ):
        processor(conversations)


@pytest.mark.parametrize(
    "part",
    [
        text_part("a") | {"cache_control": {"type": "ephemeral"}},
        image_part() | {"max_pixels": 1000},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,aaaa", "detail": "low"}},
        {"type": "video", "video": [PICTURE], "num_frames": 3},
    ],
    ids=["text", "image", "image_url", "video"],
)
def test_a_key_of_a_part_that_we_do_not_honour_is_refused(processor, part):
    with pytest.raises(RequestError, match=r"messages\[0\]\.content\[0\].*(unknown key|only auto)"):
        processor.preprocess([user([part])])


def test_errors_of_images_say_which_image_it_was(processor):
    with pytest.raises(RequestError, match=r"image 2: /no/such.png: No such file"):
        processor.preprocess([user([image_part(), image_part("/no/such.png")])])
    with pytest.raises(RequestError, match=r"video 1: .*not NoneType"):
        processor.preprocess([user([{"type": "video", "video": [PICTURE, None]}])])
    frames = [PICTURE, Image.new("RGB", (84, 56))]
    with pytest.raises(RequestError, match="video 1: the frames have different sizes: 56x56, 84x56"):
        processor.preprocess([user([{"type": "video", "video": frames}])])
    with pytest.raises(
        RequestError, match=r"video 1: 769 frames, over the limit of 768 per request. Sample fewer frames"
    ):
        processor.preprocess([user([{"type": "video", "video": [PICTURE] * 769}])])
