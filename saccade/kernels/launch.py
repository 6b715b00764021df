"""Which implementation of an operation runs: decided in one place, said once in the log (`saccade -v`), forced by tests.

`triton`     our own kernels, on a GPU (or on the CPU under Triton's interpreter, when forced).
`library`    the fastest path torch itself offers for the device (SDPA, its packed FlashAttention).
`reference`  plain PyTorch, the specification; runs anywhere.

An operation lists the paths that can serve the tensor at hand, best first as measured; the reference is always the last.
Kernel modules take `triton` and `tl` from here, so that they import on a machine without Triton.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Literal

import torch
from torch import Tensor

from saccade.log import log_once


class _Absent:
    """In the place of `triton` and `tl` where Triton is not installed: kernels are then defined, never launched."""

    def jit(self, kernel: Callable[..., None] | None = None, **_: object) -> object:
        return kernel if kernel is not None else lambda late: late

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


try:
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = _Absent()

__all__ = ["Path", "able", "choose", "forced", "is_forced", "is_interpreting", "say", "tl", "triton"]

Path = Literal["triton", "library", "reference"]

_forced: Path | None = None


_interpreting = not isinstance(triton, _Absent) and bool(triton.knobs.runtime.interpret)


def is_interpreting() -> bool:
    """Whether Triton kernels run in its interpreter, on CPU tensors (`TRITON_INTERPRET=1`, set before the first import)."""
    return _interpreting


def able(x: Tensor, *best_first: Path) -> tuple[Path, ...]:
    """`best_first` as the device of `x` allows: Triton needs a GPU; interpreted, it comes last, for whoever forces it.

    Inside `torch.compile` nothing but the reference: the compiler writes kernels of its own from it, and cannot follow a launch whose
    constants depend on a length it keeps open.
    """
    if torch.compiler.is_compiling():
        return ()
    if isinstance(triton, _Absent):
        return tuple(path for path in best_first if path != "triton")
    if x.is_cuda or "triton" not in best_first:
        return best_first
    others = tuple(path for path in best_first if path != "triton")
    return (*others, "reference", "triton") if is_interpreting() else others


def choose(operation: str, *candidates: Path) -> Path:
    """The path for one call: the first candidate, or the forced one."""
    paths: tuple[Path, ...] = (*candidates, "reference")
    if _forced and _forced not in paths:
        raise RuntimeError(
            f"{operation}: path {_forced!r} is forced but cannot serve this call; {', '.join(paths)} can"
        )
    path = _forced or paths[0]
    say(f"{operation}: {path}")
    return path


def is_forced(path: Path) -> bool:
    """Whether a test or comparison wants this path wherever it is possible, worthwhile or not."""
    return _forced == path


def say(message: str) -> None:
    """One line in the log, once; none while compiling, for it would break the graph."""
    if not torch.compiler.is_compiling():
        log_once("kernels", message, level=logging.DEBUG)


@contextlib.contextmanager
def forced(path: Path) -> Iterator[None]:
    """Run every operation through `path` inside the block. For tests and comparisons."""
    global _forced
    before, _forced = _forced, path
    try:
        yield
    finally:
        _forced = before
