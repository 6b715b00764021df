"""Memory planner: whether a run fits a GPU, and what to change if it does not. Behind `saccade plan` and out-of-memory errors.

    size = MicroBatchSize(tokens=16384, patches=36864)
    plan(config, size, world_size=8).total_gib
    report(Planner(config=config, world_size=8), size, "H200").lines()

`memory.py` adds up a plan, `dry_run.py` measures a step; this module compares settings.
"""

import contextlib
import functools
import logging
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch

from saccade.errors import ConfigError
from saccade.gpus import gpu_named
from saccade.model.config import ModelConfig
from saccade.model.families import load_model_config, published_as
from saccade.model.initialize import named_size
from saccade.train.config import LoraConfig, Recompute, StageConfig, TrainConfig
from saccade.train.dry_run import MicroBatchSize
from saccade.train.memory import GIB, Extents, MemoryPlan, Planner
from saccade.train.objectives.build import build_objective
from saccade.train.parallelize import build_model
from saccade.train.parameter_groups import OptimizerConfig
from saccade.world import World

logger = logging.getLogger(__name__)

__all__ = ["Choice", "MemoryPlan", "MicroBatchSize", "Planner", "Report", "folder_config", "gpu_gib", "model_config", "plan", "report", "stage_planner", "suggest"]  # fmt: skip

EXTENTS: tuple[Recompute, ...] = get_args(Recompute)
"""Levels of activation checkpointing."""
_STEP = 256
"""Granularity of the search for the largest sequence, in tokens."""
_MOST_TOKENS = 2**20
_MOST_RANKS = 1024


def plan(config: ModelConfig, size: MicroBatchSize, **settings: Any) -> MemoryPlan:
    """Peak memory of a GPU; `settings` are those of `Planner`."""
    return Planner(config=config, **settings).plan(size)


def gpu_gib(name: str) -> float:
    """Usable memory of a GPU, by name or as a number of GiB."""
    return gpu_named(name).gib


def model_config(model: str) -> ModelConfig:
    """The model config of a checkpoint folder, of a published checkpoint that is not downloaded yet, or of a named size."""
    if Path(model).exists():
        return folder_config(Path(model))
    known = published_as(model)
    return named_size(model if known is None else known[1])


def folder_config(folder: Path) -> ModelConfig:
    """The model config of a checkpoint folder."""
    return load_model_config(folder)


def stage_planner(
    config: TrainConfig,
    stage: StageConfig,
    model: ModelConfig,
    world_size: int,
    device_type: Literal["cuda", "cpu"] = "cuda",
) -> tuple[Planner, MicroBatchSize]:
    """The planner of a stage, and its largest micro-batch."""
    number = [one.name for one in config.stages].index(stage.name)
    make_start = functools.partial(build_model, config.model.folder, stage, "none", config.model.dtype)
    planner = Planner(
        config=model,
        world_size=world_size,
        micro_batches_per_rank=math.ceil(stage.data.global_batch_size / world_size),
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
    )
    return planner, MicroBatchSize(tokens=stage.data.max_seq_len, patches=stage.data.max_patches)


# ------------------------------------------------------------------ choices


class Choice(NamedTuple):
    """One combination of activation checkpointing."""

    recompute_vision: Recompute
    recompute_language: Recompute
    total_gib: float
    """For the requested size."""
    fits: bool
    """Whether it fits."""
    max_tokens: int
    """Length of the longest sequence that fits, with images in proportion; 0 if none does."""
    extra_compute: float
    """Fraction of a step's FLOPs that is recomputed."""


def suggest(planner: Planner, size: MicroBatchSize, gib: float) -> list[Choice]:
    """All combinations of activation checkpointing, cheapest first. Take the first that fits."""
    choices = []
    for extents in product(EXTENTS, EXTENTS):
        total = planner.plan(size, extents).total_gib
        most = _max_tokens(planner, size, extents, gib)
        choices.append(Choice(*extents, total, total <= gib, most, _extra_compute(planner, size, extents)))
    return sorted(choices, key=lambda choice: choice.extra_compute)


def _max_tokens(planner: Planner, size: MicroBatchSize, extents: Extents, gib: float) -> int:
    """Binary search."""
    needed = planner.gib_by_share(size, extents)
    low, high = 0, _MOST_TOKENS // _STEP
    while low < high:
        middle = (low + high + 1) // 2
        fits = needed(middle * _STEP / size.tokens) <= gib
        low, high = (middle, high) if fits else (low, middle - 1)
    return low * _STEP


def _scaled(size: MicroBatchSize, tokens: int) -> MicroBatchSize:
    """A micro-batch of `tokens` tokens, with patches and loss tokens in proportion."""
    share = tokens / size.tokens
    return MicroBatchSize(
        tokens=tokens, patches=int(size.patches * share), loss_tokens=min(tokens, int(size.num_loss_tokens * share))
    )


def _extra_compute(planner: Planner, size: MicroBatchSize, extents: Extents) -> float:
    """Matrix products that are computed again, as a fraction of a step without activation checkpointing."""
    chosen, plain = (sum(phase.flops for phase in planner.step(size, x)) for x in (extents, ("none", "none")))
    return chosen / plain - 1.0


# ------------------------------------------------------------------ report


@dataclass(frozen=True)
class Report:
    """Output of `saccade plan`."""

    plan: MemoryPlan
    gpu: str
    gib: float
    """Usable memory of the GPU."""
    choices: list[Choice]
    """Cheapest first."""
    advice: list[str]
    """Settings that make it fit, cheapest first."""

    @property
    def fits(self) -> bool:
        """Whether the current settings fit."""
        return self.plan.total_gib <= self.gib

    def lines(self) -> list[str]:
        """As text."""
        decision = "fits" if self.fits else "does not fit"
        table = [
            f"  {choice.recompute_vision:<10} {choice.recompute_language:<10} {choice.total_gib:7.1f} {choice.extra_compute:>14.0%}   "
            + (f"{choice.max_tokens} tokens" if choice.max_tokens else "none")
            for choice in self.choices
        ]
        header = f"  {'vision':<10} {'decoder':<10} {'GiB':>7} {'extra compute':>14}   longest sequence that fits"
        return [
            *self.plan.lines(), f"  {decision} in {self.gpu} ({self.gib:.1f} GiB)",
            "activation checkpointing", header, *table, *self.advice,
        ]  # fmt: skip

    def record(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "fits": self.fits,
            "gpu": self.gpu,
            "gpu_gib": self.gib,
            "plan": self.plan.record(),
            "choices": [choice._asdict() for choice in self.choices],
            "advice": self.advice,
        }


def report(planner: Planner, size: MicroBatchSize, gpu: str) -> Report:
    """The plan of a micro-batch on a GPU, alternatives, and what to change."""
    gib = gpu_gib(gpu)
    choices = suggest(planner, size, gib)
    return Report(planner.plan(size), gpu, gib, choices, advice(planner, size, gib, choices))


def advice(planner: Planner, size: MicroBatchSize, gib: float, choices: list[Choice] | None = None) -> list[str]:
    """Settings that make the micro-batch fit; if activation checkpointing is not enough, all other options."""
    choices = choices or suggest(planner, size, gib)
    for choice in choices:
        if choice.fits:
            return [
                "cheapest that fits: "
                f"--set parallel.recompute_vision={choice.recompute_vision} --set parallel.recompute_language={choice.recompute_language}"
            ]
    found = []
    if most := max(choice.max_tokens for choice in choices):
        small = _scaled(size, most)
        found.append(
            f"shorter sequences: data.max_seq_len = {most}, data.max_patches = {small.patches}, with full activation checkpointing"
        )
    thrifty = replace(planner, optimizer=replace(planner.optimizer, kind="adamw8bit"))
    if planner.optimizer.kind != "adamw8bit" and _fits_somehow(thrifty, size, gib):
        found.append("8-bit moments: optimizer.kind = 'adamw8bit'")
    found += _adapters_that_fit(planner, size, gib)
    if ranks := _ranks_needed(planner, size, gib):
        found.append(f"more GPUs: {ranks} with parallel.strategy = 'fsdp'")
    return [f"to make it fit, {line}" for line in found] or ["no setting makes it fit: use a smaller model"]


def _adapters_that_fit(planner: Planner, size: MicroBatchSize, gib: float) -> list[str]:
    """LoRA and QLoRA with full activation checkpointing, as far as they are less than what is planned."""
    own = planner.lora or LoraConfig()
    settings = {"LoRA": own, "QLoRA": replace(own, quantize_base="int4")}
    found = []
    for name, lora in settings.items():
        if lora == planner.lora:
            continue
        optimizer = planner.optimizer if planner.lora else OptimizerConfig(kind=planner.optimizer.kind)
        total = replace(planner, lora=lora, qat=None, optimizer=optimizer).plan(size, ("full", "full")).total_gib
        if total <= gib:
            line = "lora = {}" if name == "LoRA" else "lora.quantize_base = 'int4'"
            found.append(f"{name}: {line} in the stage, {total:.1f} GiB with full activation checkpointing")
    return found


def _fits_somehow(planner: Planner, size: MicroBatchSize, gib: float) -> bool:
    return any(planner.plan(size, chosen).total_gib <= gib for chosen in product(EXTENTS, EXTENTS))


def _ranks_needed(planner: Planner, size: MicroBatchSize, gib: float) -> int | None:
    """The smallest power of two of ranks with fsdp that fits."""
    parallel = replace(planner.parallel, strategy="fsdp", shard_size=None, compress_gradients="none")
    ranks = 2 * planner.world_size
    while ranks <= _MOST_RANKS:
        if _fits_somehow(replace(planner, world_size=ranks, parallel=parallel), size, gib):
            return ranks
        ranks *= 2
    return None


# ------------------------------------------------------------------ while training


@contextlib.contextmanager
def explain_out_of_memory(config: TrainConfig, stage: StageConfig, world: World) -> Iterator[None]:
    """Log the plan of a stage (on a GPU), and turn an out-of-memory error into a `ConfigError` with plan and advice."""
    planner, size = stage_planner(config, stage, folder_config(config.model.folder), world.size, device_type(world))
    if world.device.type == "cuda":
        _announce(planner, size, device_gib(world.device))
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ConfigError(_explanation(planner, size, stage, world, error)) from error


def _announce(planner: Planner, size: MicroBatchSize, gib: float) -> None:
    plan = planner.plan(size)
    logger.info("\n".join(plan.lines()))
    if plan.total_gib > gib:
        logger.warning(
            "the plan needs %.1f GiB, the GPU has %.1f: a full micro-batch may not fit. %s",
            plan.total_gib, gib, " ".join(advice(planner, size, gib)),
        )  # fmt: skip


def _explanation(planner: Planner, size: MicroBatchSize, stage: StageConfig, world: World, error: Exception) -> str:
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
    # Actual use exceeded the memory whatever the plan says: advise settings below both.
    return "\n".join([*lines, *advice(planner, size, min(gib, 0.95 * plan.total_gib))])


def device_type(world: World) -> Literal["cuda", "cpu"]:
    """The kind of device that a process trains on."""
    return "cuda" if world.device.type == "cuda" else "cpu"


def device_gib(device: torch.device) -> float:
    """Total memory of the GPU, or memory of the host that a new process can use."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory / GIB
    return available_host_bytes() / GIB


def available_host_bytes(root: Path = Path("/")) -> int:
    """Memory that a new process can use without swapping: what Linux counts as available, within the limit of the container (cgroup v2)."""
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
