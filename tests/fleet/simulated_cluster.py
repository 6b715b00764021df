"""A cluster that does what a driver asks for: applications start, fail, answer probes and end, in simulated time."""

import random

from saccade.fleet.actions import (
    AppHealth,
    AskProbe,
    DeleteEngines,
    DeleteFronts,
    DeployEngines,
    DeployFronts,
    Observed,
)
from saccade.fleet.config import FleetConfig, ModelConfig, Pool, VersionConfig
from saccade.fleet.driver import Driver
from saccade.fleet.objectives import Objective, Outcome
from saccade.fleet.probes import Probe
from saccade.fleet.rollout import RolloutPolicy
from saccade.fleet.state import Desired

PROBE = Probe(name="sign", question="What does the sign say?", answers=("stop",))
QUICK = RolloutPolicy(
    ramp=(10.0, 50.0, 100.0), hold_s=3.0, min_requests=0, settle_s=0.0, warm_up_timeout_s=30.0, probe_timeout_s=20.0
)
ERRORS = Objective(metric="errors", max_share=0.05)


def version(name, traffic=100.0, **fields):
    return VersionConfig(name=name, checkpoint=name, traffic=traffic, **fields)


def model(*versions, name="tiny", **fields):
    defaults = {"engines": Pool(max_replicas=4), "rollout": QUICK, "objectives": (ERRORS,)}
    return ModelConfig(**{"name": name, "versions": versions} | defaults | fields)


def fleet(*models, **fields):
    return FleetConfig(name="photos", models=models, **fields)


class App:
    def __init__(self, ready_at, failure, bounds):
        self.ready_at, self.failure, self.bounds = ready_at, failure, bounds
        self.gone_at = None


class Cluster:
    """Carries out the actions of a driver, which it restores from its plain data whenever it is told to."""

    def __init__(self, seed=0, *, start_s=2.0):
        self.random, self.start_s = random.Random(seed), start_s
        self.now, self.driver, self.generation = 1000.0, Driver(), 0
        self.engines, self.front = {}, None
        self.faults = {}
        """{version: "does not load" | "never ready" | "wrong" | "silent" | share of errors}."""
        self.steps, self.decisions = [], []
        self.deploys = []

    # ------------------------------------------------------------------ commands

    def command(self, config, command="update", at_once=()):
        self.generation += 1
        desired = Desired(
            generation=self.generation,
            config=config,
            command=command,
            by="test",
            time_s=self.now,
            at_once=tuple(at_once),
        )
        self.driver.set_desired(desired, self.now)

    def lose_everything(self):
        self.engines, self.front = {}, None

    # ------------------------------------------------------------------ time

    def tick(self, seconds=1.0, num_requests=0):
        self.now += seconds
        self._serve(num_requests)
        step = self.driver.step(self.observed())
        self.steps.append(step)
        self.decisions += step.decisions
        for action in step.actions:
            self._carry_out(action)
        return step

    def run(self, seconds, num_requests=0):
        return [self.tick(num_requests=num_requests) for _ in range(int(seconds))][-1]

    def observed(self):
        for key, app in list(self.engines.items()):
            if app.gone_at is not None and self.now >= app.gone_at:
                del self.engines[key]
        if self.front is not None and self.front.gone_at is not None and self.now >= self.front.gone_at:
            self.front = None
        engines = {key: self._health(app, self.faults.get(key[1])) for key, app in self.engines.items()}
        front = None if self.front is None else self._health(self.front)
        return Observed(time_s=self.now, engines=engines, front=front)

    def _health(self, app, fault=None):
        if app.gone_at is not None:
            return AppHealth(is_deleting=True)
        if app.failure is not None and self.now >= app.ready_at:
            return AppHealth(failure=app.failure)
        is_ready = self.now >= app.ready_at and fault != "never ready"
        least = max(1, app.bounds[0])
        return AppHealth(num_ready=least if is_ready else 0, num_starting=0 if is_ready else least)

    # ------------------------------------------------------------------ what the driver asks for

    def _carry_out(self, action):
        match action:
            case DeployEngines():
                self._deploy(action)
            case DeleteEngines():
                self.engines[action.model, action.version].gone_at = self.now + 2
            case DeployFronts():
                if self.front is None:
                    self.front = App(self.now + 1, None, (1, 1))
                self.driver.note_deployed(action)
            case DeleteFronts():
                self.front.gone_at = self.now + 2
            case AskProbe():
                fault = self.faults.get(action.version)
                if fault != "silent":
                    answer = "go" if fault == "wrong" else "Stop."
                    self.driver.answer_probe(action.model, action.version, action.probe.name, answer)

    def _deploy(self, action):
        key = action.model.name, action.version.name
        fault = self.faults.get(action.version.name)
        self.deploys.append((*key, action.bounds))
        if key in self.engines:
            assert self.engines[key].gone_at is None, "an application that ends is deployed again"
            self.engines[key].bounds = action.bounds
        else:
            failure = "no such checkpoint" if fault == "does not load" else None
            self.engines[key] = App(self.now + self.start_s, failure, action.bounds)
        self.driver.note_deployed(action)

    def _serve(self, num_requests):
        if not self.steps:
            return
        for view in self.steps[-1].models:
            outcomes = []
            for _ in range(num_requests):
                user = f"user {self.random.randrange(2000)}"
                able = [one.config.name for one in view.versions if one.state == "ready"]
                chosen, experiment, variant = view.assign(user, able)
                if chosen is not None:
                    share = self.faults.get(chosen, 0.0)
                    is_error = self.random.random() < (share if isinstance(share, float) else 0.0)
                    outcomes.append(
                        Outcome(
                            user=user,
                            version=chosen,
                            values={"errors": float(is_error)},
                            experiment=experiment,
                            variant=variant,
                        )
                    )
            self.driver.count(view.name, outcomes)

    # ------------------------------------------------------------------ what tests ask

    @property
    def shares(self):
        return {view.name: view.split.shares for view in self.steps[-1].models}

    @property
    def states(self):
        return {one.config.name: one.state for view in self.steps[-1].models for one in view.versions}

    def said(self, version):
        """What was decided about a version, in order."""
        return [one["what"] for one in self.decisions if one["version"] == version]
