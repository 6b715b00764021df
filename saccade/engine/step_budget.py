"""Prompt-token budget of the next step for a target step time. Plain Python, no clock.

The target bounds the gap between two output tokens while prompts are computed beside them. A step without prompts may take longer
than it, on a CPU say; then the target is a few times that step, so that prompts are never starved.

Step time is modelled as `fixed + slope * tokens`, over prompt and decode tokens together. The two numbers are fitted by least squares
with exponentially decaying weights. Under steady load every step has about the same number of tokens, which says little about the
slope; then the old slope is kept and only the offset is updated, so that an error in the slope still converges to the target time.

Outliers (a first compilation, a large image) are clipped to a few times the usual deviation. A lasting change raises the usual
deviation and is followed within a few steps.
"""

from __future__ import annotations

MIN_TOKENS = 16
"""Prompt tokens every step may compute, however slow it is: prompts always make progress."""
_INITIAL_TOKENS = 256
"""Prompt tokens of the first step."""
_WEIGHT = 1 / 16
"""Weight of the newest step."""
_OUTLIER = 4.0
"""Usual deviations beyond which a step is clipped."""
_MIN_DEVIATION = 0.05
"""Fraction of the target time that is never an outlier."""
_SPREAD = 0.1
"""Spread of token counts, as a fraction of their mean, at which the newest steps and the old slope have equal weight."""
_MIN_SLOPE = 0.02
"""Minimum fraction of a step's time attributed to its tokens, so that noise cannot make the slope zero or negative."""


_BACKLOG_STEPS = 6
"""Steps worth of prompts beyond which a backlog raises the target."""
_MAX_RAISE = 2.5
_DEEP_BACKLOG_STEPS, _DEEP_RAISE = 32, 6.0
"""With so many steps worth of prompts waiting, 0.4 s of them, throughput counts more than the gap between tokens."""
_MIN_SLOWDOWN = 3.0
"""The target is at least this many times a step without prompts."""


class StepBudget:
    """Fits step times and returns the prompt-token budget of the next step. Without a target there is no limit."""

    def __init__(self, target_ms: float | None, max_tokens: int) -> None:
        self._target_ms = target_ms
        self._decode_ms = 0.0
        self._max_tokens = max_tokens
        self._budget = self._most_tokens = min(_INITIAL_TOKENS, max_tokens)
        self._num_decode_tokens = 0
        self._num_steps = 0
        self._mean_tokens = self._mean_ms = self._variance = self._covariance = 0.0
        self._slope: float | None = None
        self._deviation = 0.0

    @property
    def decode_ms(self) -> float:
        """Time of a step without prompts, averaged over the latest. 0 before the first."""
        return self._decode_ms

    @property
    def target_ms(self) -> float | None:
        """Time of a step with prompts that is aimed at, without a backlog. None: any."""
        if self._target_ms is None:
            return None
        return max(self._target_ms, _MIN_SLOWDOWN * self._decode_ms)

    def num_tokens(self, num_waiting: int = 0) -> int | None:
        """Prompt tokens the next step may compute, with `num_waiting` to be computed in all. A backlog raises the target: what a step
        costs beside its prompts is then shared by more of them."""
        if self._target_ms is None:
            return None
        raised = min(_MAX_RAISE, num_waiting / (_BACKLOG_STEPS * self._budget))
        if num_waiting > _DEEP_BACKLOG_STEPS * self._budget:
            raised = _DEEP_RAISE
        return self._budget if raised <= 1 else int(min(raised * self._budget, self._max_tokens))

    def token_cost(self, num_tokens: int) -> float:
        """What one more token costs beside `num_tokens`, as a fraction of what each of them costs: near 0 where a step takes as long for one
        token as for two, 1 where it takes twice as long. 0 before the first step."""
        if self._slope is None or num_tokens == 0:
            return 0.0
        step_ms = self._mean_ms + self._slope * (num_tokens - self._mean_tokens)
        return min(1.0, self._slope * num_tokens / max(step_ms, 1e-9))

    def observe(self, step_ms: float, num_prompt_tokens: int, num_decode_tokens: int) -> None:
        """Update with the time of a step. Leave out steps that did more than compute tokens: encode images, capture a CUDA graph."""
        num_tokens, has_prompts = num_prompt_tokens + num_decode_tokens, num_prompt_tokens > 0
        self._num_decode_tokens = num_decode_tokens
        if not has_prompts:
            self._decode_ms += (step_ms - self._decode_ms) * (_WEIGHT if self._decode_ms else 1.0)
        target_ms = self.target_ms or _MIN_SLOWDOWN * self._decode_ms or step_ms
        self._fit(num_tokens, self._clip(step_ms, num_tokens, has_prompts, target_ms))
        if 2 * num_prompt_tokens >= self._budget:  # the budget was used: at most double it
            self._most_tokens = min(2 * self._budget, self._max_tokens)
        self._budget = self._budget_for(target_ms)

    def _clip(self, step_ms: float, num_tokens: int, has_prompts: bool, target_ms: float) -> float:
        """The step time, clipped if it is an outlier."""
        if self._slope is None:
            return min(step_ms, _OUTLIER * target_ms)
        usual = max(self._deviation, _MIN_DEVIATION * target_ms)
        expected = self._mean_ms + self._slope * (num_tokens - self._mean_tokens)
        deviation = min(max(step_ms - expected, -_OUTLIER * usual), _OUTLIER * usual)
        if has_prompts:  # decode-only steps are close to the line; many of them would make every other step an outlier
            self._deviation = usual + 2 * _WEIGHT * (abs(deviation) - usual)
        return expected + deviation

    def _fit(self, num_tokens: int, step_ms: float) -> None:
        """Update means, variance and covariance, and the slope."""
        self._num_steps += 1
        weight = max(_WEIGHT, 1 / self._num_steps)
        off_tokens, off_ms = num_tokens - self._mean_tokens, step_ms - self._mean_ms
        self._mean_tokens += weight * off_tokens
        self._mean_ms += weight * off_ms
        self._variance = (1 - weight) * (self._variance + weight * off_tokens * off_tokens)
        self._covariance = (1 - weight) * (self._covariance + weight * off_tokens * off_ms)
        largest = self._mean_ms / max(self._mean_tokens, 1.0)  # the slope without a fixed part
        before = largest if self._slope is None else self._slope
        trust = (_SPREAD * self._mean_tokens) ** 2 + 1e-9
        slope = (self._covariance + trust * before) / (self._variance + trust)
        self._slope = min(max(slope, _MIN_SLOPE * largest), largest)

    def _budget_for(self, target_ms: float) -> int:
        """Prompt tokens that reach the target time."""
        assert self._slope is not None, "a step was observed"
        tokens = self._mean_tokens + (target_ms - self._mean_ms) / max(self._slope, 1e-9) - self._num_decode_tokens
        return int(min(max(tokens, MIN_TOKENS), self._most_tokens))
