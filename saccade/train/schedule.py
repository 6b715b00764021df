"""Learning-rate schedules, as a factor on each parameter group's peak. Pure functions without state.

    cosine     warm-up, then cosine decay to `final_factor`
    linear     warm-up, then linear decay to `final_factor`
    wsd        warm-up, then constant until the last `decay_steps`, then linear decay to `final_factor`
    constant   warm-up, then constant

Steps count from 0. Warm-up is linear and complete at step `warmup_steps - 1`, so no step has a rate of zero;
`final_factor` would be reached at step `num_steps`. With a length in epochs, progress after warm-up is measured in
samples: the same curve.
"""

import math
from dataclasses import dataclass
from typing import Literal

from saccade.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Learning-rate schedule."""

    kind: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """Shape after warm-up; wsd is warm-up, stable, decay."""
    warmup_steps: int = 0
    """Number of linear warm-up steps."""
    decay_steps: int | None = None
    """wsd only: number of decay steps at the end, for lengths in steps or tokens; default: a tenth of the stage."""
    final_factor: float = 0.1
    """Final learning rate as a fraction of the peak; ignored by constant."""

    def __post_init__(self) -> None:
        if self.warmup_steps < 0:
            raise ConfigError(f"warmup_steps is {self.warmup_steps}; give 0 or more")
        if not 0.0 <= self.final_factor <= 1.0:
            raise ConfigError(f"final_factor is {self.final_factor}; it is a fraction of the peak, between 0 and 1")
        if self.decay_steps is not None and self.kind != "wsd":
            raise ConfigError(f"decay_steps is for kind = 'wsd'; {self.kind!r} would ignore it. Remove it")
        if self.decay_steps is not None and self.decay_steps < 1:
            raise ConfigError(f"decay_steps is {self.decay_steps}; give 1 or more, or use kind = 'constant'")

    def check(self, num_steps: int) -> None:
        """Refuse a stage shorter than its warm-up and decay."""
        if num_steps < 1:
            raise ConfigError(f"a run of {num_steps} steps has no learning rate. Give 1 or more")
        decay = math.ceil(self._decay_length(num_steps)) if self.kind == "wsd" else 0
        if self.warmup_steps + decay > num_steps:
            falling = f" and {decay} of decay" if decay else ""
            raise ConfigError(
                f"{self.warmup_steps} steps of warm-up{falling} do not fit in {num_steps}. Lower them, or train longer"
            )

    def factor(self, step: int, num_steps: int) -> float:
        """Factor of step `step`, counted from 0, of `num_steps`."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        return self._after_warmup(step, self.warmup_steps, num_steps)

    def factor_by_samples(self, step: int, samples: int, warmup_samples: int, num_samples: int) -> float:
        """The same curve for a length in samples: `samples` seen so far, `warmup_samples` of them during warm-up."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        return self._after_warmup(samples, warmup_samples, num_samples)

    def _after_warmup(self, done: int, warmup: int, total: int) -> float:
        """All three in steps, or all three in samples."""
        if self.kind == "constant":
            return 1.0
        start = total - self._decay_length(total) if self.kind == "wsd" else warmup
        progress = min(1.0, max(0.0, (done - start) / max(1, total - start)))
        decayed = (1.0 - math.cos(math.pi * progress)) / 2.0 if self.kind == "cosine" else progress
        return 1.0 - decayed * (1.0 - self.final_factor)

    def _decay_length(self, total: int) -> float:
        return self.decay_steps if self.decay_steps is not None else max(1, total / 10)
