"""Linear layers on a CPU: prepacked weights beside torch's own (MKL for fp32), at the shapes of a small model.

    python -m bench.kernels.linear [--threads 2] [--dtype float32]

The best of many runs, so that other work on the machine disturbs little; weights larger than the cache are read from memory. The share is
of what a product of 2048 cubed reaches.
"""

import argparse
import time
from collections.abc import Callable

import torch

from saccade.kernels.linear import linear, linear_reference, prepack

SHAPES = {
    "gate and up": (896, 4864),
    "down": (2432, 896),
    "qkv": (896, 1152),
    "vision qkv": (512, 1536),
    "head": (896, 151936),
}
TOKENS = (1, 8, 64, 220, 576)


def best_seconds(run: Callable[[], object], budget_s: float = 0.2) -> float:
    """The fastest of the runs that fit in the budget."""
    run()
    best, end = float("inf"), time.perf_counter() + budget_s
    while time.perf_counter() < end:
        begin = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - begin)
    return best


@torch.inference_mode()
def main() -> None:
    """Print a line per layer and number of tokens."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    options = parser.parse_args()
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
            if name == "head" and num_tokens > 8:  # of a prompt only the last token is sampled from
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
