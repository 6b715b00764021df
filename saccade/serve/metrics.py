"""Prometheus metrics of a server, under the names that dashboards, autoscalers and routers for vLLM know.

    RequestRecord of an ended request -> ServerMetrics.observe -> histograms and counters \\
    engine, preprocessing workers, processes ---------- read at each scrape ---------------> render -> /metrics

Names with the prefix `vllm:` mean what they mean in vLLM; what vLLM does not have has the prefix `saccade:`. The
registry is the server's own, so that several servers can live in one process.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from saccade.engine.core.time_histogram import TimeHistogram

if TYPE_CHECKING:
    from saccade.engine import Engine
    from saccade.engine.core.statistics import Statistics
    from saccade.engine.frontend.preprocessing.preprocessor import PreprocessingStatistics
    from saccade.serve.admission import Admission
    from saccade.serve.record import RequestRecord

CONTENT_TYPE = CONTENT_TYPE_LATEST
"""Content type of the metrics page."""

_SECONDS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 0.75, 1, 1.5, 2.5, 5, 10, 15, 30, 60, 120, 300)
"""Buckets of waiting times: from one image on a GPU to a queue that is too long."""
_GAP_SECONDS = (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5)
"""Buckets of the time between two tokens."""
_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
_REASONS = {"stop": "stop", "length": "length", "cancelled": "abort", "failed": "error"}
"""Finish reasons as vLLM names them."""
_STATES = ("loading", "ready", "restarting", "draining", "failed", "stopped")
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_CLIENT_LEFT = 499
"""Status that proxies log for a request whose client left before the response."""
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class EngineSource(Protocol):
    """What the metrics read of the supervisor."""

    @property
    def loaded_engine(self) -> Engine | None:
        """The engine in any state; None before it is loaded."""

    @property
    def num_restarts(self) -> int:
        """Restarts of the engine core."""

    @property
    def state(self) -> str:
        """What the server can do now."""


class ServerMetrics:
    """All metrics of one server. Requests are observed in the event loop; any thread may render."""

    def __init__(self, model_name: str, source: EngineSource, admission: Callable[[], Admission | None]) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # they would double the page; nothing reads them
        self._registry = CollectorRegistry()
        self._requests = _RequestMetrics(self._registry, model_name)
        self._http = Counter(
            "http_requests",
            "HTTP responses by route and status code.",
            ["method", "handler", "status"],
            registry=self._registry,
        )
        ProcessCollector(registry=self._registry)
        self._registry.register(_AdmissionCollector(admission))
        self._registry.register(_EngineCollector(model_name, source))

    def observe(self, record: RequestRecord) -> None:
        """Count a request that has ended."""
        self._requests.observe(record)

    def observe_http(self, method: str, route: str, status: int) -> None:
        """Count an HTTP response. `route` is an entry of the route table: a client cannot make up a label."""
        self._http.labels(method if method in _METHODS else "other", route, str(status or _CLIENT_LEFT)).inc()

    def collect(self) -> Iterable[Metric]:
        """Return all metrics as they are now."""
        return self._registry.collect()

    def render(self) -> bytes:
        """Write the metrics page."""
        return generate_latest(self._registry)


# ------------------------------------------------------------------ ended requests


class _RequestMetrics:
    """Histograms and counters of requests that have ended."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        self._registry, self._model = registry, model_name
        self._first_token = self._histogram(
            "vllm:time_to_first_token_seconds", "From the arrival of a request to its first token.", _SECONDS
        )
        self._duration = self._histogram(
            "vllm:e2e_request_latency_seconds", "From the arrival of a request to its last byte.", _SECONDS
        )
        self._per_token = self._histogram(
            "vllm:request_time_per_output_token_seconds",
            "Time per output token of a request, after the first.",
            _GAP_SECONDS,
        )
        self._prompt_tokens = self._histogram(
            "vllm:request_prompt_tokens", "Prompt tokens of a request, image tokens included.", _TOKENS
        )
        self._output_tokens = self._histogram(
            "vllm:request_generation_tokens", "Output tokens of a request, of all its completions.", _TOKENS
        )
        self._max_tokens = self._histogram(
            "vllm:request_params_max_tokens", "Maximum tokens that a request asks for.", _TOKENS
        )
        self._completions = self._histogram("vllm:request_params_n", "Completions of a request.", (1, 2, 4, 8, 16))
        self._images = self._histogram(
            "saccade:request_images", "Images and videos of a request.", (0, 1, 2, 4, 8, 16, 32, 64)
        )
        self._preprocess = self._histogram(
            "saccade:request_preprocess_seconds",
            "Until the prompt of a request is ready: waiting for a worker, decoding, tokenization.",
            _SECONDS,
        )
        self._queue = self._histogram(
            "saccade:request_prefill_seconds",
            "From the prompt being ready to the first token: waiting for a slot, encoding images, prefill.",
            _SECONDS,
        )
        self._ended = Counter(
            "vllm:request_success",
            "Requests that the engine has ended, by finish reason.",
            ["model_name", "finished_reason"],
            registry=registry,
        )
        for reason in _REASONS.values():
            self._ended.labels(model_name, reason)
        self._errors = Counter(
            "saccade:request_errors", "Requests answered with an error, by its code.", ["code"], registry=registry
        )
        self._gaps = TimeHistogram(_GAP_SECONDS)
        registry.register(
            _TimeCollector(
                "vllm:inter_token_latency_seconds",
                "Time between consecutive tokens of a streamed completion.",
                self._gaps,
                model_name,
            )
        )

    def _histogram(self, name: str, documentation: str, bounds: tuple[float, ...]) -> Histogram:
        metric = Histogram(name, documentation, ["model_name"], buckets=bounds, registry=self._registry)
        labelled: Histogram = metric.labels(self._model)
        return labelled

    def observe(self, record: RequestRecord) -> None:
        """Count one request."""
        if record.error_code is not None:
            self._errors.labels(record.error_code).inc()
        if not record.ending:  # the request never reached the engine
            return
        self._ended.labels(self._model, _REASONS[record.ending]).inc()
        self._duration.observe(record.duration_s)
        self._prompt_tokens.observe(record.num_prompt_tokens)
        self._output_tokens.observe(record.num_output_tokens)
        self._max_tokens.observe(record.max_tokens)
        self._completions.observe(record.num_completions)
        self._images.observe(record.num_images)
        if record.preprocess_s is not None:
            self._preprocess.observe(record.preprocess_s)
        if record.first_token_s is not None:
            self._first_token.observe(record.first_token_s)
            self._queue.observe(max(0.0, record.first_token_s - (record.preprocess_s or 0.0)))
        if record.ms_per_token is not None:
            self._per_token.observe(record.ms_per_token / 1e3)
        self._gaps.observe_all(record.token_gaps_s)


class _TimeCollector(Collector):
    """Exports one `TimeHistogram` as a metric."""

    def __init__(self, name: str, documentation: str, times: TimeHistogram, model_name: str) -> None:
        self._name, self._documentation, self._times, self._model = name, documentation, times, model_name

    def collect(self) -> Iterator[Metric]:
        """Return one histogram."""
        yield _histogram_family(self._name, self._documentation, self._times, self._model)


def _histogram_family(name: str, documentation: str, times: TimeHistogram, model_name: str) -> Metric:
    family = HistogramMetricFamily(name, documentation, labels=["model_name"])
    family.add_metric([model_name], list(times.cumulative()), times.total_s)
    return family


# ------------------------------------------------------------------ admission and engine, read at each scrape


class _AdmissionCollector(Collector):
    """Exports how full the server is, and how many requests it refused."""

    def __init__(self, admission: Callable[[], Admission | None]) -> None:
        self._admission = admission

    def collect(self) -> Iterator[Metric]:
        """Return nothing before the engine is loaded."""
        admission = self._admission()
        if admission is None:
            return
        usage = GaugeMetricFamily(
            "saccade:admission_usage", "How much of each bound on open requests is in use, 0 to 1.", labels=["bound"]
        )
        refused = CounterMetricFamily(
            "saccade:admission_refusals", "Requests refused with 429 because a bound was reached.", labels=["bound"]
        )
        for bound, share in admission.usage.items():
            usage.add_metric([bound], share)
        for bound, count in admission.num_refused.items():
            refused.add_metric([bound], count)
        yield usage
        yield refused


class _EngineCollector(Collector):
    """Exports counters and gauges of the engine, its workers and processes."""

    def __init__(self, model_name: str, source: EngineSource) -> None:
        self._model, self._source = model_name, source
        self._totals = _Totals()
        self._lock = threading.Lock()

    def collect(self) -> Iterator[Metric]:
        """Return all of them, or the state of the server alone if there is no engine."""
        yield self._counter(
            "saccade:core_restarts", "Times the engine core was started again.", self._source.num_restarts
        )
        yield self._states()
        engine = self._source.loaded_engine
        if engine is None:
            return
        with self._lock:
            core = self._totals.update(engine.statistics)
        yield from self._core(core)
        yield from self._caches(core, engine.statistics, engine.preprocessing_statistics)
        yield from self._pages(engine)
        yield from self._queues(engine)
        yield self._memory(engine)

    def _states(self) -> Metric:
        family = GaugeMetricFamily("saccade:server_state", "1 for the state the server is in.", labels=["state"])
        for state in _STATES:
            family.add_metric([state], float(self._source.state == state))
        return family

    def _core(self, core: Mapping[str, int]) -> Iterator[Metric]:
        num_prompt = core["num_prompt_tokens"] + core["num_cached_tokens"]
        for name, documentation, value in (
            ("vllm:prompt_tokens", "Prompt tokens, computed or found in the prefix cache.", num_prompt),
            ("vllm:generation_tokens", "Output tokens.", core["num_output_tokens"]),
            ("vllm:num_preemptions", "Preemptions: requests that lost their pages.", core["num_preemptions"]),
            ("vllm:spec_decode_num_draft_tokens", "Draft tokens that were checked.", core["num_draft_tokens"]),
            (
                "vllm:spec_decode_num_accepted_tokens",
                "Draft tokens that were accepted.",
                core["num_accepted_draft_tokens"],
            ),
            ("saccade:engine_steps", "Engine steps.", core["num_steps"]),
            ("saccade:images_encoded", "Images that the vision encoder has encoded.", core["num_images_encoded"]),
            ("saccade:engine_failures", "Requests that failed in the engine core.", core["num_failures"]),
            (
                "saccade:cuda_graph_late_captures",
                "CUDA graphs captured while serving: each delays a step.",
                core["num_late_captures"],
            ),
            (
                "saccade:kernel_late_compiles",
                "Kernels compiled, or read from the cache, while serving: each delays a step.",
                core["num_late_compiles"],
            ),
            ("saccade:eager_steps", "Steps that fell back to running without a CUDA graph.", core["num_eager_steps"]),
        ):
            yield self._counter(name, documentation, value)

    def _caches(self, core: Mapping[str, int], now: Statistics, images: PreprocessingStatistics) -> Iterator[Metric]:
        num_prompt = core["num_prompt_tokens"] + core["num_cached_tokens"]
        num_hits = images.num_cache_hits + images.num_shared
        for name, documentation, value in (
            ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", num_prompt),
            ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", core["num_cached_tokens"]),
            (
                "vllm:mm_cache_queries",
                "Images looked up in the processed-image cache.",
                images.num_processed + num_hits,
            ),
            ("vllm:mm_cache_hits", "Images found there, or in work for another request.", num_hits),
            (
                "saccade:encoder_cache_queries",
                "Images looked up in the encoder cache.",
                core["num_encoder_cache_queries"],
            ),
            ("saccade:encoder_cache_hits", "Images found there.", core["num_encoder_cache_hits"]),
            (
                "saccade:worker_crashes",
                "Preprocessing workers that crashed or were killed.",
                images.num_worker_crashes,
            ),
        ):
            yield self._counter(name, documentation, value)
        yield self._gauge(
            "saccade:processed_image_cache_bytes", "Size of the processed-image cache.", images.cached_bytes
        )
        yield self._gauge("saccade:processed_image_cache_images", "Images in it.", images.num_cached)
        for name, documentation, times in (
            ("saccade:image_decode_seconds", "Decoding one image, or all frames of a video.", images.decode_times),
            ("saccade:image_preprocess_seconds", "Resizing it and cutting it into patches.", images.preprocess_times),
            (
                "saccade:image_encode_seconds",
                "From the start of its encoding until that was seen to be complete.",
                TimeHistogram.of_counts(now.encode_counts, now.encode_total_s),
            ),
            (
                "vllm:request_queue_time_seconds",
                "From the arrival of a request at the core until it got a slot.",
                TimeHistogram.of_counts(now.queue_counts, now.queue_total_s),
            ),
        ):
            yield _histogram_family(name, documentation, times, self._model)

    def _pages(self, engine: Engine) -> Iterator[Metric]:
        num_free, num_pages = engine.statistics.num_free_pages, engine.num_pages
        used = 0.0 if engine.statistics.num_steps == 0 else 1 - num_free / num_pages
        yield self._gauge("vllm:kv_cache_usage_perc", "Fraction of KV-cache pages that requests use, 0 to 1.", used)
        info = GaugeMetricFamily(
            "vllm:cache_config_info", "Size of the KV cache.", labels=["model_name", "block_size", "num_gpu_blocks"]
        )
        info.add_metric([self._model, str(engine.page_size), str(num_pages)], 1)
        yield info

    def _queues(self, engine: Engine) -> Iterator[Metric]:
        core, preprocessing = engine.statistics, engine.preprocessing_statistics
        yield self._gauge("vllm:num_requests_running", "Requests that the engine computes.", core.num_running)
        yield self._gauge("vllm:num_requests_waiting", "Requests that wait for a slot.", core.num_waiting)
        family = GaugeMetricFamily(
            "saccade:requests_by_stage", "Requests in each stage of the server.", labels=["model_name", "stage"]
        )
        stages = {
            "preprocessing": preprocessing.num_unfinished,
            "waiting": core.num_waiting,
            "running": core.num_running,
        }
        for stage, count in stages.items():
            family.add_metric([self._model, stage], count)
        yield family

    def _memory(self, engine: Engine) -> Metric:
        family = GaugeMetricFamily(
            "saccade:process_resident_memory_bytes",
            "Resident memory of the server's processes; memory that they share counts for each.",
            labels=["process"],
        )
        pids = {"front": [os.getpid()], "workers": engine.worker_pids}
        if engine.core_pid is not None:
            pids["core"] = [engine.core_pid]
        for process, members in pids.items():
            family.add_metric([process], sum(map(_resident_bytes, members)))
        return family

    def _counter(self, name: str, documentation: str, value: float) -> Metric:
        family = CounterMetricFamily(name, documentation, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _gauge(self, name: str, documentation: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, documentation, labels=["model_name"])
        family.add_metric([self._model], value)
        return family


class _Totals:
    """Sums the counters of the engine core over its restarts: a new core counts from zero."""

    def __init__(self) -> None:
        self._ended: dict[str, int] = {}
        self._last: dict[str, int] = {}

    def update(self, statistics: Statistics) -> dict[str, int]:
        """Return the totals as of now."""
        now = {name: value for name, value in vars(statistics).items() if isinstance(value, int)}
        if now["num_steps"] < self._last.get("num_steps", 0):
            self._ended = {name: self._ended.get(name, 0) + value for name, value in self._last.items()}
        self._last = now
        return {name: self._ended.get(name, 0) + value for name, value in now.items()}


def _resident_bytes(pid: int) -> int:
    """Resident memory of a process; 0 if it has ended or the system has no /proc."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES
    except (OSError, IndexError):
        return 0
