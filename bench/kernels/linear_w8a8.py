"""Linear layers in int8 and fp8 for four tokens and more, with bf16 for comparison.

`--cpu` times int8 layers on this CPU instead: quantized tokens by the dequantized weight (the reference) and by int8
products. `--tune` sweeps the tiles.
"""

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.kernels import timing
from bench.kernels.quantized import EIGHT_BITS, MANY_TOKENS, Case, layer_rows, split_tiles, tuned
from saccade.device import resolve_device
from saccade.kernels import linear_w8a8 as module
from saccade.kernels.linear_w8a8 import linear_w8a8, linear_w8a8_reference
from saccade.model.weight_rounding import quantize_weight

CPU_LAYERS = ((896, 896), (4864, 896), (11008, 2048))
"""Outputs and inputs."""
TILES = {
    16: ((64, 256, 4, 3), (64, 256, 4, 4), (128, 256, 4, 3), (64, 128, 4, 6)),
    32: ((64, 256, 4, 3), (64, 128, 4, 6), (128, 128, 4, 4)),
    64: ((64, 128, 4, 4), (64, 256, 4, 3), (128, 128, 4, 4), (128, 128, 8, 4)),
}


def rows() -> Iterator[timing.Row]:
    """Four tokens and more."""
    return layer_rows(tuple(EIGHT_BITS), MANY_TOKENS)


def tune() -> Iterator[timing.Row]:
    """Tiles for 8 to 64 tokens."""

    def entries(case: Case) -> Iterator[dict[int, object]]:
        return (dict.fromkeys((16, 32, 64), one) for one in split_tiles(case, TILES))

    return tuned(tuple(EIGHT_BITS), (8, 16, 32, 64), module._W8A8_TILES, entries)


def compare_on_cpu(num_threads: int) -> None:
    """Print microseconds of int8 layers, and of fp32 and bf16 for comparison."""
    resolve_device("cpu")
    torch.set_num_threads(num_threads)
    for (outputs, inputs), tokens in product(CPU_LAYERS, (1, 16, 256)):
        weight, x = torch.randn(outputs, inputs), torch.randn(tokens, inputs)
        halves = (x.bfloat16(), weight.bfloat16())
        weight8 = quantize_weight(weight, torch.int8)
        calls = {
            "fp32": lambda x=x, weight=weight: F.linear(x, weight),
            "bf16": lambda halves=halves: F.linear(*halves),
            "reference": lambda x=x, weight8=weight8: linear_w8a8_reference(x, *weight8),
            "int8": lambda x=x, weight8=weight8: linear_w8a8(x, *weight8),
        }
        times = ", ".join(f"{name} {_fastest_us(call):.0f}" for name, call in calls.items())
        print(f"{inputs} x {outputs}, {tokens} tokens: {times}", flush=True)


def _fastest_us(call: Callable[[], Tensor], seconds: float = 1.0) -> float:
    """The fastest of the calls within a time: other processes only slow them down."""
    begin, times = time.perf_counter(), [math.inf]
    while len(times) < 4 or time.perf_counter() < begin + seconds:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return 1e6 * min(times)


def main() -> None:
    """Time the layers on a GPU, or on a CPU with --cpu."""
    if "--cpu" not in sys.argv:
        timing.main(rows, tune)
        return
    parser = argparse.ArgumentParser()
    parser.add_argument("--cpu", action="store_true", required=True)
    parser.add_argument("--threads", type=int, default=2, help="of the CPU")
    compare_on_cpu(parser.parse_args().threads)


if __name__ == "__main__":
    main()
