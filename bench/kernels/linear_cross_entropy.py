"""The last projection and its loss, forward and backward, compared with torch and Liger in time and memory.

`--tune` sweeps the splits of the hidden gradient and the tile of the loss kernel.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.kernels.timing import Row, Work, failed, gpu_ms, main, row, sweep
from saccade.kernels import launch
from saccade.kernels import linear_cross_entropy as module
from saccade.kernels.linear_cross_entropy import linear_cross_entropy

HIDDEN, VOCAB = 2048, 151936
CASES = {"16384": (16384, 0.0), "16384, 75 % ignored": (16384, 0.75), "4096": (4096, 0.0), "1024": (1024, 0.0)}


def inputs(num_tokens: int, ignored: float) -> tuple[Tensor, Tensor, Tensor, int]:
    """hidden, weight, labels and the number of learned tokens."""
    hidden = torch.randn(num_tokens, HIDDEN, device="cuda", dtype=torch.bfloat16).requires_grad_()
    weight = (torch.randn(VOCAB, HIDDEN, device="cuda", dtype=torch.bfloat16) * HIDDEN**-0.5).requires_grad_()
    labels = torch.randint(VOCAB, (num_tokens,), device="cuda")
    labels[torch.randperm(num_tokens, device="cuda")[: int(num_tokens * ignored)]] = -100
    return hidden, weight, labels, num_tokens - int(num_tokens * ignored)


def plain(hidden: Tensor, weight: Tensor, labels: Tensor, num_labels: int) -> Tensor:
    """All logits at once, as in a plain model."""
    del num_labels
    return F.cross_entropy((hidden @ weight.T).float(), labels)


def ours(hidden: Tensor, weight: Tensor, labels: Tensor, num_labels: int) -> Tensor:
    """Ours, with the count of labels, which is known in training."""
    return linear_cross_entropy(hidden, weight, labels, count=num_labels, num_labels=num_labels)


def liger() -> Callable[..., Tensor]:
    """Liger's fused linear cross entropy."""
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    def run(hidden: Tensor, weight: Tensor, labels: Tensor, num_labels: int) -> Tensor:
        del num_labels
        result = LigerFusedLinearCrossEntropyFunction.apply(hidden, weight, labels)
        return result[0] if isinstance(result, tuple) else result

    return run


def step(run: Callable[..., Tensor], hidden: Tensor, weight: Tensor, labels: Tensor, num_labels: int) -> None:
    """Forward and backward into `.grad`."""
    hidden.grad = weight.grad = None
    run(hidden, weight, labels, num_labels).backward()


def extra_gib(call: Callable[[], object], hidden: Tensor, weight: Tensor) -> float:
    """Peak memory beyond the inputs, gradients included."""
    hidden.grad = weight.grad = None
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def measure(shape: str, path: str, make: Callable[[], Callable[..., Tensor]]) -> Row:
    """One line, with the memory as an extra column."""
    hidden, weight, labels, num_labels = inputs(*CASES[shape])
    run = make()

    def call() -> None:
        step(run, hidden, weight, labels, num_labels)

    call()
    gib = extra_gib(call, hidden, weight)
    work = Work(flops=6 * num_labels * HIDDEN * VOCAB)
    line = row("linear_cross_entropy", f"{shape} ({gib:.2f} GiB)", path, gpu_ms(call, budget_ms=500), work)
    return line | {"extra_gib": round(gib, 3)}


def rows() -> Iterator[Row]:
    """Forward and backward together: ours does both in forward."""
    paths: dict[str, Callable[[], Callable[..., Tensor]]] = {
        "triton": lambda: ours,
        "liger": liger,
        "torch": lambda: plain,
    }
    for shape in CASES:
        for path, make in paths.items():
            try:
                with launch.forced("triton"):
                    yield measure(shape, path, make)
            except (RuntimeError, ValueError, TypeError, ImportError) as error:
                yield failed("linear_cross_entropy", shape, path, error)
            torch.cuda.empty_cache()


def tune() -> Iterator[Row]:
    """The settings at 16384 tokens."""
    hidden, weight, labels, num_labels = inputs(*CASES["16384"])

    def gradient() -> Tensor | None:
        with torch.enable_grad():
            step(ours, hidden, weight, labels, num_labels)
        return hidden.grad

    loss_tiles = ((8192, 16), (4096, 8), (4096, 4), (8192, 8), (16384, 32))
    settings = [
        {"_HIDDEN_SPLITS": splits, "_LOSS_BLOCK": block, "_LOSS_WARPS": num_warps}
        for splits, (block, num_warps) in product((1, 2, 4), loss_tiles)
    ]
    work, clock = Work(flops=6 * num_labels * HIDDEN * VOCAB), partial(gpu_ms, budget_ms=250)
    yield from sweep("linear_cross_entropy", "16384", gradient, vars(module), settings, (), work, clock=clock)


if __name__ == "__main__":
    main(rows, tune)
