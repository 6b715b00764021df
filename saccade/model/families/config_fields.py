"""Typed access to the fields of `config.json`, shared by the families."""

from collections.abc import Mapping, Sequence
from typing import Any

from saccade.errors import CheckpointError


def refuse_unless(raw: Mapping[str, Any], name: str, value: object) -> None:
    """Refuse an unsupported value. A missing or null one counts as `value`."""
    if raw.get(name) not in (None, value):
        raise CheckpointError(f"config.json: {name} is {raw[name]!r}; only {value!r} is supported")


_REQUIRED: Any = object()


def integer(raw: Mapping[str, Any], name: str, default: Any = _REQUIRED) -> int:
    """An integer field; null counts as missing."""
    value = raw.get(name)
    if value is None and default is not _REQUIRED:
        value = default
    if not isinstance(value, int) or isinstance(value, bool):
        problem = "is missing" if value is None else f"is {value!r}, not a whole number"
        raise CheckpointError(f"config.json: {name} {problem}. Copy config.json from the original again")
    return value


def flag(raw: Mapping[str, Any], name: str, default: bool) -> bool:
    """A field that is true or false; null counts as missing."""
    value = default if raw.get(name) is None else raw[name]
    if not isinstance(value, bool):
        raise CheckpointError(f"config.json: {name} is {value!r}, not true or false")
    return value


def number(raw: Mapping[str, Any], name: str, default: float) -> float:
    """A number field."""
    value = raw.get(name, default)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise CheckpointError(
            f"config.json: {name} is {value!r}, not a number. Copy config.json from the original again"
        )
    return float(value)


def integers(raw: Mapping[str, Any], name: str, default: Sequence[int]) -> tuple[int, ...]:
    """A field with a list of integers."""
    values = raw.get(name, default)
    if not isinstance(values, list | tuple) or not all(type(value) is int for value in values):
        raise CheckpointError(f"config.json: {name} is {values!r}, not a list of whole numbers")
    return tuple(values)


def section(raw: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A nested object, empty if missing."""
    value = raw.get(name) or {}
    if not isinstance(value, dict):
        raise CheckpointError(f"config.json: {name} is {value!r}, not an object")
    return value


def rope_parameters(raw: Mapping[str, Any], kinds: Sequence[str] = ("default", "mrope")) -> dict[str, Any]:
    """RoPE parameters, under any of their three names; only unscaled types are supported.

    `rope_scaling` takes precedence over `rope_parameters`, as in `transformers`.
    """
    found = dict(section(raw, "rope_scaling") or section(raw, "rope_parameters"))
    found.setdefault("rope_theta", raw.get("rope_theta", 10000.0))
    kind = found.get("rope_type", found.get("type", "default"))
    if kind not in kinds:
        raise CheckpointError(f"config.json: rope scaling {kind!r} is not supported; only unscaled RoPE is")
    return found


def rope_theta(raw: Mapping[str, Any]) -> float:
    """Base of the frequencies of 1-D RoPE."""
    return number(rope_parameters(raw, kinds=("default",)), "rope_theta", 10000.0)


def sections_for(head_dim: int) -> tuple[int, int, int]:
    """M-RoPE sections of a text model that has none, in the proportion 16 : 24 : 24 of Qwen2.5-VL."""
    half = head_dim // 2
    spatial = half * 3 // 8
    return half - 2 * spatial, spatial, spatial
