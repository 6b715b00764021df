"""Pruning: remove the units of a model that matter least, or mask single weights, and write a checkpoint folder.

    load -> measure importance on samples -> choose what stays -> slice the tensors -> write -> compare the loss

**Structured** pruning removes channels of MLPs, key/value heads with their query heads, or whole layers, of the tower
and of the decoder. What remains is an ordinary model with a smaller `config.json`: `transformers` loads it, and it is
faster by what was removed. All layers of a part keep the same number of channels and heads, since a config has one
number for all of them; each layer decides by itself which ones it keeps.

**Masks** set single weights to zero: the smallest of each output (`unstructured`), or two of every four inputs (`2:4`).
A weight counts by its magnitude times the size of its input (Wanda). The folder has the same size and runs at the same
speed: no kernel here skips zeros.

Not every unit can be removed. The head dim of most families is hidden size / number of heads, so a model with fewer
heads is another model: `heads` is refused there, and always in towers. Vision layers whose output enters the decoder
stay, and so do the decoder layers it enters.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from saccade.compress.calibration import CalibrationConfig, NoSamplesLeftError, load_batches
from saccade.compress.importance import (
    BlockLayers,
    Measure,
    block_layers,
    input_importance,
    layer_importance,
    mean_loss,
)
from saccade.compress.masks import write_masked
from saccade.compress.pruned_folder import (
    BLOCKS,
    Part,
    PartPlan,
    describe_smaller,
    sizes_of,
    slicer,
    smaller_config,
    write_folder,
)
from saccade.device import resolve_device
from saccade.errors import CheckpointError, ConfigError
from saccade.model import load_model
from saccade.model.config import ModelConfig
from saccade.model.linear import Linear, projections
from saccade.model.vlm import VLM
from saccade.processor import Processor
from saccade.processor.inputs import ModelInputs

logger = logging.getLogger(__name__)

Unit = Literal["channels", "heads", "layers"]
Kind = Literal["structured", "unstructured", "2:4"]
_CHANNEL_MULTIPLE = 8
"""Kept channels are a multiple of this, so that rows stay aligned."""


@dataclass(frozen=True, kw_only=True)
class PruningConfig:
    """The units to remove from a model, and how many."""

    keep: float = 0.7
    """Share of the model's parameters that stays; of masks, share of the weights of each layer."""
    kind: Kind = "structured"
    """structured: a smaller model; unstructured, 2:4: zeros in a model of the same size."""
    units: tuple[Unit, ...] = ("channels",)
    """What structured pruning removes. Of several units, whole layers go first and the others make up the rest."""
    parts: tuple[Part, ...] = ("vision", "language")
    """Parts that are pruned."""
    measure: Measure = "activation"
    """How channels and heads are compared: by the size of their activations, or the first-order change of the loss."""

    def __post_init__(self) -> None:
        if not 0.0 < self.keep < 1.0:
            raise ConfigError(f"keep is {self.keep}; give a share between 0 and 1, such as 0.7")
        if self.kind == "2:4" and self.keep != 0.5:
            raise ConfigError("2:4 keeps two weights of every four. Use --keep 0.5 with it")
        if not self.units or not self.parts:
            raise ConfigError("units and parts cannot be empty. Name what is to be removed, and from where")


@dataclass
class PruningReport:
    """The result of pruning a model."""

    kind: Kind
    parameters_before: int = 0
    parameters_after: int = 0
    zeros: int = 0
    """Weights that a mask set to zero."""
    loss_before: float = 0.0
    """Mean cross entropy on samples that importance was not measured with."""
    loss_after: float = 0.0
    kept: dict[str, Any] = field(default_factory=dict)
    """Sizes of the new model by part."""
    speed: str = ""
    """What speed it brings."""


def prune(
    checkpoint: str | Path,
    out: str | Path,
    *,
    config: PruningConfig,
    calibration: CalibrationConfig | Sequence[str],
    device: str | torch.device = "auto",
    dtype: torch.dtype | None = None,
) -> PruningReport:
    """Write a pruned copy of a checkpoint folder. `calibration`: shard folders, or a `CalibrationConfig`."""
    checkpoint, out = Path(checkpoint), Path(out)
    if not isinstance(calibration, CalibrationConfig):
        calibration = CalibrationConfig(shards=tuple(map(str, calibration)), max_tokens=1024)
    if out.exists() and any(out.iterdir()):
        raise CheckpointError(f"{out} exists and is not empty. Choose another folder or remove it first")
    model = load_model(checkpoint, device=resolve_device(device), dtype=dtype).requires_grad_(False)
    if not all(isinstance(module, Linear) for _, module in projections(model)):
        raise CheckpointError(f"{checkpoint}: is quantized. Prune the original checkpoint, and compress the result")
    batches, held_out = _samples(checkpoint, calibration, model)
    report = PruningReport(config.kind, loss_before=mean_loss(model, held_out))
    report.parameters_before = sum(parameter.numel() for parameter in model.parameters())
    if config.kind == "structured":
        _prune_structured(checkpoint, out, model, batches, config, report)
    else:
        report.zeros = write_masked(
            checkpoint, out, model, batches, pattern=config.kind, keep=config.keep, parts=config.parts
        )
        report.speed = "none: no kernel here skips zeros, and the folder has the same bytes"
    del model
    pruned = load_model(out, device=resolve_device(device), dtype=dtype)
    report.loss_after = mean_loss(pruned, held_out)
    report.parameters_after = sum(parameter.numel() for parameter in pruned.parameters())
    return report


def _samples(
    checkpoint: Path, calibration: CalibrationConfig, model: VLM
) -> tuple[list[ModelInputs], list[ModelInputs]]:
    """Batches to measure importance on, and batches to compare losses on: other ones, if the shards have more."""
    processor, vocab_size = Processor.load(checkpoint), model.config.language.vocab_size
    batches = load_batches(calibration, processor, vocab_size)
    try:
        return batches, load_batches(calibration, processor, vocab_size, skip=calibration.num_samples)
    except NoSamplesLeftError:
        logger.warning("the shards have no samples beyond those of calibration: losses are compared on the same ones")
        return batches, batches


# ------------------------------------------------------------------ structured


def _prune_structured(
    checkpoint: Path,
    out: Path,
    model: VLM,
    batches: Sequence[ModelInputs],
    config: PruningConfig,
    report: PruningReport,
) -> None:
    _check_heads(model.config, config)
    share = _share_of_layers(model, config)
    plans = {part: _plan_part(model, part, batches, config, share) for part in config.parts}
    smaller = smaller_config(model.config, plans)
    if smaller == model.config:
        raise ConfigError(
            f"no whole unit fits into the {1 - config.keep:.0%} to be removed. Lower --keep, or remove smaller units: "
            "--units channels"
        )
    report.kept = {part: sizes_of(smaller, part) for part in config.parts}
    report.speed = "faster by the products that are gone: the model is smaller"
    raw = describe_smaller(checkpoint, model.config, smaller)
    rename = slicer(model, plans)
    write_folder(checkpoint, out, raw, rename)


def _check_heads(model: ModelConfig, config: PruningConfig) -> None:
    if "heads" not in config.units:
        return
    if model.language.explicit_head_dim is None:
        raise ConfigError(
            "heads cannot be removed from this family: its head dim is hidden size / number of heads, so fewer heads "
            "are another model. Use --units channels, layers, or both"
        )
    if "vision" in config.parts and config.units == ("heads",):
        raise ConfigError("heads cannot be removed from a tower. Add --parts language, or other units")


def _share_of_layers(model: VLM, config: PruningConfig) -> float:
    """Share of the parameters of the pruned layers that stays, so that the model keeps `config.keep`."""
    blocks = [model.get_submodule(BLOCKS[part]) for part in config.parts]
    total = sum(parameter.numel() for parameter in model.parameters())
    pruned = sum(parameter.numel() for block in blocks for parameter in block.parameters())
    share = 1.0 - (1.0 - config.keep) * total / pruned
    if share <= 0.0:
        raise ConfigError(
            f"the layers of {' and '.join(config.parts)} have {pruned / total:.0%} of the parameters; without them "
            f"{1 - pruned / total:.0%} would remain. Use a --keep above that, or more --parts"
        )
    return share


def _plan_part(model: VLM, part: Part, batches: Sequence[ModelInputs], config: PruningConfig, keep: float) -> PartPlan:
    """Choose the units that a part keeps, the share `keep` of its parameters."""
    blocks = list(model.get_submodule(BLOCKS[part]))  # type: ignore[call-overload]
    names = {i: block_layers(model, f"{BLOCKS[part]}.{i}", block) for i, block in enumerate(blocks)}
    sizes = [sum(parameter.numel() for parameter in block.parameters()) for block in blocks]
    budget = keep * sum(sizes)
    plan = PartPlan(list(range(len(blocks))))
    others = [unit for unit in config.units if unit != "layers" and (unit, part) != ("heads", "vision")]
    if "layers" in config.units:
        plan.layers = _kept_layers(model, part, blocks, batches, keep, can_round_up=bool(others))
    if not others:
        return plan
    size = sum(sizes[i] for i in plan.layers)
    if size <= budget:
        return plan
    share = _share_of_units(model.config, part, size, len(plan.layers), budget, others)
    chosen = {i: names[i] for i in plan.layers}
    if "channels" in others:
        count = _multiple(share * _num_channels(model.config, part))
        scores = input_importance(model, [one.mlp_out for one in chosen.values()], batches, config.measure)
        plan.channels = {i: _top(scores[one.mlp_out], count) for i, one in chosen.items()}
    if "heads" in others and part == "language":
        plan.groups = _kept_groups(model, chosen, batches, config, share)
    return plan


def _kept_layers(
    model: VLM,
    part: Part,
    blocks: Sequence[Any],
    batches: Sequence[ModelInputs],
    keep: float,
    *,
    can_round_up: bool,
) -> list[int]:
    """Choose the layers to keep: those whose removal raises the loss most.

    With other units to remove, a layer goes only if all of it may.
    """
    exact = keep * len(blocks)
    count = math.ceil(exact) if can_round_up else round(exact)
    vision = model.config.vision
    protected = set(vision.feature_layers) if part == "vision" else set(range(len(vision.feature_layers)))
    losses = layer_importance(model, blocks, batches, protected)
    kept = sorted(range(len(blocks)), key=lambda i: losses[i], reverse=True)[: max(1, count, len(protected))]
    return sorted(kept)


def _kept_groups(
    model: VLM, chosen: Mapping[int, BlockLayers], batches: Sequence[ModelInputs], config: PruningConfig, share: float
) -> dict[int, Tensor]:
    language = model.config.language
    inputs_per_group = language.head_dim * language.num_heads // language.num_kv_heads
    scores = input_importance(
        model, [one.attention_out for one in chosen.values()], batches, config.measure, inputs_per_group
    )
    count = max(1, round(share * language.num_kv_heads))
    return {i: _top(scores[one.attention_out], count) for i, one in chosen.items()}


def _share_of_units(
    config: ModelConfig, part: Part, size: int, num_layers: int, budget: float, units: Sequence[Unit]
) -> float:
    """Share of channels and heads that stays, so that the layers have `budget` parameters."""
    removable = 0
    if "channels" in units:
        width = config.vision.hidden_size if part == "vision" else config.language.hidden_size
        num_matrices = _num_mlp_matrices(config, part)
        removable += num_matrices * width * _num_channels(config, part)
    if "heads" in units and part == "language":
        language = config.language
        heads = 2 * language.num_heads + 2 * language.num_kv_heads
        removable += heads * language.head_dim * language.hidden_size
    share = 1.0 - (size - budget) / max(1, num_layers * removable)
    if share <= 0.0:
        raise ConfigError(
            f"{part}: removing {' and '.join(units)} cannot bring its layers to {budget / size:.0%} of their "
            "parameters. Raise --keep, or add units: --units layers,channels"
        )
    return share


def _num_channels(config: ModelConfig, part: Part) -> int:
    return config.vision.intermediate_size if part == "vision" else config.language.intermediate_size


def _num_mlp_matrices(config: ModelConfig, part: Part) -> int:
    with torch.device("meta"):
        block: Any = VLM(config).get_submodule(f"{BLOCKS[part]}.0")
    return len(list(projections(block.mlp)))


def _multiple(count: float) -> int:
    return max(_CHANNEL_MULTIPLE, round(count / _CHANNEL_MULTIPLE) * _CHANNEL_MULTIPLE)


def _top(scores: Tensor, count: int) -> Tensor:
    """Indices of the highest scores, ascending."""
    return scores.topk(min(count, len(scores))).indices.sort().values
