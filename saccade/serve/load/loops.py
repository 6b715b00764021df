"""Load on a server that speaks OpenAI's chat API: closed loop (a number of clients) and open loop (Poisson arrivals), with images.

    saccade bench serve http://127.0.0.1:8000 --concurrency 8 --images unique

Every request streams. Its prompt is an image and random words; the answer has `output` tokens, greedy, end of turn ignored. `unique`: every
request has an image of its own; `repeated`: all have the same; `mixed`: sizes drawn from `SHAPES`, every fourth request the image of an
earlier one, every eighth none. All bodies are made before the clock starts.

The result has the names that the benchmark tools of vLLM and SGLang print. TTFT counts from sending the request; TPOT is the time after the
first token over the number of the others; ITL is the time between two chunks of one stream; E2EL is the time to the last byte.
"""

import asyncio
import base64
import io
import json
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal, TypeVar

import aiohttp
import numpy as np
from PIL import Image

from saccade.serve.load.client import Outcome, find_model, open_session, stream_chat
from saccade.serve.load.plot import plot

_Value = TypeVar("_Value")
Images = Literal["unique", "repeated", "mixed", "none"]
SHAPES = ((1 / 3, 1 / 3), (1 / 2, 1 / 2), (1 / 2, 3 / 4), (2 / 3, 2 / 3), (2 / 3, 1), (1, 2 / 3), (1, 1))
"""Height and width of mixed images, as shares of the longest side."""
_WORDS = (
    "red",
    "blue",
    "car",
    "tree",
    "left",
    "right",
    "over",
    "under",
    "the",
    "a",
    "is",
    "what",
    "how",
    "many",
    "see",
    "and",
)


@dataclass(frozen=True)
class Share:
    """Part `index` of `count` equal ones."""

    index: int
    count: int

    def part_of(self, total: int) -> int:
        """This part of a number."""
        return total // self.count + (self.index < total % self.count)


ALL = Share(0, 1)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The requests of one run."""

    num_requests: int = 64
    """Requests of a closed loop; an open loop has as many as arrive."""
    images: Images = "unique"
    """Images of the requests."""
    side: int = 336
    """Side of unique and repeated images, and longest side of mixed ones, in pixels."""
    num_words: int = 64
    """Words of each prompt."""
    num_output: int = 64
    """Tokens of each answer."""
    seed: int = 0
    """Seed of images and words."""
    ignore_eos: bool = True
    """Whether answers continue after the end of turn."""

    def bodies(self, model: str, share: Share = ALL) -> list[bytes]:
        """JSON of the requests, or of a share of them."""
        numbers = range(share.index, self.num_requests, share.count)
        with ThreadPoolExecutor() as threads:
            return list(threads.map(lambda number: self.body(number, model), numbers))

    def body(self, number: int, model: str) -> bytes:
        """JSON of one request."""
        rng = random.Random(f"{self.seed} {number}")  # noqa: S311  words of a prompt
        content: list[dict[str, Any]] = [{"type": "text", "text": " ".join(rng.choices(_WORDS, k=self.num_words))}]
        if (image := self._image(number)) is not None:
            content.insert(0, {"type": "image_url", "image_url": {"url": image}})
        fields: dict[str, Any] = {
            "model": model,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": self.num_output,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return json.dumps(fields | ({"ignore_eos": True} if self.ignore_eos else {})).encode()

    def _image(self, number: int) -> str | None:
        if self.images == "none" or (self.images == "mixed" and number % 8 == 7):
            return None
        if self.images == "mixed":
            number -= 3 if number % 4 == 3 else 0
            height, width = random.Random(f"{self.seed} shape {number}").choice(SHAPES)  # noqa: S311
            return data_url(round(height * self.side), round(width * self.side), f"{self.seed} {number}")
        return data_url(self.side, self.side, f"{self.seed} {0 if self.images == 'repeated' else number}")


def data_url(height: int, width: int, seed: str) -> str:
    """A JPEG of coarse and fine noise, about as large as a photograph of its size."""
    rng = np.random.default_rng(list(seed.encode()))
    coarse = Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)).resize(
        (width, height), Image.Resampling.BICUBIC
    )
    pixels = np.asarray(coarse, np.int16) + rng.integers(-12, 13, (height, width, 1), dtype=np.int16)
    file = io.BytesIO()
    Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).save(file, "JPEG", quality=90)
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()


# ------------------------------------------------------------------ load


async def closed_loop(
    session: aiohttp.ClientSession, url: str, bodies: Sequence[bytes], concurrency: int
) -> list[Outcome]:
    """So many clients, each with one request at a time."""
    waiting, outcomes = iter(bodies), []

    async def client() -> None:
        for body in waiting:
            outcomes.append(await stream_chat(session, url, body))

    await asyncio.gather(*(client() for _ in range(concurrency)))
    return outcomes


async def open_loop(
    session: aiohttp.ClientSession, url: str, bodies: Sequence[bytes], rate: float, seed: int = 0
) -> list[Outcome]:
    """Poisson arrivals, whatever the server does."""
    rng, start, at, tasks = random.Random(seed), time.perf_counter(), 0.0, []  # noqa: S311  arrival times
    for body in bodies:
        await asyncio.sleep(max(0.0, start + at - time.perf_counter()))
        tasks.append(asyncio.create_task(stream_chat(session, url, body)))
        at += rng.expovariate(rate)
    return list(await asyncio.gather(*tasks))


@dataclass(frozen=True)
class Load:
    """One run: a number of clients, or a rate of arrivals for some seconds."""

    concurrency: int | None = None
    rate: float | None = None
    seconds: float | None = None

    def num_requests(self, default: int) -> int:
        """Requests of the run."""
        return default if self.rate is None or self.seconds is None else max(1, round(self.rate * self.seconds))

    def __str__(self) -> str:
        return f"concurrency {self.concurrency}" if self.rate is None else f"{self.rate:g} requests/s"


def run(
    url: str, loads: Sequence[Load], workload: Workload, *, model: str | None = None, api_key: str | None = None,
    num_warmup: int = 2, num_processes: int = 1, on_result: Callable[[dict[str, Any]], None] = lambda result: None,
) -> list[dict[str, Any]]:  # fmt: skip
    """Run one load after the other; unique images are new in each. A process of clients reads about 40,000 chunks per second."""
    model = run_loop(_warm_up(url, model, api_key, replace(workload, num_requests=num_warmup, seed=-1)))
    results = []
    for number, load in enumerate(loads):
        changed = replace(
            workload, seed=workload.seed + 1000 * number, num_requests=load.num_requests(workload.num_requests)
        )
        outcomes, start = _run_load(partial(_clients, url, load, changed, model, api_key), num_processes)
        end = max(outcome.ended_at for outcome in outcomes)
        results.append(summarize(outcomes, end - start, load))
        on_result(results[-1])
    return results


def run_loop(coroutine: Coroutine[Any, Any, _Value]) -> _Value:
    """Run it in uvloop, if it is installed: it takes two thirds of the time."""
    try:
        from uvloop import new_event_loop
    except ImportError:
        return asyncio.run(coroutine)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(coroutine)


async def _warm_up(url: str, model: str | None, api_key: str | None, workload: Workload) -> str:
    async with open_session(api_key) as session:
        model = model or await find_model(session, url)
        await closed_loop(session, url, workload.bodies(model), 1)
    return model


Wait = Callable[[], object]


def _clients(
    url: str, load: Load, workload: Workload, model: str, api_key: str | None, share: Share, wait: Wait
) -> tuple[list[Outcome], float]:
    """A share of the clients: make the bodies, `wait` for the others, send; returns the outcomes and the time of the start."""
    bodies = workload.bodies(model, share)
    wait()
    start = time.perf_counter()

    async def send() -> list[Outcome]:
        async with open_session(api_key) as session:
            if load.rate is None:
                return await closed_loop(session, url, bodies, share.part_of(load.concurrency or 1))
            return await open_loop(session, url, bodies, load.rate / share.count, share.index)

    return run_loop(send()), start


def _run_load(
    clients: Callable[[Share, Wait], tuple[list[Outcome], float]], num_processes: int
) -> tuple[list[Outcome], float]:
    if num_processes == 1:
        return clients(ALL, lambda: None)
    context = get_context("spawn")
    barrier, results = context.Barrier(num_processes), context.SimpleQueue()
    processes = [
        context.Process(target=_client_process, args=(clients, Share(index, num_processes), barrier, results))
        for index in range(num_processes)
    ]
    for process in processes:
        process.start()
    parts = [results.get() for _ in processes]
    for process in processes:
        process.join()
    return [outcome for outcomes, _ in parts for outcome in outcomes], min(start for _, start in parts)


def _client_process(clients: Callable[[Share, Wait], Any], share: Share, barrier: Any, results: Any) -> None:
    results.put(clients(share, barrier.wait))


# ------------------------------------------------------------------ result


def summarize(outcomes: Sequence[Outcome], duration_s: float, load: Load) -> dict[str, Any]:
    """The numbers that vLLM's and SGLang's tools report, by their names."""
    good = [outcome for outcome in outcomes if outcome.is_success]
    num_input, num_output = sum(one.num_prompt_tokens for one in good), sum(one.num_output_tokens for one in good)
    events = sorted([(one.started_at, 1) for one in outcomes] + [(one.ended_at, -1) for one in outcomes])
    open_now, peak = 0, 0
    for _, change in events:
        open_now += change
        peak = max(peak, open_now)
    return {
        "max_concurrency": load.concurrency,
        "request_rate": "inf" if load.rate is None else load.rate,
        "duration": duration_s,
        "completed": len(good),
        "failed": len(outcomes) - len(good),
        "errors": dict(Counter(str(one.error) for one in outcomes if not one.is_success)),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(good) / duration_s,
        "output_throughput": num_output / duration_s,
        "total_token_throughput": (num_input + num_output) / duration_s,
        "max_concurrent_requests": peak,
        **_times("ttft", [one.ttft_s for one in good]),
        **_times("tpot", [one.tpot_s for one in good if one.tpot_s is not None]),
        **_times("itl", [gap for one in good for gap in one.gaps_s]),
        **_times("e2el", [one.latency_s for one in good]),
    }


def _times(name: str, seconds: Sequence[float]) -> dict[str, float]:
    ms = [1e3 * value for value in seconds] or [0.0]
    return {
        f"mean_{name}_ms": statistics.fmean(ms),
        f"median_{name}_ms": statistics.median(ms),
        f"std_{name}_ms": statistics.pstdev(ms),
        f"p95_{name}_ms": float(np.percentile(ms, 95)),
        f"p99_{name}_ms": float(np.percentile(ms, 99)),
    }


_LATENCIES = (
    ("Time to First Token", "TTFT"),
    ("Time per Output Token (excl. 1st token)", "TPOT"),
    ("Inter-token Latency", "ITL"),
    ("End-to-end Latency", "E2EL"),
)


def result_block(result: dict[str, Any]) -> str:
    """The result as a block of text."""
    rows: list[tuple[str, Any]] = [
        ("Successful requests:", result["completed"]),
        ("Failed requests:", result["failed"]),
    ]
    if result["max_concurrency"] is not None:
        rows.append(("Maximum request concurrency:", result["max_concurrency"]))
    if result["request_rate"] != "inf":
        rows.append(("Request rate configured (RPS):", float(result["request_rate"])))
    rows += [
        ("Benchmark duration (s):", result["duration"]),
        ("Total input tokens:", result["total_input_tokens"]),
        ("Total generated tokens:", result["total_output_tokens"]),
        ("Request throughput (req/s):", result["request_throughput"]),
        ("Output token throughput (tok/s):", result["output_throughput"]),
        ("Peak concurrent requests:", result["max_concurrent_requests"]),
        ("Total token throughput (tok/s):", result["total_token_throughput"]),
    ]
    lines = [" Serving Benchmark Result ".center(50, "="), *(_line(*row) for row in rows)]
    for title, name in _LATENCIES:
        lines.append(title.center(50, "-"))
        for label, field in (("Mean", "mean"), ("Median", "median"), ("P99", "p99")):
            lines.append(_line(f"{label} {name} (ms):", float(result[f"{field}_{name.lower()}_ms"])))
    lines += [_line(f"Failed ({code}):", count) for code, count in result["errors"].items()]
    return "\n".join([*lines, "=" * 50])


def _line(label: str, value: float) -> str:
    return f"{label:<40} {value:<10.2f}" if isinstance(value, float) else f"{label:<40} {value:<10}"


def plot_results(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Latency over the requests per second that were served, or that arrived."""
    rows = [
        {
            "load": result["request_throughput"] if result["request_rate"] == "inf" else result["request_rate"],
            "ttft_ms": {"p50": result["median_ttft_ms"], "p99": result["p99_ttft_ms"]},
            "gap_ms": {"p50": result["median_itl_ms"], "p99": result["p99_itl_ms"]},
        }
        for result in results
    ]
    is_open = all(result["request_rate"] != "inf" for result in results)
    plot(sorted(rows, key=lambda row: row["load"]), path, f"requests per second {'sent' if is_open else 'served'}")
