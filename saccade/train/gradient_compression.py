"""Reduce-scatter of FSDP gradients with less traffic: rounded to bf16 or int8, exchanged, summed in fp32.

    gradient + residual -> round -> all-to-all -> back to fp32, sum over ranks -> this rank's shard
                             \\-> residual: what rounding lost, added to the next step's gradient (error feedback)

An ordinary reduce-scatter in bf16 rounds every partial sum; here each rank's gradient is rounded once. Every FSDP unit
has a `CompressedReduceScatter` of its own, through FSDP2's `set_custom_reduce_scatter`. int8 has one fp32 scale per
1,024 values, their largest magnitude / 127. Residuals are bf16, of the unsharded gradient: two bytes per trained
parameter on every rank, which the memory plan counts. They are not saved; a rejected step clears them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

SCALED_TOGETHER = 1024
"""Values of an int8 gradient with one scale: 0.4 % of the traffic."""
RESIDUAL_DTYPE = torch.bfloat16

Rounding = Literal["bf16", "int8"]


@dataclass
class CompressedReduceScatter:
    """The reduce-scatter of one FSDP unit; called on its own stream."""

    rounding: Rounding
    """Format in which gradients are sent."""
    sent_bytes: int = 0
    """Bytes sent to other ranks so far."""
    residual: Tensor | None = field(default=None, repr=False)
    """What rounding lost in the last call, with one row per rank."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory of input or output, for FSDP."""
        return torch.empty([*size], dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Write this rank's part of the sum, or of the mean, of all inputs, which have one row per rank."""
        assert not async_op, "FSDP waits for its reduce-scatter"
        assert op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG), f"reduction {op} is not one of fp32 gradients"
        num_ranks = group.size()
        rows = input_tensor.view(num_ranks, -1)
        if self.residual is not None:
            rows += self.residual
        received = self._exchange_bf16(rows, group) if self.rounding == "bf16" else self._exchange_int8(rows, group)
        torch.sum(received, 0, out=output_tensor)
        if op == dist.ReduceOp.AVG:
            output_tensor /= num_ranks

    def _exchange_bf16(self, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        rounded = rows.bfloat16()
        self._keep(rows, rounded.float())
        return self._all_to_all(rounded, group).float()

    def _exchange_int8(self, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        num_ranks, length = rows.shape
        values = nn.functional.pad(rows, (0, -length % SCALED_TOGETHER)).view(num_ranks, -1, SCALED_TOGETHER)
        scales = values.abs().amax(2, keepdim=True) / 127.0
        rounded = (values / scales.clamp_min(torch.finfo(torch.float32).tiny)).round_().to(torch.int8)
        self._keep(rows, (rounded * scales).view(num_ranks, -1)[:, :length])
        received = self._all_to_all(rounded, group) * self._all_to_all(scales, group)
        return received.view(num_ranks, -1)[:, :length]

    def _keep(self, rows: Tensor, rounded: Tensor) -> None:
        if self.residual is None:
            self.residual = torch.empty_like(rows, dtype=RESIDUAL_DTYPE)
        self.residual.copy_(rows - rounded)

    def _all_to_all(self, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        received = torch.empty_like(rows)
        dist.all_to_all_single(received, rows, group=group)
        self.sent_bytes += rows.nbytes // len(rows) * (len(rows) - 1)
        return received


def compress_gradients(module: nn.Module, rounding: Rounding) -> list[CompressedReduceScatter]:
    """Compress the reduce-scatter of every FSDP unit of a module; returns what each unit calls."""
    made = []
    for unit in module.modules():
        if isinstance(unit, FSDPModule):
            made.append(CompressedReduceScatter(rounding))
            unit.set_custom_reduce_scatter(made[-1])  # type: ignore[arg-type]
    return made
