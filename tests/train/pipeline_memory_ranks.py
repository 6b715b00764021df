"""Ranks of a pipeline that count what autograd holds during a step, next to what the memory plan says.

Kernels are launched under Triton's interpreter and compute nothing: memory does not depend on the results.
"""

import json
import os
import weakref
from pathlib import Path
from unittest import mock

import torch
from torch import distributed as dist
from train.test_pipeline_parallel import deep

from saccade.kernels import launch
from saccade.model.live_bytes import plus
from saccade.model.vlm import VLM
from saccade.parallel_dims import ParallelDims
from saccade.train.batches import MicroBatch
from saccade.train.dry_run import DryBatch, MicroBatchSize, dry_run
from saccade.train.loss import count_labels, next_token_labels
from saccade.train.objectives.cross_entropy import CrossEntropy
from saccade.train.parallel_config import ParallelConfig
from saccade.train.pipeline import Pipeline
from saccade.train.pipeline_link import PipelineLinks
from saccade.train.pipeline_memory import rank_phases
from saccade.train.pipeline_module import PipelineModule
from saccade.train.pipeline_stages import keep_stages, pipeline_stages
from saccade.world import World

NUM_RANKS, NUM_MICRO_BATCHES = 4, 6
LAYOUTS = {
    "1f1b": ParallelConfig(pipeline=NUM_RANKS),
    "interleaved": ParallelConfig(pipeline=NUM_RANKS, pipeline_schedule="interleaved", pipeline_chunks=2),
}


class HeldBytes:
    """Bytes of the tensors that autograd holds at once, each storage counted once."""

    def __init__(self, ignored):
        self._ignored = {tensor.untyped_storage().data_ptr() for tensor in ignored}
        self._count, self._sizes = {}, {}
        self.now = self.most = 0

    def pack(self, tensor):
        key = tensor.untyped_storage().data_ptr()
        packed = [tensor]
        if key not in self._ignored:
            packed = _Packed(packed)
            weakref.finalize(packed, self._free, key)
            self._count[key] = self._count.get(key, 0) + 1
            if self._count[key] == 1:
                self._sizes[key] = tensor.untyped_storage().nbytes()
                self.now += self._sizes[key]
                self.most = max(self.most, self.now)
        return packed

    def _free(self, key):
        self._count[key] -= 1
        if not self._count[key]:
            self.now -= self._sizes.pop(key)


class _Packed(list):
    """A list that can be referred to weakly."""


def planned(step, stages, rank, rows):
    """The most bytes of activations between two phases of a rank."""
    held, most = {}, 0
    for phase in rank_phases(step, stages, rank, NUM_MICRO_BATCHES, rows):
        held = plus(held, phase.change)
        most = max(most, sum(size for kind, size in held.items() if kind.startswith("activations")))
    return most - 2 * max(rows)  # those that are sent or expected are not held by autograd


def measure(rank, port, folder):
    """Run a step in every layout, and write what was held and planned."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=NUM_RANKS)
    inputs = torch.load(Path(folder) / "inputs.pt", weights_only=False)
    labels, config, found = next_token_labels(inputs), deep("tiny"), {}
    batch = MicroBatch(inputs, labels, count_labels(labels), [])
    dims = ParallelDims(pipeline=NUM_RANKS)
    with World(rank, NUM_RANKS, rank, torch.device("cpu"), dims=dims).arranged(dims) as world:
        for name, parallel in LAYOUTS.items():
            with torch.device("meta"):
                whole, model = VLM(config), VLM(config)
            size = MicroBatchSize(tokens=inputs.num_tokens, patches=len(inputs.patches))
            stages = pipeline_stages(whole, size, parallel, NUM_RANKS)
            dry = DryBatch(inputs.to("meta"), labels.to("meta"), torch.empty((), device="meta"), batch.num_loss_tokens)
            rows = [0] + [4 * config.language.hidden_size * inputs.num_tokens] * stages.last
            step = dry_run(whole, dry, "none")
            keep_stages(model, stages, rank)
            model.to_empty(device="cpu")
            if rank in (0, NUM_RANKS - 1) and hasattr(model, "head"):
                model.tie_head()
            module = PipelineModule(model, CrossEntropy(), stages, PipelineLinks(world, stages, torch.float32))
            pipeline = Pipeline(module, whole, world, averages=False, reduces_each=False)
            given = [value for value in vars(inputs).values() if isinstance(value, torch.Tensor)]
            held = HeldBytes([*model.parameters(), *model.buffers(), *given, labels])
            with launch.forced("triton"), torch.autograd.graph.saved_tensors_hooks(held.pack, lambda packed: packed[0]):
                pipeline.run(iter([batch] * NUM_MICRO_BATCHES), NUM_MICRO_BATCHES, torch.ones(()), 0)
            found[name] = {"held": held.most, "planned": planned(step, stages, rank, rows), "row": rows[-1]}
    (Path(folder) / f"found-{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def run(rank, port, folder):
    """A spawned rank."""
    with mock.patch("triton.runtime.interpreter.GridExecutor.__call__", return_value=None):
        measure(rank, port, folder)
