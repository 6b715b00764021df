"""Which layers each stage of a pipeline has, and the part of a model that one rank keeps.

Stages are split by counted FLOPs of a full micro-batch, forward and backward with what is computed again, unless the
recipe says how many layers each has (`pipeline_layers`). The first stage has the vision tower, the projector and the
embedding, the last one the final norm and the head. A tied head is a second copy of the embedding on the last rank:
`Pipeline` sums the gradients of both, so they stay equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import nn

from saccade.errors import ConfigError
from saccade.model.vlm import VLM
from saccade.train.dry_run import MicroBatchSize, image_grids
from saccade.train.flops import forward_flops, trained_parts, training_flops
from saccade.train.parallel_config import ParallelConfig, Recompute
from saccade.train.pipeline_schedule import Schedule, plan_schedule, split_layers
from saccade.train.thin_model import place

TIED = "language.embed_tokens.weight"
"""The parameter that a tied head shares with the embedding."""
_AGAIN: Mapping[Recompute, float] = {"none": 0.0, "selective": 0.0, "full": 1.0}
"""Forward passes that activation checkpointing adds; an MLP alone counts as none."""


@dataclass(frozen=True)
class PipelineStages:
    """The stages of a pipeline. Stage s is chunk s // num_ranks of rank s % num_ranks."""

    bounds: tuple[int, ...]
    """Stage s has the decoder layers bounds[s] .. bounds[s + 1] - 1."""
    num_ranks: int
    is_head_tied: bool
    num_feature_layers: int = 0
    """First layers that image features are added to."""
    costs: tuple[float, ...] = ()
    """Counted cost of each stage as a share of all; empty if the layers were given."""
    defers_weights: bool = False
    """Whether gradients of weights are computed after those of activations: the schedule is zero-bubble."""

    @property
    def last(self) -> int:
        """The last stage."""
        return len(self.bounds) - 2

    @property
    def num_chunks(self) -> int:
        """Stages of a rank."""
        return (self.last + 1) // self.num_ranks

    def schedule(self, num_micro_batches: int) -> Schedule:
        """The passes of a step."""
        return plan_schedule(self.num_ranks, self.num_chunks, num_micro_batches, defers_weights=self.defers_weights)

    def layers(self, stage: int) -> range:
        """Decoder layers of a stage."""
        return range(self.bounds[stage], self.bounds[stage + 1])

    def num_later_features(self, stage: int) -> int:
        """Layers from this stage on that image features are added to: a stage is given the features of these."""
        return max(0, self.num_feature_layers - self.bounds[stage])

    def stage_of(self, name: str) -> int:
        """The stage that has a parameter, by its name; for a tied one the first."""
        if name.startswith("language.layers."):
            layer = int(name.split(".")[2])
            return next(stage for stage in range(self.last + 1) if layer in self.layers(stage))
        return self.last if name.startswith(("language.norm.", "head.")) else 0

    def stage_of_phase(self, phase: str) -> int:
        """The stage that runs a phase of a step, see `dry_run.py`."""
        at = place(phase)
        if at is not None and at[1] == "language.layers":
            return next(stage for stage in range(self.last + 1) if at[2] in self.layers(stage))
        return self.last if phase == "the loss" else 0

    def rank_of(self, name: str) -> int:
        """The rank that has a parameter."""
        return self.stage_of(name) % self.num_ranks

    def __str__(self) -> str:
        sizes = [len(self.layers(stage)) for stage in range(self.last + 1)]
        shares = f", counted cost {', '.join(f'{cost:.0%}' for cost in self.costs)}" if self.costs else ""
        return f"{self.last + 1} stages with {', '.join(map(str, sizes))} layers{shares}"


def pipeline_stages(model: VLM, size: MicroBatchSize, parallel: ParallelConfig, num_ranks: int) -> PipelineStages:
    """Split a model on the meta device, prepared for training, over the ranks of a pipeline.

    `size`: a full micro-batch.
    """
    num_layers, num_stages = model.config.language.num_layers, num_ranks * parallel.num_chunks
    if num_layers < num_stages - 2:
        raise ConfigError(
            f"{num_layers} layers cannot be divided over {num_stages} pipeline stages: all but the first and the last "
            f"need one. Use parallel.pipeline = {max(2, (num_layers + 2) // parallel.num_chunks)} or less"
        )
    features = model.config.vision.feature_sets - 1
    if (given := parallel.pipeline_layers) is not None:
        bounds = _given_bounds(given, num_layers, num_stages)
        return PipelineStages(bounds, num_ranks, model.config.tied_head, features, (), parallel.defers_weights)
    first, layer, last = _costs(model, size, parallel)
    bounds = split_layers(first, [layer] * num_layers, last, num_stages)
    costs = [layer * (stop - start) for start, stop in pairwise(bounds)]
    costs[0] += first
    costs[-1] += last
    shares = tuple(cost / sum(costs) for cost in costs)
    return PipelineStages(bounds, num_ranks, model.config.tied_head, features, shares, parallel.defers_weights)


def _given_bounds(layers: tuple[int, ...], num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Bounds of stages whose numbers of layers are given."""
    if len(layers) != num_stages or sum(layers) != num_layers:
        raise ConfigError(
            f"pipeline_layers has {len(layers)} stages with {sum(layers)} layers, the pipeline has {num_stages} stages "
            f"and the model {num_layers} layers. Give {num_stages} numbers that add up to {num_layers}"
        )
    if any(size < (stage not in (0, num_stages - 1)) for stage, size in enumerate(layers)):
        raise ConfigError("pipeline_layers: only the first and the last stage may have no layer. Move one there")
    return tuple(sum(layers[:stage]) for stage in range(num_stages + 1))


def _costs(model: VLM, size: MicroBatchSize, parallel: ParallelConfig) -> tuple[float, float, float]:
    """FLOPs of a full micro-batch: tower and projector, a decoder layer, the head."""
    grids = image_grids(model, size.patches)
    forward = forward_flops(model.config, [size.tokens], grids)
    total = training_flops(forward, trained_parts(model), tied_head=model.config.tied_head)
    vision = total.vision + _AGAIN[parallel.recompute_vision] * forward.vision
    language = total.language + _AGAIN[parallel.recompute_language] * forward.language
    return vision + total.projector, language / model.config.language.num_layers, total.head


class _NoTower(nn.Module):
    """The vision tower of a rank without one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList()
        self.drop_path = 0.0


def keep_stages(model: VLM, stages: PipelineStages, rank: int) -> None:
    """Remove what other ranks of a pipeline have from a model on the meta device. Names stay as they are."""
    parts: dict[str, Any] = {}
    if rank != 0:
        parts = {"vision": _NoTower(), "projector": nn.Module()}
    for name, module in parts.items():
        setattr(model, name, module)
    is_last = rank == stages.num_ranks - 1
    if not is_last:
        del model.head, model.language.norm
    if rank != 0 and not (is_last and stages.is_head_tied):
        del model.language.embed_tokens
    own = {layer for chunk in range(stages.num_chunks) for layer in stages.layers(chunk * stages.num_ranks + rank)}
    for layer in range(model.config.language.num_layers):
        if layer not in own:
            del model.language.layers._modules[str(layer)]
