"""How the ranks of a tensor-parallel engine communicate inside a step.

Every rank runs the same modules on the same sizes, so all take part in the same collectives in the same order. A rank
that fails between two of them takes part in the remaining ones with zeros (`complete`), so that no other rank waits.

Sums of few tokens go through the memory of the peers if all GPUs can access each other (`peer_memory.py`), and the norm
after attention or an MLP then computes its sum (`DeferredSum`). All others go through the process group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from saccade.kernels.peer_all_reduce import PeerBuffers, peer_all_reduce, peer_all_reduce_norm
from saccade.model.layers import RMSNorm
from saccade.model.normed_sum import NormedSum
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

    peers: PeerBuffers | None = None
    """The memory of all ranks, for sums of few tokens. None: the process group is used."""

    def __init__(self, rank: int, size: int, devices: Sequence[str] = ()) -> None:
        """`devices`: of all ranks. Without them no memory of peers is used."""
        super().__init__(cast(dist.ProcessGroup, dist.group.WORLD))
        self.rank, self.size, self.devices = rank, size, devices
        self.done: list[Collective] = []
        """Collectives since `begin`."""

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return torch.device(self.devices[self.rank])

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
        if self.peers is not None and self.peers.fit(x_TD):
            peer_all_reduce(x_TD, self.peers)
        else:
            self._reduce(x_TD, dist.ReduceOp.SUM)
        self._note("sum", x_TD)
        return x_TD

    def leave_before(self, norm: RMSNorm) -> Callable[[Tensor], Tensor]:
        """See `Exchange`."""
        return self.leave if self.peers is None else DeferredSum(self, self.peers, norm).leave

    def leave_normed(self, part_TD: Tensor, found: NormedSum, residual_TD: Tensor) -> None:
        """Compute a norm of the sum of all ranks' `part_TD` and the residual."""
        assert self.peers is not None, "the sum was deferred"
        found.normed, found.total = peer_all_reduce_norm(part_TD, residual_TD, found.weight_D, found.eps, self.peers)
        self._note("sum", part_TD)

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

    def gather_bytes(self, data: bytes, device: torch.device) -> list[bytes]:
        """The bytes of every rank, as many of each. Synchronizes the host with the device."""
        own = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
        parts = [torch.empty_like(own) for _ in range(self.size)]
        self._gather(parts, own)
        return [bytes(part.tolist()) for part in parts]

    def least(self, value: int, device: torch.device) -> int:
        """The smallest of the ranks' values. Synchronizes the host with the device."""
        values = torch.tensor([value], dtype=torch.int64, device=device)
        self._reduce(values, dist.ReduceOp.MIN)
        return int(values)


class DeferredSum:
    """The sum over the ranks of what attention or an MLP returns, computed with the norm that reads it.

    Only if it fits the memory of the peers; otherwise it is computed at once.
    """

    def __init__(self, exchange: RankExchange, peers: PeerBuffers, norm: RMSNorm) -> None:
        self._exchange, self._peers, self._make_input = exchange, peers, norm.add_norm
        self._part_TD: Tensor | None = None  # this rank's part of a sum that is not computed yet
        norm.add_norm = self._add_norm  # type: ignore[method-assign]

    def leave(self, x_TD: Tensor) -> Tensor:
        """See `Exchange`."""
        self._part_TD = x_TD if self._peers.fit(x_TD) else None
        return self._exchange.leave(x_TD) if self._part_TD is None else x_TD

    def _add_norm(self, x: Tensor, residual: Tensor | None) -> NormedSum:
        """See `RMSNorm`."""
        found, part_TD = self._make_input(x, residual), self._part_TD
        if part_TD is not None:
            assert residual is not None, "the sum is added to the residual stream"
            assert part_TD is x or part_TD is residual, "this norm alone reads the sum"
            self._part_TD = None
            self._exchange.leave_normed(part_TD, found, residual if part_TD is x else x)
        return found


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
