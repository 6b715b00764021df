"""Cases of the quantized linear layers: the four layers of a 3B decoder block in bf16, int8, fp8 and int4.

A case is compared with its reference first. It is timed as CUDA-graph replays over several copies of the weight, so
that none is in L2.
"""

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import cycle, product
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.kernels.timing import Row, Work, compare, graph_ms, measured_ceilings, sweep, through
from saccade.kernels import launch
from saccade.kernels._few_tokens import VectorTiles
from saccade.kernels._split_linear import SplitTiles
from saccade.kernels.dequantize_int4 import interleave_int4
from saccade.kernels.linear_w4a16 import linear_w4a16_reference
from saccade.kernels.linear_w8a8 import matmul_w8a8_reference
from saccade.kernels.quantize_activation import quantize_activation_reference
from saccade.kernels.small_linear_w4a16 import Weight4bit, small_linear_w4a16
from saccade.kernels.small_matmul_w8a8 import small_matmul_w8a8
from saccade.model.weight_rounding import quantize_weight, quantize_weight_int4

LAYERS = {"qkv": (2560, 2048), "out": (2048, 2048), "gate and up": (22016, 2048), "down": (2048, 11008)}
"""Outputs and inputs."""
FEW_TOKENS, MANY_TOKENS = (1, 2), (4, 8, 16, 32, 64, 256, 2048)
EIGHT_BITS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
COLD_BYTES = 200e6
EPS = 1e-6
DEVICE = "cuda"


class Case(NamedTuple):
    """One layer in one kind for a number of tokens."""

    kind: str
    layer: str
    x: Tensor
    rows: tuple[Tensor, ...]
    """x, or in 8 bits the quantized tokens and their scales, as the norm before the layer makes them."""
    copies: list[tuple[Tensor, ...]]
    """Copies of the weight, enough to leave L2 cold."""

    def call(self, weight: tuple[Tensor, ...]) -> Tensor:
        """Run the layer as the model does."""
        if self.kind == "bf16":
            return F.linear(self.x, *weight)
        if self.kind == "int4":
            return small_linear_w4a16(self.x, Weight4bit(*weight))
        return small_matmul_w8a8(*self.rows, *weight, out_dtype=self.x.dtype)

    def reference(self) -> Tensor:
        """The reference on the first copy."""
        weight = self.copies[0]
        if self.kind == "bf16":
            return F.linear(self.x.float(), weight[0].float())
        if self.kind == "int4":
            return linear_w4a16_reference(self.x.float(), *weight)
        return matmul_w8a8_reference(*self.rows, *weight, out_dtype=torch.float32)

    def over_copies(self) -> Callable[[], Tensor]:
        """`call` on the copies of the weight in turn."""
        turns = cycle(self.copies)
        return lambda: self.call(next(turns))

    @property
    def clock(self) -> Callable[[Callable[[], object]], float]:
        """A clock for a function that takes the copies in turn."""
        return functools.partial(graph_ms, repeats=len(self.copies), replays=5)

    @property
    def op(self) -> str:
        """The operation in a report."""
        return f"linear {self.kind}"

    @property
    def shape(self) -> str:
        """The shape in a report."""
        num_outputs, num_inputs = LAYERS[self.layer]
        return f"{self.layer} {len(self.x)} x {num_inputs} -> {num_outputs}"

    def work(self) -> Work:
        """Bytes of weight, tokens and outputs up to 64 tokens, floating-point operations of more."""
        num_outputs, num_inputs = LAYERS[self.layer]
        if len(self.x) > 64:
            return Work(flops=2 * len(self.x) * num_inputs * num_outputs)
        weight = {"bf16": 2.0, "int4": 0.5}.get(self.kind, 1.0) * num_inputs * num_outputs
        return Work(weight + len(self.x) * (num_inputs * (1 if self.kind in EIGHT_BITS else 2) + num_outputs * 2))


def quantized(kind: str, weight: Tensor) -> tuple[Tensor, ...]:
    """A weight in one kind, as the kernels read it."""
    if kind == "bf16":
        return (weight,)
    if kind == "int4":
        packed, scale, _ = quantize_weight_int4(weight, 128)
        return interleave_int4(packed), scale
    values, scale = quantize_weight(weight, EIGHT_BITS[kind])
    return values, scale.float()


def random(*shape: int) -> Tensor:
    """Random values, drawn on the CPU: torch 2.11 refused to draw on the GPU between captures."""
    return torch.randn(shape).to(DEVICE, torch.bfloat16)


def random_weight(layer: str) -> Tensor:
    """A weight of the layer's shape."""
    return random(*LAYERS[layer]) * 0.02


def cases(layer: str, kinds: Sequence[str], num_tokens: Sequence[int]) -> Iterator[Case]:
    """All cases of a layer."""
    weight = random_weight(layer)
    for kind in kinds:
        one = quantized(kind, weight)
        num_copies = min(48, math.ceil(COLD_BYTES / sum(x.nbytes for x in one)))
        copies = [tuple(x.clone() for x in one) for _ in range(num_copies)]
        for count in num_tokens:
            x = random(count, LAYERS[layer][1])
            bits = EIGHT_BITS.get(kind)
            yield Case(kind, layer, x, (x,) if bits is None else quantize_activation_reference(x, bits), copies)


def time_over(copies: list[Any], run: Callable[[Any], object]) -> float:
    """Microseconds of `run` on one of the copies, taken in turn."""
    turns = cycle(copies)
    return graph_ms(lambda: run(next(turns)), repeats=len(copies), replays=5) * 1e3


def layer_rows(kinds: Sequence[str], num_tokens: Sequence[int]) -> Iterator[Row]:
    """Every layer and number of tokens in bf16 and the given kinds, and each path if the model has a choice."""
    measured_ceilings()
    every = [case for layer in LAYERS for case in cases(layer, ("bf16", *kinds), num_tokens)]
    with launch.compile_only(16), torch.no_grad():
        for case in every:
            for path, run in _paths(case).items():
                if path != "library":
                    run()
    for case in every:
        yield from compare(
            case.op, case.shape, _paths(case), (), case.work(), clock=case.clock, expected=case.reference()
        )


def _paths(case: Case) -> dict[str, Callable[[], Tensor]]:
    paths = {"chosen": case.over_copies()}
    if case.kind != "bf16" and len(case.x) >= 32:
        paths |= {path: through(path, case.over_copies()) for path in ("triton", "library")}
    return paths


def tuned(
    kinds: Sequence[str], num_tokens: Sequence[int], table: dict[Any, Any], settings: Callable[[Case], Iterable[Any]]
) -> Iterator[Row]:
    """Sweep the entries of a table for every layer and number of tokens. `settings`: entries to try for a case."""
    for layer in LAYERS:
        for case in cases(layer, kinds, num_tokens):
            run = through("triton", case.over_copies())
            yield from sweep(case.op, case.shape, run, table, settings(case), (), case.work(), clock=case.clock)


def split_tiles(case: Case, tiles: dict[int, tuple[tuple[int, ...], ...]]) -> Iterator[SplitTiles]:
    """Tiles of a tensor-core kernel for a case, each with one to four programs per multiprocessor.

    `tiles`: tokens of a tile to outputs and inputs of a tile, warps and stages. Programs decide the number of splits.
    """
    block_t = max(16, len(case.x))
    for (n, d, warps, stages), programs in product(tiles[block_t], (1, 2, 3, 4)):
        yield SplitTiles(
            block_t=block_t, block_n=n, block_d=d, num_warps=warps, num_stages=stages, programs_per_sm=programs
        )


def vector_tiles(
    case: Case, tiles: dict[bool, tuple[tuple[int, int], ...]]
) -> Iterator[dict[tuple[bool, bool], VectorTiles]]:
    """Entries of a kernel for one or two tokens.

    `tiles`: outputs of a program and warps, by whether there are more than 4096 inputs.
    """
    num_outputs, num_inputs = LAYERS[case.layer]
    key = num_inputs > 4096, num_outputs > 8192
    return ({key: VectorTiles(*one)} for one in tiles[key[0]] if one[0] <= 16)
