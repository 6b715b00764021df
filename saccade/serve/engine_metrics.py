"""Metrics that are read at each scrape: of admission, of the engine, its workers and processes."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from saccade.engine.core.time_histogram import TimeHistogram

if TYPE_CHECKING:
    from saccade.engine import Engine
    from saccade.engine.core.statistics import Statistics
    from saccade.engine.frontend.preprocessing.statistics import PreprocessingStatistics
    from saccade.serve.admission import Admission

_STATES = ("loading", "ready", "restarting", "draining", "failed", "stopped")
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


class AdmissionCollector(Collector):
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


class EngineCollector(Collector):
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
            yield histogram_family(name, documentation, times, self._model)

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


def histogram_family(name: str, documentation: str, times: TimeHistogram, model_name: str) -> Metric:
    """Return a `TimeHistogram` as a metric."""
    family = HistogramMetricFamily(name, documentation, labels=["model_name"])
    family.add_metric([model_name], list(times.cumulative()), times.total_s)
    return family
