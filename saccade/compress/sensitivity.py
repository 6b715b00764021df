"""Sensitivity: what the output loses when one group of projections is compressed, and the mixed scheme that follows from it.

A group is what a block computes with one input: its attention, its MLP; the projector; the head. Each is rounded to nearest
in every candidate form, alone, and the output is compared with the original's (`verify.py`). Losses of groups are close to additive,
so the best map within a size is a knapsack: the least sum of KL divergences whose bytes fit, found exactly over sizes in small steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from saccade.compress.calibration import CalibrationConfig, load_batches
from saccade.compress.observed_linear import replace_projection
from saccade.compress.quantizers import quantize, stored_scheme
from saccade.compress.scheme import Method, Rule, Scheme, layer_of, part_of
from saccade.compress.source import Source
from saccade.compress.verify import Fidelity, Reference
from saccade.device import resolve_device
from saccade.errors import ConfigError
from saccade.model import load_model
from saccade.model.linear import Linear, Projection
from saccade.model.quantized_linear import quantized_form
from saccade.model.vlm import VLM
from saccade.processor import Processor

OnGroup = Callable[[str, int, int], None]
"""Called behind every group with its name, the number of finished groups and of all."""
_SAMPLES = 32
_STEPS = 20_000
"""Sizes that are distinguished."""
_ENTRY_BYTES = 140
"""Of one more tensor in the header of a file, and its padding."""
CANDIDATES = (("int8", None), ("int4", 32), ("int4", 128))
"""Forms and group sizes that are tried besides keeping a group."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One form of one group of projections."""

    group: str
    """Name of the module that owns the projections."""
    form: str
    """keep, int8, int4."""
    group_size: int | None
    """Of int4."""
    num_bytes: int
    """Of its projections in this form."""
    kl: float
    """KL divergence of the output when only this group is in this form."""
    loss_change: float
    """Change of the loss, in nats."""


@dataclass(frozen=True, kw_only=True)
class Sensitivity:
    """What every form of every group costs."""

    candidates: dict[str, list[Candidate]]
    """By group, in the order of the model; the first keeps it."""
    projections: dict[str, list[str]]
    """Projections of each group."""
    other_bytes: int
    """Tensors that are kept in any case."""

    @property
    def original_bytes(self) -> int:
        """With every group kept."""
        return self.other_bytes + sum(options[0].num_bytes for options in self.candidates.values())

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        candidates = {group: [asdict(one) for one in options] for group, options in self.candidates.items()}
        return {"groups": candidates, "original_bytes": self.original_bytes, "other_bytes": self.other_bytes}


def choose_scheme(
    checkpoint: Path,
    calibration: CalibrationConfig,
    *,
    target_size: float | None = None,
    max_loss: float | None = None,
    device: str | torch.device = "auto",
    on_group: OnGroup | None = None,
) -> tuple[Scheme, Sensitivity]:
    """Measure the sensitivity of a checkpoint, and pick the mixed scheme of the best quality within a size, or of the least size within a loss.

    The samples are the first of the calibration's.
    """
    place, source = resolve_device(device), Source(checkpoint)
    model = load_model(checkpoint, device=place)
    few = replace(calibration, num_samples=min(calibration.num_samples, _SAMPLES))
    batches = load_batches(few, Processor.load(checkpoint), model.config.language.vocab_size)
    reference = Reference(model, [batch.to(place) for batch in batches])
    sensitivity = measure_sensitivity(source, model, reference, on_group)
    if target_size is not None:
        chosen, name = choose_within_size(sensitivity, target_size), f"mixed-{target_size:g}"
    else:
        assert max_loss is not None, "one of both bounds is given"
        chosen, name = (
            choose_within_loss(source, model, reference, sensitivity, max_loss),
            f"mixed-max-loss-{max_loss:g}",
        )
    methods: dict[str, Method] = {"int4": "gptq", "int8": "smoothquant"}
    return scheme_of(chosen, sensitivity, methods=methods, name=name), sensitivity


def measure_sensitivity(
    source: Source, model: VLM, reference: Reference, on_group: OnGroup | None = None
) -> Sensitivity:
    """Round every group alone in every form, and compare. `model` is the original; it is the same afterwards."""
    plain = source.plain_projections()
    groups: dict[str, list[str]] = {}
    for name in plain:
        groups.setdefault(_group_of(name), []).append(name)
    found: dict[str, list[Candidate]] = {}
    for number, (group, names) in enumerate(groups.items()):
        found[group] = [_candidate(source, group, names, "keep", None, None)]
        for form, group_size in CANDIDATES:
            rules = {name: _rule(name, form, group_size) for name in names}
            with rounded(source, model, rules):
                fidelity = reference.compare(model)
            found[group].append(_candidate(source, group, names, form, group_size, fidelity))
        if on_group is not None:
            on_group(group, number + 1, len(groups))
    sizes = sum(options[0].num_bytes for options in found.values())
    return Sensitivity(candidates=found, projections=groups, other_bytes=source.num_bytes - sizes)


def _group_of(name: str) -> str:
    """The module that owns a projection; a projector is one group."""
    return "projector" if part_of(name) == "projector" else name.rpartition(".")[0] or name


def _rule(name: str, form: str, group_size: int | None, method: Method = "rtn") -> Rule:
    return Rule(part=part_of(name), form=form, group_size=group_size, method=method)  # type: ignore[arg-type]


def _candidate(
    source: Source, group: str, names: Sequence[str], form: str, group_size: int | None, fidelity: Fidelity | None
) -> Candidate:
    plain = source.plain_projections()
    num_bytes = sum(_stored_bytes(plain[name], form, group_size, source.num_bytes_per_weight) for name in names)
    kl, change = (0.0, 0.0) if fidelity is None else (fidelity.kl, fidelity.loss - fidelity.original_loss)
    return Candidate(group=group, form=form, group_size=group_size, num_bytes=num_bytes, kl=kl, loss_change=change)


def _stored_bytes(layer: Linear, form: str, group_size: int | None, bytes_per_weight: int) -> int:
    """Bytes of a projection's weight and scales on disk."""
    outputs, inputs = layer.stored_shape
    if form == "keep":
        return outputs * inputs * bytes_per_weight
    if form != "int4":
        return outputs * (inputs + bytes_per_weight) + _ENTRY_BYTES
    size = stored_scheme(Rule(part="language", form="int4", group_size=group_size), inputs).group_size or inputs
    return outputs * (-(-inputs // 8) * 4 + inputs // size * bytes_per_weight) + 2 * _ENTRY_BYTES


@contextmanager
def rounded(source: Source, model: VLM, rules: Mapping[str, Rule]) -> Iterator[None]:
    """The model with some projections rounded to nearest."""
    device = model.device
    originals: dict[str, Projection] = {}
    for name, rule in rules.items():
        layer = model.get_submodule(name)
        assert isinstance(layer, Linear), "the original has plain projections"
        originals[name] = layer
        tensors = source.read([f"{name}.weight", f"{name}.bias"], device)
        weight_ND = tensors.pop(f"{name}.weight")
        quantized = quantize(weight_ND.float(), rule, None, weight_ND.dtype)
        form = quantized_form(layer, quantized.scheme)
        for suffix, tensor in quantized.tensors().items():
            if suffix != "weight_shape":
                form.load_tensor(suffix, tensor.to(device), None)
        for bias, tensor in tensors.items():
            form.load_tensor(bias.rpartition(".")[2], tensor, model.dtype)
        replace_projection(model, name, form.eval())
    try:
        yield
    finally:
        for name, layer in originals.items():
            replace_projection(model, name, layer)


# ------------------------------------------------------------------ the map


def choose_within_size(sensitivity: Sensitivity, target: float) -> dict[str, Candidate]:
    """The form of every group with the least sum of KL divergences, within `target` of the original's bytes."""
    budget = target * sensitivity.original_bytes - sensitivity.other_bytes
    smallest = sum(min(one.num_bytes for one in options) for options in sensitivity.candidates.values())
    if smallest > budget:
        least = (smallest + sensitivity.other_bytes) / sensitivity.original_bytes
        raise ConfigError(
            f"--target-size {target:g}: the smallest map has {least:.3f} of the bytes, embeddings and norms included. Give {least + 0.005:.2f} or more"
        )
    step = budget / _STEPS
    cost, choices = np.zeros(_STEPS + 1), []
    for options in sensitivity.candidates.values():
        tried = np.full((len(options), _STEPS + 1), np.inf)
        for row, one in enumerate(options):
            used = int(np.ceil(one.num_bytes / step - 1e-9))
            if used <= _STEPS:
                tried[row, used:] = cost[: _STEPS + 1 - used] + max(one.kl, 0.0)
        choices.append(tried.argmin(0))
        cost = tried.min(0)
    if not np.isfinite(cost[-1]):  # sizes are rounded up to whole steps
        return {group: min(options, key=lambda one: one.num_bytes) for group, options in sensitivity.candidates.items()}
    chosen, left = {}, _STEPS
    for (group, options), choice in zip(reversed(sensitivity.candidates.items()), reversed(choices), strict=True):
        chosen[group] = options[int(choice[left])]
        left -= int(np.ceil(chosen[group].num_bytes / step - 1e-9))
    return {group: chosen[group] for group in sensitivity.candidates}


def choose_within_loss(
    source: Source, model: VLM, reference: Reference, sensitivity: Sensitivity, max_loss: float
) -> dict[str, Candidate]:
    """The smallest map whose perplexity, measured with all of it rounded, rises by `max_loss` at most."""
    smallest = sum(min(one.num_bytes for one in options) for options in sensitivity.candidates.values())
    low, high = (smallest + sensitivity.other_bytes) / sensitivity.original_bytes + 1e-6, 1.0
    best = {group: options[0] for group, options in sensitivity.candidates.items()}
    for _ in range(8):
        target = (low + high) / 2
        chosen = choose_within_size(sensitivity, target)
        with rounded(source, model, rules_of(chosen, sensitivity)):
            increase = reference.compare(model).perplexity_increase
        if increase <= max_loss:
            best, high = chosen, target
        else:
            low = target
    return best


def rules_of(chosen: Mapping[str, Candidate], sensitivity: Sensitivity) -> dict[str, Rule]:
    """The rule of every projection that a map compresses, rounded to nearest."""
    return {
        name: _rule(name, one.form, one.group_size)
        for group, one in chosen.items()
        for name in sensitivity.projections[group]
        if one.form != "keep"
    }


def scheme_of(
    chosen: Mapping[str, Candidate], sensitivity: Sensitivity, *, methods: Mapping[str, Method], name: str
) -> Scheme:
    """A map as a scheme. `methods`: the method of each form."""
    rules = []
    for group, one in chosen.items():
        layer = layer_of(group)
        last = {projection.rpartition(".")[2] for projection in sensitivity.projections[group]}
        rules.append(
            Rule(
                part=part_of(group),  # type: ignore[arg-type]
                layers=None if layer is None else str(layer),
                projections=tuple(sorted(last)) if layer is not None else (),
                form=one.form,  # type: ignore[arg-type]
                group_size=one.group_size,
                method=methods.get(one.form, "rtn"),
            )
        )
    return Scheme(name=name, rules=tuple(rules))


def predicted_ratio(chosen: Mapping[str, Candidate], sensitivity: Sensitivity) -> float:
    """Size of a map as a share of the original's."""
    return (sensitivity.other_bytes + sum(one.num_bytes for one in chosen.values())) / sensitivity.original_bytes
