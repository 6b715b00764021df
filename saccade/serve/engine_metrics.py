"""Metrics that are read at each scrape: of admission, of the engine, its workers and processes."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from saccade.engine.core.time_histogram import TimeHistogram

if TYPE_CHECKING:
    from saccade.engine import Engine
    from saccade.engine.core.statistics import Statistics
    from saccade.engine.frontend.preprocessing.statistics import PreprocessingStatistics
    from saccade.serve.admission import Admission
    from saccade.serve.engine_owner import EngineOwner

_COUNTERS = (
    ("vllm:prompt_tokens", "Prompt tokens, computed or found in the prefix cache.", "num_prompt"),
    ("vllm:generation_tokens", "Output tokens.", "num_output_tokens"),
    ("vllm:num_preemptions", "Preemptions: requests that lost their pages.", "num_preemptions"),
    ("vllm:spec_decode_num_draft_tokens", "Draft tokens that were checked.", "num_draft_tokens"),
    ("vllm:spec_decode_num_accepted_tokens", "Draft tokens that were accepted.", "num_accepted_draft_tokens"),
    ("saccade:engine_steps", "Engine steps.", "num_steps"),
    ("saccade:images_encoded", "Images that the vision encoder has encoded.", "num_images_encoded"),
    ("saccade:engine_failures", "Requests that failed in the engine core.", "num_failures"),
    ("saccade:cuda_graph_late_captures", "CUDA graphs captured while serving: each delays a step.",
     "num_late_captures"),
    ("saccade:kernel_late_compiles", "Kernels compiled, or read from the cache, while serving: each delays a step.",
     "num_late_compiles"),
    ("saccade:eager_steps", "Steps that fell back to running without a CUDA graph.", "num_eager_steps"),
    ("saccade:rank_fallback_steps", "Steps of several GPUs that cannot access each other's memory.",
     "num_fallback_steps"),
    ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", "num_prompt"),
    ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", "num_cached_tokens"),
    ("vllm:mm_cache_queries", "Images looked up in the processed-image cache.", "num_images"),
    ("vllm:mm_cache_hits", "Images found there, or in work for another request.", "num_known_images"),
    ("saccade:encoder_cache_queries", "Images looked up in the encoder cache.", "num_encoder_cache_queries"),
    ("saccade:encoder_cache_hits", "Images found there.", "num_encoder_cache_hits"),
    ("saccade:worker_crashes", "Preprocessing workers that crashed or were killed.", "num_worker_crashes"),
)  # fmt: skip
"""Name, documentation, and the number that it exports: of the core's statistics, or of `_counted`."""
_STATES = ("loading", "ready", "restarting", "draining", "failed", "stopped")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class ModelCollector:
    """Exports counters and gauges of one model: its admission, its engine and the engine's workers."""

    def __init__(
        self, labels: Mapping[str, str], owner: EngineOwner, admission: Callable[[], Admission | None]
    ) -> None:
        self._labels, self._owner, self._admission = labels, owner, admission
        self._totals = _Totals()
        self._lock = threading.Lock()

    @property
    def engine(self) -> Engine | None:
        """The engine in any state; None before it is loaded."""
        return self._owner.loaded_engine

    def collect(self) -> Iterator[Metric]:
        """Return all of them, or the state alone if there is no engine."""
        yield self._counter(
            "saccade:core_restarts", "Times the engine core was started again.", self._owner.num_restarts
        )
        now = self._owner.state
        states = {state: float(now == state) for state in _STATES}
        yield self._metric(
            GaugeMetricFamily, "saccade:server_state", "1 for the state the model is in.", states, "state"
        )
        if (admission := self._admission()) is not None:
            yield from self._bounds(admission)
        engine = self.engine
        if engine is None:
            return
        with self._lock:
            core = self._totals.update(engine.statistics)
        images = engine.preprocessing_statistics
        for name, documentation, number in _COUNTERS:
            yield self._counter(name, documentation, (core | _counted(core, images))[number])
        yield from self._ranks(engine.statistics.ranks)
        yield from self._images(engine.statistics, images)
        yield from self._pages(engine)
        yield from self._queues(engine)

    def _bounds(self, admission: Admission) -> Iterator[Metric]:
        yield self._metric(
            GaugeMetricFamily, "saccade:admission_usage",
            "How much of each bound on open requests is in use, 0 to 1.", admission.usage, "bound",
        )  # fmt: skip
        yield self._metric(
            CounterMetricFamily, "saccade:admission_refusals",
            "Requests refused with 429 because a bound was reached.", admission.num_refused, "bound",
        )  # fmt: skip

    def _ranks(self, ranks: Sequence[tuple[int, float]]) -> Iterator[Metric]:
        """The ranks of a tensor-parallel engine; nothing for one rank."""
        if not ranks:
            return
        numbered = {str(rank): values for rank, values in enumerate(ranks)}
        yield self._metric(
            GaugeMetricFamily, "saccade:rank_memory_bytes", "Memory of a rank when it was ready.",
            {rank: num_bytes for rank, (num_bytes, _) in numbered.items()}, "rank",
        )  # fmt: skip
        yield self._metric(
            CounterMetricFamily, "saccade:rank_wait_seconds", "Time that rank 0 has waited for a rank.",
            {rank: wait_s for rank, (_, wait_s) in numbered.items()}, "rank",
        )  # fmt: skip

    def _images(self, now: Statistics, images: PreprocessingStatistics) -> Iterator[Metric]:
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
            yield self._histogram(name, documentation, times)

    def _pages(self, engine: Engine) -> Iterator[Metric]:
        num_free, num_pages = engine.statistics.num_free_pages, engine.num_pages
        used = 0.0 if engine.statistics.num_steps == 0 else 1 - num_free / num_pages
        yield self._gauge("vllm:kv_cache_usage_perc", "Fraction of KV-cache pages that requests use, 0 to 1.", used)
        info = GaugeMetricFamily(
            "vllm:cache_config_info", "Size of the KV cache.", labels=[*self._labels, "block_size", "num_gpu_blocks"]
        )
        info.add_metric([*self._labels.values(), str(engine.page_size), str(num_pages)], 1)
        yield info

    def _queues(self, engine: Engine) -> Iterator[Metric]:
        core, preprocessing = engine.statistics, engine.preprocessing_statistics
        yield self._gauge("vllm:num_requests_running", "Requests that the engine computes.", core.num_running)
        yield self._gauge("vllm:num_requests_waiting", "Requests that wait for a slot.", core.num_waiting)
        stages = {
            "preprocessing": preprocessing.num_unfinished,
            "waiting": core.num_waiting,
            "running": core.num_running,
        }
        name, documentation = "saccade:requests_by_stage", "Requests in each stage of the server."
        yield self._metric(GaugeMetricFamily, name, documentation, stages, "stage")

    # -------------------------------------------------------------- metrics with the labels of the model

    def _counter(self, name: str, documentation: str, value: float) -> Metric:
        return self._metric(CounterMetricFamily, name, documentation, {"": value})

    def _gauge(self, name: str, documentation: str, value: float) -> Metric:
        return self._metric(GaugeMetricFamily, name, documentation, {"": value})

    def _metric(
        self, kind: type[CounterMetricFamily | GaugeMetricFamily], name: str, documentation: str,
        values: Mapping[Any, float], label: str | None = None,
    ) -> Metric:  # fmt: skip
        """Return a metric, with its values by one more label if that is given."""
        more = [] if label is None else [label]
        family = kind(name, documentation, labels=[*self._labels, *more])
        for key, value in values.items():
            family.add_metric([*self._labels.values(), *(more and [key])], value)
        return family

    def _histogram(self, name: str, documentation: str, times: TimeHistogram) -> Metric:
        family = HistogramMetricFamily(name, documentation, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), list(times.cumulative()), times.total_s)
        return family


def _counted(core: Mapping[str, int], images: PreprocessingStatistics) -> dict[str, int]:
    """Return the numbers of `_COUNTERS` that are no statistics of the core."""
    num_known = images.num_cache_hits + images.num_shared
    return {
        "num_prompt": core["num_prompt_tokens"] + core["num_cached_tokens"],
        "num_images": images.num_processed + num_known,
        "num_known_images": num_known,
        "num_worker_crashes": images.num_worker_crashes,
    }


def memory_of(engines: Iterable[Engine]) -> Metric:
    """Return the resident memory of this process and those of all engines."""
    family = GaugeMetricFamily(
        "saccade:process_resident_memory_bytes",
        "Resident memory of the server's processes; memory that they share counts for each.",
        labels=["process"],
    )
    engines = list(engines)
    pids = {"front": [os.getpid()], "workers": [pid for engine in engines for pid in engine.worker_pids]}
    if cores := [engine.core_pid for engine in engines if engine.core_pid is not None]:
        pids["core"] = cores
    for process, members in pids.items():
        family.add_metric([process], sum(map(_resident_bytes, members)))
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
