"""RMS norm, alone, after a residual sum and into 8 bits, at the widths of the anchors; `--tune` sweeps settings."""

from collections.abc import Iterator
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.kernels.timing import Row, Work, compare, graph_ms, main, peer, sweep, through
from saccade.kernels import rms_norm as module
from saccade.kernels.rms_norm import add_rms_norm, rms_norm, rms_norm_quant, rms_norm_reference

SHAPES = [(16384, 2048), (36864, 1280), (16384 * 18, 128), (256, 2048)]
EPS = 1e-6
_compiled_reference = torch.compile(rms_norm_reference, dynamic=False)


def _torch(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, EPS)


def _liger(x: Tensor, weight: Tensor) -> Tensor:
    return peer("liger_kernel.transformers.functional", "liger_rms_norm")(x, weight, EPS)


def _compiled(x: Tensor, weight: Tensor) -> Tensor:
    return _compiled_reference(x, weight, EPS)


def _inputs(num_rows: int, dim: int) -> tuple[Tensor, Tensor]:
    return (
        torch.randn(num_rows, dim, device="cuda", dtype=torch.bfloat16),
        torch.randn(dim, device="cuda", dtype=torch.bfloat16),
    )


def rows() -> Iterator[Row]:
    """Ours, torch's and Liger's; bytes are those that one pass must move."""
    paths = {
        "triton": through("triton", rms_norm, eps=EPS),
        "torch": _torch,
        "torch.compile": _compiled,
        "liger": _liger,
    }
    for num_rows, dim in SHAPES:
        x, weight = _inputs(num_rows, dim)
        size, shape = x.numel() * 2, f"{num_rows} x {dim}"
        yield from compare("rms_norm", shape, paths, (x, weight), Work(2 * size), Work(3 * size), clock=graph_ms)
        fused = {"triton": through("triton", add_rms_norm, eps=EPS)}
        yield from compare(
            "add_rms_norm", shape, fused, (x, x.clone(), weight), Work(4 * size), Work(4 * size), clock=graph_ms
        )
        for dtype in (torch.int8, torch.float8_e4m3fn):
            quantized = {str(dtype).removeprefix("torch."): through("triton", rms_norm_quant, eps=EPS, dtype=dtype)}
            yield from compare("rms_norm_quant", shape, quantized, (x, weight), Work(1.5 * size), clock=graph_ms)


def tune() -> Iterator[Row]:
    """Launch settings at 16384 x 2048."""
    inputs, run = _inputs(16384, 2048), through("triton", rms_norm, eps=EPS)
    size, shape = inputs[0].numel() * 2, "16384 x 2048"
    forward = [{"forward": module._Launch(*x)} for x in product((2048, 4096, 8192), (2, 4, 8))]
    yield from sweep("rms_norm", shape, run, module._CONFIGS, forward, inputs, Work(2 * size))
    backward = [{"backward": module._Launch(*x)} for x in product((2048, 4096), (4, 8), (2, 4, 6), (1, 3))]
    results = sweep("rms_norm", shape, run, module._CONFIGS, backward, inputs, Work(2 * size), Work(3 * size))
    yield from (result for result in results if result["op"].endswith("backward"))


if __name__ == "__main__":
    main(rows, tune)
