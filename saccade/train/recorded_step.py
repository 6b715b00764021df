"""The operations of one rank's training step in any layout, recorded on a laptop: no other ranks, and no values.

The real program runs at its real widths: modules, autograd, launchers of kernels, FSDP, the exchanges of tensor and
context ranks. Its tensors are fake ones, which have shapes only, and its process group is torch's fake one, whose
collectives return at once. What is recorded is what rank 0 would execute for one micro-batch:

    Product       a matrix product
    Attention     a pass of packed attention, whose cost depends on the lengths of segments
    Kernel        any other kernel: bytes that it reads and writes
    Collective    a collective, its ranks, and its bytes
    Wait          computation waits for the oldest collective of FSDP that it has not waited for

Layers of one kind are alike, so one of each is run and its record repeated (`thin_model.py`; `is_whole` runs all).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from saccade.device import DTYPES
from saccade.kernels import launch
from saccade.model.config import ModelConfig
from saccade.model.live_bytes import flops_of
from saccade.model.shard import TensorRank
from saccade.model.vlm import VLM
from saccade.parallel_dims import AXES, Axis, ParallelDims
from saccade.processor.inputs import ModelInputs, next_token_labels
from saccade.processor.patches import Grid
from saccade.train.context_batches import SequenceShare, context_group
from saccade.train.dry_run import mark_phases, model_blocks
from saccade.train.dtensor import local_tensor
from saccade.train.loss import ModelWithLoss
from saccade.train.optimizer import total_norm
from saccade.train.parallel_config import ParallelConfig
from saccade.train.parallelize import data_mesh, prepare_model, recompute, shard
from saccade.train.parameter_groups import OptimizerConfig
from saccade.train.stage_config import LoraConfig
from saccade.train.tensor_parallel import TensorShards, divide_model
from saccade.train.thin_model import ThinModel
from saccade.world import World

CollectiveKind = Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all"]
_KINDS: dict[str, CollectiveKind] = {
    "gather": "all-gather", "scatter": "reduce-scatter", "reduce": "all-reduce", "alltoall": "all-to-all"
}  # fmt: skip
"""By a part of the name of torch's operation; the first match counts."""
_UNPRICED = (
    "empty",
    "detach",
    "lift_fresh",
    "profiler",
    "prim",
    "all_gather_copy_in",
    "record_stream",
    "set_",
    "resize_",
)
"""Operations that allocate or do nothing, by a part of their names; FSDP's copies before a gather are hidden by it."""
_ATTENTION = {"forward_kernel": False, "key_gradient_kernel": True}
"""Tiled kernels of attention, and whether they stand for a backward pass (which has the kernel of dQ as well)."""


class Product(NamedTuple):
    """A matrix product."""

    phase: str
    flops: float
    num_bytes: int


class Attention(NamedTuple):
    """A pass of packed attention over whole segments."""

    phase: str
    num_heads: int
    head_dim: int
    is_backward: bool


class Kernel(NamedTuple):
    """Another kernel."""

    phase: str
    name: str
    num_bytes: int


class Collective(NamedTuple):
    """A collective."""

    phase: str
    kind: CollectiveKind
    axes: tuple[Axis, ...]
    """Its ranks differ in these axes."""
    num_bytes: int
    """Bytes of the largest buffer of a rank: of what a gather makes, a reduce-scatter reads, an all-to-all receives."""
    overlaps: bool
    """Whether computation continues meanwhile: FSDP's own collectives."""


class Wait(NamedTuple):
    """Computation waits for the oldest all-gather of FSDP that nothing has waited for."""

    phase: str


Operation = Product | Attention | Kernel | Collective | Wait


@dataclass(frozen=True, kw_only=True)
class SequenceShape:
    """A packed sequence: its conversations and images."""

    lengths: tuple[int, ...]
    """Tokens of each conversation, image tokens included."""
    grids: tuple[Grid, ...] = ()
    """Grids of all images."""
    num_loss_tokens: int | None = None
    """Loss tokens; default: all tokens."""

    @property
    def num_tokens(self) -> int:
        """Tokens."""
        return sum(self.lengths)


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """What is trained, and how."""

    config: ModelConfig
    """The model."""
    parallel: ParallelConfig
    """Activation checkpointing, and the settings of FSDP."""
    lora: LoraConfig | None = None
    """LoRA, if only adapters are trained."""
    dtype: Literal["bf16", "fp32"] = "bf16"
    """Compute dtype."""


def record_step(
    settings: StepSettings, dims: ParallelDims, shape: SequenceShape, *, is_whole: bool = False
) -> list[Operation]:
    """The operations of rank 0 for one micro-batch, and of the gradient norm. Pipeline parallelism is not run."""
    thin = ThinModel.of(settings.config)
    chosen = settings if is_whole else replace(settings, config=thin.config)
    with _fake_world(replace(dims, pipeline=1)) as world, torch.autograd.set_multithreading_enabled(False):
        operations = record_in(world, chosen, shape)
    if is_whole:
        return operations
    return thin.repeated(operations, lambda one: one.phase, lambda one, phase: one._replace(phase=phase))


@contextlib.contextmanager
def _fake_world(dims: ParallelDims) -> Iterator[World]:
    """Rank 0 of a world without other ranks, on a thread that is in no process group."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # it registers the backend

    assert not dist.is_initialized(), "steps are recorded outside of a run"
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=dims.size)
    try:
        with World(0, dims.size, 0, torch.device("cpu"), dims=dims).arranged(dims) as world:
            yield world
    finally:
        dist.destroy_process_group()


def record_in(
    world: World, settings: StepSettings, shape: SequenceShape, *, has_values: bool = False
) -> list[Operation]:
    """Build the model in its layout, as `parallelize` does, and run a step of it.

    `has_values`: with real tensors, and thus with the collectives of a real world.
    """
    strategy, dtype = settings.parallel.strategy_of(world.dims), DTYPES[settings.dtype]
    is_sharded = strategy in ("fsdp", "hsdp")
    with torch.device("meta"):
        model = VLM(settings.config).to(torch.float32 if is_sharded else dtype)
        if world.dims.tensor > 1:
            divide_model(model, TensorRank(0, world.dims.tensor))
        prepare_model(model, OptimizerConfig(), settings.lora, None, settings.dtype)
    tensor = TensorShards(model, world) if world.dims.tensor > 1 else None
    if tensor is not None:
        tensor.connect(settings.parallel.recompute_language)
    module = ModelWithLoss(model)
    recompute(model.vision.blocks, settings.parallel.recompute_vision)
    recompute(model.language.layers, settings.parallel.recompute_language)
    own = set[str]()
    if is_sharded:
        mesh = data_mesh(strategy, world)
        shard(module, mesh, settings.parallel, dtype)
        own = {mesh.get_group(dim).group_name for dim in range(mesh.ndim)}
    inputs, labels, num_loss_tokens = _rank_inputs(model, world, shape)
    recorder = _Recorder(_names_of_groups(world), own, is_fake=not has_values)
    hooks = list(mark_phases(model, model_blocks(model), recorder))
    try:
        with contextlib.nullcontext() if has_values else FakeTensorMode(allow_non_fake_inputs=True):
            module.to_empty(device="cpu")
            model.tie_head()
            if has_values:
                with torch.no_grad():
                    torch._foreach_zero_([local_tensor(x) for x in model.parameters()])
            inputs, labels = _allocated(inputs, has_values), labels if has_values else torch.empty_like(labels)
            dry = contextlib.nullcontext() if has_values else launch.dry_run(recorder.on_launch)
            with dry, recorder:
                loss, _ = module(inputs, labels, torch.ones(()), num_loss_tokens)
                loss.backward()
                recorder.start_phase("the update")
                if tensor is not None:
                    tensor.sum_gradients()
                    tensor.grad_norm()
                else:
                    total_norm(model.parameters())
    finally:
        for hook in hooks:
            hook.remove()
    return recorder.operations


def combined_operations(vision: Sequence[Operation], language: Sequence[Operation]) -> list[Operation]:
    """A step with the vision tower of one record and all others of another: they are checkpointed differently."""
    of_tower: dict[str, list[Operation]] = {}
    for one in vision:
        of_tower.setdefault(one.phase, []).append(one)
    found: list[Operation] = []
    for phase, group in groupby(language, key=lambda one: one.phase):
        found += of_tower[phase] if " of vision." in phase else group
    return found


def _names_of_groups(world: World) -> dict[str, tuple[Axis, ...]]:
    """The axes of every process group by its name."""
    assert dist.group.WORLD is not None, "it is initialized"
    return {str(dist.group.WORLD.group_name): AXES} | {
        str(group.group_name): axes for (axes, *_), group in world.process_groups.items()
    }


# ------------------------------------------------------------------ inputs


def _rank_inputs(model: VLM, world: World, shape: SequenceShape) -> tuple[ModelInputs, Tensor, int]:
    """(inputs, labels, number of loss tokens) of rank 0; patches have shapes only."""
    vision = model.vision
    tokens_of = [vision.layout([grid]).sizes.num_tokens for grid in shape.grids]
    whole = _inputs(model, shape, sum(tokens_of))
    labels = next_token_labels(whole)
    context = context_group(world)
    if context.num_ranks == 1:
        return whole, labels, int((labels >= 0).sum())
    from saccade.data.image_shares import balance, image_cost

    ranks = balance([image_cost(vision.num_patches([grid])) for grid in shape.grids], context.num_ranks)
    own = [grid for grid, rank in zip(shape.grids, ranks, strict=True) if rank == context.rank]
    whole = replace(whole, patches=_patches(model, own))
    share = SequenceShare(
        whole, context, image_ranks=ranks, image_tokens=tokens_of, window=model.config.language.sliding_window
    )
    return share.inputs(), *share.labels(labels)


def _inputs(model: VLM, shape: SequenceShape, num_image_tokens: int) -> ModelInputs:
    """The whole packed sequence, its image tokens spread evenly; the last tokens have labels."""
    num_tokens = shape.num_tokens
    num_loss = num_tokens if shape.num_loss_tokens is None else shape.num_loss_tokens
    starts = torch.tensor([0, *shape.lengths]).cumsum(0).int()
    grey = (0.5,) * model.config.vision.in_channels
    return ModelInputs(
        token_ids=torch.zeros(num_tokens, dtype=torch.int64),
        cu_seqlens=starts,
        positions=torch.zeros(3, num_tokens, dtype=torch.int64),
        loss_mask=torch.arange(num_tokens) >= num_tokens - num_loss,
        patches=_patches(model, shape.grids),
        image_grids=torch.tensor(shape.grids, dtype=torch.int64).view(-1, 3),
        image_token_index=torch.from_numpy(np.arange(num_image_tokens) * num_tokens // max(1, num_image_tokens)),
        pixel_mean=grey,
        pixel_std=grey,
        max_seqlen=max(shape.lengths),
    )


def _patches(model: VLM, grids: Sequence[Grid]) -> Tensor:
    count = model.vision.num_patches(grids) if grids else 0
    return torch.empty(count, model.config.vision.patch_dim, dtype=torch.uint8, device="meta")


def _allocated(inputs: ModelInputs, has_values: bool) -> ModelInputs:
    """The inputs with patches, or all as fake tensors; the host computes sizes from the grids, which stay."""

    def allocate(x: Tensor) -> Tensor:
        return x if has_values and not x.is_meta else torch.zeros(x.shape, dtype=x.dtype)

    kept = {name: value for name, value in vars(inputs).items() if name in ("image_grids", "group")}
    others = {name: value for name, value in vars(inputs).items() if name not in kept}
    return type(inputs)(**tree_map_only(Tensor, allocate, others), **kept)


# ------------------------------------------------------------------ recording


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records operations as they are dispatched, above the mode that makes tensors fake."""

    def __init__(self, groups: dict[str, tuple[Axis, ...]], of_fsdp: set[str], is_fake: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._is_fake = is_fake
        self.operations: list[Operation] = []
        self.kind = "all"
        """Set by the hooks of phases, and not used."""
        self._phase, self._groups, self._of_fsdp = "the start", groups, of_fsdp

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled; torch's check would import the compiler."""
        return False

    def start_phase(self, name: str, block: str | None = None) -> None:
        """Begin another phase of the step, see `dry_run`."""
        self._phase = name

    def on_launch(self, name: str, args: Sequence[object]) -> None:
        """Record a Triton kernel that is not launched."""
        tensors = {id(x): x for x in args if isinstance(x, Tensor)}
        if name in _ATTENTION:
            query = next(iter(tensors.values()))
            self.operations.append(Attention(self._phase, query.shape[1], query.shape[2], _ATTENTION[name]))
        elif name != "query_gradient_kernel":
            self.operations.append(Kernel(self._phase, name, _num_bytes(tensors.values())))

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if operation is torch.ops.prim.device.default:
            return operation(*args)
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor dispatches the operations of its local tensors
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        is_on_host = self._is_fake and tensors and not any(isinstance(x, FakeTensor) for x in tensors)
        if is_on_host and operation.namespace == "aten":
            with unset_fake_temporarily():
                return operation(*args, **kwargs)  # sizes of images, which the host computes with
        out = operation(*args, **kwargs)
        self._record(operation, args, kwargs, out, tensors)
        return out

    def _record(self, operation: Any, args: Any, kwargs: Any, out: Any, tensors: list[Tensor]) -> None:
        name = operation.name()
        if operation.namespace in ("c10d", "_c10d_functional"):
            self._record_collective(name, args, tensors)
        elif name.startswith("fsdp::split_with_sizes_copy"):
            self.operations += [Wait(self._phase), Kernel(self._phase, name, _num_bytes(tensors))]
        elif flops := flops_of(operation, args, kwargs, out):
            self.operations.append(Product(self._phase, flops, _num_bytes([*tensors, out])))
        elif not operation.is_view and not any(part in name for part in _UNPRICED):
            made = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
            self.operations.append(Kernel(self._phase, name, _num_bytes([*tensors, *made])))

    def _record_collective(self, name: str, args: Any, tensors: list[Tensor]) -> None:
        kind = next((kind for part, kind in _KINDS.items() if part in name), None)
        if kind is None:
            return
        groups = [x for x in tree_leaves(args) if isinstance(x, torch.ScriptObject)]
        group = next(found for x in groups if (found := _group_name(x)) is not None)
        overlaps = group in self._of_fsdp and self._phase != "the update"
        largest = max(x.nbytes for x in tensors)
        self.operations.append(Collective(self._phase, kind, self._groups[group], largest, overlaps))


def _group_name(value: Any) -> str | None:
    try:
        return dist.ProcessGroup.unbox(value).group_name
    except (RuntimeError, TypeError):
        return None


def _num_bytes(tensors: Any) -> int:
    """Bytes of tensors, each counted once."""
    return sum({id(x): x.nbytes for x in tensors if isinstance(x, Tensor)}.values())
