"""Parameters of a model that is divided over tensor ranks: sums of their gradients, and their whole tensors.

Each rank holds its part of every projection of the decoder, of embedding and head, as ordinary parameters, which FSDP
or DDP then handles like those of a smaller model. What differs is here:

    gradients   of what every rank holds and uses for its part of the work are summed over the ranks: norms, since a
                rank normalises its own tokens or heads; the half of a LoRA adapter that is not divided; key/value heads
                that several ranks hold; tower and projector, since a rank encodes its own images. One all-reduce
                per step and 32 million elements, when the last micro-batch is done
    norm        a part counts once
    saving      the whole tensor, of which a rank saves or loads its part, so that any other layout can load it
    export      one tensor at a time is gathered
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import Shard as Placement

from saccade.errors import ConfigError
from saccade.model.layers import ShardedEmbedding
from saccade.model.linear import ALIGNMENT, Linear, Projection
from saccade.model.lora_linear import LoraLinear
from saccade.model.shard import Shard, TensorRank
from saccade.model.tensor_parallel import connect, shard_model
from saccade.model.vlm import VLM
from saccade.parallel_dims import SHARDS
from saccade.train.dtensor import local_tensor
from saccade.train.optimizer import total_norm
from saccade.train.parallel_config import Recompute
from saccade.train.stage_config import StageConfig
from saccade.train.tensor_exchange import DryExchange, TrainingExchange, regathering
from saccade.train.tensor_images import divide_images
from saccade.world import World

_BUCKET_ELEMENTS = 32 * 2**20
"""Elements of gradients that are summed by one all-reduce."""
_SUMMED = ("language.layers.", "language.norm.")
"""Modules whose parameters see a rank's own tokens, heads or channels alone."""


_OF_IMAGES = ("vision.", "projector.")
"""Modules whose parameters see a rank's own images alone."""


def check_stage(stage: StageConfig) -> None:
    """Refuse settings of a stage that need whole matrices."""
    if stage.optimizer.kind == "muon":
        raise ConfigError("muon needs whole matrices, and parallel.tensor divides them. Use adamw, or parallel.shard")
    if stage.objective.label_smoothing and stage.objective.distillation is None:
        raise ConfigError(
            "label_smoothing needs the logits of the whole vocabulary, and parallel.tensor divides it. Remove one"
        )


def divide_model(model: VLM, rank: TensorRank) -> None:
    """Give a model on the meta device the sizes of a tensor rank's part.

    Parts must be equal, so that a saved state does not depend on their number.
    """
    shard_model(model, rank)
    for name, module in model.named_modules():
        shard = module.shard if isinstance(module, Linear | ShardedEmbedding) else None
        if shard is not None and (len(set(shard.sizes)) > 1 or shard.size % ALIGNMENT):
            raise ConfigError(
                f"{name}: {shard.size} channels cannot be divided evenly over {rank.size} tensor ranks, in units of "
                f"{ALIGNMENT}. Use another parallel.tensor"
            )


def divided_parameters(model: VLM) -> dict[str, Shard]:
    """Which part of each divided parameter this rank holds, along which dim, by name; others are held whole."""
    found: dict[str, Shard] = {}
    for prefix, module in model.named_modules():
        if not isinstance(module, Projection | ShardedEmbedding) or module.shard is None:
            continue
        own, inputs = module.shard, module.shard.dim == 1
        dims = {"weight": own.dim, "bias": 0}
        if isinstance(module, LoraLinear):
            dims |= {"lora_A": 1} if inputs else {"lora_B": 0}
        found |= {f"{prefix}.{name}": replace(own, dim=dim, shapes={}) for name, dim in dims.items()}
    return found


class TensorShards:
    """The divided parameters of a training run."""

    def __init__(self, model: VLM, world: World) -> None:
        self.parts = divided_parameters(model)
        self._model, self._world, self._group = model, world, world.group("tensor")
        self._summed = _summed_names(model, self.parts)
        self.exchange: TrainingExchange | None = None
        """What this rank exchanges with the others, once the model is connected."""

    @cached_property
    def _parameters(self) -> dict[str, Tensor]:
        """The parameters by name, once they are sharded and allocated."""
        return dict(self._model.named_parameters())

    def connect(
        self, recompute: Recompute, *, is_compiled: bool = False, exchange: TrainingExchange | None = None
    ) -> None:
        """Let the model communicate. `recompute`: activation checkpointing that the decoder will have.

        With stochastic depth every rank encodes all images, so that all ranks draw the same random numbers.
        """
        exchange = exchange or TrainingExchange(self._group, self._world.index("tensor"), self._world.dims.tensor)
        self.exchange = exchange
        _connect(self._model, exchange, recompute, is_compiled=is_compiled)
        if self._model.vision.drop_path == 0.0:
            divide_images(self._model, exchange)
            self._summed |= {name for name, _ in self._model.named_parameters() if name.startswith(_OF_IMAGES)}

    # -------------------------------------------------------------- gradients

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Sum gradients of which every rank has a part, in place."""
        for bucket in self._buckets():
            flat = torch.cat([_in_place(gradient, part).flatten() for gradient, part in bucket])
            flat = flat.to(self._world.device)  # offloaded gradients are on the host
            dist.all_reduce(flat, group=self._group)
            sizes = [gradient.numel() * _num_parts(part) for gradient, part in bucket]
            for (gradient, part), summed in zip(bucket, torch.split(flat, sizes), strict=True):
                own = summed if part is None else summed.view(_num_parts(part), -1)[part.index]
                gradient.copy_(own.view_as(gradient))

    def _buckets(self) -> Iterator[list[tuple[Tensor, Shard | None]]]:
        """Gradients to sum, of one dtype and of bounded size; with the part, if other ranks have other parts."""
        by_dtype: dict[torch.dtype, list[tuple[Tensor, Shard | None]]] = {}
        for name, parameter in self._parameters.items():
            if name in self._summed and parameter.grad is not None:
                gradient = local_tensor(parameter.grad)
                by_dtype.setdefault(gradient.dtype, []).append((gradient, self.parts.get(name)))
        for alike in by_dtype.values():
            bucket: list[tuple[Tensor, Shard | None]] = []
            size = 0
            for gradient, part in alike:
                if bucket and size + gradient.numel() > _BUCKET_ELEMENTS:
                    yield bucket
                    bucket, size = [], 0
                bucket.append((gradient, part))
                size += gradient.numel() * _num_parts(part)
            if bucket:
                yield bucket

    def grad_norm(self, omitted: Collection[str] = ()) -> Tensor:
        """L2 norm of all gradients together, on the device; a part that several ranks hold counts once.

        `omitted`: parameters that do not count.
        """
        whole: list[Tensor] = []
        divided: dict[int, list[Tensor]] = {}
        for name, parameter in self._parameters.items():
            if name in omitted:
                continue
            part = self.parts.get(name)
            (whole if part is None else divided.setdefault(part.copies, [])).append(parameter)
        squares = [total_norm(parameters).square() / copies for copies, parameters in divided.items()]
        square = sum((one.to(self._world.device) for one in squares), torch.zeros((), device=self._world.device))
        dist.all_reduce(square, group=self._group)
        return (total_norm(whole).to(self._world.device).square() + square).sqrt()

    # -------------------------------------------------------------- whole tensors

    def as_part(self, name: str, tensor: Tensor) -> Tensor:
        """A parameter, or state of its shape, as this rank's part of the whole one: for saving and loading.

        A tensor that FSDP has sharded too is a part of a part.
        """
        part = self.parts.get(name)
        if part is None or tensor.ndim == 0:
            return tensor
        local = local_tensor(tensor).detach()
        is_sharded = isinstance(tensor, DTensor)
        dims, axes = self._world.dims, ("tensor", *SHARDS) if is_sharded else ("tensor",)
        # The ranks of the mesh: parts, copies of each, and shards of each.
        [ranks] = [ranks for ranks in dims.groups(*axes) if self._world.rank in ranks]
        mesh_ranks = torch.tensor(ranks).view(-1, dims.tensor).T.reshape(part.num_parts, part.copies, -1)
        mesh = DeviceMesh(self._world.device.type, mesh_ranks, _init_backend=False)
        shape = self.whole_shape(name, tensor.shape)
        placements = (Placement(part.dim), Replicate(), Placement(0) if is_sharded else Replicate())
        meta = torch.empty(local.shape, device="meta", dtype=local.dtype)
        spec = DTensor.from_local(
            meta, mesh, placements, run_check=False,
            shape=torch.Size(shape), stride=torch.empty(shape, device="meta").stride(),
        )._spec  # fmt: skip
        return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]

    def whole_shape(self, name: str, shape: Sequence[int]) -> list[int]:
        """The shape of the whole of a parameter, given that of a rank's part."""
        part, sizes = self.parts.get(name), list(shape)
        if part is not None:
            sizes[part.dim] *= part.num_parts
        return sizes

    def whole(self, name: str, tensor: Tensor) -> Tensor:
        """The whole of a divided tensor, gathered. Collective."""
        part = self.parts.get(name)
        if part is None:
            return tensor
        own = tensor.contiguous()
        parts = [torch.empty_like(own) for _ in range(self._world.dims.tensor)]
        dist.all_gather(parts, own, group=self._group)
        return torch.cat(parts[:: part.copies], dim=part.dim)


def _summed_names(model: VLM, parts: dict[str, Shard]) -> set[str]:
    """Parameters of whose gradients a rank has a part: it uses them for its own tokens, heads, channels or outputs."""
    copied = {name for name, part in parts.items() if part.copies > 1}
    own = {f"{name.rpartition('.')[0]}." for name in parts}
    held = [name for name, _ in model.named_parameters() if name not in parts]
    return copied | {name for name in held if name.startswith((*_SUMMED, *own))}


def dry_connect(model: VLM, size: int, recompute: Recompute, *, is_compiled: bool = False) -> None:
    """Let a divided model on the meta device run without other ranks. It encodes all images, as if there were one."""
    _connect(model, DryExchange(size), recompute, is_compiled=is_compiled)


def _connect(model: VLM, exchange: TrainingExchange, recompute: Recompute, *, is_compiled: bool) -> None:
    """The inputs of what is neither recomputed nor compiled are gathered again in backward."""
    layers: list[Any] = list(model.language.layers)
    for layer in layers:
        if recompute != "full":
            layer.self_attn.forward = regathering(layer.self_attn.forward, exchange)
        if recompute == "none" and not is_compiled:
            layer.mlp.forward = regathering(layer.mlp.forward, exchange)
    connect(model, exchange)


def _num_parts(part: Shard | None) -> int:
    return 1 if part is None else part.num_parts


def _in_place(gradient: Tensor, part: Shard | None) -> Tensor:
    """A gradient in a row of its own; those of other parts are zeros."""
    if part is None:
        return gradient
    rows = gradient.new_zeros(part.num_parts, gradient.numel())
    rows[part.index] = gradient.flatten()
    return rows
