"""What a compression did: a report of every projection, and of the whole checkpoint."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class LayerReport:
    """How one projection was compressed."""

    name: str
    """Its name in the model."""
    form: str
    """int8, fp8, int4."""
    method: str
    """What rounded it."""
    group_size: int | None
    """Inputs per scale; None: one scale per output."""
    note: str = ""
    """What differs from the scheme, and why."""
    error: float | None = None
    """Relative error of its output over the tokens of calibration; None without calibration."""
    rtn_error: float | None = None
    """The same error when it is rounded to nearest."""


@dataclass(frozen=True, kw_only=True)
class CompressReport:
    """The result of compressing a model, layer by layer."""

    scheme: str
    """Name of the scheme."""
    bytes_before: int
    """Bytes of the original's weight files."""
    bytes_after: int
    """Bytes of the compressed weight files."""
    layers: list[LayerReport] = field(default_factory=list)
    """Compressed projections in the order of the model."""
    kept: list[str] = field(default_factory=list)
    """Projections that were kept."""
    num_samples: int = 0
    """Conversations of calibration."""
    num_resumed: int = 0
    """Blocks that an earlier run had finished."""
    kv_cache: str | None = None
    """Form of keys and values, fp8 or int8; None: the dtype of the model."""

    @property
    def ratio(self) -> float:
        """Size as a share of the original's."""
        return self.bytes_after / self.bytes_before

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self) | {"ratio": self.ratio}
