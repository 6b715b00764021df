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
import math
import re
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import ClassVar, Literal

from saccade.config import encode
from saccade.data.augment import AugmentConfig
from saccade.data.config import Source
from saccade.data.storage import StorageConfig
from saccade.errors import ConfigError
from saccade.train.objectives.config import ObjectiveConfig
from saccade.train.parameter_groups import OptimizerConfig
from saccade.train.schedule import ScheduleConfig
from saccade.train.trackers import TrackersConfig

Strategy = Literal["none", "ddp", "fsdp", "hsdp"]
Recompute = Literal["none", "selective", "full"]
Quantization = Literal["none", "int4", "int8"]


def _check_positive(config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if value is not None and not value > 0:
            raise ConfigError(f"{name} is {value}; it must be above 0")


@dataclass(frozen=True, kw_only=True)
class InitialModelConfig:
    """The model training starts from."""

    folder: Path
    """Checkpoint folder with weights, tokenizer and chat template; `saccade init` creates one."""
    dtype: Literal["bf16", "fp32"] = "bf16"
    """Compute dtype of activations and matmuls; fp32 is for tests and comparisons."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Data parallelism, sharding, activation checkpointing and compilation. See `parallelize.py`."""

    strategy: Literal["auto", "none", "ddp", "fsdp", "hsdp"] = "auto"
    """auto: none on one rank, fsdp on several."""
    shard_size: int | None = None
    """hsdp only: number of ranks that shard one replica of the model, usually the GPUs of one node."""
    reshard_after_forward: bool = True
    """fsdp: free the gathered parameters after forward (ZeRO-3); false keeps them until backward (ZeRO-2)."""
    reduce_each_micro_batch: bool = True
    """fsdp: reduce-scatter gradients after every micro-batch; false reduces once per step, unsharded until then."""
    reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """fsdp: dtype of the gradient reduction; bf16 halves the traffic."""
    compress_gradients: Literal["none", "bf16", "powersgd"] = "none"
    """ddp: gradient communication hook. powersgd (low-rank) is lossy; its error feedback is not saved."""
    powersgd_rank: int = 4
    """powersgd: rank of the approximation; lower means less traffic and more error."""
    powersgd_start_step: int = 1000
    """powersgd: number of uncompressed steps before it is enabled."""
    recompute_vision: Recompute = "none"
    """Activation checkpointing of the vision tower: of each block's MLP (selective) or of whole blocks (full)."""
    recompute_language: Recompute = "none"
    """Activation checkpointing of the decoder, likewise."""
    compile: bool = False
    """Compile the transformer blocks with torch.compile; the first steps take a minute longer."""
    offload: bool = False
    """fsdp: keep parameters, gradients and optimizer state in host memory; slow, for models that do not fit."""

    RENAMED: ClassVar[dict[str, str]] = {
        "reduce_each_row": "reduce_each_micro_batch",
        "powersgd_start": "powersgd_start_step",
    }
    """Former keys, with what replaced each."""

    def __post_init__(self) -> None:
        _check_positive(self, "shard_size", "powersgd_rank", "powersgd_start_step")
        if (self.strategy == "hsdp") != (self.shard_size is not None):
            raise ConfigError(
                "shard_size requires strategy = 'hsdp', and hsdp requires shard_size. Give both, or neither"
            )
        if self.compress_gradients != "none" and self.strategy != "ddp":
            raise ConfigError(
                f"compress_gradients = {self.compress_gradients!r} requires strategy = 'ddp'; "
                "with fsdp, set reduce_dtype"
            )
        if self.compress_gradients == "powersgd" and self.powersgd_start_step < 2:
            raise ConfigError(
                f"powersgd_start_step is {self.powersgd_start_step}; the first 2 steps must be uncompressed. "
                "Give 2 or more"
            )
        if self.offload and self.strategy in ("none", "ddp"):
            raise ConfigError(
                f"offload requires fsdp or hsdp, not strategy = {self.strategy!r}; "
                "optimizer.offload works with any strategy"
            )


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The data of a stage and how it is packed."""

    sources: tuple[Source, ...]
    """Shard folders, with weights for a mixture."""
    max_seq_len: int = 16384
    """Maximum length of a packed sequence, in tokens. One packed sequence is one micro-batch."""
    max_patches: int = 36864
    """Maximum number of vision patches of a packed sequence."""
    global_batch_size: int = 1
    """Packed sequences per optimizer step over all ranks; more than one per rank means gradient accumulation."""
    packing_buffer_size: int = 4096
    """Samples that are packed together: a larger buffer fills sequences better and takes longer to pack."""
    window_shards: int = 16
    """Shards of a source whose samples are shuffled together: more shards mix better and are open at the same time."""
    num_workers: int = 4
    """Worker processes per rank that decode images and pack sequences; 0 does it in the trainer process."""
    resize: Literal["pillow", "torch"] = "torch"
    """Image resize implementation: torch is five times as fast and within 2/255 of Hugging Face's pixels."""
    augment: AugmentConfig | None = None
    """Augmentation of the images if this section is present: against overfitting on few images."""
    token_dropout: float = 0.0
    """Probability that an answer token is replaced by a random one in the input only; not in validation."""
    max_bad_share: float = 0.01
    """Fraction of bad samples above which the run stops, once a rank has seen at least 10 of them."""
    storage: StorageConfig = field(default_factory=StorageConfig)
    """Cache, retries and timeouts for remote shards."""

    RENAMED: ClassVar[dict[str, str]] = {
        "token_budget": "max_seq_len",
        "patch_budget": "max_patches",
        "rows_per_step": "global_batch_size",
        "block_samples": "packing_buffer_size",
        "workers": "num_workers",
    }
    """Former keys, with what replaced each."""

    def __post_init__(self) -> None:
        if not self.sources:
            raise ConfigError("sources is empty. Name at least one shard folder: sources = [{ path = 'shards' }]")
        _check_positive(self, "max_seq_len", "max_patches", "global_batch_size", "packing_buffer_size", "window_shards")
        if self.num_workers < 0:
            raise ConfigError(f"num_workers is {self.num_workers}; give 0 or more")
        if not 0.0 <= self.token_dropout < 1.0:
            raise ConfigError(f"token_dropout is {self.token_dropout}; give 0 or more and less than 1")
        if not 0.0 <= self.max_bad_share <= 1.0:
            raise ConfigError(f"max_bad_share is {self.max_bad_share}; give a fraction between 0 and 1")
        if 0 < sum(source.weight is not None for source in self.sources) < len(self.sources):
            raise ConfigError("some sources have a weight and some have none. Give every source a weight, or none")


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """LoRA adapters on frozen linear layers. See `lora.py`."""

    rank: int = 16
    """Rank of the adapters."""
    alpha: float = 32.0
    """Scaling: adapter outputs are multiplied by alpha / rank."""
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    """Linear layers to adapt: name suffixes (q_proj, attn.proj) or regular expressions ('.*' is every layer)."""
    parts: tuple[Literal["language", "vision", "projector"], ...] = ("language",)
    """Parts of the model searched for targets; vision has attn.qkv and attn.proj, the projector mlp.0 and mlp.2."""
    dropout: float = 0.0
    """Dropout probability of the adapter inputs; may differ between stages."""
    quantize_base: Quantization = "none"
    """QLoRA: store the frozen weights of adapted layers in 4 or 8 bits: a quarter or half of the memory."""
    export: Literal["merged", "adapter"] = "merged"
    """merged: export a checkpoint folder with the adapter in adapter/; adapter: the adapter only (PEFT layout)."""

    def __post_init__(self) -> None:
        _check_positive(self, "rank", "alpha")
        if not 0.0 <= self.dropout < 1.0:
            raise ConfigError(f"dropout is {self.dropout}; give 0 or more and less than 1")
        if not self.targets or not self.parts:
            raise ConfigError("targets and parts cannot be empty. Remove the lora section to train without LoRA")
        for target in self.targets:
            try:
                re.compile(target)
            except re.error as error:
                raise ConfigError(f"targets: '{target}' is neither a name nor a regular expression: {error}") from error


@dataclass(frozen=True, kw_only=True)
class QuantizationAwareConfig:
    """Quantization-aware training: projections compute with, and export, rounded weights (`quantization_aware.py`)."""

    form: Literal["int4", "int8"] = "int4"
    """int4: weights in groups, as scheme w4a16-rtn; int8: weights per output, activations per token, as int8-rtn."""
    group_size: int = 128
    """int4: inputs that share a scale; a layer that it does not divide takes 64 or 32, or one scale per output."""
    bits: Literal[2, 3, 4] = 4
    """int4: bits that are used. Fewer than 4 for experiments: they are stored as int4 all the same."""
    parts: tuple[Literal["vision", "projector", "language"], ...] = ()
    """Parts whose projections are rounded; empty: as the scheme: vision and language, with int8 also the projector."""

    def __post_init__(self) -> None:
        if self.group_size % 128 and self.group_size not in (16, 32, 64):
            raise ConfigError(f"group_size is {self.group_size}; it may be 16, 32, 64 or a multiple of 128")
        if self.form == "int8" and self.bits != 4:
            raise ConfigError("bits is for form int4. Remove it")

    @property
    def rounded_parts(self) -> tuple[str, ...]:
        """The parts whose projections are rounded."""
        return self.parts or (("vision", "language") if self.form == "int4" else ("vision", "projector", "language"))


@dataclass(frozen=True, kw_only=True)
class StageConfig:
    """One stage of a run: its data, optimizer, schedule and length (exactly one of steps, epochs and tokens)."""

    name: str
    """Name in logs and in `--set stages.NAME.key=value`."""
    data: DataConfig
    """Data of the stage."""
    steps: int | None = None
    """Length in optimizer steps."""
    epochs: int | None = None
    """Length in passes over all samples; only for sources without weights."""
    tokens: int | None = None
    """Length in tokens, rounded up to whole steps of full packed sequences."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """Optimizer and parameter groups; a learning rate of 0 freezes a group."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    """Learning-rate schedule of the stage."""
    clip_norm: float = 1.0
    """Maximum gradient norm; larger gradients are scaled down to it. inf disables clipping."""
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    """What is optimized; cross entropy of the next token without this section."""
    ema_decay: float | None = None
    """EMA decay, such as 0.999; the averaged weights are validated, exported and handed to the next stage."""
    drop_path: float = 0.0
    """Stochastic depth: probability to skip the last vision block, linear from 0 at the first; not in validation."""
    lora: LoraConfig | None = None
    """Train LoRA adapters instead of the parameters."""
    qat: QuantizationAwareConfig | None = None
    """Train with weights rounded to few bits, for a checkpoint that loses nothing when it is quantized."""
    continue_optimizer: bool = False
    """Keep the optimizer state of the previous stage for parameters trained in both."""

    RENAMED: ClassVar[dict[str, str]] = {"label_smoothing": "objective.label_smoothing"}
    """Former keys, with what replaced each."""

    def __post_init__(self) -> None:
        if not self.name or not self.name.replace("-", "_").isidentifier():
            raise ConfigError(f"stage name {self.name!r} is invalid; use letters, digits, - and _")
        if sum(length is not None for length in (self.steps, self.epochs, self.tokens)) != 1:
            raise ConfigError(f"stage {self.name}: give exactly one of steps, epochs and tokens")
        _check_positive(self, "steps", "epochs", "tokens", "clip_norm")
        if self.ema_decay is not None and not 0.0 < self.ema_decay < 1.0:
            raise ConfigError(
                f"stage {self.name}: ema_decay is {self.ema_decay}; give a number between 0 and 1, such as 0.999"
            )
        if self.epochs is not None and any(source.weight is not None for source in self.data.sources):
            raise ConfigError(
                f"stage {self.name}: a weighted mixture has no epochs. Give steps or tokens, or remove the weights"
            )
        if self.lora is not None and self.qat is not None:
            raise ConfigError(
                f"stage {self.name}: lora and qat exclude each other: rounding would undo the adapters. Keep one"
            )
        self._check_randomness()
        self._check_schedule()

    def _check_randomness(self) -> None:
        """Refuse random changes that the objective's second model would not see."""
        if not 0.0 <= self.drop_path < 1.0:
            raise ConfigError(f"stage {self.name}: drop_path is {self.drop_path}; give 0 or more and less than 1")
        if self.objective.distillation and self.objective.distillation.top_k:
            if self.data.augment is not None:
                raise ConfigError(
                    f"stage {self.name}: stored logits are of images that are not augmented. "
                    "Remove data.augment, or top_k"
                )
            if self.data.token_dropout:
                raise ConfigError(
                    f"stage {self.name}: stored logits are of tokens that are not replaced. "
                    "Remove data.token_dropout, or top_k"
                )
        if self.objective.reads_pairs and (self.drop_path or self.data.token_dropout):
            raise ConfigError(
                f"stage {self.name}: preference pairs are compared with a reference that drops nothing. "
                "Remove drop_path and data.token_dropout"
            )
        if self.objective.reads_pairs and self.lora is not None and self.lora.dropout:
            raise ConfigError(
                f"stage {self.name}: preference pairs are compared with a reference that drops nothing. "
                "Remove lora.dropout"
            )

    def _check_schedule(self) -> None:
        """Refuse a schedule longer than the stage, or one that needs a number of steps that is not known in advance."""
        if self.epochs is not None and self.schedule.decay_steps is not None:
            raise ConfigError(
                f"stage {self.name}: decay_steps counts back from the last step, which is not known for a length "
                "in epochs. Remove decay_steps (the last tenth of the samples decays), "
                "or give the length in steps or tokens"
            )
        if self.known_steps is not None:
            try:
                self.schedule.check(self.known_steps)
            except ConfigError as error:
                raise ConfigError(f"stage {self.name}: schedule: {error}") from error

    @property
    def known_steps(self) -> int | None:
        """Length in steps; None if it is given in epochs."""
        if self.tokens is not None:
            return math.ceil(self.tokens / (self.data.max_seq_len * self.data.global_batch_size))
        return self.steps


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When the training state is saved and a checkpoint folder is exported."""

    every: int = 500
    """Steps between saves of the training state, from which a run resumes. A save between skipped steps is delayed."""
    keep_last: int = 2
    """Number of newest states that are kept. A stage with DPO also keeps the state it started from, its reference."""
    keep_every: int | None = None
    """States at multiples of this many steps are kept as well."""
    background: bool = True
    """Write asynchronously from a copy in host memory while training continues."""
    on_failure: Literal["continue", "stop"] = "continue"
    """What to do if a save fails (for example, disk full); earlier states are untouched either way."""
    export_every: int | None = None
    """Steps between exports of a checkpoint folder in Hugging Face layout; the end of a stage always exports."""
    export_dtype: Literal["bf16", "fp32"] = "bf16"
    """Dtype of exported weights."""

    def __post_init__(self) -> None:
        _check_positive(self, "every", "keep_last", "keep_every", "export_every")


@dataclass(frozen=True, kw_only=True)
class GuardConfig:
    """Detection of bad steps (NaN, loss spikes, hangs) and the reaction to them."""

    window: int = 64
    """Number of accepted steps whose losses a new loss is compared with."""
    min_history: int = 16
    """Number of accepted steps before spikes are detected."""
    spike_sigmas: float = 8.0
    """A loss above mean + this many standard deviations of the window is a spike (see `spike_floor`); inf disables."""
    spike_floor: float = 1.1
    """A loss below this multiple of the window's mean is never a spike."""
    spike_factor: float = math.inf
    """A loss above this multiple of the window's mean is a spike."""
    max_grad_norm: float = math.inf
    """A step with a larger gradient norm is skipped (clipping only scales it down)."""
    max_skips: int = 5
    """Consecutive skipped steps before weights and optimizer roll back to an earlier state; the data continues."""
    max_rollbacks: int = 3
    """Rollbacks per stage before the run stops."""
    hang_timeout_s: float = 900.0
    """Seconds without a step (saves etc. excluded) until the process dumps all stacks and exits; inf disables."""

    def __post_init__(self) -> None:
        _check_positive(
            self, "window", "min_history", "spike_sigmas", "spike_floor", "spike_factor", "max_grad_norm",
            "max_skips", "hang_timeout_s",
        )  # fmt: skip
        if self.max_rollbacks < 0:
            raise ConfigError(f"max_rollbacks is {self.max_rollbacks}; give 0 or more")


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """Logging, trackers and profiling."""

    every: int = 10
    """Steps between records in the log and in metrics.jsonl; the first step is always logged."""
    trackers: TrackersConfig = field(default_factory=TrackersConfig)
    """Additional destinations of the records."""
    profile_steps: tuple[int, ...] | None = None
    """First and last step to profile, such as [20, 22]; the trace is written to trace/."""
    memory_snapshot: bool = False
    """Write a CUDA memory snapshot to trace/: after the profiled (else the third) step, and on out of memory."""

    def __post_init__(self) -> None:
        _check_positive(self, "every")
        steps = self.profile_steps
        if steps is not None and not (len(steps) == 2 and 1 <= steps[0] <= steps[1]):
            raise ConfigError(f"profile_steps is {list(steps)}; give the first and the last step, such as [20, 22]")


@dataclass(frozen=True, kw_only=True)
class ValidationConfig:
    """Validation while training: loss and sample generations on held-out data."""

    every: int | None = None
    """Steps between validations, plus one at the end of each stage; default: none."""
    sources: tuple[Source, ...] = ()
    """Held-out shard folders; packed like the data of the stage."""
    num_samples: int = 512
    """Held-out samples the loss is computed on, the same ones every time."""
    num_generations: int = 8
    """Samples the model generates an output for, written to samples.jsonl; skipped for sharded models."""
    max_new_tokens: int = 64
    """Maximum number of generated tokens."""
    export_best: bool = False
    """Export the checkpoint with the lowest validation loss of the run to checkpoints/best."""

    def __post_init__(self) -> None:
        _check_positive(self, "every", "num_samples", "max_new_tokens")
        if self.export_best and not self.sources:
            raise ConfigError("validation.export_best needs validation.sources. Name held-out shards")
        if self.num_generations < 0:
            raise ConfigError(f"num_generations is {self.num_generations}; give 0 or more")
        if self.sources and self.every is None:
            raise ConfigError(
                "validation.sources is set but validation.every is not, so validation would never run. "
                "Set validation.every"
            )
        if any(source.weight is not None for source in self.sources):
            raise ConfigError("validation sources are not a mixture: every sample counts once. Remove the weights")


@dataclass(frozen=True, kw_only=True)
class CheckpointEvaluationConfig:
    """Evaluation of exported checkpoints while training, as `saccade evaluate` does it."""

    tasks: tuple[str, ...] = ()
    """Tasks with their data, such as "captioning=shards/val"; every exported checkpoint is evaluated on them."""
    limit: int | None = 256
    """Examples per task, the same ones every time."""
    device: str = "cpu"
    """Device of the evaluation, in a process next to training; same: the device of training, which waits for it."""

    def __post_init__(self) -> None:
        _check_positive(self, "limit")
        for task in self.tasks:
            name, equals, path = task.partition("=")
            if not (name and equals and path):
                raise ConfigError(
                    f"evaluation.tasks: {task!r} has no data. Write TASK=PATH, such as captioning=shards/val"
                )


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

    RENAMED: ClassVar[dict[str, str]] = {"probe": "validation"}
    """Former keys, with what replaced each."""
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
        _check_positive(self, "gc_every")

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
    old, new = _flat(encode(before)), _flat(encode(after))
    return [f"{key} {old.get(key)} -> {new.get(key)}" for key in sorted({*old, *new}) if old.get(key) != new.get(key)]


def _flat(tree: object, path: str = "") -> dict[str, object]:
    if isinstance(tree, dict):
        items = [(str(key), value) for key, value in tree.items()]
    elif isinstance(tree, list) and any(isinstance(item, dict) for item in tree):
        items = [(str(number), value) for number, value in enumerate(tree)]
    else:
        return {path: tree}
    return {k: v for key, value in items for k, v in _flat(value, f"{path}.{key}" if path else key).items()}
