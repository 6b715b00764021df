"""Counters of an engine core, and the object that updates them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from saccade.engine.core.scheduler import Scheduler
from saccade.engine.core.step import EncodeResult, StepPlan
from saccade.engine.core.step_budget import StepBudget
from saccade.engine.core.step_runner import StepRunner
from saccade.engine.core.time_histogram import TimeHistogram
from saccade.engine.request import RequestOutput

_PATCHES = 1024
"""Patches of the pass whose time per patch is exported."""


@dataclass
class Statistics:
    """Counters since the start."""

    num_steps: int = 0
    num_prompt_tokens: int = 0
    """Prompt tokens computed, without those found in the prefix cache."""
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_images_encoded: int = 0
    num_encoder_cache_queries: int = 0
    """Images looked up in the encoder cache. An image in a cached prefix is not looked up."""
    num_encoder_cache_hits: int = 0
    num_preemptions: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    num_failures: int = 0
    num_late_captures: int = 0
    """CUDA graphs captured while serving; each delays a step."""
    num_late_compiles: int = 0
    """Kernels compiled, or read from the kernel cache, while serving; each delays a step."""
    num_eager_steps: int = 0
    """Steps that ran without a CUDA graph on a GPU that uses them."""
    ranks: Sequence[tuple[int, float]] = ()
    """Memory in bytes of each rank of a tensor-parallel engine, and the seconds that rank 0 has waited for it."""
    num_fallback_steps: int = 0
    """Steps of several GPUs that cannot access each other's memory, which is faster for sums of few tokens."""
    num_running: int = 0
    num_waiting: int = 0
    num_free_pages: int = 0
    finished: dict[str, int] = field(default_factory=dict)
    """Ended requests by finish reason."""
    encode_counts: Sequence[int] = ()
    """Images by the seconds from the launch of their encoding until its result was read, in `STAGE_SECONDS` buckets."""
    encode_total_s: float = 0.0
    queue_counts: Sequence[int] = ()
    """Requests by the seconds that they waited for a slot, in the same buckets."""
    queue_total_s: float = 0.0
    step_s: float = 0.0
    """Expected time of a step that decodes one request. 0 before the first step, as the next two."""
    token_s: float = 0.0
    """Time by which another token makes a step longer."""
    patch_s: float = 0.0
    """Time of the vision encoder per patch."""


class StatisticsCounter:
    """Counts events and measures waiting times. One thread counts; any thread may read `statistics`."""

    def __init__(self, num_free_pages: int, clock: Callable[[], float]) -> None:
        self.statistics = Statistics(num_free_pages=num_free_pages)
        self._clock = clock
        self._added_at: dict[str, float] = {}  # by request that has not started
        self._encoding_since: dict[bytes, float] = {}
        self._queue_times, self._encode_times = TimeHistogram(), TimeHistogram()

    def count_added(self, request_id: str) -> None:
        """Start measuring how long a request waits for a slot."""
        self._added_at[request_id] = self._clock()

    def count_starts(self, plan: StepPlan) -> None:
        """Count the requests that get a slot and the images that a plan encodes."""
        now = self._clock()
        self.statistics.num_images_encoded += len(plan.images)
        self._encoding_since |= {image.key: now for image in plan.images}
        added = [self._added_at.pop(start.request_id, None) for start in plan.started]
        self._queue_times.observe_all(now - at for at in added if at is not None)
        self.statistics.queue_counts = self._queue_times.counts
        self.statistics.queue_total_s = self._queue_times.total_s

    def count_encoded(self, results: Sequence[EncodeResult]) -> None:
        """Count images whose encoding has ended."""
        now = self._clock()
        self._encode_times.observe_all(now - self._encoding_since.pop(result.key, now) for result in results)
        self.statistics.encode_counts = self._encode_times.counts
        self.statistics.encode_total_s = self._encode_times.total_s

    def count_ended(self, output: RequestOutput) -> None:
        """Count a request that has ended, given its last output."""
        assert output.finish_reason is not None, f"request {output.request_id} has ended"
        statistics = self.statistics
        self._added_at.pop(output.request_id, None)
        statistics.num_failures += output.failure is not None
        statistics.num_cached_tokens += output.num_cached_tokens
        statistics.finished[output.finish_reason] = statistics.finished.get(output.finish_reason, 0) + 1

    def read(self, scheduler: Scheduler, num_compiling: int, budget: StepBudget, runner: StepRunner) -> Statistics:
        """The statistics, with the current state of the queues, the caches, the step times and the device."""
        statistics = self.statistics
        statistics.num_running = scheduler.num_running
        statistics.num_waiting = scheduler.num_waiting + num_compiling
        statistics.num_free_pages = scheduler.pages.num_free
        statistics.num_preemptions = scheduler.num_preemptions
        statistics.num_encoder_cache_queries = scheduler.encoder_cache.num_queries
        statistics.num_encoder_cache_hits = scheduler.encoder_cache.num_hits
        (
            statistics.num_late_captures,
            statistics.num_late_compiles,
            statistics.num_eager_steps,
            statistics.ranks,
            statistics.num_fallback_steps,
        ) = runner.counters()
        statistics.step_s = budget.expected_ms(1) / 1e3
        statistics.token_s = budget.token_ms / 1e3
        statistics.patch_s = runner.encode_ms(_PATCHES) / _PATCHES / 1e3
        return statistics
