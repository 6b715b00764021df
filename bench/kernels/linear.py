"""Linear layers on a CPU, prepacked and by torch (MKL for fp32), at the shapes of a small model; on a GPU, with and
without a workspace.

    python -m bench.kernels.linear [--threads 2] [--dtype float32]
    python -m bench.kernels.linear --gpu

The best of many runs is reported, so that other work on the machine disturbs little; weights larger than the cache are
read from memory. The share is that of a product of 2048 cubed. On a GPU: the four products of a block of the 3B shape,
us from a graph over several copies of the weights.
"""

import argparse
import time
from collections.abc import Callable

import torch

from bench.kernels.timing import graph_ms
from saccade.kernels.linear import linear, linear_reference, prepack

SHAPES = {
    "gate and up": (896, 4864),
    "down": (2432, 896),
    "qkv": (896, 1152),
    "vision qkv": (512, 1536),
    "head": (896, 151936),
}
TOKENS = (1, 8, 64, 220, 576)
GPU_BLOCKS = {
    "tower": (((1280, 3840), (1280, 1280), (1280, 6848), (3424, 1280)), True, (256, 1024, 2304, 4992)),
    "decoder": (((2048, 2560), (2048, 2048), (2048, 22016), (11008, 2048)), False, (256, 512, 640, 1024, 2048, 4096)),
}
"""Inputs and outputs of each product, whether they have a bias, and numbers of tokens."""
_NUM_COPIES = 3


def best_seconds(run: Callable[[], object], budget_s: float = 0.2) -> float:
    """The fastest of the runs that fit in the budget."""
    run()
    best, end = float("inf"), time.perf_counter() + budget_s
    while time.perf_counter() < end:
        begin = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - begin)
    return best


def gpu_rows() -> None:
    """Print a line per block and number of tokens."""
    for name, (shapes, has_bias, sizes) in GPU_BLOCKS.items():
        layers = [
            (
                torch.randn(n, d, device="cuda", dtype=torch.bfloat16),
                torch.randn(n, device="cuda", dtype=torch.bfloat16),
            )
            for d, n in shapes
            for _ in range(_NUM_COPIES)
        ]
        for num_tokens in sizes:
            inputs = {d: torch.randn(num_tokens, d, device="cuda", dtype=torch.bfloat16) for d, _ in shapes}

            def run(product: Callable[..., object], inputs: dict[int, torch.Tensor] = inputs) -> None:
                for weight, bias in layers:  # noqa: B023  called at once
                    product(inputs[weight.shape[1]], weight, bias if has_bias else None)  # noqa: B023

            torch_us, ours_us = (
                1e3 * graph_ms(lambda product=product: run(product), repeats=2) / _NUM_COPIES
                for product in (linear_reference, linear)
            )
            print(f"{name:<8} {num_tokens:>5} tokens: {torch_us:7.1f} us by torch, {ours_us:7.1f} without a workspace")


@torch.inference_mode()
def main() -> None:
    """Print a line per layer and number of tokens."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--gpu", action="store_true")
    options = parser.parse_args()
    if options.gpu:
        gpu_rows()
        return
    torch.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype)
    square = torch.randn(2048, 2048, dtype=dtype)
    packed_square = prepack(square)
    ceiling = 2 * 2048**3 / best_seconds(lambda: linear(square, packed_square), 2.0)
    print(f"{options.threads} threads, {options.dtype}; 2048 cubed: {ceiling / 1e9:.0f} GFLOP/s")
    for name, (num_inputs, num_outputs) in SHAPES.items():
        weight = torch.randn(num_outputs, num_inputs, dtype=dtype)
        packed = prepack(weight)
        for num_tokens in TOKENS:
            if name == "head" and num_tokens > 8:  # only the last token of a prompt is sampled from
                continue
            x, flops = torch.randn(num_tokens, num_inputs, dtype=dtype), 2 * num_tokens * weight.numel()
            plain_s = best_seconds(lambda: linear_reference(x, weight))  # noqa: B023  called at once
            packed_s = best_seconds(lambda: linear(x, packed))  # noqa: B023
            print(
                f"{name:<12} {num_tokens:>4} x {num_inputs} x {num_outputs:<7} {flops / plain_s / 1e9:6.0f} -> "
                f"{flops / packed_s / 1e9:4.0f} GFLOP/s, {flops / packed_s / ceiling:4.0%}, "
                f"{weight.nbytes / packed_s / 1e9:5.1f} GB/s of weights"
            )


if __name__ == "__main__":
    main()
