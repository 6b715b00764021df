"""Sensitivity: what the output loses when one group of projections is compressed, in every form of a mixed scheme.

A group is what a block multiplies one input with: queries, keys and values; the output of attention; gate and up; down.
A projector is one group, and so is a head. Each is rounded alone in every candidate form, by the code that will
compress it (`rounding.py`) and with statistics of the original's activations. The output is then compared with the
original's (`verify.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch

from saccade.compress.block_runner import HEAD, is_in, row_weights
from saccade.compress.input_statistics import InputStatistics
from saccade.compress.observed_linear import ObservedLinear, Observer, replace_projection
from saccade.compress.original import Original
from saccade.compress.quantizers import stored_scheme
from saccade.compress.rounding import round_projections
from saccade.compress.scheme import Form, Method, Rule, Scheme, part_of
from saccade.compress.verify import Fidelity, Reference
from saccade.model.linear import Linear
from saccade.model.quantized_linear import quantized_form
from saccade.model.vlm import VLM
from saccade.model.weights import load_tensor
from saccade.processor.inputs import ModelInputs

OnStep = Callable[[str, int, int], None]
"""Called after every group or trial with its name, the number of finished ones and of all."""
_ENTRY_BYTES = 140
"""Bytes of one more tensor in the header of a file, and of its padding."""
CANDIDATES: tuple[tuple[Form, int | None], ...] = (("int8", None), ("int4", 32), ("int4", 128))
"""Forms and group sizes that are tried besides keeping a group."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One form of one group of projections."""

    group: str
    """Name of the module that owns the projections, and theirs."""
    form: Form
    """keep, int8, int4."""
    method: Method = "rtn"
    """How its weights are rounded."""
    group_size: int | None
    """Group size of int4."""
    num_bytes: int
    """Bytes of its projections in this form."""
    kl: float
    """KL divergence of the output when only this group is in this form."""
    loss_change: float
    """Change of the loss, in nats."""


@dataclass(frozen=True, kw_only=True)
class Sensitivity:
    """The loss that every form of every group of layers costs."""

    candidates: dict[str, list[Candidate]]
    """Candidates by group, in the order of the model; the first keeps it."""
    projections: dict[str, list[str]]
    """Projections of each group."""
    other_bytes: int
    """Bytes of tensors that are kept in any case."""

    @property
    def original_bytes(self) -> int:
        """Bytes with every group kept."""
        return self.other_bytes + sum(options[0].num_bytes for options in self.candidates.values())

    @property
    def smallest_ratio(self) -> float:
        """Size of the smallest mixed scheme as a share of the original's."""
        smallest = sum(min(one.num_bytes for one in options) for options in self.candidates.values())
        return (smallest + self.other_bytes) / self.original_bytes

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        candidates = {group: [asdict(one) for one in options] for group, options in self.candidates.items()}
        return {"groups": candidates, "original_bytes": self.original_bytes, "other_bytes": self.other_bytes}


def measure_sensitivity(
    original: Original,
    model: VLM,
    batches: Sequence[ModelInputs],
    methods: Mapping[Form, Method],
    image_weight: float = 1.0,
    on_step: OnStep | None = None,
) -> Sensitivity:
    """Round every group alone in every form, and compare. `model` is the original; its weights are the same afterwards.

    `batches`: samples of calibration, on the device of the model, for both the statistics and the comparison.
    `methods`: how each form is rounded.
    """
    model.requires_grad_(False)
    reference, groups = Reference(model, batches), _groups(original)
    found: dict[str, list[Candidate]] = {}
    for block in original.blocks:
        own = {group: names for group, names in groups.items() if is_in(group, block)}
        statistics = _observe(model, block, [name for names in own.values() for name in names], batches, image_weight)
        for group, names in own.items():
            found[group] = [_candidate(original, group, names, _rule(group, "keep"), None)]
            for rule in _rules(original, group, methods):
                with _rounded(original, model, block, dict.fromkeys(names, rule), statistics):
                    found[group].append(_candidate(original, group, names, rule, reference.compare(model)))
            if on_step is not None:
                on_step(f"sensitivity of {group}", len(found), len(groups))
    sizes = sum(options[0].num_bytes for options in found.values())
    return Sensitivity(candidates=found, projections=groups, other_bytes=original.num_bytes - sizes)


def _groups(original: Original) -> dict[str, list[str]]:
    """Projections by what they read. A group is named by the module that owns it and its projections."""
    plain = original.plain_projections()
    groups: dict[str, list[str]] = {}
    for block, module in original.blocks.items():
        own = [name for name in plain if is_in(name, block)]
        if block in ("projector", HEAD):
            groups |= {block: own} if own else {}
            continue
        shared = [[f"{block}.{layer}" for layer in layers] for layers in getattr(module, "normed_inputs", {}).values()]
        for name in own:
            group = next((layers for layers in shared if name in layers), [name])
            owner = name.rpartition(".")[0]
            groups[f"{owner}.{'+'.join(one.rpartition('.')[2] for one in group)}"] = group
    return groups


def _rules(original: Original, group: str, methods: Mapping[Form, Method]) -> list[Rule]:
    """The forms that are tried for a group."""
    rules = [_rule(group, form, methods[form], group_size) for form, group_size in CANDIDATES]
    return [rule for rule in rules if original.can_store(rule)]


def _rule(group: str, form: Form, method: Method = "rtn", group_size: int | None = None) -> Rule:
    return Rule(part=part_of(group), form=form, method=method, group_size=group_size)  # type: ignore[arg-type]


def _candidate(
    original: Original, group: str, names: Sequence[str], rule: Rule, fidelity: Fidelity | None
) -> Candidate:
    kl, change = (0.0, 0.0) if fidelity is None else (fidelity.kl, fidelity.loss - fidelity.original_loss)
    return Candidate(
        group=group,
        form=rule.form,
        method=rule.method,
        group_size=rule.group_size,
        num_bytes=sum(_stored_bytes(original, name, rule) for name in names),
        kl=kl,
        loss_change=change,
    )


# ------------------------------------------------------------------ sizes


def predicted_ratio(original: Original, scheme: Scheme) -> float:
    """Size of a scheme as a share of the original's, a little too high."""
    rules = original.rules(scheme)
    return 1 - sum(_saved_bytes(original, name, rule) for name, rule in rules.items()) / original.num_bytes


def smallest_ratio(original: Original) -> float:
    """Size of the smallest mixed scheme as a share of the original's."""
    saved = [
        max(_saved_bytes(original, name, rule) for rule in _rules(original, name, {"int8": "rtn", "int4": "rtn"}))
        for name in original.plain_projections()
    ]
    return 1 - sum(saved) / original.num_bytes


def _saved_bytes(original: Original, name: str, rule: Rule) -> int:
    return _stored_bytes(original, name, _rule(name, "keep")) - _stored_bytes(original, name, rule)


def _stored_bytes(original: Original, name: str, rule: Rule) -> int:
    """Bytes of a projection's weight and scales on disk."""
    bytes_per_weight = original.num_bytes_per_weight
    outputs, inputs = original.plain_projections()[name].stored_shape
    if rule.form == "keep":
        return outputs * inputs * bytes_per_weight
    if rule.form != "int4":
        return outputs * (inputs + bytes_per_weight) + _ENTRY_BYTES
    size = stored_scheme(rule, inputs).group_size or inputs
    return outputs * (-(-inputs // 8) * 4 + inputs // size * bytes_per_weight) + 2 * _ENTRY_BYTES


# ------------------------------------------------------------------ one group alone


def _observe(
    model: VLM, block: str, names: Sequence[str], batches: Sequence[ModelInputs], image_weight: float
) -> dict[str, InputStatistics]:
    """Statistics of what projections of one block read in the original."""
    observer, plain = Observer(), _plain(model, names)
    for name, layer in plain.items():
        replace_projection(model, name, ObservedLinear(name, layer, observer))
    # With gradients enabled no kernel fuses or splits what a projection reads; no parameter requires any.
    with torch.enable_grad():
        for batch in batches:
            observer.weight_T = row_weights(block, batch, image_weight)
            hidden_TD = model.hidden_states(batch)
            if block == HEAD:
                observer.add(HEAD, hidden_TD, plain[HEAD].stored_shape[1])
            observer.forget_tensors()
    for name, layer in plain.items():
        replace_projection(model, name, layer)
    return observer.statistics


@contextmanager
def _rounded(
    original: Original, model: VLM, block: str, rules: Mapping[str, Rule], statistics: Mapping[str, InputStatistics]
) -> Iterator[None]:
    """The model with projections of one block rounded, and the norms that their scales are folded into."""
    originals = original.read([name for name in original.names.values() if is_in(name, block)], model.device)
    tensors, plain = dict(originals), _plain(model, list(rules))
    rounded = round_projections(model.get_submodule(block), block, tensors, rules, statistics, computes_errors=False)
    for name, layer in plain.items():
        replace_projection(model, name, quantized_form(layer, rounded[name].scheme).eval())
    norms = {}
    for name, tensor in tensors.items():
        if name.rpartition(".")[0] in rules:
            if not name.endswith(".weight_shape"):
                load_tensor(model, name, tensor.to(model.device), model.dtype)
        elif tensor is not originals[name]:
            parameter = model.get_parameter(name)
            norms[name], parameter.data = parameter.data, tensor.to(parameter.dtype)
    try:
        yield
    finally:
        for name, layer in plain.items():
            replace_projection(model, name, layer)
        for name, values in norms.items():
            model.get_parameter(name).data = values


def _plain(model: VLM, names: Sequence[str]) -> dict[str, Linear]:
    plain = {name: model.get_submodule(name) for name in names}
    assert all(isinstance(layer, Linear) for layer in plain.values()), "the original has plain projections"
    return plain  # type: ignore[return-value]
