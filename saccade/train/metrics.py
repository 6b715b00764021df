"""Metrics of training: a record per interval, in the log and for the trackers.

MFU is the model's FLOPs (`flops.py`) over time and the device's peak: `mfu` with vision tower and projector,
`mfu_decoder` without. A `Meter` collects steps and gives one record per interval; the first steps of a process
(compilation, allocation, caches) are excluded from times.
"""

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from saccade.train.flops import Work, peak_flops
from saccade.train.log_line import format_line
from saccade.train.trackers import Trackers
from saccade.world import World

logger = logging.getLogger(__name__)

Record = dict[str, Any]
"""Metrics of one interval: JSON, with None for unknown values."""


@dataclass(frozen=True)
class Step:
    """One optimizer step, summed over ranks."""

    number: int
    """Steps of the run so far, including this one."""
    loss: float
    """Loss per unit of the objective: per loss token, for cross entropy."""
    grad_norm: float
    """Norm before clipping."""
    seconds: float
    """Time from the end of the previous step to the end of this one."""
    data_wait_s: float
    """Part of this time spent waiting for the next batch."""
    work: Work
    """Work of all ranks."""
    source_losses: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Maps a source to (sum of the loss, number of loss tokens)."""
    of_objective: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Maps a metric of the objective to (sum, number of units)."""
    is_skipped: bool = False
    """Whether the guard skipped it; its loss is excluded from averages."""


class Meter:
    """Averages steps into one record per interval."""

    def __init__(
        self,
        *,
        num_steps: int,
        world_size: int = 1,
        peak_flops: float | None = None,
        num_warmup: int = 3,
        tokens: int = 0,
        samples: int = 0,
    ) -> None:
        """The first `num_warmup` steps are not timed; a resumed run has already seen `tokens` and `samples`."""
        self.tokens, self.samples = tokens, samples
        """Tokens and samples seen since the start of the run."""
        self._num_steps, self._world_size, self._peak = num_steps, world_size, peak_flops
        self._num_warmup = num_warmup
        self._steps: list[Step] = []
        self._timed: list[Step] = []
        self._timed_seconds, self._num_timed = 0.0, 0

    def add(self, step: Step) -> None:
        """Count one step."""
        self.tokens += int(step.work.text_tokens + step.work.image_tokens)
        self.samples += int(step.work.samples)
        self._steps.append(step)
        if self._num_warmup > 0:
            self._num_warmup -= 1
            return
        self._timed.append(step)
        self._timed_seconds += step.seconds
        self._num_timed += 1

    def record(self, stage: str, lrs: Mapping[str, float], memory_gib: float | None = None) -> Record:
        """The record of the interval since the last one. `lrs`: current learning rate by parameter group."""
        assert self._steps, "a record needs at least one step"
        steps, number = self._steps, self._steps[-1].number
        good = [step for step in steps if not step.is_skipped]
        mean_s = self._timed_seconds / self._num_timed if self._num_timed else None
        record = {
            "step": number,
            "stage": stage,
            "loss": _mean([step.loss for step in good]),
            "grad_norm": _mean([step.grad_norm for step in good]),
            "lr": dict(lrs),
            **self._speeds(),
            "memory_gib": memory_gib,
            "eta_s": None if mean_s is None else mean_s * (self._num_steps - number),
            "tokens": self.tokens,
            "samples": self.samples,
            "skipped": len(steps) - len(good),
            "source_loss": _means([step.source_losses for step in good]),
        }
        if of_objective := _means([step.of_objective for step in good]):
            record["objective"] = of_objective
        self._steps, self._timed = [], []
        return record

    def _speeds(self) -> Record:
        """Times and rates of the interval; None during warm-up."""
        names = ("ms", "text_tokens_per_s", "image_tokens_per_s", "mfu", "mfu_decoder", "data_wait")
        if not self._timed:
            return dict.fromkeys(names)
        seconds, work = sum(step.seconds for step in self._timed), Work()
        for step in self._timed:
            work = work.plus(step.work)
        available = None if self._peak is None else self._peak * self._world_size * seconds
        values = (
            seconds / len(self._timed) * 1e3,
            work.text_tokens / seconds,
            work.image_tokens / seconds,
            None if available is None else (work.vision_flops + work.decoder_flops) / available,
            None if available is None else work.decoder_flops / available,
            sum(step.data_wait_s for step in self._timed) / seconds,
        )
        return dict(zip(names, values, strict=True))


class MetricsLog:
    """Metrics log of a stage: one line in the log and one record for the trackers per interval, and for the first step.

    Every rank has one; only the main rank's output is seen.
    """

    def __init__(self, trackers: Trackers, stage: str, every: int, world: World) -> None:
        self._trackers, self._stage, self._every, self._world = trackers, stage, every, world
        self._meter: Meter | None = None
        self._num_steps = 0
        self._is_first = True
        self._last_time = time.perf_counter()

    @property
    def is_started(self) -> bool:
        """Whether `start` was called."""
        return self._meter is not None

    def start(self, *, num_steps: int, tokens: int, samples: int) -> None:
        """Before the first step: the last step of the stage, and what the run has seen so far."""
        self._num_steps = num_steps
        self._meter = Meter(
            num_steps=num_steps,
            world_size=self._world.dims.size,
            peak_flops=peak_flops(self._world.device),
            tokens=tokens,
            samples=samples,
        )

    def seconds_since_last(self) -> float:
        """Time since the last call: the duration of a step."""
        now = time.perf_counter()
        seconds, self._last_time = now - self._last_time, now
        return seconds

    def add(self, step: Step, lrs: Mapping[str, float], remote_reads: Callable[[], Record] = dict) -> None:
        """Count a step; write a record after the first step and each interval.

        `lrs` are learning rates by group, `remote_reads` is what this rank has read of remote shards, if any.
        """
        assert self._meter is not None, "start comes first"
        self._meter.add(step)
        if step.number % self._every == 0 or self._is_first:
            record = self._meter.record(self._stage, lrs, device_memory_gib(self._world.device))
            if read := remote_reads():
                record["remote_reads"] = read
            self._trackers.log(record)
            logger.info(format_line(record, self._num_steps))
        self._is_first = False

    def add_validation(self, step: int, scores: Mapping[str, float]) -> None:
        """Record the scores of a validation."""
        self._trackers.log({"step": step, "stage": self._stage, "validation": dict(scores)})
        logger.info("step %d: validation %s", step, "  ".join(f"{name} {score:.4g}" for name, score in scores.items()))


def _mean(values: Sequence[float]) -> float | None:
    """The mean; None without values, or if it is not finite."""
    mean = sum(values) / len(values) if values else math.nan
    return mean if math.isfinite(mean) else None


def _means(steps: Sequence[Mapping[str, tuple[float, float]]]) -> dict[str, float]:
    """The mean of every name over all steps that have it, from (sum, count) of each."""
    pairs: dict[str, list[tuple[float, float]]] = {}
    for step in steps:
        for name, sum_and_count in step.items():
            pairs.setdefault(name, []).append(sum_and_count)
    return {
        name: sum(s for s, _ in found) / count
        for name, found in sorted(pairs.items())
        if (count := sum(n for _, n in found)) > 0
    }


def device_memory_gib(device: torch.device) -> float | None:
    """Peak allocated memory of a GPU since the last call; None on a CPU."""
    if device.type != "cuda":
        return None
    peak = torch.cuda.max_memory_allocated(device) / 2**30
    torch.cuda.reset_peak_memory_stats(device)
    return peak
