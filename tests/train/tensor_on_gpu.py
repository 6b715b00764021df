"""Two tensor ranks on one GPU: gloo carries what they exchange over the host. NCCL refuses ranks that share a GPU."""

import json
from dataclasses import replace
from pathlib import Path

import torch
from closeness import relative_rms
from model.hugging_face import CONVERSATIONS

from saccade.model import load_model
from saccade.model.shard import TensorRank
from saccade.parallel_dims import ParallelDims
from saccade.processor import Processor
from saccade.processor.inputs import count_labels, next_token_labels
from saccade.train.loss import ModelWithLoss
from saccade.train.tensor_exchange import TrainingExchange
from saccade.train.tensor_parallel import TensorShards


class HostExchange(TrainingExchange):
    """The exchange of a rank whose group is on the host."""

    def all_gather(self, x_tD):
        return super().all_gather(x_tD.cpu()).to(x_tD.device)

    def reduce_scatter(self, x_TD):
        return super().reduce_scatter(x_TD.cpu()).to(x_TD.device)

    def all_reduce(self, x):
        return super().all_reduce(x.cpu()).to(x.device)


def gradients(model, inputs, device):
    labels = next_token_labels(inputs)
    count = count_labels(labels)
    one = torch.ones((), device=device) * count
    loss, _ = ModelWithLoss(model)(inputs.to(device), labels.to(device), one, count)
    loss.backward()
    return loss.item(), {name: p.grad.float().cpu() for name, p in model.named_parameters() if p.grad is not None}


def compare(world, job):
    """The loss of the ranks and of one device, and the largest relative difference of a gradient, in bf16 and fp32."""
    folder, device, found = Path(job["folder"]), job["device"], {}
    inputs = Processor.load(folder)([CONVERSATIONS["multi-turn"], CONVERSATIONS["text-only"]])
    for dtype in ("fp32", "bf16"):
        whole = load_model(folder, device=device, dtype=dtype).train()
        expected = gradients(whole, inputs, device)
        if dtype == "fp32":
            exact = expected[1]
        with world.arranged(ParallelDims(tensor=world.size)) as arranged:
            rank = TensorRank(world.rank, world.size)
            model = load_model(folder, device=device, dtype=dtype, tensor_rank=rank).train()
            exchange = HostExchange(arranged.group("tensor"), *vars(rank).values())
            shards = TensorShards(model, replace(arranged, device=torch.device("cpu")))
            shards.connect("none", exchange=exchange)
            loss, _ = gradients(model, inputs, device)
            shards.sum_gradients()
            own = {name: p.grad.float().cpu() for name, p in model.named_parameters() if p.grad is not None}
            own = {name: shards.whole(name, gradient) for name, gradient in own.items()}
        errors = {name: relative_rms(own[name], gradient) for name, gradient in exact.items()}
        rounding = {name: relative_rms(expected[1][name], gradient) for name, gradient in exact.items()}
        found[dtype] = {"losses": [loss, expected[0]], "errors": errors, "rounding": rounding}
    Path(job["to"]).with_suffix(f".{world.rank}").write_text(json.dumps(found))
