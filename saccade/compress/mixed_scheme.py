"""Pick a mixed scheme: the best within a size, or the smallest within a loss.

    try every uniform scheme -> sensitivity, in the best method of each form
    -> the mixed scheme with the least sum of KL divergences -> try it

A trial compresses as `saccade compress` would, and compares with the original on the calibration samples. Losses of
groups are close to additive, so the best mixed scheme within a size is a knapsack, solved exactly over sizes in small
steps. Close is not equal, so the trials decide: the mixed scheme is taken if it is nearer to the original than every
uniform scheme that fits. On these samples the choice is therefore at least as good as every uniform scheme of its size.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from saccade.compress.calibration import CalibrationConfig, image_weight, load_batches
from saccade.compress.original import Original
from saccade.compress.run import compress
from saccade.compress.scheme import BUILT_IN, Form, Method, Rule, Scheme, layer_of, part_of
from saccade.compress.sensitivity import (
    Candidate,
    OnStep,
    Sensitivity,
    measure_sensitivity,
    predicted_ratio,
    smallest_ratio,
)
from saccade.compress.verify import Fidelity, Reference
from saccade.device import resolve_device
from saccade.errors import ConfigError
from saccade.model import load_model
from saccade.processor import Processor

logger = logging.getLogger(__name__)

_SAMPLES = 32
"""Samples that sensitivity is measured on."""
_STEPS = 100_000
"""Steps that sizes are rounded to in the knapsack."""
_BISECTIONS = 7
"""Mixed schemes that are tried to find the smallest within a loss."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A scheme that was compressed and compared with the original on the calibration samples."""

    scheme: Scheme
    """What was tried."""
    ratio: float
    """Size as a share of the original's."""
    fidelity: Fidelity
    """How far it is from the original."""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {"scheme": self.scheme.name, "ratio": self.ratio, **self.fidelity.to_json()}


@dataclass(frozen=True, kw_only=True)
class PickedScheme:
    """The scheme that was picked, and why."""

    scheme: Scheme
    """The one nearest to the original of those that fit."""
    sensitivity: Sensitivity
    """What the mixed scheme was chosen by."""
    trials: list[Trial]
    """The uniform schemes, then mixed ones."""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return self.sensitivity.to_json() | {"trials": [trial.to_json() for trial in self.trials]}


def choose_scheme(
    checkpoint: Path,
    calibration: CalibrationConfig,
    folder: Path,
    *,
    target_size: float | None = None,
    max_loss: float | None = None,
    device: str | torch.device = "auto",
    on_step: OnStep | None = None,
) -> PickedScheme:
    """Pick the scheme of the best quality within a size, or of the least size within a loss.

    `folder`: where trials are written, and removed again. Sensitivity is measured on the first of the calibration's
    samples, trials on all of them. The cost is eight or nine compressions, with `max_loss` up to fourteen.
    """
    if target_size is not None:
        _check_reachable(smallest_ratio(Original(checkpoint)), target_size)
    picker = Picker(checkpoint, calibration, folder, device=device, on_step=on_step)
    if target_size is not None:
        scheme = picker.within_size(target_size)
    else:
        assert max_loss is not None, "one of both bounds is given"
        scheme = picker.within_loss(max_loss)
    return PickedScheme(scheme=scheme, sensitivity=picker.sensitivity, trials=list(picker.trials.values()))


class Picker:
    """Picks schemes for one checkpoint: tries the uniform ones, then measures sensitivity."""

    def __init__(
        self,
        checkpoint: Path,
        calibration: CalibrationConfig,
        folder: Path,
        *,
        device: str | torch.device = "auto",
        on_step: OnStep | None = None,
    ) -> None:
        self._checkpoint, self._calibration, self._folder, self._on_step = checkpoint, calibration, folder, on_step
        self._device = resolve_device(device)
        model, processor = load_model(checkpoint, device=self._device), Processor.load(checkpoint)
        few = replace(calibration, num_samples=min(calibration.num_samples, _SAMPLES))
        first, batches = (
            [batch.to(self._device) for batch in load_batches(one, processor, model.config.language.vocab_size)]
            for one in (few, calibration)
        )
        self._reference = Reference(model, batches)
        self.trials: dict[Scheme, Trial] = {}
        """What was tried."""
        self._uniform = [self._try(scheme) for scheme in BUILT_IN.values()]
        original, weight = Original(checkpoint), image_weight(few, first)
        self.sensitivity = measure_sensitivity(original, model, first, self._methods(), weight, on_step)
        self._predicted = {trial.scheme: predicted_ratio(original, trial.scheme) for trial in self._uniform}

    def _methods(self) -> dict[Form, Method]:
        """The method of each form: that of the best uniform scheme.

        For one group alone the differences between methods are noise."""
        ranked = sorted(self._uniform, key=lambda trial: trial.fidelity.kl, reverse=True)
        return {rule.form: rule.method for trial in ranked for rule in trial.scheme.rules}

    def _try(self, scheme: Scheme) -> Trial:
        """Compress by a scheme into a folder that is removed, and compare; unless it was tried."""
        if scheme not in self.trials:
            with tempfile.TemporaryDirectory(dir=self._folder, prefix=".saccade-trial-") as folder:
                out, samples = Path(folder) / "out", self._calibration
                report = compress(self._checkpoint, out, scheme=scheme, calibration=samples, device=self._device)
                fidelity = self._reference.compare(load_model(out, device=self._device))
            self.trials[scheme] = trial = Trial(scheme=scheme, ratio=report.ratio, fidelity=fidelity)
            logger.info("trial of %s: size %.4f, KL %.3g", scheme.name, trial.ratio, fidelity.kl)
            if self._on_step is not None:
                self._on_step(f"trial of {scheme.name}", len(self.trials), max(len(self.trials), len(BUILT_IN)))
        return self.trials[scheme]

    def within_size(self, target: float) -> Scheme:
        """The scheme nearest to the original within `target` of its bytes: the mixed one, or a uniform one."""
        fitting = [trial for trial in self._uniform if trial.ratio <= target]
        # Sizes are predicted a little too high, so the first mixed scheme may be as large, by prediction, as the
        # uniform schemes that do fit.
        for bound in (max([target, *(self._predicted[trial.scheme] for trial in fitting)]), target):
            mixed = self._try_mixed(bound, f"mixed-{target:.4g}")
            if mixed.ratio <= target:
                return _best([mixed, *fitting])
        return _best(fitting or [mixed])

    def within_loss(self, max_loss: float) -> Scheme:
        """The smallest mixed scheme whose perplexity rises by `max_loss` at most.

        A uniform scheme that is better and no larger is preferred."""
        low, high, best = self.sensitivity.smallest_ratio + 1e-6, 1.0, None
        for _ in range(_BISECTIONS):
            target = (low + high) / 2
            trial = self._try_mixed(target, f"mixed-max-loss-{max_loss:g}")
            if trial.fidelity.perplexity_increase <= max_loss:
                best, high = trial, target
            else:
                low = target
        if best is None:
            raise ConfigError(f"--max-loss {100 * max_loss:g} %: every mixed scheme loses more. Allow more loss")
        good = [trial for trial in self._uniform if trial.fidelity.perplexity_increase <= max_loss]
        return _best([best, *(trial for trial in good if trial.ratio <= best.ratio)])

    def _try_mixed(self, target: float, name: str) -> Trial:
        return self._try(scheme_of(choose_within_size(self.sensitivity, target), self.sensitivity, name=name))


def _best(trials: Sequence[Trial]) -> Scheme:
    return min(trials, key=lambda trial: trial.fidelity.kl).scheme


# ------------------------------------------------------------------ the mixed scheme


def choose_within_size(sensitivity: Sensitivity, target: float) -> dict[str, Candidate]:
    """The form of every group with the least sum of KL divergences, within `target` of the original's bytes."""
    budget = int(target * sensitivity.original_bytes + 1e-3) - sensitivity.other_bytes
    _check_reachable(sensitivity.smallest_ratio, target)
    groups = sensitivity.candidates
    # Sizes are rounded to whole steps: down, which gives the best one if it fits; else up, which always does.
    for rounding in (np.floor, np.ceil):
        chosen = _knapsack(groups, budget, rounding)
        if chosen is not None and sum(one.num_bytes for one in chosen.values()) <= budget:
            return chosen
    return {group: min(options, key=lambda one: one.num_bytes) for group, options in groups.items()}


def _check_reachable(least: float, target: float) -> None:
    if least > target:
        raise ConfigError(
            f"--target-size {target:g}: the smallest mixed scheme has {least:.3f} of the bytes, "
            f"embeddings and norms included. Give {least + 0.005:.2f} or more"
        )


def _knapsack(
    groups: Mapping[str, Sequence[Candidate]], budget: int, rounding: Callable[[float], Any]
) -> dict[str, Candidate] | None:
    """The candidate of every group with the least sum of KL divergences, sizes in steps; None: there is none."""
    steps = {one: int(rounding(one.num_bytes * _STEPS / budget)) for options in groups.values() for one in options}
    cost, choices = np.zeros(_STEPS + 1), []
    for options in groups.values():
        tried = np.full((len(options), _STEPS + 1), np.inf)
        for row, one in enumerate(options):
            if steps[one] <= _STEPS:
                tried[row, steps[one] :] = cost[: _STEPS + 1 - steps[one]] + max(one.kl, 0.0)
        choices.append(tried.argmin(0).astype(np.int8))
        cost = tried.min(0)
    if not np.isfinite(cost[-1]):
        return None
    chosen, left = {}, _STEPS
    for (group, options), choice in zip(reversed(list(groups.items())), reversed(choices), strict=True):
        chosen[group] = options[int(choice[left])]
        left -= steps[chosen[group]]
    return {group: chosen[group] for group in groups}


def scheme_of(chosen: Mapping[str, Candidate], sensitivity: Sensitivity, *, name: str) -> Scheme:
    """The chosen candidates as a scheme."""
    rules = []
    for group, one in chosen.items():
        layer = layer_of(group)
        last = {projection.rpartition(".")[2] for projection in sensitivity.projections[group]}
        rules.append(
            Rule(
                part=part_of(group),  # type: ignore[arg-type]
                layers=None if layer is None else str(layer),
                projections=tuple(sorted(last)) if layer is not None else (),
                form=one.form,
                group_size=one.group_size,
                method=one.method,
            )
        )
    return Scheme(name=name, rules=tuple(rules))
