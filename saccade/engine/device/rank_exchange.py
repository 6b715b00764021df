"""How the ranks of a tensor-parallel engine communicate inside a step.

Every rank runs the same modules on the same sizes, so all take part in the same collectives in the same order. A rank
that fails between two of them takes part in the remaining ones with zeros (`complete`), so that no other rank waits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from saccade.model.shard import Shard
from saccade.model.tensor_parallel import GroupExchange


class Collective(NamedTuple):
    """A collective operation of a step."""

    kind: Literal["broadcast", "sum", "maximum", "gather"]
    shape: tuple[int, ...]
    """Shape of every rank's tensor."""
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of every rank's tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


class RankExchange(GroupExchange):
    """One rank's side of the communication. The process group is torch's default one."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(cast(dist.ProcessGroup, dist.group.WORLD))
        self.rank, self.size = rank, size
        self.done: list[Collective] = []
        """Collectives since `begin`."""

    def begin(self) -> None:
        """Start counting the collectives of an operation."""
        self.done = []

    def complete(self, expected: Sequence[Collective], device: torch.device) -> None:
        """Take part in the remaining collectives of an operation that failed here."""
        for kind, shape, dtype in expected[len(self.done) :]:
            zeros = torch.zeros(shape, dtype=dtype, device=device)
            if kind == "broadcast":
                self.broadcast(zeros)
            elif kind == "sum":
                self.leave(zeros)
            elif kind == "maximum":
                self.maximum(zeros)
            else:
                self._all_gather(zeros)

    def broadcast(self, tensor: Tensor) -> None:
        """Copy rank 0's values into every rank's tensor."""
        self._broadcast(tensor)
        self._note("broadcast", tensor)

    def leave(self, x_TD: Tensor) -> Tensor:
        """See `Exchange`."""
        self._reduce(x_TD, dist.ReduceOp.SUM)
        self._note("sum", x_TD)
        return x_TD

    def maximum(self, x: Tensor) -> Tensor:
        """See `Exchange`."""
        self._reduce(x, dist.ReduceOp.MAX)
        self._note("maximum", x)
        return x

    def gather(self, x_TN: Tensor, shard: Shard) -> Tensor:
        """See `Exchange`."""
        return self.gather_into(x_TN, shard, x_TN.new_empty(*x_TN.shape[:-1], shard.size))

    def gather_into(self, x_TN: Tensor, shard: Shard, out: Tensor) -> Tensor:
        """`gather` into the memory of `out`."""
        width = max(shard.sizes)
        padded_TN = x_TN if x_TN.shape[-1] == width else F.pad(x_TN, (0, width - x_TN.shape[-1]))
        parts = self._all_gather(padded_TN.contiguous())
        own = [part[..., :size] for part, size in zip(parts, shard.sizes, strict=True)]
        return torch.cat(own, dim=-1, out=out)

    def _all_gather(self, x_TN: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(x_TN) for _ in range(self.size)]
        self._gather(parts, x_TN)
        self._note("gather", x_TN)
        return parts

    def _broadcast(self, tensor: Tensor) -> None:
        dist.broadcast(tensor, 0)

    def _reduce(self, tensor: Tensor, operation: Any) -> None:
        dist.all_reduce(tensor, operation)

    def _gather(self, parts: list[Tensor], own: Tensor) -> None:
        dist.all_gather(parts, own)

    def _note(self, kind: Literal["broadcast", "sum", "maximum", "gather"], tensor: Tensor) -> None:
        self.done.append(Collective(kind, tuple(tensor.shape), tensor.dtype))

    def least(self, value: int, device: torch.device) -> int:
        """The smallest of the ranks' values. Synchronizes the host with the device."""
        values = torch.tensor([value], dtype=torch.int64, device=device)
        self._reduce(values, dist.ReduceOp.MIN)
        return int(values)


class LoneRank(RankExchange):
    """A rank without the others: it computes its part of a step and exchanges nothing, so that results are wrong.

    For compiling kernels, and for measuring what a rank computes.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self.group = rank, size, None
        self.done: list[Collective] = []

    def _broadcast(self, tensor: Tensor) -> None:
        """Nothing is received."""

    def _reduce(self, tensor: Tensor, operation: Any) -> None:
        """Nothing is added."""

    def _gather(self, parts: list[Tensor], own: Tensor) -> None:
        """The parts of the other ranks stay undefined."""
