"""The projections of a 3B decoder block in bf16, int8, fp8 and int4, with norms and activation as in the model."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from bench.kernels.quantized import (
    COLD_BYTES,
    DEVICE,
    EIGHT_BITS,
    EPS,
    LAYERS,
    quantized,
    random,
    random_weight,
    time_over,
)
from bench.kernels.timing import Row, Work, main, row
from saccade.kernels.quantize_activation import quantize_activation
from saccade.kernels.rms_norm import add_rms_norm_quant
from saccade.kernels.small_linear import norm_gated_linear, norm_linear, small_linear
from saccade.kernels.small_linear_w4a16 import (
    Weight4bit,
    norm_gated_linear_w4a16,
    norm_linear_w4a16,
    small_linear_w4a16,
)
from saccade.kernels.small_matmul_w8a8 import small_matmul_w8a8
from saccade.kernels.swiglu import swiglu_quant

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
HIDDEN = 2048


class Block:
    """The projections of one decoder block in one kind, with norms and activation, as the model runs them."""

    def __init__(self, kind: str, weights: dict[str, tuple[Tensor, ...]]) -> None:
        self.kind, self.weights = kind, weights
        self.bias = random(LAYERS["qkv"][0])
        self.gain = torch.ones(HIDDEN, device=DEVICE, dtype=torch.bfloat16)

    def normed(self, layer: str, x: Tensor, residual: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Norm of a sum, then linear: (out, the sum)."""
        weight = self.weights[layer]
        if self.kind == "bf16":
            return norm_linear(x, residual, self.gain, EPS, *weight, bias)
        if self.kind == "int4":
            return norm_linear_w4a16(x, residual, self.gain, EPS, Weight4bit(*weight, bias=bias))
        x8, scale, total = add_rms_norm_quant(x, residual, self.gain, EPS, EIGHT_BITS[self.kind])
        return small_matmul_w8a8(x8, scale, *weight, bias, out_dtype=x.dtype), total

    def linear(self, layer: str, x: Tensor) -> Tensor:
        """Linear."""
        weight = self.weights[layer]
        if self.kind == "bf16":
            return small_linear(x, *weight)
        if self.kind == "int4":
            return small_linear_w4a16(x, Weight4bit(*weight))
        return small_matmul_w8a8(*quantize_activation(x, EIGHT_BITS[self.kind]), *weight, out_dtype=x.dtype)

    def feed_forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Norm of a sum, gate and up, activation, down: (out, the sum)."""
        gate_up, down = self.weights["gate and up"], self.weights["down"]
        if self.kind == "bf16":
            hidden, total = norm_gated_linear(x, residual, self.gain, EPS, *gate_up)
            return small_linear(hidden, *down), total
        if self.kind == "int4":
            hidden, total = norm_gated_linear_w4a16(x, residual, self.gain, EPS, Weight4bit(*gate_up))
            return small_linear_w4a16(hidden, Weight4bit(*down)), total
        wide, total = self.normed("gate and up", x, residual)
        hidden8, scale = swiglu_quant(*wide.chunk(2, dim=1), EIGHT_BITS[self.kind])
        return small_matmul_w8a8(hidden8, scale, *down, out_dtype=x.dtype), total

    def run(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """The block without its attention, which is replaced by a slice of the queries."""
        qkv, total = self.normed("qkv", x, residual, self.bias)
        attended = self.linear("out", qkv[:, :HIDDEN].contiguous())
        return self.feed_forward(attended, total)


@torch.no_grad()
def rows() -> Iterator[Row]:
    """All kinds and numbers of tokens; bytes are those of the weights."""
    weights = {layer: random_weight(layer) for layer in LAYERS}
    for kind in ("bf16", *EIGHT_BITS, "int4"):
        one = {layer: quantized(kind, weight) for layer, weight in weights.items()}
        size = sum(x.nbytes for weight in one.values() for x in weight)
        blocks = [
            Block(kind, {layer: tuple(x.clone() for x in weight) for layer, weight in one.items()})
            for _ in range(math.ceil(COLD_BYTES / size) + 2)
        ]
        for count in TOKENS:
            x, residual = random(count, HIDDEN), random(count, HIDDEN)
            us = time_over(blocks, lambda block, x=x, residual=residual: block.run(x, residual))
            yield row("decoder block", f"{count} tokens", kind, us / 1e3, Work(size))


if __name__ == "__main__":
    main(rows)
