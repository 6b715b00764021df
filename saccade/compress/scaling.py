"""Scales of inputs (AWQ, SmoothQuant): search them and move them into what comes before.

    awq          s = (mean magnitude)^a, a searched
    smoothquant  s = (largest activation)^a / (largest weight)^(1 - a), a searched: activations become easier to round

    a norm before projections        norm / s, each projection's inputs * s
    up before down of a gated MLP    outputs of up / s, inputs of down * s       (silu(gate) * up is linear in up)

The block says which norm feeds which projections (`normed_inputs`), and the MLP which projection is scaled with another
(`scaled_pair`). A block that says nothing is rounded without scales. A scale is moved only if every projection that
reads the input is rounded by the same method, so that no weight that is kept changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from saccade.compress.input_statistics import InputStatistics
from saccade.compress.quantizers import Grid, output_energy, stored_scheme
from saccade.compress.scheme import Rule
from saccade.kernels.linear_w8a8 import linear_w8a8_reference

_EXPONENTS = tuple(index / 10 for index in range(11))
_SMOOTHING_GAIN = 0.8
"""Squared error that SmoothQuant's scale must get below, as a share of the error without it.

Smaller gains are chance: the error is measured on a few rows."""


@dataclass
class Scales:
    """Factors that the weights of a block were multiplied with, by projection."""

    inputs: dict[str, Tensor]
    """[D]: scales of inputs."""
    outputs: dict[str, Tensor]
    """[N]: scales of outputs."""


def fold_scales(
    block: nn.Module,
    prefix: str,
    weights: dict[str, Tensor],
    stored: dict[str, Tensor],
    rules: Mapping[str, Rule],
    statistics: Mapping[str, InputStatistics],
) -> Scales:
    """Search the scales of a block's inputs, and move them out of its projections.

    `weights`: tensors of the block in fp32; those of projections are changed here.
    `stored`: tensors as in the checkpoint; norms and biases are changed here.
    """
    folded = Scales({}, {})
    for up, down in _scaled_pairs(block, prefix):
        if up in rules and (scale_D := _search([down], rules, statistics, weights, stored)) is not None:
            weights[f"{up}.weight"] /= scale_D.unsqueeze(1)
            folded.outputs[up] = 1 / scale_D
            if (bias := f"{up}.bias") in stored:
                stored[bias] = (stored[bias].float() / scale_D).to(stored[bias].dtype)
            weights[f"{down}.weight"] *= scale_D
            folded.inputs[down] = scale_D
    for norm, layers in _normed_inputs(block, prefix):
        scale_D = _search(layers, rules, statistics, weights, stored)
        if scale_D is None or f"{norm}.weight" not in stored:
            continue
        scale_D = _divide_norm(norm, scale_D, stored)
        for layer in layers:
            weights[f"{layer}.weight"] *= scale_D
            folded.inputs[layer] = scale_D
    return folded


def _search(
    layers: list[str],
    rules: Mapping[str, Rule],
    statistics: Mapping[str, InputStatistics],
    weights: Mapping[str, Tensor],
    stored: Mapping[str, Tensor],
) -> Tensor | None:
    """The scale of the inputs of these layers; None: they have none in common."""
    methods = {rules[layer].method if layer in rules else None for layer in layers}
    method = methods.pop() if len(methods) == 1 else None
    if method not in _SEARCHES or any(layer not in statistics for layer in layers):
        return None
    dtype = stored[f"{layers[0]}.weight"].dtype
    originals = [weights[f"{layer}.weight"] for layer in layers]
    return _SEARCHES[method](originals, [rules[layer] for layer in layers], statistics[layers[0]], dtype)


def _divide_norm(norm: str, scale_D: Tensor, stored: dict[str, Tensor]) -> Tensor:
    """Divide the weight and bias of a norm; returns the scale that its rounded weight was divided by."""
    old = stored[f"{norm}.weight"]
    new = (old.float() / scale_D).to(old.dtype)
    stored[f"{norm}.weight"] = new
    scale_D = torch.where((old != 0) & (new != 0), old.float() / new.float(), scale_D)
    if (bias := f"{norm}.bias") in stored:
        stored[bias] = (stored[bias].float() / scale_D).to(stored[bias].dtype)
    return scale_D


def _normed_inputs(block: nn.Module, prefix: str) -> Iterator[tuple[str, list[str]]]:
    """Norms of a block, and the projections that read each."""
    for norm, layers in getattr(block, "normed_inputs", {}).items():
        yield f"{prefix}.{norm}", [f"{prefix}.{layer}" for layer in layers]


def _scaled_pairs(block: nn.Module, prefix: str) -> Iterator[tuple[str, str]]:
    for name, module in block.named_modules():
        if (pair := getattr(module, "scaled_pair", None)) is not None:
            where = f"{prefix}.{name}" if name else prefix
            yield f"{where}.{pair[0]}", f"{where}.{pair[1]}"


# ------------------------------------------------------------------ the search


def awq_scale(
    weights: Sequence[Tensor], rules: Sequence[Rule], statistics: InputStatistics, dtype: torch.dtype
) -> Tensor:
    """[D]: the scale of inputs with the lowest error of all projections that read them.

    One scale is tried for each exponent of their mean magnitude."""
    magnitude_D = (statistics.magnitude_D / statistics.magnitude_D.mean().clamp_min(1e-20)).clamp_min(1e-4)
    best, lowest = torch.ones_like(magnitude_D), torch.inf
    for exponent in _EXPONENTS:
        scale_D = _centred(magnitude_D**exponent)
        error = 0.0
        for weight_ND, rule in zip(weights, rules, strict=True):
            grid = Grid.of(weight_ND * scale_D, stored_scheme(rule, weight_ND.shape[1]), dtype)
            rounded_ND = grid.stored(grid.round(weight_ND * scale_D)).dequantize().float() / scale_D
            error += float(output_energy(rounded_ND - weight_ND, statistics.gram_DD))
        if error < lowest:
            best, lowest = scale_D, error
    return best


def smooth_scale(
    weights: Sequence[Tensor], rules: Sequence[Rule], statistics: InputStatistics, dtype: torch.dtype
) -> Tensor:
    """[D]: the scale of inputs with the lowest error of the 8-bit product itself, on some rows.

    Activations are rounded too."""
    largest_D = statistics.largest_D.clamp_min(1e-5)
    largest_weight_D = torch.stack([weight.abs().amax(0) for weight in weights]).amax(0).clamp_min(1e-5)

    def error(scale_D: Tensor) -> float:
        total = 0.0
        for weight_ND, rule in zip(weights, rules, strict=True):
            grid = Grid.of(weight_ND * scale_D, stored_scheme(rule, weight_ND.shape[1]), dtype)
            values_ND = grid.round(weight_ND * scale_D)
            y_TN = linear_w8a8_reference(statistics.rows_TD / scale_D, values_ND, grid.scale)
            total += float((y_TN - statistics.rows_TD @ weight_ND.T).square().sum())
        return total

    none_D = torch.ones_like(largest_D)
    scales = [_centred(largest_D**a / largest_weight_D ** (1 - a)) for a in _EXPONENTS]
    best_error, best = min(((error(scale_D), number) for number, scale_D in enumerate(scales)))
    return scales[best] if best_error < _SMOOTHING_GAIN * error(none_D) else none_D


def _centred(scale_D: Tensor) -> Tensor:
    """The same scale with the largest and the smallest as far from one."""
    return scale_D / (scale_D.max() * scale_D.min()).sqrt()


_SEARCHES = {"awq": awq_scale, "smoothquant": smooth_scale}
