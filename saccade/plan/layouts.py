"""The best layouts of a training run on a cluster: every possible one is priced, and why it loses is said.

    packed sequences of ragged data -> a recorded step for each tensor, context and activation checkpointing
    -> times of its operations -> timeline -> step of each layout -> the fastest that fits

A recorded step has the same operations for any number of shards and copies; the links that its collectives use differ.
Pipeline parallelism is not recorded: the operations of a step are cut into the stages that a run has, which wait for
one another as the formula of 1F1B says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, lru_cache
from typing import Any, NamedTuple, TypeGuard

import numpy as np
import torch

from saccade.model.config import ModelConfig
from saccade.model.vlm import VLM
from saccade.parallel_dims import ParallelDims
from saccade.plan.cluster import Cluster, Job, candidates
from saccade.plan.gpus import Gpu
from saccade.plan.prices import HOST_S, KernelPrices, LinkPrices, Segments
from saccade.plan.ragged import Floats, PackedShape, draw_sequences, slowest_rank, typical
from saccade.plan.stages import stage_operations
from saccade.plan.timeline import Timeline, simulate
from saccade.train.dry_run import MicroBatchSize
from saccade.train.flops import forward_flops, training_flops
from saccade.train.memory import Extents, MemoryPlanner
from saccade.train.parallel_config import ParallelConfig, Recompute
from saccade.train.parallelize import prepare_model
from saccade.train.parameter_groups import PARTS, OptimizerConfig
from saccade.train.pipeline_stages import PipelineStages, pipeline_stages
from saccade.train.recorded_step import (
    Attention,
    Collective,
    Operation,
    SequenceShape,
    StepSettings,
    combined_operations,
    record_step,
)

EXTENTS: tuple[Extents, ...] = (
    ("none", "none"), ("selective", "none"), ("full", "none"),
    ("selective", "selective"), ("full", "selective"), ("full", "full"),
)  # fmt: skip
"""Activation checkpointing of tower and decoder, the least additional compute first."""
Seconds = Callable[[Operation], float]
Records = dict[Recompute, list[Operation]]
COMPUTE, WAITING, BUBBLE, UPDATE = "compute", "slowest rank", "bubble", "update"
"""Parts of a step, next to the exposed time of each kind of collective."""


@dataclass(frozen=True, kw_only=True)
class LayoutPlan:
    """One layout: what it costs, or why it is not possible."""

    dims: ParallelDims
    """The layout."""
    micro_batches: int = 0
    """Packed sequences of a data rank and step."""
    extents: Extents = ("none", "none")
    """Activation checkpointing of tower and decoder."""
    memory_gib: float = 0.0
    """Peak memory of a GPU."""
    parts: dict[str, float] = field(default_factory=dict)
    """Seconds of a step: they add up to it."""
    mfu: float = 0.0
    """Share of the GPUs' peak that the model's FLOPs are, without recomputation."""
    tokens_per_s: float = 0.0
    """On all GPUs."""
    timeline: Timeline = field(default_factory=Timeline)
    """A micro-batch of the slowest stage."""
    collectives: tuple[Collective, ...] = ()
    """Collectives of a micro-batch, over all stages."""
    reason: str = ""
    """Why it is not possible, or loses."""

    @property
    def is_possible(self) -> bool:
        """Whether it fits, and every rank has data."""
        return bool(self.parts)

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return sum(self.parts.values())

    @property
    def exposed_s(self) -> float:
        """Seconds of a step in which computation waits for communication."""
        return sum(seconds for part, seconds in self.parts.items() if part not in (COMPUTE, WAITING, BUBBLE, UPDATE))


class RaggedPrices(NamedTuple):
    """Seconds of what differs between packed sequences."""

    patch: float
    """A patch in the tower."""
    image_pair: float
    """Two patches that attend to each other."""
    pair: float
    """Two tokens that attend to each other."""
    recorded: float
    """All of these in the recorded sequence."""


class LayoutPlanner:
    """Plans the layouts of a job on a cluster."""

    def __init__(self, job: Job, cluster: Cluster) -> None:
        self.job, self.cluster = job, cluster
        self._made: dict[str, Any] = {}
        self._recorded: dict[tuple[int, int], tuple[Records, Records]] = {}
        """By tensor and context ranks: records by the activation checkpointing of their tower, and of their decoder."""

    @cached_property
    def sequences(self) -> list[PackedShape]:
        """Packed sequences of the data."""
        return draw_sequences(self.job.config, seq_len=self.job.seq_len, patches=self.job.patches)

    @cached_property
    def typical(self) -> PackedShape:
        """The packed sequence that is recorded."""
        return typical(self.sequences)

    def plan(self) -> list[LayoutPlan]:
        """All layouts: the fastest first, then those that are not possible."""
        found = [self.plan_layout(dims) for dims in candidates(self.job, self.cluster)]
        possible = sorted((one for one in found if one.is_possible), key=lambda one: one.step_s)
        return [
            *possible[:1],
            *(replace(one, reason=_why_slower(one, possible[0])) for one in possible[1:]),
            *(one for one in found if not one.is_possible),
        ]

    # -------------------------------------------------------------- one layout

    def plan_layout(self, dims: ParallelDims) -> LayoutPlan:
        """The plan of one layout."""
        num_data = dims.count("replicate", "shard")
        if num_data > self.job.global_batch_size:
            reason = f"{num_data} data ranks, {self.job.global_batch_size} sequences per step"
            return LayoutPlan(dims=dims, reason=reason)
        micro_batches = -(-self.job.global_batch_size // num_data)
        if dims.pipeline > 1 and micro_batches < dims.pipeline:
            return LayoutPlan(dims=dims, reason=f"{micro_batches} micro-batches do not fill {dims.pipeline} stages")
        least = 0.0
        for extents in EXTENTS:
            gib = self._memory_gib(dims, extents, micro_batches)
            if gib <= self.cluster.gpu.gib:
                return self._timed(LayoutPlan(dims=dims, micro_batches=micro_batches, extents=extents, memory_gib=gib))
            least = min(least, gib) if least else gib
        return LayoutPlan(dims=dims, memory_gib=least, reason=f"does not fit: {least:.0f} GiB at least")

    def _memory_gib(self, dims: ParallelDims, extents: Extents, micro_batches: int) -> float:
        """Peak memory of the rank that needs most."""
        return self._memory_planner(dims, micro_batches).plan(self._largest, extents).total_gib

    @cached_property
    def _largest(self) -> MicroBatchSize:
        most = max(one.num_patches for one in self.sequences)
        return MicroBatchSize(tokens=self.job.seq_len, patches=most)

    @cache  # noqa: B019  a planner lives as long as its command
    def _memory_planner(self, dims: ParallelDims, micro_batches: int) -> MemoryPlanner:
        parallel = ParallelConfig(
            pipeline=dims.pipeline, replicate=dims.replicate, shard=dims.shard, context=dims.context, tensor=dims.tensor
        )
        return MemoryPlanner(
            config=self.job.config, world_size=dims.size, parallel=parallel,
            micro_batches_per_rank=micro_batches, repeats_layers=True, _made=self._made,
        )  # fmt: skip

    def _stages(self, num_ranks: int, extents: Extents) -> PipelineStages:
        """The stages that a run has."""
        parallel = ParallelConfig(recompute_vision=extents[0], recompute_language=extents[1])
        return pipeline_stages(meta_model(self.job.config), self._largest, parallel, num_ranks)

    def _timed(self, plan: LayoutPlan) -> LayoutPlan:
        """The plan with the times of a step."""
        dims, micro_batches = plan.dims, plan.micro_batches
        kernels, links = (
            self._kernel_prices(dims.context, dims.tensor),
            LinkPrices(self.cluster.gpu, self.cluster.network, dims),
        )
        operations = self._operations(dims, plan.extents)
        step = [one for one in operations if one.phase != "the update"]
        seconds_of = self._seconds(dims.context, dims.tensor)
        stages = [step]
        if dims.pipeline > 1:
            stages = stage_operations(step, self._stages(dims.pipeline, plan.extents))
        timelines = [simulate(stage, seconds_of, links.seconds) for stage in stages]
        slowest = max(timelines, key=lambda one: one.end)
        waiting = self._slowest_rank(step, seconds_of, dims, micro_batches) / len(stages)
        parts = {COMPUTE: slowest.compute * micro_batches, WAITING: waiting * micro_batches}
        parts |= {name: seconds * micro_batches for name, seconds in slowest.exposed.items()}
        if dims.pipeline > 1:
            sent = self._boundary_bytes(dims)
            micro_s = slowest.end + waiting
            parts[BUBBLE] = (dims.pipeline - 1) * (micro_s + 2 * links.peer_seconds(sent, "pipeline"))
        update = [one for one in operations if one.phase == "the update"]
        num_parameters = self._memory_planner(dims, micro_batches).num_parameters
        own = num_parameters / dims.count("shard", "context", "pipeline")
        parts[UPDATE] = simulate(update, seconds_of, links.seconds).end + kernels.update_seconds(own) + HOST_S
        step_s, tokens = sum(parts.values()), self._tokens_of_step
        peak = self.cluster.gpu.bf16
        assert peak is not None, "checked by Cluster"
        return replace(
            plan, parts=parts, timeline=slowest, tokens_per_s=tokens / step_s,
            mfu=self._flops_of_step / (step_s * self.cluster.num_gpus * peak),
            collectives=tuple(one for one in step if isinstance(one, Collective)),
        )  # fmt: skip

    @cache  # noqa: B019
    def _seconds(self, num_context: int, num_tensor: int) -> Seconds:
        """The price of each operation, computed once."""
        return cache(self._kernel_prices(num_context, num_tensor).seconds)

    def _kernel_prices(self, num_context: int, num_tensor: int) -> KernelPrices:
        shape, pairs = self.typical.shape, self._shares(num_context, num_tensor)[:, 1]
        images = meta_model(self.job.config).vision.image_lengths(shape.grids)
        return KernelPrices(
            gpu=self.cluster.gpu, decoder=Segments(shape.lengths, True), tower=Segments(images, False),
            num_context=num_context, tower_share=float(pairs[0] / max(pairs.sum(), 1.0)),
        )  # fmt: skip

    def _operations(self, dims: ParallelDims, extents: Extents) -> list[Operation]:
        """The recorded step of two shards and two copies, with the bytes and collectives of this layout."""
        if dims.count("replicate", "shard", "context") == 1:
            return record_step(self._settings(extents), dims, self.typical.shape)
        return [
            one._replace(num_bytes=one.num_bytes * 2 // dims.shard) if _is_between_copies(one) else one
            for one in self._recorded_step(dims.tensor, dims.context, extents)
            if dims.replicate > 1 or not _is_between_copies(one)
        ]

    @cache  # noqa: B019
    def _recorded_step(self, num_tensor: int, num_context: int, extents: Extents) -> list[Operation]:
        """A step on two copies of two shards: composed of earlier ones if these ran tower and decoder like this."""
        towers, decoders = self._recorded.setdefault((num_tensor, num_context), ({}, {}))
        vision, language = extents
        if vision in towers and language in decoders:
            return combined_operations(towers[vision], decoders[language])
        dims = ParallelDims(replicate=2, shard=2, context=num_context, tensor=num_tensor)
        operations = record_step(self._settings(extents), dims, self.typical.shape)
        towers[vision] = decoders[language] = operations
        return operations

    def _settings(self, extents: Extents) -> StepSettings:
        parallel = ParallelConfig(recompute_vision=extents[0], recompute_language=extents[1])
        return StepSettings(config=self.job.config, parallel=parallel)

    def _slowest_rank(
        self, operations: Sequence[Operation], seconds_of: Seconds, dims: ParallelDims, micro_batches: int
    ) -> float:
        """Seconds by which the slowest rank of a micro-batch exceeds the recorded one: images and lengths differ."""
        ranks = dims.context, dims.tensor
        prices = self._ragged_prices(operations, seconds_of, dims)
        shares = self._shares_of_sequences(*ranks)

        def seconds(sequence: PackedShape) -> float:
            of_ranks = shares[id(sequence)] @ np.array([prices.patch, prices.image_pair])
            return float(of_ranks.max()) + prices.pair * sequence.pairs

        num_data = dims.count("replicate", "shard")
        slowest = slowest_rank(self.sequences, seconds, num_ranks=num_data, num_micro_batches=micro_batches)
        return slowest - prices.recorded

    def ragged_prices_of(self, plan: LayoutPlan) -> RaggedPrices:
        """What images and lengths cost in the step of a plan."""
        seconds_of = self._seconds(plan.dims.context, plan.dims.tensor)
        return self._ragged_prices(self._operations(plan.dims, plan.extents), seconds_of, plan.dims)

    def _ragged_prices(self, operations: Sequence[Operation], seconds_of: Seconds, dims: ParallelDims) -> RaggedPrices:
        """What images and lengths cost in a recorded step."""
        spent = {"tower": 0.0, "images": 0.0, "decoder": 0.0}
        for one in operations:
            is_tower, is_attention = " of vision." in one.phase, isinstance(one, Attention)
            if is_tower or is_attention:
                part = "decoder" if not is_tower else "images" if is_attention else "tower"
                spent[part] += seconds_of(one)
        num_patches, num_pairs = np.maximum(self._shares(dims.context, dims.tensor)[0], 1)
        return RaggedPrices(
            patch=spent["tower"] / num_patches, image_pair=spent["images"] / num_pairs,
            pair=spent["decoder"] / max(self.typical.pairs, 1.0), recorded=sum(spent.values()),
        )  # fmt: skip

    @cache  # noqa: B019
    def _shares_of_sequences(self, num_context: int, num_tensor: int) -> dict[int, Floats]:
        return {id(one): one.shares(num_context, num_tensor) for one in self.sequences}

    def _shares(self, num_context: int, num_tensor: int) -> Floats:
        return self.typical.shares(num_context, num_tensor)

    def _boundary_bytes(self, dims: ParallelDims) -> float:
        tokens = self.job.seq_len / dims.count("context", "tensor")
        return tokens * self.job.config.language.hidden_size * 2

    @cached_property
    def _tokens_of_step(self) -> float:
        tokens = sum(one.shape.num_tokens for one in self.sequences) / len(self.sequences)
        return tokens * self.job.global_batch_size

    @cached_property
    def _flops_of_step(self) -> float:
        total = 0.0
        for one in self.sequences:
            shape = one.shape
            forward = forward_flops(self.job.config, shape.lengths, shape.grids, shape.num_loss_tokens)
            total += sum(training_flops(forward, PARTS, tied_head=self.job.config.tied_head))
        return total / len(self.sequences) * self.job.global_batch_size


def lone_step_s(settings: StepSettings, shape: SequenceShape, gpu: Gpu) -> float:
    """Seconds of a step of one micro-batch on one GPU."""
    with torch.device("meta"):
        model = VLM(settings.config)
        prepare_model(model, OptimizerConfig(), settings.lora, None, settings.dtype)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    prices = KernelPrices(
        gpu=gpu,
        decoder=Segments(shape.lengths, True),
        tower=Segments(model.vision.image_lengths(shape.grids), False),
    )
    operations = record_step(settings, ParallelDims(), shape)
    return sum(map(prices.seconds, operations)) + prices.update_seconds(trained) + HOST_S


def _is_between_copies(operation: Operation) -> TypeGuard[Collective]:
    return isinstance(operation, Collective) and operation.axes == ("replicate",)


def _why_slower(plan: LayoutPlan, best: LayoutPlan) -> str:
    """The part of a step that costs most more than in the best layout."""
    names = dict.fromkeys([*plan.parts, *best.parts])
    more = {name: plan.parts.get(name, 0.0) - best.parts.get(name, 0.0) for name in names}
    worst = max(more, key=lambda name: more[name])
    return f"{worst} +{more[worst] * 1e3:.0f} ms"


@lru_cache(maxsize=4)
def meta_model(config: ModelConfig) -> VLM:
    """The model on the meta device."""
    with torch.device("meta"):
        return VLM(config)
