"""Pipeline parallelism: ranks have different layers and pass packed micro-batches on.

    micro-batches -> schedule of this rank -> forward and backward passes with messages between them -> gradients

`pipeline_stages.py` says which layers a rank has, `pipeline_schedule.py` in which order it works, `pipeline_module.py`
what it sends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from saccade.errors import ConfigError
from saccade.model.deferred_gradients import DeferredGradients, deferrable, deferred
from saccade.model.vlm import VLM
from saccade.parallel_dims import LOSS
from saccade.train.batches import MicroBatch
from saccade.train.dtensor import local_tensor
from saccade.train.parallel_config import ParallelConfig
from saccade.train.pipeline_link import Arriving
from saccade.train.pipeline_module import PipelineModule
from saccade.train.pipeline_schedule import Pass
from saccade.train.pipeline_stages import TIED, PipelineStages
from saccade.train.stage_config import StageConfig
from saccade.train.tensor_parallel import TensorShards
from saccade.world import World

_BUCKET_ELEMENTS = 32 * 2**20
"""Elements of gradients that are averaged by one all-reduce."""


def check_pipeline(stage: StageConfig, config: ParallelConfig, *, is_sharded: bool) -> None:
    """Refuse settings that a pipeline cannot be combined with. `is_sharded`: FSDP divides the layers of a rank."""
    objective = stage.objective
    if objective.dpo is not None or (objective.distillation is not None and objective.distillation.top_k is None):
        name = "dpo" if objective.dpo is not None else "distillation"
        raise ConfigError(
            f"objective.{name} runs a second model, whole and on the last rank of the pipeline. Use parallel.shard or "
            "parallel.tensor instead of pipeline, or distillation from stored logits (top_k)"
        )
    if config.compress_gradients != "none" and config.is_ddp:
        raise ConfigError("compress_gradients is for DDP or FSDP, and a pipeline averages gradients itself. Remove it")
    if config.defers_weights and (unfit := _unfit_for_deferring(config, is_sharded=is_sharded)):
        raise ConfigError(
            f"pipeline_schedule = 'zero-bubble' computes gradients of weights later, and {unfit}. Use 'interleaved', "
            "or strategy = 'ddp' without compile and recompute"
        )


def _unfit_for_deferring(config: ParallelConfig, *, is_sharded: bool) -> str:
    """Why gradients of weights cannot be computed later; empty if they can."""
    if is_sharded:
        return "fsdp reduces the gradients of a block at once"
    if config.compile:
        return "compile generates code that computes them at once"
    is_recomputed = {config.recompute_vision, config.recompute_language} != {"none"}
    return "keeps the activations that recompute frees" if is_recomputed else ""


@dataclass
class _Held:
    """What a rank keeps of a chunk's forward pass until backward."""

    received: Tensor | None
    output: Tensor
    """Rows for the next stage, or the loss."""
    num_tokens: int


class Pipeline:
    """The pipeline of a training run, seen by one rank."""

    def __init__(
        self,
        module: PipelineModule,
        whole: VLM,
        world: World,
        *,
        averages: bool,
        reduces_each: bool,
    ) -> None:
        """`whole`: the model of all ranks, prepared for training on the meta device.

        `averages`: whether gradients are averaged over replicas here, because no FSDP does; `reduces_each`: whether
        FSDP reduces gradients after every micro-batch.
        """
        self.stages: PipelineStages = module.stages
        self.whole = whole
        self._module, self._links, self._world = module, module.links, world
        self._averages, self._reduces_each = averages, reduces_each
        trained = [self.stages.stage_of(name) for name, one in whole.named_parameters() if one.requires_grad]
        self._first_trained = min(trained)
        """Stages up to this one are given no rows that need gradients."""
        self._shapes = {name: parameter.shape for name, parameter in whole.named_parameters()}
        is_end = self._links.rank in (0, self.stages.num_ranks - 1)
        self._has_copy = self.stages.is_head_tied and is_end

    # -------------------------------------------------------------- a step

    def run(
        self, batches: Iterator[MicroBatch], num_micro_batches: int, count: Tensor, num_sums: int
    ) -> tuple[list[Tensor], Tensor]:
        """Accumulate the gradients of a step: (loss of each micro-batch, their sums); zeros without the last stage.

        `count`: what losses are divided by.
        """
        step = _Step(self, self._module, batches, num_micro_batches, count, num_sums)
        with deferrable() if self.stages.defers_weights else nullcontext():
            step.run()
        self._links.finish()
        if self._averages:
            self._average_gradients()
        if self._has_copy:
            self._sum_copies()
        return step.losses, step.sums

    def needs_gradient(self, stage: int) -> bool:
        """Whether the rows that a stage is given need gradients: something before it is trained."""
        return stage > self._first_trained

    def sync_gradients(self, one: Pass, *, is_last: bool, is_last_of_chunk: bool) -> None:
        """Choose whether the next backward pass reduces gradients, with FSDP."""
        root = self._module
        if not isinstance(root, FSDPModule):
            return
        root.set_requires_gradient_sync(self._reduces_each or is_last, recurse=False)
        for unit in self._units(one.chunk):
            unit.set_requires_gradient_sync(self._reduces_each or is_last_of_chunk)
        root.set_is_last_backward(is_last)

    def _units(self, chunk: int) -> Iterator[FSDPModule]:
        """FSDP units of a chunk, apart from the root."""
        model, stage = self._module.model, self._module.stage_of_chunk(chunk)
        units: list[nn.Module] = [model.vision] if stage == 0 else []
        units += [model.language.layers.get_submodule(str(layer)) for layer in self.stages.layers(stage)]
        yield from (unit for unit in units if isinstance(unit, FSDPModule))

    # -------------------------------------------------------------- gradients

    @torch.no_grad()
    def _average_gradients(self) -> None:
        """Average gradients over the ranks that hold the same parameters, in buckets of one dtype."""
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for parameter in self._module.model.parameters():
            if parameter.requires_grad:
                if parameter.grad is None:  # other replicas may have one
                    parameter.grad = torch.zeros_like(parameter)
                by_dtype.setdefault(parameter.grad.dtype, []).append(parameter.grad)
        group = self._world.group(*LOSS)
        for gradients in by_dtype.values():
            for bucket in _buckets(gradients):
                flat = torch.cat([gradient.flatten() for gradient in bucket])
                dist.all_reduce(flat.div_(self._world.num_loss_ranks), group=group)
                parts = torch.split(flat, [gradient.numel() for gradient in bucket])
                for gradient, part in zip(bucket, parts, strict=True):
                    gradient.copy_(part.view_as(gradient))

    @torch.no_grad()
    def _sum_copies(self) -> None:
        """Add up the gradients of the embedding and of the head tied to it; both ranks get the same bits."""
        parameter = dict(self._module.model.named_parameters())[TIED]
        if parameter.grad is None:
            return
        own = local_tensor(parameter.grad)
        there, group = self.stages.num_ranks - 1 - self._links.rank, self._world.group("pipeline")
        ours = own.to(self._world.device).contiguous()  # offloaded gradients are on the host
        theirs = torch.empty_like(ours)
        operations = [
            dist.P2POp(dist.isend, ours, group=group, group_peer=there),
            dist.P2POp(dist.irecv, theirs, group=group, group_peer=there),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        own.add_(theirs.to(own.device))

    def total_norm(self, own: Tensor) -> Tensor:
        """L2 norm of the gradients of all ranks, given that of this one."""
        square = own.square()
        dist.all_reduce(square, group=self._world.group("pipeline"))
        return square.sqrt()

    def is_copy(self, name: str) -> bool:
        """Whether this rank's parameter is a copy of another rank's: a head tied to the embedding."""
        return self.stages.is_head_tied and name == TIED and self._links.rank == self.stages.num_ranks - 1

    # -------------------------------------------------------------- whole tensors

    def is_elsewhere(self, name: str) -> bool:
        """Whether a parameter belongs to other ranks of the pipeline only."""
        return name in self._shapes and self.stages.rank_of(name) != self._links.rank and not self.is_copy(name)

    def collected(self, name: str, tensor: Tensor, tensor_shards: TensorShards | None) -> Tensor:
        """A whole parameter on the main rank, in fp32, whichever rank has it; others return what they have.

        `tensor`: this rank's, on the meta device if another one has it. Collective.
        """
        owner, own = self.stages.rank_of(name), self._links.rank
        shape = self._shapes[name] if tensor_shards is None else tensor_shards.whole_shape(name, self._shapes[name])
        if own == owner and tensor_shards is not None:
            tensor = tensor_shards.whole(name, tensor)
        if owner == 0 or not self._world.is_in_first("pipeline"):
            return tensor
        group = self._world.group("pipeline")
        if own == owner:
            dist.send(tensor.to(self._world.device, torch.float32).contiguous(), group=group, group_dst=0)
        elif own == 0:
            tensor = torch.empty(shape, dtype=torch.float32, device=self._world.device)
            dist.recv(tensor, group=group, group_src=owner)
        return tensor


class _Step:
    """One step of a rank: what is held of each micro-batch, and messages that are expected."""

    def __init__(
        self,
        pipeline: Pipeline,
        module: PipelineModule,
        batches: Iterator[MicroBatch],
        num_micro_batches: int,
        count: Tensor,
        num_sums: int,
    ) -> None:
        self._pipeline, self._module, self._links = pipeline, module, module.links
        self._batches, self._num_micro_batches, self._count = batches, num_micro_batches, count
        self._stages = module.stages
        self._passes: Sequence[Pass] = self._stages.schedule(num_micro_batches).passes[self._links.rank]
        self._deferred: dict[tuple[int, int], DeferredGradients] = {}
        self._fetched: dict[int, MicroBatch] = {}
        self._num_fetched = 0
        self._shapes: dict[tuple[int, int], tuple[int, int]] = {}
        """Shape of the rows that a stage is given, by stage and micro-batch."""
        self._held: dict[tuple[int, int], _Held] = {}
        self._arriving: dict[Pass, Arriving | None] = {}
        self.losses = [torch.zeros((), device=count.device)] * num_micro_batches
        self.sums = torch.zeros(num_sums, device=count.device)

    def run(self) -> None:
        """Run all passes; each is expecting its message while the pass before it runs."""
        for number, one in enumerate(self._passes):
            if one.is_of_weights:
                self._deferred.pop((one.chunk, one.micro_batch)).compute()
                continue
            for expected in self._passes[number : number + 2]:
                self._expect(expected)
            (self._forward if one.is_forward else self._backward)(one)

    def _expect(self, one: Pass) -> None:
        """Start to receive what a pass needs."""
        if one in self._arriving or one.is_of_weights:
            return
        stage, found = self._module.stage_of_chunk(one.chunk), None
        if one.is_forward:
            shape = self._shape_of(stage, one.micro_batch)
            if stage > 0:
                found = self._links.receive(stage, shape, is_forward=True)
        elif stage < self._stages.last and self._pipeline.needs_gradient(stage + 1):
            shape = self._shapes[stage + 1, one.micro_batch]
            found = self._links.receive(stage, shape, is_forward=False)
        self._arriving[one] = found

    def _shape_of(self, stage: int, micro_batch: int) -> tuple[int, int]:
        """Shape of the rows that a stage is given; that of the next stage is noted for backward."""
        while self._num_fetched <= micro_batch:
            self._fetched[self._num_fetched] = next(self._batches)
            self._num_fetched += 1
        inputs = self._fetched[micro_batch].inputs
        for given in (stage, stage + 1):
            if given <= self._stages.last:
                self._shapes[given, micro_batch] = self._module.shape(inputs, given)
        return self._shapes[stage, micro_batch]

    def _forward(self, one: Pass) -> None:
        stage, arriving = self._module.stage_of_chunk(one.chunk), self._arriving.pop(one)
        batch, received = self._fetched[one.micro_batch], None
        if arriving is not None:
            received = arriving.wait().requires_grad_(self._pipeline.needs_gradient(stage))
        output, sums = self._module(batch, self._count, one.chunk, received)
        self._held[one.chunk, one.micro_batch] = _Held(received, output, batch.inputs.num_tokens)
        if stage < self._stages.last:
            self._links.send(stage, output, is_forward=True)
        else:
            self.losses[one.micro_batch] = output.detach()
            self.sums += sums
        if one.chunk == self._stages.num_chunks - 1:
            del self._fetched[one.micro_batch]

    def _backward(self, one: Pass) -> None:
        stage, arriving = self._module.stage_of_chunk(one.chunk), self._arriving.pop(one)
        held = self._held.pop(key := (one.chunk, one.micro_batch))
        gradient = None if arriving is None else arriving.wait()
        if not held.output.requires_grad:
            self._deferred[key] = DeferredGradients()
            return
        self._pipeline.sync_gradients(
            one, is_last=one == self._passes[-1], is_last_of_chunk=one.micro_batch == self._num_micro_batches - 1
        )
        self._module.start_backward(held.num_tokens)
        with deferred() as self._deferred[key]:
            torch.autograd.backward(held.output, gradient)
        if held.received is not None and held.received.requires_grad:
            assert held.received.grad is not None, "a stage uses the rows that it is given"
            self._links.send(stage, held.received.grad, is_forward=False)


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors in lists of bounded size."""
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if bucket and size + tensor.numel() > _BUCKET_ELEMENTS:
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.numel()
    if bucket:
        yield bucket
