"""The sections `[[stages]]` of a recipe: data, optimizer, objective, adapters and length of a stage."""

import math
import re
from dataclasses import dataclass, field
from typing import Literal

from saccade.config import check_positive
from saccade.data.augment import AugmentConfig
from saccade.data.config import Source
from saccade.data.storage import StorageConfig
from saccade.errors import ConfigError
from saccade.train.objectives.config import ObjectiveConfig
from saccade.train.parameter_groups import OptimizerConfig
from saccade.train.schedule import ScheduleConfig

Quantization = Literal["none", "int4", "int8"]


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
    """Shards (units, with `unit_bytes`) of a source whose samples are shuffled together: more mix better and are open
    at the same time."""
    num_lanes: int = 1
    """Equal parts of an epoch that are read side by side, so that every node downloads its own part only. For remote
    shards on many nodes: up to `global_batch_size`, at least 5 per node."""
    unit_bytes: int | None = None
    """Larger shards are cut into units of at most this many bytes, which are shuffled, cached and prefetched; for many
    nodes 128 MiB. Default: shards are not cut."""
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

    def __post_init__(self) -> None:
        if not self.sources:
            raise ConfigError("sources is empty. Name at least one shard folder: sources = [{ path = 'shards' }]")
        check_positive(self, "max_seq_len", "max_patches", "global_batch_size", "packing_buffer_size", "window_shards")
        check_positive(self, "num_lanes")
        if self.unit_bytes is not None:
            check_positive(self, "unit_bytes")
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
        check_positive(self, "rank", "alpha")
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

    def __post_init__(self) -> None:
        if not self.name or not self.name.replace("-", "_").isidentifier():
            raise ConfigError(f"stage name {self.name!r} is invalid; use letters, digits, - and _")
        if sum(length is not None for length in (self.steps, self.epochs, self.tokens)) != 1:
            raise ConfigError(f"stage {self.name}: give exactly one of steps, epochs and tokens")
        check_positive(self, "steps", "epochs", "tokens", "clip_norm")
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
