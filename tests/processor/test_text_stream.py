"""Streamed text equals decoding at once, and never ends in half a character before the end."""

import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers

from saccade.processor import TextStream

repeatable = settings(deadline=None, derandomize=True)
cuts = st.lists(st.integers(1, 4), min_size=1, max_size=20)


def in_pushes(ids, sizes):
    """The ids in pushes of these sizes, over and over."""
    start = number = 0
    while start < len(ids):
        size = sizes[number % len(sizes)]
        yield ids[start : start + size]
        start, number = start + size, number + 1


def streamed(decode, ids, sizes):
    stream = TextStream(decode)
    return [stream.push(part) for part in in_pushes(ids, sizes)], stream.finish()


def byte_ids(processor, data):
    """Token ids of raw bytes, valid UTF-8 or not."""
    one_byte = {bytes([value]): None for value in range(256)}
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    vocabulary = {character: number for number, character in enumerate(sorted(alphabet))}
    printable = {**{b: chr(b) for b in [*range(33, 127), *range(161, 173), *range(174, 256)]}}
    rest = [b for b in range(256) if b not in printable]
    printable |= {b: chr(256 + n) for n, b in enumerate(rest)}
    assert len(one_byte) == len(vocabulary) == 256
    ids = [vocabulary[printable[value]] for value in data]
    assert processor.decode(ids) == data.decode("utf-8", errors="replace")
    return ids


@settings(repeatable, max_examples=200)
@given(text=st.text(max_size=40), sizes=cuts)
def test_streamed_equals_not_streamed_for_any_text_and_any_split(processor, merging_tokenizer, text, sizes):
    for tokenizer in (processor.tokenizer, merging_tokenizer):
        ids = tokenizer.encode_text(text)
        parts, rest = streamed(tokenizer.decode, ids, sizes)
        assert "".join(parts) + rest == text == tokenizer.decode(ids)


@settings(repeatable, max_examples=300)
@given(
    data=st.binary(max_size=40)
    | st.lists(
        st.sampled_from([b"\xe2", b"\x82", b"\xac", b"\xf0\x9f", b"\x99\x82", b"a", b"\xff", "é".encode()]), max_size=16
    ).map(b"".join),
    sizes=cuts,
)
def test_streamed_equals_not_streamed_for_bytes_that_are_not_utf8(processor, data, sizes):
    ids = byte_ids(processor, data)
    parts, rest = streamed(processor.decode, ids, sizes)
    assert "".join(parts) + rest == processor.decode(ids)


@settings(repeatable, max_examples=100)
@given(text=st.text(alphabet="aé日🙂👩‍👩‍👧", min_size=1, max_size=12))
def test_no_part_holds_half_a_character(processor, text):
    parts, rest = streamed(processor.decode, processor.tokenizer.encode_text(text), [1])
    assert "\ufffd" not in "".join(parts)
    assert rest == ""


@settings(repeatable, max_examples=100)
@given(ids=st.lists(st.integers(0, 330), max_size=40), sizes=cuts)
def test_streamed_equals_not_streamed_for_any_tokens_a_model_may_draw(processor, ids, sizes):
    parts, rest = streamed(processor.decode, ids, sizes)
    assert "".join(parts) + rest == processor.decode(ids)


def test_a_character_of_four_bytes_comes_whole_with_its_last(processor):
    parts, rest = streamed(processor.decode, processor.tokenizer.encode_text("a🙂b"), [1])
    assert parts == ["a", "", "", "", "🙂", "b"]
    assert rest == ""


def test_half_a_character_at_the_end_is_shown_as_the_replacement_character(processor):
    ids = byte_ids(processor, "a🙂".encode()[:-1])
    parts, rest = streamed(processor.decode, ids, [1])
    assert parts == ["a", "", "", ""]
    assert rest == "\ufffd"


def test_the_end_of_turn_token_adds_no_text(processor):
    stream = TextStream(processor.decode)
    assert stream.push(processor.tokenizer.encode_text("hi")) == "hi"
    assert stream.push([processor.tokenizer.control_id("<|im_end|>")]) == ""
    assert stream.finish() == ""


def test_an_empty_stream_is_empty(processor):
    stream = TextStream(processor.decode)
    assert stream.push([]) == ""
    assert stream.finish() == ""


@settings(repeatable, max_examples=100)
@given(text=st.text(alphabet="ab é日", min_size=1, max_size=15).map(str.strip), sizes=cuts)
def test_a_decoder_that_treats_the_first_token_differently_streams_the_same(text, sizes):
    """A tokenizer like Llama's strips a leading space and has bytes `<0xE6>` for characters without a token."""
    pieces = ["<unk>", "\u2581", "a", "b", *(f"<0x{value:02X}>" for value in range(256))]
    model = models.BPE(
        {piece: number for number, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True
    )
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    ids = tokenizer.encode(text).ids
    parts, rest = streamed(tokenizer.decode, ids, sizes)
    assert "".join(parts) + rest == tokenizer.decode(ids) == text


def test_endless_broken_text_costs_the_same_per_token():
    """A repeated lone byte never becomes a character; its text must not be decoded again from the beginning."""
    num_decoded = 0

    def decode(ids):
        nonlocal num_decoded
        num_decoded += len(ids)
        return bytes(ids).decode(errors="replace")

    stream, tokens = TextStream(decode), [0xF0] * 5000 + list(b"and then text")
    text = "".join(stream.push([token]) for token in tokens) + stream.finish()
    assert text == bytes(tokens).decode(errors="replace")
    assert num_decoded < 20 * len(tokens)
