"""Open-loop serving: latency under requests that arrive one by one, at given rates.

    python -m bench.open_loop [--checkpoint FOLDER | --size 3b] [--rates 4 16 32 64] [--bursts 36] [--seconds 20 ...]
                              [--seed 0] [--once] [--trace FILE] [--plot FILE] [--out FILE]

The workload of docs/results/serving.md. Arrivals are a Poisson process. Every prompt begins with the same 40 tokens;
then 0, 1, 1 or 2 images (equally likely), each new, of a size drawn from `SIZES`; then text of exp(N(5, 1)) tokens
within 16..2048. Outputs have 16..256 tokens, greedy, end of turn ignored. Caches are on, drafts off. The rates of
`--bursts` run after those of `--rates`: the same requests, of which 8 on average arrive at the same moment. The first
rate runs twice, unless `--once`: the first run starts when the engine is ready. `--seconds` may give each rate its own.
Rate number i is drawn with seed `--seed` + i. Of more than 15 s, the TTFT of the requests of the first 15 is reported
as well.

A trace is a JSONL file with one request a line: `arrival_s`, `num_text`, `num_output`, and `images` as a list of
[height, width].

TTFT counts from the arrival, image preprocessing included. A gap is the time between two deltas of one request. Served
requests per second are those completed in the second half of the time in which requests arrive. The time to drain is
that from the last arrival to the last completion.
"""

import argparse
import dataclasses
import json
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.serve import Prompt, Prompts, process_age, run_with_checkpoint
from saccade.engine import Engine, EngineConfig, SamplingParams
from saccade.serve.load.summary import plot_latency

SIZES = (
    (224, 224), (336, 336), (336, 504), (448, 448), (448, 672), (672, 448), (672, 672), (896, 672), (1288, 952),
    (301, 517),
)  # fmt: skip
"""Height and width of images in pixels."""
NUM_PREFIX = 40
LATENCIES, LEVELS = (("TTFT", "ttft_ms"), ("gap", "gap_ms")), ("p50", "p99")
"""Figures of the plot."""
BURST = 8
"""Average requests of a burst."""
FIRST_S = 15.0
"""Seconds whose requests are also reported apart."""


class Arrival(NamedTuple):
    """One request of a workload."""

    arrival_s: float
    num_text: int
    num_output: int
    images: Sequence[tuple[int, int]]


def poisson(rate: float, seconds: float, seed: int) -> list[Arrival]:
    """Draw the requests of one run."""
    rng = np.random.default_rng(seed)
    arrivals, now = [], rng.exponential(1 / rate)
    while now < seconds:
        images = [SIZES[rng.integers(len(SIZES))] for _ in range(rng.choice([0, 1, 1, 2]))]
        num_text = int(np.clip(np.exp(rng.normal(5.0, 1.0)), 16, 2048))
        arrivals.append(Arrival(now, num_text, int(rng.integers(16, 257)), images))
        now += rng.exponential(1 / rate)
    return arrivals


def bursts(rate: float, seconds: float, seed: int) -> list[Arrival]:
    """Draw requests of which `BURST` on average (geometrically distributed) arrive at the same moment."""
    rng = np.random.default_rng([seed, BURST])
    drawn, arrivals, now = deque(poisson(rate, seconds, seed)), list[Arrival](), 0.0
    while drawn:
        now += rng.exponential(BURST / rate)
        size = min(int(rng.geometric(1 / BURST)), len(drawn))
        arrivals += [drawn.popleft()._replace(arrival_s=now) for _ in range(size)]
    return arrivals


def read_trace(path: Path) -> list[Arrival]:
    """Read the requests of a JSONL file."""
    records = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    return [Arrival(r["arrival_s"], r["num_text"], r["num_output"], [tuple(i) for i in r["images"]]) for r in records]


class Requests:
    """Prompts of arrivals, for one checkpoint."""

    def __init__(self, folder: Path, seed: int = 0) -> None:
        self._prompts = Prompts(folder, seed)
        self._prefix = self._prompts.ids(NUM_PREFIX)

    def make(self, arrival: Arrival) -> Prompt:
        """Return token ids and images."""
        ids = [*self._prefix, *self._prompts.image_ids * len(arrival.images), *self._prompts.ids(arrival.num_text)]
        return ids, [self._prompts.image(*size) for size in arrival.images]


def run(engine: Engine, requests: Requests, arrivals: Sequence[Arrival], name: str) -> dict[str, Any]:
    """Submit the requests at their times and measure."""
    made = [requests.make(arrival) for arrival in arrivals]
    times: list[list[float]] = [[] for _ in arrivals]
    failures: list[str] = []
    preprocess_s: list[float] = []
    ended = threading.Semaphore(0)

    def submit(index: int) -> None:
        def on_delta(delta: Any) -> None:
            if delta.token_ids:
                times[index].append(time.perf_counter())
            if delta.completion is not None:
                if delta.completion.failure is not None:
                    failures.append(delta.completion.failure.message)
                elif delta.completion.timings.preprocessed_s is not None:
                    preprocess_s.append(delta.completion.timings.preprocessed_s)
                ended.release()

        sampling = SamplingParams(max_tokens=arrivals[index].num_output, ignore_eos=True)
        engine.submit(engine.preprocess_tokens(*made[index]), sampling, on_delta)

    before = dataclasses.replace(engine.statistics)
    start = time.perf_counter()
    for index, arrival in enumerate(arrivals):
        time.sleep(max(0.0, start + arrival.arrival_s - time.perf_counter()))
        submit(index)
    for _ in arrivals:
        ended.acquire()
    total = time.perf_counter() - start
    assert not failures, failures[0]
    window = arrivals[-1].arrival_s
    completed = sum(window / 2 <= t[-1] - start <= window for t in times)
    ttft = np.array([t[0] - start - arrival.arrival_s for t, arrival in zip(times, arrivals, strict=True)]) * 1e3
    gaps = np.concatenate([np.diff(t) for t in times if len(t) > 1]) * 1e3
    return {
        "name": name,
        "num_requests": len(arrivals),
        "arrivals_per_s": len(arrivals) / window,
        "served_per_s": completed / (window / 2),
        "throughput_per_s": len(arrivals) / total,
        "drain_s": total - window,
        "ttft_ms": percentiles(ttft),
        "first_ttft_ms": percentiles(ttft[[one.arrival_s < arrivals[0].arrival_s + FIRST_S for one in arrivals]]),
        "preprocess_ms": percentiles(np.array(preprocess_s) * 1e3),
        "gap_ms": percentiles(gaps),
        "late_captures": engine.statistics.num_late_captures - before.num_late_captures,
        "late_compiles": engine.statistics.num_late_compiles - before.num_late_compiles,
    }


def percentiles(values: NDArray[Any]) -> dict[str, float]:
    """Return p50, p95, p99 and the maximum."""
    return {name: float(np.percentile(values, q)) for name, q in (("p50", 50), ("p95", 95), ("p99", 99), ("max", 100))}


def show(row: dict[str, Any]) -> str:
    """Write one line."""
    ttft, first, gap = (
        " / ".join(f"{row[kind][p]:.1f}" for p in ("p50", "p95", "p99", "max"))
        for kind in ("ttft_ms", "first_ttft_ms", "gap_ms")
    )
    first = f", of the first {FIRST_S:g} s {first}" if first != ttft else ""
    return (
        f"{row['name']:<14} arrivals {row['arrivals_per_s']:5.1f}/s  served {row['served_per_s']:5.1f}/s  "
        f"TTFT p50/95/99/max {ttft} ms{first} (preprocessing {row['preprocess_ms']['p50']:.1f})  gap {gap} ms  "
        f"drains in {row['drain_s']:.2f} s  late captures {row['late_captures']}, compiles {row['late_compiles']}"
    )


def runs_of(options: argparse.Namespace) -> list[tuple[str, list[Arrival]]]:
    """Return names and requests of the runs."""
    if options.trace:
        return [(options.trace.stem, read_trace(options.trace))]
    wanted = [(f"{rate:g}/s", poisson, rate) for rate in options.rates]
    wanted += [(f"{rate:g}/s bursts", bursts, rate) for rate in options.bursts]
    seconds = options.seconds + options.seconds[-1:] * len(wanted)
    return [
        (name, draw(rate, seconds[number], options.seed + number)) for number, (name, draw, rate) in enumerate(wanted)
    ]


def main() -> None:
    """Measure every rate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="3b")
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--rates", type=float, nargs="*", default=[4, 16, 32, 64])
    parser.add_argument("--bursts", type=float, nargs="*", default=[], help="rates of requests that arrive in bursts")
    parser.add_argument(
        "--seconds", type=float, nargs="+", default=[20.0], help="of each rate; the last one's of those left"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--once", action="store_true", help="run the first rate once")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="of EngineConfig")
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.checkpoint is None:
        run_with_checkpoint("bench.open_loop", options.size)
    requests, rows = Requests(options.checkpoint, options.seed), []
    settings = {name: json.loads(value) for name, value in (item.split("=", 1) for item in options.set)}
    config = EngineConfig(**{"max_length": 8192, "max_draft_tokens": 0} | settings)
    with Engine.load(options.checkpoint, config=config) as engine:
        print(f"ready {process_age():.1f} s after the start of the process", flush=True)
        runs = runs_of(options)
        first = f"{runs[0][0]}, first"
        for name, arrivals in [(first, runs[0][1]), *runs[options.once :]]:
            rows.append(run(engine, requests, arrivals, name))
            print(show(rows[-1]), flush=True)
    if options.out:
        options.out.write_text(json.dumps(rows, indent=1))
    if options.plot:
        latencies = [
            (row["arrivals_per_s"], {f"{name} {level}": row[key][level] for name, key in LATENCIES for level in LEVELS})
            for row in rows[not options.once :]
        ]
        plot_latency(latencies, options.plot, "latency over arrivals per second")


if __name__ == "__main__":
    main()
