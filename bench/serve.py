"""Offline latency and throughput of the engine on the workloads of docs/results/serving.md.

    python -m bench.serve [--size 3b | --checkpoint FOLDER] [--workload first latency images shared text long ...]
                          [--seed 0] [--profile] [--out rows.json]

Images are uniform noise, 672 x 672. A prompt with an image is the family's image tokens (of Qwen: vision-start, the
image, vision-end) and 62 random token ids. Greedy, end of turn ignored, prefix cache off. All requests of a workload
are submitted at once; TTFT is a request for one token on an idle engine, including preprocessing; TPOT is the rest of a
request for 128 tokens, divided by 127. A workload runs once to warm up and then `--rounds` times with other images and
tokens; the median is reported, with the time to drain: from the first completion to the last. vLLM's figures are
printed next to it only for the same model shape, workload and card.

`structured`: 64 requests with 16 JSON schemas among 64 without; the time of those without, compared with 128 without.
`drafts`: 1 and 8 requests that repeat themselves (two tokens have a bias that makes them follow) and that do not
(temperature 1); run it with `--set max_draft_tokens=0` and `=7` to compare.
"""

import argparse
import json
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
from PIL import Image

from saccade.engine import Completion, Engine, EngineConfig, SamplingParams
from saccade.engine.request import CompletionDelta
from saccade.processor.tokenizer import Tokenizer

Prompt = tuple[list[int], list[Image.Image]]
Record = dict[str, Any]

SIDE, NUM_TEXT, NUM_REQUESTS, NUM_OUTPUT = 672, 62, 256, 128
MAX_ID = 150_000
"""Random token ids are below this id and those of images."""
VLLM = {
    "start": "80 s",
    "ttft": "116 ms",
    "tpot": "3.03 ms",
    "images": "37.0 req/s",
    "shared": "89.6 req/s",
    "text": "15404 tok/s",
    "long": "17881 tok/s",
}
"""vLLM 0.26 on an H200 with the 3B shape and these workloads: its default process layout, after a warm-up round."""


def process_age() -> float:
    """Return the seconds since this process was started, importing torch included."""
    ticks = float(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    return uptime - ticks / os.sysconf("SC_CLK_TCK")


def device_name() -> str:
    """Return the name of the GPU, or cpu."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


class Prompts:
    """Random prompts for one model."""

    def __init__(self, folder: Path, seed: int, side: int = SIDE) -> None:
        from saccade.model.families import family_of  # it imports torch, which the start of an engine should do

        tokenizer = Tokenizer.load(folder)
        text = family_of(folder).image_text
        self.image_ids = [id for _, id in tokenizer.split_control(text) if id is not None]
        """Tokens of an image before its placeholder is expanded."""
        self._num_ids = min(*self.image_ids, MAX_ID)
        self._rng, self._side = np.random.default_rng(seed), side

    def image(self, height: int | None = None, width: int | None = None) -> Image.Image:
        """Return a noise image."""
        size = height or self._side, width or self._side
        return Image.fromarray(self._rng.integers(0, 256, (*size, 3), dtype=np.uint8))

    def ids(self, count: int) -> list[int]:
        """Return random text tokens."""
        return [int(i) for i in self._rng.integers(1, self._num_ids, count)]

    def with_image(self, image: Image.Image | None = None, num_text: int = NUM_TEXT) -> Prompt:
        """Return a prompt of an image and text."""
        return [*self.image_ids, *self.ids(num_text)], [image or self.image()]

    def text(self, low: int, high: int) -> Prompt:
        """Return a text prompt of a random length."""
        return self.ids(int(self._rng.integers(low, high + 1))), []

    def lengths(self, low: int, high: int, count: int) -> list[int]:
        """Return random output lengths."""
        return [int(n) for n in self._rng.integers(low, high + 1, count)]


def greedy(num_tokens: int) -> SamplingParams:
    """Return greedy sampling of exactly this length."""
    return SamplingParams(max_tokens=num_tokens, ignore_eos=True)


class Timed(NamedTuple):
    """A batch of requests."""

    seconds: float
    """Until the last completion."""
    num_tokens: int
    """Output tokens."""
    drain_s: float
    """From the first completion to the last."""


def timed(engine: Engine, prompts: list[Prompt], samplings: list[SamplingParams]) -> Timed:
    """Run requests that are submitted at once."""
    ended: queue.SimpleQueue[tuple[float, SamplingParams, Completion]] = queue.SimpleQueue()

    def submit(prompt: Prompt, sampling: SamplingParams) -> None:
        def on_delta(delta: CompletionDelta) -> None:
            if delta.completion is not None:
                ended.put((time.perf_counter(), sampling, delta.completion))

        engine.submit(engine.preprocess_tokens(*prompt), sampling, on_delta, streams=False)

    begin = time.perf_counter()
    for prompt, sampling in zip(prompts, samplings, strict=True):
        submit(prompt, sampling)
    done = [ended.get() for _ in prompts]
    for _, sampling, completion in done:
        assert len(completion.token_ids) == sampling.max_tokens, completion.failure
    num_tokens = sum(len(completion.token_ids) for _, _, completion in done)
    return Timed(done[-1][0] - begin, num_tokens, done[-1][0] - done[0][0])


def latency(engine: Engine, prompts: Prompts, rounds: int) -> Iterator[Record]:
    """Measure TTFT and TPOT of one request at a time."""
    for _ in range(3):
        timed(engine, [prompts.with_image()], [greedy(NUM_OUTPUT)])
    first = [timed(engine, [prompts.with_image()], [greedy(1)]).seconds for _ in range(4 * rounds)]
    whole = [timed(engine, [prompts.with_image()], [greedy(NUM_OUTPUT)]).seconds for _ in range(2 * rounds)]
    ttft = statistics.median(first)
    tpot = (statistics.median(whole) - ttft) / (NUM_OUTPUT - 1)
    yield {"workload": "ttft", "value": f"{ttft * 1e3:.1f} ms", "ttft_ms": ttft * 1e3}
    yield {"workload": "tpot", "value": f"{tpot * 1e3:.2f} ms", "tpot_ms": tpot * 1e3}


def throughput(
    name: str, engine: Engine, make: Callable[[], tuple[list[Prompt], list[SamplingParams]]], rounds: int
) -> Record:
    """Measure requests and tokens per second of many requests at once."""
    timed(engine, *make())
    made = (make() for _ in range(rounds))
    found = sorted((timed(engine, *requests), len(requests[0])) for requests in made)
    run, num_requests = found[len(found) // 2]
    rates = run.num_tokens / run.seconds, num_requests / run.seconds
    return {
        "workload": name,
        "value": f"{rates[0]:.0f} tok/s" if name in ("text", "long") else f"{rates[1]:.1f} req/s",
        "requests_per_s": rates[1],
        "tokens_per_s": rates[0],
        "seconds": run.seconds,
        "drain_s": run.drain_s,
        "all_seconds": [one.seconds for one, _ in found],
    }


def workloads(prompts: Prompts, count: int) -> dict[str, Callable[[], tuple[list[Prompt], list[SamplingParams]]]]:
    """Return functions that make the requests of a round."""

    def shared() -> tuple[list[Prompt], list[SamplingParams]]:
        image = prompts.image()
        return [prompts.with_image(image) for _ in range(count)], [greedy(NUM_OUTPUT)] * count

    return {
        "images": lambda: ([prompts.with_image() for _ in range(count)], [greedy(NUM_OUTPUT)] * count),
        "shared": shared,
        "text": lambda: ([prompts.text(64, 512) for _ in range(count)], [greedy(NUM_OUTPUT)] * count),
        "long": lambda: (
            [prompts.text(100, 1024) for _ in range(count)],
            [greedy(n) for n in prompts.lengths(100, 1024, count)],
        ),
    }


def schema(number: int) -> dict[str, Any]:
    """Return one of 16 JSON schemas of bounded length."""
    kinds = ["person", "company", "animal"]
    fields: dict[str, Any] = {
        "name": {"type": "string", "maxLength": 24},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": kinds},
        "tags": {"type": "array", "items": {"enum": kinds}, "maxItems": 4},
        "is_known": {"type": "boolean"},
    }
    named = {f"{name}_{number}": field for name, field in fields.items()}
    return {"type": "object", "properties": named, "required": list(named), "additionalProperties": False}


def structured(engine: Engine, prompts: Prompts, rounds: int) -> Iterator[Record]:
    """Time requests without a grammar, mixed with others that have one and with others that have none."""
    import jsonschema

    half = NUM_REQUESTS // 4
    schemas = [schema(number % 16) for number in range(half)]
    constrained = [  # greedy, random weights never end a run of white space
        SamplingParams(max_tokens=1024, temperature=1.0, seed=seed, structured={"json_schema": one})
        for seed, one in enumerate(schemas)
    ]
    unconstrained = [
        SamplingParams(max_tokens=NUM_OUTPUT, temperature=1.0, seed=seed, ignore_eos=True) for seed in range(half)
    ]
    seconds: dict[str, list[float]] = {"with": [], "without": []}
    num_valid = 0
    for index in range(2 * (rounds + 1)):
        kind = ("with", "without")[index % 2]
        others = constrained if kind == "with" else unconstrained
        texts, last_s = _seconds_of_first(engine, prompts, half, others)
        if kind == "with":
            for text, one in zip(texts, schemas, strict=True):
                jsonschema.validate(json.loads(text), one)
            num_valid += len(texts)
        if index >= 2:
            seconds[kind].append(last_s)
    ratio = statistics.median(seconds["without"]) / statistics.median(seconds["with"])
    yield {"workload": "structured", "value": f"{ratio:.3f}x", "ratio": ratio, "num_valid": num_valid}


def _seconds_of_first(
    engine: Engine, prompts: Prompts, half: int, others: list[SamplingParams]
) -> tuple[list[str], float]:
    """Submit `half` plain requests and the others in turn; return the texts of the others and the time of the plain."""
    ended: queue.SimpleQueue[tuple[int, float, Any]] = queue.SimpleQueue()

    def submit(number: int, sampling: SamplingParams) -> None:
        def on_delta(delta: Any) -> None:
            if delta.completion is not None:
                ended.put((number, time.perf_counter(), delta.completion))

        engine.submit(engine.preprocess_tokens(*prompts.text(64, 512)), sampling, on_delta)

    begin = time.perf_counter()
    for index, sampling in enumerate(others):
        submit(2 * index, greedy(NUM_OUTPUT))
        submit(2 * index + 1, sampling)
    done = sorted([ended.get() for _ in range(2 * half)], key=lambda item: item[0])
    assert all(completion.failure is None for _, _, completion in done), "a request failed"
    plain, constrained = done[::2], done[1::2]
    return [completion.text for _, _, completion in constrained], max(at for _, at, _ in plain) - begin


def drafts(engine: Engine, prompts: Prompts, rounds: int) -> Iterator[Record]:
    """Measure tokens per second of few requests, repeating and random."""
    before = engine.statistics.num_accepted_draft_tokens
    biased = dict.fromkeys((1000, 2000), 100.0)
    for name, options in (("repeat", {"logit_bias": biased}), ("random", {"temperature": 1.0, "seed": 1})):
        for count in (1, 8):
            sampling = SamplingParams(max_tokens=4 * NUM_OUTPUT, ignore_eos=True, **options)
            found = [
                timed(engine, [prompts.text(64, 64) for _ in range(count)], [sampling] * count)
                for _ in range(rounds + 1)
            ]
            rate = statistics.median(one.num_tokens / one.seconds for one in found[1:])
            yield {"workload": f"{name} x {count}", "value": f"{rate:.0f} tok/s", "tokens_per_s": rate}
    accepted = engine.statistics.num_accepted_draft_tokens - before
    yield {"workload": "accepted drafts", "value": str(accepted)}


def profile(engine: Engine, prompts: Prompts, count: int) -> Iterator[Record]:
    """Measure the GPU utilization of one request and of many, from a profiler trace."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    for name, num in (("gpu busy, 1 request", 1), (f"gpu busy, {count} requests", count)):
        batch = [prompts.text(64, 64) for _ in range(num)]
        timed(engine, batch, [greedy(NUM_OUTPUT)] * num)
        with profiler(activities=[ProfilerActivity.CUDA]) as trace:
            seconds = timed(engine, [prompts.text(64, 64) for _ in range(num)], [greedy(NUM_OUTPUT)] * num).seconds
        spans = sorted(
            (event.time_range.start, event.time_range.end)
            for event in trace.events()
            if event.device_type.name == "CUDA"
        )
        busy, end = 0.0, 0.0
        for start, stop in spans:
            busy += max(0.0, stop - max(start, end))
            end = max(end, stop)
        share = busy / 1e6 / seconds
        yield {"workload": name, "value": f"{share:.1%}", "off_gpu": 1 - share}


def show(record: Record, is_comparable: bool) -> None:
    """Print one line."""
    peer = f"   vLLM 0.26: {VLLM.get(record['workload'], '-')}" if is_comparable else ""
    drain = f"   drains in {record['drain_s']:.2f} s" if "drain_s" in record else ""
    print(f"{record['workload']:<24}{record['value']:>16}{drain}{peer}", flush=True)


def is_comparable(checkpoint: Path, num_requests: int, side: int, device: str) -> bool:
    """Whether vLLM's figures are of the same model shape, workload and card."""
    from saccade.model.families import load_model_config
    from saccade.model.initialize import named_size

    model = load_model_config(checkpoint)
    return model == named_size("3b") and (num_requests, side) == (NUM_REQUESTS, SIDE) and "H200" in device


def make_checkpoint(folder: Path, size: str) -> None:
    """Write random weights of a named size, in another process so that this one starts clean."""
    code = (
        "import sys; from saccade.model.initialize import initialize_random, named_size; "
        "initialize_random(sys.argv[1], named_size(sys.argv[2]))"
    )
    subprocess.run([sys.executable, "-c", code, str(folder), size], check=True)


def run_with_checkpoint(module: str, size: str) -> NoReturn:
    """Run this command again in a new process, on a checkpoint of random weights."""
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "checkpoint"
        make_checkpoint(made, size)
        again = [sys.executable, "-m", module, *sys.argv[1:], "--checkpoint", str(made)]
        raise SystemExit(subprocess.run(again, check=False).returncode)


def main() -> None:
    """Run the selected workloads."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="3b")
    parser.add_argument("--checkpoint", type=Path)
    names = ["first", "latency", "images", "shared", "text", "long"]
    parser.add_argument("--workload", nargs="+", default=names, choices=[*names, "structured", "drafts"])
    parser.add_argument("--requests", type=int, default=NUM_REQUESTS)
    parser.add_argument("--side", type=int, default=SIDE)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0, help="of images and tokens")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="of EngineConfig")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.checkpoint is None:
        run_with_checkpoint("bench.serve", options.size)
    records = measure(options)
    comparable = is_comparable(options.checkpoint, options.requests, options.side, device_name())
    for record in records:
        show(record, comparable)


def measure(options: argparse.Namespace) -> list[Record]:
    """Return all records, which are also written to `--out`."""
    settings = {name: json.loads(value) for name, value in (item.split("=", 1) for item in options.set)}
    config = EngineConfig(
        **(
            {"prefix_cache": False, "max_draft_tokens": 0, "max_requests": options.requests, "max_length": 8192}
            | settings
        )
    )
    records: list[Record] = []

    def note(record: Record) -> None:
        records.append(record)
        print(f"{time.strftime('%H:%M:%S')} {record['workload']}: {record['value']}", file=sys.stderr, flush=True)

    with Engine.load(options.checkpoint, config=config) as engine:
        prompts = Prompts(options.checkpoint, options.seed, options.side)
        timed(engine, [prompts.with_image()], [greedy(1)])
        if "first" in options.workload:
            note({"workload": "start", "value": f"{process_age():.1f} s", "start_s": process_age()})
        if "latency" in options.workload:
            for record in latency(engine, prompts, options.rounds):
                note(record)
        for name, make in workloads(prompts, options.requests).items():
            if name in options.workload:
                note(throughput(name, engine, make, options.rounds))
        for name, run in (("structured", structured), ("drafts", drafts)):
            if name in options.workload:
                for record in run(engine, prompts, options.rounds):
                    note(record)
        if options.profile:
            for record in profile(engine, prompts, options.requests):
                note(record)
    if options.out:
        import torch

        found = {"device": device_name(), "torch": torch.__version__, "rows": records}
        options.out.write_text(json.dumps(found, indent=1))
    return records


if __name__ == "__main__":
    main()
