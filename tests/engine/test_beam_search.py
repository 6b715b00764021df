"""Beam search gives the tokens of `transformers`, from requests that share the prompt and its images."""

import itertools
import json
import time

import pytest
from model.hugging_face import CONVERSATIONS, OTHER_SHAPES, SHAPES, Oracle, ask, make_checkpoint
from model.llava_onevision import SHAPES as LLAVA_SHAPES

from saccade.engine import Engine, EngineConfig, SamplingParams
from saccade.engine.frontend.beam_search import Beams, BeamSearchParams
from saccade.errors import ConfigError

CONFIG = EngineConfig(num_pages=400, page_size=4, max_length=800, max_requests=4, max_step_tokens=128, num_workers=0)
NAMES = ("text-only", "28x28", "multi-image")
MAX_TOKENS = 10


def end_often(folder):
    """Tokens that random weights choose often become ends of the turn."""
    with Engine.load(folder, device="cpu", config=CONFIG) as engine:
        found = engine.beam_search([CONVERSATIONS[name] for name in NAMES], num_beams=3, max_tokens=MAX_TOKENS)
        eos_ids = sorted({*engine.processor.eos_ids, *[one.token_ids[2] for one in found]})
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": eos_ids}))
    return folder


SHAPE_PARAMS = [SHAPES[0], LLAVA_SHAPES[0], pytest.param(OTHER_SHAPES[4], marks=pytest.mark.slow)]


@pytest.fixture(scope="module", params=SHAPE_PARAMS, ids=lambda shape: shape.family)
def folder(request, tmp_path_factory):
    return end_often(make_checkpoint(tmp_path_factory.mktemp("beams") / "checkpoint", request.param))


def expected_of(oracle, messages, **settings):
    """Sequences and scores of transformers, without padding."""
    inputs = oracle.inputs(messages, add_generation_prompt=True)
    oracle.model.model.rope_deltas = None
    found = oracle.model.generate(
        **inputs, do_sample=False, early_stopping=False, max_new_tokens=MAX_TOKENS, output_scores=True,
        return_dict_in_generate=True, pad_token_id=0, **settings,
    )  # fmt: skip
    lengths = (found.beam_indices >= 0).sum(1).tolist()
    outputs = found.sequences[:, inputs["input_ids"].shape[1] :].tolist()
    return [tokens[:length] for tokens, length in zip(outputs, lengths, strict=True)], found.sequences_scores.tolist()


@pytest.mark.parametrize(("num_beams", "length_penalty"), [(3, 1.0), (4, -0.5), (2, -2.0)])
def test_tokens_and_scores_are_those_of_transformers(folder, num_beams, length_penalty):
    oracle = Oracle(folder)
    conversations = [CONVERSATIONS[name] for name in NAMES]
    with Engine.load(folder, device="cpu", config=CONFIG) as engine:
        completions = engine.beam_search(
            conversations, num_beams=num_beams, length_penalty=length_penalty, num_return_sequences=num_beams,
            max_tokens=MAX_TOKENS,
        )  # fmt: skip
        eos_ids, num_processed = engine.processor.eos_ids, engine.preprocessing_statistics.num_processed
        num_encoded, decode = engine.statistics.num_images_encoded, engine.processor.decode
    assert num_processed == num_encoded == 4, "each image once, however many requests share it"
    for number, messages in enumerate(conversations):
        found = completions[number * num_beams : (number + 1) * num_beams]
        tokens, scores = expected_of(
            oracle, messages, num_beams=num_beams, length_penalty=length_penalty, num_return_sequences=num_beams
        )
        assert [one.token_ids for one in found] == tokens
        sums = [sum(entry.logprob for entry in one.logprobs) for one in found]
        lengths = [len(one.token_ids) for one in found]
        assert [s / n**length_penalty for s, n in zip(sums, lengths, strict=True)] == pytest.approx(scores, rel=1e-4)
        assert [one.text for one in found] == [decode(one.token_ids) for one in found]
        ends = ["stop" if one.token_ids[-1] in eos_ids else "length" for one in found]
        assert [one.finish_reason for one in found] == ends
    assert length_penalty > 0 or any(one.finish_reason == "stop" for one in completions)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = make_checkpoint(tmp_path_factory.mktemp("beams") / "checkpoint", SHAPES[0])
    with Engine.load(end_often(folder), device="cpu", config=CONFIG) as engine:
        yield engine


def test_one_beam_is_greedy_decoding(engine):
    conversations = [CONVERSATIONS[name] for name in NAMES]
    greedy = engine.generate(conversations, SamplingParams(max_tokens=MAX_TOKENS))
    found = engine.beam_search(conversations, num_beams=1, max_tokens=MAX_TOKENS)
    assert [(one.token_ids, one.text, one.finish_reason) for one in found] == [
        (one.token_ids, one.text, one.finish_reason) for one in greedy
    ]
    assert [one.num_prompt_tokens for one in found] == [one.num_prompt_tokens for one in greedy]


def test_a_conversation_that_cannot_be_served_fails_alone(engine):
    broken = [ask(b"no image", "What is it?")]
    long = [{"role": "user", "content": "word " * CONFIG.max_length}]
    conversations = [CONVERSATIONS["28x28"], broken, long, CONVERSATIONS["text-only"]]
    first, failed, too_long, last = engine.beam_search(conversations, num_beams=3, max_tokens=MAX_TOKENS)
    assert [failed.failure.kind, too_long.failure.kind] == ["invalid_request", "context_length_exceeded"]
    assert [failed.token_ids, failed.finish_reason] == [[], "failed"]
    for messages, found in ((CONVERSATIONS["28x28"], first), (CONVERSATIONS["text-only"], last)):
        [alone] = engine.beam_search(messages, num_beams=3, max_tokens=MAX_TOKENS)
        assert found.token_ids == alone.token_ids


def test_the_output_ends_at_the_maximum_length(engine):
    [found] = engine.beam_search([[{"role": "user", "content": "a" * 740}]], num_beams=2, max_tokens=500)
    assert found.finish_reason == "stop" or found.num_prompt_tokens + len(found.token_ids) == CONFIG.max_length


def test_an_interrupted_search_leaves_nothing_behind(engine, monkeypatch):
    class StoppedError(Exception):
        pass

    preprocess, calls = engine.preprocess, itertools.count()

    def stopping(*arguments, **options):
        if next(calls) == 2:
            raise StoppedError
        return preprocess(*arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(engine, "preprocess", stopping)
        with pytest.raises(StoppedError):
            engine.beam_search([CONVERSATIONS[name] for name in NAMES], num_beams=2, max_tokens=300)
    deadline = time.monotonic() + 60
    while engine._front_end.num_open and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not engine._front_end.num_open
    [found] = engine.beam_search(CONVERSATIONS["text-only"], num_beams=2, max_tokens=3)
    assert found.failure is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_beams": 0}, "num_beams is 0; use a whole number from 1 to 19"),
        ({"num_beams": 18}, "use up to 16 with the 4 end-of-turn tokens"),
        ({"num_beams": 2, "max_tokens": 0}, "max_tokens is 0"),
        ({"num_beams": 2, "num_return_sequences": 3}, "num_return_sequences is 3; use 1 to num_beams, which is 2"),
        ({"num_beams": 2, "length_penalty": float("nan")}, "length_penalty is nan"),
    ],
)
def test_what_cannot_be_searched_is_refused(engine, fields, message):
    with pytest.raises(ConfigError, match=message):
        engine.beam_search(CONVERSATIONS["text-only"], **fields)


def test_an_end_less_likely_than_enough_continuations_is_not_kept():
    """Token 0 ends the turn. It ranks third among the candidates of two beams, so it finishes neither."""
    beams = Beams(BeamSearchParams(num_beams=2), frozenset({0}), max_tokens=5)
    beams.extend([[(7, -0.1), (8, -0.2), (0, -0.3)]])
    assert [beam.token_ids for beam in beams.live] == [(7,), (8,)]
    assert beams.finished == []
    beams.extend([[(0, -0.1), (5, -3.0), (6, -4.0)], [(0, -0.2), (5, -5.0), (6, -6.0)]])
    assert [beam.token_ids for beam in beams.finished] == [(7, 0), (8, 0)]
    assert beams.is_done
