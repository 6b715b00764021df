"""Quantizing tokens to fp8: alone, and in the kernels of the norm and the gated activation of a 3B decoder block."""

from collections.abc import Iterator

import torch

from bench.kernels.quantized import EPS, LAYERS, random
from bench.kernels.timing import Row, Work, compare, graph_ms, main
from saccade.kernels.quantize_activation import quantize_activation
from saccade.kernels.rms_norm import add_rms_norm, add_rms_norm_quant
from saccade.kernels.swiglu import swiglu, swiglu_quant

FP8 = torch.float8_e4m3fn


def rows() -> Iterator[Row]:
    """One step of a decoder block each: without quantization, quantized in its kernel, quantized by a second kernel."""
    num_wide, hidden = LAYERS["gate and up"]
    gain = random(hidden)
    norms = {
        "without": lambda x, residual: add_rms_norm(x, residual, gain, EPS),
        "quantized": lambda x, residual: add_rms_norm_quant(x, residual, gain, EPS, FP8),
        "then quantized": lambda x, residual: quantize_activation(add_rms_norm(x, residual, gain, EPS)[0], FP8),
    }
    activations = {
        "without": swiglu,
        "quantized": lambda gate, up: swiglu_quant(gate, up, FP8),
        "then quantized": lambda gate, up: quantize_activation(swiglu(gate, up), FP8),
    }
    for count in (1, 16, 256):
        x, residual = random(count, hidden), random(count, hidden)
        gate, up = random(count, num_wide).chunk(2, dim=1)
        shape = f"{count} x {hidden}"
        alone = {"triton": lambda x: quantize_activation(x, FP8)}
        yield from compare("quantize_activation", shape, alone, (x,), Work(3 * x.numel()), clock=graph_ms)
        yield from compare("norm of a sum", shape, norms, (x, residual), Work(7 * x.numel()), clock=graph_ms)
        shape = f"{count} x {num_wide // 2}"
        yield from compare("swiglu", shape, activations, (gate, up), Work(5 * gate.numel()), clock=graph_ms)


if __name__ == "__main__":
    main(rows)
