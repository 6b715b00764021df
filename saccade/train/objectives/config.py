"""Recipe sections of the objectives. Without torch, like the rest of a recipe."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from saccade.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class DistillationConfig:
    """Distillation: the student's next-token distribution follows that of a frozen teacher. See `distillation.py`."""

    teacher: Path
    """Checkpoint folder of the teacher, plain or quantized, with the vocabulary and image settings of the student."""
    teacher_dtype: Literal["bf16", "fp32"] | None = None
    """Compute dtype of the teacher; default: that of training. Every rank holds the whole teacher."""
    temperature: float = 1.0
    """Logits of both are divided by it; above 1 the teacher's less probable tokens count more."""
    kl_weight: float = 0.5
    """Share of the KL divergence in the loss; the rest is cross entropy with the labels. 1: the teacher alone."""
    hidden_weight: float = 0.0
    """Weight of the squared distance of the last hidden states, relative to the teacher's; needs the same width."""
    top_k: int | None = None
    """Read the teacher's k most probable tokens, stored by `saccade train RECIPE --teacher-logits`; load no teacher."""

    def __post_init__(self) -> None:
        if not self.temperature > 0.0:
            raise ConfigError(f"temperature is {self.temperature}; it must be above 0")
        if not 0.0 <= self.kl_weight <= 1.0:
            raise ConfigError(f"kl_weight is {self.kl_weight}; give a share between 0 and 1")
        if self.hidden_weight < 0.0:
            raise ConfigError(f"hidden_weight is {self.hidden_weight}; give 0 or more")
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"top_k is {self.top_k}; give 1 or more, such as 64")
        if self.top_k is not None and self.hidden_weight:
            raise ConfigError("top_k stores no hidden states. Set hidden_weight to 0, or remove top_k")


@dataclass(frozen=True, kw_only=True)
class PreferenceConfig:
    """Preference optimization (DPO) on samples with a chosen and a rejected conversation. See `preference.py`."""

    beta: float = 0.1
    """How strongly the model is held to the reference: the scale of the log-probability ratios."""
    reference: Path | None = None
    """Checkpoint folder of the reference model; default: the model at the start of the stage."""
    label_smoothing: float = 0.0
    """Share of the pairs assumed to be labelled the wrong way round (conservative DPO), below 0.5."""
    cross_entropy_weight: float = 0.0
    """Weight of the mean cross entropy of the chosen conversation, which keeps its probability from falling."""

    def __post_init__(self) -> None:
        if not self.beta > 0.0:
            raise ConfigError(f"beta is {self.beta}; it must be above 0")
        if not 0.0 <= self.label_smoothing < 0.5:
            raise ConfigError(f"label_smoothing is {self.label_smoothing}; give 0 or more and less than 0.5")
        if self.cross_entropy_weight < 0.0:
            raise ConfigError(f"cross_entropy_weight is {self.cross_entropy_weight}; give 0 or more")


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """The objective of a stage: cross entropy of the next token, unless one of the sections is present."""

    label_smoothing: float = 0.0
    """Share of each target's probability spread over the vocabulary, such as 0.1; validation is not smoothed."""
    distillation: DistillationConfig | None = None
    """Learn from a teacher model."""
    dpo: PreferenceConfig | None = None
    """Learn from pairs of a chosen and a rejected answer."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.label_smoothing < 1.0:
            raise ConfigError(f"label_smoothing is {self.label_smoothing}; give 0 or more and less than 1")
        if self.distillation is not None and self.dpo is not None:
            raise ConfigError("distillation and dpo are two objectives. Keep one of them, or use two stages")
        if self.dpo is not None and self.label_smoothing:
            raise ConfigError(
                "objective.label_smoothing is of cross entropy. For dpo set objective.dpo.label_smoothing"
            )

    @property
    def reads_pairs(self) -> bool:
        """Whether a sample is a pair of conversations, chosen and rejected."""
        return self.dpo is not None

    @property
    def compares_with_start(self) -> bool:
        """Whether the trained model is compared with what it was at the start of the stage."""
        return self.dpo is not None and self.dpo.reference is None
