# mypy: allow-untyped-decorators
"""Window Triton kernels of packed attention: segments of at most 64 tokens, no mask, as many key heads as query heads.

A vision tower has thousands of such windows. A segment is one tile, so the softmax needs no running maximum and
backward saves only q, k and v: it recomputes the softmax, and delta = sum_s p dP replaces the saved output. A program
computes one or several heads of a segment. Memory-bound: 4 tensors of q's size are moved in forward (576 windows of 64
tokens, 16 heads of 80, bf16: 377 MB, 0.09 ms at 4.2 TB/s), 7 in backward (661 MB, 0.16 ms). `rotated_window_attention`
applies RoPE to q and k as it loads them, without gradients: a separate launch would move 4 more tensors.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from saccade.kernels._attention_tile import NO_MAX, add_dot, dot_rows, load_tile, span, store_tile, zero_tile
from saccade.kernels._attention_tiled import can_tile, chunks, rows_of, scales
from saccade.kernels.launch import tl, triton
from saccade.kernels.rope import CosSin


@triton.jit
def _softmax(scores: tl.tensor, num_keys: tl.tensor, scale_log2: tl.tensor, BLOCK_N: tl.constexpr) -> tl.tensor:
    """softmax(scale s) over the first `num_keys` columns, in fp32; zero if there are none."""
    scores = tl.where((tl.arange(0, BLOCK_N) < num_keys)[None, :], scores, float("-inf"))
    maximum = tl.maximum(tl.max(scores, 1) * scale_log2, NO_MAX)
    p = tl.exp2(scores * scale_log2 - maximum[:, None])
    total = tl.sum(p, 1)
    return p * (1.0 / tl.where(total > 0, total, 1.0))[:, None]


@triton.jit
def _forward_kernel(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    out: tl.tensor,
    cu_seqlens_q: tl.tensor,
    cu_seqlens_k: tl.tensor,
    q_stride: tl.tensor,
    k_stride: tl.tensor,
    v_stride: tl.tensor,
    out_stride: tl.tensor,
    scale_log2: tl.float32,
    NUM_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MAIN: tl.constexpr,
    TAIL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """HEADS heads of one segment, in a loop; the next is loaded while one is computed."""
    first_head = tl.program_id(0) % (NUM_HEADS // HEADS) * HEADS
    segment = tl.program_id(0) // (NUM_HEADS // HEADS)
    q_row, num_queries = span(cu_seqlens_q, segment)
    k_row, num_keys = span(cu_seqlens_k, segment)
    if num_queries == 0:
        return
    for head in tl.range(first_head, first_head + HEADS):
        column = head * HEAD_DIM
        q_main, q_last = load_tile(q, q, q_row, 0, num_queries, q_stride, column, BLOCK_M, HEAD_DIM, MAIN, TAIL, False)
        k_main, k_last = load_tile(k, k, k_row, 0, num_keys, k_stride, column, BLOCK_N, HEAD_DIM, MAIN, TAIL, False)
        v_main, v_last = load_tile(v, v, k_row, 0, num_keys, v_stride, column, BLOCK_N, HEAD_DIM, MAIN, TAIL, False)
        p = _softmax(dot_rows(q_main, q_last, k_main, k_last, TAIL), num_keys, scale_log2, BLOCK_N)
        o, o_tail = zero_tile(BLOCK_M, MAIN, TAIL)
        o, o_tail = add_dot(o, o_tail, p, v_main, v_last, TAIL)
        store_tile(out, o, o_tail, q_row, 0, num_queries, out_stride, column, BLOCK_M, HEAD_DIM, MAIN, TAIL)


@triton.jit
def _load_rotated(
    x: tl.tensor, row: tl.tensor, is_inside: tl.tensor, stride: tl.tensor, column: tl.tensor, cos: tl.tensor,
    sin: tl.tensor, F: tl.constexpr, BLOCK: tl.constexpr, BLOCK_F: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """The halves of a head of one segment, rotated as by `rope`: [BLOCK, BLOCK_F] each in x's dtype, zeros past F."""
    pointers = x + row.to(tl.int64) * stride + column + tl.arange(0, BLOCK)[:, None] * stride
    pointers += tl.arange(0, BLOCK_F)[None, :]
    first = tl.load(pointers, mask=is_inside, other=0.0).to(tl.float32)
    second = tl.load(pointers + F, mask=is_inside, other=0.0).to(tl.float32)
    dtype = x.dtype.element_ty
    return (first * cos - second * sin).to(dtype), (second * cos + first * sin).to(dtype)


@triton.jit
def _rotated_kernel(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    out: tl.tensor,
    cu_seqlens: tl.tensor,
    q_stride: tl.tensor,
    k_stride: tl.tensor,
    v_stride: tl.tensor,
    out_stride: tl.tensor,
    scale_log2: tl.float32,
    NUM_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MAIN: tl.constexpr,
    TAIL: tl.constexpr,
    F: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_F: tl.constexpr,
) -> None:
    """HEADS heads of one segment; angles are loaded once. Scores are the sum over the two halves of a head."""
    first_head = tl.program_id(0) % (NUM_HEADS // HEADS) * HEADS
    row, num_tokens = span(cu_seqlens, tl.program_id(0) // (NUM_HEADS // HEADS))
    if num_tokens == 0:
        return
    t, f = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK_F)[None, :]
    is_inside = (t < num_tokens) & (f < F)
    angles = row.to(tl.int64) * F + t * F + f
    cos_TF = tl.load(cos + angles, mask=is_inside, other=0.0)
    sin_TF = tl.load(sin + angles, mask=is_inside, other=0.0)
    for head in tl.range(first_head, first_head + HEADS):
        column = head * HEAD_DIM
        q_first, q_second = _load_rotated(q, row, is_inside, q_stride, column, cos_TF, sin_TF, F, BLOCK, BLOCK_F)
        k_first, k_second = _load_rotated(k, row, is_inside, k_stride, column, cos_TF, sin_TF, F, BLOCK, BLOCK_F)
        v_main, v_last = load_tile(v, v, row, 0, num_tokens, v_stride, column, BLOCK, HEAD_DIM, MAIN, TAIL, False)
        p = _softmax(dot_rows(q_first, q_second, k_first, k_second, BLOCK_F), num_tokens, scale_log2, BLOCK)
        o, o_tail = zero_tile(BLOCK, MAIN, TAIL)
        o, o_tail = add_dot(o, o_tail, p, v_main, v_last, TAIL)
        store_tile(out, o, o_tail, row, 0, num_tokens, out_stride, column, BLOCK, HEAD_DIM, MAIN, TAIL)


@triton.jit
def _backward_kernel(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    d_out: tl.tensor,
    d_q: tl.tensor,
    d_k: tl.tensor,
    d_v: tl.tensor,
    cu_seqlens_q: tl.tensor,
    cu_seqlens_k: tl.tensor,
    q_stride: tl.tensor,
    k_stride: tl.tensor,
    v_stride: tl.tensor,
    d_out_stride: tl.tensor,
    d_q_stride: tl.tensor,
    d_k_stride: tl.tensor,
    d_v_stride: tl.tensor,
    scale: tl.float32,
    scale_log2: tl.float32,
    NUM_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MAIN: tl.constexpr,
    TAIL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """dQ, dK and dV of HEADS heads of one segment. The softmax is recomputed; delta = sum_s p dP."""
    first_head = tl.program_id(0) % (NUM_HEADS // HEADS) * HEADS
    segment = tl.program_id(0) // (NUM_HEADS // HEADS)
    q_row, num_queries = span(cu_seqlens_q, segment)
    k_row, num_keys = span(cu_seqlens_k, segment)
    if num_queries + num_keys == 0:
        return
    for head in tl.range(first_head, first_head + HEADS):
        column = head * HEAD_DIM
        q_main, q_last = load_tile(q, q, q_row, 0, num_queries, q_stride, column, BLOCK_M, HEAD_DIM, MAIN, TAIL, False)
        k_main, k_last = load_tile(k, k, k_row, 0, num_keys, k_stride, column, BLOCK_N, HEAD_DIM, MAIN, TAIL, False)
        v_main, v_last = load_tile(v, v, k_row, 0, num_keys, v_stride, column, BLOCK_N, HEAD_DIM, MAIN, TAIL, False)
        do_main, do_last = load_tile(
            d_out, d_out, q_row, 0, num_queries, d_out_stride, column, BLOCK_M, HEAD_DIM, MAIN, TAIL, False
        )
        # p = softmax(scale q k); dP = dO v; dS = p (dP - sum_s p dP). Rows past the last query have dO = 0, so dS = 0.
        p = _softmax(dot_rows(q_main, q_last, k_main, k_last, TAIL), num_keys, scale_log2, BLOCK_N)
        dp = dot_rows(do_main, do_last, v_main, v_last, TAIL)
        ds = p * (dp - tl.sum(p * dp, 1)[:, None]) * scale
        # dV = p^T dO; dK = dS^T q; dQ = dS k, dS times scale
        dv, dv_tail = zero_tile(BLOCK_N, MAIN, TAIL)
        dv, dv_tail = add_dot(dv, dv_tail, tl.trans(p.to(do_main.dtype)), do_main, do_last, TAIL)
        store_tile(d_v, dv, dv_tail, k_row, 0, num_keys, d_v_stride, column, BLOCK_N, HEAD_DIM, MAIN, TAIL)
        dk, dk_tail = zero_tile(BLOCK_N, MAIN, TAIL)
        dk, dk_tail = add_dot(dk, dk_tail, tl.trans(ds.to(q_main.dtype)), q_main, q_last, TAIL)
        store_tile(d_k, dk, dk_tail, k_row, 0, num_keys, d_k_stride, column, BLOCK_N, HEAD_DIM, MAIN, TAIL)
        dq, dq_tail = zero_tile(BLOCK_M, MAIN, TAIL)
        dq, dq_tail = add_dot(dq, dq_tail, ds, k_main, k_last, TAIL)
        store_tile(d_q, dq, dq_tail, q_row, 0, num_queries, d_q_stride, column, BLOCK_M, HEAD_DIM, MAIN, TAIL)


class WindowTiles(NamedTuple):
    """Launch options of a window kernel; the tile is the longest segment, rounded up to 16, 32 or 64."""

    heads: int
    """Heads per program (the largest divisor of H up to this)."""
    num_warps: int
    """For a tile of 64; smaller tiles use proportionally fewer."""
    num_stages: int
    """2: the next head is loaded while this one is computed."""


# Rotated, H200, 16 heads of 80, bf16: 2304 patches take 14.7 us, with a separate rope 16.8, with two heads per program
# 18.6.
CONFIGS: dict[str, WindowTiles] = {
    "forward": WindowTiles(heads=1, num_warps=4, num_stages=1),
    "rotated": WindowTiles(heads=1, num_warps=4, num_stages=2),
    "backward": WindowTiles(heads=1, num_warps=4, num_stages=1),
}


def _settings(kernel: str, q_THK: Tensor, max_seqlen_q: int, max_seqlen_k: int) -> dict[str, int]:
    """Keyword arguments of a window kernel."""
    tiles = CONFIGS[kernel]
    num_heads = q_THK.shape[1]
    heads = max(count for count in range(1, tiles.heads + 1) if num_heads % count == 0)
    block_m, block_n = (max(16, triton.next_power_of_2(length)) for length in (max_seqlen_q, max_seqlen_k))
    return {
        "NUM_HEADS": num_heads,
        "HEADS": heads,
        **chunks(q_THK.shape[2]),
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "num_warps": max(1, tiles.num_warps * max(block_m, block_n) // 64),
        "num_stages": tiles.num_stages,
    }


class _WindowAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, *max_seqlens: int) -> Tensor:
        q, k, v, out = rows_of(q), rows_of(k), rows_of(v), q.new_empty(q.shape)
        settings = _settings("forward", q, *max_seqlens)
        _forward_kernel[((len(cu_q) - 1) * q.shape[1] // settings["HEADS"],)](
            *(q, k, v, out, cu_q, cu_k),
            *(x.stride(0) for x in (q, k, v, out)),
            scales(q.shape[2])[1],
            **settings,
        )
        ctx.save_for_backward(q, k, v, cu_q, cu_k)
        ctx.max_seqlens = max_seqlens
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, cu_q, cu_k = ctx.saved_tensors
        d_out, d_q, d_k, d_v = rows_of(d_out), q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
        settings = _settings("backward", q, *ctx.max_seqlens)
        _backward_kernel[((len(cu_q) - 1) * q.shape[1] // settings["HEADS"],)](
            *(q, k, v, d_out, d_q, d_k, d_v, cu_q, cu_k),
            *(x.stride(0) for x in (q, k, v, d_out, d_q, d_k, d_v)),
            *scales(q.shape[2]),
            **settings,
        )
        return d_q, d_k, d_v, None, None, None, None


def can_window(q_THK: Tensor, k_SGK: Tensor, max_seqlen_q: int, max_seqlen_k: int, causal: bool) -> bool:
    """Whether segments are unmasked and fit in one tile each, heads are not grouped, and tiles fit in shared memory."""
    is_small = max(max_seqlen_q, max_seqlen_k) <= 64 and q_THK.shape[2] <= 128
    return can_tile(q_THK) and is_small and not causal and q_THK.shape[1] == k_SGK.shape[1]


def window_attention(
    q_THK: Tensor,
    k_SGK: Tensor,
    v_SGK: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
) -> Tensor:
    """`attention`, if `can_window`."""
    out: Tensor = _WindowAttention.apply(  # type: ignore[no-untyped-call]
        q_THK, k_SGK, v_SGK, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    )
    return out


def rotated_window_attention(
    q_THK: Tensor, k_THK: Tensor, v_THK: Tensor, table: CosSin, cu_seqlens: Tensor, max_seqlen: int
) -> Tensor:
    """`rope`, then `attention` of a segment to itself, if `can_window`. No gradients."""
    q, k, v, out = rows_of(q_THK), rows_of(k_THK), rows_of(v_THK), q_THK.new_empty(q_THK.shape)
    cos, sin = (part.contiguous() for part in table)
    settings = _settings("rotated", q, max_seqlen, max_seqlen)
    block, _ = settings.pop("BLOCK_M"), settings.pop("BLOCK_N")
    if q.dtype == torch.float32:  # two stages exceed the 99 KiB of shared memory that smaller GPUs have
        settings["num_stages"] = 1
    half = q.shape[2] // 2
    _rotated_kernel[((len(cu_seqlens) - 1) * q.shape[1] // settings["HEADS"],)](
        *(q, k, v, cos, sin, out, cu_seqlens),
        *(x.stride(0) for x in (q, k, v, out)),
        scales(q.shape[2])[1],
        F=half,
        BLOCK=block,
        BLOCK_F=max(16, triton.next_power_of_2(half)),
        **settings,
    )
    return out
