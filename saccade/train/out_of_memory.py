"""What a stage will take of its GPU is said before it begins; where it takes more, the run ends with what to change."""

import contextlib
import logging
import os
from collections.abc import Iterator

import torch

from saccade.errors import ConfigError
from saccade.train.config import StageConfig, TrainConfig
from saccade.train.memory import GIB, Planner
from saccade.train.plan import RowSize, advice, folder_config, of_stage
from saccade.world import World

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def memory_explained(config: TrainConfig, stage: StageConfig, world: World) -> Iterator[None]:
    """Around a stage: the plan in the log (on a GPU), and a `ConfigError` with plan and remedies if memory runs out."""
    planner, row = of_stage(config, stage, folder_config(config.model.folder), world.size)
    if world.device.type == "cuda":
        _announce(planner, row, device_gib(world.device))
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ConfigError(_explanation(planner, row, stage, world, error)) from error


def _announce(planner: Planner, row: RowSize, gib: float) -> None:
    plan = planner.plan(row)
    logger.info("\n".join(plan.lines()))
    if plan.total_gib > gib:
        logger.warning(
            "the plan needs %.1f GiB, the GPU has %.1f: a full row may not fit. %s",
            plan.total_gib, gib, " ".join(advice(planner, row, gib)),
        )  # fmt: skip


def _explanation(planner: Planner, row: RowSize, stage: StageConfig, world: World, error: Exception) -> str:
    plan, gib = planner.plan(row), device_gib(world.device)
    cause = str(error).splitlines()[0]
    lines = [
        f"stage {stage.name}: rank {world.rank} ran out of memory ({world.device}, {gib:.1f} GiB): {cause}",
        *plan.lines(),
    ]
    if plan.total_gib <= gib:
        lines.append(
            "by this plan it should have fit: look for other processes on the GPU, and set "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True; log.memory_snapshot = true shows what was held"
        )
    # What did not fit was at least as much as is there, whatever the plan says: look for less than both.
    return "\n".join([*lines, *advice(planner, row, min(gib, 0.95 * plan.total_gib))])


def device_gib(device: torch.device) -> float:
    """All memory of a GPU, or of the host."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory / GIB
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
