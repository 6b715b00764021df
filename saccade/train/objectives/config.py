"""Recipe sections of the objectives. Without torch, like the rest of a recipe."""

from dataclasses import dataclass

from saccade.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """What a stage optimizes: cross entropy of the next token."""

    label_smoothing: float = 0.0
    """Share of each target's probability that is spread over the vocabulary, such as 0.1; validation is not smoothed."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.label_smoothing < 1.0:
            raise ConfigError(f"label_smoothing is {self.label_smoothing}; give 0 or more and less than 1")
