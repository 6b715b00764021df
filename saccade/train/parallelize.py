"""Everything that makes a model trainable on many devices, applied from outside, in one order:

    lora       (where a stage asks for it) low-rank matrices beside linear layers, all else frozen; see `lora.py`
    freeze     parameters whose learning rate is 0 take no gradients
    compile    each block becomes compiled code; attention stays outside, see `_compile`
    recompute  parts of each block drop their activations and compute them again in backward
    shard      FSDP2 cuts parameters over the ranks; or DDP gives each a copy
    fill       memory is taken, weights are read

Compiling goes before recomputing, so that a recomputed block runs compiled code twice; sharding goes last, so that its hooks stay
outside both.

    strategy   a rank holds                                  in DeepSpeed's words
    none       everything; one rank
    ddp        everything; gradients are averaged            data parallel
    fsdp       1/n of parameters, gradients, optimizer       ZeRO-3
    hsdp       1/shard_size of them, in world / shard_size   ZeRO-3 inside, data parallel between: MiCS, hpZ
               copies

With `reshard_after_forward = false` FSDP keeps the gathered parameters from forward to backward: half the gathering for the memory
of one whole bf16 copy. That is ZeRO-2: gradients and optimizer sharded, parameters whole while they are used. With `reduce_each_micro_batch
= false` as well, gradients too stay whole until the step's last row: ZeRO-1. Both pay when a step has several rows.

Units. Each decoder layer and each vision block is gathered and freed by itself, the next while the one before computes. The tower
(patch embedding) is a unit; embedding, head, final norm and projector form the root, which is needed first and last.

Numbers. FSDP holds parameters in fp32 and gathers them in the compute dtype; gradients are averaged in `reduce_dtype`. Without
sharding, parameters are in the compute dtype and the optimizer holds the fp32 masters: no casts on the way, the fastest on one GPU.
Several rows of a step are added up in fp32 either way; see `train_state.py`.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from saccade.device import DTYPES
from saccade.errors import ConfigError
from saccade.model.vlm import VLM
from saccade.train.config import ParallelConfig, Recompute, StageConfig, Strategy
from saccade.train.lora import add_lora, lora_layers, lora_parameters, quantized_sizes
from saccade.train.loss import ModelWithLoss
from saccade.train.optimizer import freeze
from saccade.train.parameter_groups import PARTS, OptimizerConfig, part_of
from saccade.train.weights import load_weights, meta_model
from saccade.world import World


@dataclass(frozen=True)
class ParallelModel:
    """A model ready to be module."""

    module: ModelWithLoss
    """The model with its loss."""
    wrapped: nn.Module
    """What is called: `trained` itself, or DDP around it."""
    strategy: Strategy
    """How it is spread."""
    compression: PowerSGDState | None = None
    """What PowerSGD remembers."""

    @property
    def model(self) -> VLM:
        """The model inside."""
        return self.module.model

    def sync_gradients(self, *, is_last_micro_batch: bool, each_micro_batch: bool) -> None:
        """Say whether the coming backward pass averages gradients over the ranks."""
        if isinstance(self.wrapped, DistributedDataParallel):
            self.wrapped.require_backward_grad_sync = is_last_micro_batch
        elif isinstance(self.wrapped, FSDPModule):
            self.wrapped.set_requires_gradient_sync(is_last_micro_batch or each_micro_batch)
            self.wrapped.set_is_last_backward(is_last_micro_batch)

    def reset_compression(self) -> None:
        """Forget what compression keeps of earlier gradients, for they may not be numbers."""
        if self.compression is not None:
            for memory in ("error_dict", "p_memory_dict", "q_memory_dict"):
                getattr(self.compression, memory).clear()


def parallelize(
    folder: Path, stage: StageConfig, config: ParallelConfig, world: World, *, dtype: str = "bf16", seed: int = 0
) -> ParallelModel:
    """Build the model of a checkpoint folder for a stage and load its weights. `seed`: initialization of LoRA adapters."""
    strategy = choose_strategy(config, world)
    is_sharded = strategy in ("fsdp", "hsdp")
    model = build_model(folder, stage, strategy, dtype)
    module = ModelWithLoss(model)
    module.encode_dummy_image = is_sharded or _is_trained(model.vision) or _is_trained(model.projector)
    if config.compile:
        _compile(model)
    has_dropout = stage.lora is not None and stage.lora.dropout > 0.0
    recompute(model.vision.blocks, config.recompute_vision, is_random=has_dropout)
    recompute(model.language.layers, config.recompute_language, is_random=has_dropout)
    if is_sharded:
        _shard(module, _mesh(config, strategy, world), config, DTYPES[dtype])
    _allocate(module, "cpu" if is_sharded and config.offload else world.device)
    load_weights(model, folder, seed=seed)
    return _data_parallel(module, config, world) if strategy == "ddp" else ParallelModel(module, module, strategy)


def build_model(folder: Path, stage: StageConfig, strategy: Strategy, dtype: str) -> VLM:
    """The model of a stage on the meta device: LoRA adapters added, parameters with a learning rate of 0 frozen."""
    is_sharded = strategy in ("fsdp", "hsdp")
    model = meta_model(folder, torch.float32 if is_sharded else DTYPES[dtype])
    if stage.lora is not None:
        add_lora(model, stage.lora, DTYPES[dtype])
    _freeze(model, stage.optimizer)
    return model


def _allocate(module: ModelWithLoss, device: torch.device | str) -> None:
    """Give every parameter memory; one that two modules share must still be one."""
    module.to_empty(device=device)
    if module.model.config.tied_head:
        module.model.head.weight = module.model.language.embed_tokens.weight


def choose_strategy(config: ParallelConfig, world: World) -> Strategy:
    """`auto` is none for one rank and fsdp for several; what cannot be is refused."""
    if config.strategy == "auto":
        if config.offload and world.size == 1:
            raise ConfigError(
                "offload goes with fsdp, and auto is no sharding on one rank. Set parallel.strategy = 'fsdp', or use optimizer.offload"
            )
        return "none" if world.size == 1 else "fsdp"
    if config.strategy == "none" and world.size > 1:
        raise ConfigError(
            f"strategy none trains on one rank, and there are {world.size}: each would train a model of its own. Use auto, ddp or fsdp"
        )
    if config.strategy == "hsdp" and world.size % (config.shard_size or 1):
        raise ConfigError(f"{world.size} ranks cannot be cut into groups of shard_size {config.shard_size}")
    return config.strategy


# ------------------------------------------------------------------ freeze


def _freeze(model: VLM, optimizer: OptimizerConfig) -> None:
    """Parameters whose learning rate is 0 take no gradients; beside LoRA's matrices nothing does. At least one must be left."""
    if matrices := lora_parameters(model):
        model.requires_grad_(False)
        try:
            freeze(matrices.items(), optimizer)
        except ConfigError as error:
            raise ConfigError(f"{error}. In a stage with lora only the matrices learn") from error
    else:
        freeze(model.named_parameters(), optimizer)
    if not _is_trained(model):
        raise ConfigError("every learning rate is 0: nothing would be module. Set optimizer.lr or one of optimizer.lrs")


def _is_trained(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def trainable_table(model: VLM) -> str:
    """Parameters of each part, and how many of them learn: what a run opens with."""
    sizes = {part: [0, 0] for part in PARTS}
    quantized = quantized_sizes(model)
    for name, parameter in model.named_parameters():
        size = sizes[part_of(name) or ""]
        size[0] += quantized.get(name, parameter.numel())
        size[1] += parameter.numel() if parameter.requires_grad else 0
    rows = [(part, f"{total:,}", f"{trained:,}") for part, (total, trained) in sizes.items() if total]
    return "\n".join(
        f"{part:<12}{total:>16}{trained:>16}" for part, total, trained in [("part", "parameters", "trained"), *rows]
    )


# ------------------------------------------------------------------ compile, recompute


def _compile(model: VLM) -> None:
    """Compile each block: norms, feed-forward and residual sums, one piece of code for all blocks of a tower.

    Attention runs as it is. Its kernels are chosen by the lengths of a row's segments, which change with every row and would each
    be a reason to compile again; what is left has one dynamic length, the tokens of the row. Quantized layers stay outside too:
    the compiler would make their weights whole in forward and keep them so for backward.
    """
    blocks: list[nn.Module] = [*model.vision.blocks, *model.language.layers]
    for block in blocks:
        attention: Any = block.get_submodule("attn" if hasattr(block, "attn") else "self_attn")
        attention.forward = torch.compiler.disable(attention.forward)  # type: ignore[no-untyped-call]
        block.forward = torch.compile(block.forward, dynamic=True)
    for layer in lora_layers(model).values():
        if layer.quantization != "none":
            layer.forward = torch.compiler.disable(layer.forward)  # type: ignore[method-assign, no-untyped-call]


def recompute(blocks: nn.ModuleList, extent: Recompute, *, is_random: bool = False) -> None:
    """Drop activations of each block, or of its feed-forward alone, which are the largest; backward computes them again.

    `is_random`: blocks draw random numbers, and must draw the same ones again.
    """
    for block in blocks:
        feed_forward: Any = block.mlp
        module: Any = {"none": None, "selective": feed_forward, "full": block}[extent]
        if module is not None:
            feed_forward.fuse_down_proj = False
            module.forward = functools.partial(
                checkpoint, module.forward, use_reentrant=False, preserve_rng_state=is_random
            )


# ------------------------------------------------------------------ shard


def _mesh(config: ParallelConfig, strategy: Strategy, world: World) -> DeviceMesh:
    """The ranks in a row, or for hsdp as copies x shards; the shards of a copy are neighbours, on one machine."""
    world.open_local_group()
    kind = world.device.type
    if strategy == "fsdp":
        return init_device_mesh(kind, (world.size,), mesh_dim_names=("shard",))
    shard_size = config.shard_size or 1
    return init_device_mesh(kind, (world.size // shard_size, shard_size), mesh_dim_names=("copy", "shard"))


def _shard(module: ModelWithLoss, mesh: DeviceMesh, config: ParallelConfig, dtype: torch.dtype) -> None:
    """FSDP2: every block a unit, then the tower, then the root with everything else."""
    # Inputs are not cast: blocks are given bf16 activations and fp32 rotation tables, and must keep both.
    precision = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=DTYPES[config.reduce_dtype], cast_forward_inputs=False
    )
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if config.offload else OffloadPolicy()
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": precision, "offload_policy": offload}
    model = module.model
    blocks = [*model.vision.blocks, *model.language.layers]
    for block in blocks:
        fully_shard(block, reshard_after_forward=config.reshard_after_forward, **options)
    fully_shard(model.vision, reshard_after_forward=config.reshard_after_forward, **options)
    fully_shard(module, **options)
    register_fsdp_forward_method(module, "score")
    _prefetch(blocks)


def _prefetch(blocks: Sequence[Any]) -> None:
    """While a block computes, the next one is gathered; in backward, the one before."""
    for block, after in pairwise(blocks):
        block.set_modules_to_forward_prefetch([after])
        after.set_modules_to_backward_prefetch([block])


def _data_parallel(module: ModelWithLoss, config: ParallelConfig, world: World) -> ParallelModel:
    """DDP, with gradients rounded to bf16 or cut to low rank on the wire where asked for."""
    if config.compress_gradients != "none" and world.device.type != "cuda":
        raise ConfigError(f"compress_gradients = {config.compress_gradients!r} needs GPUs and NCCL. Remove it")
    world.open_local_group()
    wrapped = DistributedDataParallel(module, gradient_as_bucket_view=True)
    if config.compress_gradients == "bf16":
        wrapped.register_comm_hook(None, bf16_compress_hook)
    if config.compress_gradients != "powersgd":
        return ParallelModel(module, wrapped, "ddp")
    state = PowerSGDState(
        None, matrix_approximation_rank=config.powersgd_rank, start_powerSGD_iter=config.powersgd_start_step
    )
    wrapped.register_comm_hook(state, powerSGD_hook)
    return ParallelModel(module, wrapped, "ddp", state)
