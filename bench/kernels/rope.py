"""RoPE of text and vision at the sizes of the anchors, out of place and in place; `--tune` sweeps launch settings."""

from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor

from bench.kernels.timing import Row, Work, compare, graph_ms, main, sweep, through
from saccade.kernels import rope as module
from saccade.kernels.rope import CosSin, rope, rope_reference

CASES = {"text": (16384, 16, 2, 128), "vision": (36864, 16, 16, 80), "decode": (256, 16, 2, 128)}


def _inputs(num_tokens: int, num_heads: int, num_kv_heads: int, head_dim: int) -> tuple[Tensor, Tensor, CosSin]:
    q = torch.randn(num_tokens, num_heads, head_dim, device="cuda", dtype=torch.bfloat16)
    k = torch.randn(num_tokens, num_kv_heads, head_dim, device="cuda", dtype=torch.bfloat16)
    angles = torch.rand(num_tokens, head_dim // 2, device="cuda")
    return q, k, (angles.cos(), angles.sin())


def rows() -> Iterator[Row]:
    """q and k are read and written once; the table is read once."""
    compiled = torch.compile(rope_reference, dynamic=False)
    for name, case in CASES.items():
        q, k, table = _inputs(*case)
        work = Work(2 * 2 * (q.numel() + k.numel()) + 8 * table[0].numel())
        paths = {
            "triton": through("triton", rope, table=table),
            "torch": lambda q, k, table=table: rope_reference(q, k, table),
            "torch.compile": lambda q, k, table=table: compiled(q, k, table),
        }
        shape = f"{name} {' x '.join(map(str, case))}"
        yield from compare("rope", shape, paths, (q, k), work, work, clock=graph_ms)


def tune() -> Iterator[Row]:
    """Tokens and warps per program."""
    settings = [{"_CONFIG": module._Launch(*x)} for x in product((1, 2, 4), (1, 2, 4, 8))]
    for case in ("text", "vision"):
        q, k, table = _inputs(*CASES[case])
        work = Work(4 * (q.numel() + k.numel()) + 8 * table[0].numel())
        yield from sweep("rope", case, through("triton", rope, table=table), vars(module), settings, (q, k), work)


if __name__ == "__main__":
    main(rows, tune)
