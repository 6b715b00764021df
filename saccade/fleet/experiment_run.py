"""The experiments of a model: which ones run, and what their users got.

    follow(the file's) -> step(ready versions) every second: begins, or pauses while a version is not ready
                          count(outcome)                     results of variants, requests that followed the traffic

An experiment runs as a whole: while one of its versions is not ready, all its users follow the traffic of the versions.
Else variants would be compared over different hours, and the users of one would be missing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import Any

from saccade.config import decode, encode
from saccade.fleet.experiments import Experiment, Results
from saccade.fleet.objectives import Outcome


class ExperimentRun:
    """An experiment of the file, with its results."""

    def __init__(self, config: Experiment) -> None:
        self.config, self.results = config, Results(config)
        self.is_running = False
        self.num_fallbacks = 0
        """Requests of its users that followed the traffic of the versions."""

    def report(self) -> dict[str, Any]:
        """Counts, metrics and verdicts, as plain data."""
        run = {"is_running": self.is_running, "share": self.config.share, "fallbacks": self.num_fallbacks}
        return run | self.results.report()


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
        for name, run in before.items():
            if self.runs.get(name) is not run:
                reason = "its variants or metrics have changed" if name in self.runs else "the file does not have it"
                self._log("experiment ends", f"{name}: {reason}", (run.report(),))

    def step(self, ready: Collection[str], *, can_begin: Callable[[str], bool]) -> None:
        """Begin experiments whose versions are ready and may get users; pause those with one that is not ready."""
        for name, run in self.runs.items():
            missing = sorted(run.config.versions - set(ready))
            if run.is_running and missing:
                run.is_running = False
                self._log("experiment pauses", f"{name}: {', '.join(missing)} is not ready", (run.report(),))
            elif not run.is_running and not missing and all(map(can_begin, run.config.versions)):
                run.is_running = True
                self._log("experiment begins", f"{name}: its versions are ready", ())

    def count(self, outcome: Outcome) -> None:
        """Count how a request ended, if its user takes part in an experiment."""
        run = None if outcome.experiment is None else self.runs.get(outcome.experiment)
        if run is None:
            return
        run.num_fallbacks += outcome.variant is None
        variant = run.config.variant_of(outcome.user)
        if (outcome.variant, outcome.version) == (variant.name, variant.version):  # else it began before a change
            run.results.observe(outcome.user, variant.name, outcome.values)

    def to_plain(self) -> list[dict[str, Any]]:
        """All state as plain data."""
        return [
            {
                "config": encode(run.config), "is_running": run.is_running, "num_fallbacks": run.num_fallbacks,
                "results": run.results.to_plain(),
            }
            for run in self.runs.values()
        ]  # fmt: skip

    def restore(self, plain: Iterable[dict[str, Any]]) -> None:
        """Continue from `to_plain()`."""
        for one in plain:
            run = ExperimentRun(decode(Experiment, one["config"], "snapshot"))
            run.is_running, run.num_fallbacks = one["is_running"], one["num_fallbacks"]
            run.results.restore(one["results"])
            self.runs[run.config.name] = run
