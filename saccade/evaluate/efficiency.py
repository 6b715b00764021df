"""Latency and throughput of a model under a stated load: TTFT, TPOT, gaps between tokens, requests and tokens per second, peak memory.

    make prompts -> send them (closed loop: so many at once; open loop: so many per second) -> time every token -> percentiles

Every request has an image of its own (noise, so that no cache helps), some words and a fixed number of output tokens. TTFT is the time
from sending a request to its first token, TPOT the time from the first to the last token divided by their number less one. A model that is
behind may deliver several tokens at once; an answer that arrives whole says nothing of the time per token, and has no TPOT.
"""

from __future__ import annotations

import io
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from PIL import Image

from saccade.errors import ConfigError, RequestError
from saccade.evaluate.model import Conversation, Decoding, Model
from saccade.evaluate.run import in_threads

_WORDS = ("look", "at", "the", "image", "and", "tell", "me", "what", "you", "see", "in", "it", "now", "please")
_PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True, kw_only=True)
class Load:
    """The load that latency and throughput are measured under."""

    num_requests: int = 32
    """Requests that are timed."""
    concurrency: int = 8
    """Closed loop: requests in flight at once."""
    rate: float | None = None
    """Open loop instead: requests per second, arriving at random (Poisson)."""
    image_side: int = 336
    """Side of each request's image in pixels; 0: text alone."""
    num_words: int = 48
    """Words of each prompt."""
    num_output_tokens: int = 64
    """Tokens of each answer; the end of the turn is ignored."""
    num_warmup: int = 2
    """Requests before the timed ones."""
    seed: int = 0
    """Seed of images, words and arrivals."""

    def __post_init__(self) -> None:
        for name in ("num_requests", "concurrency", "num_words", "num_output_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; give 1 or more")
        if self.rate is not None and not self.rate > 0:
            raise ConfigError(f"rate is {self.rate}; give a positive number of requests per second")

    def describe(self) -> str:
        """The load in one line."""
        arrivals = f"{self.concurrency} at once" if self.rate is None else f"{self.rate:g} per second (Poisson)"
        image = f"one {self.image_side}x{self.image_side} image, " if self.image_side else ""
        return f"{self.num_requests} requests, {arrivals}; each {image}{self.num_words} words in, {self.num_output_tokens} tokens out"


@dataclass(frozen=True)
class _Timing:
    """Times of one request, in seconds; tokens as (time, how many)."""

    sent: float
    arrivals: Sequence[tuple[float, int]]

    @property
    def num_tokens(self) -> int:
        return sum(count for _, count in self.arrivals)


def measure_efficiency(model: Model, load: Load) -> dict[str, Any]:
    """Put the load on a model and summarize; JSON for scores.json."""
    prompts = make_prompts(load)
    decoding = Decoding(max_tokens=load.num_output_tokens, ignore_eos=True, seed=load.seed)
    in_threads(lambda prompt: _time(model, prompt, decoding), prompts[: load.num_warmup], load.concurrency)
    timings: list[_Timing] = []
    lock = threading.Lock()
    begin = time.perf_counter()

    def run(item: tuple[float, Conversation]) -> None:
        delay, prompt = item
        time.sleep(max(0.0, begin + delay - time.perf_counter()))
        timing = _time(model, prompt, decoding)
        with lock:
            timings.append(timing)

    timed = prompts[load.num_warmup :]
    num_threads = load.concurrency if load.rate is None else load.num_requests
    in_threads(run, list(zip(_arrivals(load), timed, strict=True)), num_threads)
    return summarize(load, timings, model.peak_memory_bytes())


def make_prompts(load: Load) -> list[Conversation]:
    """A conversation for every request, warm-up first."""
    rng = random.Random(load.seed)  # noqa: S311 - not a secret
    prompts: list[Conversation] = []
    for _ in range(load.num_warmup + load.num_requests):
        content: list[dict[str, Any]] = [{"type": "text", "text": " ".join(rng.choices(_WORDS, k=load.num_words))}]
        if load.image_side:
            content.insert(0, {"type": "image", "image": _noise(rng, load.image_side)})
        prompts.append([{"role": "user", "content": content}])
    return prompts


def _noise(rng: random.Random, side: int) -> bytes:
    """An image of coarse noise as JPEG."""
    small = Image.frombytes("RGB", (16, 16), rng.randbytes(3 * 256))
    file = io.BytesIO()
    small.resize((side, side), Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
    return file.getvalue()


def _arrivals(load: Load) -> list[float]:
    """Seconds after the start at which each request may be sent."""
    if load.rate is None:
        return [0.0] * load.num_requests
    gaps = np.random.default_rng(load.seed).exponential(1 / load.rate, load.num_requests)
    times: list[float] = (np.cumsum(gaps) - gaps[0]).tolist()
    return times


def _time(model: Model, prompt: Conversation, decoding: Decoding) -> _Timing:
    sent = time.perf_counter()
    arrivals = [(time.perf_counter(), count) for count in model.stream(prompt, decoding)]
    if not arrivals:
        raise RequestError("the model generated no token for a request of the load")
    return _Timing(sent, arrivals)


def summarize(load: Load, timings: Sequence[_Timing], peak_memory_bytes: int | None) -> dict[str, Any]:
    """Percentiles in milliseconds, rates per second."""
    first = [(one.arrivals[0][0] - one.sent) * 1e3 for one in timings]
    per_token = [
        (one.arrivals[-1][0] - one.arrivals[0][0]) * 1e3 / (one.num_tokens - 1)
        for one in timings
        if len(one.arrivals) > 1
    ]
    gaps = [
        (later - earlier) * 1e3
        for one in timings
        for (earlier, _), (later, _) in zip(one.arrivals, one.arrivals[1:], strict=False)
    ]
    total = [(one.arrivals[-1][0] - one.sent) * 1e3 for one in timings]
    seconds = max(one.arrivals[-1][0] for one in timings) - min(one.sent for one in timings)
    num_tokens = sum(one.num_tokens for one in timings)
    return {
        "load": asdict(load) | {"text": load.describe()},
        "num_requests": len(timings),
        "num_output_tokens": num_tokens,
        "seconds": seconds,
        "requests_per_s": len(timings) / seconds,
        "output_tokens_per_s": num_tokens / seconds,
        "ttft_ms": _percentiles(first),
        "tpot_ms": _percentiles(per_token),
        "inter_token_ms": _percentiles(gaps),
        "e2e_ms": _percentiles(total),
        "peak_memory_bytes": peak_memory_bytes,
    }


def _percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """Mean, percentiles and maximum; None without values."""
    if not values:
        return None
    levels = {f"p{level}": float(np.percentile(values, level)) for level in _PERCENTILES}
    return {"mean": float(np.mean(values)), **levels, "max": float(np.max(values))}
