"""Streamed text is the whole text up to its first stop string, however tokens cut it."""

import json
import time

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from saccade.engine.answers import Answer
from saccade.engine.request import MAX_STOP_LENGTH, Failure, Request, SamplingParams, TokenLogprobs
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
    """`text` up to the stop string that ends first (the longest of these) behind `start_at` characters."""
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


def streamed(answer, ids, sizes=(1,)):
    parts = [answer.push(part).text for part in in_pushes(ids, sizes)]
    return [*parts, answer.finish()]


@settings(repeatable, max_examples=400)
@given(text=texts, stops=stops, sizes=sizes_of_pushes)
def test_streamed_text_is_the_whole_text_up_to_the_first_stop_string(tokenizer, text, stops, sizes):
    ids, answer = tokenizer.encode_text(text), Answer(tokenizer.decode, SamplingParams(stop=stops))
    assert "".join(streamed(answer, ids, sizes)) == answer.text == cut_reference(text, stops)
    assert answer.is_stopped == any(stop in text for stop in stops)


@settings(repeatable, max_examples=200)
@given(ids=st.lists(st.integers(0, 310), max_size=40), stops=stops, sizes=sizes_of_pushes)
def test_so_it_is_for_any_tokens_a_model_may_draw(tokenizer, ids, stops, sizes):
    """Half characters, control tokens, ids that stand for nothing."""
    answer = Answer(tokenizer.decode, SamplingParams(stop=stops))
    assert "".join(streamed(answer, ids, sizes)) == cut_reference(tokenizer.decode(ids), stops)


@settings(repeatable, max_examples=200)
@given(text=texts, stops=stops, min_tokens=st.integers(0, 12), sizes=sizes_of_pushes)
def test_stop_strings_complete_before_min_tokens_are_plain_text(tokenizer, text, stops, min_tokens, sizes):
    ids, stream = tokenizer.encode_text(text), TextStream(tokenizer.decode)
    passed = len("".join(stream.push([token_id]) for token_id in ids[:min_tokens]))
    answer = Answer(tokenizer.decode, SamplingParams(stop=stops, min_tokens=min_tokens))
    expected = cut_reference(text, stops, passed) if len(ids) > min_tokens else text
    assert "".join(streamed(answer, ids, sizes)) == expected
    assert not answer.is_stopped or len(answer.token_ids) > min_tokens


@settings(repeatable, max_examples=200)
@given(text=texts, stops=stops)
def test_tokens_end_with_the_one_that_completed_the_stop_string(tokenizer, text, stops):
    ids, answer = tokenizer.encode_text(text), Answer(tokenizer.decode, SamplingParams(stop=stops))
    was_stopped = [answer.push([token_id]).is_stopped for token_id in ids]
    together = Answer(tokenizer.decode, SamplingParams(stop=stops))
    together.push(ids)
    first = was_stopped.index(True) if True in was_stopped else len(ids)
    assert answer.token_ids == together.token_ids == ids[: first + 1]
    assert was_stopped == [number >= first for number in range(len(ids))]


def test_text_that_may_begin_a_stop_string_is_held_back_until_it_is_clear(tokenizer):
    answer = Answer(tokenizer.decode, SamplingParams(stop=("###", "#!")))
    given = [answer.push([token_id]) for character in "a#b##c###d" for token_id in tokenizer.encode_text(character)]
    assert [delta.text for delta in given] == ["a", "", "#b", "", "", "##c", "", "", "", ""]
    assert [delta.is_stopped for delta in given] == [False] * 8 + [True] * 2
    assert answer.finish() == ""


def test_what_was_held_back_comes_at_the_end(tokenizer):
    answer = Answer(tokenizer.decode, SamplingParams(stop=("User:",)))
    assert answer.push(tokenizer.encode_text("ab Use")).text == "ab "
    assert answer.finish() == "Use"
    assert answer.finish() == ""
    assert answer.text == "ab Use"


def test_of_two_stop_strings_the_one_complete_first_wins(tokenizer):
    for stops in (("abcd", "bc"), ("bc", "abcd")):
        answer = Answer(tokenizer.decode, SamplingParams(stop=stops))
        assert answer.push(tokenizer.encode_text("xabcd")) == ("xa", True)


def test_without_stop_strings_nothing_is_held_back(tokenizer):
    answer = Answer(tokenizer.decode, SamplingParams())
    assert answer.push(tokenizer.encode_text("a🙂b")) == ("a🙂b", False)


def test_text_nobody_waited_for_is_decoded_in_one_go(tokenizer):
    calls, ids = [], tokenizer.encode_text("abba 🙂 baab " * 100)
    answer = Answer(lambda ids: calls.append(len(ids)) or tokenizer.decode(ids), SamplingParams())
    assert answer.push(ids).text + answer.finish() == "abba 🙂 baab " * 100
    assert len(calls) <= 4


def test_the_end_of_turn_token_is_a_token_without_text(tokenizer):
    ids = [*tokenizer.encode_text("ab"), tokenizer.control_id("<|im_end|>")]
    answer = Answer(tokenizer.decode, SamplingParams(stop=("<|im_end|>",)))
    assert answer.push(ids) == ("ab", False)
    assert answer.token_ids == ids


def ended(reason, **fields):
    return Request(id="r", token_ids=[1, 2, 3], num_prompt_tokens=3, num_cached=2, finish_reason=reason, **fields)


def test_a_completion_says_how_the_request_ended(tokenizer):
    answer = Answer(tokenizer.decode, SamplingParams(stop=("ba",)))
    ids = tokenizer.encode_text("xxb")
    answer.push(ids)
    completion = answer.completion(ended("length"))
    assert (completion.text, completion.finish_reason, completion.token_ids) == ("xxb", "length", ids)
    assert (completion.num_prompt_tokens, completion.num_cached_tokens, completion.logprobs) == (3, 2, None)


def test_a_request_stopped_by_a_stop_string_has_stopped_whatever_ended_it_in_the_engine(tokenizer):
    answer = Answer(tokenizer.decode, SamplingParams(stop=("b",)))
    answer.push([*tokenizer.encode_text("a"), *tokenizer.encode_text("b"), *tokenizer.encode_text("c")])
    logprobs = [TokenLogprobs(token_id, -1.0) for token_id in (1, 2, 3)]
    completion = answer.completion(ended("cancelled"), logprobs=logprobs, prompt_logprobs=[None])
    assert (completion.text, completion.finish_reason, len(completion.token_ids)) == ("a", "stop", 2)
    assert completion.logprobs == logprobs[:2]
    assert completion.prompt_logprobs == [None]


def test_a_failed_request_keeps_its_text_and_says_why(tokenizer):
    answer, failure = Answer(tokenizer.decode, SamplingParams()), Failure("running", "out of memory")
    answer.push(tokenizer.encode_text("half an"))
    completion = answer.completion(ended("failed", failure=failure))
    assert (completion.text, completion.finish_reason, completion.failure) == ("half an", "failed", failure)


def test_a_request_that_has_not_ended_has_no_completion(tokenizer):
    with pytest.raises(AssertionError, match="has not ended"):
        Answer(tokenizer.decode, SamplingParams()).completion(ended(None))


@pytest.mark.parametrize("case", ["words", "control tokens", "nearly a long stop string"])
def test_a_token_costs_no_more_late_in_a_long_answer(tokenizer, case):
    """Counted in decoded tokens and seconds: a quadratic cost would be hundreds of times as much."""
    num_tokens, num_decoded = 4000, 0

    def decode(ids):
        nonlocal num_decoded
        num_decoded += len(ids)
        return tokenizer.decode(ids)

    unit = [tokenizer.control_id("<|im_end|>")] if case == "control tokens" else tokenizer.encode_text("aab"[: 3 if case == "words" else 1])  # fmt: skip
    ids = (unit * num_tokens)[:num_tokens]
    answer = Answer(decode, SamplingParams(stop=("a" * (MAX_STOP_LENGTH - 1) + "b", "bbb")))
    start = time.process_time()
    streamed(answer, ids)
    assert num_decoded <= 8 * num_tokens
    assert time.process_time() - start < 5
