"""Reading `config.json`: what the families' parsers share."""

from collections.abc import Mapping, Sequence
from typing import Any

from saccade.errors import CheckpointError


def refuse_unless(raw: Mapping[str, Any], name: str, value: object) -> None:
    """A setting we cannot honour is an error, never ignored. A missing or null one stands for `value`."""
    if raw.get(name) not in (None, value):
        raise CheckpointError(f"config.json: {name} is {raw[name]!r}; only {value!r} is supported")


_NEEDED: Any = object()


def integer(raw: Mapping[str, Any], name: str, default: Any = _NEEDED) -> int:
    """A whole number of `config.json`; null stands for the default."""
    value = raw.get(name)
    if value is None and default is not _NEEDED:
        value = default
    if not isinstance(value, int) or isinstance(value, bool):
        problem = "is missing" if value is None else f"is {value!r}, not a whole number"
        raise CheckpointError(f"config.json: {name} {problem}. Copy config.json from the original again")
    return value


def number(raw: Mapping[str, Any], name: str, default: float) -> float:
    """A number of `config.json`."""
    value = raw.get(name, default)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise CheckpointError(
            f"config.json: {name} is {value!r}, not a number. Copy config.json from the original again"
        )
    return float(value)


def integers(raw: Mapping[str, Any], name: str, default: Sequence[int]) -> tuple[int, ...]:
    """A list of whole numbers of `config.json`."""
    values = raw.get(name, default)
    if not isinstance(values, list | tuple) or not all(isinstance(value, int) for value in values):
        raise CheckpointError(f"config.json: {name} is {values!r}, not a list of whole numbers")
    return tuple(values)


def section(raw: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A nested object of `config.json`, empty if it is not there."""
    value = raw.get(name) or {}
    if not isinstance(value, dict):
        raise CheckpointError(f"config.json: {name} is {value!r}, not an object with fields")
    return value


def rope_parameters(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary settings, under whichever of its three names the file has them; only unscaled kinds are supported."""
    found = dict(section(raw, "rope_parameters") or section(raw, "rope_scaling"))
    found.setdefault("rope_theta", raw.get("rope_theta", 10000.0))
    kind = found.get("rope_type", found.get("type", "default"))
    if kind not in ("default", "mrope"):
        raise CheckpointError(
            f"config.json: rope scaling {kind!r} is not supported; only the unscaled rotary embedding is"
        )
    return found


def rope_theta(raw: Mapping[str, Any]) -> float:
    """Base of the rotary frequencies."""
    return number(rope_parameters(raw), "rope_theta", 10000.0)


def sections_for(head_dim: int) -> tuple[int, int, int]:
    """Time, height and width sections of a head that never had any, in the family's proportion of 16 : 24 : 24 at 128."""
    half = head_dim // 2
    spatial = half * 3 // 8
    return half - 2 * spatial, spatial, spatial
