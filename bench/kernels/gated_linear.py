"""Gate, up and activation in one kernel, or the library's product and then the activation; `--tune` sweeps tiles."""

from collections.abc import Iterator
from itertools import product

import torch

from bench.kernels.timing import Row, Work, compare, graph_ms, main, through
from saccade.kernels import gated_linear as module
from saccade.kernels.gated_linear import gated_linear
from saccade.kernels.linear import linear
from saccade.kernels.swiglu import swiglu

SHAPES = {"tower": (1280, 3424, True), "decoder": (2048, 11008, False)}
"""Inputs, channels, and whether there is a bias, of the 3B shape."""
TOKENS = {"tower": (1024, 1536, 2304, 3072, 4992, 8192), "decoder": (512, 640, 1024, 2048, 4096)}


def _parts(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return swiglu(*linear(x, weight, bias).chunk(2, dim=-1))


def _inputs(name: str, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    num_inputs, num_channels, has_bias = SHAPES[name]
    x, weight = (
        torch.randn(size, num_inputs, device="cuda", dtype=torch.bfloat16) for size in (num_tokens, 2 * num_channels)
    )
    return x, weight, torch.randn(2 * num_channels, device="cuda", dtype=torch.bfloat16) if has_bias else None


def _compare(name: str, num_tokens: int, kernel: str) -> Iterator[Row]:
    x, weight, bias = _inputs(name, num_tokens)
    paths = {
        kernel: lambda x: through("triton", gated_linear)(x, weight, bias),
        "parts": lambda x: _parts(x, weight, bias),
    }
    with torch.no_grad():
        work = Work(flops=2.0 * num_tokens * weight.numel())
        yield from compare("gated_linear", f"{name} {num_tokens}", paths, (x,), work, clock=graph_ms)


def rows() -> Iterator[Row]:
    """At the sizes of passes of the encoder and of steps."""
    for name, sizes in TOKENS.items():
        for num_tokens in sizes:
            yield from _compare(name, num_tokens, "triton")


def tune() -> Iterator[Row]:
    """Tiles and programs per multiprocessor."""
    shipped = {name: getattr(module, name) for name in ("_BLOCK_T", "_BLOCK_I", "_PROGRAMS_PER_SM")}
    for block_t, block_i, programs in product((64, 128), (64, 128), (1, 2, 3)):
        for name, value in zip(shipped, (block_t, block_i, programs), strict=True):
            setattr(module, name, value)
        for name, num_tokens in (("tower", 2304), ("tower", 4992), ("decoder", 1024)):
            yield from _compare(name, num_tokens, f"{block_t} x {block_i}, {programs} per SM")
    for name, value in shipped.items():
        setattr(module, name, value)


if __name__ == "__main__":
    main(rows, tune)
