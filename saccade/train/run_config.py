"""Sections of a recipe about the whole run: checkpoints, bad steps, logging, validation and evaluation."""

import math
from dataclasses import dataclass, field
from typing import Literal

from saccade.config import check_positive
from saccade.data.config import Source
from saccade.errors import ConfigError
from saccade.train.trackers import TrackersConfig


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When the training state is saved and a checkpoint folder is exported."""

    every: int = 500
    """Steps between saves of the training state, from which a run resumes. A save between skipped steps is delayed."""
    keep_last: int = 2
    """Number of newest states that are kept. A stage with DPO also keeps the state it started from, its reference."""
    keep_every: int | None = None
    """States at multiples of this many steps are kept as well."""
    background: bool = True
    """Write asynchronously from a copy in host memory while training continues."""
    on_failure: Literal["continue", "stop"] = "continue"
    """What to do if a save fails (for example, disk full); earlier states are untouched either way."""
    export_every: int | None = None
    """Steps between exports of a checkpoint folder in Hugging Face layout; the end of a stage always exports."""
    export_dtype: Literal["bf16", "fp32"] = "bf16"
    """Dtype of exported weights."""

    def __post_init__(self) -> None:
        check_positive(self, "every", "keep_last", "keep_every", "export_every")


@dataclass(frozen=True, kw_only=True)
class GuardConfig:
    """Detection of bad steps (NaN, loss spikes, hangs) and the reaction to them."""

    window: int = 64
    """Number of accepted steps whose losses a new loss is compared with."""
    min_history: int = 16
    """Number of accepted steps before spikes are detected."""
    spike_sigmas: float = 8.0
    """A loss above mean + this many standard deviations of the window is a spike (see `spike_floor`); inf disables."""
    spike_floor: float = 1.1
    """A loss below this multiple of the window's mean is never a spike."""
    spike_factor: float = math.inf
    """A loss above this multiple of the window's mean is a spike."""
    max_grad_norm: float = math.inf
    """A step with a larger gradient norm is skipped (clipping only scales it down)."""
    max_skips: int = 5
    """Consecutive skipped steps before weights and optimizer roll back to an earlier state; the data continues."""
    max_rollbacks: int = 3
    """Rollbacks per stage before the run stops."""
    hang_timeout_s: float = 900.0
    """Seconds without a step (saves etc. excluded) until the process dumps all stacks and exits; inf disables."""

    def __post_init__(self) -> None:
        check_positive(
            self, "window", "min_history", "spike_sigmas", "spike_floor", "spike_factor", "max_grad_norm",
            "max_skips", "hang_timeout_s",
        )  # fmt: skip
        if self.max_rollbacks < 0:
            raise ConfigError(f"max_rollbacks is {self.max_rollbacks}; give 0 or more")


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """Logging, trackers and profiling."""

    every: int = 10
    """Steps between records in the log and in metrics.jsonl; the first step is always logged."""
    trackers: TrackersConfig = field(default_factory=TrackersConfig)
    """Additional destinations of the records."""
    profile_steps: tuple[int, ...] | None = None
    """First and last step to profile, such as [20, 22]; the trace is written to trace/."""
    profile: bool = False
    """Profile the third to fifth step of each start, as `saccade train --profile` does."""
    memory_snapshot: bool = False
    """Write a CUDA memory snapshot to trace/: after the profiled (else the third) step, and on out of memory."""

    def __post_init__(self) -> None:
        check_positive(self, "every")
        steps = self.profile_steps
        if self.profile and steps is not None:
            raise ConfigError("log.profile and log.profile_steps both say which steps are profiled. Give one of them")
        if steps is not None and not (len(steps) == 2 and 1 <= steps[0] <= steps[1]):
            raise ConfigError(f"profile_steps is {list(steps)}; give the first and the last step, such as [20, 22]")


@dataclass(frozen=True, kw_only=True)
class ValidationConfig:
    """Validation while training: loss and sample generations on held-out data."""

    every: int | None = None
    """Steps between validations, plus one at the end of each stage; default: none."""
    sources: tuple[Source, ...] = ()
    """Held-out shard folders; packed like the data of the stage."""
    num_samples: int = 512
    """Held-out samples the loss is computed on, the same ones every time."""
    num_generations: int = 8
    """Samples the model generates an output for, written to samples.jsonl; skipped for sharded models."""
    max_new_tokens: int = 64
    """Maximum number of generated tokens."""
    export_best: bool = False
    """Export the checkpoint with the lowest validation loss of the run to checkpoints/best."""

    def __post_init__(self) -> None:
        check_positive(self, "every", "num_samples", "max_new_tokens")
        if self.export_best and not self.sources:
            raise ConfigError("validation.export_best needs validation.sources. Name held-out shards")
        if self.num_generations < 0:
            raise ConfigError(f"num_generations is {self.num_generations}; give 0 or more")
        if self.sources and self.every is None:
            raise ConfigError(
                "validation.sources is set but validation.every is not, so validation would never run. "
                "Set validation.every"
            )
        if any(source.weight is not None for source in self.sources):
            raise ConfigError("validation sources are not a mixture: every sample counts once. Remove the weights")


@dataclass(frozen=True, kw_only=True)
class CheckpointEvaluationConfig:
    """Evaluation of exported checkpoints while training, as `saccade evaluate` does it."""

    tasks: tuple[str, ...] = ()
    """Tasks with their data, such as "captioning=shards/val"; every exported checkpoint is evaluated on them."""
    limit: int | None = 256
    """Examples per task, the same ones every time."""
    device: str = "cpu"
    """Device of the evaluation, in a process next to training; same: the device of training, which waits for it."""

    def __post_init__(self) -> None:
        check_positive(self, "limit")
        for task in self.tasks:
            name, equals, path = task.partition("=")
            if not (name and equals and path):
                raise ConfigError(
                    f"evaluation.tasks: {task!r} has no data. Write TASK=PATH, such as captioning=shards/val"
                )
