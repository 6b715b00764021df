"""How a version gets users: by a rollout next to the running one, or directly, when its probes are answered.

The first versions of a model have no users to take over, and an operator who rolls back does not want a ramp: these get
their users directly. A version whose share rises has passed its probes before; its ramp begins above the share it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from saccade.config import decode, encode
from saccade.fleet.config import ModelConfig
from saccade.fleet.objectives import Objective
from saccade.fleet.probes import Probe
from saccade.fleet.rollout import Rollout, RolloutPolicy, State

_MAX_ANSWER = 200
"""Characters of a wrong answer that are remembered."""


class Introduction:
    """One version on its way to its share of users, with the probes that it has answered."""

    def __init__(
        self, rollout: str, *, version: str, running: str, objectives: Sequence[Objective], policy: RolloutPolicy,
        num_probes: int, target: float, began_s: float, is_direct: bool, share_before: float,
    ) -> None:  # fmt: skip
        self.version, self.is_direct, self.target, self.share_before = version, is_direct, target, share_before
        self._arguments = {"running": running, "num_probes": num_probes, "began_s": began_s}
        self._objectives, self._policy = tuple(objectives), policy
        self.rollout = Rollout(
            rollout, running=running, new=version, objectives=objectives, policy=policy, num_probes=num_probes,
            now=began_s, target=target,
        )  # fmt: skip
        self._answered: set[str] = set()
        self._wrong: dict[str, str] = {}
        """Wrong answers by the probe's name."""
        self._answered_in = self.rollout.phase

    @classmethod
    def direct(cls, rollout: str, model: ModelConfig, version: str, *, target: float, now: float) -> Introduction:
        """Wait for replicas and probes alone; there is nothing to compare with."""
        return cls(
            rollout, version=version, running="", policy=model.rollout, num_probes=len(model.probes), target=target,
            objectives=[one for one in model.objectives if one.metric == "probes"], began_s=now, is_direct=True,
            share_before=0.0,
        )  # fmt: skip

    @classmethod
    def ramp(
        cls, rollout: str, model: ModelConfig, version: str, *, running: str, target: float, share: float, now: float
    ) -> Introduction:
        """Ramp from a share to the target."""
        policy, objectives, num_probes = model.rollout, model.objectives, len(model.probes)
        if share:
            steps = tuple(percent for percent in policy.ramp if percent > 100 * share)
            policy = replace(policy, ramp=steps or (100.0,), holdout=min(policy.holdout, 100 * (1 - share)))
            objectives = tuple(one for one in objectives if one.metric != "probes")
            num_probes = 0
        return cls(
            rollout, version=version, running=running, objectives=objectives, policy=policy, num_probes=num_probes,
            target=target, began_s=now, is_direct=False, share_before=share,
        )  # fmt: skip

    @property
    def share(self) -> float:
        """Share of users that the version has by now."""
        return self.rollout.share if self.is_ramping else self.share_before

    @property
    def is_ramping(self) -> bool:
        """Whether the version has users by the ramp."""
        return not self.is_direct and self.rollout.state in (State.RAMPING, State.DONE)

    @property
    def evidence(self) -> tuple[dict[str, Any], ...]:
        """Counts and e-values of every objective in the present step, as plain data."""
        return self.rollout.evidence()

    def unanswered(self, probes: Sequence[Probe]) -> list[Probe]:
        """Probes to ask now: each once before the version has users, and once in every step of the ramp."""
        if self.rollout.state not in (State.PROBING, State.RAMPING) or not self._arguments["num_probes"]:
            return []
        return [
            probe for probe in probes if probe.name not in self._answered or self._answered_in != self.rollout.phase
        ]

    def answer(self, probe: Probe, answer: str) -> None:
        """Count an answer to a probe."""
        if probe not in self.unanswered([probe]):
            return
        if self._answered_in != self.rollout.phase:
            self._answered, self._answered_in = set(), self.rollout.phase
        self._answered.add(probe.name)
        is_right = probe.accepts(answer)
        if not is_right:
            self._wrong[probe.name] = answer[:_MAX_ANSWER]
        self.rollout.answer_probe(is_right=is_right)

    @property
    def wrong_answers(self) -> str:
        """Wrong answers in words, to be appended to a reason; empty: there were none."""
        return "".join(f"; probe {name} was answered {answer!r}" for name, answer in self._wrong.items())

    def to_plain(self) -> dict[str, Any]:
        """All state as plain data."""
        return {
            "name": self.rollout.name, "version": self.version, "target": self.target, "is_direct": self.is_direct,
            "share_before": self.share_before, "objectives": [encode(one) for one in self._objectives],
            "policy": encode(self._policy), "arguments": self._arguments, "answered": sorted(self._answered),
            "wrong": self._wrong,
            "answered_in": self._answered_in, "rollout": self.rollout.to_plain(),
        }  # fmt: skip

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> Introduction:
        """Continue from `to_plain()`."""
        objectives = [decode(Objective, one, "snapshot") for one in plain["objectives"]]
        made = cls(
            plain["name"], version=plain["version"], target=plain["target"], is_direct=plain["is_direct"],
            share_before=plain["share_before"], objectives=objectives, **plain["arguments"],
            policy=decode(RolloutPolicy, plain["policy"], "snapshot"),
        )  # fmt: skip
        made.rollout.restore(plain["rollout"])
        made._answered, made._answered_in = set(plain["answered"]), plain["answered_in"]
        made._wrong = dict(plain["wrong"])
        return made
