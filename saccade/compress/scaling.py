"""Scales of inputs (AWQ, SmoothQuant): search them and move them into what comes before.

    a norm before projections        norm / s, each projection's inputs * s
    up before down of a gated MLP    outputs of up / s, inputs of down * s       (silu(gate) * up is linear in up)

The block says which norm feeds which projections (`normed_inputs`), and the MLP which projection is scaled with another
(`scaled_pair`). A block that says nothing is rounded without scales. A scale is moved only if every projection that
reads the input is rounded by the same method, so that no weight that is kept changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from saccade.compress.quantizers import Statistics, awq_scale, smooth_scale
from saccade.compress.scheme import Rule

_SEARCHES = {"awq": awq_scale, "smoothquant": smooth_scale}


@dataclass
class Scales:
    """What the weights of a block were multiplied with, by projection."""

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
    statistics: Mapping[str, Statistics],
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
    statistics: Mapping[str, Statistics],
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
