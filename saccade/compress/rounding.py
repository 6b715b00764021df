"""Round the projections of one block by their rules: search and fold scales, then quantize each weight.

Statistics of calibration become stored weights here only: `run.py` calls it block by block, `sensitivity.py` for one
group of projections alone, so that a form costs there what it costs in the compressed folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor, nn

from saccade.compress.input_statistics import InputStatistics
from saccade.compress.quantizers import quantize, relative_error
from saccade.compress.scaling import fold_scales
from saccade.compress.scheme import Rule
from saccade.model.quantization import StoredScheme


@dataclass(frozen=True, kw_only=True)
class RoundedProjection:
    """How a projection was rounded."""

    scheme: StoredScheme
    """How it is stored."""
    num_inputs: int
    """Inputs of its weight."""
    method: str
    """What rounded it: to nearest without statistics, whatever the rule says."""
    error: float | None
    """Relative error of its output over the tokens of calibration; None: without calibration, or not computed."""
    rtn_error: float | None
    """The same error when it is rounded to nearest."""


def round_projections(
    block: nn.Module,
    prefix: str,
    tensors: dict[str, Tensor],
    rules: Mapping[str, Rule],
    statistics: Mapping[str, InputStatistics],
    *,
    is_reached: bool = True,
    computes_errors: bool = True,
) -> dict[str, RoundedProjection]:
    """Round projections of a block.

    `tensors`: those of the block as the checkpoint has them; weights of projections are replaced here, and norms and
    biases that scales are folded into.
    `is_reached`: whether calibration samples run through this part of the model; its blocks without statistics are then
    never run.
    `computes_errors`: whether errors of outputs are computed.
    """
    originals = {layer: tensors[f"{layer}.weight"] for layer in rules}
    exact = {f"{layer}.weight": weight.float().clone() for layer, weight in originals.items()}
    folded = fold_scales(block, prefix, exact, tensors, rules, statistics)
    rounded = {}
    for layer, rule in rules.items():
        weight_ND, scale_D, found = exact[f"{layer}.weight"], folded.inputs.get(layer), statistics.get(layer)
        scaled = found if found is None or scale_D is None else found.scaled(scale_D)
        if scaled is None and is_reached:  # in a block after the last one whose output is read
            scaled = InputStatistics.of_unit_inputs(weight_ND.shape[1], weight_ND.device)
        dtype, chosen = originals[layer].dtype, rule if found is not None else replace(rule, method="rtn")
        quantized = quantize(weight_ND, chosen, scaled, dtype)
        error = rtn_error = None
        if computes_errors and scaled is not None and found is not None:
            error = relative_error(weight_ND, quantized, scaled, folded.outputs.get(layer))
            original_ND = originals[layer].float()
            rtn_error = relative_error(original_ND, quantize(original_ND, _to_nearest(rule), None, dtype), found)
        del tensors[f"{layer}.weight"]
        tensors |= {f"{layer}.{suffix}": tensor for suffix, tensor in quantized.tensors().items()}
        rounded[layer] = RoundedProjection(
            scheme=quantized.scheme,
            num_inputs=weight_ND.shape[1],
            method=chosen.method,
            error=error,
            rtn_error=rtn_error,
        )
    return rounded


def _to_nearest(rule: Rule) -> Rule:
    return replace(rule, method="rtn", static=False, symmetric=rule.symmetric or rule.form != "int4")
