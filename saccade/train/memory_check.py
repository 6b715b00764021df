"""The trainer checks itself: the plan of a stage, the memory of this machine, and explained out-of-memory errors."""

import contextlib
import functools
import logging
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import torch

from saccade.errors import ConfigError
from saccade.model.config import ModelConfig
from saccade.model.families import load_model_config
from saccade.parallel_dims import DATA
from saccade.train.config import TrainConfig
from saccade.train.dry_run import MicroBatchSize
from saccade.train.memory import MemoryPlanner
from saccade.train.memory_advice import advice
from saccade.train.memory_plan import GIB, RESIDUAL
from saccade.train.objectives.build import build_objective
from saccade.train.parallelize import build_model
from saccade.train.stage_config import StageConfig
from saccade.world import World

logger = logging.getLogger(__name__)


def stage_planner(
    config: TrainConfig,
    stage: StageConfig,
    model: ModelConfig,
    world_size: int,
    device_type: Literal["cuda", "cpu"] = "cuda",
) -> tuple[MemoryPlanner, MicroBatchSize]:
    """The planner of a stage, and the stage's largest micro-batch."""
    number = [one.name for one in config.stages].index(stage.name)
    make_start = functools.partial(build_model, config.model.folder, stage, "none", config.model.dtype)
    planner = MemoryPlanner(
        config=model,
        world_size=world_size,
        micro_batches_per_rank=math.ceil(stage.data.global_batch_size / config.parallel.dims(world_size).count(*DATA)),
        dtype=config.model.dtype,
        parallel=config.parallel,
        optimizer=stage.optimizer,
        lora=stage.lora,
        qat=stage.qat,
        make_objective=functools.partial(
            build_objective,
            stage.objective,
            folder=config.model.folder,
            has_lora=stage.lora is not None,
            dtype=config.model.dtype,
            device="meta",
            make_start=make_start if config.needs_start(number) else None,
        ),
        has_average=stage.ema_decay is not None,
        device_type=device_type,
        num_workers=stage.data.num_workers,
    )
    return planner, MicroBatchSize(tokens=stage.data.max_seq_len, patches=stage.data.max_patches)


@contextlib.contextmanager
def explain_out_of_memory(config: TrainConfig, stage: StageConfig, world: World) -> Iterator[None]:
    """Log the plan of a stage (on a GPU), and turn an out-of-memory error into a `ConfigError` with plan and advice."""
    planner, size = planner_here(config, stage, load_model_config(config.model.folder), world)
    if config.parallel.rounding_of_shards is not None:
        check_residual(planner, size, device_gib(world.device))
    if world.device.type == "cuda":
        _announce(planner, size, device_gib(world.device))
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ConfigError(_explanation(planner, size, stage, world, error)) from error


def check_residual(planner: MemoryPlanner, size: MicroBatchSize, gib: float) -> None:
    """Refuse compressed gradients whose error feedback does not fit into the memory of a rank."""
    plan = planner.plan(size)
    residual = plan.parts.get(RESIDUAL, 0) / GIB
    if residual and plan.total_gib > gib:
        raise ConfigError(
            f"the error feedback of compress_gradients = {planner.parallel.compress_gradients!r} is {residual:.1f} GiB "
            f"on every rank, 2 bytes per trained parameter, and the plan needs {plan.total_gib:.1f} of {gib:.1f} GiB. "
            f"Without it the plan is {plan.total_gib - residual:.1f} GiB: set parallel.reduce_dtype = 'bf16' instead"
        )


def planner_here(
    config: TrainConfig, stage: StageConfig, model: ModelConfig, world: World
) -> tuple[MemoryPlanner, MicroBatchSize]:
    """The planner of a stage on the ranks and devices of this run."""
    return stage_planner(config, stage, model, world.dims.size, "cuda" if world.device.type == "cuda" else "cpu")


def _announce(planner: MemoryPlanner, size: MicroBatchSize, gib: float) -> None:
    plan = planner.plan(size)
    logger.info("\n".join(plan.lines()))
    if plan.total_gib > gib:
        logger.warning(
            "the plan needs %.1f GiB, the GPU has %.1f: a full micro-batch may not fit. %s",
            plan.total_gib, gib, " ".join(advice(planner, size, gib)),
        )  # fmt: skip


def _explanation(
    planner: MemoryPlanner, size: MicroBatchSize, stage: StageConfig, world: World, error: Exception
) -> str:
    plan, gib = planner.plan(size), device_gib(world.device)
    cause = str(error).splitlines()[0]
    lines = [
        f"stage {stage.name}: rank {world.rank} ran out of memory ({world.device}, {gib:.1f} GiB): {cause}",
        *plan.lines(),
    ]
    if plan.total_gib <= gib:
        lines.append(
            "the plan fits: look for other processes on the GPU, and set "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True; log.memory_snapshot = true records what was allocated"
        )
    # Actual use exceeded the memory whatever the plan says: the advice is for less than both.
    return "\n".join([*lines, *advice(planner, size, min(gib, 0.95 * plan.total_gib))])


# ------------------------------------------------------------------ this machine


def device_gib(device: torch.device) -> float:
    """Total memory of the GPU, or memory of the host that a new process can use."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory / GIB
    return available_host_bytes() / GIB


def available_host_bytes(root: Path = Path("/")) -> int:
    """Memory that a new process can use without swapping: what Linux counts as available, within the container's limit.

    The limit is that of cgroup v2. Elsewhere than on Linux: all memory of the machine.
    """
    try:
        meminfo = dict(line.split(":", 1) for line in (root / "proc/meminfo").read_text().splitlines())
        available = int(meminfo["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):  # not Linux
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cgroup = root / "sys/fs/cgroup"
    with contextlib.suppress(OSError, ValueError, KeyError):  # no container, or "max": no limit
        statistics = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        used = int((cgroup / "memory.current").read_text()) - int(statistics["inactive_file"])
        available = min(available, int((cgroup / "memory.max").read_text()) - used)
    return max(0, available)
