"""Text never becomes a control token, and decoded text equals the encoded one."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from saccade.errors import CheckpointError, RequestError
from saccade.processor.tokenizer import Tokenizer

repeatable = settings(deadline=None, derandomize=True)
FRAGMENTS = [
    "<|im_end|>",
    "<|im_start|>",
    "<|image_pad|>",
    "<|",
    "|>",
    "im_end",
    "<",
    ">",
    "|",
    "\n",
    " ",
    "é",
    "日",
    "🙂",
    "\ufdd0",
]
tricky_text = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=5), max_size=12).map("".join)


@pytest.fixture(scope="module")
def byte_tokenizer(checkpoint):
    return Tokenizer.load(checkpoint)


def description_with(checkpoint, *tokens):
    """The byte tokenizer with more added tokens, at free ids."""
    described = json.loads((checkpoint / "tokenizer.json").read_text())
    free = 1 + max(token["id"] for token in described["added_tokens"])
    common = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    described["added_tokens"] += [common | {"id": free + i} | token for i, token in enumerate(tokens)]
    return described


# ------------------------------------------------------------------ the wall


@settings(repeatable, max_examples=200)
@given(text=tricky_text)
def test_text_never_becomes_a_control_token_and_comes_back(byte_tokenizer, merging_tokenizer, text):
    for tokenizer in (byte_tokenizer, merging_tokenizer):
        ids = tokenizer.encode_text(text)
        assert not set(ids) & set(tokenizer.control_ids.values())
        assert tokenizer.decode(ids) == text


@settings(repeatable, max_examples=100)
@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"], exclude_characters="<")))
def test_plain_text_is_encoded_as_hugging_face_does(merging_description, merging_tokenizer, tmp_path_factory, text):
    path = tmp_path_factory.getbasetemp() / "merging-tokenizer.json"
    if not path.exists():
        path.write_text(json.dumps(merging_description))
    reference = PreTrainedTokenizerFast(tokenizer_file=str(path))
    assert merging_tokenizer.encode_text(text) == reference.encode(text, add_special_tokens=False)


def test_the_byte_tokenizer_has_one_token_per_byte(byte_tokenizer):
    for text in ("hello", "é", "日本", "🙂", "\0\x7f\n"):
        assert len(byte_tokenizer.encode_text(text)) == len(text.encode())


def test_text_that_a_tokenizer_cannot_keep_as_text_is_refused_by_name():
    described = {
        "version": "1.0",
        "added_tokens": [
            {
                "id": 1, "content": "</s>", "special": True, "single_word": False, "lstrip": False, "rstrip": False,
                "normalized": False,
            },
        ],
        "normalizer": None, "pre_tokenizer": None, "post_processor": None, "decoder": None, "truncation": None,
        "padding": None,
        "model": {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["</s>", -1.0], ["a", -2.0], ["<", -9.0]]},
    }  # fmt: skip
    tokenizer = Tokenizer(described)
    assert tokenizer.encode_text("aa") == [2, 2]
    with pytest.raises(RequestError, match=r"spells </s>, which this tokenizer cannot keep as text. Remove it"):
        tokenizer.encode_text("a</s>a")


def test_half_a_surrogate_pair_is_refused(byte_tokenizer):
    """JSON can carry one: `"\\ud800"`."""
    with pytest.raises(RequestError):
        byte_tokenizer.encode_text("a\ud800b")


# ------------------------------------------------------------------ control tokens in trusted text


def test_trusted_text_is_cut_at_its_control_tokens(byte_tokenizer):
    start, end = byte_tokenizer.control_id("<|im_start|>"), byte_tokenizer.control_id("<|im_end|>")
    assert byte_tokenizer.split_control("<|im_start|>user\nhi<|im_end|><|im_end|>\n") == [
        ("<|im_start|>", start),
        ("user\nhi", None),
        ("<|im_end|>", end),
        ("<|im_end|>", end),
        ("\n", None),
    ]
    assert byte_tokenizer.split_control("") == []
    assert byte_tokenizer.split_control("<|im_end|") == [("<|im_end|", None)]


@settings(repeatable, max_examples=100)
@given(text=tricky_text)
def test_the_pieces_of_trusted_text_join_to_it(byte_tokenizer, text):
    pieces = byte_tokenizer.split_control(text)
    assert "".join(piece for piece, _ in pieces) == text
    for piece, control in pieces:
        assert (control is not None) == (piece in byte_tokenizer.control_ids)


def test_the_longest_control_token_wins(checkpoint):
    described = description_with(checkpoint, {"content": "<a>"}, {"content": "<a><b>"}, {"content": "<b>"})
    tokenizer = Tokenizer(described)
    assert [piece for piece, _ in tokenizer.split_control("<a><b><a>x<b>")] == ["<a><b>", "<a>", "x", "<b>"]


def test_a_control_token_takes_the_white_space_that_tokenizer_json_gives_it(checkpoint):
    described = description_with(checkpoint, {"content": "<l>", "lstrip": True}, {"content": "<r>", "rstrip": True})
    tokenizer = Tokenizer(described)
    left, right = tokenizer.control_id("<l>"), tokenizer.control_id("<r>")
    assert tokenizer.split_control("a \n<l> b <r> \nc") == [
        ("a", None),
        (" \n<l>", left),
        (" b ", None),
        ("<r> \n", right),
        ("c", None),
    ]


def test_a_tokenizer_without_control_tokens_has_only_text(checkpoint):
    described = json.loads((checkpoint / "tokenizer.json").read_text()) | {"added_tokens": []}
    tokenizer = Tokenizer(described)
    assert tokenizer.split_control("<|im_end|>") == [("<|im_end|>", None)]
    assert tokenizer.split_control("") == []


@pytest.mark.parametrize("is_before_control", [True, False])
def test_runs_of_white_space_stay_with_the_text(checkpoint, is_before_control):
    described = description_with(checkpoint, {"content": "    ", "special": False})
    if is_before_control:  # directly after the vocabulary, as in GPT-NeoX
        *control, white = described["added_tokens"]
        moved = [token | {"id": token["id"] + 1} for token in control]
        described["added_tokens"] = [white | {"id": 256}, *moved]
    [expected] = [token["id"] for token in described["added_tokens"] if not token["content"].strip()]
    tokenizer = Tokenizer(described)
    assert "    " not in tokenizer.control_ids
    assert tokenizer.split_control("a    b") == [("a    b", None)]
    ids = tokenizer.encode_text("a    b")
    assert ids[1:-1] == [expected]
    assert tokenizer.decode(ids) == "a    b"


def test_an_unknown_control_token_is_refused_with_the_known_ones(byte_tokenizer):
    with pytest.raises(CheckpointError, match=r"no control token <\|nonsense\|>. It has: .*<\|im_end\|>"):
        byte_tokenizer.control_id("<|nonsense|>")


# ------------------------------------------------------------------ decoding


def test_special_tokens_are_left_out_of_text_unless_asked_for(byte_tokenizer):
    end = byte_tokenizer.control_id("<|im_end|>")
    ids = [*byte_tokenizer.encode_text("hi"), end]
    assert byte_tokenizer.decode(ids) == "hi"
    assert byte_tokenizer.decode(ids, skip_special=False) == "hi<|im_end|>"


def test_control_tokens_that_are_not_special_are_seen_in_text(checkpoint):
    tokenizer = Tokenizer(description_with(checkpoint, {"content": "<tool_call>", "special": False}))
    assert tokenizer.decode([tokenizer.control_id("<tool_call>")]) == "<tool_call>"
    assert tokenizer.control_id("<tool_call>") not in tokenizer.encode_text("<tool_call>")


def test_ids_outside_the_vocabulary_give_no_text(byte_tokenizer):
    ids = byte_tokenizer.encode_text("hi")
    assert byte_tokenizer.decode([ids[0], 319, 10**6, ids[1]]) == "hi"
    assert byte_tokenizer.decode([]) == ""


def test_the_vocabulary_is_one_more_than_the_highest_id(byte_tokenizer, checkpoint):
    assert byte_tokenizer.vocab_size == 256 + 3 + 4
    assert Tokenizer(description_with(checkpoint, {"content": "<x>", "id": 500})).vocab_size >= 264


# ------------------------------------------------------------------ files


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"tokenizer\.json.* fast tokenizer"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    "content",
    [b"", b"nonsense", b"{}", b"[]", b"5", b"null", b'{"model": {"type": "x"}}', b'{"added_tokens": [{}]}', b"\xff\xfe"]
)  # fmt: skip
def test_a_file_that_is_no_tokenizer_is_refused(tmp_path, content):
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)


@settings(repeatable, max_examples=100)
@given(text=tricky_text)
def test_bytes_of_tokens_join_to_the_bytes_of_the_text(byte_tokenizer, merging_tokenizer, text):
    for tokenizer in (byte_tokenizer, merging_tokenizer):
        assert b"".join(tokenizer.token_bytes(one) for one in tokenizer.encode_text(text)) == text.encode()
        assert all(tokenizer.token_bytes(control_id) is None for control_id in tokenizer.control_ids.values())
        assert tokenizer.token_bytes(10**6) is None
