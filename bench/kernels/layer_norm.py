"""Layer norm at the widths of vision towers: torch's kernel beside torch.compile of the reference and Liger."""

from collections.abc import Iterator

import torch
from torch import Tensor

from bench.kernels.timing import Row, Work, compare, graph_ms, main, peer, through
from saccade.kernels.layer_norm import layer_norm, layer_norm_reference

SHAPES = [(36864, 1280), (16384, 1152), (16384, 4096)]
EPS = 1e-6

_compiled_reference = torch.compile(layer_norm_reference, dynamic=False)


def _compiled(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return _compiled_reference(x, weight, bias, EPS)


def _liger(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return peer("liger_kernel.transformers.functional", "liger_layer_norm")(x, weight, bias, EPS)


def rows() -> Iterator[Row]:
    """Forward reads x and writes y; backward reads x and dy and writes dx."""
    paths = {"library": through("library", layer_norm, eps=EPS), "torch.compile": _compiled, "liger": _liger}
    for num_rows, dim in SHAPES:
        x = torch.randn(num_rows, dim, device="cuda", dtype=torch.bfloat16)
        weight, bias = (torch.randn(dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        size = x.numel() * 2
        yield from compare(
            "layer_norm",
            f"{num_rows} x {dim}",
            paths,
            (x, weight, bias),
            Work(2 * size),
            Work(3 * size),
            clock=graph_ms,
        )


if __name__ == "__main__":
    main(rows)
