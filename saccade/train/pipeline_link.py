"""Messages between the ranks of a pipeline: rows and their gradients, without padding.

Messages of one kind between two ranks arrive in the order in which they are sent, so they carry neither names nor
sizes. Each kind has a process group of its own: rows and gradients, and apart from these what goes from the last rank
back to the first one, for the next chunk. Within a group a pair of ranks sends in one direction only, so no message
waits for another that waits for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from saccade.train.pipeline_stages import PipelineStages
from saccade.world import World


@dataclass(frozen=True)
class Arriving:
    """A message that another rank sends."""

    rows: Tensor
    _work: Any

    def wait(self) -> Tensor:
        """The rows; the stream of the device waits for them, with gloo the host."""
        self._work.wait()
        return self.rows


class PipelineLinks:
    """The messages of one rank."""

    def __init__(self, world: World, stages: PipelineStages, dtype: torch.dtype) -> None:
        """`dtype` of the rows. Collective over all ranks."""
        self.rank, self._size = world.index("pipeline"), world.dims.pipeline
        self._stages, self._dtype, self._device = stages, dtype, world.device
        kinds = [(is_forward, wraps) for is_forward in (True, False) for wraps in (False, True)[: stages.num_chunks]]
        self._groups = {kind: world.separate_group("pipeline", number=number) for number, kind in enumerate(kinds)}
        self._sent: list[tuple[Any, Tensor]] = []

    def send(self, stage: int, rows: Tensor, *, is_forward: bool) -> None:
        """Send the rows of a stage to the next one, or their gradients to the one before it. Returns at once."""
        to = stage + 1 if is_forward else stage - 1
        self._sent = [(work, held) for work, held in self._sent if not work.is_completed()]
        rows = rows.detach().contiguous()
        work = dist.isend(rows, group=self._group(stage, to), group_dst=to % self._size)
        self._sent.append((work, rows))

    def receive(self, stage: int, shape: tuple[int, int], *, is_forward: bool) -> Arriving:
        """What a stage is given by the one before it, or the gradients of what it has sent to the next one."""
        source = stage - 1 if is_forward else stage + 1
        rows = torch.empty(shape, dtype=self._dtype, device=self._device)
        work = dist.irecv(rows, group=self._group(source, stage), group_src=source % self._size)
        return Arriving(rows, work)

    def finish(self) -> None:
        """Wait until everything is sent."""
        for work, _ in self._sent:
            work.wait()
        self._sent = []

    def _group(self, source: int, to: int) -> dist.ProcessGroup | None:
        return self._groups[to > source, source // self._size != to // self._size]
