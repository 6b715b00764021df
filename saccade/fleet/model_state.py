"""What is known of one model: versions that run, who has users, and what follows for fronts and for replicas."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

from saccade.config import decode, encode
from saccade.fleet.bounds import Bounds, bounds_of
from saccade.fleet.cluster.view import ExperimentView, ModelView, VersionView
from saccade.fleet.config import ModelConfig, VersionConfig
from saccade.fleet.experiment_run import ModelExperiments
from saccade.fleet.experiments import shares_with
from saccade.fleet.introduction import Introduction
from saccade.fleet.probes import Probe
from saccade.fleet.split import Split, split_by_shares
from saccade.fleet.version_run import VersionRun

Progress = Literal["updating", "done", "rolled back"]
Log = Callable[..., None]
"""Logs a decision: model, version, what, share, reason and evidence."""


class ModelState:
    """The versions of one model; `ModelVersions` decides about them."""

    def __init__(self, model: str, log: Log) -> None:
        self.model = model
        self._log_decision = log
        self.desired: ModelConfig | None = None
        """What the fleet's file says; None: the model ends."""
        self.generation = 0
        self.progress: Progress = "done"
        self.reason = ""
        """Why the update was rolled back."""
        self.refusal = ""
        """Why the newest generation is not followed; the one before is."""
        self.runs: dict[str, VersionRun] = {}
        """By name, in the order in which they were introduced."""
        self.introductions: dict[str, Introduction] = {}
        """One while a ramp runs; several while versions are introduced directly."""
        self.running: tuple[VersionConfig, ...] = ()
        """Versions with users, and their percent of traffic, at the end of the last change."""
        self.before: tuple[VersionConfig, ...] = ()
        """The same, at the end of the change before."""
        self.experiments = ModelExperiments(self._log_experiment)
        self._is_direct = self._is_at_once = False
        self._failed: dict[str, str] = {}
        self._reached: set[str] = set()
        """Versions that have reached their target in this generation. Later ones take a part of their users again."""

    # ------------------------------------------------------------------ what follows

    @property
    def probes(self) -> tuple[Probe, ...]:
        """Probes of the model."""
        return self.desired.probes if self.desired is not None else ()

    @property
    def split(self) -> Split:
        """Versions that have users by their traffic."""
        ramp = next((one for one in self.introductions.values() if one.is_ramping), None)
        runs = [run for run in reversed(self.runs.values()) if run.phase == "ready" and run.share > 0]
        shares = [(run.rollout, run.name, run.share) for run in runs if ramp is None or run.name != ramp.version]
        if ramp is not None:
            total = sum(share for _, _, share in shares)
            others = [(rollout, name, share / total * (1 - ramp.share)) for rollout, name, share in shares]
            shares = [(self.runs[ramp.version].rollout, ramp.version, ramp.share), *others]
        return split_by_shares(shares)

    @property
    def has_ended(self) -> bool:
        """Whether the model is no longer in the file, and nothing of it runs."""
        return self.desired is None and not self.runs

    def view(self) -> ModelView:
        """The model for the fronts."""
        order = [version.name for version in self.desired.versions] if self.desired is not None else []

        def place(run: VersionRun) -> tuple[bool, int]:
            return run.phase == "draining", order.index(run.name) if run.name in order else len(order)

        runs = sorted(self.runs.values(), key=place)
        versions = tuple(VersionView(config=run.config, state=run.phase, num_encoders=run.num_encoders) for run in runs)
        experiments = tuple(
            ExperimentView(config=one.config, is_running=one.is_running) for one in self.experiments.runs.values()
        )
        return ModelView(name=self.model, versions=versions, split=self.split, experiments=experiments)

    @property
    def rollback_target(self) -> tuple[VersionConfig, ...]:
        """Versions and traffic that an operator goes back to; empty: there were none."""
        is_changing = self.progress == "updating" and bool(self.introductions)
        return self.running if is_changing and self.running else self.before

    @property
    def _wanted(self) -> tuple[VersionConfig, ...]:
        return () if self.desired is None else self.desired.live_versions

    @property
    def _in_experiments(self) -> tuple[VersionConfig, ...]:
        """Versions without traffic that run for experiments, of those that were not rolled back."""
        if self.desired is None:
            return ()
        experiments = [one.config.versions for one in self.experiments.runs.values() if not one.failure]
        used = frozenset[str]().union(*(one for one in experiments if one.isdisjoint(self._failed)))
        return tuple(version for version in self.desired.experiment_versions if version.name in used)

    @property
    def _ramps(self) -> dict[str, Introduction]:
        return {name: one for name, one in self.introductions.items() if not one.is_direct}

    def bounds(self) -> dict[str, Bounds]:
        """Bounds of every version that does not drain: the pool's, by share of users.

        A version that is introduced, or whose experiment is about to begin, has replicas for its next share already,
        and at least one.
        """
        runs = [run for run in self.runs.values() if run.phase != "draining"]
        if self.desired is None or not runs:
            return {}
        now, following = self._shares_for_bounds(runs)
        pool = self.desired.engines
        bounds, larger = bounds_of(pool, now), bounds_of(pool, following)
        waiting = {name for one in self.experiments.runs.values() if not one.is_running for name in one.config.versions}
        for run in runs:
            least, most = bounds[run.name]
            if run.name in waiting | self.introductions.keys():
                least, most = max(least, larger[run.name][0]), max(most, larger[run.name][1])
            is_introduced = run.phase != "ready" or run.name in self.introductions
            bounds[run.name] = (max(least, 1) if is_introduced else least, most)
        return bounds

    def _shares_for_bounds(self, runs: list[VersionRun]) -> tuple[dict[str, float], dict[str, float]]:
        """Share of each version now, and after the next step of an introduction."""
        shares, wanted = self.split.shares, {one.name: one.traffic / 100 for one in self._wanted}
        direct = {name for name, one in self.introductions.items() if one.is_direct}
        now = {
            run.name: shares.get(run.name, wanted.get(run.name, 0.0) if run.name in direct else run.share)
            for run in runs
        }
        following = dict(now)
        for name, one in self._ramps.items():
            rest = sum(share for other, share in now.items() if other != name) or 1.0
            following = {other: share / rest * (1 - one.rollout.next_share) for other, share in now.items()}
            following[name] = one.rollout.next_share
        none = dict.fromkeys(now, 0.0)
        can_run = [one for one in self.experiments.runs.values() if one.config.versions <= none.keys()]
        now = none | shares_with([(one.config, one.is_running) for one in can_run], now)
        return now, none | shares_with([(one.config, True) for one in can_run], following)

    # ------------------------------------------------------------------ shares

    def _is_ready(self, name: str) -> bool:
        return name in self.runs and self.runs[name].phase == "ready"

    def _settle(self, name: str, share: float) -> None:
        """Give a version its share; the others keep their proportions."""
        others = [run for run in self.runs.values() if run.share > 0 and run.name != name]
        total = sum(run.share for run in others)
        for run in others:
            run.share *= (1 - share) / total
        self.runs[name].share = share if others else 1.0

    def _note_running(self) -> None:
        """Remember what has users, and what had before."""
        runs = [run for run in self.runs.values() if run.share > 0]
        total = sum(run.share for run in runs)
        running = tuple(replace(run.config, traffic=100 * run.share / total) for run in runs)
        if running and running != self.running:
            self.before, self.running = self.running or self.before, running

    def changed_version(self, desired: ModelConfig) -> str | None:
        """A version that runs under this name with other settings; None: there is none."""
        for version in (*desired.live_versions, *desired.experiment_versions):
            run = self.runs.get(version.name)
            runs = run is not None and run.phase != "draining" and run.is_on_cluster
            if run is not None and runs and settings(run.config) != settings(version):
                return version.name
        return None

    # ------------------------------------------------------------------ log and plain data

    def _log(
        self, version: str, what: str, reason: str, *, share: float | None = None,
        evidence: tuple[dict[str, Any], ...] = (),
    ) -> None:  # fmt: skip
        self._log_decision(self.model, version, what, share=share, reason=reason, evidence=evidence)

    def _log_experiment(self, what: str, reason: str, evidence: tuple[dict[str, Any], ...]) -> None:
        self._log_decision(self.model, None, what, reason=reason, evidence=evidence)

    def to_plain(self) -> dict[str, Any]:
        """All state as plain data."""
        return {
            "desired": None if self.desired is None else encode(self.desired), "generation": self.generation,
            "progress": self.progress, "reason": self.reason, "refusal": self.refusal,
            "is_direct": self._is_direct, "is_at_once": self._is_at_once, "failed": self._failed,
            "reached": sorted(self._reached),
            "runs": [run.to_plain() for run in self.runs.values()],
            "introductions": [one.to_plain() for one in self.introductions.values()],
            "experiments": self.experiments.to_plain(),
            "running": [encode(one) for one in self.running], "before": [encode(one) for one in self.before],
        }  # fmt: skip

    def restore(self, plain: dict[str, Any]) -> None:
        """Continue from `to_plain()`."""
        self.desired = None if plain["desired"] is None else decode(ModelConfig, plain["desired"], "snapshot")
        self.generation, self.progress = plain["generation"], plain["progress"]
        self.reason, self.refusal, self._failed = plain["reason"], plain["refusal"], dict(plain["failed"])
        self._reached = set(plain["reached"])
        self._is_direct, self._is_at_once = plain["is_direct"], plain["is_at_once"]
        runs = [VersionRun.from_plain(one) for one in plain["runs"]]
        self.runs = {run.name: run for run in runs}
        introductions = [Introduction.from_plain(one) for one in plain["introductions"]]
        self.introductions = {one.version: one for one in introductions}
        self.experiments.restore(plain["experiments"])
        self.running = tuple(decode(VersionConfig, one, "snapshot") for one in plain["running"])
        self.before = tuple(decode(VersionConfig, one, "snapshot") for one in plain["before"])


def settings(version: VersionConfig) -> VersionConfig:
    """A version without its traffic."""
    return replace(version, traffic=0.0)
