"""All tensor ranks of a model in one process: each is a thread, and they exchange tensors in lockstep."""

import threading
from pathlib import Path

import torch
import torch.distributed as dist
from closeness import assert_close
from model.hugging_face import CONVERSATIONS

from saccade.model import load_model
from saccade.model.shard import TensorRank
from saccade.model.tensor_parallel import GroupExchange, connect
from saccade.processor import Processor

BOUND = 1e-5


class Together:
    """What the threads share."""

    def __init__(self, size):
        self.size, self.slots = size, [None] * size
        self.barrier = threading.Barrier(size)


class ThreadExchange(GroupExchange):
    """The exchange of a rank that is a thread. Sums are added in the order of the ranks."""

    def __init__(self, together, rank):
        self.together, self.rank, self.group = together, rank, None

    def everyone(self, x):
        self.together.slots[self.rank] = x
        self.together.barrier.wait()
        found = list(self.together.slots)
        self.together.barrier.wait()
        return found

    def leave(self, x_TD):
        return torch.stack(self.everyone(x_TD)).sum(0)

    def gather(self, x_TN, shard):
        return torch.cat(self.everyone(x_TN), dim=-1)

    def maximum(self, x):
        return torch.stack(self.everyone(x)).amax(0)


def run_ranks(size, function):
    """What `function(rank, exchange)` returns on each rank; an error of one ends all."""
    together, found, errors = Together(size), [None] * size, []

    def run(rank):
        try:
            found[rank] = function(rank, ThreadExchange(together, rank))
        except threading.BrokenBarrierError:
            pass
        except BaseException as error:
            errors.append(error)
            together.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return found


def inputs_of(folder):
    """Texts, and images of several sizes, in one packed sequence."""
    return Processor.load(folder)(list(CONVERSATIONS.values())[:3])


@torch.no_grad()
def logits_of_ranks(folder, size, inputs):
    def run(rank, exchange):
        with torch.no_grad():
            model = load_model(folder, device="cpu", dtype="fp32", tensor_rank=TensorRank(rank, size))
            connect(model, exchange)
            return model(inputs)

    return run_ranks(size, run)


def assert_ranks_equal_one(folder, size, bound=BOUND):
    inputs = inputs_of(folder)
    with torch.no_grad():
        whole = load_model(folder, device="cpu", dtype="fp32")(inputs)
    for logits in logits_of_ranks(folder, size, inputs):
        assert logits.shape == whole.shape
        assert_close("logits", logits, whole, bound)


def save_logits(world, job):
    """A job of `train/ranks.py`: the logits of a model that is divided over all ranks."""
    folder = Path(job["folder"])
    model = load_model(folder, device="cpu", tensor_rank=TensorRank(world.rank, world.size))
    connect(model, GroupExchange(dist.group.WORLD))
    with torch.no_grad():
        torch.save(model(inputs_of(folder)), folder / f"logits-{world.rank}")
