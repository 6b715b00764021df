"""Schemes: which projection of a model is stored in which form, and how it is rounded.

    [[rules]]
    part = "vision"                    # vision, projector, language or head
    form = "int8"                      # keep, int8, fp8 or int4

    [[rules]]
    part = "language"
    layers = "0-13"                    # a range, numbers with commas; all if not given
    projections = ["down_proj"]        # last part of the name; all if not given
    form = "int4"
    method = "gptq"                    # rtn, gptq, awq (int4), smoothquant (int8)
    group_size = 128

    kv_cache = "fp8"                   # above the rules; fp8 or int8: keys and values of decoder attention

The first rule that matches a projection decides; a projection that no rule matches is kept. Built-in schemes have
names (`BUILT_IN`).

A group size that does not divide the inputs of a layer is replaced by the largest of 128, 64, 32 that does, or by one
scale per output; the report names these layers.
"""

from __future__ import annotations

import re
import reprlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from saccade.config import load_config
from saccade.errors import ConfigError

Form = Literal["keep", "int8", "fp8", "int4"]
Method = Literal["rtn", "gptq", "awq", "smoothquant"]
PARTS = ("vision", "projector", "language", "head")
_METHODS: dict[Form, tuple[Method, ...]] = {
    "keep": ("rtn",),
    "int8": ("rtn", "gptq", "smoothquant"),
    "fp8": ("rtn",),
    "int4": ("rtn", "gptq", "awq"),
}


@dataclass(frozen=True, kw_only=True)
class Rule:
    """How some projections are stored."""

    part: Literal["vision", "projector", "language", "head"]
    """Part of the model."""
    form: Form
    """keep: as it is; int8, fp8: weights and activations in 8 bits; int4: weights in 4 bits, activations in 16."""
    method: Method = "rtn"
    """How weights are rounded: to nearest, GPTQ, AWQ, or to nearest after SmoothQuant's migration."""
    layers: str | None = None
    """Blocks of the part, such as 0-13,20; None: all."""
    projections: tuple[str, ...] = ()
    """Last parts of names, such as down_proj; empty: all."""
    group_size: int | None = None
    """int4: inputs per scale, 128 if not given."""
    symmetric: bool = True
    """Whether there is no zero point: of groups of int4 weights, or of static int8 activations."""
    static: bool = False
    """int8 and fp8: activations have one scale per layer, from calibration, instead of one per token."""

    def __post_init__(self) -> None:
        if self.method not in _METHODS[self.form]:
            raise ConfigError(
                f"method {self.method!r} does not go with form {self.form!r}; it takes {', '.join(_METHODS[self.form])}"
            )
        if self.form != "int4" and self.group_size is not None:
            raise ConfigError(f"group_size is for form int4, not {self.form!r}. Remove it")
        if not self.symmetric and self.form != "int4" and not (self.form == "int8" and self.static):
            raise ConfigError(
                "symmetric = false is for form int4, and for int8 with static = true; "
                f"form {self.form!r} has no zero point"
            )
        if self.group_size is not None and not _is_group_size(self.group_size):
            raise ConfigError(f"group_size is {self.group_size}; it may be 16, 32, 64 or a multiple of 128")
        if self.form == "int4" and self.method == "gptq" and not self.symmetric:
            raise ConfigError("GPTQ rounds symmetric weights. Remove symmetric = false, or use rtn or awq")
        if self.static and self.form not in ("int8", "fp8"):
            raise ConfigError(f"static is for the activations of int8 and fp8, not of {self.form!r}. Remove it")
        _ = self.layer_numbers

    @property
    def layer_numbers(self) -> frozenset[int] | None:
        """The blocks of `layers`; None: all."""
        return None if self.layers is None else _parse_layers(self.layers)

    @property
    def needs_calibration(self) -> bool:
        """Whether the rule needs statistics of the inputs. SmoothQuant without them rounds to nearest."""
        return self.method in ("gptq", "awq") or self.static

    def matches(self, name: str) -> bool:
        """Whether the rule is about a projection, by its name in the model."""
        numbers = self.layer_numbers
        if part_of(name) != self.part or (numbers is not None and layer_of(name) not in numbers):
            return False
        return not self.projections or name.rpartition(".")[2] in self.projections


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """A map from projections to storage forms."""

    rules: tuple[Rule, ...]
    """The first match decides."""
    name: str = "custom"
    """Its name in reports."""
    kv_cache: Literal["fp8", "int8"] | None = None
    """8-bit form of keys and values that the folder is meant for, with scales from calibration.

    None: the dtype of the model."""

    def rule(self, name: str) -> Rule | None:
        """The rule of a projection; None: it is kept."""
        rule = next((rule for rule in self.rules if rule.matches(name)), None)
        return None if rule is None or rule.form == "keep" else rule

    @property
    def needs_calibration(self) -> bool:
        """Whether any rule or the KV cache needs statistics."""
        return self.kv_cache is not None or any(rule.needs_calibration for rule in self.rules)

    def with_group_size(self, group_size: int) -> Scheme:
        """The scheme with other groups of int4 weights."""
        rules = [replace(rule, group_size=group_size) if rule.form == "int4" else rule for rule in self.rules]
        return replace(self, rules=tuple(rules))


def part_of(name: str) -> str:
    """vision, projector, language or head."""
    return name.partition(".")[0]


def layer_of(name: str) -> int | None:
    """Number of the block of a projection; None: it is in none."""
    found = re.match(r"\w+\.(?:blocks|layers)\.(\d+)\.", f"{name}.")
    return int(found[1]) if found else None


def _is_group_size(value: int) -> bool:
    return value in (16, 32, 64) or (value > 0 and value % 128 == 0)


def _parse_layers(text: str) -> frozenset[int]:
    numbers: set[int] = set()
    for piece in text.split(","):
        found = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", piece)
        if found and max(map(len, filter(None, found.groups()))) > _MAX_DIGITS:
            raise ConfigError(
                f"layers = {reprlib.repr(text)}: no model has so many blocks. Leave layers out for all of them"
            )
        if not found or (found[2] and int(found[2]) < int(found[1])):
            raise ConfigError(f"layers = {reprlib.repr(text)}: write ranges and numbers, such as 0-13,20")
        numbers |= set(range(int(found[1]), int(found[2] or found[1]) + 1))
    return frozenset(numbers)


_MAX_DIGITS = 4
"""Digits of a block's number, so that a range stays small. `check_scheme` knows how many blocks there are."""


# ------------------------------------------------------------------ built-in schemes


def _uniform(name: str, form: Form, method: Method, parts: tuple[str, ...]) -> Scheme:
    rules = [Rule(part=part, form=form, method=method) for part in parts]  # type: ignore[arg-type]
    return Scheme(name=name, rules=tuple(rules))


_WITH_PROJECTOR, _BLOCKS = ("vision", "projector", "language"), ("vision", "language")
BUILT_IN: dict[str, Scheme] = {
    scheme.name: scheme
    for scheme in (
        _uniform("int8", "int8", "smoothquant", _WITH_PROJECTOR),
        _uniform("int8-rtn", "int8", "rtn", _WITH_PROJECTOR),
        _uniform("int8-gptq", "int8", "gptq", _WITH_PROJECTOR),
        _uniform("fp8", "fp8", "rtn", _WITH_PROJECTOR),
        _uniform("w4a16-rtn", "int4", "rtn", _BLOCKS),
        _uniform("w4a16-gptq", "int4", "gptq", _BLOCKS),
        _uniform("w4a16-awq", "int4", "awq", _BLOCKS),
    )
}
"""Built-in schemes by name. All keep the head, those of 4 bits keep the projector too."""


def load_scheme(name_or_file: str | Path) -> Scheme:
    """A built-in scheme by name, or one from a TOML file."""
    if str(name_or_file) in BUILT_IN:
        return BUILT_IN[str(name_or_file)]
    path = Path(name_or_file)
    if path.suffix != ".toml":
        raise ConfigError(f"scheme {str(path)!r} is not known. Use one of {', '.join(BUILT_IN)}, or a TOML file")
    scheme = load_config(Scheme, path)
    if not scheme.rules:
        raise ConfigError(f"{path}: no [[rules]]: everything would be kept. Add one, see docs/compression.md")
    return replace(scheme, name=path.stem) if scheme.name == "custom" else scheme


def check_scheme(scheme: Scheme, names: list[str]) -> None:
    """Refuse rules that match no projection of a model: a mistyped range must not pass silently.

    Rules that keep may match none."""
    for rule in scheme.rules:
        is_narrow = rule.layers is not None or bool(rule.projections)
        found = sorted({layer_of(name) for name in names if part_of(name) == rule.part} - {None})  # type: ignore[type-var]
        blocks = f"its blocks are {found[0]}-{found[-1]}" if found else "it has no blocks"
        if rule.form != "keep" and is_narrow and not any(rule.matches(name) for name in names):
            last_parts = sorted({name.rpartition(".")[2] for name in names if part_of(name) == rule.part})
            raise ConfigError(
                f"scheme {scheme.name}: a rule of {rule.part} with layers {rule.layers or 'all'} and projections "
                f"{', '.join(rule.projections) or 'all'} matches no projection. Correct it: {blocks}, "
                f"its projections {', '.join(last_parts)}"
            )
        if rule.form != "keep" and found and max(rule.layer_numbers or (0,)) > (found[-1] or 0):
            raise ConfigError(
                f"scheme {scheme.name}: a rule of {rule.part} with layers {rule.layers} goes beyond the model. "
                f"Correct it: {blocks}"
            )
