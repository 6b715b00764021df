"""Prompt-token budget of the next step for a target step time. Plain Python, no clock.

The target bounds the inter-token latency while prompts are computed in the same steps. If a step without prompts takes
longer than the target, as on a CPU, the target becomes a few times that step, so that prompts never starve.

Step time is modelled as `fixed + slope * tokens`, over prompt and decode tokens together. The two numbers are fitted
by least squares with exponentially decaying weights. Under steady load all steps have about equally many tokens, which
says little about the slope. Then the old slope is kept and only the offset is updated, so that step times converge to
the target even if the slope is wrong.

The vision encoder runs its parts before the chunks of a step; `share` divides the step's time between the two.

Outliers (a first compilation, a slow host) are clipped to a few times the usual deviation. A lasting change raises the
usual deviation and is followed within a few steps.
"""

from __future__ import annotations

from typing import NamedTuple

from saccade.engine.core.step import STEP_TOKENS

MIN_TOKENS = 16
"""Minimum prompt-token budget of a step, so that prompts always make progress."""
_INITIAL_TOKENS = 256
"""Prompt-token budget of the first step."""
_WEIGHT = 1 / 16
"""Weight of the newest step in the averages."""
_OUTLIER = 4.0
"""A step time is clipped at this many usual deviations."""
_MIN_DEVIATION = 0.05
"""Minimum usual deviation, as a fraction of the target time."""
_SPREAD = 0.1
"""Spread of token counts, as a fraction of their mean, at which new steps and the old slope have equal weight."""
_MIN_SLOPE = 0.02
"""Minimum fraction of a step's time attributed to its tokens, so that noise cannot make the slope zero or negative."""
_BACKLOG_STEPS, _BACKLOG_LEFT_STEPS, _RAISE = 3.3, 1.9, 2.2
"""Pending work at which a backlog begins and below which it ends, in target times, and the factor by which a backlog
raises the time of a step."""
_BACKLOG_REQUESTS = 3
"""Minimum number of waiting requests in a backlog: a large request alone delays the first token of no other."""
_MIN_SLOWDOWN = 3.0
"""Minimum target time, as a multiple of a step without prompts."""
_PART_SLACK_MS = 0.3
"""How much longer than the remaining time a part of the encoder may take."""


class StepShare(NamedTuple):
    """Work that a step may do."""

    num_tokens: int
    """Prompt tokens."""
    encoder_parts: int
    """Parts of the encoder pass."""


class StepBudget:
    """Fits step times and computes the prompt-token budget of the next step. Without a target there is no limit."""

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
        """Whether so much work is pending that steps take longer than the target, for throughput."""

    @property
    def decode_ms(self) -> float:
        """Moving average of the time of steps without prompts. 0 before the first."""
        return self._decode_ms

    @property
    def token_ms(self) -> float:
        """Time by which another token makes a step longer. 0 before the first step."""
        return self._slope or 0.0

    @property
    def target_ms(self) -> float | None:
        """Target time of a step with prompts while there is no backlog. None: no target."""
        if self._target_ms is None:
            return None
        return max(self._target_ms, _MIN_SLOWDOWN * self._decode_ms)

    @property
    def step_ms(self) -> float | None:
        """Time that the next step may take, including its encoder parts. None: no limit.

        A backlog raises it, so that the fixed cost of a step is shared by more prompt tokens.
        """
        target_ms = self.target_ms
        return target_ms if target_ms is None or not self.has_backlog else _RAISE * target_ms

    def observe_queue(self, num_requests: int, num_tokens: int, encode_ms: float) -> None:
        """Update `has_backlog`, given the requests that do not decode yet, their prompt tokens and encoder time."""
        target_ms, slope = self.target_ms or 0.0, self._slope or 0.0
        most = (_BACKLOG_LEFT_STEPS if self.has_backlog else _BACKLOG_STEPS) * target_ms
        self.has_backlog = num_requests >= _BACKLOG_REQUESTS and slope * num_tokens + encode_ms > most

    def share(self, num_ready_tokens: int, *, part_ms: float, parts_left: int) -> StepShare | None:
        """Divide the next step between prompts and the encoder. None: there is no target.

        Prompts come first, up to `num_ready_tokens`. The encoder gets the remaining time: up to `parts_left` parts of a
        pass, which take `part_ms` each, and at least one if no prompt token is ready.
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
        """Prompt tokens of a step that takes `step_ms`."""
        if self._slope is None:
            return self._most_tokens
        tokens = self._mean_tokens + (step_ms - self._mean_ms) / max(self._slope, 1e-9) - self._num_decode_tokens
        return int(min(max(tokens, MIN_TOKENS), self._most_tokens))

    def expected_ms(self, num_tokens: int) -> float:
        """Expected time of a step of `num_tokens` tokens. 0 before the first step."""
        return 0.0 if self._slope is None else max(0.0, self._mean_ms + self._slope * (num_tokens - self._mean_tokens))

    def token_cost(self, num_tokens: int) -> float:
        """Cost of one more token in a step of `num_tokens`, as a fraction of the average cost of a token.

        Near 0 if a step with twice the tokens takes as long, 1 if it takes twice as long. 0 before the first step.
        """
        if self._slope is None or num_tokens == 0:
            return 0.0
        return min(1.0, self._slope * num_tokens / max(self.expected_ms(num_tokens), 1e-9))

    def observe(self, step_ms: float, num_prompt_tokens: int, num_decode_tokens: int) -> None:
        """Update the fit with the time of a step, measured without its encoder parts."""
        num_tokens, has_prompts = num_prompt_tokens + num_decode_tokens, num_prompt_tokens > 0
        self._num_decode_tokens = num_decode_tokens
        if not has_prompts:
            self._decode_ms += (step_ms - self._decode_ms) * (_WEIGHT if self._decode_ms else 1.0)
        target_ms = self.target_ms or _MIN_SLOWDOWN * self._decode_ms or step_ms
        self._fit(num_tokens, self._clip(step_ms, num_tokens, has_prompts, target_ms))
        if 2 * num_prompt_tokens >= self._most_tokens:  # the step used its budget, which may double now
            self._most_tokens = min(2 * self._most_tokens, self._max_tokens)

    def _clip(self, step_ms: float, num_tokens: int, has_prompts: bool, target_ms: float) -> float:
        """Clip the step time if it is an outlier."""
        if self._slope is None:
            return min(step_ms, _OUTLIER * target_ms)
        usual = max(self._deviation, _MIN_DEVIATION * target_ms)
        expected = self._mean_ms + self._slope * (num_tokens - self._mean_tokens)
        deviation = min(max(step_ms - expected, -_OUTLIER * usual), _OUTLIER * usual)
        if has_prompts:  # steps without prompts deviate little; many of them would make every other step an outlier
            self._deviation = usual + 2 * _WEIGHT * (abs(deviation) - usual)
        return expected + deviation

    def _fit(self, num_tokens: int, step_ms: float) -> None:
        """Update the means, variance and covariance, and from them the slope."""
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


def prefill_with_decode(budget: int, num_decode: int) -> int:
    """The most prefill tokens, up to `budget`, that fill a captured step together with `num_decode` decode tokens."""
    fitting = [tokens - num_decode for tokens in STEP_TOKENS if 0 < tokens - num_decode <= budget]
    return fitting[-1] if fitting else budget
