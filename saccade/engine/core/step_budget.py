"""Prompt-token budget of the next step for a target step time. Plain Python, no clock.

The target bounds the gap between two output tokens while prompts are computed beside them. A step without prompts may take longer
than it, on a CPU say; then the target is a few times that step, so that prompts are never starved.

Step time is modelled as `fixed + slope * tokens`, over prompt and decode tokens together. The two numbers are fitted by least squares
with exponentially decaying weights. Under steady load every step has about the same number of tokens, which says little about the
slope; then the old slope is kept and only the offset is updated, so that an error in the slope still converges to the target time.

A step is shared by prompts and the vision encoder, which runs before it: `share`.

Outliers (a first compilation, a large image) are clipped to a few times the usual deviation. A lasting change raises the usual
deviation and is followed within a few steps.
"""

from __future__ import annotations

from typing import NamedTuple

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
_BACKLOG_STEPS, _BACKLOG_LEFT_STEPS, _RAISE = 3.3, 1.9, 2.2
"""Work that waits, in times of a step, that makes a backlog, and below which it has ended; how many times as long a step takes meanwhile."""
_BACKLOG_REQUESTS = 3
"""Requests that make a backlog at least: a large one alone delays no other's first token."""
_MIN_SLOWDOWN = 3.0
"""The target is at least this many times a step without prompts."""
_PART_SLACK_MS = 0.3
"""By how much a part of the encoder may exceed the time that is left for it."""


class StepShare(NamedTuple):
    """What a step may compute."""

    num_tokens: int
    """Of prompts."""
    encoder_parts: int


class StepBudget:
    """Fits step times and returns the prompt-token budget of the next step. Without a target there is no limit."""

    def __init__(self, target_ms: float | None, max_tokens: int) -> None:
        self._target_ms = target_ms
        self._decode_ms = 0.0
        self._max_tokens = max_tokens
        self._most_tokens = min(_INITIAL_TOKENS, max_tokens)
        self._num_decode_tokens = 0
        self._num_steps = 0
        self._mean_tokens = self._mean_ms = self._variance = self._covariance = 0.0
        self._slope: float | None = None
        self._deviation = 0.0
        self.has_backlog = False
        """Whether so much waits that throughput counts as well as the gap between tokens."""

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

    @property
    def step_ms(self) -> float | None:
        """Time that the next step may take, with what the encoder does before it. A backlog raises it: what a step costs beside its prompts
        is then shared by more of them."""
        target_ms = self.target_ms
        return target_ms if target_ms is None or not self.has_backlog else _RAISE * target_ms

    def observe_queue(self, num_requests: int, num_tokens: int, encode_ms: float) -> None:
        """So many requests wait for their first token: with so many prompt tokens, and images that take the encoder so long."""
        target_ms, slope = self.target_ms or 0.0, self._slope or 0.0
        most = (_BACKLOG_LEFT_STEPS if self.has_backlog else _BACKLOG_STEPS) * target_ms
        self.has_backlog = num_requests >= _BACKLOG_REQUESTS and slope * num_tokens + encode_ms > most

    def share(self, num_ready_tokens: int, *, part_ms: float, parts_left: int) -> StepShare | None:
        """Divide the next step between prompts and the encoder. None: there is no target.

        Prompts come first as far as they are ready, `num_ready_tokens`; what they leave is the encoder's: up to `parts_left` parts of a pass
        that take `part_ms` each, at least one if no prompt is ready.
        """
        if self.step_ms is None:
            return None
        slope = self._slope or 0.0
        for_prompts_ms = min(num_ready_tokens * slope, self.step_ms - self._decode_ms)
        for_encoder_ms = self.step_ms - self._decode_ms - for_prompts_ms + _PART_SLACK_MS
        num_parts = parts_left if part_ms <= 0 else min(parts_left, max(0, int(for_encoder_ms / part_ms)))
        if num_parts == 0 and num_ready_tokens == 0:
            num_parts = min(1, parts_left)
        return StepShare(self._num_tokens(self.step_ms - num_parts * part_ms), num_parts)

    def _num_tokens(self, step_ms: float) -> int:
        """Prompt tokens of a step that takes so long."""
        if self._slope is None:
            return self._most_tokens
        tokens = self._mean_tokens + (step_ms - self._mean_ms) / max(self._slope, 1e-9) - self._num_decode_tokens
        return int(min(max(tokens, MIN_TOKENS), self._most_tokens))

    def expected_ms(self, num_tokens: int) -> float:
        """How long a step of so many tokens takes. 0 before the first."""
        return 0.0 if self._slope is None else max(0.0, self._mean_ms + self._slope * (num_tokens - self._mean_tokens))

    def token_cost(self, num_tokens: int) -> float:
        """What one more token costs beside `num_tokens`, as a fraction of what each of them costs: near 0 where a step takes as long for one
        token as for two, 1 where it takes twice as long. 0 before the first step."""
        if self._slope is None or num_tokens == 0:
            return 0.0
        return min(1.0, self._slope * num_tokens / max(self.expected_ms(num_tokens), 1e-9))

    def observe(self, step_ms: float, num_prompt_tokens: int, num_decode_tokens: int) -> None:
        """Update with the time of a step, without the parts of the encoder that ran before it."""
        num_tokens, has_prompts = num_prompt_tokens + num_decode_tokens, num_prompt_tokens > 0
        self._num_decode_tokens = num_decode_tokens
        if not has_prompts:
            self._decode_ms += (step_ms - self._decode_ms) * (_WEIGHT if self._decode_ms else 1.0)
        target_ms = self.target_ms or _MIN_SLOWDOWN * self._decode_ms or step_ms
        self._fit(num_tokens, self._clip(step_ms, num_tokens, has_prompts, target_ms))
        if 2 * num_prompt_tokens >= self._most_tokens:  # they were used: at most double them
            self._most_tokens = min(2 * self._most_tokens, self._max_tokens)

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
