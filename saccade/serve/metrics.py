"""Prometheus metrics of a server, under the names that dashboards, autoscalers and routers for vLLM know.

    RequestRecord of an ended request -> ServerMetrics.observe -> histograms and counters \\
    engine, preprocessing workers, processes ---------- read at each scrape ---------------> render -> /metrics

Names with the prefix `vllm:` mean what they mean in vLLM; what vLLM does not have has the prefix `saccade:`. The
registry is the server's own, so that several servers can live in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from saccade.engine.core.time_histogram import TimeHistogram
from saccade.serve.engine_metrics import AdmissionCollector, EngineCollector, EngineSource, histogram_family

if TYPE_CHECKING:
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
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_CLIENT_LEFT = 499
"""Status that proxies log for a request whose client left before the response."""


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
        self._registry.register(AdmissionCollector(admission))
        self._registry.register(EngineCollector(model_name, source))

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
        yield histogram_family(self._name, self._documentation, self._times, self._model)
