"""How a command of the command line ended."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    status: int
    out: str
    err: str
