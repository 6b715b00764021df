"""SentencePiece tokenizers: spaces before text, `<s>`, and texts that are encoded as one."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model.llava_next import MISTRAL, VICUNA, tokenizer_description
from transformers import PreTrainedTokenizerFast

from saccade.processor import TextStream
from saccade.processor.chat_template import ChatTemplate
from saccade.processor.conversation import render_prompt
from saccade.processor.tokenizer import Tokenizer

TEXTS = ["hello there", " a ", "", "\n", "  ", "é日🙂", "ASSISTANT:", "the hall", "<", "▁"]
CONTROL = ["<image>", "</s>", "<s>"]
prompts = st.lists(st.sampled_from(TEXTS + CONTROL), max_size=8)


@pytest.fixture(scope="module", params=["first", "every"])
def both(request, tmp_path_factory):
    """Ours and that of `transformers`."""
    description = tokenizer_description(request.param)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_text(json.dumps(description))
    return Tokenizer(description), PreTrainedTokenizerFast(tokenizer_file=str(path))


def encode(tokenizer, text):
    """A trusted text with control tokens."""
    ids, is_first = [], True
    for piece, control in tokenizer.split_control(text):
        ids += [control] if control is not None else tokenizer.encode_parts([piece], is_first=is_first)[0]
        is_first = False
    return [*tokenizer.prefix_ids, *ids]


@settings(deadline=None, derandomize=True, max_examples=150)
@given(parts=prompts)
def test_text_between_control_tokens_is_encoded_as_transformers_does(both, parts):
    ours, theirs = both
    assert encode(ours, "".join(parts)) == theirs("".join(parts))["input_ids"]


@settings(deadline=None, derandomize=True, max_examples=150)
@given(texts=st.lists(st.sampled_from(TEXTS), min_size=1, max_size=5), is_first=st.booleans())
def test_parts_have_all_of_the_text(both, texts, is_first):
    ours, _ = both
    parts = ours.encode_parts(texts, is_first=is_first)
    assert len(parts) == len(texts)
    decoded = ours.decode([token_id for part in parts for token_id in part])
    assert decoded.replace(" ", "") == "".join(texts).replace("▁", "").replace(" ", "")


@pytest.mark.parametrize("texts", [["USER: hello ASSISTANT:", " Blue. ", "USER: there"], ["hello", " a", " hall", "."]])
def test_parts_are_the_tokens_of_the_whole(both, texts):
    ours, _ = both
    for is_first in (True, False):
        parts, [whole] = (ours.encode_parts(given, is_first=is_first) for given in (texts, ["".join(texts)]))
        assert [token_id for part in parts for token_id in part] == whole


def test_a_token_across_the_border_of_two_parts_separates_them(both):
    ours, _ = both
    [whole], [left, right] = ours.encode_parts(["hello"]), ours.encode_parts(["h", "ello"])
    assert left + right != whole, "hell is one token"
    assert left == ours.encode_parts(["h"])[0]
    assert right == ours.encode_parts(["\n", "ello"], is_first=False)[1], "no space is written within a text"
    assert ours.decode(left + right) == "hello"


def test_a_token_across_a_border_that_may_be_crossed_belongs_to_the_later_part(both):
    ours, _ = both
    [whole] = ours.encode_parts(["hello there"])
    parts = ours.encode_parts(["h", "ello", " th", "ere"], cuts=[False, False, True, False])
    assert [token_id for part in parts for token_id in part] == whole
    assert ours.decode(parts[1]) == "hello"


def test_a_prompt_begins_with_the_tokens_of_the_post_processor(both):
    assert both[0].prefix_ids == (1,)


def test_text_never_becomes_a_control_token(both):
    ours, _ = both
    for text in ("</s>", "<image>", "a<s>b"):
        [ids] = ours.encode_parts([text], is_first=False)
        assert not set(ids) & set(ours.control_ids.values())


def test_noncharacters_are_text(both):
    ours, _ = both
    for is_first in (True, False):
        [ids] = ours.encode_parts(["\ufdd0\ufdd1\ufdd0"], is_first=is_first)
        assert ours.decode(ids) == "\ufdd0\ufdd1\ufdd0"


MESSAGES = [
    {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
    {"role": "assistant", "content": "Blue."},
    {"role": "user", "content": "And?"},
    {"role": "assistant", "content": "Green"},
]


def text_of(prompt, *, in_loss=False):
    return "".join(piece.text for piece in prompt.pieces if piece.in_loss or not in_loss)


@pytest.mark.parametrize(
    ("template", "whole", "learned", "opened"),
    [
        (
            VICUNA, "USER: one two ASSISTANT: Blue. USER: And? ASSISTANT: Green ", " Blue.  Green ",
            "USER: And? ASSISTANT: Green",
        ),
        (
            MISTRAL, "[INST] onetwo [/INST] Blue.</s>[INST] And? [/INST] Green</s>", " Blue.</s> Green</s>",
            "[INST] And? [/INST] Green",
        ),
    ],
    ids=["vicuna", "mistral"],
)  # fmt: skip
def test_templates_for_part_lists_get_them(both, template, whole, learned, opened):
    """Strings would vanish; texts of one message stay separate."""
    ours, chat = both[0], ChatTemplate(template)
    assert chat.takes_parts
    prompt = render_prompt(MESSAGES, chat, ours, add_generation_prompt=False)
    assert text_of(prompt) == whole
    assert text_of(prompt, in_loss=True) == learned
    continued = render_prompt(MESSAGES[2:], chat, ours, add_generation_prompt=False, continue_final_message=True)
    assert text_of(continued) == opened


@settings(deadline=None, derandomize=True, max_examples=200)
@given(
    ids=st.lists(st.integers(3, 368) | st.sampled_from([3 + 0xE2, 3 + 0x96, 3 + 0x81, 3 + 0x19, 259]), max_size=24),
    size=st.integers(1, 3),
)
def test_streamed_bytes_are_those_decoded_at_once(both, ids, size):
    """The bytes need not form characters."""
    ours, _ = both
    stream = TextStream(ours.decode)
    parts = [stream.push(ids[start : start + size]) for start in range(0, len(ids), size)]
    assert "".join(parts) + stream.finish() == ours.decode(ids)


@settings(deadline=None, derandomize=True, max_examples=100)
@given(text=st.text(max_size=20))
def test_text_is_decoded_as_transformers_does(both, text):
    ours, theirs = both
    ids = ours.encode_text(text.replace("▁", ""))
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
