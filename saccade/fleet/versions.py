"""The versions of one model: which ones run, who has users, and what happens next.

    set_desired -> a version at a time: starting -> probing -> ready, with a ramp of users
                   versions that are no longer wanted, or are rolled back: draining -> deleted

The first versions of a model get their users as soon as they are ready. Later ones are introduced by rollouts, one
after another in the order of the file. If one is rolled back, the update of the model ends there, and the versions that
had users before keep them. A version keeps its name and its settings: changed settings are another version.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from saccade.fleet.actions import AppHealth, AskProbe, DeleteEngines, DeployEngines
from saccade.fleet.bounds import Bounds
from saccade.fleet.config import ModelConfig, VersionConfig
from saccade.fleet.introduction import Introduction
from saccade.fleet.model_state import ModelState, settings
from saccade.fleet.objectives import Outcome
from saccade.fleet.rollout import Decision, State
from saccade.fleet.version_run import VersionRun

DRAIN_S = 10.0
"""Seconds from the end of a version's traffic until its application is deleted. All fronts know by then; Ray waits for
the requests that run."""
RETRY_S = 30.0
"""Seconds until a version that has users but cannot start, after its application was gone, is deployed again."""
_SHARE_ERROR = 1e-9


class ModelVersions(ModelState):
    """The versions of one model, and what is decided about them."""

    # ------------------------------------------------------------------ events

    def set_desired(self, desired: ModelConfig | None, generation: int, now: float, *, at_once: bool = False) -> None:
        """Follow another generation of the fleet's file."""
        self.generation, self.refusal = generation, ""
        if desired is not None and (changed := self.changed_version(desired)):
            self.refusal = f"version {changed} runs with other settings. Give the changed version another name"
            self._log(changed, "refused", self.refusal)
            return
        if desired is not None and self.desired is not None and self._pools_differ(desired, self.desired):
            for known in self.runs.values():
                known.deployed = None  # what runs is deployed again, and stays
        self.desired, self.progress, self.reason = desired, "updating", ""
        for version in () if desired is None else desired.versions:
            if (run := self.runs.get(version.name)) is not None and not run.is_on_cluster:
                run.config = version
        self.experiments.follow(() if desired is None else desired.experiments)
        self._failed, self._reached = {}, set()
        self._is_at_once = at_once
        self._is_direct = at_once or not any(run.share > 0 for run in self.runs.values())
        for name, one in list(self.introductions.items()):
            self._revise(name, one)
        if desired is None:
            self.progress = "done"
            for run in self.runs.values():
                run.share = 0.0
        self._end_unused(now)

    @staticmethod
    def _pools_differ(one: ModelConfig, other: ModelConfig) -> bool:
        return (one.engines, one.encoders) != (other.engines, other.encoders)

    def end(self, now: float) -> None:
        """Delete all versions. There are no fronts any more, so no version has requests."""
        if self.desired is not None:
            self.set_desired(None, self.generation, now)
        for run in self.runs.values():
            run.delete_at_s = now

    def observe(self, engines: Mapping[str, AppHealth], now: float) -> None:
        """Note the applications that exist, by version."""
        for name, run in list(self.runs.items()):
            run.health = engines.get(name)
            if run.health is None and run.phase == "draining":
                del self.runs[name]
                self._log(name, "deleted", "it has no application any more")
            elif run.health is None and run.deployed is not None:
                self._restart(run)
            elif run.phase == "starting" and run.share > 0 and run.health is not None:
                self._observe_restart(run, run.health, now)

    def _restart(self, run: VersionRun) -> None:
        """Start a version again whose application is gone."""
        run.phase, run.deployed, run.delete_at_s = "starting", None, None
        self._log(run.name, "starts", "its application was gone")
        one = self.introductions.get(run.name)
        if one is not None and one.is_ramping:
            one.rollout.fail("its application was gone")

    def _observe_restart(self, run: VersionRun, health: AppHealth, now: float) -> None:
        """Give a version its users again when its replicas are ready; deploy it again if it fails."""
        if health.num_ready:
            run.phase, run.delete_at_s = "ready", None
            self._log(run.name, "ready", "replicas are ready again", share=run.share)
        elif health.failure is not None and run.delete_at_s is None:
            run.delete_at_s = now + RETRY_S
            self._log(run.name, "failed", health.failure)

    def count(self, outcome: Outcome) -> None:
        """Count how a request ended."""
        if (run := self.runs.get(outcome.version)) is not None:
            run.num_requests += 1
            run.num_errors += outcome.values.get("errors", 0.0) > 0
        self.experiments.count(outcome, () if self.desired is None else self.desired.objectives)
        for one in self._ramps.values():
            if outcome.variant is None:  # else the version is not by the ramp's share
                one.rollout.observe(outcome)

    def answer_probe(self, version: str, name: str, answer: str) -> None:
        """Count the answer to a probe."""
        introduction = self.introductions.get(version)
        probe = next((one for one in self.probes if one.name == name), None)
        if introduction is not None and probe is not None:
            introduction.answer(probe, answer)

    def note_deployed(self, version: str, bounds: Bounds) -> None:
        """Note that the cluster has accepted a version with these bounds."""
        if version in self.runs:
            self.runs[version].deployed = bounds

    def step(self, now: float) -> None:
        """Decide."""
        if self.desired is not None:
            self._introduce_directly(self.desired, now)
            if self.progress == "updating" and self._is_direct:
                self._step_directly()
            elif self.progress == "updating":
                self._step_ramp(self.desired, now)
        self._end_unused(now)
        self._step_experiments()
        for name in self.view().shares:
            self.runs[name].users_until_s = now

    # ------------------------------------------------------------------ what is to be done

    def actions(self, in_flight: frozenset[tuple[str, str, str]]) -> list[DeployEngines | DeleteEngines | AskProbe]:
        """What is to be done on the cluster."""
        wanted = self.bounds()
        found: list[DeployEngines | DeleteEngines | AskProbe] = []
        for run in self.runs.values():
            if run.phase == "draining":
                continue
            if self.desired is not None and (run.health is None or run.deployed != wanted[run.name]):
                is_deleting = run.health is not None and run.health.is_deleting
                deploy = DeployEngines(model=self.desired, version=run.config, bounds=wanted[run.name])
                found += [] if is_deleting else [deploy]
        for name, one in self.introductions.items():
            found += [
                AskProbe(model=self.model, version=name, probe=probe)
                for probe in one.unanswered(self.probes)
                if (self.model, name, probe.name) not in in_flight
            ]
        return found

    def deletions(self, now: float) -> list[DeleteEngines]:
        """Versions whose application is to be deleted: those that drain, and those that have to be deployed again."""
        return [
            DeleteEngines(model=self.model, version=run.name)
            for run in self.runs.values()
            if run.delete_at_s is not None and now >= run.delete_at_s
            if run.health is not None and not run.health.is_deleting
        ]

    # ------------------------------------------------------------------ introducing versions

    def _step_experiments(self) -> None:
        """Let experiments begin and end. A version has its share by a ramp before it gets users of an experiment."""
        ready = {run.name for run in self.runs.values() if run.phase == "ready"}
        can_begin = ready - self.introductions.keys() if self.split.shares else set[str]()
        alpha = 0.0 if self.desired is None else self.desired.rollout.false_rollbacks
        self.experiments.step(ready, can_begin, alpha)

    def _introduce_directly(self, desired: ModelConfig, now: float) -> None:
        """Start versions that need no ramp: the first ones of a model, and those that run for experiments alone."""
        wanted = self._wanted if self._is_direct and self.progress == "updating" else ()
        for version in (*wanted, *self._in_experiments):
            if version.name not in self._failed and self._can_introduce(version) and not self._is_ready(version.name):
                self._introduce(desired, version, now, is_direct=True)
        for name, one in list(self.introductions.items()):
            if one.is_direct:
                self._decide_directly(name, one, now)

    def _step_directly(self) -> None:
        """Wait for all versions; the first ones get users as soon as they are ready."""
        if not self._is_at_once:
            self._share_directly()
        if all(self._is_ready(one.name) or one.name in self._failed for one in self._wanted):
            self._finish_directly()

    def _decide_directly(self, name: str, one: Introduction, now: float) -> None:
        decision = self._decision(name, one, now)
        if decision is None:
            return
        match decision.state:
            case State.PROBING:
                self._log(name, "probing", decision.reason)
            case State.RAMPING:
                del self.introductions[name]
                self.runs[name].phase = "ready"
                self._log(name, "ready", decision.reason)
            case State.ROLLED_BACK:
                del self.introductions[name]
                self._failed[name] = decision.reason
                self._log(name, "rolled back", decision.reason, evidence=decision.evidence)
                self._end(self.runs[name], now)

    def _share_directly(self) -> None:
        """Divide the users among the versions that are ready."""
        ready = [one for one in self._wanted if self._is_ready(one.name)]
        total = sum(one.traffic for one in ready)
        for one in ready:
            self.runs[one.name].share = one.traffic / total

    def _finish_directly(self) -> None:
        failed = [f"{one.name}: {self._failed[one.name]}" for one in self._wanted if one.name in self._failed]
        if not failed:
            self._finish()
            return
        self.progress, self.reason = "rolled back", "; ".join(failed)
        self._note_running()

    def _step_ramp(self, desired: ModelConfig, now: float) -> None:
        """Introduce one version after another."""
        if not self._ramps:
            following = next((one for one in self._wanted if self._rises(one)), None)
            if following is None:
                self._finish()
                return
            if not self._can_introduce(following) and not self._is_ready(following.name):
                return
            self._introduce(desired, following, now, is_direct=False)
        for name, one in self._ramps.items():
            self._decide_ramp(name, one, now)

    def _decide_ramp(self, name: str, one: Introduction, now: float) -> None:
        decision = self._decision(name, one, now)
        if decision is None:
            return
        self._log(name, str(decision.state), decision.reason, share=decision.share, evidence=decision.evidence)
        match decision.state:
            case State.RAMPING:
                self.runs[name].phase = "ready"
            case State.DONE:
                del self.introductions[name]
                self._reached.add(name)
                self._settle(name, one.target)
            case State.ROLLED_BACK:
                del self.introductions[name]
                self.progress, self.reason = "rolled back", f"{name}: {decision.reason}"
                self._note_running()

    def _decision(self, name: str, one: Introduction, now: float) -> Decision | None:
        """Let the rollout decide by what was seen of the version."""
        run = self.runs[name]
        health = run.health or AppHealth()
        if health.failure is not None:
            one.rollout.fail(health.failure)
        needed = 1 if one.is_direct else max(1, self.bounds()[name][0])
        if health.num_ready >= needed and not health.is_deleting:
            one.rollout.replicas_ready()
        decision = one.rollout.decide(now)
        if one.rollout.state is State.PROBING and run.phase == "starting":
            run.phase = "probing"
        if decision is not None and decision.state is State.ROLLED_BACK:
            return replace(decision, reason=decision.reason + one.wrong_answers)
        return decision

    def _introduce(self, desired: ModelConfig, version: VersionConfig, now: float, *, is_direct: bool) -> None:
        """Start a version, or let more users have one that runs."""
        run = self.runs.get(version.name)
        if run is None or run.share == 0:
            rollout = f"{self.model}/{version.name}@{self.generation}"
            run = VersionRun(version, rollout) if run is None else self.runs.pop(version.name)
            self.runs[version.name] = run  # the newest
            run.rollout, run.delete_at_s = rollout, None
            run.phase = "ready" if run.phase == "ready" else "starting"  # it may have users of an experiment
            self._log(version.name, "starts", f"generation {self.generation} has it")
        target = version.traffic / 100
        if is_direct:
            one = Introduction.direct(run.rollout, desired, version.name, target=target, now=now)
        else:
            others = [other.name for other in self.runs.values() if other.share > 0 and other is not run]
            one = Introduction.ramp(
                run.rollout, desired, version.name, running=", ".join(others), target=target, share=run.share, now=now
            )
        self.introductions[version.name] = one

    def _can_introduce(self, version: VersionConfig) -> bool:
        """Whether a version without users can start: it does not run, or can be kept."""
        run = self.runs.get(version.name)
        if run is None:
            return True
        is_deleting = run.health is not None and run.health.is_deleting
        is_same = settings(run.config) == settings(version)
        return version.name not in self.introductions and run.share == 0 and is_same and not is_deleting

    def _revise(self, name: str, one: Introduction) -> None:
        """Keep an introduction in another generation if its target is the same; else end it where it is."""
        wanted = {version.name: version.traffic / 100 for version in self._wanted}
        is_same = one.is_direct or abs(one.target - wanted.get(name, 0.0)) < _SHARE_ERROR
        if one.is_direct and name in {version.name for version in self._in_experiments}:
            return
        if name in wanted and one.is_direct == self._is_direct and is_same:
            return
        del self.introductions[name]
        if name not in wanted:
            self._log(name, "rolled back", f"generation {self.generation} does not have it", evidence=one.evidence)
        elif one.is_ramping:
            self._settle(name, one.share)

    # ------------------------------------------------------------------ shares and ends

    def _rises(self, version: VersionConfig) -> bool:
        """Whether a version has yet to get more users in this generation."""
        if version.name in self._reached:
            return False
        share = self.runs[version.name].share if version.name in self.runs else 0.0
        return version.traffic / 100 > share + _SHARE_ERROR

    def _finish(self) -> None:
        """Give every version of the file exactly its share."""
        shares, before = {version.name: version.traffic / 100 for version in self._wanted}, self.split
        for run in self.runs.values():
            run.share = shares.get(run.name, 0.0)
        self.progress = "done"
        if self.split != before:
            listed = ", ".join(f"{name} {100 * share:g} %" for name, share in shares.items())
            self._log_decision(self.model, None, "shares", reason=f"users are divided as in the file: {listed}")
        self._note_running()

    def _end_unused(self, now: float) -> None:
        """Drain versions that have no users and are not about to get any."""
        wanted = {version.name for version in self._wanted} if self.progress == "updating" else set()
        wanted |= self.introductions.keys() | {version.name for version in self._in_experiments}
        for run in self.runs.values():
            if run.share == 0 and run.phase != "draining" and run.name not in wanted:
                self._end(run, now)

    def _end(self, run: VersionRun, now: float) -> None:
        """Drain a version. One that had no users is deleted at once."""
        run.phase, run.share = "draining", 0.0
        run.delete_at_s = now if run.users_until_s is None else max(now, run.users_until_s + DRAIN_S)
        self._log(run.name, "drains", "it gets no more requests, and is deleted when those that it has have ended")
