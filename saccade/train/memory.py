"""How much memory a step takes on each GPU: the moment at which most is held, part by part.

What lies there all the time (parameters, masters, moments) is read off the real model and optimizer, built without memory. A step is
then walked through as it will run: forward fills activations block by block, backward empties them while gradients fill, the
update needs all gradients. When activations are at their highest most gradients of a step's first row are not there yet, so they
are not simply added up.

Not modelled: what `compile` decides to keep, and muon's work on its largest matrix (a few hundred MiB).
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
from saccade.model.vlm import VLM
from saccade.train.activations import (
    NOTHING,
    Learning,
    MicroBatchSize,
    Needs,
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
"""Of each process beside torch's own tensors: CUDA's context, kernels, work space of cuBLAS and cuDNN."""
NCCL_BYTES = GIB
"""Of NCCL's channels, where there is more than one rank."""
FRAGMENTATION = 0.05
"""Share lost between tensors that come and go; rows of different sizes leave holes. What stays all the time leaves none."""
STREAMED_BYTES = GIB
"""Of an offloaded optimizer: what is on its way in, and what on its way out."""
SUM_BYTES = 4
"""Of a gradient that several rows are added up in; see `train_state.py`."""

STAYING = ("parameters", "masters", "moments")
COMPONENTS = (
    *STAYING, "gradients", "gathered parameters", "activations of the tower", "activations of the decoder", "loss",
    "work space", "the row itself", "context and fragmentation",
)  # fmt: skip
"""What a plan adds up."""


@dataclass(frozen=True)
class MemoryPlan:
    """The moment of a step at which a GPU holds most."""

    parts: Mapping[str, int]
    """Bytes of each of `COMPONENTS`; those of nothing are left out."""
    tensors: Mapping[str, int]
    """Bytes of all activations by what they are, such as `decoder: gate and up`."""
    moment: str
    """When that is."""
    setting: str
    """What was planned, in a line."""

    @property
    def total_gib(self) -> float:
        """All of it: what the GPU must have."""
        return sum(self.parts.values()) / GIB

    @property
    def allocated_gib(self) -> float:
        """Without the allowance: what torch counts as allocated, and a run logs as `memory_gib`."""
        return self.total_gib - self.parts["context and fragmentation"] / GIB

    def lines(self) -> list[str]:
        """As a table for people."""
        width = max(map(len, COMPONENTS))
        lines = [f"memory of a GPU, GiB: {self.setting}"]
        for part, size in self.parts.items():
            lines.append(f"  {part:<{width}}  {size / GIB:7.2f}  {self._largest(part)}".rstrip())
        return [*lines, f"  {'total':<{width}}  {self.total_gib:7.2f}  most in {self.moment}"]

    def _largest(self, part: str) -> str:
        """The largest tensors among a part's activations."""
        place = part.removeprefix("activations of the ") + ": "
        inside = sorted(((n, name.removeprefix(place)) for name, n in self.tensors.items() if name.startswith(place)))
        return ", ".join(f"{name} {size / GIB:.1f}" for size, name in inside[:-6:-1])

    def record(self) -> dict[str, Any]:
        """As JSON."""
        sizes = {name: round(size / GIB, 3) for name, size in self.parts.items()}
        return {"setting": self.setting, "moment": self.moment, "total_gib": round(self.total_gib, 3), "parts_gib": sizes}  # fmt: skip


class _Block(NamedTuple):
    """A block in the order of forward: what it needs, and its parameters."""

    name: str
    """The first part of its parameters' names."""
    needs: Needs
    numbers: int
    """Of all its parameters."""
    trained: int
    """Of those that learn."""

    @property
    def place(self) -> str:
        return "decoder" if self.name.startswith("language") else "tower"

    @property
    def is_root(self) -> bool:
        """Whether its parameters are in fsdp's outermost unit."""
        return not self.name.startswith(("vision.", "language.layers."))


class _Weights(NamedTuple):
    """What lies there all the time, in bytes on one rank; and the parameters of each block."""

    staying: Mapping[str, int]
    sizes: Mapping[str, tuple[int, int]]
    """(numbers, numbers that learn) by block."""
    learning: Mapping[str, Learning]
    """By block."""

    @property
    def trained(self) -> int:
        return sum(trained for _, trained in self.sizes.values())


@dataclass(frozen=True, kw_only=True)
class Planner:
    """One model and one way to train it; it plans rows of any size."""

    config: ModelConfig
    """The model's sizes."""
    world_size: int = 1
    """Ranks that train together."""
    micro_batches_per_rank: int = 1
    """Rows of a step that a rank computes one after another."""
    dtype: Literal["bf16", "fp32"] = "bf16"
    """Number format of activations and matrix products."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """How the model is spread, and what is recomputed."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """What learns, and what its optimizer holds."""
    lora: LoraConfig | None = None
    """Low-rank matrices instead, where a stage trains them."""

    def plan(self, row: MicroBatchSize, recompute: tuple[Recompute, Recompute] | None = None) -> MemoryPlan:
        """The peak for a row of this size. `recompute`: of tower and decoder, in the place of what `parallel` says."""
        chosen = recompute or (self.parallel.recompute_vision, self.parallel.recompute_language)
        blocks = self._blocks(row, *chosen)
        moment, passing = max(self._moments(row, blocks), key=lambda item: sum(item[1].values()))
        passing |= {"the row itself": input_bytes(self.config, row), "gathered parameters": self._gathered(blocks)}
        outside = CONTEXT_BYTES + (NCCL_BYTES if self.world_size > 1 else 0)
        allowance = outside + int(FRAGMENTATION * sum(passing.values()))
        parts = {**self._staying(), **passing, "context and fragmentation": allowance}
        return MemoryPlan(
            parts={name: parts[name] for name in COMPONENTS if parts.get(name)},
            tensors=_by_tensor(blocks),
            moment=moment,
            setting=self._setting(row, *chosen),
        )

    @cached_property
    def strategy(self) -> Strategy:
        """How the model is spread."""
        world = World(rank=0, size=self.world_size, local_rank=0, device=torch.device("cpu"))
        return choose_strategy(self.parallel, world)

    @property
    def trained_blocks(self) -> set[str]:
        """The blocks of which something learns."""
        return {name for name, (_, trained) in self._weights.sizes.items() if trained}

    @property
    def _is_sharded(self) -> bool:
        return self.strategy in ("fsdp", "hsdp")

    @property
    def _num_shards(self) -> int:
        return (self.parallel.shard_size or self.world_size) if self._is_sharded else 1

    @property
    def _element(self) -> int:
        """Bytes of a number that is computed with."""
        return DTYPES[self.dtype].itemsize

    def _setting(self, row: MicroBatchSize, vision: Recompute, language: Recompute) -> str:
        ranks = f"{self.world_size} x {self.strategy}" if self.world_size > 1 else "1 rank"
        return (
            f"{ranks}, {self.optimizer.kind}, {self.dtype}, a row of {row.tokens} tokens and {row.patches} patches, "
            f"recompute of the tower {vision}, of the decoder {language}"
        )

    # -------------------------------------------------------------- what stays

    @cached_property
    def _weights(self) -> _Weights:
        """Read off the model and its optimizer, built without memory."""
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
        staying = {
            "parameters": list(named.values()),
            "masters": [x for name, x in optimizer.masters.items() if x is not named[name]],
            "moments": [x for state in optimizer.state().values() for x in state.values()],
        }
        num_bytes = {part: sum(x.nbytes for x in tensors) // self._num_shards for part, tensors in staying.items()}
        return _Weights(num_bytes, _sizes(named), _learning(named, self.lora))

    def _staying(self) -> Mapping[str, int]:
        if self._is_sharded and self.parallel.offload:
            return {}
        if self.optimizer.offload:
            return {"parameters": self._weights.staying["parameters"], "moments": STREAMED_BYTES}
        return self._weights.staying

    # -------------------------------------------------------------- what comes and goes

    def _blocks(self, row: MicroBatchSize, vision: Recompute, language: Recompute) -> list[_Block]:
        """The blocks in the order of forward."""
        config, element, learning = self.config, self._element, self._weights.learning
        needs = {"vision.patch_embed": patch_embedding(config, row, learning["vision.patch_embed"], element)}
        for number in range(config.vision.num_layers):
            name = f"vision.blocks.{number}"
            needs[name] = vision_block(config, row, number, learning[name], vision, element)
        needs["projector"] = projector(config, row, learning["projector"], element)
        needs["language.embed_tokens"] = NOTHING
        for number in range(config.language.num_layers):
            name = f"language.layers.{number}"
            needs[name] = decoder_layer(config, row, learning[name], language, element)
        needs["language.norm"] = final_norm(config, row, learning["language.norm"], element)
        return [_Block(name, of_block, *self._weights.sizes[name]) for name, of_block in needs.items()]

    def _moments(self, row: MicroBatchSize, blocks: list[_Block]) -> Iterator[tuple[str, dict[str, int]]]:
        """What comes and goes, at each moment of a step: (when, bytes by part)."""
        element, is_tied = self._element, self.config.tied_head
        head = self._weights.sizes["language.embed_tokens" if is_tied else "head"][1]
        held = {place: sum(b.needs.num_kept for b in blocks if b.place == place) for place in ("tower", "decoder")}
        gradients = self._earlier_gradients

        def now(when: str, *, loss: int = 0, working: int = 0) -> tuple[str, dict[str, int]]:
            activations = {f"activations of the {place}": size for place, size in held.items()}
            return when, activations | {"gradients": gradients, "loss": loss, "work space": working}

        states = 2 * self.config.language.hidden_size * element * row.tokens  # what the head reads, and its gradient
        logits = min(CHUNK_BYTES, self.config.language.vocab_size * element * row.num_loss_tokens)
        yield now("the loss", loss=states + logits + head * element)
        gradients += head * element if is_tied else self._left_behind(head, is_root=True)
        for block in reversed(blocks):
            is_embedding = block.name == "language.embed_tokens"
            working = block.needs.remade + block.needs.working + self._averaged(block)
            # Of a head that is the embedding there are now two gradients: the first has waited for the second.
            working += is_embedding * block.trained * (SUM_BYTES if self._sums_rows else element)
            yield now(f"backward of {block.name}", working=working)
            held[block.place] -= block.needs.num_kept
            gradients += self._left_behind(block.trained, is_root=block.is_root)
            gradients -= head * element if is_embedding and is_tied else 0
        root = sum(block.trained for block in blocks if block.is_root) + (0 if is_tied else head)
        yield now("the update", working=root * self._reduce_element if self._is_sharded else 0)

    @property
    def _reduce_element(self) -> int:
        return DTYPES[self.parallel.reduce_dtype].itemsize

    @property
    def _sums_rows(self) -> bool:
        """Whether gradients are fp32 sums, whatever the parameters are."""
        return self.micro_batches_per_rank > 1 and not self._is_sharded

    @property
    def _earlier_gradients(self) -> int:
        """Gradients that are there when backward begins: of the rows before, and DDP's buckets, which always are."""
        trained = self._weights.trained
        if not self._is_sharded:
            buckets = trained * self._element if self.strategy == "ddp" else 0
            return buckets + (trained * SUM_BYTES if self._sums_rows else 0)
        if self.micro_batches_per_rank == 1:
            return 0
        return self._settled(trained) if self.parallel.reduce_each_micro_batch else trained * self._reduce_element

    def _left_behind(self, trained: int, *, is_root: bool) -> int:
        """Gradients that a block's backward adds to those there are. Those of fsdp's root are cut at the very end."""
        if self._is_sharded and is_root:
            return trained * self._element
        return 0 if self._earlier_gradients else self._settled(trained)

    def _settled(self, trained: int) -> int:
        """Gradients as the optimizer finds them: fp32 shards with fsdp, else like the parameters."""
        if not self._is_sharded:
            return trained * self._element
        return 0 if self.parallel.offload else trained * 4 // self._num_shards

    def _averaged(self, block: _Block) -> int:
        """fsdp: a block's whole gradient and the buffer it is averaged from, of this block and of the one before."""
        if not self._is_sharded or block.is_root:
            return 0
        return 2 * block.trained * (self._element + self._reduce_element)

    def _gathered(self, blocks: list[_Block]) -> int:
        """fsdp: the root's parameters, and of the others this block, the next, and the buffer it is gathered into."""
        if not self._is_sharded:
            return 0
        inner = [block.numbers for block in blocks if not block.is_root]
        root = sum(numbers for numbers, _ in self._weights.sizes.values()) - sum(inner)
        held = 3 * max(inner) if self.parallel.reshard_after_forward else sum(inner) + max(inner)
        return (root + held) * self._element


# ------------------------------------------------------------------ from parameters to blocks


def _block_of(name: str) -> str:
    """The block a parameter belongs to: language.layers.3.mlp.up_proj.weight is of language.layers.3."""
    words = name.split(".")
    if words[0] in ("projector", "head"):
        return words[0]
    return ".".join(words[: 3 if words[1] in ("blocks", "layers") else 2])


def _sizes(named: Mapping[str, Tensor]) -> dict[str, tuple[int, int]]:
    sizes: dict[str, tuple[int, int]] = {}
    for name, parameter in named.items():
        numbers, trained = sizes.get(_block_of(name), (0, 0))
        sizes[_block_of(name)] = (
            numbers + parameter.numel(),
            trained + (parameter.numel() if parameter.requires_grad else 0),
        )
    return sizes


def _learning(named: Mapping[str, Tensor], lora: LoraConfig | None) -> dict[str, Learning]:
    """How every block stands to what learns. Parameters come in the order of forward: tower, projector, decoder."""
    learned: dict[str, list[str]] = {_block_of(name): [] for name in named}
    for name, parameter in named.items():
        if parameter.requires_grad:
            learned[_block_of(name)].append(name)
    drops = lora is not None and lora.dropout > 0.0
    found: dict[str, Learning] = {}
    is_reached = False
    for block, names in learned.items():
        is_reached = is_reached or bool(names)
        low_rank = [named[name] for name in names if name.endswith(".lora_A")]
        found[block] = Learning(
            layers={name.split(".")[-2] for name in names if named[name].ndim > 1 and not drops},
            is_reached=is_reached,
            # With dropout each layer keeps an input of its own, and a byte for each number of it.
            low_rank=sum(a.shape[0] + (a.shape[1] * 3 // 2 if drops else 0) for a in low_rank),
            splits_down=any(name.endswith("down_proj.lora_A") for name in names) and not drops,
        )
    return found


def _by_tensor(blocks: list[_Block]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for block in blocks:
        for name, size in block.needs.kept.items():
            key = f"{block.place}: {name}"
            sizes[key] = sizes.get(key, 0) + size
    return sizes
