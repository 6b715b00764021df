"""Sequential tests: evidence that may be looked at every second without raising more false alarms.

A fixed test that is repeated until it is significant alarms sooner or later. The e-value of a `SequentialTest` is at
most 1 on average while nothing is wrong, at any time one chooses to look; so the probability that it ever reaches
1 / alpha is at most alpha (Ville's inequality).
"""

import math

ODDS = (1.5, 2.0, 3.0, 5.0, 10.0, 30.0, 100.0, 1000.0)
"""Alternatives that are tested, with equal weight: the odds of the event are so many times those allowed."""


class SequentialTest:
    """Evidence that an event is more frequent than allowed."""

    def __init__(self, log_ratios: list[float] | None = None) -> None:
        self.log_ratios = log_ratios or [0.0] * len(ODDS)
        """Log likelihood ratio of each alternative. They are all of the test's state."""

    def add(self, *, happened: bool, allowed: float) -> None:
        """Count one trial, in which the event may happen with probability `allowed`, given all trials before."""
        if happened and allowed == 0:
            self.log_ratios = [math.inf] * len(ODDS)
        for number, odds in enumerate(ODDS):
            self.log_ratios[number] += (math.log(odds) if happened else 0.0) - math.log1p(allowed * (odds - 1))

    @property
    def log_e_value(self) -> float:
        """Logarithm of the e-value: the mean of the likelihood ratios."""
        largest = max(self.log_ratios)
        if math.isinf(largest):
            return largest
        return largest + math.log(sum(math.exp(one - largest) for one in self.log_ratios) / len(ODDS))

    def is_alarm(self, alpha: float) -> bool:
        """Whether the evidence suffices; false alarms have probability `alpha`, however often one looks."""
        return self.log_e_value >= -math.log(alpha)
