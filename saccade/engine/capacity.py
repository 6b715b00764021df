"""Capacity of serving: what fits on a GPU, how many requests run at once, and which storage scheme to choose. Behind `saccade plan`.

    KV cache of a request   2 (keys, values) x layers x KV heads x head dim x (text + image tokens) x bytes
    pages                   (usable memory - weights - buffers and largest step - spare) / bytes of a page
    requests at once        pages / pages of a request
    Little's law            requests in progress = requests per second x seconds that one takes

Nothing is derived by hand that the engine has: weights, buffers and the largest step are measured on the meta device
(`served_model.py`), pages are computed by the functions the engine computes them with.
A GPU serves a whole model, so several GPUs are replicas. Times are estimates from bandwidth and peak throughput.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from saccade.engine.config import EngineConfig, KVFormat
from saccade.engine.device.kv_cache import bytes_per_page, pages_for
from saccade.engine.device.loading import gpu_pages
from saccade.engine.served_model import ServedModel
from saccade.errors import ConfigError
from saccade.gpus import Gpu

GIB = 2**30

_OUTSIDE_BYTES = GIB // 2
"""Memory of a GPU outside torch's allocator: CUDA context and kernels."""
_BANDWIDTH_SHARE = 0.6
"""Share of the published bandwidth that decode reaches: 3B on an H200, 2.12 ms for one request and 5.5 ms for 256 of 1024 tokens, which
is 61 % and 60 %."""
_COMPUTE_SHARE = 0.5
"""Share of the peak that prefill reaches: 540 of 989 TFLOP/s on an H200."""


# ------------------------------------------------------------------ the load


@dataclass(frozen=True, kw_only=True)
class Load:
    """Requests, all alike."""

    text_tokens: int
    """Text tokens of a request, prompt and output together."""
    image_tokens: int = 0
    """Image tokens of a request."""
    image_patches: int = 0
    """Patches of its images, for the time of the vision encoder."""
    output_tokens: int | None = None
    """Of the text tokens, those that are generated; a quarter if not given."""
    requests_per_s: float | None = None
    """Requests that arrive per second, over all GPUs."""
    concurrency: int | None = None
    """Requests in progress at once, over all GPUs."""
    latency_s: float | None = None
    """Seconds that a request takes; estimated if not given."""

    def __post_init__(self) -> None:
        if self.requests_per_s is not None and self.concurrency is not None:
            raise ConfigError(
                "requests per second and concurrency depend on each other (Little's law). Give one of them"
            )
        if not 0 <= self.num_output <= self.text_tokens:
            raise ConfigError(f"{self.num_output} output tokens of {self.text_tokens} text tokens. Raise --text-tokens")

    @property
    def tokens(self) -> int:
        """Tokens of a request in the KV cache at its end."""
        return self.text_tokens + self.image_tokens

    @property
    def num_output(self) -> int:
        """Generated tokens."""
        return self.text_tokens // 4 if self.output_tokens is None else self.output_tokens


# ------------------------------------------------------------------ times


class Times(NamedTuple):
    """Estimated times of one GPU in a steady state."""

    prefill_s: float
    """Vision encoder and prefill of one request."""
    step_s: float
    """Per output token."""
    latency_s: float
    """Of a request."""
    in_progress: float
    """Requests in progress on the GPU."""


def steady_state(model: ServedModel, gpu: Gpu, scheme: str, kv_bytes: int, load: Load, rate: float) -> Times | None:
    """Times when `rate` requests per second arrive at a GPU. None: it does not keep up, or its speed is not known.

    Requests in progress and latency depend on each other: a step reads the weights once and every request's KV cache.
    """
    peak = gpu.peak(scheme)
    if peak is None or gpu.bandwidth is None:
        return None
    flops, bandwidth = peak * _COMPUTE_SHARE, gpu.bandwidth * _BANDWIDTH_SHARE
    products = (
        model.num_decoder_parameters * (load.tokens - load.num_output) + model.num_tower_parameters * load.image_patches
    )
    prefill_s = 2.0 * products / flops
    decoding = 1.0 - rate * prefill_s
    if decoding <= 0.0:
        return None
    weights = model.decode_bytes[scheme]
    # step = (weights + n kv) / bandwidth and n = rate * (prefill + output * step / decoding): linear in n.
    per_request = rate * load.num_output * kv_bytes / bandwidth / decoding
    if per_request >= 1.0:
        return None
    fixed = rate * (prefill_s + load.num_output * weights / bandwidth / decoding)
    in_progress = fixed / (1.0 - per_request)
    step_s = max(
        (weights + in_progress * kv_bytes) / bandwidth, 2.0 * model.num_decoder_parameters * in_progress / flops
    )
    step_s /= decoding
    latency_s = prefill_s + load.num_output * step_s
    return Times(prefill_s, step_s, latency_s, max(in_progress, rate * latency_s))


# ------------------------------------------------------------------ which scheme fits


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A storage scheme of weights and KV cache on the GPU."""

    scheme: str
    """Of the weights."""
    kv_format: KVFormat
    """Of the KV cache."""
    weight_bytes: int
    """Of all parameters."""
    page_bytes: int
    """Of one page, over all layers."""
    num_pages: int
    """Pages of the KV cache of one GPU; 0 if none fits."""
    pages_per_request: int
    """Pages that a request has at its end."""
    needed: int | None
    """Requests that are in progress on one GPU; None: not known."""
    times: Times | None
    """Estimated, if the GPU keeps up with the requests per second."""
    fits: bool
    """Whether the requests in progress fit."""
    keeps_up: bool
    """Whether it serves the requests per second, as far as times are known."""
    reason: str
    """Why it fits or not."""

    @property
    def num_requests(self) -> int:
        """Requests that fit at once on one GPU."""
        return self.num_pages // self.pages_per_request


@dataclass(frozen=True, kw_only=True)
class ServingPlan:
    """Output of `saccade plan` for serving."""

    model: ServedModel
    """What is served."""
    gpu: Gpu
    """Each of the GPUs."""
    num_gpus: int
    """GPUs, each with a replica."""
    config: EngineConfig
    """Of each engine."""
    load: Load
    """The requests."""
    fits: list[Fit]
    """In order of preference: what loses least comes first."""

    @property
    def chosen(self) -> Fit | None:
        """The first that fits and keeps up with the load, or else the first that fits."""
        fitting = [fit for fit in self.fits if fit.fits]
        return next((fit for fit in fitting if fit.keeps_up), fitting[0] if fitting else None)

    @property
    def kv_bytes_per_request(self) -> int:
        """2 x layers x KV heads x head dim x tokens x 2 bytes: without the rest of the last page, in 16 bits."""
        return bytes_per_page(self.model.shape, 1, "model", torch.bfloat16) * self.load.tokens

    @property
    def usable_bytes(self) -> int:
        """Memory of one GPU that the engine may use."""
        return int(self.gpu.gib * GIB * self.config.gpu_memory_utilization)

    def lines(self) -> list[str]:
        """As text."""
        return [*self._facts(), "which scheme fits, best quality first", *self._table(), *self._decision()]

    def _facts(self) -> Iterator[str]:
        shape, load = self.model.shape, self.load
        pages = pages_for(load.tokens, self.config.page_size)
        yield (
            f"serving {self.model.name} on {self.num_gpus} x {self.gpu.name}: {self.gpu.gib:.1f} GiB each, {self.usable_bytes / GIB:.1f} "
            f"usable (gpu_memory_utilization {self.config.gpu_memory_utilization}); one model per GPU"
        )
        yield (
            f"  a request: {load.text_tokens} text + {load.image_tokens} image tokens, {load.num_output} of them generated; "
            f"{pages} pages of {self.config.page_size} tokens"
        )
        yield (
            f"  its KV cache: 2 x {shape.num_layers} layers x {shape.num_kv_heads} KV heads x {shape.head_dim} x {load.tokens} tokens x 2 bytes "
            f"= {self.kv_bytes_per_request / GIB:.3f} GiB"
        )
        if load.concurrency is not None:
            yield f"  {load.concurrency} requests at once: {load.concurrency * self.kv_bytes_per_request / GIB:.2f} GiB of KV cache"
        yield f"  buffers and largest step of the engine: {self.model.step_bytes / GIB:.2f} GiB"

    def _table(self) -> Iterator[str]:
        yield f"  {'weights':<10}{'KV cache':<10}{'GiB':>7}{'pages':>9}{'requests':>10}"
        for fit in self.fits:
            yield (
                f"  {fit.scheme:<10}{_kv_name(fit.kv_format):<10}{fit.weight_bytes / GIB:>7.1f}{fit.num_pages:>9}{fit.num_requests:>10}   "
                f"{'fits' if fit.fits else 'no'}: {fit.reason}"
            )

    def _decision(self) -> Iterator[str]:
        fit = self.chosen
        if fit is None:
            yield f"no scheme fits. {self._remedy()}"
            return
        yield f"choose {fit.scheme} weights and a {_kv_name(fit.kv_format)} KV cache: {_command(fit)}"
        if fit.needed is not None and fit.needed > self.config.max_requests:
            yield f"  the engine runs {self.config.max_requests} requests at once by default: add --max-requests {fit.needed}"
        yield from self._rates(fit)

    def _rates(self, fit: Fit) -> Iterator[str]:
        load, times = self.load, fit.times
        if load.requests_per_s is None:
            return
        rate = load.requests_per_s / self.num_gpus
        most_s = fit.num_requests / rate
        yield (
            f"  needed per GPU: {rate:g} requests/s, {rate * load.num_output:,.0f} output and {rate * (load.tokens - load.num_output):,.0f} prompt tokens/s; by "
            f"Little's law {fit.num_requests} requests at once must each end within {most_s:.1f} s"
        )
        if times is not None:
            yield (
                f"  estimated: first token after {times.prefill_s * 1e3:.0f} ms, {times.step_s * 1e3:.1f} ms per token, {times.latency_s:.2f} s per request; "
                f"{rate:g} requests/s x {times.latency_s:.2f} s = {times.in_progress:.0f} requests in progress"
            )
        elif (needed := self.num_gpus_needed(fit)) is not None:
            yield f"  the GPU does not keep up with {rate:g} requests/s (estimated): use {needed} GPUs"
        elif load.latency_s is None:
            yield "  times are not known for this GPU: give --latency-s, or a GPU by name"

    def num_gpus_needed(self, fit: Fit) -> int | None:
        """GPUs that keep up with the load with this scheme; None: not known."""
        total = self.load.requests_per_s
        if total is None or self.gpu.bandwidth is None or self.gpu.peak(fit.scheme) is None:
            return None
        kv_bytes = fit.page_bytes * fit.pages_per_request

        def keeps_up(gpus: int) -> bool:
            times = steady_state(self.model, self.gpu, fit.scheme, kv_bytes, self.load, total / gpus)
            return times is not None and times.in_progress <= max(fit.num_requests, 1)

        most = self.num_gpus
        while not keeps_up(most) and most < 2**20:
            most *= 2
        low = most // 2
        while most - low > 1:
            middle = (low + most) // 2
            low, most = (low, middle) if keeps_up(middle) else (middle, most)
        return most if keeps_up(most) else None

    def _remedy(self) -> str:
        smallest = min(self.fits, key=lambda fit: fit.weight_bytes)
        if smallest.num_pages < smallest.pages_per_request:
            return "Use a larger GPU or a smaller model: the engine does not split a model over GPUs"
        return f"Use more GPUs, or shorter requests: at most {max(fit.num_requests for fit in self.fits)} fit at once on one"

    def record(self) -> dict[str, Any]:
        """As JSON."""
        chosen = self.chosen
        return {
            "model": self.model.name,
            "gpu": self.gpu.name,
            "num_gpus": self.num_gpus,
            "usable_bytes": self.usable_bytes,
            "kv_bytes_per_request": self.kv_bytes_per_request,
            "kv_bytes": None if self.load.concurrency is None else self.load.concurrency * self.kv_bytes_per_request,
            "step_bytes": self.model.step_bytes,
            "load": dataclasses.asdict(self.load),
            "schemes": [
                dataclasses.asdict(fit) | {"num_requests": fit.num_requests, "times": fit.times and fit.times._asdict()}
                for fit in self.fits
            ],
            "chosen": None if chosen is None else {"scheme": chosen.scheme, "kv_format": chosen.kv_format},
            "num_gpus_needed": None if chosen is None else self.num_gpus_needed(chosen),
        }


def plan_serving(
    model: ServedModel, gpu: Gpu, load: Load, *, num_gpus: int = 1, config: EngineConfig | None = None
) -> ServingPlan:
    """Compare all storage schemes for a model, a load and GPUs with one replica each."""
    config = config or EngineConfig()
    if load.tokens > model.max_length:
        raise ConfigError(
            f"a request of {load.tokens} tokens, but the context length is {model.max_length}. Lower --text-tokens or --image-tokens"
        )
    small: KVFormat = "int8" if gpu.fp8 is None and gpu.bf16 is not None else "fp8"
    kv_formats: tuple[KVFormat, ...] = ("model", small)
    candidates = [(scheme, kv_format) for scheme in model.weight_bytes for kv_format in kv_formats]
    fits = [_fit(model, gpu, load, num_gpus, config, *candidate) for candidate in candidates]
    return ServingPlan(model=model, gpu=gpu, num_gpus=num_gpus, config=config, load=load, fits=fits)


def _fit(
    model: ServedModel, gpu: Gpu, load: Load, num_gpus: int, config: EngineConfig, scheme: str, kv_format: KVFormat
) -> Fit:
    page_bytes = bytes_per_page(model.shape, config.page_size, kv_format, torch.bfloat16)
    weights, per_request = model.weight_bytes[scheme], pages_for(load.tokens, config.page_size)
    pages = gpu_pages(
        config, page_bytes, model.max_length, model.vocab_size, total=int(gpu.gib * GIB), outside=_OUTSIDE_BYTES,
        peak=weights + model.step_bytes,
    )  # fmt: skip
    num_requests = max(0, pages) // per_request
    needed, times = _needed(model, gpu, load, num_gpus, scheme, page_bytes * per_request)
    fits, reason = _judge(gpu, config, scheme, weights, pages, per_request, num_requests, needed)
    if fits and needed is None and gpu.bandwidth is not None:
        reason += f", but it does not keep up with {(load.requests_per_s or 0) / num_gpus:g} requests/s"
    return Fit(
        scheme=scheme, kv_format=kv_format, weight_bytes=weights, page_bytes=page_bytes, num_pages=max(0, pages),
        pages_per_request=per_request, needed=needed, times=times, fits=fits,
        keeps_up=needed is not None, reason=reason,
    )  # fmt: skip


def _needed(
    model: ServedModel, gpu: Gpu, load: Load, num_gpus: int, scheme: str, kv_bytes: int
) -> tuple[int | None, Times | None]:
    """(requests in progress on one GPU, times)."""
    if load.concurrency is not None:
        return math.ceil(load.concurrency / num_gpus), None
    if load.requests_per_s is None:
        return 1, None
    rate = load.requests_per_s / num_gpus
    if load.latency_s is not None:
        return math.ceil(rate * load.latency_s), None
    times = steady_state(model, gpu, scheme, kv_bytes, load, rate)
    return (None, None) if times is None else (math.ceil(times.in_progress), times)


def _judge(
    gpu: Gpu, config: EngineConfig, scheme: str, weights: int, pages: int, per_request: int, num_requests: int,
    needed: int | None,
) -> tuple[bool, str]:  # fmt: skip
    """Whether a scheme fits, and why: the steps of the decision."""
    usable = gpu.gib * config.gpu_memory_utilization
    if gpu.bf16 is not None and scheme in ("fp8", "int8") and gpu.peak(scheme) is None:
        return False, f"{gpu.name} has no {scheme} units"
    if weights > usable * GIB:
        return False, f"the weights alone exceed the {usable:.1f} GiB usable on one GPU"
    if num_requests < 1:
        return False, f"{max(0, pages)} pages are left, a request takes {per_request}"
    if needed is not None and num_requests < needed:
        return False, f"room for {num_requests} requests at once, {needed} needed"
    return True, f"room for {num_requests} requests at once" + (f", {needed} needed" if needed else "")


def _kv_name(kv_format: KVFormat) -> str:
    return "bf16" if kv_format == "model" else kv_format


def _command(fit: Fit) -> str:
    """How to get there."""
    names = {"fp8": "fp8", "int8": "int8", "w4a16": "w4a16-gptq"}
    compress = f"saccade compress MODEL --scheme {names[fit.scheme]} -o OUT, " if fit.scheme in names else ""
    flag = "" if fit.kv_format == "model" else f" --set engine.kv_format={fit.kv_format}"
    return f"{compress}saccade serve {'OUT' if compress else 'MODEL'}{flag}"
