"""Grammar masks over 151936 logits per request, as CUDA-graph replay; `--tune` sweeps the launch settings."""

from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor

from bench.kernels.timing import Row, Work, compare, graph_ms, main, sweep, through
from saccade.kernels import token_mask as module
from saccade.kernels.token_mask import apply_token_mask, apply_token_mask_reference

VOCAB = 151936

_compiled = torch.compile(apply_token_mask_reference, dynamic=False)


def inputs(num_requests: int) -> tuple[Tensor, Tensor, Tensor]:
    """One allowed token in 32."""
    logits = torch.randn(num_requests, VOCAB, device="cuda").bfloat16()
    mask = torch.ones(num_requests, VOCAB // 32, dtype=torch.int32, device="cuda")
    return logits, mask, torch.arange(num_requests, device="cuda")


def work(num_requests: int) -> Work:
    """Mask and logits read once, logits written once."""
    return Work(num_requests * (VOCAB // 8 + VOCAB * 4))


def rows() -> Iterator[Row]:
    """1, 16 and 64 masked requests."""
    paths = {
        "triton": through("triton", apply_token_mask),
        "torch": apply_token_mask_reference,
        "torch.compile": _compiled,
    }
    for num_requests in (1, 16, 64):
        shape = f"{num_requests} x {VOCAB}"
        yield from compare("token_mask", shape, paths, inputs(num_requests), work(num_requests), clock=graph_ms)


def tune() -> Iterator[Row]:
    """Launch settings for 64 requests."""
    run, pairs = through("triton", apply_token_mask), product((16, 32, 64, 128), (2, 4, 8))
    settings = [{"_WORDS": words, "_NUM_WARPS": num_warps} for words, num_warps in pairs]
    yield from sweep("token_mask", f"64 x {VOCAB}", run, vars(module), settings, inputs(64), work(64))


if __name__ == "__main__":
    main(rows, tune)
