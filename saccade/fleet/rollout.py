"""A rollout: a new version gets more users step by step, and none any more as soon as it breaks an objective.

    WARMING -> PROBING -> RAMPING: 1, 10, 30, 50, 95 % -> DONE: 100 %
        any of them, on failure or a broken objective  -> ROLLED_BACK

    rollout = Rollout("assistant/june", running="may", new="june", objectives=..., policy=RolloutPolicy(), ...)
    rollout.version_of(user)              # for every request
    rollout.observe(outcome)              # when a request has ended
    decision = rollout.decide(now)        # every second; what changed and why, or None

A user has a fixed position in [0, 1), hashed with the name of the rollout, and gets the new version while the position
is below the share: a larger share adds users and moves none back. Each step of the ramp tests each objective again:
against its maximum, and against the running version (`comparison.py`). `false_rollbacks` is divided equally among these
tests, which may be looked at any time (`evidence.py`). Time is a number that the caller passes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from saccade.errors import ConfigError
from saccade.fleet.comparison import Comparison, position
from saccade.fleet.evidence import SequentialTest
from saccade.fleet.objectives import Objective, Outcome, check_measurable


class State(StrEnum):
    """Phase of a rollout."""

    WARMING = "warming"
    PROBING = "probing"
    RAMPING = "ramping"
    DONE = "done"
    ROLLED_BACK = "rolled back"


@dataclass(frozen=True, kw_only=True)
class RolloutPolicy:
    """How a new version replaces the running one."""

    ramp: tuple[float, ...] = (1.0, 10.0, 30.0, 50.0, 100.0)
    """Percent of users at each step."""
    holdout: float = 5.0
    """Percent of users who keep the running version until the last step has ended, for the comparison."""
    hold_s: float = 300.0
    """Seconds that a step lasts at least."""
    min_requests: int = 200
    """Requests of the new version that a step has at least."""
    settle_s: float = 30.0
    """Seconds at the beginning of a step in which latencies do not count: caches are cold for the users that moved."""
    warm_up_timeout_s: float = 1800.0
    """Seconds until replicas of the new version must be ready."""
    probe_timeout_s: float = 300.0
    """Seconds until the probes must be answered."""
    false_rollbacks: float = 0.005
    """Maximum probability that a version that keeps its objectives is rolled back by chance."""

    def __post_init__(self) -> None:
        if not self.ramp or list(self.ramp) != sorted({percent for percent in self.ramp if 0 < percent <= 100}):
            raise ConfigError(f"ramp is {list(self.ramp)}. Use rising percents above 0, up to 100")
        if not 0 <= self.holdout < 100:
            raise ConfigError(f"holdout is {self.holdout:g}. Use percent from 0 up to 100")
        for name in ("hold_s", "min_requests", "settle_s", "warm_up_timeout_s", "probe_timeout_s"):
            if not 0 <= (value := getattr(self, name)) < math.inf:
                raise ConfigError(f"{name} is {value:g}. Use a number from 0")
        if not 0 < self.false_rollbacks < 1:
            raise ConfigError(f"false_rollbacks is {self.false_rollbacks:g}. Use a probability, such as 0.005")

    def shares(self, target: float) -> tuple[float, ...]:
        """Share of users at each step on the way to a target."""
        last = min(target, 1 - self.holdout / 100)
        return (*(percent / 100 for percent in self.ramp if percent / 100 < last), last)


@dataclass(frozen=True, kw_only=True)
class Decision:
    """A change of state, and why."""

    time_s: float
    """Time of the decision."""
    state: State
    """State from now on."""
    share: float
    """Share of users with the new version from now on."""
    reason: str
    """Reason in words."""
    evidence: tuple[dict[str, Any], ...]
    """Counts and e-values of every objective in the step that ends, as plain data."""


class _Trial:
    """Evidence about one objective in the present step."""

    def __init__(self, objective: Objective) -> None:
        self.objective = objective
        self.comparison = Comparison(objective)
        self.begin_step()

    def begin_step(self) -> None:
        """Forget the evidence of the previous step."""
        self.maximum = SequentialTest()
        self.counts = {"new": {"requests": 0, "exceeding": 0}, "running": {"requests": 0, "exceeding": 0}}
        self.comparison.begin_step()

    def add(self, value: float, *, is_new: bool) -> None:
        """Count a value of a request or a probe, and test the new version's against the maximum."""
        exceeds = self.objective.exceeds_maximum(value)
        count = self.counts["new" if is_new else "running"]
        count["requests"] += 1
        count["exceeding"] += exceeds
        if is_new and (allowed := self.objective.allowed_share) is not None:
            self.maximum.add(happened=exceeds, allowed=allowed)

    def is_broken(self, share: float, alpha: float) -> bool:
        """Whether every test of the objective alarms. Without users of the running version, the maximum decides."""
        tests = [self.maximum] if self.objective.allowed_share is not None else []
        if self.objective.max_ratio is not None and share < 1:
            tests.append(self.comparison.test)
        return bool(tests) and all(test.is_alarm(alpha) for test in tests)

    def evidence(self, alpha: float) -> dict[str, Any]:
        """Counts and e-values, as plain data for the log."""
        found: dict[str, Any] = {"objective": self.objective.name, "log_e_needed": -math.log(alpha), **self.counts}
        if self.objective.allowed_share is not None:
            found["log_e_maximum"] = self.maximum.log_e_value
        if self.objective.max_ratio is not None:
            found["log_e_running"] = self.comparison.test.log_e_value
            found["users_with_bad_outcomes"] = dict(self.comparison.num_users)
            found["threshold_s"] = self.comparison.threshold_s
        return found

    def state(self) -> dict[str, Any]:
        """All state, as plain data."""
        return {"log_ratios": self.maximum.log_ratios, "counts": self.counts, "comparison": self.comparison.state()}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from `state()`."""
        self.maximum = SequentialTest(list(state["log_ratios"]))
        self.counts = {version: dict(counts) for version, counts in state["counts"].items()}
        self.comparison.restore(state["comparison"])


class Rollout:
    """One update of a model from its running version to a new one."""

    def __init__(
        self, name: str, *, running: str, new: str, objectives: Sequence[Objective], policy: RolloutPolicy,
        num_probes: int, now: float, target: float = 1.0,
    ) -> None:  # fmt: skip
        check_measurable(objectives, num_probes=num_probes, min_requests=policy.min_requests)
        self.name, self.running, self.new = name, running, new
        self.policy, self.num_probes = policy, num_probes
        if num_probes and not any(one.metric == "probes" for one in objectives):
            objectives = (*objectives, Objective(metric="probes", max_share=0.0))
        self._trials = [_Trial(one) for one in objectives]
        self._shares, self._target = policy.shares(target), target
        self._alpha = policy.false_rollbacks / max(1, len(self._trials) * len(self._shares))
        self.state = State.WARMING
        self._step = 0
        self._began_s = self._now = now
        self._num_requests = 0
        self._is_ready = False
        self._failure: str | None = None

    @property
    def share(self) -> float:
        """Share of users with the new version."""
        match self.state:
            case State.RAMPING:
                return self._shares[self._step]
            case State.DONE:
                return self._target
            case _:
                return 0.0

    @property
    def next_share(self) -> float:
        """Share of users with the new version after the present step, if that keeps every objective."""
        match self.state:
            case State.WARMING | State.PROBING:
                return self._shares[0]
            case State.RAMPING if self._step + 1 < len(self._shares):
                return self._shares[self._step + 1]
            case State.RAMPING:
                return self._target
            case _:
                return self.share

    @property
    def phase(self) -> str:
        """State and step, such as `ramping 2`."""
        return f"{self.state} {self._step}"

    def version_of(self, user: str) -> str:
        """Version for a user; requests without a user pass their own id."""
        return self.new if position(user, self.name) < self.share else self.running

    def replicas_ready(self) -> None:
        """Note that replicas of the new version have warmed up."""
        self._is_ready = True

    def fail(self, reason: str) -> None:
        """Roll back at the next decision: the version did not load, or an operator asks for it."""
        self._failure = reason

    def answer_probe(self, *, is_right: bool) -> None:
        """Count the new version's answer to a probe, before or during the ramp."""
        for trial in self._trials:
            if trial.objective.metric == "probes":
                trial.add(0.0 if is_right else 1.0, is_new=True)

    def observe(self, outcome: Outcome) -> None:
        """Count how a request ended, unless it began under an earlier share, with another version than the user's."""
        user, share = position(outcome.user, self.name), self.share
        is_new = outcome.version == self.new
        if is_new != (user < share):
            return
        self._num_requests += is_new
        for trial in self._trials:
            value = outcome.values.get(trial.objective.metric)
            if value is None:
                continue
            if not is_new and trial.objective.is_latency:
                trial.comparison.observe_running(value)
            if self.state is State.RAMPING and not (trial.objective.is_latency and self._is_settling):
                trial.add(value, is_new=is_new)
                if share < 1 and trial.objective.max_ratio is not None:
                    trial.comparison.add(value, user, share)

    def decide(self, now: float) -> Decision | None:
        """Change the state if it is time to. May be called as often as one likes."""
        self._now = now
        if self.state in (State.DONE, State.ROLLED_BACK):
            return None
        for trial in self._trials:
            trial.comparison.update_threshold()
        if reason := self._failure or self._broken_objective() or self._timeout():
            return self._enter(State.ROLLED_BACK, reason)
        match self.state:
            case State.WARMING if self._is_ready and self.num_probes:
                return self._enter(State.PROBING, "replicas are ready")
            case State.WARMING if self._is_ready:
                return self._enter(State.RAMPING, "replicas are ready")
            case State.PROBING if self._has_passed_probes():
                return self._enter(State.RAMPING, "probes are answered")
            case State.RAMPING if self._has_held():
                return self._next_step()
        return None

    def evidence(self) -> tuple[dict[str, Any], ...]:
        """Counts and e-values of every objective in the present step, as plain data."""
        return tuple(trial.evidence(self._alpha) for trial in self._trials)

    def _next_step(self) -> Decision:
        if self._step + 1 == len(self._shares):
            return self._enter(State.DONE, "the last step has kept every objective")
        return self._enter(State.RAMPING, "the step has kept every objective", self._step + 1)

    def _enter(self, state: State, reason: str, step: int = 0) -> Decision:
        evidence = self.evidence()
        self.state, self._step, self._began_s, self._num_requests = state, step, self._now, 0
        for trial in self._trials:
            trial.begin_step()
        return Decision(time_s=self._now, state=state, share=self.share, reason=reason, evidence=evidence)

    def _broken_objective(self) -> str | None:
        broken = [trial.objective.name for trial in self._trials if trial.is_broken(self.share, self._alpha)]
        return f"{', '.join(broken)}: worse than the objective allows" if broken else None

    def _timeout(self) -> str | None:
        waited_s = self._now - self._began_s
        if self.state is State.WARMING and not self._is_ready and waited_s >= self.policy.warm_up_timeout_s:
            return f"replicas are not ready after {waited_s:.0f} s"
        if self.state is State.PROBING and not self._has_passed_probes() and waited_s >= self.policy.probe_timeout_s:
            return f"probes are not answered correctly after {waited_s:.0f} s"
        return None

    def _has_passed_probes(self) -> bool:
        [trial] = [trial for trial in self._trials if trial.objective.metric == "probes"]
        answers = trial.counts["new"]
        allowed = (trial.objective.max_share or 0.0) * answers["requests"]
        return answers["requests"] >= self.num_probes and answers["exceeding"] <= allowed

    def _has_held(self) -> bool:
        has_lasted = self._now - self._began_s >= self.policy.hold_s
        return has_lasted and self._num_requests >= self.policy.min_requests

    @property
    def _is_settling(self) -> bool:
        return self._now - self._began_s < self.policy.settle_s

    def to_plain(self) -> dict[str, Any]:
        """All state as plain data, so that another controller can continue."""
        return {
            "state": self.state.value, "step": self._step, "began_s": self._began_s, "now": self._now,
            "num_requests": self._num_requests,
            "is_ready": self._is_ready, "failure": self._failure, "trials": [trial.state() for trial in self._trials],
        }  # fmt: skip

    def restore(self, plain: dict[str, Any]) -> None:
        """Continue from `to_plain()` of a rollout with the same arguments."""
        self.state, self._step = State(plain["state"]), plain["step"]
        self._began_s, self._now, self._num_requests = plain["began_s"], plain["now"], plain["num_requests"]
        self._is_ready, self._failure = plain["is_ready"], plain["failure"]
        for trial, state in zip(self._trials, plain["trials"], strict=True):
            trial.restore(state)
