"""The plan of a training step's memory: bytes by component, as a table for people and as JSON."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

GIB = 2**30

RESIDUAL = "residual of compressed gradients"
COMPONENTS = (
    "parameters", "masters", "moments", "averages", "copy of the saved state", RESIDUAL,
    "frozen models", "gradients",
    "gathered parameters", "activations of the vision tower", "activations of the decoder", "loss", "workspace",
    "micro-batch", "context and fragmentation",
)  # fmt: skip
"""Components of a plan; the first seven are persistent, the others temporary."""


@dataclass(frozen=True)
class MemoryPlan:
    """Peak memory of a GPU in a step."""

    parts: Mapping[str, int]
    """Bytes by component of `COMPONENTS`; empty ones are omitted."""
    modules: Mapping[str, int]
    """Temporary memory by component and module, such as `activations of the decoder: mlp`."""
    moment: str
    """When the peak occurs."""
    setting: str
    """The planned settings in one line."""

    @property
    def total_gib(self) -> float:
        """Total memory the GPU must have."""
        return sum(self.parts.values()) / GIB

    @property
    def allocated_gib(self) -> float:
        """Memory without context and fragmentation, which torch reports as allocated and a run logs as `memory_gib`."""
        return self.total_gib - self.parts["context and fragmentation"] / GIB

    def lines(self) -> list[str]:
        """The plan as a table."""
        width = max(map(len, COMPONENTS))
        lines = [f"memory per GPU, GiB: {self.setting}"]
        for part, size in self.parts.items():
            lines.append(f"  {part:<{width}}  {size / GIB:7.2f}  {self._largest(part)}".rstrip())
        return [*lines, f"  {'total':<{width}}  {self.total_gib:7.2f}  peak in {self.moment}"]

    def _largest(self, part: str) -> str:
        """The modules of a component that hold most."""
        inside = sorted(
            (size, name.removeprefix(f"{part}: ")) for name, size in self.modules.items() if f"{part}:" in name
        )
        return ", ".join(f"{name} {size / GIB:.1f}" for size, name in inside[:-6:-1])

    def record(self) -> dict[str, Any]:
        """The plan as JSON."""
        sizes = {name: round(size / GIB, 3) for name, size in self.parts.items()}
        total = round(self.total_gib, 3)
        return {"setting": self.setting, "moment": self.moment, "total_gib": total, "parts_gib": sizes}
