"""Cases of the quantized linear layers: the four layers of a 3B decoder block in bf16, int8, fp8 and int4.

A case is compared with its reference first. It is timed as CUDA-graph replays over several copies of the weight, so
that none is in L2.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.kernels.timing import Row, Work, failed, graph_ms, measured_ceilings, row
from saccade.kernels import launch
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
BOUND = 8e-3
EPS = 1e-6
DEVICE = "cuda"
Result = dict[str, Any]


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


def relative_rms(actual: Tensor, expected: Tensor) -> float:
    """RMS of the difference over the RMS of what was expected."""
    return ((actual.float() - expected.float()).square().mean() / expected.float().square().mean()).sqrt().item()


def time_over(copies: list[Any], run: Callable[[Any], object]) -> float:
    """Microseconds of `run` on one of the copies, taken in turn."""
    turns = cycle(copies)
    return graph_ms(lambda: run(next(turns)), repeats=len(copies), replays=5) * 1e3


def measure(case: Case, run: Callable[[tuple[Tensor, ...]], Tensor], expected: Tensor, **labels: object) -> Result:
    """Check, then time. A run that fails keeps its reason instead of a time."""
    result: Result = {"kind": case.kind, "layer": case.layer, "tokens": len(case.x), **labels}
    try:
        # Twice: the second run finds the counters of the splits as the first left them.
        error = max(relative_rms(run(case.copies[0]), expected) for _ in range(2))
        if not error <= BOUND:
            return result | {"failed": f"relative RMS error {error:.1e}"}
        return result | {"us": round(time_over(case.copies, run), 2)}
    except Exception as error:  # compilers fail in many ways; the others are measured
        return result | {"failed": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:90]}"}


def layer_rows(kinds: Sequence[str], num_tokens: Sequence[int]) -> Iterator[Row]:
    """Every layer and number of tokens in bf16 and the given kinds, and each path if the model has a choice."""
    measured_ceilings()
    every = [case for layer in LAYERS for case in cases(layer, ("bf16", *kinds), num_tokens)]
    _compile(every)
    with torch.no_grad():
        for case in every:
            expected = case.reference()
            for path, run in _paths(case).items():
                yield _row(case, path, measure(case, run, expected))


def _paths(case: Case) -> dict[str, Callable[[tuple[Tensor, ...]], Tensor]]:
    paths: dict[str, Callable[[tuple[Tensor, ...]], Tensor]] = {"chosen": case.call}
    if case.kind != "bf16" and len(case.x) >= 32:
        paths |= {"triton": _through("triton", case.call), "library": _through("library", case.call)}
    return paths


def _through(path: launch.Path, run: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def forced(weight: tuple[Tensor, ...]) -> Tensor:
        with launch.forced(path):
            return run(weight)

    return forced


def _row(case: Case, path: str, result: Result) -> Row:
    num_outputs, num_inputs = LAYERS[case.layer]
    op, shape = f"linear {case.kind}", f"{case.layer} {len(case.x)} x {num_inputs} -> {num_outputs}"
    if "us" not in result:
        return failed(op, shape, path, RuntimeError(result["failed"]))
    return row(op, shape, path, result["us"] / 1e3, case.work())


def _compile(every: list[Case]) -> None:
    """Compile all kernels in parallel."""
    begin = time.monotonic()
    with launch.compile_only(16), torch.no_grad():
        for case in every:
            for path, run in _paths(case).items():
                if path != "library":
                    run(case.copies[0])
    print(f"compiled in {time.monotonic() - begin:.0f} s", flush=True)
