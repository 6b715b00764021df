"""Comparing a new version with the running one while users move from one to the other.

Requests of one user are alike, and load changes by the hour; both defeat tests that take requests for independent. This
test counts users, at their first bad outcome. Versions are assigned by a hash, so if the new version is no worse, the
next user with a bad outcome has the new version with the probability of its share, whatever the load and whoever sends
many requests. When a larger share may have moved a user whose version was known, the user counts again, with the
probability of having been moved.

A latency is bad above a threshold: the quantile of the running version's recent latencies. Latencies of the new version
are divided by the ratio that is allowed. Any threshold gives a valid test; this one follows the load.
"""

import hashlib
from collections import deque
from typing import Any

from saccade.fleet.evidence import SequentialTest
from saccade.fleet.objectives import Objective

_WINDOW = 500
"""Latencies of the running version that are remembered."""
_MIN_WINDOW = 50
"""Fewest latencies that give a threshold."""
_MAX_USERS = 100_000
"""Users that are remembered; bad outcomes of further ones do not count."""


def position(user: str, salt: str) -> float:
    """Position of a user in [0, 1), the same on every machine. With another salt, users have unrelated positions."""
    digest = hashlib.blake2b(f"{len(salt)}:{salt}{user}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / 2**53


class Comparison:
    """Evidence that outcomes of the new version are worse than allowed, relative to the running one."""

    def __init__(self, objective: Objective) -> None:
        self.objective = objective
        self.recent: deque[float] = deque(maxlen=_WINDOW)
        self.threshold_s: float | None = None
        self.known: dict[float, float] = {}
        """{position of a user with a bad outcome: the share up to which the user's version is known}."""
        self.begin_step()

    def begin_step(self) -> None:
        """Start a new test. Users whose version is known remain known."""
        self.test = SequentialTest()
        self.num_users = {"new": 0, "running": 0}

    def observe_running(self, latency_s: float) -> None:
        """Remember a latency of the running version, for the threshold."""
        self.recent.append(latency_s)

    def update_threshold(self) -> None:
        """Take the quantile of the latencies that are remembered."""
        if self.objective.quantile is not None and len(self.recent) >= _MIN_WINDOW:
            self.threshold_s = sorted(self.recent)[int(self.objective.quantile * len(self.recent))]

    def add(self, value: float, user: float, share: float) -> None:
        """Count an outcome of the user at a position, while the new version has a share below 1."""
        is_new = user < share
        known = self.known.get(user, 0.0)
        if known >= share or not self._is_bad(value, is_new) or (not known and len(self.known) >= _MAX_USERS):
            return
        self.known[user] = 1.0 if is_new else share
        self.num_users["new" if is_new else "running"] += 1
        odds = (share - known) / (1 - share) * self._allowed_odds
        self.test.add(happened=is_new, allowed=odds / (1 + odds))

    @property
    def _allowed_odds(self) -> float:
        """How many times more often the new version may have bad outcomes."""
        return 1.0 if self.objective.is_latency else self.objective.max_ratio or 1.0

    def _is_bad(self, value: float, is_new: bool) -> bool:
        if not self.objective.is_latency:
            return value > 0
        scaled = value / (self.objective.max_ratio or 1.0) if is_new else value
        return self.threshold_s is not None and scaled > self.threshold_s

    def state(self) -> dict[str, Any]:
        """All state, as plain data."""
        return {
            "recent": list(self.recent),
            "known": list(self.known.items()),
            "log_ratios": self.test.log_ratios,
            "num_users": self.num_users,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from `state()`."""
        self.recent.extend(state["recent"])
        self.known = dict(state["known"])
        self.test = SequentialTest(list(state["log_ratios"]))
        self.num_users = dict(state["num_users"])
        self.update_threshold()
