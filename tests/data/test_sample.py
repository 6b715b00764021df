"""Every form of text becomes the conversation a person would write; what cannot be learned from says why."""

import json

import pytest
from data.making import make_jpeg, make_png, make_sample
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.data.sample import (
    Sample,
    TextRules,
    conversations,
    description,
    image_names,
    images,
    preference_pair,
    split_name,
    texts,
)
from saccade.errors import ConfigError, DataError
from saccade.model.initialize import initialize_random, named_size
from saccade.processor import Processor

RULES = TextRules()
repeatable = settings(deadline=None, derandomize=True, max_examples=300)


def image(number):
    return {"type": "image", "image": make_jpeg(96, 64, number)}


def text(words):
    return {"type": "text", "text": words}


def talk(fields, num_images=1, rules=RULES):
    return conversations(make_sample("k", num_images=num_images, fields=fields, text="unused"), rules)


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("0001.jpg", ("0001", "jpg")),
        ("./train/0001.0.JPG", ("train/0001", "0.jpg")),
        ("a.b/c.txt", ("a.b/c", "txt")),
        ("README", None),
        (".DS_Store", None),
        ("a/._0001.jpg", None),
        ("a.", None),
    ],
)
def test_a_member_is_cut_at_the_first_dot_of_its_file_name(name, parts):
    assert split_name(name) == parts


def test_images_come_in_the_order_of_the_tar_and_numbered_ones_by_number():
    assert image_names(["txt", "png", "jpg", "json"]) == ["png", "jpg"]
    assert image_names(["0.jpg", "1.jpg", "10.jpg", "2.png", "json"]) == ["0.jpg", "1.jpg", "2.png", "10.jpg"]
    sample = Sample("k", "s", {f"{number}.jpg": bytes([number]) for number in (0, 1, 10, 11, 2)})
    assert images(sample) == [b"\0", b"\1", b"\2", b"\n", b"\v"]


def test_a_caption_answers_the_prompt_after_the_image():
    (conversation,) = conversations(make_sample("k", text=" a boat \n"), RULES)
    assert conversation == [
        {"role": "user", "content": [image(0), text("Describe the image.")]},
        {"role": "assistant", "content": "a boat"},
    ]


@pytest.mark.parametrize(
    "members",
    [
        {"txt": b"a boat"},
        {"txt": "\ufeffa boat".encode()},
        {"json": b'{"caption": "a boat"}'},
        {"json": b'{"text": "a boat"}'},
        {"txt": b"  ", "json": b'{"caption": null, "text": "a boat"}'},
        {"cls": b"a boat"},
        {"json": b'{"captions": ["", "a boat", " "]}', "txt": b"not this"},
    ],
)
def test_plain_text_is_found_in_every_form(members):
    sample = Sample("k", "s", {"jpg": make_jpeg()} | members)
    (conversation,) = conversations(sample, RULES)
    assert conversation[-1] == {"role": "assistant", "content": "a boat"}
    assert texts(sample) == ["a boat"]


def test_text_without_an_image_has_its_own_prompt():
    (conversation,) = conversations(Sample("k", "s", {"txt": b"Once upon a time"}), TextRules(text_prompt="Tell."))
    assert conversation == [{"role": "user", "content": "Tell."}, {"role": "assistant", "content": "Once upon a time"}]


def test_each_caption_is_a_variant_with_the_same_images():
    variants = talk({"captions": ["one", "two", "three"]}, num_images=2)
    assert [variant[1]["content"] for variant in variants] == ["one", "two", "three"]
    assert all(variant[0]["content"] == [image(0), image(1), text("Describe the image.")] for variant in variants)


def test_questions_are_one_conversation_of_several_turns():
    asked = [{"question": "What?", "answer": "A cat.", "id": 3}, {"question": "Where?", "answer": "Here."}]
    (conversation,) = talk({"questions": asked})
    assert conversation == [
        {"role": "user", "content": [image(0), text("What?")]},
        {"role": "assistant", "content": "A cat."},
        {"role": "user", "content": "Where?"},
        {"role": "assistant", "content": "Here."},
    ]


def test_llava_marks_are_bound_to_images_in_order_and_their_line_breaks_are_dropped():
    turns = [
        {"from": "human", "value": "<image>\nCompare with\n<image>\nplease"},
        {"from": "gpt", "value": "The same."},
        {"from": "human", "value": "And this? <image>"},
        {"from": "gpt", "value": "Other."},
    ]
    (conversation,) = talk({"conversations": turns}, num_images=3)
    assert conversation[0]["content"] == [image(0), text("Compare with"), image(1), text("please")]
    assert conversation[2]["content"] == [text("And this? "), image(2)]
    assert [message["role"] for message in conversation] == ["user", "assistant"] * 2


def test_openai_messages_keep_their_order_and_image_parts_are_marks():
    messages = [
        {"role": "system", "content": "Be brief."},
        {
            "role": "user",
            "content": [text("First"), {"type": "image"}, text("then"), {"type": "image_url", "image_url": "x"}],
        },
        {"role": "assistant", "content": [text("Yes.")]},
    ]
    (conversation,) = talk({"messages": messages}, 2, TextRules(system_prompt="Not needed."))
    assert conversation == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [text("First"), image(0), text("then"), image(1)]},
        {"role": "assistant", "content": "Yes."},
    ]


def test_without_marks_images_go_before_the_first_users_text():
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": "A"},
    ]
    (conversation,) = talk({"messages": messages}, num_images=2)
    assert conversation[1]["content"] == [image(0), image(1), text("Q")]


def test_a_system_prompt_precedes_conversations_without_one():
    (conversation,) = talk({"captions": ["c"]}, rules=TextRules(system_prompt="Be kind."))
    assert conversation[0] == {"role": "system", "content": "Be kind."}
    with pytest.raises(ConfigError, match="caption_prompt contains <image>"):
        TextRules(caption_prompt="<image>")


ASK, SAY = {"role": "user", "content": "<image>"}, {"role": "assistant", "content": "A"}


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"jpg": b"x"}, "no text"),
        ({"txt": b" \n"}, "no text"),
        ({"txt": b"\xff\xfe"}, "txt member is not UTF-8"),
        ({"json": b"{"}, "json member cannot be read"),
        ({"json": b"[" * 100000}, "json member cannot be read"),
        ({"json": b"[1]"}, "json member is a list"),
        ({"json": b'{"caption": "\\ud800"}'}, "half of a surrogate pair"),
        ({"json": b'{"captions": "one"}'}, "captions is not a list of texts"),
        ({"json": b'{"questions": [{"question": "Q"}]}'}, r"questions\[0\].answer is not a text"),
        ({"json": b'{"messages": {"role": "user"}}'}, "messages is not a list of objects"),
        ({"json": json.dumps({"messages": [ASK, SAY]}).encode()}, "1 <image> marks and 0 images"),
        (
            {"json": json.dumps({"messages": [ASK, SAY]}).encode(), "0.jpg": b"", "1.jpg": b""},
            "1 <image> marks and 2 images",
        ),
        ({"json": json.dumps({"messages": [ASK]}).encode(), "jpg": b""}, "no assistant turn"),
        ({"json": json.dumps({"messages": [SAY]}).encode(), "jpg": b""}, "no user turn"),
        ({"json": b'{"messages": [{"role": "tool", "content": "x"}]}'}, "role is 'tool'"),
        ({"json": b'{"messages": [{"role": ["user"], "content": "x"}]}'}, "role is"),
        ({"json": b'{"messages": [{"role": "user", "content": null}]}'}, "content is NoneType"),
        ({"json": b'{"messages": [{"role": "user", "content": [{"type": "audio"}]}]}'}, "part of type 'audio'"),
    ],
)
def test_what_cannot_be_trained_on_says_which_sample_and_why(members, message):
    with pytest.raises(DataError, match=f"sample k of s: .*{message}"):
        conversations(Sample("k", "s", members), RULES)


def test_whole_surrogate_pairs_are_text():
    assert texts(Sample("k", "s", {"json": b'{"caption": "\\ud83d\\ude00"}'})) == ["\U0001f600"]


def test_fields_of_a_sample_without_json_are_none():
    assert description(Sample("k", "s", {"txt": b"x"})) == {}


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(max_size=8)
    | st.sampled_from(["<image>", "user", "gpt", "text"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from("role from content value type text question answer image".split()),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@repeatable
@given(
    fields=st.dictionaries(
        st.sampled_from(["messages", "conversations", "questions", "captions", "caption", "text"]), json_values
    )
)
def test_any_json_gives_conversations_with_every_image_once_or_a_data_error(fields):
    sample = Sample("k", "s", {"jpg": b"J", "png": b"P", "json": json.dumps(fields).encode(), "txt": b"t"})
    try:
        variants = conversations(sample, RULES)
    except DataError:
        return
    for messages in variants:
        parts = [part for message in messages if isinstance(message["content"], list) for part in message["content"]]
        assert [part["image"] for part in parts if part["type"] == "image"] == [b"J", b"P"]
        assert any(message["role"] == "assistant" for message in messages)


def test_the_processor_takes_conversations_as_they_are(tmp_path):
    initialize_random(tmp_path / "checkpoint", named_size("tiny"))
    processor = Processor.load(tmp_path / "checkpoint")
    turns = [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "A boat."}]
    samples = [
        make_sample("a", num_images=2),
        make_sample("b", members={"png": make_png(), "txt": b"a boat"}),
        make_sample("c", members={"txt": b"only words"}),
        make_sample("d", fields={"conversations": turns}),
    ]
    every = [variant for sample in samples for variant in conversations(sample, RULES)]
    inputs = processor(every, add_generation_prompt=False)
    assert len(inputs.image_grids) == 4
    assert len(inputs.cu_seqlens) == 5


# ------------------------------------------------------------------ preference pairs


def user(*parts):
    return {"role": "user", "content": list(parts) if len(parts) > 1 else parts[0]}


def assistant(words):
    return {"role": "assistant", "content": words}


ASKED = user(image(0), text("What is it?"))


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "What is it?", "chosen": "A cup.", "rejected": "A dog."},
        {"prompt": "<image>What is it?", "chosen": [assistant("A cup.")], "rejected": [assistant("A dog.")]},
        {"messages": [user("What is it?")], "chosen": "A cup.", "rejected": [assistant("A dog.")]},
        {"chosen": [user("What is it?"), assistant("A cup.")], "rejected": [user("What is it?"), assistant("A dog.")]},
    ],
)
def test_every_form_of_a_preference_pair_is_two_conversations_with_the_image(fields):
    sample = make_sample("k", num_images=1, fields=fields)
    chosen, rejected = preference_pair(sample, RULES)
    assert chosen == [ASKED, assistant("A cup.")]
    assert rejected == [ASKED, assistant("A dog.")]
    assert conversations(sample, RULES) == [chosen]


def test_a_pair_without_a_prompt_answers_the_prompt_of_the_rules():
    sample = make_sample("k", num_images=1, fields={"chosen": "A cup.", "rejected": "A dog."})
    assert preference_pair(sample, RULES)[1] == [user(image(0), text("Describe the image.")), assistant("A dog.")]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"caption": "A cup."}, "no preference pair"),
        ({"chosen": "A cup."}, "no preference pair"),
        ({"chosen": "A cup.", "rejected": "A cup."}, "are equal"),
        ({"chosen": "A cup.", "rejected": "  "}, "rejected has no text"),
        ({"chosen": [user("Hm?")], "rejected": "A dog."}, "no assistant turn"),
    ],
)
def test_a_sample_that_is_no_pair_says_why(fields, words):
    with pytest.raises(DataError, match=words):
        preference_pair(make_sample("k", num_images=1, fields=fields), RULES)
