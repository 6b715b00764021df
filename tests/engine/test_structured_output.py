"""Structured output through the engine is valid whatever the model predicts, and does not affect other requests."""

import json
import random
import re
from concurrent.futures import Future
from functools import partial

import jsonschema
import pytest
from engine.tiny import core_of

from saccade.engine import Engine, EngineConfig, SamplingParams, StructuredOutput
from saccade.engine.core import grammar_requests
from saccade.errors import ConfigError
from saccade.model.initialize import initialize_random, named_size

CONVERSATION = [{"role": "user", "content": "describe it"}]


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("structured") / "checkpoint"
    initialize_random(folder, named_size("tiny"))
    # Few pages: requests are preempted and resume inside their grammar.
    config = EngineConfig(num_workers=0, max_length=400, num_pages=130, max_requests=16)
    with Engine.load(folder, device="cpu", dtype="float32", config=config) as engine:
        yield engine


def schema_of(number):
    rng = random.Random(number)
    kinds = [{"type": "integer", "minimum": 0, "maximum": 99}, {"enum": ["red", "green"]}, {"type": "boolean"}]
    names = [f"field{i}" for i in range(1 + number % 3)]
    return {
        "type": "object",
        "properties": {name: rng.choice(kinds) for name in names},
        "required": names,
        "additionalProperties": False,
    }


@pytest.mark.parametrize("long_masks", [1e9, 0.0], ids=["in every step", "skipping steps"])
def test_outputs_with_and_without_a_grammar_share_a_batch(engine, monkeypatch, long_masks):
    monkeypatch.setattr(grammar_requests, "_LONG_MASKS", long_masks)  # fraction of a step's time
    schemas = [schema_of(i) for i in range(8)]
    free = [SamplingParams(max_tokens=80, temperature=1.0, seed=i, ignore_eos=True) for i in range(8)]
    bound = [
        SamplingParams(max_tokens=300, temperature=1.0, seed=i, structured=StructuredOutput(json_schema=schema))
        for i, schema in enumerate(schemas)
    ]
    completions = engine.generate(
        [CONVERSATION] * 8, bound
    )  # compiles all grammars first, so that these requests do not start late
    alone = [one for pair in zip(completions, engine.generate([CONVERSATION] * 8, free), strict=True) for one in pair]
    mixed = engine.generate([CONVERSATION] * 16, [one for pair in zip(bound, free, strict=True) for one in pair])
    assert [one.token_ids for one in mixed] == [one.token_ids for one in alone]
    complete = [one for one in completions if one.finish_reason == "stop"]
    assert len(complete) >= 4, "random weights may pad with white space until max_tokens, but not all of them"
    for schema, one in zip(schemas, completions, strict=True):
        if one.finish_reason == "stop":
            jsonschema.validate(json.loads(one.text), schema)


@pytest.mark.parametrize(
    ("structured", "pattern"),
    [
        ({"regex": "(ab|cd){2}-[0-9]{3}"}, "(ab|cd){2}-[0-9]{3}"),
        ({"choice": ["yes", "no", "a cat"]}, "yes|no|a cat"),
        ({"grammar": 'start: "x" NUMBER\nNUMBER: /[0-9]{2}/'}, "x[0-9]{2}"),
    ],
    ids=["regex", "choice", "grammar"],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_text_has_the_form_asked_for(engine, structured, pattern, temperature):
    sampling = {"structured": structured, "temperature": temperature, "seed": 3, "logprobs": 1}
    [completion] = engine.generate(CONVERSATION, sampling)
    assert re.fullmatch(pattern, completion.text)
    assert completion.finish_reason == "stop"
    assert all(entry.logprob <= 0 for entry in completion.logprobs), (
        "of the raw logits, which a mask leaves as they are"
    )


def test_a_grammar_that_cannot_be_fails_alone(engine):
    broken = {"structured": {"regex": "(unclosed"}}
    completions = engine.generate([CONVERSATION] * 2, [broken, {"max_tokens": 4, "ignore_eos": True}])
    assert [one.finish_reason for one in completions] == ["failed", "length"]
    assert completions[0].failure.kind == "invalid_request"
    assert "structured.regex" in completions[0].failure.message


def test_a_mask_that_cannot_be_computed_fails_its_request_alone(engine):
    """The library refuses the matcher of one of two requests after some tokens."""
    grammar = {"structured": {"regex": "[0-9]{200}"}, "max_tokens": 250, "temperature": 1.0, "seed": 1}
    ended, ids = [Future(), Future()], []
    states = core_of(engine)._grammars.states

    def on_delta(number, delta):
        if number == 0 and len(ids) == 2 and ids[0] in states:
            states[ids[0]].matcher = object()
        if delta.completion is not None:
            ended[number].set_result(delta.completion)

    for number in range(2):
        prompt = engine.preprocess(CONVERSATION)
        ids.append(engine.submit(prompt, SamplingParams(**grammar), partial(on_delta, number)))
    broken, other = (future.result(60) for future in ended)
    assert (broken.finish_reason, broken.failure.kind) == ("failed", "invalid_request")
    assert broken.failure.message.startswith("structured.regex: ")
    assert (other.finish_reason, len(other.text)) == ("stop", 200)
    assert not engine.has_failed


def test_what_does_not_go_with_a_grammar_is_refused():
    for fields in ({"ignore_eos": True}, {"min_tokens": 2}):
        with pytest.raises(ConfigError, match="structured output ends where it is complete"):
            SamplingParams(structured={"json_object": True}, max_tokens=9, **fields)
    with pytest.raises(ConfigError, match="structured is 'json'"):
        SamplingParams(structured="json")
