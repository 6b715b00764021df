"""Streamed text equals the whole text up to its first stop string, however it is split into tokens."""

import json
import time

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from saccade.engine.frontend.detokenizer import Detokenizer
from saccade.engine.request import Failure, RequestOutput, TokenLogprobs
from saccade.engine.sampling_params import MAX_STOP_LENGTH, SamplingParams
from saccade.processor import TextStream
from saccade.processor.tokenizer import Tokenizer

repeatable = settings(deadline=None, derandomize=True)
sizes_of_pushes = st.lists(st.integers(1, 4), min_size=1, max_size=10)
# Few characters, of one to four bytes, so that stop strings are found, overlap and repeat.
texts = st.text(alphabet="ab\né🙂\ufffd", max_size=30)
stops = st.lists(st.text(alphabet="ab\né🙂\ufffd", min_size=1, max_size=5), max_size=4).map(tuple)


@pytest.fixture(scope="module")
def tokenizer():
    """Bytes, a few merges, and control tokens."""
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trained.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    trained.train_from_iterator(["abba baab\nab é🙂 aab bab User: stop"] * 3, trainer)
    trained.add_special_tokens(["<|im_end|>", "<|endoftext|>"])
    return Tokenizer(json.loads(trained.to_str()))


def cut_reference(text, stops, start_at=0):
    """`text` up to the stop string that ends first after `start_at` characters; the longest, if several do."""
    ends = [
        (end, -len(stop)) for stop in stops for end in range(start_at + 1, len(text) + 1) if text[:end].endswith(stop)
    ]
    return text if not ends else text[: sum(min(ends))]


def in_pushes(ids, sizes):
    start = number = 0
    while start < len(ids):
        size = sizes[number % len(sizes)]
        yield ids[start : start + size]
        start, number = start + size, number + 1


def streamed(detokenizer, ids, sizes=(1,)):
    parts = [detokenizer.push(part).text for part in in_pushes(ids, sizes)]
    return [*parts, detokenizer.finish()]


@settings(repeatable, max_examples=400)
@given(text=texts, stops=stops, sizes=sizes_of_pushes)
def test_streamed_text_is_the_whole_text_up_to_the_first_stop_string(tokenizer, text, stops, sizes):
    ids, detokenizer = tokenizer.encode_text(text), Detokenizer(tokenizer.decode, SamplingParams(stop=stops))
    assert "".join(streamed(detokenizer, ids, sizes)) == detokenizer.text == cut_reference(text, stops)
    assert detokenizer.is_stopped == any(stop in text for stop in stops)


@settings(repeatable, max_examples=200)
@given(ids=st.lists(st.integers(0, 310), max_size=40), stops=stops, sizes=sizes_of_pushes)
def test_the_same_holds_for_any_tokens_a_model_may_sample(tokenizer, ids, stops, sizes):
    """Partial characters, control tokens, unused ids."""
    detokenizer = Detokenizer(tokenizer.decode, SamplingParams(stop=stops))
    assert "".join(streamed(detokenizer, ids, sizes)) == cut_reference(tokenizer.decode(ids), stops)


@settings(repeatable, max_examples=200)
@given(text=texts, stops=stops, min_tokens=st.integers(0, 12), sizes=sizes_of_pushes)
def test_stop_strings_complete_before_min_tokens_are_plain_text(tokenizer, text, stops, min_tokens, sizes):
    ids, stream = tokenizer.encode_text(text), TextStream(tokenizer.decode)
    passed = len("".join(stream.push([token_id]) for token_id in ids[:min_tokens]))
    detokenizer = Detokenizer(tokenizer.decode, SamplingParams(stop=stops, min_tokens=min_tokens))
    expected = cut_reference(text, stops, passed) if len(ids) > min_tokens else text
    assert "".join(streamed(detokenizer, ids, sizes)) == expected
    assert not detokenizer.is_stopped or len(detokenizer.token_ids) > min_tokens


@settings(repeatable, max_examples=200)
@given(text=texts, stops=stops)
def test_tokens_end_with_the_one_that_completed_the_stop_string(tokenizer, text, stops):
    ids, detokenizer = tokenizer.encode_text(text), Detokenizer(tokenizer.decode, SamplingParams(stop=stops))
    was_stopped = [detokenizer.push([token_id]).is_stopped for token_id in ids]
    together = Detokenizer(tokenizer.decode, SamplingParams(stop=stops))
    together.push(ids)
    first = was_stopped.index(True) if True in was_stopped else len(ids)
    assert detokenizer.token_ids == together.token_ids == ids[: first + 1]
    assert was_stopped == [number >= first for number in range(len(ids))]


def test_text_that_may_begin_a_stop_string_is_held_back_until_it_is_clear(tokenizer):
    detokenizer = Detokenizer(tokenizer.decode, SamplingParams(stop=("###", "#!")))
    given = [
        detokenizer.push([token_id]) for character in "a#b##c###d" for token_id in tokenizer.encode_text(character)
    ]
    assert [delta.text for delta in given] == ["a", "", "#b", "", "", "##c", "", "", "", ""]
    assert [delta.is_stopped for delta in given] == [False] * 8 + [True] * 2
    assert detokenizer.finish() == ""


def test_held_back_text_is_emitted_at_the_end(tokenizer):
    detokenizer = Detokenizer(tokenizer.decode, SamplingParams(stop=("User:",)))
    assert detokenizer.push(tokenizer.encode_text("ab Use")).text == "ab "
    assert detokenizer.finish() == "Use"
    assert detokenizer.finish() == ""
    assert detokenizer.text == "ab Use"


def test_of_two_stop_strings_the_one_complete_first_wins(tokenizer):
    for stops in (("abcd", "bc"), ("bc", "abcd")):
        detokenizer = Detokenizer(tokenizer.decode, SamplingParams(stop=stops))
        assert detokenizer.push(tokenizer.encode_text("xabcd")) == ("xa", True)


def test_without_stop_strings_nothing_is_held_back(tokenizer):
    detokenizer = Detokenizer(tokenizer.decode, SamplingParams())
    assert detokenizer.push(tokenizer.encode_text("a🙂b")) == ("a🙂b", False)


def test_text_pushed_at_once_is_decoded_at_once(tokenizer):
    calls, ids = [], tokenizer.encode_text("abba 🙂 baab " * 100)
    detokenizer = Detokenizer(lambda ids: calls.append(len(ids)) or tokenizer.decode(ids), SamplingParams())
    assert detokenizer.push(ids).text + detokenizer.finish() == "abba 🙂 baab " * 100
    assert len(calls) <= 4


def test_the_end_of_turn_token_is_a_token_without_text(tokenizer):
    ids = [*tokenizer.encode_text("ab"), tokenizer.control_id("<|im_end|>")]
    detokenizer = Detokenizer(tokenizer.decode, SamplingParams(stop=("<|im_end|>",)))
    assert detokenizer.push(ids) == ("ab", False)
    assert detokenizer.token_ids == ids


def ended(reason, **fields):
    return RequestOutput(request_id="r", num_cached_tokens=2, finish_reason=reason, **fields)


def test_a_completion_has_the_finish_reason_of_its_request(tokenizer):
    detokenizer = Detokenizer(tokenizer.decode, SamplingParams(stop=("ba",)))
    ids = tokenizer.encode_text("xxb")
    detokenizer.push(ids)
    completion = detokenizer.completion(ended("length"), num_prompt_tokens=3)
    assert (completion.text, completion.finish_reason, completion.token_ids) == ("xxb", "length", ids)
    assert (completion.num_prompt_tokens, completion.num_cached_tokens, completion.logprobs) == (3, 2, None)


def test_a_stop_string_overrides_the_finish_reason_of_the_core(tokenizer):
    detokenizer = Detokenizer(tokenizer.decode, SamplingParams(stop=("b",)))
    detokenizer.push([*tokenizer.encode_text("a"), *tokenizer.encode_text("b"), *tokenizer.encode_text("c")])
    logprobs = [TokenLogprobs(token_id, -1.0) for token_id in (1, 2, 3)]
    completion = detokenizer.completion(
        ended("cancelled"), num_prompt_tokens=3, logprobs=logprobs, prompt_logprobs=[None]
    )
    assert (completion.text, completion.finish_reason, len(completion.token_ids)) == ("a", "stop", 2)
    assert completion.logprobs == logprobs[:2]
    assert completion.prompt_logprobs == [None]


def test_a_failed_request_keeps_its_text_and_has_a_failure(tokenizer):
    detokenizer, failure = Detokenizer(tokenizer.decode, SamplingParams()), Failure("running", "out of memory")
    detokenizer.push(tokenizer.encode_text("half an"))
    completion = detokenizer.completion(ended("failed", failure=failure), num_prompt_tokens=3)
    assert (completion.text, completion.finish_reason, completion.failure) == ("half an", "failed", failure)


def test_a_request_that_has_not_ended_has_no_completion(tokenizer):
    with pytest.raises(AssertionError, match="has not ended"):
        Detokenizer(tokenizer.decode, SamplingParams()).completion(ended(None), num_prompt_tokens=3)


@pytest.mark.parametrize("case", ["words", "control tokens", "nearly a long stop string"])
def test_the_cost_per_token_does_not_grow_with_the_output(tokenizer, case):
    """A quadratic cost, in decoded tokens or in seconds, would be hundreds of times as high."""
    num_tokens, num_decoded = 4000, 0

    def decode(ids):
        nonlocal num_decoded
        num_decoded += len(ids)
        return tokenizer.decode(ids)

    if case == "control tokens":
        unit = [tokenizer.control_id("<|im_end|>")]
    else:
        unit = tokenizer.encode_text("aab" if case == "words" else "a")
    ids = (unit * num_tokens)[:num_tokens]
    detokenizer = Detokenizer(decode, SamplingParams(stop=("a" * (MAX_STOP_LENGTH - 1) + "b", "bbb")))
    start = time.process_time()
    streamed(detokenizer, ids)
    assert num_decoded <= 8 * num_tokens
    assert time.process_time() - start < 5
