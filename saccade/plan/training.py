"""The memory of training on a GPU: `saccade plan RECIPE`, `saccade plan MODEL`.

The memory model is `train`'s own (`train/memory.py`), and so is the advice (`train/memory_advice.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from saccade.config import load_config
from saccade.model.families import download_advice, load_model_config
from saccade.plan.gpus import Gpu
from saccade.plan.served_model import model_config
from saccade.train.config import TrainConfig
from saccade.train.dry_run import MicroBatchSize
from saccade.train.memory import MemoryPlanner
from saccade.train.memory_advice import Checkpointing, advice, compare_checkpointing
from saccade.train.memory_check import stage_planner
from saccade.train.memory_plan import MemoryPlan
from saccade.train.parallel_config import ParallelConfig


@dataclass(frozen=True)
class TrainingPlan:
    """The plan of one stage or model on a GPU, its alternatives, and what to change."""

    plan: MemoryPlan
    gpu: Gpu
    compared: list[Checkpointing]
    """All combinations of activation checkpointing, cheapest first."""
    advice: list[str]
    """Settings that make it fit, cheapest first."""

    @property
    def fits(self) -> bool:
        """Whether the current settings fit."""
        return self.plan.total_gib <= self.gpu.gib

    def lines(self) -> list[str]:
        """The plan as text."""
        decision = "fits" if self.fits else "does not fit"
        table = [
            f"  {one.recompute_vision:<10} {one.recompute_language:<10} {one.total_gib:7.1f} "
            f"{one.extra_compute:>14.0%}   {f'{one.max_tokens} tokens' if one.max_tokens else 'none'}"
            for one in self.compared
        ]
        header = f"  {'vision':<10} {'decoder':<10} {'GiB':>7} {'extra compute':>14}   longest sequence that fits"
        return [
            *self.plan.lines(), f"  {decision} in {self.gpu.name} ({self.gpu.gib:.1f} GiB)",
            "activation checkpointing", header, *table, *self.advice,
        ]  # fmt: skip

    def record(self) -> dict[str, Any]:
        """The plan as JSON."""
        return {
            "fits": self.fits,
            "gpu": self.gpu.name,
            "gpu_gib": self.gpu.gib,
            "plan": self.plan.record(),
            "choices": [one._asdict() for one in self.compared],
            "advice": self.advice,
        }


def plan_training(planner: MemoryPlanner, size: MicroBatchSize, gpu: Gpu) -> TrainingPlan:
    """Plan a micro-batch on a GPU."""
    compared = compare_checkpointing(planner, size, gpu.gib)
    return TrainingPlan(planner.plan(size), gpu, compared, advice(planner, size, gpu.gib, compared))


def plan_recipe(
    recipe: Path, overrides: Sequence[str], gpu: Gpu, *, num_gpus: int = 1
) -> tuple[dict[str, TrainingPlan], str | None]:
    """(plan of each stage, advice to download the checkpoint if it is not here and planned with published sizes)."""
    config = load_config(TrainConfig, recipe, overrides)
    folder = config.model.folder
    download = None if folder.exists() else download_advice(folder)
    start = load_model_config(folder) if download is None else model_config(str(folder))
    stages = {
        f"stage {stage.name}": plan_training(*stage_planner(config, stage, start, num_gpus), gpu)
        for stage in config.stages
    }
    return stages, download and f"{folder} is not here: planned with its published sizes. {download}"


def plan_model(
    model: str, gpu: Gpu, parallel: ParallelConfig, *, tokens: int, patches: int | None = None, num_gpus: int = 1
) -> TrainingPlan:
    """Plan the training of all parameters of a model with AdamW; by default 2.25 vision patches per token."""
    planner = MemoryPlanner(config=model_config(model), world_size=num_gpus, parallel=parallel)
    return plan_training(
        planner, MicroBatchSize(tokens=tokens, patches=round(2.25 * tokens) if patches is None else patches), gpu
    )
