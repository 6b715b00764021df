"""Detection of bad steps (NaN, spikes) and the reaction to them. Pure decisions over numbers.

    accept     run the optimizer
    skip       drop the gradients, log the samples, continue with the next batch
    roll back  too many consecutive skips: load weights and optimizer of an earlier state, continue with the next batch
    give up    too many rollbacks

Every rank gets the same numbers (they are summed over the ranks), so every rank makes the same decision.
"""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from saccade.train.run_config import GuardConfig


class Action(Enum):
    """The training loop's decision about a step."""

    ACCEPT = "accept"
    SKIP = "skip"
    ROLL_BACK = "roll back"
    GIVE_UP = "give up"


@dataclass(frozen=True)
class Decision:
    """An action and its reason."""

    action: Action
    reason: str | None = None
    """Fault of the step; None if it is good."""


class Guard:
    """Checks one step after another."""

    def __init__(self, config: GuardConfig) -> None:
        self._config = config
        self._losses: deque[float] = deque(maxlen=config.window)
        self._num_skips = 0
        self._num_rollbacks = 0

    def check(self, loss: float, grad_norm: float) -> Decision:
        """Decide what to do with a step, from its loss and gradient norm."""
        reason = self._fault(loss, grad_norm)
        if reason is None:
            self._losses.append(loss)
            self._num_skips = 0
            return Decision(Action.ACCEPT)
        self._num_skips += 1
        if self._num_skips < self._config.max_skips:
            return Decision(Action.SKIP, reason)
        self._num_skips = 0
        if self._num_rollbacks == self._config.max_rollbacks:
            return Decision(Action.GIVE_UP, reason)
        self._num_rollbacks += 1
        return Decision(Action.ROLL_BACK, reason)

    def _fault(self, loss: float, grad_norm: float) -> str | None:
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        if not math.isfinite(grad_norm):
            return f"the gradient norm is {grad_norm}"
        if grad_norm > self._config.max_grad_norm:
            return f"the gradient norm {grad_norm:.4g} is above max_grad_norm {self._config.max_grad_norm:.4g}"
        if loss > self.limit:
            return f"the loss {loss:.4g} is a spike: above {self.limit:.4g}, after a mean of {self._mean:.4g}"
        return None

    @property
    def is_in_streak(self) -> bool:
        """Whether the last step was skipped."""
        return self._num_skips > 0

    @property
    def limit(self) -> float:
        """The loss above which a step is a spike; infinite until there is enough history."""
        if len(self._losses) < min(self._config.min_history, self._config.window):
            return math.inf
        mean = self._mean
        spread = math.sqrt(sum((loss - mean) ** 2 for loss in self._losses) / len(self._losses))
        by_spread = max(mean + self._config.spike_sigmas * spread, mean * self._config.spike_floor)
        by_factor = mean * self._config.spike_factor
        # inf * 0 is NaN: with a disabled threshold, a window without spread or with zero loss sets no limit.
        return min(inf_if_nan(by_spread), inf_if_nan(by_factor))

    @property
    def _mean(self) -> float:
        return sum(self._losses) / len(self._losses)

    def state_dict(self) -> dict[str, Any]:
        """The state as JSON."""
        return {"losses": list(self._losses), "num_skips": self._num_skips, "num_rollbacks": self._num_rollbacks}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state."""
        self._losses = deque(state["losses"], maxlen=self._config.window)
        self._num_skips, self._num_rollbacks = state["num_skips"], state["num_rollbacks"]


def inf_if_nan(value: float) -> float:
    """The value, or infinity if it is NaN."""
    return math.inf if math.isnan(value) else value
