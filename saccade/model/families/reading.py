"""Reading `config.json`: what the families' parsers share."""

from collections.abc import Mapping
from typing import Any

from saccade.errors import CheckpointError


def refuse_unless(raw: Mapping[str, Any], name: str, value: object) -> None:
    """A setting we cannot honour is an error, never ignored. A missing or null one stands for `value`."""
    if raw.get(name) not in (None, value):
        raise CheckpointError(f"config.json: {name} is {raw[name]!r}; only {value!r} is supported")


def rope_parameters(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary settings, under whichever of its three names the file has them; only unscaled kinds are supported."""
    found = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    found.setdefault("rope_theta", raw.get("rope_theta", 10000.0))
    kind = found.get("rope_type", found.get("type", "default"))
    if kind not in ("default", "mrope"):
        raise CheckpointError(
            f"config.json: rope scaling {kind!r} is not supported; only the unscaled rotary embedding is"
        )
    return found


def rope_theta(raw: Mapping[str, Any]) -> float:
    """Base of the rotary frequencies."""
    return float(rope_parameters(raw)["rope_theta"])


def sections_for(head_dim: int) -> tuple[int, int, int]:
    """Time, height and width sections of a head that never had any, in the family's proportion of 16 : 24 : 24 at 128."""
    half = head_dim // 2
    spatial = half * 3 // 8
    return half - 2 * spatial, spatial, spatial
