"""Random mixed requests in one engine; each result is compared with that of the request alone in another engine.

    PYTHONPATH=tests python -m engine.mixed_requests [--rounds 8] [--requests 40] [--seed 0] [--families qwen3_vl]

Requests have text and images, many of them shared; greedy and random sampling, penalties, biases, grammars, stop
strings, log-probabilities and several completions; adapters, priorities and salts. They come from 16 threads, streamed
or whole, and some streams are closed early. Each round configures the engine differently: few pages, so that requests
are preempted; small steps, passes and caches, which are on or off; with or without drafts. In fp32 on a CPU every
result must be that of an engine that runs one completion at a time and caches nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from engine.making_adapters import write_adapters
from engine.tiny import PICTURES, WORDS
from model import llava_onevision
from model.hugging_face import OTHER_SHAPES, SHAPES, make_checkpoint

from saccade.engine import CompletionDelta, Engine, EngineConfig, RequestOptions, SamplingParams
from saccade.engine.core import grammar_requests
from saccade.engine.core.step_budget import StepBudget
from saccade.engine.request import Completion, TokenLogprobs

FAMILIES = {"qwen2_5_vl": SHAPES[0], "qwen3_vl": OTHER_SHAPES[4], "llava_onevision": llava_onevision.SHAPES[0]}
ADAPTERS: dict[str, Any] = {
    "everything": {"r": 8, "lora_alpha": 16, "target_modules": r".*language_model.*_proj"},
    "attention": {"r": 4, "lora_alpha": 6, "target_modules": r".*language_model.*(q_proj|v_proj)"},
}
MAX_LENGTH = 256
NUM_THREADS = 16
TOLERANCE = 1e-3
"""Maximum difference of log-probabilities: steps of other shapes round differently."""
FORMS: list[dict[str, Any]] = [
    {"regex": "(ab|cd){2,6}-[0-9]{3}"},
    {"choice": ["yes", "no", "a cat"]},
    {"grammar": 'start: "x" NUMBER\nNUMBER: /[0-9]{2,9}/'},
    {
        "json_schema": {
            "type": "object",
            "properties": {
                "count": {"type": "integer", "minimum": 0, "maximum": 99},
                "colour": {"enum": ["red", "green"]},
            },
            "required": ["count", "colour"],
            "additionalProperties": False,
        }
    },
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class MixedRequest:
    """A request to an engine."""

    messages: list[dict[str, Any]]
    sampling: SamplingParams
    adapter: str | None
    priority: int
    salt: bytes
    streams: bool
    left_after: int | None
    """Tokens after which the stream is closed. None: it is read to its end."""


@dataclass
class Report:
    """Results of comparisons."""

    num_comparisons: int = 0
    """Number of completions compared, whole or up to where their stream was closed."""
    differences: list[str] = field(default_factory=list)
    events: Counter[str] = field(default_factory=Counter)
    """Counts of engine events and request features."""

    def add(self, other: Report) -> None:
        """Add the results of another report."""
        self.num_comparisons += other.num_comparisons
        self.differences += other.differences
        self.events += other.events


# ------------------------------------------------------------------ requests


def draw_requests(rng: random.Random, letters: Sequence[int], count: int) -> list[MixedRequest]:
    """`letters`: the tokens of a, b and c. Biases to them make outputs repeat, so that they are drafted and stopped."""
    conversations = [draw_messages(rng) for _ in range(max(2, count // 3))]
    return [draw_request(rng, letters, rng.choice(conversations)) for _ in range(count)]


def draw_messages(rng: random.Random) -> list[dict[str, Any]]:
    content: list[dict[str, Any]] = []
    if rng.random() < 0.4:
        content.append({"type": "text", "text": "you are a careful assistant "})
    for _ in range(rng.choice([0, 0, 1, 1, 2])):
        content.append({"type": "image", "image": rng.choice(PICTURES)})
    content.append({"type": "text", "text": " ".join(rng.choices(WORDS, k=rng.randint(1, 12)))})
    return [{"role": "user", "content": content}]


def draw_request(rng: random.Random, letters: Sequence[int], messages: list[dict[str, Any]]) -> MixedRequest:
    temperature = rng.choice([0.0, 0.0, 0.7, 1.3])
    fields: dict[str, Any] = {
        "max_tokens": rng.choice([1, 4, 16, 32, 64]),
        "temperature": temperature,
        "seed": rng.randrange(2**40),
        "logprobs": rng.choice([None, None, 0, 3]),
        "prompt_logprobs": rng.choice([None] * 7 + [1]),
    }
    if rng.random() < 0.3:
        fields |= {"top_k": rng.choice([2, 20]), "top_p": rng.choice([0.5, 0.95]), "min_p": rng.choice([0.0, 0.05])}
    if rng.random() < 0.4:
        fields |= {
            "repetition_penalty": rng.choice([1.0, 1.3, 0.8]),
            "presence_penalty": rng.choice([0.0, 0.7]),
            "frequency_penalty": rng.choice([0.3, 1.5]),
        }
    if rng.random() < 0.25:
        fields["structured"] = rng.choice(FORMS)
    else:
        fields |= {"ignore_eos": rng.random() < 0.5, "min_tokens": rng.choice([0, 0, fields["max_tokens"] // 2])}
        if rng.random() < 0.5:
            fields["logit_bias"] = dict.fromkeys(letters[: rng.randint(1, 3)], 40.0)
    if rng.random() < 0.5:
        fields["stop"] = ["".join(rng.choices("abc", k=rng.randint(1, 3))), "a" * rng.randint(5, 12)]
    streams = rng.random() < 0.6
    if not streams and temperature:
        fields["n"] = rng.choice([1, 2, 3])
    return MixedRequest(
        messages=messages,
        sampling=SamplingParams(**fields),
        adapter=rng.choice([None, None, *ADAPTERS]),
        priority=rng.choice([0, 0, -1, 2]),
        salt=rng.choice([b"", b"", b"tenant"]),
        streams=streams,
        left_after=rng.randint(1, 20) if streams and rng.random() < 0.25 else None,
    )


def draw_config(rng: random.Random) -> EngineConfig:
    """A random configuration with small limits and pages for few requests of the maximum length."""
    page_size = rng.choice([1, 4, 8, 16])
    return EngineConfig(
        page_size=page_size,
        num_pages=(MAX_LENGTH + rng.choice([0, 0, 200])) // page_size + 1,
        max_length=MAX_LENGTH,
        max_requests=rng.choice([4, 6, 8]),
        max_step_tokens=rng.choice([24, 64, 256]),
        max_encoder_patches=rng.choice([64, 256, 4096]),
        encoder_cache_tokens=rng.choice([256, 512, 4096]),
        encoder_cache=rng.random() < 0.6,
        prefix_cache=rng.random() < 0.7,
        target_step_ms=rng.choice([None, 1.0, 13.0]),
        max_draft_tokens=rng.choice([0, 3, 7]),
        max_adapters=len(ADAPTERS),
        num_workers=0,
    )


ALONE = EngineConfig(
    page_size=16, num_pages=MAX_LENGTH // 16 + 1, max_length=MAX_LENGTH, max_requests=1, max_draft_tokens=0,
    prefix_cache=False, encoder_cache=False, processed_image_cache_bytes=0, max_adapters=len(ADAPTERS), num_workers=0,
)  # fmt: skip


# ------------------------------------------------------------------ answers


class Answer:
    """The completions of a request, without one if its stream was closed early, and the deltas of its stream."""

    def __init__(self, completions: Sequence[Completion], deltas: Sequence[CompletionDelta] = ()) -> None:
        self.completions, self.deltas = completions, deltas


def ask(engine: Engine, request: MixedRequest) -> Answer:
    """Send a request and wait for its result."""
    options = RequestOptions(priority=request.priority, salt=request.salt, adapter=request.adapter)
    if not request.streams:
        return Answer(engine.generate([request.messages], request.sampling, options=options))

    async def read() -> list[CompletionDelta]:
        deltas: list[CompletionDelta] = []
        async with contextlib.aclosing(engine.stream(request.messages, request.sampling, options=options)) as stream:
            async for delta in stream:
                deltas.append(delta)
                if request.left_after is not None and sum(len(one.token_ids) for one in deltas) >= request.left_after:
                    break
        return deltas

    deltas = asyncio.run(read())
    last = deltas[-1].completion
    return Answer([] if last is None else [last], deltas)


def compare(request: MixedRequest, alone: Sequence[Completion], answer: Answer) -> Report:
    """Compare an answer with the completions of the same request alone, and a stream with its completion."""
    report = Report(num_comparisons=max(1, len(answer.completions)))
    differences: list[str] = []
    for ours, theirs in zip(answer.completions, alone, strict=bool(answer.completions)):
        for name in ("text", "token_ids", "finish_reason", "failure", "num_prompt_tokens"):
            if getattr(ours, name) != getattr(theirs, name):
                differences.append(f"{name}: {getattr(ours, name)!r} instead of {getattr(theirs, name)!r}")
        for name in ("logprobs", "prompt_logprobs"):
            if not are_close(getattr(ours, name), getattr(theirs, name)):
                differences.append(f"{name}: {getattr(ours, name)!r} instead of {getattr(theirs, name)!r}")
        report.events[f"ended by {ours.finish_reason}"] += 1
    if request.streams:
        differences += compare_stream(answer, alone[0])
        report.events["left"] += not answer.completions
    report.differences = [f"{request}: {difference}" for difference in differences]
    return report


def compare_stream(answer: Answer, alone: Completion) -> Iterator[str]:
    """Compare deltas, as far as they were read, with the completion alone. Yields the differences."""
    text = "".join(delta.text for delta in answer.deltas)
    token_ids = [token for delta in answer.deltas for token in delta.token_ids]
    logprobs = [one for delta in answer.deltas for one in delta.logprobs]
    if answer.completions:
        is_equal = text == alone.text and token_ids == alone.token_ids
    else:
        is_equal = alone.text.startswith(text) and alone.token_ids[: len(token_ids)] == token_ids
    if not is_equal:
        yield f"streamed {text!r}, {token_ids} instead of {alone.text!r}, {alone.token_ids}"
    if not are_close(logprobs, (alone.logprobs or [])[: len(token_ids)]):
        yield f"streamed {logprobs} instead of {alone.logprobs}"


def are_close(ours: Sequence[TokenLogprobs | None] | None, theirs: Sequence[TokenLogprobs | None] | None) -> bool:
    """Whether two lists have close log-probabilities of the same tokens. Most likely tokens may swap ranks."""
    if ours is None or theirs is None:
        return ours is theirs
    return len(ours) == len(theirs) and all(
        (one is None and other is None)
        or (
            one is not None
            and other is not None
            and one.token_id == other.token_id
            and len(one.top) == len(other.top)
            and abs(one.logprob - other.logprob) < TOLERANCE
            and all(abs(a - b) < TOLERANCE for (_, a), (_, b) in zip(one.top, other.top, strict=True))
        )
        for one, other in zip(ours, theirs, strict=True)
    )


# ------------------------------------------------------------------ rounds


def run_round(folder: Path, adapters: dict[str, Path], alone: Engine, *, seed: int, num_requests: int) -> Report:
    """Send random requests from many threads to a randomly configured engine, and compare with `alone`."""
    rng = random.Random(seed)
    letters = [alone.processor.tokenizer.encode_text(letter)[0] for letter in "abc"]
    requests, config = draw_requests(rng, letters, num_requests), draw_config(rng)
    long_masks = rng.choice([0.0, 1e9])  # steps leave out requests with a grammar, or wait for masks
    expected = [
        alone.generate([one.messages], one.sampling, options=RequestOptions(adapter=one.adapter)) for one in requests
    ]
    report = Report()
    with (
        patch.object(StepBudget, "token_cost", lambda *_: 0.25),  # drafts always pay
        patch.object(grammar_requests, "_LONG_MASKS", long_masks),
        Engine.load(folder, device="cpu", dtype="fp32", config=config, adapters=adapters) as engine,
        ThreadPoolExecutor(NUM_THREADS) as threads,
    ):
        answers = list(threads.map(lambda request: ask(engine, request), requests))
        statistics = engine.statistics
    for request, theirs, answer in zip(requests, expected, answers, strict=True):
        found = compare(request, theirs, answer)
        found.differences = [f"seed {seed}, {config}: {one}" for one in found.differences]
        report.add(found)
        report.events += Counter(features_of(request))
    report.events += Counter(
        {
            "preemptions": statistics.num_preemptions,
            "accepted drafts": statistics.num_accepted_draft_tokens,
            "cached tokens": statistics.num_cached_tokens,
            "images encoded": statistics.num_images_encoded,
            "encoder cache hits": statistics.num_encoder_cache_hits,
            "steps": statistics.num_steps,
        }
    )
    return report


def features_of(request: MixedRequest) -> list[str]:
    """Features of a request, for the report."""
    sampling = request.sampling
    has = {
        "with images": any(part["type"] == "image" for part in request.messages[0]["content"]),
        "with penalties": sampling.has_penalties,
        "with a grammar": sampling.structured is not None,
        "with stop strings": bool(sampling.stop),
        "with log-probabilities": sampling.logprobs is not None,
        "with a temperature": sampling.temperature > 0,
        "with several completions": sampling.n > 1,
        "with an adapter": request.adapter is not None,
        "streamed": request.streams,
    }
    return [name for name, is_so in has.items() if is_so]


def run(family: str, folder: Path, *, seeds: Sequence[int], num_requests: int) -> Report:
    """Run rounds with a tiny checkpoint of a family, written into `folder`."""
    checkpoint = make_checkpoint(folder / family, FAMILIES[family])
    adapters = write_adapters(checkpoint, folder / f"{family}-adapters", merges=False, **ADAPTERS)
    report = Report()
    with Engine.load(checkpoint, device="cpu", dtype="fp32", config=ALONE, adapters=adapters) as alone:
        for seed in seeds:
            report.add(run_round(checkpoint, adapters, alone, seed=seed, num_requests=num_requests))
    return report


def main() -> None:
    """Run rounds for each family and print the reports. Exits 1 if there is a difference."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8, help="engines per family")
    parser.add_argument("--requests", type=int, default=40, help="requests per round")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first round")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    args = parser.parse_args()
    logging.getLogger("saccade").setLevel(logging.ERROR)  # a stream that is closed early may log a warning
    num_differences = 0
    for family in args.families:
        with tempfile.TemporaryDirectory() as folder:
            seeds = range(args.seed, args.seed + args.rounds)
            report = run(family, Path(folder), seeds=seeds, num_requests=args.requests)
        num_differences += len(report.differences)
        print(f"{family}: {report.num_comparisons} comparisons, {len(report.differences)} differences")
        print("  " + ", ".join(f"{count} {name}" for name, count in sorted(report.events.items())))
        for difference in report.differences:
            print(f"  {difference}")
    sys.exit(num_differences > 0)


if __name__ == "__main__":
    main()
