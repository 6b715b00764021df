"""How much of waiting prompts a step may compute so that it takes about as long as wished. Plain Python, no clock.

A step is taken to last `fixed + slope * tokens`, where tokens are those of prompts and answers together. The two numbers are
fitted to the steps seen by least squares in which a step's weight fades as newer ones come. Around a steady load every step has
about the same number of tokens, which says little about the slope; then the old slope is kept and only the height of the line
follows the steps, so that an error in the slope still ends at the wished time.

One odd step (a first compilation, a large image) must not move the line much: what lies further from it than a few times the
usual distance counts as if it lay there. A lasting change raises the usual distance and gets through within a few steps.
"""

from __future__ import annotations

MIN_TOKENS = 16
"""Prompt tokens every step may compute, however slow it is: prompts always progress."""
_FIRST_TOKENS = 256
"""Prompt tokens of the first step, when nothing is known."""
_WEIGHT = 1 / 16
"""Of the newest step."""
_ODD = 4.0
"""Usual distances from the line, beyond which a step is odd."""
_LEAST_DISTANCE = 0.05
"""Share of the wished time that is never odd."""
_SPREAD = 0.1
"""Spread of tokens, as a share of their mean, at which the newest steps and the old slope count alike."""
_LEAST_SLOPE = 0.02
"""Share of a step's time that its tokens are answerable for at least, so that noise makes no slope of zero or less."""


class Pace:
    """Learns from steps and says how many prompt tokens the next may have. No target: no bound."""

    def __init__(self, target_ms: float | None, max_tokens: int) -> None:
        self._target_ms = target_ms
        self._max_tokens = max_tokens
        self._budget = self._most_tokens = min(_FIRST_TOKENS, max_tokens)
        self._num_answers = 0
        self._num_steps = 0
        self._mean_tokens = self._mean_ms = self._variance = self._covariance = 0.0
        self._slope: float | None = None
        self._distance = 0.0

    def budget(self) -> int | None:
        """Prompt tokens the next step may compute."""
        return None if self._target_ms is None else self._budget

    def observe(self, step_ms: float, num_prompt_tokens: int, num_answer_tokens: int) -> None:
        """A step took this long. Leave out steps that did more than compute tokens: encode images, record a graph."""
        if self._target_ms is None:
            return
        num_tokens, has_prompts = num_prompt_tokens + num_answer_tokens, num_prompt_tokens > 0
        self._num_answers = num_answer_tokens
        self._fit(num_tokens, self._believable(step_ms, num_tokens, has_prompts, self._target_ms))
        if 2 * num_prompt_tokens >= self._budget:  # so many have been tried: no more than twice as many next
            self._most_tokens = min(2 * self._budget, self._max_tokens)
        self._budget = self._fitting(self._target_ms)

    def _believable(self, step_ms: float, num_tokens: int, has_prompts: bool, target_ms: float) -> float:
        """The time of the step, or of the nearest one that is not odd."""
        if self._slope is None:
            return min(step_ms, _ODD * target_ms)
        usual = max(self._distance, _LEAST_DISTANCE * target_ms)
        expected = self._mean_ms + self._slope * (num_tokens - self._mean_tokens)
        distance = min(max(step_ms - expected, -_ODD * usual), _ODD * usual)
        if has_prompts:  # steps of answers alone lie close to the line; many of them would make every other step odd
            self._distance = usual + 2 * _WEIGHT * (abs(distance) - usual)
        return expected + distance

    def _fit(self, num_tokens: int, step_ms: float) -> None:
        """Move means, variance and covariance a little towards the new step, and the line with them."""
        self._num_steps += 1
        weight = max(_WEIGHT, 1 / self._num_steps)
        off_tokens, off_ms = num_tokens - self._mean_tokens, step_ms - self._mean_ms
        self._mean_tokens += weight * off_tokens
        self._mean_ms += weight * off_ms
        self._variance = (1 - weight) * (self._variance + weight * off_tokens * off_tokens)
        self._covariance = (1 - weight) * (self._covariance + weight * off_tokens * off_ms)
        whole = self._mean_ms / max(self._mean_tokens, 1.0)  # the slope if nothing were fixed
        before = whole if self._slope is None else self._slope
        trust = (_SPREAD * self._mean_tokens) ** 2 + 1e-9
        slope = (self._covariance + trust * before) / (self._variance + trust)
        self._slope = min(max(slope, _LEAST_SLOPE * whole), whole)

    def _fitting(self, target_ms: float) -> int:
        """Prompt tokens that reach the wished time."""
        assert self._slope is not None, "a step was seen"
        tokens = self._mean_tokens + (target_ms - self._mean_ms) / max(self._slope, 1e-9) - self._num_answers
        return int(min(max(tokens, MIN_TOKENS), self._most_tokens))
