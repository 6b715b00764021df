"""Histograms and counters of requests that have ended, by model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.metrics_core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from saccade.engine.core.time_histogram import TimeHistogram

if TYPE_CHECKING:
    from saccade.serve.record import RequestRecord

_SECONDS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 0.75, 1, 1.5, 2.5, 5, 10, 15, 30, 60, 120, 300)
"""Buckets of waiting times: from one image on a GPU to a queue that is too long."""
_GAP_SECONDS = (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5)
"""Buckets of the time between two tokens."""
_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
_REASONS = {"stop": "stop", "length": "length", "cancelled": "abort", "failed": "error"}
"""Finish reasons as vLLM names them."""

_FIRST_TOKEN, _DURATION = "vllm:time_to_first_token_seconds", "vllm:e2e_request_latency_seconds"
_DECODE = "vllm:request_time_per_output_token_seconds"
_PROMPT_TOKENS, _OUTPUT_TOKENS = "vllm:request_prompt_tokens", "vllm:request_generation_tokens"
_MAX_TOKENS, _COMPLETIONS = "vllm:request_params_max_tokens", "vllm:request_params_n"
_IMAGES, _PREPROCESS, _PREFILL = (
    "saccade:request_images", "saccade:request_preprocess_seconds", "saccade:request_prefill_seconds"
)  # fmt: skip

_HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    _FIRST_TOKEN: ("From the arrival of a request to its first token.", _SECONDS),
    _DURATION: ("From the arrival of a request to its last byte.", _SECONDS),
    _DECODE: ("Time per output token of a request, after the first.", _GAP_SECONDS),
    _PROMPT_TOKENS: ("Prompt tokens of a request, image tokens included.", _TOKENS),
    _OUTPUT_TOKENS: ("Output tokens of a request, of all its completions.", _TOKENS),
    _MAX_TOKENS: ("Maximum tokens that a request asks for.", _TOKENS),
    _COMPLETIONS: ("Completions of a request.", (1, 2, 4, 8, 16)),
    _IMAGES: ("Images and videos of a request.", (0, 1, 2, 4, 8, 16, 32, 64)),
    _PREPROCESS: ("Until the prompt of a request is ready: waiting for a worker, decoding, tokenization.", _SECONDS),
    _PREFILL: (
        "From the prompt being ready to the first token: waiting for a slot, encoding images, prefill.",
        _SECONDS,
    ),
}
"""Documentation and buckets by name."""

Labels = tuple[str, ...]


class RequestMetrics:
    """Counts ended requests under the labels of their models. Used in the event loop."""

    def __init__(self, registry: CollectorRegistry, label_names: Labels) -> None:
        self._label_names = label_names
        self._histograms = {
            name: Histogram(name, documentation, label_names, buckets=bounds, registry=registry)
            for name, (documentation, bounds) in _HISTOGRAMS.items()
        }
        self._ended = Counter(
            "vllm:request_success",
            "Requests that the engine has ended, by finish reason.",
            [*label_names, "finished_reason"],
            registry=registry,
        )
        self._errors = Counter(
            "saccade:request_errors",
            "Requests answered with an error, by its code.",
            [*label_names, "code"],
            registry=registry,
        )
        self._codes: set[str] = set()
        """Codes of errors so far."""
        self._gaps: dict[Labels, TimeHistogram] = {}
        """Times between tokens by model."""
        registry.register(_GapCollector(label_names, self._gaps))

    def add(self, labels: Labels) -> None:
        """Export the metrics of a model, from zero."""
        for histogram in self._histograms.values():
            histogram.labels(*labels)
        for reason in _REASONS.values():
            self._ended.labels(*labels, reason)
        self._gaps[labels] = TimeHistogram(_GAP_SECONDS)

    def remove(self, labels: Labels) -> None:
        """Export the metrics of a model no more."""
        for histogram in self._histograms.values():
            histogram.remove(*labels)
        for reason in _REASONS.values():
            self._ended.remove(*labels, reason)
        for code in self._codes:
            self._errors.remove(*labels, code)
        self._gaps.pop(labels, None)

    def observe(self, labels: Labels, record: RequestRecord) -> None:
        """Count one request of a model; `labels` are empty texts if it was refused before a model was chosen."""
        is_known = labels in self._gaps
        if record.error_code is not None and (is_known or not any(labels)):
            self._codes.add(record.error_code)
            self._errors.labels(*labels, record.error_code).inc()
        if not record.ending or not is_known:  # the request never reached the engine, or its model is gone
            return
        self._ended.labels(*labels, _REASONS[record.ending]).inc()
        for name, value in _values(record).items():
            if value is not None:
                self._histograms[name].labels(*labels).observe(value)
        self._gaps[labels].observe_all(record.token_gaps_s)


def _values(record: RequestRecord) -> dict[str, float | None]:
    """Return what the histograms observe of a request; None: nothing."""
    first, prepared, ms_per_token = record.first_token_s, record.preprocess_s, record.ms_per_token
    return {
        _DURATION: record.duration_s,
        _PROMPT_TOKENS: record.num_prompt_tokens,
        _OUTPUT_TOKENS: record.num_output_tokens,
        _MAX_TOKENS: record.max_tokens,
        _COMPLETIONS: record.num_completions,
        _IMAGES: record.num_images,
        _PREPROCESS: prepared,
        _FIRST_TOKEN: first,
        _PREFILL: None if first is None else max(0.0, first - (prepared or 0.0)),
        _DECODE: None if ms_per_token is None else ms_per_token / 1e3,
    }


class _GapCollector(Collector):
    """Exports the times between tokens."""

    def __init__(self, label_names: Labels, gaps: dict[Labels, TimeHistogram]) -> None:
        self._label_names, self._gaps = label_names, gaps

    def collect(self) -> Iterator[Metric]:
        """Return one histogram with the samples of all models."""
        family = HistogramMetricFamily(
            "vllm:inter_token_latency_seconds",
            "Time between consecutive tokens of a streamed completion.",
            labels=self._label_names,
        )
        for labels, times in list(self._gaps.items()):
            family.add_metric(labels, list(times.cumulative()), times.total_s)
        yield family
