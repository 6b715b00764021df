"""The experiments of a model: which ones run, and what their users got.

    follow(the file's) -> step(ready versions) every second: begins, or pauses while a version is not ready
                          count(outcome)                     results of variants, requests that followed the traffic

An experiment runs as a whole: while one of its versions is not ready, all its users follow the traffic of the versions.
Else variants would be compared over different hours, and the users of one would be missing.

An experiment is rolled back when a variant breaks the `max_share` of an objective, and nothing says that the control
breaks it too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

from saccade.config import decode, encode
from saccade.fleet.evidence import SequentialTest
from saccade.fleet.experiments import Experiment, Results
from saccade.fleet.objectives import Objective, Outcome


class ExperimentRun:
    """An experiment of the file, with its results."""

    def __init__(self, config: Experiment) -> None:
        self.config, self.results = config, Results(config)
        self.is_running = False
        self.num_fallbacks = 0
        """Requests of its users that followed the traffic of the versions."""
        self.failure = ""
        """Why it was rolled back."""
        self.tests: dict[tuple[str, str], SequentialTest] = {}
        """Evidence that a variant breaks an objective."""

    def try_again(self) -> None:
        """Forget that it was rolled back."""
        self.failure = ""
        self.tests.clear()

    def observe(self, outcome: Outcome, objectives: Iterable[Objective]) -> None:
        """Count how a request ended, unless it began before variants changed."""
        variant = self.config.variant_of(outcome.user)
        if (outcome.variant, outcome.version) != (variant.name, variant.version):
            return
        self.results.observe(outcome.user, variant.name, outcome.values)
        for one in objectives:
            value = outcome.values.get(one.metric)
            if one.max_share is not None and value is not None:
                test = self.tests.setdefault((variant.name, one.name), SequentialTest())
                test.add(happened=one.exceeds_maximum(value), allowed=one.max_share)

    def broken(self, alpha: float) -> str:
        """The objective that a variant breaks, in words; empty: none."""
        control, *others = (variant.name for variant in self.config.variants)
        for (variant, objective), test in self.tests.items():
            at_control = self.tests.get((control, objective), SequentialTest())
            is_alarm = test.is_alarm(alpha / (2 * len(others)))  # errors and refusals of each variant
            if variant != control and is_alarm and at_control.log_e_value <= 0:
                return f"variant {variant}, {objective}: worse than the objective allows"
        return ""

    def report(self) -> dict[str, Any]:
        """Counts, metrics and verdicts, as plain data."""
        return {
            "is_running": self.is_running, "failure": self.failure, "share": self.config.share,
            "fallbacks": self.num_fallbacks, **self.results.report(),
        }  # fmt: skip


class ModelExperiments:
    """All experiments of a model, in the order of the file."""

    def __init__(self, log: Callable[..., None]) -> None:
        """`log` takes what happened to an experiment, the reason and the evidence."""
        self._log = log
        self.runs: dict[str, ExperimentRun] = {}

    def follow(self, wanted: Iterable[Experiment]) -> None:
        """Follow the file. If variants or metrics have changed, results begin again; users are not assigned again."""
        before, self.runs = self.runs, {}
        for config in wanted:
            run = before.get(config.name)
            if run is None or replace(run.config, share=config.share) != config:
                run = ExperimentRun(config)
            run.config, self.runs[config.name] = config, run
            run.try_again()
        for name, run in before.items():
            if self.runs.get(name) is not run:
                reason = "its variants or metrics have changed" if name in self.runs else "the file does not have it"
                self._log("experiment ends", f"{name}: {reason}", (run.report(),))

    def step(self, ready: Collection[str], can_begin: Collection[str], alpha: float) -> None:
        """Begin experiments whose versions are ready and may get users; pause those with one that is not ready.

        One that keeps the objectives is rolled back with a probability of at most `alpha`.
        """
        for name, run in self.runs.items():
            missing = sorted(run.config.versions - set(ready))
            if run.is_running and (failure := run.broken(alpha)):
                run.is_running, run.failure = False, failure
                self._log("experiment rolled back", f"{name}: {failure}", (run.report(),))
            elif run.is_running and missing:
                run.is_running = False
                self._log("experiment pauses", f"{name}: {', '.join(missing)} is not ready", (run.report(),))
            elif not run.is_running and not run.failure and run.config.versions <= set(can_begin):
                run.is_running = True
                self._log("experiment begins", f"{name}: its versions are ready", ())

    def count(self, outcome: Outcome, objectives: Sequence[Objective]) -> None:
        """Count how a request ended, if its user takes part in an experiment."""
        if (run := self.runs.get(outcome.experiment or "")) is not None:
            run.num_fallbacks += outcome.variant is None
            run.observe(outcome, objectives)

    def to_plain(self) -> list[dict[str, Any]]:
        """All state as plain data."""
        return [
            {
                "config": encode(run.config), "is_running": run.is_running, "num_fallbacks": run.num_fallbacks,
                "failure": run.failure, "results": run.results.to_plain(),
                "tests": [[*key, test.log_ratios] for key, test in run.tests.items()],
            }
            for run in self.runs.values()
        ]  # fmt: skip

    def restore(self, plain: Iterable[dict[str, Any]]) -> None:
        """Continue from `to_plain()`."""
        for one in plain:
            run = ExperimentRun(decode(Experiment, one["config"], "snapshot"))
            run.is_running, run.num_fallbacks = one["is_running"], one["num_fallbacks"]
            run.failure = one["failure"]
            run.results.restore(one["results"])
            for variant, objective, log_ratios in one["tests"]:
                run.tests[variant, objective] = SequentialTest(list(log_ratios))
            self.runs[run.config.name] = run
