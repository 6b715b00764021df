"""Parallelism, activation checkpointing and compilation, applied to the single-device model in this order:

    tensor     (optional) this rank's part of every matrix of the decoder; see `tensor_parallel.py`
    lora       (optional) add LoRA adapters and freeze everything else; see `lora.py`
    qat        (optional) round weights in every product; see `quantization_aware.py`
    freeze     parameters with a learning rate of 0 require no gradients
    pipeline   (optional) keep the layers of this rank; see `pipeline.py`
    compile    torch.compile of each block without its attention; see `_compile`
    recompute  activation checkpointing of MLPs or whole blocks
    shard      FSDP2, or DDP
    load       allocate memory, load weights

Compilation precedes activation checkpointing, so that a checkpointed block runs its compiled code twice; sharding comes
last, so that its hooks are outside both. A pipeline divides the prepared model: what a recipe says is checked, counted
and exported for the whole.

`ParallelConfig` gives the layout, `ParallelDims`, and the layout the strategy:

    strategy   layout               each rank holds                            in DeepSpeed's terms
    none       one rank             everything
    ddp        replicate n          everything; gradients are averaged         data parallel
    fsdp       shard n              1/n of parameters, gradients, optimizer    ZeRO-3
    hsdp       replicate m x        1/n of them; m copies                      ZeRO-3 within, data parallel between
               shard n                                                         copies: MiCS, hpZ

With `reshard_after_forward = false` FSDP keeps the gathered parameters from forward to backward: half the all-gathers
for the memory of one unsharded bf16 copy. That is ZeRO-2. With `reduce_each_micro_batch = false` as well, gradients
stay unsharded until the last micro-batch of a step: ZeRO-1. Both pay off with gradient accumulation.

FSDP units: each decoder layer and each vision block, prefetched while the previous one computes. The vision tower
(patch embedding) is a unit; embedding, head, final norm and projector form the root, which is needed first and last.

Precision: FSDP stores parameters in fp32, gathers them in the compute dtype and reduces gradients in `reduce_dtype`.
Without sharding, parameters are in the compute dtype and the optimizer holds fp32 masters: no casts, fastest on one
GPU. Both start from the checkpoint's own precision. Gradients accumulate in fp32 either way; see `train_state.py`.
"""

import copy
import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.device_mesh import DeviceMesh
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
from saccade.model.shard import TensorRank
from saccade.model.vlm import VLM
from saccade.parallel_dims import LOSS, REPLICAS, SHARDS
from saccade.train.balanced_images import balance_images
from saccade.train.dry_run import MicroBatchSize
from saccade.train.gradient_compression import CompressedReduceScatter, compress_gradients
from saccade.train.lora import add_lora, lora_layers, lora_parameters, quantized_sizes
from saccade.train.loss import ModelWithLoss
from saccade.train.objectives.build import build_objective
from saccade.train.objectives.objective import Objective
from saccade.train.optimizer import freeze
from saccade.train.parallel_config import ParallelConfig, Recompute, Strategy
from saccade.train.parameter_groups import PARTS, OptimizerConfig, part_of
from saccade.train.pipeline import Pipeline, check_pipeline
from saccade.train.pipeline_link import PipelineLinks
from saccade.train.pipeline_module import PipelineModule
from saccade.train.pipeline_stages import keep_stages, pipeline_stages
from saccade.train.quantization_aware import add_fake_quantization, fake_quantized_layers
from saccade.train.saved_state import SavedState, load_tensors, weight_names
from saccade.train.stage_config import LoraConfig, QuantizationAwareConfig, StageConfig
from saccade.train.tensor_parallel import TensorShards, check_stage, divide_model, divided_parameters
from saccade.train.weights import load_weights, meta_model
from saccade.world import World

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ParallelModel:
    """A model ready for training."""

    module: ModelWithLoss
    """The model with its loss."""
    wrapped: nn.Module
    """The module to call: `module` itself, or DDP around it."""
    strategy: Strategy
    """Strategy by which the model is parallelized."""
    compression: PowerSGDState | None = None
    """Error feedback of PowerSGD."""
    reduce_scatters: Sequence[CompressedReduceScatter] = ()
    """Compressed reduce-scatters of FSDP units, with their error feedback."""
    tensor: TensorShards | None = None
    """The parameters that are divided over tensor ranks, if there are several."""
    pipeline: Pipeline | None = None
    """The pipeline that this rank is part of, if there is one."""
    masters: dict[str, Tensor] = field(default_factory=dict)
    """fp32 values for the optimizer: trained parameters whose precision is lower than the checkpoint folder's."""

    @property
    def model(self) -> VLM:
        """The model without its loss."""
        return self.module.model

    @property
    def whole(self) -> VLM:
        """The model of all ranks of the pipeline, on the meta device; without a pipeline it is `model`."""
        return self.model if self.pipeline is None else self.pipeline.whole

    def sync_gradients(self, *, is_last_micro_batch: bool, each_micro_batch: bool) -> None:
        """Choose whether the next backward pass reduces gradients over the ranks."""
        if isinstance(self.wrapped, DistributedDataParallel):
            self.wrapped.require_backward_grad_sync = is_last_micro_batch
        elif isinstance(self.wrapped, FSDPModule):
            self.wrapped.set_requires_gradient_sync(is_last_micro_batch or each_micro_batch)
            self.wrapped.set_is_last_backward(is_last_micro_batch)

    def reshard(self) -> None:
        """Free gathered parameters: FSDP keeps them after a forward pass without backward, even if shards change."""
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def collected(self, name: str, tensor: Tensor) -> Tensor:
        """The whole of a parameter on the main rank, of what tensor ranks and ranks of a pipeline have. Collective."""
        if self.pipeline is not None:
            return self.pipeline.collected(name, tensor, self.tensor)
        return tensor if self.tensor is None else self.tensor.whole(name, tensor)

    def reset_compression(self) -> None:
        """Clear the error feedback of compressed gradients, which may contain NaN after a bad step."""
        for one in self.reduce_scatters:
            one.residual = None
        if self.compression is not None:
            for memory in ("error_dict", "p_memory_dict", "q_memory_dict"):
                getattr(self.compression, memory).clear()


def parallelize(
    folder: Path,
    stage: StageConfig,
    config: ParallelConfig,
    world: World,
    *,
    dtype: str = "bf16",
    seed: int = 0,
    start: SavedState | None = None,
) -> ParallelModel:
    """Build the model of a checkpoint folder for a stage and load its weights.

    `seed`: initialization of LoRA adapters. `start`: the state that the stage starts from, if the objective needs a
    frozen copy of its model.
    """
    strategy = config.strategy_of(world.dims)
    is_sharded = strategy in ("fsdp", "hsdp")
    model = build_model(folder, stage, strategy, dtype, TensorRank(world.index("tensor"), world.dims.tensor))
    whole = model
    if world.dims.pipeline > 1:
        whole = copy.deepcopy(model)
    if config.balance_images:
        balance_images(model, world)
    tensor = TensorShards(model, world) if world.dims.tensor > 1 else None
    if tensor is not None:
        tensor.connect(config.recompute_language, is_compiled=config.compile)
    objective = build_objective(
        stage.objective,
        folder=folder,
        has_lora=stage.lora is not None,
        dtype=dtype,
        device=world.device,
        make_start=None if start is None else lambda: _frozen_start(folder, stage, start, world, dtype, seed),
    )
    module = ModelWithLoss(model, objective)
    if world.dims.pipeline > 1:
        module = _stages_of_rank(model, stage, config, world, objective, DTYPES[dtype], tensor)
    is_trained = _is_trained(model.vision) or _is_trained(model.projector)
    module.encode_dummy_image = is_sharded or is_trained or config.balance_images
    if config.compile:
        _compile(model)
    has_dropout = stage.lora is not None and stage.lora.dropout > 0.0
    recompute(model.vision.blocks, config.recompute_vision, is_random=has_dropout)
    recompute(model.language.layers, config.recompute_language, is_random=has_dropout)
    reduce_scatters: list[CompressedReduceScatter] = []
    if is_sharded:
        shard(module, data_mesh(strategy, world), config, DTYPES[dtype])
        if (rounding := config.rounding_of_shards) is not None:
            reduce_scatters = compress_gradients(module, rounding)
    _allocate(module, "cpu" if is_sharded and config.offload else world.device)
    masters_device = "cpu" if stage.optimizer.offload else world.device
    parts = {} if tensor is None else tensor.parts
    masters = load_weights(model, folder, seed=seed, masters_device=masters_device, parts=parts)
    pipeline = None
    if isinstance(module, PipelineModule):
        averages, reduces_each = strategy == "ddp", config.reduce_each_micro_batch
        pipeline = Pipeline(module, whole, world, averages=averages, reduces_each=reduces_each)
    if strategy == "ddp" and pipeline is None:
        parallel = _data_parallel(module, config, world)
    else:
        parallel = ParallelModel(module, module, strategy)
    return replace(parallel, masters=masters, reduce_scatters=reduce_scatters, tensor=tensor, pipeline=pipeline)


def _stages_of_rank(
    model: VLM,
    stage: StageConfig,
    config: ParallelConfig,
    world: World,
    objective: Objective,
    dtype: torch.dtype,
    tensor: TensorShards | None,
) -> PipelineModule:
    """What a rank of a pipeline runs; the layers of other ranks are removed from the model."""
    check_pipeline(stage, config, is_sharded=config.strategy_of(world.dims) in ("fsdp", "hsdp"))
    size = MicroBatchSize(tokens=stage.data.max_seq_len, patches=stage.data.max_patches)
    stages = pipeline_stages(model, size, config, world.dims.pipeline)
    logger.info("pipeline: %s", stages)
    links = PipelineLinks(world, stages, dtype)
    keep_stages(model, stages, links.rank)
    return PipelineModule(model, objective, stages, links, None if tensor is None else tensor.exchange)


def build_model(
    folder: Path, stage: StageConfig, strategy: Strategy, dtype: str, rank: TensorRank | None = None
) -> VLM:
    """Build the model of a stage on the meta device, with adapters or rounding; freeze what has learning rate 0.

    `rank`: which part of it, with tensor parallelism.
    """
    is_sharded = strategy in ("fsdp", "hsdp")
    model = meta_model(folder, torch.float32 if is_sharded else DTYPES[dtype])
    if rank is not None and rank.size > 1:
        check_stage(stage)
        divide_model(model, rank)
    prepare_model(model, stage.optimizer, stage.lora, stage.qat, dtype)
    model.vision.drop_path = stage.drop_path
    return model


def prepare_model(
    model: VLM, optimizer: OptimizerConfig, lora: LoraConfig | None, qat: QuantizationAwareConfig | None, dtype: str
) -> None:
    """Add LoRA adapters or fake quantization to a model on the meta device, and freeze what is not trained."""
    if lora is not None:
        add_lora(model, lora, DTYPES[dtype])
    if qat is not None:
        add_fake_quantization(model, qat, DTYPES[dtype])
    _freeze(model, optimizer)


def _allocate(module: ModelWithLoss, device: torch.device | str) -> None:
    """Allocate every parameter, and tie the head to the embedding again."""
    module.to_empty(device=device)
    if hasattr(module.model, "head"):  # not on all ranks of a pipeline
        module.model.tie_head()


def _frozen_start(folder: Path, stage: StageConfig, start: SavedState, world: World, dtype: str, seed: int) -> VLM:
    """The model that a stage starts from: the checkpoint folder with what earlier stages trained. Not sharded."""
    model = build_model(folder, stage, "none", dtype).eval().requires_grad_(False)
    _allocate(ModelWithLoss(model), world.device)
    load_weights(model, folder, seed=seed)
    parameters = dict(model.named_parameters())
    names = weight_names(start, averaged=True)
    load_tensors(start, {on_disk: parameters[name] for name, on_disk in names.items()}, world)
    return model


# ------------------------------------------------------------------ freeze


def _freeze(model: VLM, optimizer: OptimizerConfig) -> None:
    """Freeze parameters with a learning rate of 0, and those that are not run; with LoRA, everything but the adapters.

    At least one parameter must remain.
    """
    if adapters := lora_parameters(model):
        model.requires_grad_(False)
        try:
            freeze(adapters.items(), optimizer)
        except ConfigError as error:
            raise ConfigError(f"{error}. In a stage with lora only the adapters are trained") from error
    else:
        freeze(model.named_parameters(), optimizer)
    for module in model.vision.unused_modules():
        module.requires_grad_(False)


def _is_trained(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def trainable_table(model: VLM) -> str:
    """Number of parameters and of trained parameters of each part, on all tensor ranks, as a table."""
    sizes = {part: [0, 0] for part in PARTS}
    quantized, divided = quantized_sizes(model), divided_parameters(model)
    for name, parameter in model.named_parameters():
        size, found = sizes[part_of(name) or ""], quantized.get(name, parameter.numel())
        part = divided.get(f"{name.rpartition('.')[0]}.weight" if name in quantized else name)
        count = 1 if part is None else part.num_parts
        size[0] += found * count
        size[1] += parameter.numel() * count if parameter.requires_grad else 0
    rows = [(part, f"{total:,}", f"{trained:,}") for part, (total, trained) in sizes.items() if total]
    return "\n".join(
        f"{part:<12}{total:>16}{trained:>16}" for part, total, trained in [("part", "parameters", "trained"), *rows]
    )


# ------------------------------------------------------------------ compile, activation checkpointing


def _compile(model: VLM) -> None:
    """Compile each block: norms, MLP and residual sums; all blocks of a kind share the compiled code.

    Attention stays eager. Its kernels are chosen by the segment lengths of a packed sequence, which change with every
    micro-batch and would cause recompilation; what remains has one dynamic dim, the number of tokens. Quantized layers
    stay eager too: the compiler would dequantize their weights in forward and save them for backward.
    """
    blocks: list[nn.Module] = [*model.vision.blocks, *model.language.layers]
    for block in blocks:
        attention: Any = block.get_submodule("attn" if hasattr(block, "attn") else "self_attn")
        attention.forward = torch.compiler.disable(attention.forward)  # type: ignore[no-untyped-call]
        block.forward = torch.compile(block.forward, dynamic=True)
    quantized: list[Any] = [layer for layer in lora_layers(model).values() if layer.quantization != "none"]
    for layer in [*quantized, *fake_quantized_layers(model).values()]:
        layer.forward = torch.compiler.disable(layer.forward)  # type: ignore[no-untyped-call]


def recompute(blocks: nn.ModuleList, extent: Recompute, *, is_random: bool = False) -> None:
    """Activation checkpointing of each block, or only of its MLP, whose activations are the largest.

    `is_random`: blocks draw random numbers (dropout), which must repeat in backward.
    """
    for block in blocks:
        feed_forward: Any = block.mlp
        module: Any = {"none": None, "selective": feed_forward, "full": block}[extent]
        if module is not None:
            feed_forward.saves_activation = True
            module.forward = functools.partial(
                checkpoint, module.forward, use_reentrant=False, preserve_rng_state=is_random
            )


# ------------------------------------------------------------------ shard


def data_mesh(strategy: Strategy, world: World) -> DeviceMesh:
    """A 1D mesh of the shards, or replicas x shards; the shards of a replica are neighbouring ranks, on one node."""
    return world.mesh(SHARDS) if strategy == "fsdp" else world.mesh(REPLICAS, SHARDS)


def _chunks(module: ModelWithLoss) -> list[list[nn.Module]]:
    """The blocks that run one after another: all of them, or those of each stage that a rank of a pipeline has."""
    vision, layers = list(module.model.vision.blocks), module.model.language.layers
    if not isinstance(module, PipelineModule):
        return [[*vision, *layers]]
    chunks: list[list[nn.Module]] = []
    for chunk in range(module.stages.num_chunks):
        numbers = module.stages.layers(module.stage_of_chunk(chunk))
        chunks.append([*([] if chunk else vision), *(layers.get_submodule(str(number)) for number in numbers)])
    return chunks


def shard(module: ModelWithLoss, mesh: DeviceMesh, config: ParallelConfig, dtype: torch.dtype) -> None:
    """FSDP2: one unit per block, one for the vision tower, one for the root."""
    # Inputs are not cast: blocks receive bf16 activations and fp32 rotary tables.
    precision = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=DTYPES[config.reduce_dtype], cast_forward_inputs=False
    )
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if config.offload else OffloadPolicy()
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": precision, "offload_policy": offload}
    vision, chunks = module.model.vision, _chunks(module)
    for block in (block for chunk in chunks for block in chunk):
        fully_shard(block, reshard_after_forward=config.reshard_after_forward, **options)
    if any(True for _ in vision.parameters()):  # a rank of a pipeline may have none
        fully_shard(vision, reshard_after_forward=config.reshard_after_forward, **options)
    fully_shard(module, **options)
    for name in ("score", "score_objective"):
        register_fsdp_forward_method(module, name)
    for chunk in chunks:
        _prefetch(chunk)


def _prefetch(blocks: Sequence[Any]) -> None:
    """Gather the next block while one computes; in backward, the previous one."""
    for block, after in pairwise(blocks):
        block.set_modules_to_forward_prefetch([after])
        after.set_modules_to_backward_prefetch([block])


def _data_parallel(module: ModelWithLoss, config: ParallelConfig, world: World) -> ParallelModel:
    """DDP, optionally with a bf16 or PowerSGD communication hook."""
    if config.compress_gradients != "none" and world.device.type != "cuda":
        raise ConfigError(f"compress_gradients = {config.compress_gradients!r} needs GPUs and NCCL. Remove it")
    wrapped = DistributedDataParallel(module, process_group=world.mesh(LOSS).get_group(), gradient_as_bucket_view=True)
    if config.compress_gradients == "bf16":
        wrapped.register_comm_hook(None, bf16_compress_hook)
    if config.compress_gradients != "powersgd":
        return ParallelModel(module, wrapped, "ddp")
    state = PowerSGDState(
        None, matrix_approximation_rank=config.powersgd_rank, start_powerSGD_iter=config.powersgd_start_step
    )
    wrapped.register_comm_hook(state, powerSGD_hook)
    return ParallelModel(module, wrapped, "ddp", state)
