"""Peak GPU memory of a training step, by component.

Persistent memory (parameters, masters, optimizer state) is measured on the real model and optimizer, built on the meta device. A step
is then simulated: forward allocates activations block by block, backward frees them while it allocates gradients, the update needs
all gradients. When activations peak, most gradients of the first micro-batch do not exist yet, so the peaks are not added.

Not modelled: what `torch.compile` saves, and Muon's workspace for its largest matrix (a few hundred MiB).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from saccade.device import DTYPES
from saccade.kernels.linear_cross_entropy import CHUNK_BYTES
from saccade.model.config import ModelConfig
from saccade.model.layers import LayerNorm
from saccade.model.linear import projections
from saccade.model.vlm import VLM
from saccade.train.activations import (
    NOTHING,
    BlockMemory,
    BlockTraining,
    MicroBatchSize,
    decoder_layer,
    final_norm,
    input_bytes,
    patch_embedding,
    projector,
    vision_block,
)
from saccade.train.config import LoraConfig, ParallelConfig, Recompute, Strategy
from saccade.train.lora import add_lora, lora_parameters
from saccade.train.optimizer import build_optimizer, freeze
from saccade.train.parallelize import choose_strategy
from saccade.train.parameter_groups import OptimizerConfig
from saccade.world import World

GIB = 2**30
CONTEXT_BYTES = GIB
"""Per process outside torch's allocator: CUDA context, kernels, workspaces of cuBLAS and cuDNN."""
NCCL_BYTES = GIB
"""NCCL buffers, if there is more than one rank."""
FRAGMENTATION = 0.05
"""Fraction of temporary memory lost to fragmentation, as micro-batches differ in size. Persistent memory has none."""
STREAMED_BYTES = GIB
"""An offloaded optimizer's copies in flight, in both directions."""
ACCUMULATED_BYTES = 4
"""Bytes per element of an accumulated gradient; see `train_state.py`."""

PERSISTENT = ("parameters", "masters", "moments", "averages")
COMPONENTS = (
    *PERSISTENT, "gradients", "gathered parameters", "activations of the vision tower", "activations of the decoder", "loss",
    "workspace", "micro-batch", "context and fragmentation",
)  # fmt: skip
"""Components of a plan."""


@dataclass(frozen=True)
class MemoryPlan:
    """Peak memory of a GPU in a step."""

    parts: Mapping[str, int]
    """Bytes by component of `COMPONENTS`; empty ones are omitted."""
    tensors: Mapping[str, int]
    """Bytes of all activations by tensor, such as `decoder: gate and up`."""
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
        """The largest tensors of an activation component."""
        component = part.removeprefix("activations of the ") + ": "
        inside = sorted(
            ((n, name.removeprefix(component)) for name, n in self.tensors.items() if name.startswith(component))
        )
        return ", ".join(f"{name} {size / GIB:.1f}" for size, name in inside[:-6:-1])

    def record(self) -> dict[str, Any]:
        """As JSON."""
        sizes = {name: round(size / GIB, 3) for name, size in self.parts.items()}
        return {"setting": self.setting, "moment": self.moment, "total_gib": round(self.total_gib, 3), "parts_gib": sizes}  # fmt: skip


class _Block(NamedTuple):
    """A block in forward order: its memory and its parameters."""

    name: str
    """Prefix of its parameters' names."""
    needs: BlockMemory
    num_parameters: int
    """Number of parameters."""
    trained: int
    """Number of trained parameters."""

    @property
    def component(self) -> str:
        return "decoder" if self.name.startswith("language") else "vision tower"

    @property
    def is_root(self) -> bool:
        """Whether its parameters are in the root FSDP unit."""
        return not self.name.startswith(("vision.", "language.layers."))


class _Weights(NamedTuple):
    """Persistent memory of one rank in bytes, and the parameters of each block."""

    persistent: Mapping[str, int]
    sizes: Mapping[str, tuple[int, int]]
    """(number of parameters, of trained ones) by block."""
    training: Mapping[str, BlockTraining]
    """By block."""

    @property
    def trained(self) -> int:
        return sum(trained for _, trained in self.sizes.values())


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
    has_average: bool = False
    """Whether an average of the trained weights is kept."""

    def plan(self, size: MicroBatchSize, recompute: tuple[Recompute, Recompute] | None = None) -> MemoryPlan:
        """Peak memory for a micro-batch. `recompute`: of vision tower and decoder, overriding `parallel`."""
        chosen = recompute or (self.parallel.recompute_vision, self.parallel.recompute_language)
        blocks = self._blocks(size, *chosen)
        moment, temporary = max(self._moments(size, blocks), key=lambda item: sum(item[1].values()))
        temporary |= {"micro-batch": input_bytes(self.config, size), "gathered parameters": self._gathered(blocks)}
        outside = CONTEXT_BYTES + (NCCL_BYTES if self.world_size > 1 else 0)
        allowance = outside + int(FRAGMENTATION * sum(temporary.values()))
        parts = {**self._persistent(), **temporary, "context and fragmentation": allowance}
        return MemoryPlan(
            parts={name: parts[name] for name in COMPONENTS if parts.get(name)},
            tensors=_by_tensor(blocks),
            moment=moment,
            setting=self._setting(size, *chosen),
        )

    @cached_property
    def strategy(self) -> Strategy:
        """The parallelization strategy."""
        world = World(rank=0, size=self.world_size, local_rank=0, device=torch.device("cpu"))
        return choose_strategy(self.parallel, world)

    @property
    def trained_blocks(self) -> set[str]:
        """The blocks with trained parameters."""
        return {name for name, (_, trained) in self._weights.sizes.items() if trained}

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

    # -------------------------------------------------------------- persistent memory

    @cached_property
    def _weights(self) -> _Weights:
        """Measured on the model and its optimizer on the meta device."""
        with torch.device("meta"):
            model = VLM(self.config).to(torch.float32 if self._is_sharded else DTYPES[self.dtype])
        if self.lora is None:
            freeze(model.named_parameters(), self.optimizer)
        else:
            add_lora(model, self.lora, DTYPES[self.dtype])
            model.requires_grad_(False)
            freeze(lora_parameters(model).items(), self.optimizer)
        named: dict[str, Tensor] = dict(model.named_parameters())
        optimizer = build_optimizer(named.items(), self.optimizer)
        persistent = {
            "parameters": list(named.values()),
            "masters": [x for name, x in optimizer.masters.items() if x is not named[name]],
            "moments": [x for state in optimizer.state().values() for x in state.values()],
            "averages": list(optimizer.masters.values()) if self.has_average else [],
        }
        num_bytes = {part: sum(x.nbytes for x in tensors) // self._num_shards for part, tensors in persistent.items()}
        return _Weights(num_bytes, _sizes(named), _block_training(model, named, self.lora))

    def _persistent(self) -> Mapping[str, int]:
        if self._is_sharded and self.parallel.offload:
            return {}
        if self.optimizer.offload:
            return {"parameters": self._weights.persistent["parameters"], "moments": STREAMED_BYTES}
        return self._weights.persistent

    # -------------------------------------------------------------- temporary memory

    def _blocks(self, size: MicroBatchSize, vision: Recompute, language: Recompute) -> list[_Block]:
        """The blocks in forward order."""
        config, element, training = self.config, self._element, self._weights.training
        needs = {"vision.patch_embed": patch_embedding(config, size, training["vision.patch_embed"], element)}
        if "vision.pos_embed" in self._weights.sizes:
            needs["vision.pos_embed"] = NOTHING
        for number in range(config.vision.num_layers):
            name = f"vision.blocks.{number}"
            needs[name] = vision_block(config, size, number, training[name], vision, element)
        needs["projector"] = projector(config, size, training["projector"], element)
        needs["language.embed_tokens"] = NOTHING
        for number in range(config.language.num_layers):
            name = f"language.layers.{number}"
            needs[name] = decoder_layer(config, size, training[name], language, element)
        needs["language.norm"] = final_norm(config, size, training["language.norm"], element)
        return [_Block(name, of_block, *self._weights.sizes[name]) for name, of_block in needs.items()]

    def _moments(self, size: MicroBatchSize, blocks: list[_Block]) -> Iterator[tuple[str, dict[str, int]]]:
        """Temporary memory at each moment of a step: (moment, bytes by component)."""
        element, is_tied = self._element, self.config.tied_head
        head = self._weights.sizes["language.embed_tokens" if is_tied else "head"][1]
        held = {
            component: sum(b.needs.num_saved for b in blocks if b.component == component)
            for component in ("vision tower", "decoder")
        }
        gradients = self._earlier_gradients

        def now(when: str, *, loss: int = 0, workspace: int = 0) -> tuple[str, dict[str, int]]:
            activations = {f"activations of the {component}": size for component, size in held.items()}
            return when, activations | {"gradients": gradients, "loss": loss, "workspace": workspace}

        states = 2 * self.config.language.hidden_size * element * size.tokens  # input of the head, and its gradient
        logits = min(CHUNK_BYTES, self.config.language.vocab_size * element * size.num_loss_tokens)
        yield now("the loss", loss=states + logits + head * element)
        gradients += head * element if is_tied else self._added_gradients(head, is_root=True)
        for block in reversed(blocks):
            is_embedding = block.name == "language.embed_tokens"
            workspace = block.needs.recomputed + block.needs.workspace + self._reduce_buffers(block)
            # A tied head has two gradients at this point, its own and that of the embedding.
            workspace += is_embedding * block.trained * (ACCUMULATED_BYTES if self._accumulates_in_fp32 else element)
            yield now(f"backward of {block.name}", workspace=workspace)
            held[block.component] -= block.needs.num_saved
            gradients += self._added_gradients(block.trained, is_root=block.is_root)
            gradients -= head * element if is_embedding and is_tied else 0
        root = sum(block.trained for block in blocks if block.is_root) + (0 if is_tied else head)
        yield now("the update", workspace=root * self._reduce_element if self._is_sharded else 0)

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

    def _added_gradients(self, trained: int, *, is_root: bool) -> int:
        """Gradients that a block's backward adds. Those of the root FSDP unit are sharded at the very end."""
        if self._is_sharded and is_root:
            return trained * self._element
        return 0 if self._earlier_gradients else self._reduced_gradients(trained)

    def _reduced_gradients(self, trained: int) -> int:
        """Gradients as the optimizer sees them: fp32 shards with fsdp, otherwise in the parameters' dtype."""
        if not self._is_sharded:
            return trained * self._element
        return 0 if self.parallel.offload else trained * 4 // self._num_shards

    def _reduce_buffers(self, block: _Block) -> int:
        """fsdp: unsharded gradient and reduce-scatter buffer of this block and of the previous one."""
        if not self._is_sharded or block.is_root:
            return 0
        return 2 * block.trained * (self._element + self._reduce_element)

    def _gathered(self, blocks: list[_Block]) -> int:
        """fsdp: unsharded parameters of the root, of this block and the next, and the all-gather buffer."""
        if not self._is_sharded:
            return 0
        inner = [block.num_parameters for block in blocks if not block.is_root]
        root = sum(num_parameters for num_parameters, _ in self._weights.sizes.values()) - sum(inner)
        held = 3 * max(inner) if self.parallel.reshard_after_forward else sum(inner) + max(inner)
        return (root + held) * self._element


# ------------------------------------------------------------------ parameters by block


def _block_of(name: str) -> str:
    """The block of a parameter: language.layers.3.mlp.up_proj.weight belongs to language.layers.3."""
    words = name.split(".")
    if words[0] in ("projector", "head"):
        return words[0]
    return ".".join(words[: 3 if words[1] in ("blocks", "layers") else 2])


def _sizes(named: Mapping[str, Tensor]) -> dict[str, tuple[int, int]]:
    sizes: dict[str, tuple[int, int]] = {}
    for name, parameter in named.items():
        num_parameters, trained = sizes.get(_block_of(name), (0, 0))
        sizes[_block_of(name)] = (
            num_parameters + parameter.numel(),
            trained + (parameter.numel() if parameter.requires_grad else 0),
        )
    return sizes


def _block_training(model: VLM, named: Mapping[str, Tensor], lora: LoraConfig | None) -> dict[str, BlockTraining]:
    """What is trained in and before every block. Parameters are in forward order: vision tower, projector, decoder."""
    trained_names: dict[str, list[str]] = {_block_of(name): [] for name in named}
    for name, parameter in named.items():
        if parameter.requires_grad:
            trained_names[_block_of(name)].append(name)
    drops = lora is not None and lora.dropout > 0.0
    found: dict[str, BlockTraining] = {}
    modules = dict(model.named_modules())
    layer_normed = {_block_of(f"{name}.weight") for name, module in modules.items() if isinstance(module, LayerNorm)}
    has_gradients = False
    for block, names in trained_names.items():
        has_gradients = has_gradients or bool(names)
        low_rank = [named[name] for name in names if name.endswith(".lora_A")]
        layers = {name.split(".")[-2] for name in names if named[name].ndim > 1 and not drops}
        mlp: Any = modules.get(f"{block}.mlp")
        in_order = [name.split(".")[-1] for name, _ in projections(model.projector)] if block == "projector" else []
        first, second = in_order[:1], in_order[1:2]
        found[block] = BlockTraining(
            layers=layers,
            has_gradients=has_gradients,
            # With dropout each layer saves its own input, and a mask of one byte per element.
            low_rank=sum(a.shape[0] + (a.shape[1] * 3 // 2 if drops else 0) for a in low_rank),
            splits_down=any(name.endswith("down_proj.lora_A") for name in names) and not drops,
            reads_mlp_input=not layers.isdisjoint(mlp.input_layers if hasattr(mlp, "input_layers") else first),
            reads_mlp_hidden=not layers.isdisjoint(second),
            mlp_tensors=getattr(mlp, "num_saved", 0),
            num_statistics=2 if block in layer_normed else 1,
        )
    return found


def _by_tensor(blocks: list[_Block]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for block in blocks:
        for name, size in block.needs.saved.items():
            key = f"{block.component}: {name}"
            sizes[key] = sizes.get(key, 0) + size
    return sizes
