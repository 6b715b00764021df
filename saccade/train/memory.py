"""Peak memory of a training step on a GPU or a CPU, by component.

    size = MicroBatchSize(tokens=16384, patches=36864)
    MemoryPlanner(config=config, world_size=8).plan(size).total_gib

Nothing is derived by hand. The real model and optimizer are built on the meta device: their tensors are the persistent
memory (parameters, masters, optimizer state). Activations, gradients, workspace and the loss are measured in a dry run
of a step (`dry_run.py`), whose phases a rank of a pipeline has in the order of its passes (`pipeline_memory.py`). What
the ranks of a sharded or replicated model add (gathered parameters, shards, buckets) is counted from the parameters of
each block. Memory that `torch.compile` saves is not modelled.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import torch

from saccade.device import DTYPES
from saccade.model.config import ModelConfig
from saccade.model.live_bytes import Bytes, LiveBytes, MetaCache, Phase, Phases, moments, plus
from saccade.model.shard import TensorRank
from saccade.model.vlm import VLM
from saccade.parallel_dims import SHARDS, ParallelDims
from saccade.train.dry_run import (
    KeptGradients,
    MicroBatchSize,
    combined,
    dry_batch,
    dry_run,
    model_blocks,
    renamed,
)
from saccade.train.gradient_compression import RESIDUAL_DTYPE
from saccade.train.memory_plan import COMPONENTS, GIB, RESIDUAL, MemoryPlan
from saccade.train.memory_weights import Weights, held_weights
from saccade.train.objectives.cross_entropy import CrossEntropy
from saccade.train.objectives.objective import Objective
from saccade.train.parallel_config import ParallelConfig, Recompute, Strategy
from saccade.train.parallelize import prepare_model, recompute
from saccade.train.parameter_groups import OptimizerConfig
from saccade.train.pipeline_memory import rank_phases
from saccade.train.pipeline_stages import TIED, PipelineStages, pipeline_stages
from saccade.train.stage_config import LoraConfig, QuantizationAwareConfig
from saccade.train.tensor_parallel import divide_model, dry_connect
from saccade.train.thin_model import ThinModel

CONTEXT_BYTES = GIB
"""Memory of a process outside torch's allocator: CUDA context, kernels, workspaces of cuBLAS and cuDNN."""
CPU_CONTEXT_BYTES = int(0.24 * GIB)
"""Memory of a process on a CPU for Python and its modules. Pages of library files are not counted: how many are mapped
depends on the page cache, and the system drops them when memory is needed."""
CPU_BF16_BYTES = GIB // 24
"""Kernels that oneDNN compiles for products in bf16."""
LOADER_BYTES = GIB // 8
"""Modules of the process that loader workers are forked from."""
WORKER_BYTES = GIB // 32
"""Memory of a loader worker itself."""
BUFFERS_PER_WORKER = 3
"""Micro-batches in shared memory per loader worker: running, queued and in use."""
NCCL_BYTES = GIB
"""Buffers of NCCL, if there is more than one rank."""
FRAGMENTATION = 0.05
"""Fraction of temporary memory lost to fragmentation, as micro-batches differ in size; none of persistent memory."""
CPU_FRAGMENTATION = 0.6
"""The same fraction on a CPU: the C library's allocator keeps freed blocks, and operations that a GPU fuses have
intermediate results."""
STREAMED_BYTES = GIB
"""An offloaded optimizer's copies in flight, in both directions."""
ACCUMULATED_BYTES = 4
"""Bytes per element of an accumulated gradient; see `train_state.py`."""

Extents = tuple[Recompute, Recompute]
"""Activation checkpointing of vision tower and decoder."""


@dataclass(frozen=True, kw_only=True)
class MemoryPlanner:
    """Plan the memory of one model and training configuration, for micro-batches of any size."""

    config: ModelConfig
    """The model."""
    world_size: int = 1
    """Number of ranks."""
    micro_batches_per_rank: int = 1
    """Micro-batches per rank and step."""
    dtype: Literal["bf16", "fp32"] = "bf16"
    """Compute dtype."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """Parallelism and activation checkpointing."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """Optimizer and parameter groups."""
    lora: LoraConfig | None = None
    """LoRA, if the stage uses it."""
    qat: QuantizationAwareConfig | None = None
    """Quantization-aware training, if the stage uses it."""
    device_type: Literal["cuda", "cpu"] = "cuda"
    """Where the model is trained. A CPU's memory also holds loader workers and the copy of the state for a save."""
    num_workers: int = 0
    """Loader workers, which take memory on a CPU."""
    has_average: bool = False
    """Whether an average of the trained weights is kept."""
    make_objective: Callable[[], Objective] = CrossEntropy
    """Makes the objective of a dry run, its frozen models on the meta device."""
    repeats_layers: bool = False
    """Whether layers of one kind are alike, so that one of each is run: all are trained, or frozen, in the same way."""
    stages: PipelineStages | None = None
    """The stages of a pipeline; None: there is none, or they are those of a run with the planned micro-batch."""
    pipeline_rank: int | None = None
    """The rank of a pipeline that is planned; None: the one that needs most memory."""
    _made: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """Dry runs, models and weights, shared by planners with other optimizers and ranks (`dataclasses.replace`)."""

    def plan(self, size: MicroBatchSize, extents: Extents | None = None) -> MemoryPlan:
        """Peak memory for a micro-batch. `extents`: activation checkpointing, overriding `parallel`."""
        extents = extents or (self.parallel.recompute_vision, self.parallel.recompute_language)
        if ranks := self._ranks(size, extents):
            return max((one.plan(size, extents) for one in ranks), key=lambda plan: plan.total_gib)
        share = self._share_of_rank(size)
        moment, temporary = max(self._moments(self._passes(share, extents)), key=lambda item: sum(item[1].values()))
        temporary |= {"micro-batch": self._input_bytes(share), "gathered parameters": self._gathered}
        temporary["activations of the decoder: gathered keys and values"] = self._gathered_keys(size, extents)
        allowance = self._allowance(sum(temporary.values()))
        parts = {**_by_component(temporary), **self._persistent(), "context and fragmentation": allowance}
        return MemoryPlan(
            parts={name: parts[name] for name in COMPONENTS if parts.get(name)},
            modules=temporary,
            moment=moment,
            setting=self._setting(size, *extents),
        )

    def gib_by_share(self, size: MicroBatchSize, extents: Extents) -> Callable[[float], float]:
        """Total memory by a micro-batch's share of this size, interpolated between dry runs of two sizes."""
        if ranks := self._ranks(size, extents):
            by_rank = [one.gib_by_share(size, extents) for one in ranks]
            return lambda share: max(gib(share) for gib in by_rank)
        half = MicroBatchSize(
            tokens=-(-size.tokens // 2), patches=size.patches // 2, loss_tokens=size.num_loss_tokens // 2
        )
        at_half, at_full = (self._temporary(of_size, extents) for of_size in (half, size))
        persistent = sum(self._persistent().values())

        def gib(share: float) -> float:
            weight = 2.0 * share - 1.0  # 0 at half the size, 1 at the full size
            temporary = max(a + weight * (b - a) for a, b in zip(at_half, at_full, strict=True))
            return (persistent + temporary + self._allowance(temporary)) / GIB

        return gib

    def step(self, size: MicroBatchSize, extents: Extents) -> Phases:
        """A dry run of a step of the whole model."""
        vision, language = (self._dry_run(size, extent) for extent in extents)
        return combined(vision, language)

    def _passes(self, size: MicroBatchSize, extents: Extents) -> Phases:
        """What the planned rank runs in a step."""
        step = self.step(size, extents)
        if self.stages is None or self.pipeline_rank is None:
            return step
        width = self.config.language.hidden_size * self._element
        tokens, image_tokens = size.tokens // self.dims.tensor, size.patches // self.config.vision.patches_per_token
        rows = [
            width * (tokens + self.stages.num_later_features(stage) * image_tokens) if stage else 0
            for stage in range(self.stages.last + 1)
        ]
        return rank_phases(step, self.stages, self.pipeline_rank, self.micro_batches_per_rank, rows)

    def _ranks(self, size: MicroBatchSize, extents: Extents) -> list["MemoryPlanner"]:
        """Planners of all ranks of a pipeline; none if there is no pipeline, or this is one of them."""
        if self.dims.pipeline == 1 or self.pipeline_rank is not None:
            return []
        parallel = replace(self.parallel, recompute_vision=extents[0], recompute_language=extents[1])
        stages = self.stages or pipeline_stages(self._model, size, parallel, self.dims.pipeline)
        return [replace(self, stages=stages, pipeline_rank=rank) for rank in range(self.dims.pipeline)]

    @cached_property
    def dims(self) -> ParallelDims:
        """The layout."""
        return self.parallel.dims(self.world_size)

    @cached_property
    def strategy(self) -> Strategy:
        """The parallelization strategy."""
        return self.parallel.strategy_of(self.dims)

    @property
    def num_parameters(self) -> int:
        """Parameters of a tensor rank, on all ranks of a pipeline together."""
        return sum(parameter.numel() for parameter in self._model.parameters())

    @property
    def _is_sharded(self) -> bool:
        return self.strategy in ("fsdp", "hsdp")

    @property
    def _num_shards(self) -> int:
        return self.dims.count(*SHARDS) if self._is_sharded else 1

    @property
    def _element(self) -> int:
        """Bytes of an element in the compute dtype."""
        return DTYPES[self.dtype].itemsize

    def _setting(self, size: MicroBatchSize, vision: Recompute, language: Recompute) -> str:
        ranks = f"{self.world_size} x {self.strategy}" if self.world_size > 1 else "1 rank"
        if self.pipeline_rank is not None:
            ranks += f", rank {self.pipeline_rank} of {self.stages}"
        return (
            f"{ranks}, {self.optimizer.kind}, {self.dtype}, a micro-batch of {size.tokens} tokens and "
            f"{size.patches} patches, recompute_vision {vision}, recompute_language {language}"
        )

    # -------------------------------------------------------------- on the meta device

    def _build(self, config: ModelConfig, dtype: torch.dtype) -> VLM:
        """A model on the meta device, with adapters and frozen parameters."""
        with torch.device("meta"), MetaCache():  # type: ignore[no-untyped-call]
            model = VLM(config).to(dtype)
            if self.dims.tensor > 1:
                divide_model(model, TensorRank(0, self.dims.tensor))
            prepare_model(model, self.optimizer, self.lora, self.qat, self.dtype)
        return model

    def _dry_run(self, size: MicroBatchSize, extent: Recompute) -> Phases:
        settings = (
            self.dtype,
            self.lora,
            self.qat,
            self.make_objective,
            self.optimizer.lrs,
            self.dims.tensor,
            self.parallel.compile,
        )
        key = repr(("step", *settings, self._kept_gradients, size, extent))
        if key not in self._made:
            thin = ThinModel.of(self.config)
            config = thin.config if self.repeats_layers else self.config
            # On a CPU the references compute in fp32, and keep results in fp32 for backward.
            model = self._build(config, torch.float32 if self.device_type == "cpu" else DTYPES[self.dtype])
            if self.dims.tensor > 1:
                dry_connect(model, self.dims.tensor, extent, is_compiled=self.parallel.compile)
            has_dropout = self.lora is not None and self.lora.dropout > 0.0
            for blocks in (model.vision.blocks, model.language.layers):
                recompute(blocks, extent, is_random=has_dropout)
            step = dry_run(model, dry_batch(model, size), self._kept_gradients, self.make_objective)
            self._made[key] = thin.repeated(step, lambda phase: phase.name, renamed) if self.repeats_layers else step
        found: Phases = self._made[key]
        return found

    @property
    def _kept_gradients(self) -> KeptGradients:
        if self._is_sharded:
            return "root"
        has_buckets = self.strategy == "ddp" and self.dims.pipeline == 1
        return "none" if self._accumulates_in_fp32 or has_buckets else "all"

    def _input_bytes(self, size: MicroBatchSize) -> int:
        """This micro-batch and the next one on the device; on a CPU those in the buffers of the workers."""
        num_batches = max(2, self._num_workers * BUFFERS_PER_WORKER)
        if self.pipeline_rank:  # images are for the first one
            size = replace(size, patches=0)
        return num_batches * sum(x.nbytes for x in dry_batch(self._model, size).tensors)

    @property
    def _num_workers(self) -> int:
        """Loader workers in the memory that is planned."""
        return self.num_workers if self.device_type == "cpu" else 0

    @cached_property
    def _model(self) -> VLM:
        """The model of all ranks of a pipeline, with its parameters as they are stored."""
        dtype = torch.float32 if self._is_sharded else DTYPES[self.dtype]
        key = repr(("model", dtype, self.dtype, self.lora, self.qat, self.optimizer.lrs, self.dims.tensor))
        if key not in self._made:
            self._made[key] = self._build(self.config, dtype)
        found: VLM = self._made[key]
        return found

    # -------------------------------------------------------------- persistent memory

    @cached_property
    def _weights(self) -> Weights:
        settings = (self.dtype, self.lora, self.qat, self.optimizer, self.dims.tensor, self._is_sharded)
        key = repr(("weights", *settings, self.has_average, self.device_type, self._own_layers))
        if key not in self._made:
            self._made[key] = held_weights(
                self._model, self.optimizer, self._is_own,
                has_average=self.has_average, has_saved_copy=self.device_type == "cpu",
            )  # fmt: skip
        found: Weights = self._made[key]
        names = [name for name in model_blocks(self._model) if self._is_own(f"{name}.")]
        return found._replace(blocks=dict(zip(names, found.blocks.values(), strict=True)))

    @property
    def _own_layers(self) -> object:
        """What decides which parameters the planned rank has; if layers are alike, their number is enough."""
        if self.stages is None or self.pipeline_rank is None:
            return None
        own = [*range(self.pipeline_rank, self.stages.last + 1, self.stages.num_ranks)]
        layers = [self.stages.layers(stage) for stage in own]
        ends = self.pipeline_rank == 0, self.pipeline_rank == self.stages.num_ranks - 1
        return (*ends, sum(map(len, layers)) if self.repeats_layers else layers)

    def _is_own(self, name: str) -> bool:
        """Whether the planned rank has a parameter, by its name or that of its block with a dot."""
        if self.stages is None or self.pipeline_rank is None:
            return True
        is_copy = name == TIED and self.stages.is_head_tied and self.pipeline_rank == self.stages.num_ranks - 1
        return is_copy or self.stages.rank_of(name) == self.pipeline_rank

    def _persistent(self) -> Mapping[str, int]:
        held = {part: size // self._num_shards for part, size in self._weights.persistent.items()}
        always = {RESIDUAL: self._residual_bytes(self._weights.trained), "frozen models": self._frozen_bytes}
        if self._is_sharded and self.parallel.offload:
            held = {}
        elif self.optimizer.offload:
            held = {"parameters": held["parameters"], "moments": STREAMED_BYTES}
        return {**held, **always}

    @cached_property
    def _frozen_bytes(self) -> int:
        """Bytes of models that the objective holds; every rank has all of them."""
        live = LiveBytes()
        with live:
            objective = self.make_objective()
            live.start_phase("made")
        del objective
        return sum(live.phases()[0].change.values())

    def _residual_bytes(self, trained: int) -> int:
        """Bytes of the error feedback of compressed gradients: unsharded, on every rank."""
        is_kept = self._is_sharded and self.parallel.rounding_of_shards is not None and self._num_shards > 1
        return trained * RESIDUAL_DTYPE.itemsize if is_kept else 0

    # -------------------------------------------------------------- temporary memory

    def _temporary(self, size: MicroBatchSize, extents: Extents) -> list[int]:
        """Temporary memory of each phase."""
        share = self._share_of_rank(size)
        throughout = self._input_bytes(share) + self._gathered + self._gathered_keys(size, extents)
        return [sum(parts.values()) + throughout for _, parts in self._moments(self.step(share, extents))]

    def _share_of_rank(self, size: MicroBatchSize) -> MicroBatchSize:
        """What one of the ranks that share a micro-batch computes; each has as many tokens as the others."""
        if (ranks := self.dims.context) == 1:
            return size
        tokens, patches = -(-size.tokens // ranks), -(-size.patches // ranks)
        return MicroBatchSize(tokens=tokens, patches=patches, loss_tokens=min(tokens, size.num_loss_tokens))

    def _gathered_keys(self, size: MicroBatchSize, extents: Extents) -> int:
        """Bytes of the keys and values of all context ranks: of every layer until backward, or of one if it is run
        again; and twice those of a layer while they are gathered or their gradients reduced."""
        if self.dims.context == 1:
            return 0
        language = self.config.language
        num_layers = 1 if extents[1] == "full" else language.num_layers
        of_token = 2 * language.num_kv_heads * language.head_dim * self._element
        return size.tokens * of_token * (num_layers + 2)

    def _allowance(self, temporary: float) -> int:
        """Bytes for context and fragmentation."""
        if self.device_type == "cpu":
            kernels = CPU_BF16_BYTES if self.dtype == "bf16" else 0
            loader = LOADER_BYTES + self.num_workers * WORKER_BYTES if self.num_workers else 0
            return CPU_CONTEXT_BYTES + kernels + loader + int(CPU_FRAGMENTATION * temporary)
        outside = CONTEXT_BYTES + (NCCL_BYTES if self.world_size > 1 else 0)
        return outside + int(FRAGMENTATION * temporary)

    def _moments(self, step: Phases) -> Iterator[tuple[str, Bytes]]:
        """Temporary memory in each phase: (name, bytes by component and module)."""
        gradients = self._earlier_gradients
        for phase, held in moments(step):
            added = {
                "gradients": gradients,
                "workspace": self._added_workspace(phase),
                "frozen models": -held.get("frozen models", 0),
            }
            yield phase.name, plus(held, added)
            if phase.block is not None and self._is_sharded and not self._earlier_gradients:
                gradients += self._reduced_gradients(self._weights.blocks[phase.block].trained)

    def _added_workspace(self, phase: Phase) -> int:
        """Workspace of the optimizer, and with fsdp of reducing gradients.

        Reducing takes unsharded gradients and the reduce-scatter buffer, of this block and the previous one.
        """
        buffers = 0
        if self._is_sharded and phase.block is not None:
            trained = self._weights.blocks[phase.block].trained
            buffers = 2 * trained * (self._element + self._reduce_element)
            if self.parallel.rounding_of_shards is not None:  # values rounded and received, in fp32
                buffers += 2 * trained * self._reduce_element
        if phase.name == "the update":
            root = self._weights.root.trained * self._reduce_element if self._is_sharded else 0
            buffers = max(root, self._weights.update)
        return buffers

    @property
    def _reduce_element(self) -> int:
        return DTYPES[self.parallel.reduce_dtype].itemsize

    @property
    def _accumulates_in_fp32(self) -> bool:
        """Whether gradients accumulate in fp32, whatever the parameters' dtype."""
        return self.micro_batches_per_rank > 1 and not self._is_sharded

    @property
    def _earlier_gradients(self) -> int:
        """Bytes of gradients when backward starts: those of earlier micro-batches, and DDP's buckets."""
        trained = self._weights.trained
        if not self._is_sharded:
            buckets = trained * self._element if self.strategy == "ddp" and self.dims.pipeline == 1 else 0
            return buckets + (trained * ACCUMULATED_BYTES if self._accumulates_in_fp32 else 0)
        if self.micro_batches_per_rank == 1:
            return 0
        return (
            self._reduced_gradients(trained)
            if self.parallel.reduce_each_micro_batch
            else trained * self._reduce_element
        )

    def _reduced_gradients(self, trained: int) -> int:
        """Bytes of fsdp's gradients as the optimizer sees them, in fp32 shards."""
        return 0 if self.parallel.offload else trained * 4 // self._num_shards

    @property
    def _gathered(self) -> int:
        """Bytes of fsdp's unsharded parameters: root, this block, the next one, and the all-gather buffer."""
        if not self._is_sharded:
            return 0
        inner = [block.total for block in self._weights.blocks.values()] or [0]
        held = 3 * max(inner) if self.parallel.reshard_after_forward else sum(inner) + max(inner)
        return (self._weights.root.total + held) * self._element


def _by_component(held: Bytes) -> Bytes:
    components: Bytes = {}
    for kind, size in held.items():
        component = kind.partition(":")[0]
        components[component] = components.get(component, 0) + size
    return components
