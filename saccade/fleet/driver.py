"""What a fleet does next: from what it should be and what runs to actions, a view for the fronts and decisions.

    driver = Driver()                     # or Driver.from_plain(snapshot)
    driver.set_desired(desired, now)      # when there is another generation
    driver.count(model, outcomes)         # as fronts report them
    step = driver.step(observed)          # every second
    store(driver.to_plain()), then carry out step.actions

The actions are what is missing on the cluster, not what has changed: one that fails, or that a controller did not live
to carry out, is asked for again. Plain Python: time is a number that the caller passes.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from saccade.config import decode, encode
from saccade.fleet.actions import Action, AppHealth, DeleteEngines, DeleteFronts, DeployEngines, DeployFronts, Observed
from saccade.fleet.cluster.view import ModelView
from saccade.fleet.config import FleetConfig
from saccade.fleet.objectives import Outcome
from saccade.fleet.state import Desired
from saccade.fleet.versions import ModelVersions

_MAX_DECISIONS = 100
"""Decisions that a snapshot has; all of them are in the log."""
_LARGEST = 1e9
"""What an infinite e-value is called in decisions: JSON has no infinity."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """What a step asks for."""

    actions: tuple[Action, ...]
    """Actions in the order in which they are carried out."""
    models: tuple[ModelView, ...]
    """View for the fronts."""
    decisions: tuple[dict[str, Any], ...]
    """Decisions since the last step, as plain data."""
    has_ended: bool
    """Whether the fleet is down, and nothing of it runs."""


class Driver:
    """Decides for a whole fleet."""

    def __init__(self) -> None:
        self.desired: Desired | None = None
        self.models: dict[str, ModelVersions] = {}
        self.num_decisions = 0
        """Number of the newest decision."""
        self.recent: deque[dict[str, Any]] = deque(maxlen=_MAX_DECISIONS)
        self._fronts: dict[str, Any] | None = None
        """What the fronts were deployed with; None: they were not."""
        self._new: list[dict[str, Any]] = []
        self._now = 0.0

    # ------------------------------------------------------------------ events

    def set_desired(self, desired: Desired, now: float) -> None:
        """Follow another generation."""
        self.desired, self._now = desired, now
        self._log(None, None, desired.command, reason=f"generation {desired.generation} by {desired.by}")
        if desired.is_down:
            return
        for model in desired.config.models:
            if model.name not in self.models:
                self.models[model.name] = ModelVersions(model.name, self._log)
            at_once = model.name in desired.at_once
            if not self._is_unchanged(model.name) or at_once or desired.command == "update":
                self.models[model.name].set_desired(model, desired.generation, now, at_once=at_once)
        names = {model.name for model in desired.config.models}
        for name, versions in self.models.items():
            if name not in names:
                versions.set_desired(None, desired.generation, now)

    def count(self, model: str, outcomes: Iterable[Outcome]) -> None:
        """Count how requests ended."""
        if (versions := self.models.get(model)) is not None:
            for outcome in outcomes:
                versions.count(outcome)

    def answer_probe(self, model: str, version: str, probe: str, answer: str) -> None:
        """Count the answer to a probe."""
        if (versions := self.models.get(model)) is not None:
            versions.answer_probe(version, probe, answer)

    def note_deployed(self, action: DeployEngines | DeployFronts) -> None:
        """Note that the cluster has accepted a deployment."""
        if isinstance(action, DeployFronts):
            self._fronts = _front_settings(action.fleet)
        elif (versions := self.models.get(action.model.name)) is not None:
            versions.note_deployed(action.version.name, action.bounds)

    def lose_cluster(self, now: float) -> None:
        """Note that nothing runs: this controller has another cluster than the one before."""
        self._now, self._fronts = now, None
        for versions in self.models.values():
            versions.observe({}, now)

    # ------------------------------------------------------------------ decisions

    def step(self, observed: Observed) -> Step:
        """Decide what to do now."""
        self._now = observed.time_s
        for name, versions in self.models.items():
            engines = {version: one for (model, version), one in observed.engines.items() if model == name}
            versions.observe(engines, self._now)
        is_down = self.desired is not None and self.desired.is_down
        if not is_down or observed.front is None:  # versions end after the fronts
            for versions in self.models.values():
                if is_down:
                    versions.end(self._now)
                versions.step(self._now)
        self.models = {name: versions for name, versions in self.models.items() if not versions.has_ended}
        has_ended = is_down and not self.models and not observed.engines and observed.front is None
        decisions, self._new = tuple(self._new), []
        return Step(
            actions=tuple(self._actions(observed)), models=tuple(one.view() for one in self.models.values()),
            decisions=decisions, has_ended=has_ended,
        )  # fmt: skip

    def _actions(self, observed: Observed) -> Iterable[Action]:
        if self.desired is None:
            return
        yield from self._front_actions(self.desired, observed.front)
        for versions in self.models.values():
            yield from versions.actions(observed.probes_in_flight)
            yield from versions.deletions(self._now)
        known = {(model, version) for model, versions in self.models.items() for version in versions.runs}
        for (model, version), health in observed.engines.items():
            if (model, version) not in known and not health.is_deleting:
                yield DeleteEngines(model=model, version=version)

    def _front_actions(self, desired: Desired, front: AppHealth | None) -> Iterable[Action]:
        if front is not None and front.is_deleting:
            return
        if desired.is_down:
            if front is not None:
                yield DeleteFronts()
        elif front is None or self._fronts != _front_settings(desired.config):
            yield DeployFronts(fleet=desired.config)

    def _is_unchanged(self, name: str) -> bool:
        """Whether a model follows the same section of the file already."""
        assert self.desired is not None
        wanted = next(model for model in self.desired.config.models if model.name == name)
        return self.models[name].desired == wanted

    def _log(
        self, model: str | None, version: str | None, what: str, *, reason: str, share: float | None = None,
        evidence: tuple[dict[str, Any], ...] = (),
    ) -> None:  # fmt: skip
        self.num_decisions += 1
        generation = 0 if self.desired is None else self.desired.generation
        decision = {
            "number": self.num_decisions, "time_s": self._now, "generation": generation, "model": model,
            "version": version, "what": what, "share": share, "reason": reason, "evidence": finite(list(evidence)),
        }  # fmt: skip
        self.recent.append(decision)
        self._new.append(decision)

    # ------------------------------------------------------------------ plain data

    def to_plain(self) -> dict[str, Any]:
        """All state as plain data, so that another controller can continue."""
        return {
            "desired": None if self.desired is None else encode(self.desired),
            "models": {name: versions.to_plain() for name, versions in self.models.items()},
            "num_decisions": self.num_decisions, "recent": list(self.recent), "new": list(self._new),
            "fronts": self._fronts, "now": self._now,
        }  # fmt: skip

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Driver:
        """Continue from `to_plain()`."""
        driver = cls()
        driver.desired = None if plain["desired"] is None else decode(Desired, plain["desired"], "snapshot")
        for name, versions in plain["models"].items():
            driver.models[name] = ModelVersions(name, driver._log)
            driver.models[name].restore(versions)
        driver.num_decisions, driver._fronts, driver._now = plain["num_decisions"], plain["fronts"], plain["now"]
        driver.recent.extend(plain["recent"])
        driver._new.extend(plain["new"])
        return driver


def _front_settings(fleet: FleetConfig) -> dict[str, Any]:
    """What fronts are deployed with. Models reach them by the view."""
    return {"front": encode(fleet.front), "server": encode(fleet.server)}


def finite(plain: Any) -> Any:
    """Plain data without infinities."""
    match plain:
        case dict():
            return {key: finite(value) for key, value in plain.items()}
        case list() | tuple():
            return [finite(value) for value in plain]
        case float() if math.isinf(plain):
            return math.copysign(_LARGEST, plain)
        case _:
            return plain
