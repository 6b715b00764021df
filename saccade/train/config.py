"""A training run as one TOML file: where it starts, its stages, how it is spread over devices, saved, guarded and logged.

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

No torch: a recipe is read and checked before anything heavy is loaded.
"""

import hashlib
import json
import math
import re
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Literal

from saccade.config import encode
from saccade.data.sample import TextRules
from saccade.errors import ConfigError
from saccade.train.groups import OptimizerConfig
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
class StartConfig:
    """Where training begins."""

    folder: Path
    """Checkpoint folder: weights, tokenizer and chat template; `saccade init` makes one."""
    dtype: Literal["bf16", "fp32"] = "bf16"
    """Number format of activations and matrix products; fp32 is for tests and comparisons."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How the model is spread over the ranks, and what it trades for memory. See `parallelize.py`."""

    strategy: Literal["auto", "none", "ddp", "fsdp", "hsdp"] = "auto"
    """auto: none for one rank, fsdp for several."""
    shard_size: int | None = None
    """hsdp only: ranks that hold one copy of the model together, usually the GPUs of a machine."""
    reshard_after_forward: bool = True
    """fsdp: free gathered parameters after forward; false gathers half as often and holds a whole copy in the compute dtype."""
    reduce_each_row: bool = True
    """fsdp: average gradients after every row; false does it once a step and holds whole gradients meanwhile."""
    reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """fsdp: number format in which gradients are averaged; bf16 halves the traffic."""
    compress_gradients: Literal["none", "bf16", "powersgd"] = "none"
    """ddp: what gradients are on the wire. powersgd (matrices of low rank) is lossy and starts anew on resume."""
    powersgd_rank: int = 4
    """powersgd: rank of the matrices sent; lower is less traffic and more loss."""
    powersgd_start: int = 1000
    """powersgd: steps with whole gradients before it begins."""
    recompute_vision: Recompute = "none"
    """Activations of the tower computed again in backward: of each block's feed-forward (selective) or of whole blocks (full)."""
    recompute_language: Recompute = "none"
    """The same for the decoder."""
    compile: bool = False
    """Compile the blocks with torch.compile: the first steps take a minute longer."""
    offload: bool = False
    """fsdp: hold parameters, gradients and optimizer in host memory; slow, for models that do not fit otherwise."""

    def __post_init__(self) -> None:
        _check_positive(self, "shard_size", "powersgd_rank", "powersgd_start")
        if (self.strategy == "hsdp") != (self.shard_size is not None):
            raise ConfigError("shard_size goes with strategy = 'hsdp', and hsdp needs it. Give both, or neither")
        if self.compress_gradients != "none" and self.strategy != "ddp":
            raise ConfigError(
                f"compress_gradients = {self.compress_gradients!r} goes with strategy = 'ddp'; fsdp has reduce_dtype"
            )
        if self.compress_gradients == "powersgd" and self.powersgd_start < 2:
            raise ConfigError(f"powersgd_start is {self.powersgd_start}; the first 2 steps need whole gradients")
        if self.offload and self.strategy in ("none", "ddp"):
            raise ConfigError(
                f"offload goes with fsdp, not with strategy = {self.strategy!r}; optimizer.offload works with any"
            )


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """One shard folder of a stage's mixture."""

    path: str
    """Shards: a folder, a glob, or a URL."""
    name: str | None = None
    """What it is called in sample ids and logs; the folder's name where not given."""
    weight: float | None = None
    """Share of the samples in proportion to the other sources' weights; without any, sources count by their samples."""
    rules: TextRules = field(default_factory=TextRules)
    """How its text becomes conversations: what is asked before a caption, a system message."""

    def __post_init__(self) -> None:
        _check_positive(self, "weight")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What a stage reads, and how it is packed into rows."""

    sources: tuple[SourceConfig, ...]
    """Shard folders, with weights where they are mixed."""
    token_budget: int = 16384
    """Most tokens of a row; a row is what one rank computes at a time."""
    patch_budget: int = 36864
    """Most image patches of a row."""
    rows_per_step: int = 1
    """Rows of a step over all ranks; more than one a rank are computed one after another and added up."""
    block_samples: int = 4096
    """Samples packed together: more fill the rows better and take longer to plan."""
    window_shards: int = 16
    """Shards of a source whose samples are shuffled together: more mix better, and are open at a time."""
    workers: int = 4
    """Processes per rank that decode images and make rows; 0 makes them in the trainer's own."""
    resize: Literal["pillow", "torch"] = "torch"
    """How images are resized: torch is five times as fast and within 2/255 of Hugging Face's pixels."""
    max_bad_share: float = 0.01
    """Share of unusable samples past which the run stops."""

    def __post_init__(self) -> None:
        if not self.sources:
            raise ConfigError("sources is empty. Name at least one shard folder: sources = [{ path = 'shards' }]")
        _check_positive(self, "token_budget", "patch_budget", "rows_per_step", "block_samples", "window_shards")
        if self.workers < 0:
            raise ConfigError(f"workers is {self.workers}; give 0 or more")


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank matrices that learn beside frozen linear layers. See `lora.py`."""

    rank: int = 16
    """Rank of the added matrices."""
    alpha: float = 32.0
    """Their product is scaled by alpha / rank."""
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    """The linear layers they stand beside: ends of names (q_proj, attn.proj, mlp.0) or regular expressions ('.*' is every one of the parts)."""
    parts: tuple[Literal["language", "vision", "projector"], ...] = ("language",)
    """The parts of the model in which targets are looked for; the tower's attention layers are qkv and proj, the projector's mlp.0 and mlp.2."""
    dropout: float = 0.0
    """Share of a layer's inputs that its matrices do not see in a step."""
    quantize_base: Quantization = "none"
    """QLoRA: hold the frozen weights of these layers in 4 or 8 bits: a quarter or half of the memory, slower steps."""
    export: Literal["merged", "adapter"] = "merged"
    """What is exported: a whole checkpoint folder, with the matrices alone in adapter/ of it, or only those. In PEFT's layout."""

    def __post_init__(self) -> None:
        _check_positive(self, "rank", "alpha")
        if not 0.0 <= self.dropout < 1.0:
            raise ConfigError(f"dropout is {self.dropout}; give 0 or more and less than 1")
        if not self.targets or not self.parts:
            raise ConfigError("targets and parts cannot be empty. Remove the lora section to train without it")
        for target in self.targets:
            try:
                re.compile(target)
            except re.error as error:
                raise ConfigError(f"targets: '{target}' is neither a name nor a regular expression: {error}") from error


@dataclass(frozen=True, kw_only=True)
class StageConfig:
    """One stage of a run: what is read, what learns, how long. Exactly one of steps, epochs and tokens says how long."""

    name: str
    """What it is called in logs and with `--set stages.NAME.key=value`."""
    data: DataConfig
    """What is read."""
    steps: int | None = None
    """Length in optimizer steps."""
    epochs: int | None = None
    """Length in passes over all samples; for sources without weights."""
    tokens: int | None = None
    """Length in tokens, rounded up to whole steps of full rows."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """How parameters move; a learning rate of 0 freezes."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    """The learning rate over the stage."""
    clip_norm: float = 1.0
    """Gradients with a larger norm are scaled down to it; inf never clips."""
    lora: LoraConfig | None = None
    """Train low-rank matrices instead of the parameters themselves."""
    continue_optimizer: bool = False
    """Take over the moments of the stage before, for the parameters that learn in both."""

    def __post_init__(self) -> None:
        if not self.name or not self.name.replace("-", "_").isidentifier():
            raise ConfigError(f"a stage is called {self.name!r}; use letters, digits, - and _")
        if sum(length is not None for length in (self.steps, self.epochs, self.tokens)) != 1:
            raise ConfigError(f"stage {self.name}: give exactly one of steps, epochs and tokens")
        _check_positive(self, "steps", "epochs", "tokens", "clip_norm")
        if self.epochs is not None and any(source.weight is not None for source in self.data.sources):
            raise ConfigError(f"stage {self.name}: sources with weights have no epochs. Give steps or tokens, or remove the weights")  # fmt: skip
        self._check_schedule()

    def _check_schedule(self) -> None:
        """Refuse a schedule that the stage is too short for, or whose steps nobody could count from its end."""
        if self.epochs is not None and self.schedule.decay_steps is not None:
            raise ConfigError(
                f"stage {self.name}: decay_steps counts from the last step, and a stage of epochs does not know which that is. Remove "
                "it (the last tenth of the samples decays), or give the length in steps or tokens"
            )
        if self.known_steps is not None:
            try:
                self.schedule.check(self.known_steps)
            except ConfigError as error:
                raise ConfigError(f"stage {self.name}: schedule: {error}") from error

    @property
    def known_steps(self) -> int | None:
        """Its length in steps; None when it ends with the data."""
        if self.tokens is not None:
            return math.ceil(self.tokens / (self.data.token_budget * self.data.rows_per_step))
        return self.steps


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When the state is saved, what is kept, and when a checkpoint folder is exported."""

    every: int = 500
    """Steps between saves of the whole state, from which a run resumes."""
    keep_last: int = 2
    """Newest states that are kept."""
    keep_every: int | None = None
    """States at multiples of this many steps are kept too."""
    background: bool = True
    """Write while training goes on, from a copy in host memory."""
    on_failure: Literal["continue", "stop"] = "continue"
    """What a failed save (a full disk) does to the run; the states before stay as they are."""
    export_every: int | None = None
    """Steps between exports of a checkpoint folder in Hugging Face's layout; one is always written at the end of a stage."""
    export_dtype: Literal["bf16", "fp32"] = "bf16"
    """Number format of exported weights."""

    def __post_init__(self) -> None:
        _check_positive(self, "every", "keep_last", "keep_every", "export_every")


@dataclass(frozen=True, kw_only=True)
class GuardConfig:
    """What counts as a bad step, and what is done about it."""

    window: int = 64
    """Accepted steps whose losses a new one is compared with."""
    min_history: int = 16
    """Accepted steps before the loss can be called a spike."""
    spike_sigmas: float = 8.0
    """A loss above mean + this many standard deviations of the window is a spike, if also above `spike_floor`; inf is never."""
    spike_floor: float = 1.1
    """A loss below this many times the window's mean is never a spike, however quiet the window was."""
    spike_factor: float = math.inf
    """A loss above this many times the window's mean is a spike."""
    max_grad_norm: float = math.inf
    """A gradient norm above this skips the step (clipping only scales it down)."""
    max_skips: int = 5
    """Bad steps in a row before the weights go back to the last saved state, and the data on."""
    max_rollbacks: int = 3
    """Times a stage may go back; then the run stops."""
    hang_timeout_s: float = 900.0
    """Seconds without a step, probes, saves and exports not counted, after which the process says where it stands and ends, so that torchrun can start it again; inf never."""

    def __post_init__(self) -> None:
        _check_positive(self, "window", "min_history", "spike_sigmas", "spike_floor", "spike_factor", "max_grad_norm", "max_skips", "hang_timeout_s")  # fmt: skip
        if self.max_rollbacks < 0:
            raise ConfigError(f"max_rollbacks is {self.max_rollbacks}; give 0 or more")


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """What is said about the run, and where."""

    every: int = 10
    """Steps between records in the log and in metrics.jsonl."""
    trackers: TrackersConfig = field(default_factory=TrackersConfig)
    """Where records go besides."""
    profile_steps: tuple[int, ...] | None = None
    """First and last step of the run that the profiler looks at, such as [20, 22]; a trace of them is written to trace/."""
    memory_snapshot: bool = False
    """Write the history of the GPU's memory to trace/: after the profiled steps, else after the third, and when it runs out."""

    def __post_init__(self) -> None:
        _check_positive(self, "every")
        steps = self.profile_steps
        if steps is not None and not (len(steps) == 2 and 1 <= steps[0] <= steps[1]):
            raise ConfigError(f"profile_steps is {list(steps)}; give the first and the last step, such as [20, 22]")


@dataclass(frozen=True, kw_only=True)
class ProbeConfig:
    """Evaluation while training: loss and answers on held-out samples, and whatever else the caller of `train` looks at."""

    every: int | None = None
    """Steps between evaluations, and one at the end of each stage; never where not given."""
    sources: tuple[SourceConfig, ...] = ()
    """Held-out shard folders; rows have the budgets of the stage's data."""
    num_samples: int = 512
    """Held-out samples that the loss is computed on, the same ones every time; all where there are fewer."""
    num_generations: int = 8
    """Samples that are answered by the model as it is, and written to samples.jsonl; left out where the model is sharded."""
    max_new_tokens: int = 64
    """Longest answer, in tokens."""

    def __post_init__(self) -> None:
        _check_positive(self, "every", "num_samples", "max_new_tokens")
        if self.num_generations < 0:
            raise ConfigError(f"num_generations is {self.num_generations}; give 0 or more")
        if self.sources and self.every is None:
            raise ConfigError("probe has sources, but every is not given: they would never be looked at. Give steps")
        if any(source.weight is not None for source in self.sources):
            raise ConfigError("held-out sources are not mixed: all their samples count alike. Remove the weights")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A whole run: one or more stages, the first from `model`, each next from the one before."""

    run: Path
    """Run folder: settings, metrics, states and exported checkpoints; a run that was stopped goes on from it."""
    model: StartConfig
    """Where training begins."""
    stages: tuple[StageConfig, ...]
    """What is done, in order: for example align, pretrain, instruct."""
    seed: int = 0
    """Chooses the order of samples and everything else that is random."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """How the model is spread over the ranks."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """When and how the state is saved."""
    guard: GuardConfig = field(default_factory=GuardConfig)
    """What counts as a bad step."""
    log: LogConfig = field(default_factory=LogConfig)
    """What is said about the run."""
    probe: ProbeConfig = field(default_factory=ProbeConfig)
    """Evaluation while training."""
    gc_every: int = 100
    """Steps between collections of Python's garbage, which would otherwise pause ranks at different times."""

    def __post_init__(self) -> None:
        if not self.stages:
            raise ConfigError("stages is empty. Give at least one: [[stages]]")
        names = [stage.name for stage in self.stages]
        if len(set(names)) < len(names):
            raise ConfigError(f"stages are called {', '.join(names)}; each needs a name of its own")
        for before, stage in pairwise(self.stages):
            _check_lora_follows(before, stage)
        if self.seed < 0:
            raise ConfigError(f"seed is {self.seed}; give 0 or more")
        _check_positive(self, "gc_every")

    @property
    def fingerprint(self) -> str:
        """Equal for runs that compute the same: of all settings but where the run lies, how it is spread, saved and logged."""
        decisive = {name: encode(self)[name] for name in ("model", "stages", "seed", "guard") if name in encode(self)}
        return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:16]


def _check_lora_follows(before: StageConfig, stage: StageConfig) -> None:
    """Refuse what would need matrices merged, or weights quantized anew, between two stages of a run."""
    is_quantized = stage.lora is not None and stage.lora.quantize_base != "none"
    if stage.lora != before.lora and (before.lora is not None or is_quantized):
        raise ConfigError(
            f"the lora sections of stages {before.name} and {stage.name} differ. Give both the same one, or end this run with "
            f"{before.name} and begin another from the folder it exports"
        )


def changed_keys(before: TrainConfig, after: TrainConfig) -> list[str]:
    """Dotted names of the settings that differ, with both values."""
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
