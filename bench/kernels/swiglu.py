"""SwiGLU at the MLP widths of the anchors; `--tune` sweeps the launch settings."""

from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor

from bench.kernels.timing import Row, Work, compare, graph_ms, main, peer, sweep, through
from saccade.kernels import swiglu as module
from saccade.kernels.swiglu import swiglu, swiglu_reference

SHAPES = [(16384, 11008), (36864, 3420), (256, 11008)]

_compiled_reference = torch.compile(swiglu_reference, dynamic=False)


def _compiled(gate: Tensor, up: Tensor) -> Tensor:
    return _compiled_reference(gate, up)


def _liger(gate: Tensor, up: Tensor) -> Tensor:
    return peer("liger_kernel.transformers.functional", "liger_swiglu")(gate, up)


def _fused(gate_up: Tensor) -> Tensor:
    return through("triton", swiglu)(*gate_up.chunk(2, dim=1))


def rows() -> Iterator[Row]:
    """Two contiguous inputs, and the two halves of a fused projection."""
    paths = {
        "triton": through("triton", swiglu),
        "torch": swiglu_reference,
        "torch.compile": _compiled,
        "liger": _liger,
    }
    for num_rows, dim in SHAPES:
        gate, up = (torch.randn(num_rows, dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        size, shape = gate.numel() * 2, f"{num_rows} x {dim}"
        yield from compare("swiglu", shape, paths, (gate, up), Work(3 * size), Work(5 * size), clock=graph_ms)
        yield from compare(
            "swiglu",
            shape,
            {"triton, fused row": _fused},
            (torch.cat([gate, up], dim=1),),
            Work(3 * size),
            clock=graph_ms,
        )


def tune() -> Iterator[Row]:
    """Launch settings at 16384 x 11008."""
    inputs = [torch.randn(16384, 11008, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    size, run = inputs[0].numel() * 2, through("triton", swiglu)
    launches = [module._Launch(*x) for x in product((1024, 2048, 4096), (2, 4, 8))]
    settings = [dict.fromkeys(module._CONFIGS, one) for one in launches]
    yield from sweep("swiglu", "16384 x 11008", run, module._CONFIGS, settings, inputs, Work(3 * size), Work(5 * size))


if __name__ == "__main__":
    main(rows, tune)
