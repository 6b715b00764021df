"""Packed attention at the shapes of the anchors: every path that can serve a shape, forward and backward.

FLOPs are those of the visible pairs: 4 x pairs x heads x head dim forward, 2.5 times as many backward; a causal mask
halves them. Vision windows are bound by memory, and their rate is in bytes: 4 tensors of q's size in forward, 7 in
backward. `--tune` sweeps the tiles of every kernel.
"""

import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch

from bench.kernels.timing import Row, Work, compare, graph_ms, main, sweep
from saccade.kernels import _attention_tiled as tiled
from saccade.kernels import _attention_window as window
from saccade.kernels import attention as module
from saccade.kernels._attention_tiled import AttentionTiles
from saccade.kernels.rope import rope


@functools.cache
def _cu_seqlens(lengths: tuple[int, ...]) -> torch.Tensor:
    """The cumulative lengths, made once: the copy to the GPU is not timed."""
    return torch.tensor([0, *lengths], device="cuda").cumsum(0).int()


class Case(NamedTuple):
    """Lengths of the segments and heads of one shape."""

    lengths: tuple[int, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    causal: bool

    def inputs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Random q, k, v in bf16."""
        num_tokens = sum(self.lengths)
        sizes = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        q, k, v = (torch.randn(num_tokens, n, self.head_dim, device="cuda", dtype=torch.bfloat16) for n in sizes)
        return q, k, v

    def call(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> module._Call:
        """The call of `attention`."""
        cu_seqlens = _cu_seqlens(self.lengths)
        longest = max(self.lengths)
        return module._Call(q, k, v, cu_seqlens, cu_seqlens, longest, longest, self.causal, None)

    @property
    def flops(self) -> float:
        """Work of the forward pass."""
        pairs = sum(n * n for n in self.lengths) * (0.5 if self.causal else 1.0)
        return 4.0 * pairs * self.num_heads * self.head_dim

    @property
    def work(self) -> tuple[Work, Work]:
        """Forward and backward."""
        if max(self.lengths) <= 64:
            size = 2.0 * sum(self.lengths) * self.num_heads * self.head_dim
            return Work(num_bytes=4 * size), Work(num_bytes=7 * size)
        return Work(flops=self.flops), Work(flops=2.5 * self.flops)


def _ragged(low: int, high: int, total: int, step: int = 1) -> tuple[int, ...]:
    """Lengths in [low, high], always the same, that sum to `total`."""
    generator, lengths = torch.Generator().manual_seed(0), []
    while (left := total - sum(lengths)) > 0:
        length = int(torch.randint(low // step, high // step + 1, (), generator=generator)) * step
        lengths.append(min(length, left))
    return tuple(lengths)


CASES = {
    "text 16 x 1024": Case((1024,) * 16, 16, 2, 128, True),
    "text ragged 64..2048": Case(_ragged(64, 2048, 16384), 16, 2, 128, True),
    "text 1 x 4096": Case((4096,), 16, 2, 128, True),
    "text 1 x 16384": Case((16384,), 16, 2, 128, True),
    "vision 16 x 2304, d80": Case((2304,) * 16, 16, 16, 80, False),
    "vision ragged 256..3072, d80": Case(_ragged(256, 3072, 36864, 4), 16, 16, 80, False),
    "vision 32 x 729, d72": Case((729,) * 32, 16, 16, 72, False),
    "windows 576 x 64, d80": Case((64,) * 576, 16, 16, 80, False),
    "windows ragged 16..64, d80": Case(_ragged(16, 64, 36864, 16), 16, 16, 80, False),
}


def rows() -> Iterator[Row]:
    """Every candidate of each shape; `attention` uses the first that is listed."""
    for name, case in CASES.items():
        q, k, v = case.inputs()
        able = [path for path, candidate in module._CANDIDATES.items() if candidate.can_serve(case.call(q, k, v))]
        chosen = module._candidates(case.call(q, k, v))[0]
        paths = {
            f"{path}{' (chosen)' if path == chosen else ''}": lambda q, k, v, path=path, case=case: module._CANDIDATES[
                path
            ].run(case.call(q, k, v))
            for path in able
        }
        yield from compare("attention", name, paths, (q, k, v), *case.work, clock=graph_ms)
        if max(case.lengths) <= 64:
            yield from _rotated(name, case)


def _rotated(name: str, case: Case) -> Iterator[Row]:
    """Windows with RoPE: in the kernel that attends, and before it."""
    angles = torch.randn(sum(case.lengths), case.head_dim // 2, device="cuda")
    table, cu_seqlens, longest = (angles.cos(), angles.sin()), _cu_seqlens(case.lengths), max(case.lengths)

    def fused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return module.rope_attention(q, k, v, table, cu_seqlens, max_seqlen=longest, causal=False)

    def parts(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        bounds = {"max_seqlen_q": longest, "max_seqlen_k": longest, "causal": False}
        return module.attention(*rope(q, k, table), v, cu_seqlens, cu_seqlens, **bounds)

    paths = {"rotated as loaded": fused, "rope, then attention": parts}
    yield from compare("rope_attention", name, paths, case.inputs(), case.work[0], clock=graph_ms)


TMA_TILES = ((128, 64, 8, 2), (128, 64, 8, 3), (128, 128, 8, 2), (128, 64, 4, 2), (64, 64, 4, 2), (64, 64, 4, 3))
PLAIN_TILES = (
    *((64, 64, 4, 2), (32, 64, 4, 3), (64, 128, 8, 2), (32, 128, 8, 3)),
    *((128, 64, 8, 2), (128, 64, 8, 3), (128, 128, 8, 2), (128, 32, 8, 3)),
)
TILES = {
    "forward": [
        *(AttentionTiles(*one, tma=True) for one in TMA_TILES),
        *(AttentionTiles(*one, overlap=True, tma=True) for one in TMA_TILES[:3]),
        *(AttentionTiles(*one, max_registers=128, tma=True) for one in (TMA_TILES[0], (128, 32, 8, 3))),
        *(AttentionTiles(*one) for one in PLAIN_TILES),
    ],
    "query_gradient": [AttentionTiles(*one, tma=tma) for tma in (True, False) for one in (*TMA_TILES, (128, 32, 8, 3))],
    "key_gradient": [AttentionTiles(*one) for one in PLAIN_TILES],
}
"""Settings whose accumulators about fit in registers, as compiled for sm_90."""
WINDOW_TILES = ((1, 4, 1), (2, 4, 1), (2, 4, 2), (4, 4, 2), (4, 4, 3), (1, 8, 1), (2, 8, 2), (4, 8, 2))


def tune() -> Iterator[Row]:
    """Tiles of every kernel; FLOPs are those that it executes."""
    for name in ("text ragged 64..2048", "vision ragged 256..3072, d80"):
        case = CASES[name]
        (q, k, v), cu_seqlens = case.inputs(), _cu_seqlens(case.lengths)
        mask = cu_seqlens, cu_seqlens, case.causal, None
        out, lse = tiled.forward(q, k, v, *mask)
        d_out = torch.randn_like(out)
        _, delta = tiled.query_gradient(q, k, v, out, d_out, lse, *mask)
        kernels = {
            "forward": (1.0, functools.partial(tiled.forward, q, k, v, *mask)),
            "query_gradient": (1.5, functools.partial(tiled.query_gradient, q, k, v, out, d_out, lse, *mask)),
            "key_gradient": (2.0, functools.partial(tiled.key_gradient, q, k, v, d_out, lse, delta, *mask)),
        }
        width = 96 if case.head_dim <= 96 else 128
        for kernel, (share, run) in kernels.items():
            settings, work = [{(kernel, width): one} for one in TILES[kernel]], Work(flops=share * case.flops)
            yield from sweep(kernel, name, run, tiled.CONFIGS, settings, (), work)
    for name in ("windows 576 x 64, d80", "windows ragged 16..64, d80"):
        case, cu_seqlens = CASES[name], _cu_seqlens(CASES[name].lengths)
        run = functools.partial(_windows, cu_seqlens, max(case.lengths))
        for kernel, op, work in (("forward", "window", case.work[:1]), ("backward", "window backward", case.work)):
            window_settings = [{kernel: window.WindowTiles(*one)} for one in WINDOW_TILES]
            results = sweep("window", name, run, window.CONFIGS, window_settings, case.inputs(), *work)
            yield from (result for result in results if result["op"] == op)


def _windows(cu_seqlens: torch.Tensor, longest: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return window.window_attention(q, k, v, cu_seqlens, cu_seqlens, longest, longest)


if __name__ == "__main__":
    main(rows, tune)
