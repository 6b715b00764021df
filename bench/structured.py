"""Structured output on the host: time to compile a grammar, and time of a step's masks, serial and in parallel.

    python -m bench.structured [--checkpoint FOLDER] [--threads N]

Without a checkpoint the tokenizer is a byte-level BPE of 151,643 tokens trained on the installed Python packages (about 20 s).
Outputs follow 16 schemas of 9 fields; states stand at random points of such an output, as requests in decode do.
"""

import argparse
import json
import os
import random
import resource
import statistics
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from saccade.engine.core.grammar.compiler import GrammarCompiler
from saccade.engine.core.grammar.masks import MaskPool
from saccade.engine.core.grammar.state import GrammarState
from saccade.engine.structured import StructuredOutput
from saccade.processor.tokenizer import Tokenizer

VOCAB = 151936
NUM_STEPS = 60
FIELDS = {
    "name": {"type": "string", "maxLength": 80},
    "age": {"type": "integer", "minimum": 0, "maximum": 150},
    "email": {"type": "string", "format": "email"},
    "kind": {"enum": ["person", "company", "animal"]},
    "summary": {"type": "string"},
    "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 8},
    "address": {
        "type": "object",
        "properties": {"street": {"type": "string"}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
        "required": ["street", "zip"],
        "additionalProperties": False,
    },
    "score": {"type": "number"},
    "is_known": {"type": "boolean"},
}
VALUES = {
    "name": "Ada Lovelace of London",
    "age": 36,
    "email": "ada@example.com",
    "kind": "person",
    "summary": "Wrote the first programs for the Analytical Engine, and saw that it could work on more than numbers.",
    "tags": ["mathematics", "engine", "poetry"],
    "address": {"street": "12 St James's Square", "zip": "12345"},
    "score": 9.5,
    "is_known": True,
}


def schema(number: int) -> dict[str, Any]:
    """One of 16 schemas that differ in the names of their fields."""
    properties = {f"{name}_{number}": field for name, field in FIELDS.items()}
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def output(number: int) -> str:
    """A text that is valid by it."""
    return json.dumps({f"{name}_{number}": value for name, value in VALUES.items()}, indent=1)


def trained_tokenizer() -> Tokenizer:
    """A byte-level BPE as large as that of a real model."""

    def texts(max_bytes: int = 60_000_000) -> Iterator[str]:
        for path in sorted(Path(sysconfig.get_paths()["purelib"]).rglob("*.py")):
            if max_bytes > 0 and path.stat().st_size < 200_000:
                text = path.read_text(encoding="utf-8", errors="replace")
                max_bytes -= len(text)
                yield text

    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=151_643,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        special_tokens=[],
    )
    made.train_from_iterator(texts(), trainer)
    made.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    return Tokenizer(json.loads(made.to_str()))


def timed_ms(run: Callable[[], object]) -> float:
    """Wall time of one call."""
    begin = time.perf_counter()
    run()
    return (time.perf_counter() - begin) * 1e3


def compile_rows(compiler: GrammarCompiler) -> None:
    """Time to the first state of a new grammar, and of the tenth request for it."""
    grammars = {
        "9 fields": StructuredOutput(json_schema=schema(99)),
        "300 fields": StructuredOutput(
            json_schema={
                "type": "object",
                "properties": {f"f{i}": {"type": "string", "maxLength": i + 1} for i in range(300)},
            }
        ),
        "JSON object": StructuredOutput(json_object=True),
        "regex": StructuredOutput(regex=r"(\d{1,3}\.){3}\d{1,3}(:\d{1,5})?"),
        "1000 choices": StructuredOutput(choice=tuple(f"choice number {i}" for i in range(1000))),
        "Lark": StructuredOutput(
            grammar='start: sum\nsum: term ("+" term)*\nterm: /[0-9]+/ | "(" sum ")"\n%ignore / /\n'
        ),
    }
    print(f"\n{'grammar':<14} {'new, ms':>9} {'tenth, ms':>10}")
    for name, structured in grammars.items():
        times = [timed_ms(lambda: compiler.compile(structured).result()) for _ in range(10)]  # noqa: B023
        print(f"{name:<14} {times[0]:>9.2f} {times[-1]:>10.3f}")


def walk_ms(
    states: list[GrammarState], token_ids: list[list[int]], fill: Callable[[], object]
) -> tuple[list[float], list[float]]:
    """Times of the masks and of accepting tokens, per step of all states."""
    masks, accepts = [], []
    for step in range(NUM_STEPS):
        masks.append(timed_ms(fill))
        accepts.append(timed_ms(lambda: [s.accept([t[step]]) for s, t in zip(states, token_ids, strict=True)]))  # noqa: B023
    assert all(state.error is None for state in states)
    return masks, accepts


def mask_rows(compiler: GrammarCompiler, tokenizer: Tokenizer, num_threads: int | None) -> None:
    """A step's masks for 1, 16 and 64 requests."""
    pool = MaskPool(num_threads)
    header = "states schemas  serial, ms  us/mask  parallel, ms   p99  us/mask  accept, ms"
    print(f"\n{header}")
    for num_states, num_schemas in ((1, 1), (16, 1), (16, 16), (64, 1), (64, 16)):
        out_NW = np.empty((num_states, compiler.num_words), np.int32)
        means: dict[str, list[float]] = {}
        for kind in ("warm", "serial", "parallel"):
            states, later, rng = [], [], random.Random(0)
            for n in range(num_states):
                ids = tokenizer.encode_text(output(n % num_schemas))
                begin = rng.randrange(len(ids) - NUM_STEPS)
                states.append(compiler.compile(StructuredOutput(json_schema=schema(n % num_schemas))).result())
                assert states[-1].accept(ids[:begin])
                later.append(ids[begin:])
            serial = lambda: [pool.fill(out_NW[n : n + 1], [s]).result() for n, s in enumerate(states)]  # noqa: B023, E731
            parallel = lambda: pool.fill(out_NW, states).result()  # noqa: B023, E731
            means[kind], accepts = walk_ms(states, later, parallel if kind == "parallel" else serial)
        serial_ms, parallel_ms = (statistics.mean(means[kind]) for kind in ("serial", "parallel"))
        p99 = sorted(means["parallel"])[int(0.99 * NUM_STEPS)]
        print(
            f"{num_states:>6} {num_schemas:>7} {serial_ms:>11.3f} {1e3 * serial_ms / num_states:>8.1f} {parallel_ms:>13.3f} "
            f"{p99:>5.2f} {1e3 * parallel_ms / num_states:>8.1f} {statistics.mean(accepts):>11.3f}"
        )
    pool.close()


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint", type=Path, help="checkpoint folder whose tokenizer is used")
    parser.add_argument("--threads", type=int, help="threads that compute masks")
    options = parser.parse_args()
    tokenizer = Tokenizer.load(options.checkpoint) if options.checkpoint else trained_tokenizer()
    eos_ids = {i for name, i in tokenizer.control_ids.items() if name in ("<|im_end|>", "<|endoftext|>")}
    vocab_size = max(VOCAB, tokenizer.vocab_size)
    begin = time.perf_counter()
    compiler = GrammarCompiler(tokenizer, eos_ids=eos_ids, vocab_size=vocab_size)
    built_s = time.perf_counter() - begin
    first_s = timed_ms(lambda: compiler.compile(StructuredOutput(regex="a")).result()) / 1e3
    print(
        f"{tokenizer.vocab_size} tokens, {os.cpu_count()} cores: compiler {built_s:.2f} s, its child process {first_s:.2f} s later"
    )
    compile_rows(compiler)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    mask_rows(compiler, tokenizer, options.threads)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(f"\nmemory added by 16 schemas, 8 lexers each, and the states: {grown:.0f} MB")
    compiler.close()


if __name__ == "__main__":
    main()
