"""Time and report kernels: median GPU time with a cold L2, and the share of the card's measured ceilings.

Run a benchmark from the root of the repository, `python -m bench.kernels.attention`; `--out rows.json` keeps its rows.
`--tune` sweeps the launch settings of those that have `tune()`; the best are copied into the kernel's table by hand.
A row: operation, shape, path, milliseconds, rate with its unit (TFLOP/s or TB/s), and the share of the measured
ceiling.
"""

import argparse
import contextlib
import functools
import importlib
import json
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from saccade.kernels import launch

Row = dict[str, Any]
BOUND = 2e-2
"""Relative RMS error up to which a result agrees with the expected one."""


class Ceilings(NamedTuple):
    """The measured maximum rates of this card."""

    copy_tb_s: float
    """Device-to-device copy, bytes read plus bytes written."""
    matmul_tflop_s: float
    """bf16, 8192 cubed."""


@functools.cache
def _flush_buffer() -> torch.Tensor:
    # Ten times the L2 of an H200: clearing it also takes 0.15 ms, in which the host can queue what is timed next.
    return torch.empty(512 * 2**20, dtype=torch.int8, device="cuda")


def gpu_ms(run: Callable[[], object], *, budget_ms: float = 100.0) -> float:
    """Median time of `run` between two events on the GPU, L2 cold, over the runs that fit in the budget (7 to 200)."""
    for _ in range(2):
        run()
    first = _event_ms(run)
    times = [_event_ms(run) for _ in range(max(7, min(200, int(budget_ms / max(first, 0.01)))))]
    return statistics.median(times)


def queued_ms(run: Callable[[], object]) -> float:
    """Time of one `run` whose launches are all queued before the GPU begins with it, L2 cold."""
    return _event_ms(run, _SLEEP_CYCLES)


_SLEEP_CYCLES = 3_000_000
"""Some 1.6 ms, in which the host queues what is timed."""


def _event_ms(run: Callable[[], object], sleep_cycles: int = 0) -> float:
    _flush_buffer().zero_()
    if sleep_cycles:
        torch.cuda._sleep(sleep_cycles)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def graph_ms(run: Callable[[], object], *, repeats: int = 20, replays: int = 15) -> float:
    """Median time of one `run` among `repeats` in a replayed CUDA graph, for decode-sized work: no launches, L2 warm.

    It is always on the same streams: kernels keep counters per stream, for 32 of them.
    """
    stream = _own_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            run()
    graph.replay()
    return statistics.median(_replay_ms(graph) for _ in range(replays)) / repeats


def _replay_ms(graph: torch.cuda.CUDAGraph) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


@functools.cache
def measured_ceilings() -> Ceilings:
    """Copy and matrix-product ceilings of the current GPU."""
    source = torch.empty(2**30, dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    copy_ms = gpu_ms(lambda: target.copy_(source))
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    matmul_ms = gpu_ms(lambda: a @ b)
    return Ceilings(copy_tb_s=2 * source.numel() / copy_ms / 1e9, matmul_tflop_s=2 * 8192**3 / matmul_ms / 1e9)


class Work(NamedTuple):
    """The minimum work: bytes that must move, or floating-point operations."""

    num_bytes: float = 0.0
    flops: float = 0.0


def row(op: str, shape: str, path: str, ms: float, work: Work) -> Row:
    """One line of a report."""
    ceilings = measured_ceilings()
    if work.flops:
        rate, unit, ceiling = work.flops / ms / 1e9, "TFLOP/s", ceilings.matmul_tflop_s
    else:
        rate, unit, ceiling = work.num_bytes / ms / 1e9, "TB/s", ceilings.copy_tb_s
    numbers = {"ms": round(ms, 4), "rate": round(rate, 2), "unit": unit, "share": round(rate / ceiling, 3)}
    return {"op": op, "shape": shape, "path": path, **numbers}


def failed(op: str, shape: str, path: str, error: Exception) -> Row:
    """The line of a path that could not run, with the reason instead of the unit."""
    reason = (str(error).splitlines() or [type(error).__name__])[0][:80]
    return {"op": op, "shape": shape, "path": path, "ms": None, "rate": None, "unit": reason, "share": None}


def compare(
    op: str,
    shape: str,
    paths: dict[str, Callable[..., Any]],
    inputs: Sequence[torch.Tensor],
    forward: Work,
    backward: Work | None = None,
    clock: Callable[[Callable[[], object]], float] = gpu_ms,
    expected: Any = None,
) -> Iterator[Row]:
    """Time forward and, if `backward` is given, backward of every path on the same inputs.

    A path that fails, or whose result is not near `expected` if that is given, is one row with the reason. `clock` is
    `gpu_ms`, or `graph_ms` for short work, whose time the host would dominate: the tensors must then be larger than L2.
    """
    for path, run in paths.items():
        try:
            if expected is not None:
                _check(run, inputs, expected)
            forward_ms = clock(functools.partial(_without_gradients, run, *inputs))
            yield row(op, shape, path, forward_ms, forward)
            if backward:
                backward_ms = clock(backward_of(run, *inputs))
                yield row(f"{op} backward", shape, path, backward_ms, backward)
                both = Work(*(a + b for a, b in zip(forward, backward, strict=True)))
                yield row(f"{op} both", shape, path, forward_ms + backward_ms, both)
        except Exception as error:  # peers are missing and compilers fail in many ways; the other paths are timed
            yield failed(op, shape, path, error)


def _check(run: Callable[..., Any], inputs: Sequence[torch.Tensor], expected: Any) -> None:
    """Compare two results, since a second run finds counters as the first has left them."""
    for _ in range(2):
        with torch.no_grad():
            error = relative_rms(run(*inputs), expected)
        if not error <= BOUND:
            raise ValueError(f"relative RMS error {error:.1e}")


def relative_rms(actual: Any, expected: Any) -> float:
    """RMS of the difference over the RMS of what was expected; the largest one of several tensors."""
    if not isinstance(actual, torch.Tensor):
        return max(relative_rms(*pair) for pair in zip(actual, expected, strict=True))
    difference = actual.float() - expected.float()
    return (difference.square().mean() / expected.float().square().mean()).sqrt().item()


@contextlib.contextmanager
def replaced(table: dict[Any, Any], entries: Mapping[Any, Any]) -> Iterator[None]:
    """Inside the `with` block, `table` has other entries. The constants of a module are the table `vars(module)`."""
    shipped = {key: table[key] for key in entries}
    table.update(entries)
    try:
        yield
    finally:
        table.update(shipped)


def sweep(
    op: str,
    shape: str,
    run: Callable[..., Any],
    table: dict[Any, Any],
    settings: Iterable[Mapping[Any, Any]],
    inputs: Sequence[torch.Tensor],
    forward: Work,
    backward: Work | None = None,
    clock: Callable[[Callable[[], object]], float] = graph_ms,
) -> Iterator[Row]:
    """Time `run` with other entries of a table: those whose results agree with the table as it is.

    The kernels of all settings are compiled first, by several threads.
    """
    settings = list(settings)
    with torch.no_grad():
        expected = run(*inputs)
        with launch.compile_only(16):
            for entries in settings:
                with replaced(table, entries), contextlib.suppress(Exception):  # its row will say why
                    run(*inputs)
    for entries in settings:
        with replaced(table, entries):
            paths = {" ".join(dict.fromkeys(map(str, entries.values()))): run}
            yield from compare(op, shape, paths, inputs, forward, backward, clock, expected)


@functools.cache
def _own_stream() -> torch.cuda.Stream:
    torch.cuda.synchronize()
    return torch.cuda.Stream()


def _without_gradients(run: Callable[..., Any], *inputs: torch.Tensor) -> None:
    with torch.no_grad():
        run(*inputs)


def backward_of(run: Callable[..., Any], *inputs: torch.Tensor) -> Callable[[], object]:
    """A function that runs the backward pass of `run(*inputs)` alone; float inputs are made to require gradients."""
    torch.cuda.set_stream(
        _own_stream()
    )  # a captured backward must not depend on the default stream through its forward
    leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in inputs]
    wanted = [x for x in leaves if x.requires_grad]
    outputs = run(*leaves)
    outputs = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
    d_outputs = [torch.randn_like(y) for y in outputs]
    return lambda: torch.autograd.grad(outputs, wanted, d_outputs, retain_graph=True)


def through(path: launch.Path, function: Callable[..., Any], **settings: object) -> Callable[..., Any]:
    """`function` with `settings`, forced through one of its paths."""

    def run(*inputs: torch.Tensor) -> Any:
        with launch.forced(path):
            return function(*inputs, **settings)

    return run


def peer(module: str, name: str) -> Callable[..., Any]:
    """A function of another project, looked up at its first call, so that a missing one is one failed row."""
    return lambda *inputs: getattr(importlib.import_module(module), name)(*inputs)


def shown(rows: Iterable[Row], *, quiet: bool = False) -> Iterator[Row]:
    """Yield the rows, each printed in columns as it comes."""
    for r in rows:
        numbers = f"{'-':>9} {r['unit']}"
        if r["ms"] is not None:
            numbers = f"{r['ms']:>9.4f} ms {r['rate']:>8.2f} {r['unit']:<8} {r['share']:>6.1%}"
        if not quiet:
            print(f"{r['op']:<24} {r['shape']:<34} {r['path']:<18} {numbers}", flush=True)
        yield r


def main(rows: Callable[[], Iterable[Row]], tune: Callable[[], Iterable[Row]] | None = None) -> None:
    """Print the rows of a benchmark as they are measured; with --tune those of its sweep. --out keeps them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    if tune:
        parser.add_argument("--tune", action="store_true", help="sweep the launch settings instead")
    options = parser.parse_args()
    ceilings = measured_ceilings()
    name = torch.cuda.get_device_name()
    print(
        f"{name}, torch {torch.__version__}: copy {ceilings.copy_tb_s:.2f} TB/s, matmul "
        f"{ceilings.matmul_tflop_s:.0f} TFLOP/s"
    )
    kept = list(shown(tune() if tune and options.tune else rows()))
    if tune and options.tune:
        for op, shape in dict.fromkeys((r["op"], r["shape"]) for r in kept):
            timed = [r for r in kept if (r["op"], r["shape"]) == (op, shape) and r["ms"] is not None]
            print(f"best of {op} {shape}: {min(timed, key=lambda r: r['ms'])['path'] if timed else 'none ran'}")
    if options.out:
        options.out.write_text(json.dumps({"gpu": name, "ceilings": ceilings._asdict(), "rows": kept}, indent=1))
