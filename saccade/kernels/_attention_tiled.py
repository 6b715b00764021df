# mypy: allow-untyped-decorators
"""Tiled Triton kernels of packed attention; `attention.py` has the specification and the reference.

One program per tile of queries (forward, dQ) or of keys (dK and dV), which loops over tiles of the other side. Forward
saves out and, per query and head, the base-2 log-sum-exp in fp32. Backward is two kernels: dQ, which also writes delta
= sum_k out dO, then dK and dV: 7 matrix products instead of the 5 with atomics, but deterministic. Segment lengths stay
on the device: see `locate`.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from saccade.kernels import launch
from saccade.kernels._attention_tile import LISTED_TILE
from saccade.kernels._attention_tiled_kernels import forward_kernel, key_gradient_kernel, query_gradient_kernel
from saccade.kernels.launch import triton


class AttentionTiles(NamedTuple):
    """Tile sizes and compile options of a tiled kernel."""

    block_m: int
    """Queries per tile."""
    block_n: int
    """Keys per tile."""
    num_warps: int
    num_stages: int
    """Tiles in flight between memory and the tensor cores."""
    overlap: bool = False
    """Forward: compute the scores of the next keys during the softmax of the current ones."""
    tma: bool = False
    """Load through TMA (Hopper and later) instead of pointers."""
    max_registers: int | None = None
    """Cap per thread; 128 lets two programs of 8 warps share a multiprocessor."""


# Keyed by kernel and head dim rounded up to 64, 96, 128 or 256. Those of 96 and 128 are measured
# (bench/kernels/attention.py --tune, H200): forward of ragged causal text with head dim 128 runs at 372 TFLOP/s, dQ at
# 415, dK and dV at 246. Those of 64 and 256 follow from register counts as compiled for sm_90.
CONFIGS: dict[tuple[str, int], AttentionTiles] = {
    ("forward", 64): AttentionTiles(128, 128, 8, 2, overlap=True, tma=True),
    ("forward", 96): AttentionTiles(64, 64, 4, 3, tma=True),
    ("forward", 128): AttentionTiles(64, 64, 4, 3, tma=True),
    ("forward", 256): AttentionTiles(128, 64, 8, 2, tma=True),
    ("query_gradient", 64): AttentionTiles(128, 64, 8, 2, tma=True),
    ("query_gradient", 96): AttentionTiles(128, 32, 8, 3),
    ("query_gradient", 128): AttentionTiles(64, 64, 4, 2, tma=True),
    ("query_gradient", 256): AttentionTiles(64, 32, 8, 2, tma=True),
    ("key_gradient", 64): AttentionTiles(64, 128, 8, 2),
    ("key_gradient", 96): AttentionTiles(64, 64, 4, 2),
    ("key_gradient", 128): AttentionTiles(32, 128, 8, 3),
    ("key_gradient", 256): AttentionTiles(32, 64, 8, 2),
}
FP32_TILES = AttentionTiles(32, 32, 8, 1)  # accurate rather than fast: three TF32 products for one


def _tiles(kernel: str, q_THK: Tensor) -> AttentionTiles:
    if q_THK.dtype == torch.float32:
        return FP32_TILES
    tiles = CONFIGS[kernel, next(width for width in (64, 96, 128, 256) if q_THK.shape[2] <= width)]
    return tiles if launch.has_tma(q_THK.device) else tiles._replace(tma=False)


def chunks(head_dim: int) -> dict[str, int]:
    """Split a head dim into powers of two: 128 = 128 + 0, 80 = 64 + 16, 72 = 64 + 16 of which 8 are masked."""
    main = 1 << (head_dim.bit_length() - 1)
    rest = head_dim - main
    tail = max(16, triton.next_power_of_2(rest)) if rest else 0
    return {"HEAD_DIM": head_dim, "MAIN": main, "TAIL": tail}


def rows_of(x_THK: Tensor) -> Tensor:
    """`x_THK` with adjacent heads and 16-byte aligned rows less than 2^24 elements apart, as the kernels require.

    A view of fused QKV satisfies that already. The bound keeps offsets within a tile in 32 bits.
    """
    row_stride, head_stride, stride = x_THK.stride()
    is_packed = stride == 1 and head_stride == x_THK.shape[2]
    is_aligned = 0 < row_stride < 2**24 and row_stride % 8 == 0 and (launch.is_dry_run() or x_THK.data_ptr() % 16 == 0)
    return x_THK if is_packed and is_aligned else x_THK.clone(memory_format=torch.contiguous_format)


def _streamed(x_THK: Tensor, num_rows: int, tma: bool) -> tuple[object, object]:
    """Kernel arguments to load x, `num_rows` at a time: TMA descriptors of its two chunks, or x itself."""
    if not tma or launch.is_dry_run():
        return x_THK, x_THK
    from triton.tools.tensor_descriptor import TensorDescriptor

    num_tokens, num_heads, head_dim = x_THK.shape
    columns = chunks(head_dim)
    shape, strides = [num_tokens, num_heads * head_dim], [x_THK.stride(0), 1]
    main = TensorDescriptor(x_THK, shape, strides, [num_rows, columns["MAIN"]])
    return main, TensorDescriptor(x_THK, shape, strides, [num_rows, columns["TAIL"]]) if columns["TAIL"] else main


def _compile_options(tiles: AttentionTiles) -> dict[str, int]:
    options = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
    return options if tiles.max_registers is None else options | {"maxnreg": tiles.max_registers}


def scales(head_dim: int) -> tuple[float, float]:
    """The softmax scale, and the same for base 2: e^(scale s) = 2^(scale_log2 s)."""
    return head_dim**-0.5, head_dim**-0.5 * math.log2(math.e)


def _num_tiles(x: Tensor, cu_seqlens: Tensor, block: int, is_listed: bool) -> tuple[int, int]:
    """(tiles of the grid, segments): see `locate`."""
    if is_listed:
        return len(cu_seqlens) * (LISTED_TILE // block), 0
    num_segments = len(cu_seqlens) - 1
    return len(x) // block + num_segments, num_segments


def forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, causal: bool, window: int | None,
    *, is_listed: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out and its base-2 log-sum-exp [H, T]. `is_listed`: `cu_seqlens_q` is a list of tiles of queries."""
    _, num_heads, head_dim = q.shape
    tiles = _tiles("forward", q)
    num_tiles, num_segments = _num_tiles(q, cu_seqlens_q, tiles.block_m, is_listed)
    out = q.new_empty(q.shape)
    lse = q.new_empty(num_heads, len(q), dtype=torch.float32)
    forward_kernel[(num_tiles * num_heads,)](
        q,
        *_streamed(k, tiles.block_n, tiles.tma),
        *_streamed(v, tiles.block_n, tiles.tma),
        out,
        lse,
        cu_seqlens_q,
        cu_seqlens_k,
        *(x.stride(0) for x in (q, k, v, out, lse)),
        num_segments,
        scales(head_dim)[1],
        NUM_HEADS=num_heads,
        GROUP=num_heads // k.shape[1],
        **chunks(head_dim),
        CAUSAL=causal,
        WINDOW=window,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        OVERLAP=tiles.overlap,
        TMA=tiles.tma,
        LISTED=is_listed,
        **_compile_options(tiles),
    )
    return out, lse


def query_gradient(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    d_out: Tensor,
    lse: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    causal: bool,
    window: int | None,
    *,
    is_listed: bool = False,
) -> tuple[Tensor, Tensor]:
    """dQ, and delta [H, T] for the key gradient. `is_listed`: `cu_seqlens_q` is a list of tiles of queries."""
    _, num_heads, head_dim = q.shape
    tiles = _tiles("query_gradient", q)
    num_tiles, num_segments = _num_tiles(q, cu_seqlens_q, tiles.block_m, is_listed)
    d_q, delta = q.new_empty(q.shape), torch.empty_like(lse)
    query_gradient_kernel[(num_tiles * num_heads,)](
        q,
        *_streamed(k, tiles.block_n, tiles.tma),
        *_streamed(v, tiles.block_n, tiles.tma),
        out,
        d_out,
        lse,
        delta,
        d_q,
        cu_seqlens_q,
        cu_seqlens_k,
        *(x.stride(0) for x in (q, k, v, out, d_out, d_q, lse)),
        num_segments,
        *scales(head_dim),
        NUM_HEADS=num_heads,
        GROUP=num_heads // k.shape[1],
        **chunks(head_dim),
        CAUSAL=causal,
        WINDOW=window,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        TMA=tiles.tma,
        LISTED=is_listed,
        **_compile_options(tiles),
    )
    return d_q, delta


def key_gradient(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    d_out: Tensor,
    lse: Tensor,
    delta: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    causal: bool,
    window: int | None,
    *,
    is_listed: bool = False,
) -> tuple[Tensor, Tensor]:
    """dK and dV. If tiles times key heads do not fill the GPU twice, the query heads of a group are split as well.

    `is_listed`: `cu_seqlens_q` has the rows of queries, and `cu_seqlens_k` a list of tiles of keys, not of all keys.
    """
    _, num_kv_heads, head_dim = k.shape
    tiles = _tiles("key_gradient", q)
    group = q.shape[1] // num_kv_heads
    num_tiles, num_segments = _num_tiles(k, cu_seqlens_k, tiles.block_n, is_listed)
    num_programs = num_tiles * num_kv_heads
    splits = 1
    while group % (2 * splits) == 0 and num_programs * splits < 2 * launch.num_sms(q.device):
        splits *= 2
    partial_dtype = k.dtype if splits == 1 else torch.float32
    allocate = k.new_zeros if is_listed else k.new_empty
    d_k, d_v = (allocate((splits, *k.shape), dtype=partial_dtype) for _ in range(2))
    key_gradient_kernel[(num_programs * splits,)](
        q,
        k,
        v,
        d_out,
        lse,
        delta,
        d_k,
        d_v,
        cu_seqlens_q,
        cu_seqlens_k,
        *(x.stride(0) for x in (q, k, v, d_out, d_k[0], d_v[0], d_k, lse)),
        num_segments,
        *scales(head_dim),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        SPLITS=splits,
        **chunks(head_dim),
        CAUSAL=causal,
        WINDOW=window,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        LISTED=is_listed,
        **_compile_options(tiles),
    )
    return (d_k[0], d_v[0]) if splits == 1 else (d_k.sum(0).to(k.dtype), d_v.sum(0).to(k.dtype))


class _TiledAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, *mask: Any) -> Tensor:
        q, k, v = rows_of(q), rows_of(k), rows_of(v)
        out, lse = forward(q, k, v, cu_q, cu_k, *mask)
        ctx.save_for_backward(q, k, v, cu_q, cu_k, out, lse)
        ctx.mask = mask
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, cu_q, cu_k, out, lse = ctx.saved_tensors
        d_out = rows_of(d_out)
        d_q, delta = query_gradient(q, k, v, out, d_out, lse, cu_q, cu_k, *ctx.mask)
        d_k, d_v = key_gradient(q, k, v, d_out, lse, delta, cu_q, cu_k, *ctx.mask)
        return d_q, d_k, d_v, None, None, None, None


def can_tile(q_THK: Tensor) -> bool:
    """Whether the kernels take this dtype and head dim."""
    head_dim = q_THK.shape[2]
    return q_THK.dtype in (torch.bfloat16, torch.float16, torch.float32) and head_dim % 8 == 0 and 16 <= head_dim <= 256


def tiled_attention(
    q_THK: Tensor,
    k_SGK: Tensor,
    v_SGK: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    causal: bool,
    window: int | None,
) -> Tensor:
    """`attention` for any mask and any lengths."""
    out: Tensor = _TiledAttention.apply(  # type: ignore[no-untyped-call]
        q_THK, k_SGK, v_SGK, cu_seqlens_q, cu_seqlens_k, causal, window
    )
    return out
