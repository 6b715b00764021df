"""Grammars with a real tokenizer: random walks through the masks give valid text, and hostile grammars fail in time."""

import ast
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import jsonschema
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from saccade.engine.core.grammar.compiler import GrammarCompiler
from saccade.engine.core.grammar.masks import MaskPool, finish_masks
from saccade.engine.structured import StructuredOutput
from saccade.errors import ConfigError, RequestError, UserError
from saccade.model.initialize import initialize_random, named_size
from saccade.processor.tokenizer import Tokenizer

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "bé", '"quoted"', "\\"]}, "maxItems": 3},
        "address": {"$ref": "#/$defs/address"},
        "score": {"type": ["number", "null"]},
    },
    "required": ["name", "age", "address"],
    "additionalProperties": False,
    "$defs": {
        "address": {
            "type": "object",
            "properties": {"zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
            "required": ["zip"],
            "additionalProperties": False,
        }
    },
}  # fmt: skip
TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "boolean"},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
            },
            "required": ["value"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}  # fmt: skip
SCHEMAS = [
    PERSON,
    TREE,
    {
        "type": "array",
        "items": {"anyOf": [{"type": "integer"}, {"const": {"x": [1, None]}}]},
        "minItems": 1,
        "maxItems": 4,
    },
    {"type": "string", "minLength": 3, "maxLength": 5},
]
CHOICES = ("a", "ab", "abc", "b c", 'q"u\\o\nte', "é漢😀", "<|im_end|>", "a/b", "\x00\x7f", "[x]*", "12")
SUM = 'start: term ("+" term)*\nterm: NUMBER | "(" start ")"\nNUMBER: /[1-9][0-9]{0,2}/\n'
TOO_SLOW = {"type": "string", "allOf": [{"pattern": f"x{i}"} for i in range(40)]}


def words_tokenizer():
    """A byte-level BPE tokenizer with longer tokens.

    It has a control token that is not special, and an end token that is plain vocabulary.
    """
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    text = [json.dumps(SCHEMAS), *CHOICES, "true false null 123 1234 <end> <end> <end>"] * 3
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        text, trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False, special_tokens=[])
    )
    made.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    made.add_tokens(["<tool_call>"])
    return Tokenizer(json.loads(made.to_str())), {made.token_to_id("<|im_end|>"), made.token_to_id("12")}


@pytest.fixture(scope="module", params=["bytes", "words"])
def vocabulary(request, tmp_path_factory):
    """Tokenizer, end-of-sequence ids, and the model's vocabulary size."""
    if request.param == "words":
        tokenizer, eos_ids = words_tokenizer()
        return tokenizer, eos_ids, tokenizer.vocab_size + 45
    folder = tmp_path_factory.mktemp("checkpoint")
    config = initialize_random(folder, named_size("tiny"))
    tokenizer = Tokenizer.load(folder)
    return tokenizer, {tokenizer.control_id("<|im_end|>")}, config.language.vocab_size


@pytest.fixture(scope="module")
def compiler(vocabulary):
    tokenizer, eos_ids, vocab_size = vocabulary
    compiler = GrammarCompiler(tokenizer, eos_ids=eos_ids, vocab_size=vocab_size, max_cached=16)
    yield compiler
    compiler.close()


@pytest.fixture(scope="module")
def impatient():
    """A compiler with a short deadline."""
    tokenizer, eos_ids = words_tokenizer()
    compiler = make_compiler((tokenizer, eos_ids, tokenizer.vocab_size), timeout_s=0.5)
    yield compiler
    compiler.close()


@pytest.fixture(scope="module")
def pool():
    pool = MaskPool(2)
    yield pool
    pool.close()


def allowed_ids(mask_W):
    return np.flatnonzero(np.unpackbits(mask_W.view(np.uint8), bitorder="little"))


def mask_of(state, compiler):
    """The mask of one state, computed without a pool."""
    masks_1W = np.empty((1, compiler.num_words), np.int32)
    state.matcher.unsafe_compute_mask_ptr(masks_1W.ctypes.data, masks_1W.nbytes)
    finish_masks(masks_1W, [state])
    return masks_1W[0]


def walk(state, compiler, vocabulary, rng, can_end=None):
    """Sample allowed tokens until the end; return the text. `can_end(text)` says whether the text may end there."""
    tokenizer, eos_ids, _ = vocabulary
    forbidden = set(tokenizer.control_ids.values()) - eos_ids
    text_bytes = b""
    for num_tokens in range(2000):
        ids = allowed_ids(mask_of(state, compiler))
        assert state.error is None
        assert len(ids)
        assert ids.max() < tokenizer.vocab_size
        assert forbidden.isdisjoint(ids.tolist())
        is_end = np.isin(ids, list(eos_ids))
        assert is_end.sum() in (0, len(eos_ids)), "all end tokens, or none"
        if can_end:
            try:
                assert can_end(text_bytes.decode()) == is_end.any(), text_bytes
            except UnicodeDecodeError:
                assert not is_end.any()
        if is_end.all() or (is_end.any() and (rng.random() < 0.2 or num_tokens > 60)):
            assert state.accept([int(ids[is_end][0])])
            assert state.is_finished
            return text_bytes.decode()
        assert not state.is_finished
        others = ids[~is_end].tolist()
        closing = [i for i in others if num_tokens > 60 and set(token_bytes(tokenizer, i)) <= set(b'"]})')]
        token_id = rng.choice(closing or others)
        text_bytes += token_bytes(tokenizer, token_id)
        assert state.accept([token_id])
    raise AssertionError(f"no end: {text_bytes[-200:]!r}")


BYTE_OF = {chr(b): b for b in [*range(33, 127), *range(161, 173), *range(174, 256)]}
BYTE_OF |= {chr(256 + n): b for n, b in enumerate(sorted(set(range(256)) - set(BYTE_OF.values())))}


def token_bytes(tokenizer, token_id):
    return bytes(BYTE_OF[c] for c in tokenizer._all.id_to_token(token_id))


def state_of(compiler, **fields):
    return compiler.compile(StructuredOutput(**fields)).result()


@pytest.mark.parametrize("schema", SCHEMAS, ids=["person", "tree", "array", "string"])
def test_random_outputs_are_valid_by_their_schema(schema, compiler, vocabulary):
    rng = random.Random(0)
    for _ in range(8):
        text = walk(state_of(compiler, json_schema=schema), compiler, vocabulary, rng)
        jsonschema.validate(json.loads(text), schema)


def test_random_outputs_are_json_objects(compiler, vocabulary):
    rng = random.Random(0)
    for _ in range(8):
        assert isinstance(json.loads(walk(state_of(compiler, json_object=True), compiler, vocabulary, rng)), dict)


@pytest.mark.parametrize(
    "regex", [r"[a-c]{2,4}x?", r"^\d{4}-\d{2}$", r"\W\s", r"(foo|bar)+[é漢😀]*", r"[^a-z\n]{0,5}/\\\"", r"a|", "a\nb"]
)
def test_random_outputs_match_their_regex_and_end_exactly_where_they_may(regex, compiler, vocabulary):
    rng = random.Random(0)
    for _ in range(6):
        state = state_of(compiler, regex=regex)
        text = walk(state, compiler, vocabulary, rng, can_end=lambda text: re.fullmatch(regex, text) is not None)
        assert re.fullmatch(regex, text), text


def test_random_outputs_are_one_of_the_choices(compiler, vocabulary):
    rng, choices = random.Random(0), tuple(choice for choice in CHOICES if choice != "12")
    seen = set()
    for _ in range(60):
        seen.add(walk(state_of(compiler, choice=choices), compiler, vocabulary, rng, can_end=choices.__contains__))
    assert seen <= set(choices)
    assert len(seen) > 5


def test_thousands_of_choices_compile(compiler, vocabulary):
    choices = tuple(f"choice {i}" for i in range(4096))
    assert walk(state_of(compiler, choice=choices), compiler, vocabulary, random.Random(1)) in choices


def test_random_outputs_follow_a_lark_grammar(compiler, vocabulary):
    rng = random.Random(0)
    for _ in range(8):
        text = walk(state_of(compiler, grammar=SUM), compiler, vocabulary, rng)
        assert re.fullmatch(r"[0-9+()]+", text)
        ast.parse(text, mode="eval")


def test_what_is_not_allowed_is_not_accepted(compiler, vocabulary):
    state = state_of(compiler, regex="[ab]+")
    [token_id] = vocabulary[0].encode_text("z")
    assert token_id not in allowed_ids(mask_of(state, compiler))
    assert not state.accept([token_id])
    assert "left the grammar" in state.error
    assert not state.is_finished
    assert set(allowed_ids(mask_of(state, compiler))) == vocabulary[1]
    again = state_of(compiler, regex="[ab]+")
    assert again.error is None
    assert len(allowed_ids(mask_of(again, compiler)))


def test_a_grammar_cannot_reach_control_tokens_or_padding(compiler, vocabulary):
    tokenizer, eos_ids, vocab_size = vocabulary
    start, padding = tokenizer.control_id("<|im_start|>"), vocab_size - 1
    for name in ("<|im_start|>", f"<[{start}]>", f"<[{padding}]>"):
        with pytest.raises(RequestError, match="control token"):
            state_of(compiler, grammar=f'start: {name} "a"')
        state = state_of(compiler, grammar=f'start: "a" {name}')
        assert state.accept(tokenizer.encode_text("a"))
        assert set(allowed_ids(mask_of(state, compiler))) == eos_ids
        assert "no token can follow" in state.error
        either = state_of(compiler, grammar=f'start: "a" | {name}')
        assert padding not in allowed_ids(mask_of(either, compiler))
        assert start not in allowed_ids(mask_of(either, compiler))


def advanced(compiler, vocabulary, seed):
    """Two equal states somewhere in a text."""
    rng = random.Random(seed)
    fields = rng.choice([{"json_schema": PERSON}, {"json_schema": TREE}, {"grammar": SUM}, {"regex": "[a-c]*x"}])
    states = [state_of(compiler, **fields) for _ in range(2)]
    for _ in range(rng.randrange(12)):
        ids = [i for i in allowed_ids(mask_of(states[0], compiler)).tolist() if i not in vocabulary[1]]
        if not ids:
            break
        token_id = rng.choice(ids)
        assert all(state.accept([token_id]) for state in states)
    return states


def test_masks_filled_in_parallel_equal_those_filled_one_by_one(compiler, vocabulary, pool):
    pairs = [advanced(compiler, vocabulary, seed) for seed in range(24)]
    for num_states in (0, 1, 24):
        out_NW = np.full((num_states, compiler.num_words), -1, np.int32)
        pool.fill(out_NW, [pair[0] for pair in pairs[:num_states]]).result(10)
        for mask_W, (_, state) in zip(out_NW, pairs, strict=False):
            assert np.array_equal(mask_W, mask_of(state, compiler))


def test_a_state_whose_mask_the_library_cannot_compute_fails_alone(compiler, vocabulary, pool):
    eos_ids = vocabulary[1]
    states = [state_of(compiler, regex=f"{letter}[0-9]+") for letter in "abc"]
    expected = [allowed_ids(mask_of(state, compiler)) for state in states]
    states[1].matcher = object()
    masks_NW = np.empty((3, compiler.num_words), np.int32)
    for _ in range(2):
        pool.fill(masks_NW, states).result(60)
        found = [allowed_ids(mask_W) for mask_W in masks_NW]
        assert found[0].tolist() == expected[0].tolist()
        assert found[2].tolist() == expected[2].tolist()
        assert set(found[1].tolist()) == eos_ids
        assert [state.error is None for state in states] == [True, False, True]
    assert not states[1].accept([int(expected[1][0])])
    assert states[0].accept([int(expected[0][0])])


def test_a_state_that_the_library_cannot_advance_fails_alone(compiler):
    states = [state_of(compiler, regex="[0-9]+") for _ in range(2)]
    token_id = int(allowed_ids(mask_of(states[0], compiler))[0])
    states[0].matcher = object()
    assert [state.accept([token_id]) for state in states] == [False, True]
    assert states[0].error == "structured.regex: the grammar cannot be continued"


def test_threads_share_a_compiler(compiler, vocabulary):
    def run(seed):
        rng = random.Random(seed)
        for _ in range(4):
            schema = rng.choice(SCHEMAS)
            jsonschema.validate(
                json.loads(walk(state_of(compiler, json_schema=schema), compiler, vocabulary, rng)), schema
            )

    with ThreadPoolExecutor(6) as executor:
        list(executor.map(run, range(6)))


def soon(compiler, **fields):
    """The state of a grammar that compiles at once, on a machine that may be too busy for a short deadline."""
    for _ in range(20):
        try:
            return state_of(compiler, **fields)
        except RequestError as error:
            assert "too large or too complex" in str(error)  # noqa: PT017
    return state_of(compiler, **fields)


HOSTILE = {
    "exponential": {"json_schema": TOO_SLOW},
    "doubling": {"grammar": 'start: T60\nT0: "a"\n' + "".join(f"T{i}: T{i - 1} T{i - 1}\n" for i in range(1, 61))},
    "unsatisfiable": {"json_schema": {"type": "integer", "minimum": 5, "maximum": 3}},
    "infinite": {"json_schema": {"$ref": "#"}},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_grammar_fails_within_its_bound(name, impatient):
    with pytest.raises(RequestError, match=r"structured\.\w+: (it is too large or too complex|no text matches it)"):
        impatient.compile(StructuredOutput(**HOSTILE[name])).result(60)
    assert len(allowed_ids(mask_of(soon(impatient, regex=f"{name}[0-9]"), impatient)))


@pytest.mark.parametrize("regex", ["(a{1000}){1000}", "((a{100}){100}){100}"])
def test_a_grammar_that_fails_at_its_second_token_is_refused_by_the_check(regex, compiler, monkeypatch):
    """Its first step takes 0.15 s, during which other requests would wait, so only the checking process runs it."""
    monkeypatch.setattr(compiler._vocabulary, "compile", None)  # this process compiles nothing
    with pytest.raises(RequestError, match="too large or too complex"):
        compiler.compile(StructuredOutput(regex=regex)).result(60)


LARGE = {
    "repetition": {"regex": "(a{1,1000}){1,1000}"},
    "quadratic": {"regex": "(ab?)*c?" * 1000},
    "enum": {"json_schema": {"enum": [f"value {i}" for i in range(10_000)]}},
    "doubling": {"grammar": 'start: r60\nr0: "a"\n' + "".join(f"r{i}: r{i - 1} r{i - 1}\n" for i in range(1, 61))},
    "deep rules": {"grammar": 'start: r4000\nr0: "a"\n' + "".join(f"r{i}: r{i - 1}\n" for i in range(1, 4001))},
    "deep references": {
        "json_schema": {
            "$defs": {f"a{i}": {"$ref": f"#/$defs/a{i - 1}"} if i else {"type": "null"} for i in range(4000)},
            "$ref": "#/$defs/a3999",
        }
    },
}  # fmt: skip


@pytest.mark.parametrize("name", LARGE)
def test_a_large_grammar_compiles_or_fails_and_takes_nothing_down(name, impatient):
    try:
        assert len(allowed_ids(mask_of(state_of(impatient, **LARGE[name]), impatient)))
    except RequestError as error:
        assert "too large or too complex" in str(error)  # noqa: PT017


def test_a_checking_process_that_was_killed_is_replaced(compiler):
    state_of(compiler, regex="killed[0-9]")
    for pid in compiler.checker_pids:
        os.kill(pid, signal.SIGKILL)
    assert len(allowed_ids(mask_of(state_of(compiler, regex="killed[a-z]"), compiler)))


def make_compiler(vocabulary, **settings):
    tokenizer, eos_ids, vocab_size = vocabulary
    return GrammarCompiler(tokenizer, eos_ids=eos_ids, vocab_size=vocab_size, **settings)


def test_compiled_grammars_are_reused_and_their_number_is_bounded():
    tokenizer, eos_ids = words_tokenizer()
    compiler = make_compiler((tokenizer, eos_ids, tokenizer.vocab_size), max_cached=2, max_lexers=1)
    for regex in ("a+", "b+", "c+", "b+", "c+"):
        assert compiler.compile(StructuredOutput(regex=regex)).result()
        assert compiler.num_cached <= 2
    for pid in compiler.checker_pids:  # without the process that checks new grammars
        os.kill(pid, signal.SIGSTOP)
    assert compiler.compile(StructuredOutput(regex="c+")).done(), "no thread has to compile it"
    evicted = compiler.compile(StructuredOutput(regex="a+"))
    assert not evicted.done()
    for pid in compiler.checker_pids:
        os.kill(pid, signal.SIGCONT)
    assert evicted.result(60)
    lexers = {state_of(compiler, regex="c+").lexer_id for _ in range(4)}
    assert len(lexers) == 1
    compiler.close()


def test_requests_with_one_grammar_get_lexers_of_their_own_up_to_a_bound():
    tokenizer, eos_ids = words_tokenizer()
    compiler = make_compiler((tokenizer, eos_ids, tokenizer.vocab_size), max_lexers=3)
    together = [compiler.compile(StructuredOutput(json_schema=TREE)) for _ in range(9)]
    assert len({future.result(60).lexer_id for future in together}) == 3
    for regex in ("a+", "a+", "a+", "a+", "warm"):  # further matchers are compiled in the background
        soon(compiler, regex=regex)
    deadline = time.monotonic() + 60
    while len({state_of(compiler, regex="a+").lexer_id for _ in range(9)}) < 3:
        assert time.monotonic() < deadline
    assert len({state_of(compiler, regex="a+").lexer_id for _ in range(9)}) == 3
    compiler.close()


def slow_grammars(compiler, count):
    return [compiler.compile(StructuredOutput(json_schema={**TOO_SLOW, "title": str(i)})) for i in range(count)]


def test_hostile_grammars_hold_up_neither_compiled_ones_nor_those_that_compile_quickly():
    tokenizer, eos_ids = words_tokenizer()
    compiler = make_compiler((tokenizer, eos_ids, tokenizer.vocab_size))
    soon(compiler, json_object=True)
    hostile = slow_grammars(compiler, 20)  # 50 s of work for two checking processes
    assert compiler.compile(StructuredOutput(json_object=True)).done()
    assert compiler.compile(StructuredOutput(regex="[a-z]+")).result(15)
    assert sum(future.done() for future in hostile) < 20
    compiler.close()


def test_a_grammar_that_every_request_has_left_is_not_compiled():
    tokenizer, eos_ids = words_tokenizer()
    compiler = make_compiler((tokenizer, eos_ids, tokenizer.vocab_size), max_pending=21)
    soon(compiler, regex="warm")
    left = slow_grammars(compiler, 20)
    both = [compiler.compile(StructuredOutput(regex="b+")) for _ in range(2)]
    for future in [*left, both[0]]:
        assert future.cancel()
    assert both[1].result(15), "the other one still waits"
    deadline = time.monotonic() + 15  # the two running checks end first
    while (future := compiler.compile(StructuredOutput(regex="c+"))).done():
        assert time.monotonic() < deadline, future.exception()
    assert future.result(15)
    assert compiler.num_cached == 3
    compiler.close()


def test_grammars_waiting_to_be_compiled_are_bounded():
    tokenizer, eos_ids = words_tokenizer()
    compiler = make_compiler((tokenizer, eos_ids, tokenizer.vocab_size), max_pending=2, num_threads=1, timeout_s=0.5)
    soon(compiler, regex="warm")
    slow = [compiler.compile(StructuredOutput(json_schema={**TOO_SLOW, "title": str(i)})) for i in range(3)]
    with pytest.raises(RequestError, match="too many grammars"):
        slow[2].result(0)
    for future in slow[:2]:
        with pytest.raises(RequestError, match="too complex to be compiled"):
            future.result(60)
    assert soon(compiler, regex="a+")
    compiler.close()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"json_schema": {"not": {"type": "string"}}}, '"not" is not supported'),
        ({"json_schema": {"type": "string", "format": "zip-code"}}, "format zip-code is not supported"),
        ({"json_schema": {"$ref": "#/$defs/x"}}, "does not exist"),
        ({"json_schema": {"type": "strin"}}, "not a valid json schema"),
        ({"json_schema": {"oneOf": [{"type": "string"}, {"maxLength": 3}]}}, "Use anyOf"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"regex": "["}, "not a valid regex"),
        ({"grammar": 'start: "a" x'}, "line 1, column 8"),
        ({"grammar": 'begin: "a"'}, "not a valid grammar"),
    ],
)
def test_a_grammar_that_cannot_be_compiled_fails_with_the_reason(fields, message, impatient):
    with pytest.raises(RequestError, match=re.escape(message)) as failure:
        state_of(impatient, **fields)
    assert str(failure.value).startswith(f"structured.{next(iter(fields))}: ")
    assert "\n" not in str(failure.value)


@pytest.mark.parametrize(
    "fields",
    [
        {"json_schema": PERSON},
        {"json_schema": '{"type": "object"}'},
        {"json_object": True},
        {"regex": "é+"},
        {"choice": CHOICES},
        {"grammar": SUM},
    ],
)
def test_what_is_demanded_travels_as_json(fields):
    structured = StructuredOutput(**fields)
    again = StructuredOutput.from_dict(json.loads(json.dumps(structured.to_dict())))
    assert again == structured
    assert hash(again) == hash(structured)


def nested(depth):
    schema = {"type": "null"}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "sets nothing"),
        ({"regex": "a", "json_object": True}, "json_object and regex"),
        ({"json_schema": "{"}, "not JSON"),
        ({"json_schema": "[1]"}, "not an object"),
        ({"json_schema": {"a": float("nan")}}, "not JSON"),
        ({"json_schema": {"a": object()}}, "not JSON"),
        ({"json_schema": {"x-guidance": {}}}, "x-guidance"),
        ({"json_schema": {"items": {"$ref": "https://example.com/s"}}}, "only references within"),
        ({"json_schema": nested(200)}, "levels deep"),
        ({"json_schema": '{"items":' * 100_000}, "at most"),
        ({"json_schema": '{"items":' * 20_000}, "not JSON"),
        ({"json_schema": {"title": "x" * 300_000}}, "at most 262144"),
        ({"regex": "a" * 20_000}, "at most 16384"),
        ({"regex": ""}, "not empty"),
        ({"regex": "\ud800"}, "Unicode"),
        ({"regex": 5}, "text"),
        ({"regex": "\\"}, "regex ends with a backslash"),
        ({"regex": "a\\\\\\"}, "regex ends with a backslash"),
        ({"json_schema": {"pattern": "a\\"}}, "json_schema: the pattern 'a\\\\' ends with a backslash"),
        ({"json_schema": {"items": [{"anyOf": [{"pattern": "^\\"}]}]}}, "ends with a backslash"),
        ({"json_schema": {"properties": {"enum": {"pattern": "a\\"}}}}, "ends with a backslash"),
        ({"json_schema": {"patternProperties": {"b\\": {}}}}, "ends with a backslash"),
        ({"json_schema": '{"$defs": {"x": {"pattern": "\\\\"}}}'}, "ends with a backslash"),
        ({"grammar": "a" * 70_000}, "at most 65536"),
        ({"choice": ()}, "1 to 4096"),
        ({"choice": "abc"}, "1 to 4096"),
        ({"choice": ("a",) * 5000}, "1 to 4096"),
        ({"choice": ("a" * 40_000, "b" * 40_000)}, "at most 65536"),
        ({"choice": ("a", 3)}, "choice is 3"),
        ({"json_object": "yes"}, "json_object is 'yes'"),
    ],
)
def test_what_is_out_of_bounds_is_refused(fields, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        StructuredOutput(**fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"regex": "a\\\\"},
        {"json_schema": {"pattern": "a\\\\"}},
        {"json_schema": {"properties": {"pattern": {"const": "a\\"}}}},
        {"json_schema": {"enum": [{"pattern": "a\\"}], "default": {"pattern": "a\\"}}},
    ],
    ids=str,
)
def test_a_backslash_that_is_escaped_or_in_a_value_is_no_error(fields):
    assert StructuredOutput(**fields)


def test_unknown_fields_of_a_message_are_refused():
    with pytest.raises(ConfigError, match="schema; its fields are json_schema"):
        StructuredOutput.from_dict({"schema": {}})
    with pytest.raises(ConfigError, match="its fields are"):
        StructuredOutput.from_dict(["regex"])


def test_a_missing_library_is_one_clear_error(monkeypatch, vocabulary):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(UserError, match=re.escape("pip install 'saccade[structured]'")):
        make_compiler(vocabulary)
    with pytest.raises(UserError, match="llguidance"):
        MaskPool()


def test_the_modules_import_without_the_library_and_without_torch():
    script = (
        "import sys; sys.modules['llguidance'] = None; import saccade.engine.core.grammar.grammars; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
