"""Linear layers for few tokens at the shapes of a 3B model, with norm and activation fused or in parts.

They are timed as CUDA-graph replay over several copies of the weight, so that none is in L2; bytes are those of weight,
inputs and outputs. Each way is compared with the reference first, and a wrong one is not timed. Consecutive launches of
a graph depend on each other only through the order of the stream, like the layers of a model, so that early starts
count. `--tune` sweeps the tiles.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle, product
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.kernels.timing import Row, Work, compare, graph_ms, main, sweep
from saccade.kernels import launch
from saccade.kernels import small_linear as module
from saccade.kernels.rms_norm import add_rms_norm, rms_norm
from saccade.kernels.small_linear import SmallLinearTiles
from saccade.kernels.swiglu import swiglu, swiglu_reference

EPS = 1e-6
TOKENS = (1, 2, 4, 8)
COLD_BYTES = 250e6


class Layer(NamedTuple):
    """One linear layer of the model."""

    kind: str
    """norm, norm of sum, gated (norm of sum, and the activation after the product) or plain."""
    num_outputs: int
    num_inputs: int
    has_bias: bool = False


LAYERS = {
    "norm, qkv": Layer("norm", 2560, 2048, has_bias=True),
    "out": Layer("plain", 2048, 2048),
    "norm of sum, gate up, swiglu": Layer("gated", 22016, 2048),
    "down": Layer("plain", 2048, 11008),
    "norm of sum, head": Layer("norm of sum", 151936, 2048),
}


class Case:
    """Inputs of a layer, copies of its weight, and the ways to run it."""

    def __init__(self, name: str, num_tokens: int, copies: list[Tensor]) -> None:
        self.layer, self.copies = LAYERS[name], copies
        N, K = copies[0].shape
        self.shape = f"{name} {num_tokens} x {K} -> {N}"
        new = partial(torch.randn, device="cuda", dtype=torch.bfloat16)
        self.x, self.is_gated = new(num_tokens, K), self.layer.kind == "gated"
        self.residual = new(num_tokens, K) if self.layer.kind in ("norm of sum", "gated") else None
        self.norm = (new(K), EPS) if self.layer.kind != "plain" else None
        self.bias = new(N) if self.layer.has_bias else None
        sizes = [x.nbytes for x in (copies[0], self.x, self.residual, self.bias) if x is not None]
        self.work = Work(sum(sizes) + 2 * num_tokens * N)
        self.expected = self.reference(copies[0])

    def reference(self, weight: Tensor) -> Tensor:
        """The specification with its rounding, the product in fp32 (in parts for a large weight)."""
        with launch.forced("reference"):
            rows = self.rows().float()
        out = torch.cat([rows @ part.float().T for part in weight.split(8192)], dim=1)
        out = out if self.bias is None else out + self.bias.float()
        return swiglu_reference(*out.chunk(2, dim=1)) if self.is_gated else out

    def rows(self) -> Tensor:
        """The input of the product: the norm as a separate launch."""
        if self.norm is None:
            return self.x
        if self.residual is None:
            return rms_norm(self.x, *self.norm)
        return add_rms_norm(self.x, self.residual, *self.norm)[0]

    def fused(self, weight: Tensor) -> Tensor:
        """One launch."""
        options = {"residual": self.residual, "norm": self.norm, "is_gated": self.is_gated}
        return module._run(self.x, weight, self.bias, **options)[0]

    def apart(self, weight: Tensor) -> Tensor:
        """The norm, then our product, then the activation."""
        return self.activated(module._run(self.rows(), weight, self.bias)[0])

    def in_parts(self, weight: Tensor) -> Tensor:
        """The norm, then torch's product, then the activation."""
        return self.activated(F.linear(self.rows(), weight, self.bias))

    def activated(self, out: Tensor) -> Tensor:
        """The output of the layer for the outputs of its product."""
        return swiglu(*out.chunk(2, dim=1)) if self.is_gated else out

    def over_copies(self, way: Callable[[Tensor], Tensor]) -> Callable[[], Tensor]:
        """`way` on the copies of the weight in turn."""
        turns = cycle(self.copies)
        return lambda: way(next(turns))


def copies_of(name: str) -> list[Tensor]:
    """Copies of a layer's weight, enough to leave L2 cold."""
    shape = LAYERS[name].num_outputs, LAYERS[name].num_inputs
    weight = torch.randn(shape, device="cuda", dtype=torch.bfloat16) / shape[1] ** 0.5
    return [weight, *(weight.clone() for _ in range(math.ceil(COLD_BYTES / weight.nbytes) - 1))]


def cases(name: str) -> Iterator[tuple[Case, Callable[[Callable[[], object]], float]]]:
    """A layer for every number of tokens, and the clock that goes over the copies of its weight."""
    copies = copies_of(name)
    clock = partial(graph_ms, repeats=max(8, len(copies)), replays=9)
    yield from ((Case(name, num_tokens, copies), clock) for num_tokens in TOKENS)


def rows() -> Iterator[Row]:
    """Every layer and number of tokens, every way."""
    for name, layer in LAYERS.items():
        for case, clock in cases(name):
            ways = {"fused": case.fused} | ({"apart": case.apart} if layer.kind != "plain" else {})
            paths = {path: case.over_copies(way) for path, way in (ways | {"in parts": case.in_parts}).items()}
            op = f"{layer.kind} linear"
            yield from compare(op, case.shape, paths, (), case.work, clock=clock, expected=case.expected)


def cuts(layer: Layer) -> list[SmallLinearTiles]:
    """Tiles worth trying: threads along the inputs, 8 to 128 registers of W in flight, programs for every SM."""
    kept = []
    for block_n, block_k, num_warps, depth in product(
        (2, 4, 8, 16, 32), (256, 512, 1024, 2048), (1, 2, 4, 8), (1, 2, 3, 4)
    ):
        registers = depth * block_n * block_k // (2 * 32 * num_warps)
        steps = -(-layer.num_inputs // block_k)
        wasted = -(-steps // depth) * depth * block_k / layer.num_inputs - 1
        if (
            block_k >= 256 * num_warps
            and 8 <= registers <= 128
            and layer.num_outputs / block_n >= 120
            and wasted < 0.13
        ):
            kept.append(SmallLinearTiles(block_n, block_k, num_warps, depth))
    return kept


def tune() -> Iterator[Row]:
    """All tiles with every number of tokens; the table has one entry for all of them."""
    for name, layer in LAYERS.items():
        if name.endswith("head"):
            continue
        key = layer.num_inputs > 4096, layer.num_outputs > 8192
        settings = [{key: tiles} for tiles in cuts(layer)]
        for case, clock in cases(name):
            run, op = case.over_copies(case.fused), f"{layer.kind} linear"
            yield from sweep(op, case.shape, run, module._CUTS, settings, (), case.work, clock=clock)


if __name__ == "__main__":
    main(rows, tune)
