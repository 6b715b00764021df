"""The collectives of a training step on 1,024 ranks, counted on one process without communication."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from saccade.model.families import named_size
from saccade.model.shard import TensorRank
from saccade.model.vlm import VLM
from saccade.parallel_dims import ParallelDims
from saccade.processor.inputs import ModelInputs
from saccade.train.loss import ModelWithLoss
from saccade.train.parallel_config import ParallelConfig
from saccade.train.parallelize import data_mesh, shard
from saccade.train.tensor_parallel import TensorShards, divide_model
from saccade.world import World

LAYERS, BLOCKS, KV_HEADS = 36, 2, 2
TOKENS = 37


@pytest.fixture
def no_communication():
    """A process group of 1,024 ranks whose collectives return at once."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1024)
    yield
    dist.destroy_process_group()


class Collectives(TorchDispatchMode):
    """Counts collectives by kind, in backward too."""

    def __init__(self):
        super().__init__()
        self.count = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace in ("c10d", "_c10d_functional"):
            name = str(function)
            kinds = [kind for kind in ("scatter", "gather", "reduce") if kind in name]
            self.count[kinds[0] if kinds else name] += 1
        return function(*args, **(kwargs or {}))


def thin_model():
    """36 layers of the 3B shape, two key/value heads among them, but narrow: collectives do not depend on widths."""
    config = named_size("tiny")
    language = replace(
        config.language, num_layers=LAYERS, hidden_size=64, num_heads=16, num_kv_heads=KV_HEADS, explicit_head_dim=8,
        rope_sections=(2, 1, 1), intermediate_size=128, vocab_size=320,
    )  # fmt: skip
    with torch.device("meta"):
        return VLM(replace(config, language=language, vision=replace(config.vision, num_layers=BLOCKS)))


def counted_step(dims, *, strategy):
    """(all-gathers, reduce-scatters, all-reduces) of a step of one text-only micro-batch."""
    world, model = World(0, dims.size, 0, torch.device("cpu"), dims=dims), thin_model()
    shards = None
    if dims.tensor > 1:
        divide_model(model, TensorRank(0, dims.tensor))
        shards = TensorShards(model, world)
        shards.connect("none")
    module = ModelWithLoss(model)
    shard(module, data_mesh(strategy, world), ParallelConfig(), torch.float32)
    module.to_empty(device="cpu")
    model.tie_head()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.01)
    inputs = ModelInputs.empty(patch_dim=model.config.vision.patch_dim, pixel_mean=(0.5,) * 3, pixel_std=(0.5,) * 3,
                               num_tokens=TOKENS)  # fmt: skip
    with Collectives() as collectives:
        loss, _ = module(inputs, torch.ones(TOKENS, dtype=torch.int64), torch.ones(()), TOKENS)
        loss.backward()
        if shards is not None:
            shards.sum_gradients()
            shards.grad_norm()
    return collectives.count["gather"], collectives.count["scatter"], collectives.count["reduce"]


def formula(dims, *, replicates):
    """Written down from the design, not from the program.

    fsdp: every layer, every block, the tower and the root are gathered for forward, all but the root again for
    backward, and each is reduced; with replicas an all-reduce follows. Tensor ranks: attention and MLP gather what
    enters and scatter what leaves, and the reverse in backward, which gathers once more what entered; the decoder's
    input is gathered in backward, its output in forward, and image features in forward.
    All-reduces: embeddings; of the loss maximum, sums and the gradient of the hidden states; the gradients that every
    rank has a part of; and the norm: over the shards of what every rank holds, of parts, and of parts that several
    ranks hold (more ranks than key/value heads), and once over the tensor ranks.
    """
    units = LAYERS + BLOCKS + 2
    gathers, scatters, reduces = 2 * units - 1, units, units if replicates else 0
    if dims.tensor > 1:
        norms = 3 if dims.tensor > KV_HEADS else 2
        gathers, scatters, reduces = gathers + 6 * LAYERS + 3, scatters + 4 * LAYERS, reduces + 1 + 3 + 1 + norms + 1
    return gathers, scatters, reduces


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")
@pytest.mark.parametrize(
    ("dims", "strategy"),
    [
        pytest.param(ParallelDims(shard=1024), "fsdp", marks=pytest.mark.slow),
        (ParallelDims(shard=128, tensor=8), "fsdp"),
        (ParallelDims(replicate=16, shard=8, tensor=8), "hsdp"),
        (ParallelDims(replicate=32, shard=16, tensor=2), "hsdp"),
    ],
    ids=str,
)
def test_a_step_on_1024_ranks_has_the_collectives_of_the_formula(dims, strategy, no_communication):
    assert counted_step(dims, strategy=strategy) == formula(dims, replicates=strategy == "hsdp")
