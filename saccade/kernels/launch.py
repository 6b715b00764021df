"""Chooses the implementation of an operation and logs it once (`saccade -v`); tests and benchmarks force one.

`triton`     our Triton kernels, on a GPU (or on the CPU under Triton's interpreter, when forced).
`library`    torch's fastest path for the device (SDPA, its packed FlashAttention).
`reference`  plain PyTorch, the specification; runs anywhere.

An operation lists the paths that support a call, fastest first as measured; the reference is always the last. Kernel
modules import `triton` and `tl` from here, so that they can be imported without Triton.
"""

import contextlib
import functools
import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any, Literal

import torch
from torch import Tensor

from saccade.log import log_once

logger = logging.getLogger(__name__)

OnLaunch = Callable[[str, Sequence[object]], None]
"""Called in a dry run with the name and the positional arguments of a kernel that is not launched."""


_on_launch: ContextVar[OnLaunch | None] = ContextVar("on_launch", default=None)


class _UnlaunchedKernel:
    """A kernel whose launch does nothing: in a dry run, or without Triton."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getitem__(self, grid: object) -> Callable[..., None]:
        on_launch = _on_launch.get()
        return lambda *args, **_: None if on_launch is None else on_launch(self._name, args)


class _MissingTriton:
    """Replaces `triton` and `tl` if Triton is not installed: kernels are defined, but never launched."""

    def jit(self, kernel: Callable[..., None] | None = None, **_: object) -> object:
        return self.jit if kernel is None else _UnlaunchedKernel(kernel.__name__)

    def cdiv(self, x: int, y: int) -> int:
        return -(-x // y)

    def next_power_of_2(self, n: int) -> int:
        return 1 << (n - 1).bit_length()

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


try:
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = _MissingTriton()

__all__ = [
    "CompileCounter", "Path", "available_paths", "can_overlap", "choose_path", "compile_only", "dry_run", "forced",
    "has_tma", "is_differentiable", "is_dry_run", "is_forced", "is_interpreting", "log_path", "num_sms",
    "overlap_options", "tl", "triton",
]  # fmt: skip

Path = Literal["triton", "library", "reference"]

_forced: Path | None = None


_interpreting = not isinstance(triton, _MissingTriton) and bool(triton.knobs.runtime.interpret)


def is_interpreting() -> bool:
    """Whether Triton kernels run in its interpreter, on CPU tensors (`TRITON_INTERPRET=1` before the first import)."""
    return _interpreting


_is_dry_run: ContextVar[bool] = ContextVar("is_dry_run", default=False)


def is_dry_run() -> bool:
    """Whether kernels are not launched: their tensors may have shapes and no memory."""
    return _is_dry_run.get()


def available_paths(x: Tensor, *fastest_first: Path) -> tuple[Path, ...]:
    """The paths that the device of `x` supports. Triton needs a GPU; under the interpreter it comes last, to be forced.

    Inside `torch.compile` there is only the reference: the compiler generates kernels from it, and cannot trace a
    launch whose constants depend on a dynamic length.
    """
    if torch.compiler.is_compiling():
        return ()
    if _is_dry_run.get():
        return ("triton",) if "triton" in fastest_first else fastest_first
    if isinstance(triton, _MissingTriton):
        return tuple(path for path in fastest_first if path != "triton")
    if x.is_cuda or "triton" not in fastest_first:
        return fastest_first
    others = tuple(path for path in fastest_first if path != "triton")
    return (*others, "reference", "triton") if is_interpreting() else others


def choose_path(operation: str, *candidates: Path) -> Path:
    """The path of one call: the first candidate, or the forced one."""
    paths: tuple[Path, ...] = (*candidates, "reference")
    if _forced and _forced not in paths:
        raise RuntimeError(
            f"{operation}: path {_forced!r} is forced but does not support this call; {', '.join(paths)} do"
        )
    path = _forced or paths[0]
    log_path(f"{operation}: {path}")
    return path


def is_forced(path: Path) -> bool:
    """Whether a test or benchmark forces this path."""
    return _forced == path


def log_path(message: str) -> None:
    """Log a line once; not while compiling, which would break the graph."""
    if not torch.compiler.is_compiling():
        log_once("kernels", message, level=logging.DEBUG)


@contextlib.contextmanager
def forced(path: Path) -> Iterator[None]:
    """Run every operation through `path` inside the `with` block, for tests and benchmarks."""
    global _forced
    before, _forced = _forced, path
    try:
        yield
    finally:
        _forced = before


def is_differentiable() -> bool:
    """Whether operations must be recorded for backward, or traced by a compiler, which generates its own kernels."""
    return torch.is_grad_enabled() or torch.compiler.is_compiling()


@functools.cache
def num_sms(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU; 4 for interpreted kernels, so that their splits are tested too."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@functools.cache
def can_overlap(device: torch.device) -> bool:
    """Whether a kernel may start before its predecessor ends (programmatic dependent launch): Hopper and later."""
    is_nvidia = device.type == "cuda" and torch.version.cuda is not None
    return is_nvidia and torch.cuda.get_device_capability(device) >= (9, 0)


@functools.cache
def has_tma(device: torch.device) -> bool:
    """Whether kernels can load and store tiles through descriptors (TMA): Hopper and later, and the interpreter."""
    is_other = device.type == "cuda" and torch.version.cuda is None  # ROCm architectures start at 9 as well
    return not is_other and (device.type != "cuda" or torch.cuda.get_device_capability(device) >= (9, 0))


def overlap_options(device: torch.device, overlaps: bool | None = None) -> dict[str, bool]:
    """Launch options of a kernel that may start early: its constant OVERLAP, and the attribute.

    `overlaps` None: if the device can.
    """
    overlaps = can_overlap(device) if overlaps is None else overlaps
    return {"OVERLAP": overlaps} | ({"launch_pdl": True} if overlaps else {})


_only_compiles: ContextVar[bool] = ContextVar("only_compiles", default=False)


@contextlib.contextmanager
def compile_only(num_threads: int) -> Iterator[None]:
    """Inside the `with` block, in this thread, Triton kernels are compiled and not launched; they are ready at its end.

    Outputs have arbitrary values: nothing may use one as an index. Compiling releases the interpreter's lock most of
    the time, so that threads share the work: the kernels of a 3B model take 30 s one by one.
    """
    from triton.runtime.jit import JITFunction

    launch_kernel = JITFunction.run

    @functools.wraps(launch_kernel)
    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return launch_kernel(self, *args, grid=grid, warmup=warmup or _only_compiles.get(), **options)

    JITFunction.run = run
    token = _only_compiles.set(True)
    try:
        with ThreadPoolExecutor(num_threads) as pool, triton.AsyncCompileMode(pool):
            yield
    finally:
        _only_compiles.reset(token)
        JITFunction.run = launch_kernel


class CompileCounter:
    """Counts kernels that one thread compiles, or reads from the cache, when it first launches them."""

    def __init__(self) -> None:
        self.num_kernels = 0
        self.thread_id: int | None = None
        """The thread whose kernels are counted; None: no kernel is counted."""
        _install_compile_hook()
        _counters.add(self)

    def count(self, kernel: str) -> None:
        """A kernel was compiled in the current thread."""
        if threading.get_ident() == self.thread_id:
            self.num_kernels += 1
            logger.info("kernel %s compiled while serving", kernel)


_counters: weakref.WeakSet[CompileCounter] = weakref.WeakSet()


@functools.cache
def _install_compile_hook() -> None:
    """Count every compiled kernel; an earlier hook is called as well."""
    if isinstance(triton, _MissingTriton):
        return
    earlier = triton.knobs.runtime.jit_post_compile_hook

    def hook(**details: Any) -> bool | None:
        for counter in list(_counters):
            counter.count(details["fn"].name)
        return None if earlier is None else bool(earlier(**details))

    triton.knobs.runtime.jit_post_compile_hook = hook


@contextlib.contextmanager
def dry_run(on_launch: OnLaunch | None = None) -> Iterator[None]:
    """Inside the `with` block, in this thread, operations on meta tensors take the paths of a GPU without launches.

    Their launchers run as they are, so that outputs, scratch buffers and tensors saved for backward have the sizes they
    have on a GPU. `on_launch` is called instead of each launch.
    """
    if isinstance(triton, _MissingTriton):
        with _dry_run(on_launch):
            yield
        return
    from triton.runtime.jit import KernelInterface

    launch_kernel = KernelInterface.__getitem__

    def launch_unless_dry(self: Any, grid: Any) -> Any:
        return _UnlaunchedKernel(self.fn.__name__)[grid] if _is_dry_run.get() else launch_kernel(self, grid)

    KernelInterface.__getitem__ = launch_unless_dry
    try:
        with _dry_run(on_launch):
            yield
    finally:
        KernelInterface.__getitem__ = launch_kernel


@contextlib.contextmanager
def _dry_run(on_launch: OnLaunch | None) -> Iterator[None]:
    tokens = _is_dry_run.set(True), _on_launch.set(on_launch)
    try:
        yield
    finally:
        _is_dry_run.reset(tokens[0])
        _on_launch.reset(tokens[1])
