"""Training recipe: the dataclasses one TOML file is decoded into.

    run = "runs/align"
    [model]
    folder = "checkpoints/start"
    [[stages]]
    name = "align"
    steps = 2000
    [stages.data]
    sources = [{ path = "shards/captions" }]
    [stages.optimizer]
    lrs = { vision = 0, language = 0, embedding = 0, projector = 1e-3 }

Importing this module loads no torch, so a recipe is validated before anything heavy is imported. `saccade train --keys`
prints every key with its default and docstring (docs/recipe.md).
"""

import hashlib
import json
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import ClassVar, Literal

from saccade.config import check_positive, encode
from saccade.errors import ConfigError
from saccade.train.parallel_config import ParallelConfig
from saccade.train.run_config import (
    CheckpointConfig,
    CheckpointEvaluationConfig,
    GuardConfig,
    LogConfig,
    ValidationConfig,
)
from saccade.train.stage_config import StageConfig


@dataclass(frozen=True, kw_only=True)
class InitialModelConfig:
    """The model training starts from."""

    folder: Path
    """Checkpoint folder with weights, tokenizer and chat template; `saccade init` creates one."""
    dtype: Literal["bf16", "fp32"] = "bf16"
    """Compute dtype of activations and matmuls; fp32 is for tests and comparisons."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A training run of one or more stages; each stage starts from the weights of the previous one."""

    run: Path
    """Run folder: config, metrics, training states and exported checkpoints; an interrupted run resumes from it."""
    model: InitialModelConfig
    """The model training starts from."""
    stages: tuple[StageConfig, ...]
    """Stages in order, for example align, pretrain, instruct."""
    seed: int = 0
    """Seed of the sample order and of all random numbers."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """Parallelism and memory trade-offs."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Saving and exporting."""
    guard: GuardConfig = field(default_factory=GuardConfig)
    """Detection of bad steps."""
    log: LogConfig = field(default_factory=LogConfig)
    """Logging."""
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    """Validation while training."""
    evaluation: CheckpointEvaluationConfig = field(default_factory=CheckpointEvaluationConfig)
    """Evaluation of exported checkpoints."""
    gc_every: int = 100
    """Steps between manual garbage collections; automatic ones would pause ranks at different times."""

    ALTERNATIVES: ClassVar[tuple[str, ...]] = ("steps", "epochs", "tokens")
    """Keys of which a stage has one: setting one on the command line replaces the others."""

    def __post_init__(self) -> None:
        if not self.stages:
            raise ConfigError("stages is empty. Give at least one: [[stages]]")
        names = [stage.name for stage in self.stages]
        if len(set(names)) < len(names):
            raise ConfigError(f"stage names are {', '.join(names)}; each must be unique")
        for before, stage in pairwise(self.stages):
            _check_lora_follows(before, stage)
        if self.seed < 0:
            raise ConfigError(f"seed is {self.seed}; give 0 or more")
        check_positive(self, "gc_every")

    def needs_start(self, number: int) -> bool:
        """Whether the objective of a stage needs a copy of the model that the stage starts from.

        Not for the first stage, whose start is `model.folder`, nor for the first one with lora, whose start is the
        model without its adapters.
        """
        stage = self.stages[number]
        if number == 0 or not stage.objective.compares_with_start:
            return False
        return stage.lora is None or self.stages[number - 1].lora is not None

    @property
    def fingerprint(self) -> str:
        """Hash of the settings that determine the result; run folder, parallelism, saving and logging are excluded."""
        decisive = {name: encode(self)[name] for name in ("model", "stages", "seed", "guard") if name in encode(self)}
        return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:16]


def _check_lora_follows(before: StageConfig, stage: StageConfig) -> None:
    """Refuse changes that would require merging adapters or quantizing weights between stages; dropout may differ."""
    is_quantized = stage.lora is not None and stage.lora.quantize_base != "none"
    old, new = (None if one is None else replace(one, dropout=0.0) for one in (before.lora, stage.lora))
    if new != old and (old is not None or is_quantized):
        raise ConfigError(
            f"the lora sections of stages {before.name} and {stage.name} differ. Make them equal, or end this run with "
            f"{before.name} and start another run from the folder it exports"
        )


def changed_keys(before: TrainConfig, after: TrainConfig) -> list[str]:
    """Dotted names of the settings that differ, with old and new value."""
    return changed_values(encode(before), encode(after))


def changed_values(before: object, after: object) -> list[str]:
    """`changed_keys` of encoded settings."""
    old, new = _flat(before), _flat(after)
    return [f"{key} {old.get(key)} -> {new.get(key)}" for key in sorted({*old, *new}) if old.get(key) != new.get(key)]


def _flat(tree: object, path: str = "") -> dict[str, object]:
    if isinstance(tree, dict):
        items = [(str(key), value) for key, value in tree.items()]
    elif isinstance(tree, list) and any(isinstance(item, dict) for item in tree):
        items = [(str(number), value) for number, value in enumerate(tree)]
    else:
        return {path: tree}
    return {k: v for key, value in items for k, v in _flat(value, f"{path}.{key}" if path else key).items()}
