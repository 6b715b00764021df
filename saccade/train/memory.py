"""Peak memory of a training step on a GPU or a CPU, by component.

    size = MicroBatchSize(tokens=16384, patches=36864)
    MemoryPlanner(config=config, world_size=8).plan(size).total_gib

Nothing is derived by hand. The real model and optimizer are built on the meta device: their tensors are the persistent
memory (parameters, masters, optimizer state). Activations, gradients, workspace and the loss are measured in a dry run
of a step (`dry_run.py`). What the ranks of a sharded or replicated model add (gathered parameters, shards, buckets) is
counted from the parameters of each block. Memory that `torch.compile` saves is not modelled.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from saccade.device import DTYPES
from saccade.kernels import launch
from saccade.model.config import ModelConfig
from saccade.model.live_bytes import Bytes, LiveBytes, MetaCache, Phase, Phases, moments, peak_bytes, plus
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
)
from saccade.train.gradient_compression import RESIDUAL_DTYPE
from saccade.train.memory_plan import COMPONENTS, GIB, RESIDUAL, MemoryPlan
from saccade.train.objectives.cross_entropy import CrossEntropy
from saccade.train.objectives.objective import Objective
from saccade.train.optimizer import Optimizer, build_optimizer
from saccade.train.parallel_config import ParallelConfig, Recompute, Strategy
from saccade.train.parallelize import prepare_model, recompute
from saccade.train.parameter_groups import OptimizerConfig
from saccade.train.stage_config import LoraConfig, QuantizationAwareConfig
from saccade.train.tensor_parallel import divide_model, dry_connect

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


class _Elements(NamedTuple):
    """Parameters of a block, or of all that is outside the blocks."""

    total: int
    trained: int


class _Weights(NamedTuple):
    """Persistent memory of one rank, and the parameters of each block."""

    persistent: Mapping[str, int]
    update: int
    """Workspace of the optimizer."""
    blocks: Mapping[str, _Elements]
    root: _Elements
    """Parameters outside the blocks."""

    @property
    def trained(self) -> int:
        return self.root.trained + sum(block.trained for block in self.blocks.values())


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
    _steps: dict[str, Phases] = field(default_factory=dict, repr=False, compare=False)
    """Earlier dry runs, shared by planners with other optimizers and ranks (`dataclasses.replace`)."""

    def plan(self, size: MicroBatchSize, extents: Extents | None = None) -> MemoryPlan:
        """Peak memory for a micro-batch. `extents`: activation checkpointing, overriding `parallel`."""
        extents = extents or (self.parallel.recompute_vision, self.parallel.recompute_language)
        share = self._share_of_rank(size)
        moment, temporary = max(self._moments(self.step(share, extents)), key=lambda item: sum(item[1].values()))
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
        """A dry run of a step."""
        vision, language = (self._dry_run(size, extent) for extent in extents)
        return combined(vision, language)

    @cached_property
    def dims(self) -> ParallelDims:
        """The layout."""
        return self.parallel.dims(self.world_size)

    @cached_property
    def strategy(self) -> Strategy:
        """The parallelization strategy."""
        return self.parallel.strategy_of(self.dims)

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
        return (
            f"{ranks}, {self.optimizer.kind}, {self.dtype}, a micro-batch of {size.tokens} tokens and "
            f"{size.patches} patches, recompute_vision {vision}, recompute_language {language}"
        )

    # -------------------------------------------------------------- on the meta device

    def _build(self, dtype: torch.dtype) -> VLM:
        """The model on the meta device, with adapters and frozen parameters."""
        with torch.device("meta"), MetaCache():  # type: ignore[no-untyped-call]
            model = VLM(self.config).to(dtype)
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
        key = repr((*settings, self._kept_gradients, size, extent))
        if key not in self._steps:
            # On a CPU the references compute in fp32, and keep results in fp32 for backward.
            model = self._build(torch.float32 if self.device_type == "cpu" else DTYPES[self.dtype])
            if self.dims.tensor > 1:
                dry_connect(model, self.dims.tensor, extent, is_compiled=self.parallel.compile)
            has_dropout = self.lora is not None and self.lora.dropout > 0.0
            for blocks in (model.vision.blocks, model.language.layers):
                recompute(blocks, extent, is_random=has_dropout)
            self._steps[key] = dry_run(model, dry_batch(model, size), self._kept_gradients, self.make_objective)
        return self._steps[key]

    @property
    def _kept_gradients(self) -> KeptGradients:
        if self._is_sharded:
            return "root"
        return "none" if self._accumulates_in_fp32 or self.strategy == "ddp" else "all"

    def _input_bytes(self, size: MicroBatchSize) -> int:
        """This micro-batch and the next one on the device; on a CPU those in the buffers of the workers."""
        num_batches = max(2, self._num_workers * BUFFERS_PER_WORKER)
        return num_batches * sum(x.nbytes for x in dry_batch(self._model, size).tensors)

    @property
    def _num_workers(self) -> int:
        """Loader workers in the memory that is planned."""
        return self.num_workers if self.device_type == "cpu" else 0

    @cached_property
    def _model(self) -> VLM:
        """The model with its parameters as they are stored."""
        return self._build(torch.float32 if self._is_sharded else DTYPES[self.dtype])

    # -------------------------------------------------------------- persistent memory

    @cached_property
    def _weights(self) -> _Weights:
        named: dict[str, Tensor] = dict(self._model.named_parameters())
        optimizer = build_optimizer(named.items(), self.optimizer)
        persistent = {
            "parameters": list(named.values()),
            "masters": [x for name, x in optimizer.masters.items() if x is not named[name]],
            "moments": [x for state in optimizer.state().values() for x in state.values()],
            "averages": list(optimizer.masters.values()) if self.has_average else [],
        }
        if self.device_type == "cpu":
            masters = list(optimizer.masters.values())
            persistent["copy of the saved state"] = [*masters, *persistent["moments"], *persistent["averages"]]
        num_bytes = {part: sum(x.nbytes for x in tensors) // self._num_shards for part, tensors in persistent.items()}
        trained = sum(x.numel() for x in named.values() if x.requires_grad)
        num_bytes[RESIDUAL] = self._residual_bytes(trained)
        blocks = {name: _elements(list(block.parameters())) for name, block in model_blocks(self._model).items()}
        whole = _elements(list(named.values()))
        inside = [sum(column) for column in zip(*blocks.values(), strict=True)]
        root = _Elements(whole.total - inside[0], whole.trained - inside[1])
        held = [x for tensors in persistent.values() for x in tensors]
        return _Weights(num_bytes, _update_bytes(optimizer, named, held), blocks, root)

    def _persistent(self) -> Mapping[str, int]:
        held = self._weights.persistent
        always = {RESIDUAL: held[RESIDUAL], "frozen models": self._frozen_bytes}
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
            buckets = trained * self._element if self.strategy == "ddp" else 0
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
        inner = [block.total for block in self._weights.blocks.values()]
        held = 3 * max(inner) if self.parallel.reshard_after_forward else sum(inner) + max(inner)
        return (self._weights.root.total + held) * self._element


def _elements(parameters: list[Any]) -> _Elements:
    return _Elements(sum(x.numel() for x in parameters), sum(x.numel() for x in parameters if x.requires_grad))


def _update_bytes(optimizer: Optimizer, named: Mapping[str, Tensor], held: list[Tensor]) -> int:
    """Measure the workspace of an update in a dry run."""
    gradients = {name: torch.empty_like(x) for name, x in named.items() if x.requires_grad}
    for name, gradient in gradients.items():
        named[name].grad = gradient
    live = LiveBytes(*held, *gradients.values())
    with launch.dry_run(), live:
        optimizer.step(1.0)
    optimizer.zero_grad()
    return peak_bytes(live.phases())


def _by_component(held: Bytes) -> Bytes:
    components: Bytes = {}
    for kind, size in held.items():
        component = kind.partition(":")[0]
        components[component] = components.get(component, 0) + size
    return components
