"""Which implementation of an operation runs: decided in one place, said once in the log (`saccade -v`), forced by tests.

`triton`     our own kernels, on a GPU (or on the CPU under Triton's interpreter, when forced).
`library`    the fastest path torch itself offers for the device (SDPA, its packed FlashAttention).
`reference`  plain PyTorch, the specification; runs anywhere.

An operation lists the paths that can serve the tensor at hand, best first as measured; the reference is always the last.
"""

import contextlib
import logging
from collections.abc import Iterator
from typing import Literal

from saccade.log import log_once

Path = Literal["triton", "library", "reference"]

_forced: Path | None = None


def choose(operation: str, *candidates: Path) -> Path:
    """The path for one call: the first candidate, or the forced one."""
    able: tuple[Path, ...] = (*candidates, "reference")
    if _forced and _forced not in able:
        raise RuntimeError(f"{operation}: path {_forced!r} is forced but cannot serve this call; {', '.join(able)} can")
    path = _forced or able[0]
    log_once("kernels", f"{operation}: {path}", level=logging.DEBUG)
    return path


@contextlib.contextmanager
def forced(path: Path) -> Iterator[None]:
    """Run every operation through `path` inside the block. For tests and comparisons."""
    global _forced
    before, _forced = _forced, path
    try:
        yield
    finally:
        _forced = before
