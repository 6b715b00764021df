"""Peak memory of a training step on a GPU or a CPU, by component.

Nothing is derived by hand. Persistent memory (parameters, masters, optimizer state) is that of the real model and optimizer, built on
the meta device; activations, gradients, workspace and the loss are measured in a dry run of a step (`dry_run.py`). What the ranks of
a sharded or replicated model add (gathered parameters, shards, buckets) is counted from the parameters of each block.

Not modelled: what `torch.compile` saves.
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
from saccade.model.vlm import VLM
from saccade.train.config import LoraConfig, ParallelConfig, QuantizationAwareConfig, Recompute, Strategy
from saccade.train.dry_run import (
    KeptGradients,
    MicroBatchSize,
    combined,
    dry_batch,
    dry_run,
    model_blocks,
)
from saccade.train.objectives.cross_entropy import CrossEntropy
from saccade.train.objectives.objective import Objective
from saccade.train.optimizer import Optimizer, build_optimizer
from saccade.train.parallelize import choose_strategy, prepare_model, recompute
from saccade.train.parameter_groups import OptimizerConfig
from saccade.world import World

GIB = 2**30
CONTEXT_BYTES = GIB
"""Per process outside torch's allocator: CUDA context, kernels, workspaces of cuBLAS and cuDNN."""
CPU_CONTEXT_BYTES = int(0.45 * GIB)
"""Per process on a CPU: Python and its modules."""
NCCL_BYTES = GIB
"""NCCL buffers, if there is more than one rank."""
FRAGMENTATION = 0.05
"""Fraction of temporary memory lost to fragmentation, as micro-batches differ in size. Persistent memory has none."""
CPU_FRAGMENTATION = 0.6
"""The same on a CPU: the allocator of the C library keeps freed blocks, and operations that are fused on a GPU have results in between."""
STREAMED_BYTES = GIB
"""An offloaded optimizer's copies in flight, in both directions."""
ACCUMULATED_BYTES = 4
"""Bytes per element of an accumulated gradient; see `train_state.py`."""

PERSISTENT = ("parameters", "masters", "moments", "averages", "copy of the saved state", "frozen models")
COMPONENTS = (
    *PERSISTENT, "gradients", "gathered parameters", "activations of the vision tower", "activations of the decoder", "loss",
    "workspace", "micro-batch", "context and fragmentation",
)  # fmt: skip
"""Components of a plan."""

Extents = tuple[Recompute, Recompute]
"""Activation checkpointing of vision tower and decoder."""


@dataclass(frozen=True)
class MemoryPlan:
    """Peak memory of a GPU in a step."""

    parts: Mapping[str, int]
    """Bytes by component of `COMPONENTS`; empty ones are omitted."""
    modules: Mapping[str, int]
    """Temporary memory by component and module, such as `activations of the decoder: mlp`."""
    moment: str
    """When the peak occurs."""
    setting: str
    """The planned settings in one line."""

    @property
    def total_gib(self) -> float:
        """Total memory the GPU must have."""
        return sum(self.parts.values()) / GIB

    @property
    def allocated_gib(self) -> float:
        """Without context and fragmentation: what torch reports as allocated, and a run logs as `memory_gib`."""
        return self.total_gib - self.parts["context and fragmentation"] / GIB

    def lines(self) -> list[str]:
        """As a table."""
        width = max(map(len, COMPONENTS))
        lines = [f"memory per GPU, GiB: {self.setting}"]
        for part, size in self.parts.items():
            lines.append(f"  {part:<{width}}  {size / GIB:7.2f}  {self._largest(part)}".rstrip())
        return [*lines, f"  {'total':<{width}}  {self.total_gib:7.2f}  peak in {self.moment}"]

    def _largest(self, part: str) -> str:
        """The modules of a component that hold most."""
        inside = sorted(
            (size, name.removeprefix(f"{part}: ")) for name, size in self.modules.items() if f"{part}:" in name
        )
        return ", ".join(f"{name} {size / GIB:.1f}" for size, name in inside[:-6:-1])

    def record(self) -> dict[str, Any]:
        """As JSON."""
        sizes = {name: round(size / GIB, 3) for name, size in self.parts.items()}
        return {"setting": self.setting, "moment": self.moment, "total_gib": round(self.total_gib, 3), "parts_gib": sizes}  # fmt: skip


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
class Planner:
    """Plans the memory of one model and training configuration, for micro-batches of any size."""

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
    """Where the model is trained. On a CPU the copy of the state that is saved in the background takes the same memory."""
    has_average: bool = False
    """Whether an average of the trained weights is kept."""
    make_objective: Callable[[], Objective] = CrossEntropy
    """Makes the objective of a dry run, its frozen models on the meta device."""
    _steps: dict[str, Phases] = field(default_factory=dict, repr=False, compare=False)
    """Dry runs made so far, shared by planners with other optimizers and ranks (`dataclasses.replace`)."""

    def plan(self, size: MicroBatchSize, extents: Extents | None = None) -> MemoryPlan:
        """Peak memory for a micro-batch. `extents`: activation checkpointing, overriding `parallel`."""
        extents = extents or (self.parallel.recompute_vision, self.parallel.recompute_language)
        step = self.step(size, extents)
        moment, temporary = max(self._moments(step), key=lambda item: sum(item[1].values()))
        temporary |= {"micro-batch": self._input_bytes(size), "gathered parameters": self._gathered}
        allowance = self._allowance(sum(temporary.values()))
        parts = {**_by_component(temporary), **self._persistent(), "context and fragmentation": allowance}
        return MemoryPlan(
            parts={name: parts[name] for name in COMPONENTS if parts.get(name)},
            modules=temporary,
            moment=moment,
            setting=self._setting(size, *extents),
        )

    def gib_by_share(self, size: MicroBatchSize, extents: Extents) -> Callable[[float], float]:
        """Total memory of micro-batches of a share of this size, interpolated between dry runs of it and of its half."""
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
    def strategy(self) -> Strategy:
        """The parallelization strategy."""
        world = World(rank=0, size=self.world_size, local_rank=0, device=torch.device("cpu"))
        return choose_strategy(self.parallel, world)

    @property
    def _is_sharded(self) -> bool:
        return self.strategy in ("fsdp", "hsdp")

    @property
    def _num_shards(self) -> int:
        return (self.parallel.shard_size or self.world_size) if self._is_sharded else 1

    @property
    def _element(self) -> int:
        """Bytes of an element in the compute dtype."""
        return DTYPES[self.dtype].itemsize

    def _setting(self, size: MicroBatchSize, vision: Recompute, language: Recompute) -> str:
        ranks = f"{self.world_size} x {self.strategy}" if self.world_size > 1 else "1 rank"
        return (
            f"{ranks}, {self.optimizer.kind}, {self.dtype}, a micro-batch of {size.tokens} tokens and {size.patches} patches, "
            f"recompute_vision {vision}, recompute_language {language}"
        )

    # -------------------------------------------------------------- on the meta device

    def _build(self, dtype: torch.dtype) -> VLM:
        """The model on the meta device, with adapters and frozen parameters."""
        with torch.device("meta"), MetaCache():  # type: ignore[no-untyped-call]
            model = VLM(self.config).to(dtype)
            prepare_model(model, self.optimizer, self.lora, self.qat, self.dtype)
        return model

    def _dry_run(self, size: MicroBatchSize, extent: Recompute) -> Phases:
        key = repr(
            (
                self.dtype,
                self.lora,
                self.qat,
                self.make_objective,
                self.optimizer.lrs,
                self._kept_gradients,
                size,
                extent,
            )
        )
        if key not in self._steps:
            model = self._build(DTYPES[self.dtype])
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
        """This micro-batch and the next one on the device."""
        return 2 * sum(x.nbytes for x in dry_batch(self._model, size).tensors)

    @cached_property
    def _model(self) -> VLM:
        """With the parameters as they are stored."""
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
        blocks = {name: _elements(list(block.parameters())) for name, block in model_blocks(self._model).items()}
        whole = _elements(list(named.values()))
        inside = [sum(column) for column in zip(*blocks.values(), strict=True)]
        root = _Elements(whole.total - inside[0], whole.trained - inside[1])
        held = [x for tensors in persistent.values() for x in tensors]
        return _Weights(num_bytes, _update_bytes(optimizer, named, held), blocks, root)

    def _persistent(self) -> Mapping[str, int]:
        held = self._weights.persistent
        if self._is_sharded and self.parallel.offload:
            held = {}
        elif self.optimizer.offload:
            held = {"parameters": held["parameters"], "moments": STREAMED_BYTES}
        return {**held, "frozen models": self._frozen_bytes}

    @cached_property
    def _frozen_bytes(self) -> int:
        """Models that the objective holds; every rank has all of them."""
        live = LiveBytes()
        with live:
            objective = self.make_objective()
            live.start_phase("made")
        del objective
        return sum(live.phases()[0].change.values())

    # -------------------------------------------------------------- temporary memory

    def _temporary(self, size: MicroBatchSize, extents: Extents) -> list[int]:
        """Temporary memory of each phase."""
        beside = self._input_bytes(size) + self._gathered
        return [sum(parts.values()) + beside for _, parts in self._moments(self.step(size, extents))]

    def _allowance(self, temporary: float) -> int:
        """For context and fragmentation."""
        if self.device_type == "cpu":
            return CPU_CONTEXT_BYTES + int(CPU_FRAGMENTATION * temporary)
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
        """Of the optimizer; with fsdp, of reducing gradients: unsharded, and reduce-scatter buffer, of this block and the previous one."""
        buffers = 0
        if self._is_sharded and phase.block is not None:
            buffers = 2 * self._weights.blocks[phase.block].trained * (self._element + self._reduce_element)
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
        """Gradients that exist when backward starts: of earlier micro-batches, and DDP's buckets."""
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
        """fsdp: gradients as the optimizer sees them, fp32 shards."""
        return 0 if self.parallel.offload else trained * 4 // self._num_shards

    @property
    def _gathered(self) -> int:
        """fsdp: unsharded parameters of the root, of this block and the next, and the all-gather buffer."""
        if not self._is_sharded:
            return 0
        inner = [block.total for block in self._weights.blocks.values()]
        held = 3 * max(inner) if self.parallel.reshard_after_forward else sum(inner) + max(inner)
        return (self._weights.root.total + held) * self._element


def _elements(parameters: list[Any]) -> _Elements:
    return _Elements(sum(x.numel() for x in parameters), sum(x.numel() for x in parameters if x.requires_grad))


def _update_bytes(optimizer: Optimizer, named: Mapping[str, Tensor], held: list[Tensor]) -> int:
    """Workspace of an update, in a dry run."""
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
