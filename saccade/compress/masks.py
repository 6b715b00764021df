"""Masks: single weights of a model set to zero, by magnitude times the size of their input (Wanda)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from saccade.compress.importance import mean_loss, measured
from saccade.compress.pruned_folder import BLOCKS, Part, write_folder
from saccade.model.linear import Linear, projections
from saccade.model.vlm import VLM
from saccade.model.weights import config_for_export
from saccade.processor.inputs import ModelInputs

Pattern = Literal["unstructured", "2:4"]


def write_masked(
    checkpoint: Path,
    out: Path,
    model: VLM,
    batches: Sequence[ModelInputs],
    *,
    pattern: Pattern,
    keep: float,
    parts: Sequence[Part],
) -> int:
    """Write a copy of the folder in which the weights that count least are zero; returns how many they are.

    Weights of these parts' layers are compared with those of the same output."""
    num_zeros = 0
    prefixes = tuple(f"{BLOCKS[part]}." for part in parts)
    names = [name for name, module in projections(model) if type(module) is Linear and name.startswith(prefixes)]
    with measured(model, names) as layers:
        mean_loss(model, batches)
        sizes = {name: layer.squares_D.sqrt().cpu() for name, layer in layers.items()}

    def rewrite(name: str, tensor: Tensor) -> tuple[str, Tensor]:
        layer, _, last = name.rpartition(".")
        if last != "weight" or layer not in sizes:
            return name, tensor
        score_ND = tensor.float().abs() * sizes[layer][: tensor.shape[1]]
        kept_ND = _two_of_four(score_ND) if pattern == "2:4" else _largest(score_ND, keep)
        nonlocal num_zeros
        num_zeros += int((~kept_ND).sum())
        return name, tensor * kept_ND

    write_folder(checkpoint, out, config_for_export(checkpoint), rewrite)
    return num_zeros


def _largest(score_ND: Tensor, keep: float) -> Tensor:
    """[N, D] bool: the highest share of each row."""
    count = max(1, round(keep * score_ND.shape[1]))
    return torch.zeros_like(score_ND, dtype=torch.bool).scatter_(1, score_ND.topk(count, dim=1).indices, True)


def _two_of_four(score_ND: Tensor) -> Tensor:
    """[N, D] bool: two of every four inputs; inputs after the last whole four stay."""
    whole = score_ND.shape[1] // 4 * 4
    groups = score_ND[:, :whole].unflatten(1, (-1, 4))  # type: ignore[no-untyped-call]
    kept = torch.zeros_like(groups, dtype=torch.bool).scatter_(2, groups.topk(2, dim=2).indices, True).flatten(1)
    return torch.cat([kept, torch.ones_like(score_ND[:, whole:], dtype=torch.bool)], dim=1)
