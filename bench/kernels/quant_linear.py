"""Compressed linear layers at the shapes of a 3B model, beside the bf16 matmul they replace.

Timed as CUDA-graph replay over several copies of the weight, so that none is found in L2. Up to 64 tokens the bytes of weight,
tokens and outputs count; from there on floating-point operations (8-bit paths may pass 100 % of the bf16 ceiling).
"""

import math
from collections.abc import Callable, Iterator
from itertools import cycle, product

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.kernels.timing import Row, Work, failed, graph_ms, main, row
from saccade.kernels import launch
from saccade.kernels.quant_linear import (
    interleave_int4,
    linear_w4a16,
    matmul_w8a8,
    quantize_activation,
    quantize_weight,
    quantize_weight_int4,
)

LAYERS = {"qkv": (2560, 2048), "out": (2048, 2048), "gate and up": (22016, 2048), "down": (2048, 11008)}
TOKENS = (1, 16, 64, 4096)
COLD_BYTES = 200e6
KINDS = {
    "bf16": ("library",),
    "int8": ("triton", "library"),
    "fp8": ("triton", "library"),
    "int4": ("triton", "library"),
}
EIGHT_BITS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


def weights(kind: str, shape: tuple[int, int]) -> list[tuple[Tensor, ...]]:
    """Copies of one compressed weight, enough to leave L2 cold."""
    weight = torch.randn(shape, device="cuda", dtype=torch.bfloat16) * 0.02
    if kind == "bf16":
        one: tuple[Tensor, ...] = (weight,)
    elif kind == "int4":
        packed, scale, _ = quantize_weight_int4(weight, 128)
        one = (interleave_int4(packed), scale)
    else:
        values, scale = quantize_weight(weight, EIGHT_BITS[kind])
        one = (values, scale.float())
    copies = min(32, math.ceil(COLD_BYTES / sum(x.nbytes for x in one)))
    return [tuple(x.clone() for x in one) for _ in range(copies)]


def call(kind: str, x: Tensor, copies: list[tuple[Tensor, ...]]) -> Callable[[], Tensor]:
    """One matmul on the next copy; 8-bit tokens are compressed beforehand, as the norm before the layer does it."""
    turns = cycle(copies)
    if kind == "bf16":
        return lambda: F.linear(x, *next(turns))
    if kind == "int4":
        return lambda: linear_w4a16(x, *next(turns))
    x8, scale = quantize_activation(x, EIGHT_BITS[kind])
    return lambda: matmul_w8a8(x8, scale, *next(turns), out_dtype=x.dtype)


def measure(kind: str, path: launch.Path, layer: str, num_tokens: int, copies: list[tuple[Tensor, ...]]) -> Row:
    """One line."""
    num_outputs, num_inputs = LAYERS[layer]
    x = torch.randn(num_tokens, num_inputs, device="cuda", dtype=torch.bfloat16)
    with launch.forced("triton"):
        run = call(kind, x, copies)
    with launch.forced(path):
        ms = graph_ms(run, repeats=len(copies), replays=7)
    op, shape = f"linear {kind}", f"{layer} {num_tokens} x {num_inputs} -> {num_outputs}"
    if num_tokens > 64:
        return row(op, shape, path, ms, Work(flops=2 * num_tokens * num_inputs * num_outputs))
    activations = num_tokens * (num_inputs * (1 if kind in EIGHT_BITS else 2) + num_outputs * 2)
    return row(op, shape, path, ms, Work(sum(w.nbytes for w in copies[0]) + activations))


def rows() -> Iterator[Row]:
    """Every layer, batch and kind."""
    for layer, shape in LAYERS.items():
        for kind, paths in KINDS.items():
            copies = weights(kind, shape)
            for num_tokens, path in product(TOKENS, paths):
                try:
                    yield measure(kind, path, layer, num_tokens, copies)
                except (RuntimeError, ValueError, TypeError) as error:
                    yield failed(f"linear {kind}", f"{layer} {num_tokens} tokens", path, error)
    for num_tokens in TOKENS:
        x = torch.randn(num_tokens, 2048, device="cuda", dtype=torch.bfloat16)
        with launch.forced("triton"):
            ms = graph_ms(lambda x=x: quantize_activation(x, torch.float8_e4m3fn))
        yield row("quantize_activation", f"{num_tokens} x 2048", "triton", ms, Work(x.numel() * 3))


if __name__ == "__main__":
    main(rows)
