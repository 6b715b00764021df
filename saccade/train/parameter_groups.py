"""Parameter groups: learning rate and weight decay by parameter name. Plain Python over names; no torch.

A key of `lrs` is a part of the model or a regular expression searched for in the parameter's name; the first match
decides, `lr` is the default, and a rate of 0 freezes. A key that matches nothing is an error: it is a typo or a name of
another model.

    lr = 1e-5
    lrs = { vision = 0, projector = 1e-3, 'language\\.layers\\.[0-3]\\.' = 2e-6 }
"""

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from saccade.errors import ConfigError

PARTS = {
    "vision": r"^vision\.",
    "projector": r"^projector\.",
    "embedding": r"^language\.embed_tokens\.",
    "language": r"^language\.(?!embed_tokens\.)",
    "head": r"^head\.",
}
"""Parts of a model, as regular expressions on parameter names."""

MUON_MATRICES = r"^language\.layers\."
"""Parameters trained by Muon: matrices of the decoder's layers."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Optimizer and parameter groups."""

    kind: Literal["adamw", "adamw8bit", "muon"] = "adamw"
    """adamw: fp32 moments, 8 bytes per parameter; adamw8bit: 2 bytes; muon: decoder matrices, adamw for the rest."""
    lr: float = 1e-5
    """Peak learning rate of parameters matched by no key of `lrs`."""
    lrs: dict[str, float] = field(default_factory=dict)
    """Peak learning rate by part (vision, projector, embedding, language, head) or regular expression; 0 freezes."""
    weight_decay: float = 0.0
    """Decoupled weight decay of matrices, multiplied by the learning rate; norms and biases are not decayed."""
    decay_embedding: bool = False
    """Whether the token embedding (and a tied head) is decayed too."""
    beta1: float = 0.9
    """Adam beta1: decay rate of the first moment."""
    beta2: float = 0.95
    """Adam beta2: decay rate of the second moment; 0.999 for small batches."""
    eps: float = 1e-8
    """Adam epsilon."""
    momentum: float = 0.95
    """muon only: momentum coefficient."""
    offload: bool = False
    """Keep masters and moments in pinned host memory: frees 12 bytes per parameter (6 with adamw8bit), slows steps."""

    def __post_init__(self) -> None:
        for name, lr in {"lr": self.lr, **{f"lrs.{key}": value for key, value in self.lrs.items()}}.items():
            if not (math.isfinite(lr) and lr >= 0.0):
                raise ConfigError(f"{name} is {lr}; a learning rate is 0 (frozen) or above")
        if not (math.isfinite(self.weight_decay) and self.weight_decay >= 0.0):
            raise ConfigError(f"weight_decay is {self.weight_decay}; give 0 or more")
        for name in ("beta1", "beta2", "momentum"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ConfigError(f"{name} is {getattr(self, name)}; give 0 or more and less than 1")
        if not self.eps > 0.0:
            raise ConfigError(f"eps is {self.eps}; give a small number above 0, such as 1e-8")
        for key in self.lrs:
            _compiled(key)


class ParameterGroup(NamedTuple):
    """Parameters with one learning rate."""

    name: str
    """The matching key of `lrs`, or `default`."""
    lr: float
    """Peak learning rate, above 0."""
    decayed: tuple[str, ...]
    """Names of parameters with weight decay."""
    undecayed: tuple[str, ...]
    """Names of parameters without."""

    @property
    def parameter_names(self) -> tuple[str, ...]:
        """All parameter names of the group."""
        return (*self.decayed, *self.undecayed)


def learning_rates(names: Sequence[str], config: OptimizerConfig) -> dict[str, tuple[str, float]]:
    """(key, peak learning rate) of every parameter: the first match in `lrs`, else ("default", lr)."""
    patterns = {key: _compiled(key) for key in config.lrs}
    for key, pattern in patterns.items():
        if not any(pattern.search(name) for name in names):
            raise ConfigError(_nothing_matches(key, names))

    def rate(name: str) -> tuple[str, float]:
        for key, pattern in patterns.items():
            if pattern.search(name):
                return key, config.lrs[key]
        return "default", config.lr

    return {name: rate(name) for name in names}


def parameter_groups(num_dims: Mapping[str, int], config: OptimizerConfig) -> list[ParameterGroup]:
    """Groups of the trained parameters, given the number of dims of each parameter."""
    members: dict[tuple[str, float], list[str]] = {}
    for name, key_and_rate in learning_rates(list(num_dims), config).items():
        members.setdefault(key_and_rate, []).append(name)

    def is_decayed(name: str) -> bool:
        return num_dims[name] > 1 and (config.decay_embedding or not re.search(PARTS["embedding"], name))

    return [
        ParameterGroup(key, lr, tuple(filter(is_decayed, names)), tuple(name for name in names if not is_decayed(name)))
        for (key, lr), names in members.items()
        if lr > 0.0
    ]


def part_of(name: str) -> str | None:
    """The part of the model a parameter belongs to; None if it belongs to none."""
    return next((part for part, pattern in PARTS.items() if re.search(pattern, name)), None)


def _compiled(key: str) -> re.Pattern[str]:
    try:
        return re.compile(PARTS.get(key, key))
    except re.error as error:
        raise ConfigError(
            f"lrs: '{key}' is neither a part ({', '.join(PARTS)}) nor a regular expression: {error}"
        ) from error


def _nothing_matches(key: str, names: Sequence[str]) -> str:
    """Return the error message for a key without parameters, with similar names."""
    tied = " (a head tied to the embedding is the embedding)" if key == "head" else ""
    words = re.sub(r"\\(.)", r"\1", key)  # the name without regular-expression escapes
    known = [*PARTS, *names]
    near = difflib.get_close_matches(words, known, n=3, cutoff=0.4) or names[:3]
    return f"lrs: '{key}' matches no parameter{tied}. Near names: {', '.join(near)}. Correct the key, or remove it"
