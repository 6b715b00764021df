"""Capacity of serving: what fits on a GPU, how many requests run at once, and which storage scheme to choose.

    KV cache of a request   2 (keys, values) x layers x KV heads x head dim x (text + image tokens) x bytes
    pages                   (usable memory - weights - buffers and largest step - spare) / bytes of a page
    requests at once        pages / pages of a request

Nothing is derived by hand that the engine has: weights, buffers and the largest step are measured on the meta device
(`served_model.py`), pages are computed by the engine's own functions. Several GPUs are replicas, each on the number of
ranks of its model (`ServedModel.num_ranks`). Times are estimates (`throughput.py`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from saccade.engine.config import EngineConfig, KVFormat
from saccade.engine.device.kv_cache import bytes_per_page, pages_for
from saccade.engine.device.loading import gpu_pages
from saccade.errors import ConfigError
from saccade.plan.gpus import Gpu
from saccade.plan.served_model import ServedModel
from saccade.plan.throughput import RequestLoad, Times, decode_step_s, exchange_s, steady_state

GIB = 2**30
_OUTSIDE_BYTES = GIB // 2
"""Memory of a GPU outside torch's allocator: CUDA context and kernels."""


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A storage scheme of weights and KV cache on the GPU."""

    scheme: str
    """Storage scheme of the weights."""
    kv_format: KVFormat
    """Format of the KV cache."""
    weight_bytes: int
    """Bytes of all parameters."""
    page_bytes: int
    """Bytes of one page, over all layers."""
    num_pages: int
    """Pages of the KV cache of one GPU; 0 if none fits."""
    pages_per_request: int
    """Pages that a request has at its end."""
    needed: int | None
    """Requests that are in progress on one GPU; None: it does not keep up with the load, or its speed is not known."""
    times: Times | None
    """Estimated times, if the GPU keeps up with the requests per second."""
    fits: bool
    """Whether the requests in progress fit."""
    reason: str
    """Why it fits or not."""

    @property
    def keeps_up(self) -> bool:
        """Whether the GPU serves the requests per second, as far as times are known."""
        return self.needed is not None

    @property
    def num_requests(self) -> int:
        """Requests that fit at once on one GPU."""
        return self.num_pages // self.pages_per_request

    @property
    def kv_name(self) -> str:
        """The KV cache's format in a report."""
        return "bf16" if self.kv_format == "model" else self.kv_format

    @property
    def command(self) -> str:
        """The commands that serve it."""
        names = {"fp8": "fp8", "int8": "int8", "w4a16": "w4a16-gptq"}
        compress = f"saccade compress MODEL --scheme {names[self.scheme]} -o OUT, " if self.scheme in names else ""
        flag = "" if self.kv_format == "model" else f" --set engine.kv_format={self.kv_format}"
        return f"{compress}saccade serve {'OUT' if compress else 'MODEL'}{flag}"

    def record(self) -> dict[str, Any]:
        """The scheme as JSON."""
        times = self.times and self.times._asdict()
        return dataclasses.asdict(self) | {"keeps_up": self.keeps_up, "num_requests": self.num_requests, "times": times}


@dataclass(frozen=True, kw_only=True)
class ServingPlan:
    """All storage schemes compared for a model, a load and GPUs."""

    model: ServedModel
    """What is served."""
    gpu: Gpu
    """Each of the GPUs."""
    num_gpus: int
    """GPUs, each with a replica."""
    config: EngineConfig
    """Config of each engine."""
    load: RequestLoad
    """The requests."""
    fits: list[Fit]
    """The schemes; what loses least comes first."""

    @property
    def num_replicas(self) -> int:
        """Engines on all GPUs."""
        return self.num_gpus // self.model.num_ranks

    @property
    def chosen(self) -> Fit | None:
        """The first that fits and keeps up with the load, or else the first that fits."""
        fitting = [fit for fit in self.fits if fit.fits]
        return next((fit for fit in fitting if fit.keeps_up), fitting[0] if fitting else None)

    @property
    def kv_bytes_per_request(self) -> int:
        """2 x layers x KV heads x head dim x tokens x 2 bytes: in 16 bits, without the rest of the last page."""
        return bytes_per_page(self.model.shape, 1, "model", torch.bfloat16) * self.load.tokens

    @property
    def usable_bytes(self) -> int:
        """Memory of one GPU that the engine may use."""
        return int(self.gpu.gib * GIB * self.config.gpu_memory_utilization)

    def lines(self) -> list[str]:
        """The plan as text."""
        return [*self._facts(), "which scheme fits, best quality first", *self._table(), *self._decision()]

    def _facts(self) -> Iterator[str]:
        shape, load = self.model.shape, self.load
        pages = pages_for(load.tokens, self.config.page_size)
        yield (
            f"serving {self.model.name} on {self.num_gpus} x {self.gpu.name}: {self.gpu.gib:.1f} GiB each, "
            f"{self.usable_bytes / GIB:.1f} usable (gpu_memory_utilization {self.config.gpu_memory_utilization}); "
            f"{'one model per GPU' if self.model.num_ranks == 1 else f'{self.model.num_ranks} ranks per engine'}"
        )
        yield (
            f"  a request: {load.text_tokens} text + {load.image_tokens} image tokens, {load.num_output} of them "
            f"generated; {pages} pages of {self.config.page_size} tokens"
        )
        yield (
            f"  its KV cache: 2 x {shape.num_layers} layers x {shape.num_kv_heads} KV heads x {shape.head_dim} x "
            f"{load.tokens} tokens x 2 bytes = {self.kv_bytes_per_request / GIB:.3f} GiB"
        )
        if load.concurrency is not None:
            kv_gib = load.concurrency * self.kv_bytes_per_request / GIB
            yield f"  {load.concurrency} requests at once: {kv_gib:.2f} GiB of KV cache"
        yield f"  buffers and largest step of the engine: {self.model.step_bytes / GIB:.2f} GiB"
        if self.model.num_ranks > 1:
            yield (
                f"  weights, KV cache and pages are those of one rank; {self.model.exchanges.num_collectives} "
                f"collectives per step over {self.gpu.link / 1e9:g} GB/s per GPU "
                "(assumed: 70 % of it, 10 us each)"
            )

    def _table(self) -> Iterator[str]:
        yield f"  {'weights':<10}{'KV cache':<10}{'GiB':>7}{'pages':>9}{'requests':>10}"
        for fit in self.fits:
            yield (
                f"  {fit.scheme:<10}{fit.kv_name:<10}{fit.weight_bytes / GIB:>7.1f}{fit.num_pages:>9}"
                f"{fit.num_requests:>10}   {'fits' if fit.fits else 'no'}: {fit.reason}"
            )

    def _decision(self) -> Iterator[str]:
        fit = self.chosen
        if fit is None:
            yield f"no scheme fits. {self._remedy()}"
            return
        ranks = f" --tensor-parallel-size {self.model.num_ranks}" if self.model.num_ranks > 1 else ""
        yield f"choose {fit.scheme} weights and a {fit.kv_name} KV cache: {fit.command}{ranks}"
        yield from self._decode_times(fit)
        if fit.needed is not None and fit.needed > self.config.max_requests:
            yield (
                f"  the engine runs {self.config.max_requests} requests at once by default: "
                f"add --max-requests {fit.needed}"
            )
        yield from self._rates(fit)

    def _decode_times(self, fit: Fit) -> Iterator[str]:
        """Estimated time per output token of few and many requests."""
        if self.model.num_ranks == 1:
            return
        kv_bytes = fit.page_bytes * fit.pages_per_request
        for count in sorted({1, min(64, fit.num_requests), min(fit.num_requests, self.config.max_requests)}):
            step_s = decode_step_s(self.model, self.gpu, fit.scheme, kv_bytes, count)
            if step_s is not None:
                yield (
                    f"  estimated: {step_s * 1e3:.1f} ms per token with {count} request{'s' * (count > 1)} "
                    f"({exchange_s(self.model, self.gpu, count, count) * 1e3:.1f} of it between ranks), "
                    f"{count / step_s:,.0f} tokens/s"
                )

    def _rates(self, fit: Fit) -> Iterator[str]:
        load, times = self.load, fit.times
        if load.requests_per_s is None:
            return
        rate = load.requests_per_s / self.num_replicas
        yield (
            f"  needed per GPU: {rate:g} requests/s, {rate * load.num_output:,.0f} output and "
            f"{rate * load.num_prompt:,.0f} prompt tokens/s; by Little's law {fit.num_requests} requests at once must "
            f"each end within {fit.num_requests / rate:.1f} s"
        )
        if times is not None:
            yield (
                f"  estimated: first token after {times.prefill_s * 1e3:.0f} ms, "
                f"{times.step_s * 1e3:.1f} ms per token, "
                f"{times.latency_s:.2f} s per request; {rate:g} requests/s x {times.latency_s:.2f} s = "
                f"{times.in_progress:.0f} requests in progress"
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
        kv_bytes, ranks = fit.page_bytes * fit.pages_per_request, self.model.num_ranks

        def keeps_up(gpus: int) -> bool:
            times = steady_state(self.model, self.gpu, fit.scheme, kv_bytes, self.load, total * ranks / gpus)
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
        if smallest.num_requests < 1:
            return "Use a larger GPU, a smaller model, or more ranks: --gpus N --tensor-parallel-size N"
        most = max(fit.num_requests for fit in self.fits)
        return f"Use more GPUs, or shorter requests: at most {most} fit at once on one"

    def record(self) -> dict[str, Any]:
        """The plan as JSON."""
        chosen, load = self.chosen, self.load
        return {
            "model": self.model.name,
            "gpu": self.gpu.name,
            "num_gpus": self.num_gpus,
            "tensor_parallel_size": self.model.num_ranks,
            "usable_bytes": self.usable_bytes,
            "kv_bytes_per_request": self.kv_bytes_per_request,
            "kv_bytes": None if load.concurrency is None else load.concurrency * self.kv_bytes_per_request,
            "step_bytes": self.model.step_bytes,
            "load": dataclasses.asdict(load),
            "schemes": [fit.record() for fit in self.fits],
            "chosen": None if chosen is None else {"scheme": chosen.scheme, "kv_format": chosen.kv_format},
            "num_gpus_needed": None if chosen is None else self.num_gpus_needed(chosen),
        }


# ------------------------------------------------------------------ which scheme fits


def plan_serving(
    model: ServedModel, gpu: Gpu, load: RequestLoad, *, num_gpus: int = 1, config: EngineConfig | None = None
) -> ServingPlan:
    """Compare all storage schemes for a model, a load and GPUs, of which each replica has those of its ranks."""
    if num_gpus % model.num_ranks:
        raise ConfigError(
            f"{num_gpus} GPUs are not whole engines of {model.num_ranks} ranks. Use --gpus {model.num_ranks}, or a "
            "multiple of it"
        )
    if load.tokens > model.max_length:
        raise ConfigError(
            f"a request of {load.tokens} tokens, but the context length is {model.max_length}. "
            "Lower --text-tokens or --image-tokens"
        )
    plan = ServingPlan(model=model, gpu=gpu, num_gpus=num_gpus, config=config or EngineConfig(), load=load, fits=[])
    small: KVFormat = "int8" if gpu.fp8 is None and gpu.bf16 is not None else "fp8"
    kv_formats: tuple[KVFormat, ...] = ("model", small)
    fits = [_fit(plan, scheme, kv_format) for scheme in model.weight_bytes for kv_format in kv_formats]
    return dataclasses.replace(plan, fits=fits)


def compare_layouts(
    by_ranks: Mapping[int, ServedModel], gpu: Gpu, load: RequestLoad, *, num_gpus: int
) -> Iterator[str]:
    """A line for every number of ranks per engine on these GPUs: what fits, time per token, and tokens per second."""
    yield f"layouts of {num_gpus} GPUs, each with its first scheme that fits"
    for num_ranks, model in by_ranks.items():
        plan = plan_serving(model, gpu, load, num_gpus=num_gpus)
        name = f"  {plan.num_replicas} x {num_ranks} rank{'s' * (num_ranks > 1)}"
        fit = plan.chosen
        if fit is None:
            yield f"{name}: no scheme fits"
            continue
        most = min(fit.num_requests, plan.config.max_requests)
        kv_bytes = fit.page_bytes * fit.pages_per_request
        few_s, many_s = (decode_step_s(model, gpu, fit.scheme, kv_bytes, count) for count in (1, most))
        if few_s is None or many_s is None:
            yield f"{name}: {fit.scheme}, {plan.num_replicas * fit.num_requests} requests at once"
            continue
        total = plan.num_replicas * most / many_s
        late = "" if fit.keeps_up else "; does not keep up with the load"
        yield (
            f"{name}: {fit.scheme}, {few_s * 1e3:.1f} ms per token with 1 request per engine, {many_s * 1e3:.1f} with "
            f"{most}; {total:,.0f} tokens/s in all; {plan.num_replicas * fit.num_requests} requests at once{late}"
        )


def _fit(plan: ServingPlan, scheme: str, kv_format: KVFormat) -> Fit:
    """One scheme on a GPU of the plan."""
    model, config = plan.model, plan.config
    page_bytes = bytes_per_page(model.shape, config.page_size, kv_format, torch.bfloat16)
    pages_per_request, weights = pages_for(plan.load.tokens, config.page_size), model.weight_bytes[scheme]
    num_pages = max(0, gpu_pages(
        config, page_bytes, model.max_length, model.vocab_size, total=int(plan.gpu.gib * GIB), outside=_OUTSIDE_BYTES,
        peak=weights + model.step_bytes,
    ))  # fmt: skip
    needed, times = _needed(plan, scheme, page_bytes * pages_per_request)
    obstacle = _obstacle(plan, scheme, num_pages, pages_per_request, needed)
    room = f"room for {num_pages // pages_per_request} requests at once" + (f", {needed} needed" if needed else "")
    if needed is None and plan.gpu.bandwidth is not None:
        room += f", but it does not keep up with {(plan.load.requests_per_s or 0) / plan.num_replicas:g} requests/s"
    return Fit(
        scheme=scheme, kv_format=kv_format, weight_bytes=weights, page_bytes=page_bytes, num_pages=num_pages,
        pages_per_request=pages_per_request, needed=needed, times=times, fits=obstacle is None, reason=obstacle or room,
    )  # fmt: skip


def _needed(plan: ServingPlan, scheme: str, kv_bytes: int) -> tuple[int | None, Times | None]:
    """(requests in progress on one GPU, times)."""
    load = plan.load
    if load.concurrency is not None:
        return math.ceil(load.concurrency / plan.num_replicas), None
    if load.requests_per_s is None:
        return 1, None
    rate = load.requests_per_s / plan.num_replicas
    if load.latency_s is not None:
        return math.ceil(rate * load.latency_s), None
    times = steady_state(plan.model, plan.gpu, scheme, kv_bytes, load, rate)
    return (None, None) if times is None else (math.ceil(times.in_progress), times)


def _obstacle(plan: ServingPlan, scheme: str, num_pages: int, pages_per_request: int, needed: int | None) -> str | None:
    """Why a scheme does not fit; None if it fits."""
    gpu, num_requests = plan.gpu, num_pages // pages_per_request
    if gpu.bf16 is not None and scheme in ("fp8", "int8") and gpu.peak(scheme) is None:
        return f"{gpu.name} has no {scheme} units"
    if plan.model.weight_bytes[scheme] > plan.usable_bytes:
        return f"the weights alone exceed the {plan.usable_bytes / GIB:.1f} GiB usable on one GPU"
    if num_requests < 1:
        return f"{num_pages} pages are left, a request takes {pages_per_request}"
    if needed is not None and num_requests < needed:
        return f"room for {num_requests} requests at once, {needed} needed"
    return None
