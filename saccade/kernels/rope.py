# mypy: allow-untyped-decorators
"""Rotary position embedding: 1-D, three-section (M-RoPE) and 2-D vision, one rotation for all of them.

Legend: T tokens, H heads, K head dim, F = K / 2 frequencies, A axes.

Cos and sin of one angle per token and frequency are tables of [T, F] each, in fp32. Computing them is where the three
kinds differ; the rotation is the same: channels i and i + F of a head are a pair,

    out[i]     = x[i] * cos[i] - x[i + F] * sin[i]
    out[i + F] = x[i + F] * cos[i] + x[i] * sin[i]

computed in fp32 and returned in x's dtype. Tables are built once per forward and shared by every layer.

The gradient is the rotation by the negative angle; only the tables are saved, and they get no gradient. Q and K are
rotated in one launch, each element is read and written once.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import _disable_current_modes

from saccade.kernels import launch
from saccade.kernels.launch import tl, triton

CosSin = tuple[Tensor, Tensor]
"""(cos, sin), each [T, F] in fp32."""


_MROPE_TOKENS = 8
"""Tokens per program."""


def _table(angles_TF: Tensor) -> CosSin:
    return angles_TF.cos(), angles_TF.sin()


def frequencies(
    sections: Sequence[int], theta: float, device: torch.device, is_interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """[F] theta^(-i / F) for i in 0..F-1, in fp32; [F] the axis whose section holds each, in int64.

    `is_interleaved`: height and width alternate until each has its share; time has the remaining frequencies.

    They are computed on the host and cached: on a GPU that would be six launches before every step.
    """
    if torch.compiler.is_compiling():
        return _frequencies(tuple(sections), theta, device, is_interleaved)
    return _cached_frequencies(tuple(sections), theta, device, is_interleaved)


def _frequencies(
    sections: tuple[int, ...], theta: float, device: torch.device, is_interleaved: bool
) -> tuple[Tensor, Tensor]:
    num_frequencies = sum(sections)
    with torch.inference_mode(False):
        exponents = torch.arange(num_frequencies, dtype=torch.float32, device="cpu") / num_frequencies
        axes = [axis for axis, count in enumerate(sections) for _ in range(count)]
        if is_interleaved:
            axes = [i % 3 if i < 3 * sections[i % 3] else 0 for i in range(num_frequencies)]
        return (1.0 / theta**exponents).to(device), torch.tensor(axes, device="cpu").to(device)


@functools.cache
def _cached_frequencies(
    sections: tuple[int, ...], theta: float, device: torch.device, is_interleaved: bool
) -> tuple[Tensor, Tensor]:
    with _disable_current_modes():  # a fake tensor of a dry run would be kept for real ones
        return _frequencies(sections, theta, device, is_interleaved)


def _vision_frequencies(num_frequencies: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """The same frequencies for two axes, one after the other: [F] frequencies, [F] axes."""
    with torch.inference_mode(False):
        inverse, axis = _frequencies((num_frequencies,), theta, device, False)
        return inverse.repeat(2), torch.cat([axis, axis + 1])


@functools.cache
def _cached_vision_frequencies(num_frequencies: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    with _disable_current_modes():
        return _vision_frequencies(num_frequencies, theta, device)


def mrope_cos_sin(
    positions_AT: Tensor, theta: float, sections: Sequence[int], *, is_interleaved: bool = False
) -> CosSin:
    """M-RoPE: frequency f uses the position of its axis (time, height, width), see `frequencies`.

    `sections` sums to F. Plain text has the same position on all three axes, which makes this ordinary 1-D RoPE.
    """
    assert len(sections) == positions_AT.shape[0], "one section per position axis"
    inverse_F, axis_F = frequencies(sections, theta, positions_AT.device, is_interleaved)
    if launch.choose_path("mrope", *launch.available_paths(positions_AT, "triton")) == "triton":
        return _mrope_triton(positions_AT, inverse_F, axis_F)
    return mrope_reference(positions_AT, inverse_F, axis_F)


def mrope_reference(positions_AT: Tensor, inverse_F: Tensor, axis_F: Tensor) -> CosSin:
    """The tables from `frequencies`, in plain PyTorch."""
    return _table(positions_AT.t().index_select(1, axis_F) * inverse_F)


def vision_cos_sin(positions_2P: Tensor, head_dim: int, theta: float = 10000.0) -> CosSin:
    """2-D RoPE: the first half of the frequencies uses the patch's row, the second half its column."""
    make = _vision_frequencies if torch.compiler.is_compiling() else _cached_vision_frequencies
    inverse_F, axis_F = make(head_dim // 4, theta, positions_2P.device)
    if launch.choose_path("mrope", *launch.available_paths(positions_2P, "triton")) == "triton":
        return _mrope_triton(positions_2P, inverse_F, axis_F)
    return mrope_reference(positions_2P, inverse_F, axis_F)


def rope_reference(q_THK: Tensor, k_THK: Tensor, table: CosSin) -> tuple[Tensor, Tensor]:
    """The rotation above, in plain PyTorch."""
    cos, sin = (part.unsqueeze(1) for part in table)

    def rotate(x_THK: Tensor) -> Tensor:
        first, second = x_THK.float().chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x_THK.dtype)

    return rotate(q_THK), rotate(k_THK)


def whole_heads(table: CosSin) -> CosSin:
    """The tables of both halves of a head, [T, 1, K]: sin is negative in the first, for x cos + (swapped x) sin."""
    cos, sin = table
    return torch.cat([cos, cos], -1).unsqueeze(1), torch.cat([-sin, sin], -1).unsqueeze(1)


def rotate_whole(x_THK: Tensor, signed: CosSin) -> Tensor:
    """The rotation without gradients, on a CPU: half of the reference's passes over memory."""
    cos, sin = signed
    half = x_THK.shape[-1] // 2
    swapped = torch.cat([x_THK[..., half:], x_THK[..., :half]], -1)
    return (x_THK.float() * cos).addcmul_(swapped.float(), sin).to(x_THK.dtype)


@triton.jit
def _mrope_kernel(
    positions: tl.tensor,
    inverse: tl.tensor,
    axes: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    T: tl.tensor,
    axis_stride: tl.tensor,
    token_stride: tl.tensor,
    F: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_F: tl.constexpr,
    INTERPRETS: tl.constexpr,
) -> None:
    """Tables of BLOCK_T tokens, with libdevice's functions as in PyTorch: Triton's own are approximate."""
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]
    f = tl.arange(0, BLOCK_F)[None, :]
    inside = (t < T) & (f < F)
    axis = tl.load(axes + f, mask=f < F, other=0)
    position = tl.load(positions + axis * axis_stride + t * token_stride, mask=inside, other=0).to(tl.float32)
    angle = position * tl.load(inverse + f, mask=f < F, other=0.0)
    if INTERPRETS:
        tl.store(cos + t * F + f, tl.cos(angle), mask=inside)
        tl.store(sin + t * F + f, tl.sin(angle), mask=inside)
    else:
        tl.store(cos + t * F + f, tl.extra.cuda.libdevice.cos(angle), mask=inside)
        tl.store(sin + t * F + f, tl.extra.cuda.libdevice.sin(angle), mask=inside)


def _mrope_triton(positions_AT: Tensor, inverse_F: Tensor, axis_F: Tensor) -> CosSin:
    T, F = positions_AT.shape[1], len(inverse_F)
    cos, sin = (torch.empty(T, F, dtype=torch.float32, device=positions_AT.device) for _ in range(2))
    if T:
        _mrope_kernel[(triton.cdiv(T, _MROPE_TOKENS),)](
            positions_AT, inverse_F, axis_F, cos, sin, T, *positions_AT.stride(), F=F, BLOCK_T=_MROPE_TOKENS,
            BLOCK_F=triton.next_power_of_2(F), INTERPRETS=launch.is_interpreting(), num_warps=4,
        )  # fmt: skip
    return cos, sin


@triton.jit
def _rotate_heads(
    x: tl.tensor,
    out: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    x_offset: tl.tensor,
    out_offset: tl.tensor,
    X_HEAD: tl.constexpr,
    OUT_HEAD: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    F: tl.constexpr,
    BLOCK_F: tl.constexpr,
) -> None:
    """Rotate every head of one token, [BLOCK_HEADS, BLOCK_F] pairs of channels."""
    head = tl.arange(0, BLOCK_HEADS)[:, None]
    f = tl.arange(0, BLOCK_F)[None, :]
    mask = (head < NUM_HEADS) & (f < F)
    x_offset += head * X_HEAD + f
    out_offset += head * OUT_HEAD + f
    first = tl.load(x + x_offset, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x + x_offset + F, mask=mask, other=0.0).to(tl.float32)
    dtype = out.dtype.element_ty
    tl.store(out + out_offset, (first * cos - second * sin).to(dtype), mask=mask)
    tl.store(out + out_offset + F, (second * cos + first * sin).to(dtype), mask=mask)


@triton.jit(do_not_specialize=["num_tokens"])
def _rope_kernel(
    q: tl.tensor,
    k: tl.tensor,
    q_out: tl.tensor,
    k_out: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    q_stride: tl.int64,
    k_stride: tl.int64,
    q_out_stride: tl.int64,
    k_out_stride: tl.int64,
    num_tokens: tl.tensor,
    Q_HEAD: tl.constexpr,
    K_HEAD: tl.constexpr,
    Q_OUT_HEAD: tl.constexpr,
    K_OUT_HEAD: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_KV_HEADS: tl.constexpr,
    F: tl.constexpr,
    BLOCK_F: tl.constexpr,
    TOKENS: tl.constexpr,
    INVERSE: tl.constexpr,
) -> None:
    """TOKENS tokens in a loop; cos and sin are read once for all heads. The outputs may alias the inputs.

    *_HEAD are head strides; they are constants so that the compiler knows the alignment of heads.
    """
    f = tl.arange(0, BLOCK_F)[None, :]
    for i in tl.static_range(TOKENS):
        token = tl.program_id(0).to(tl.int64) * TOKENS + i
        if token < num_tokens:
            c = tl.load(cos + token * F + f, mask=f < F, other=0.0)
            s = tl.load(sin + token * F + f, mask=f < F, other=0.0)
            if INVERSE:
                s = -s
            q_offset, q_out_offset = token * q_stride, token * q_out_stride
            _rotate_heads(
                q, q_out, c, s, q_offset, q_out_offset, Q_HEAD, Q_OUT_HEAD, NUM_HEADS, BLOCK_HEADS, F, BLOCK_F
            )
            k_offset, k_out_offset = token * k_stride, token * k_out_stride
            _rotate_heads(
                k, k_out, c, s, k_offset, k_out_offset, K_HEAD, K_OUT_HEAD, NUM_KV_HEADS, BLOCK_KV_HEADS, F, BLOCK_F
            )


class _Launch(NamedTuple):
    tokens: int
    """Tokens per program."""
    num_warps: int


# Not tuned: a token of 16 heads of 128 is 1024 pairs, 8 per thread; bench/kernels/rope.py --tune measures them.
_CONFIG = _Launch(tokens=1, num_warps=4)


def _rotate(
    q_THK: Tensor, k_THK: Tensor, q_out: Tensor, k_out: Tensor, table: CosSin, inverse: bool
) -> tuple[Tensor, Tensor]:
    """Rotate q into q_out and k into k_out, which may be q and k."""
    (num_tokens, num_heads, head_dim), num_kv_heads = q_THK.shape, k_THK.shape[1]
    cos, sin = (part.contiguous() for part in table)
    if num_tokens:
        _rope_kernel[(triton.cdiv(num_tokens, _CONFIG.tokens),)](
            *(q_THK, k_THK, q_out, k_out, cos, sin),
            *(x.stride(0) for x in (q_THK, k_THK, q_out, k_out)),
            num_tokens,
            *(x.stride(1) for x in (q_THK, k_THK, q_out, k_out)),
            NUM_HEADS=num_heads,
            NUM_KV_HEADS=num_kv_heads,
            BLOCK_HEADS=triton.next_power_of_2(num_heads),
            BLOCK_KV_HEADS=triton.next_power_of_2(num_kv_heads),
            F=head_dim // 2,
            BLOCK_F=triton.next_power_of_2(head_dim // 2),
            TOKENS=_CONFIG.tokens,
            INVERSE=inverse,
            num_warps=_CONFIG.num_warps,
        )
    return q_out, k_out


def _channels_adjacent(x_THK: Tensor) -> Tensor:
    """The kernel takes any token and head strides, but adjacent channels."""
    return x_THK if x_THK.stride(2) == 1 else x_THK.contiguous()


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        q, k = _channels_adjacent(q), _channels_adjacent(k)
        return _rotate(q, k, q.new_empty(q.shape), k.new_empty(k.shape), (cos, sin), inverse=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_q: Tensor, d_k: Tensor) -> tuple[Tensor | None, ...]:
        d_q, d_k = _channels_adjacent(d_q), _channels_adjacent(d_k)
        cos, sin = ctx.saved_tensors
        grads = _rotate(d_q, d_k, d_q.new_empty(d_q.shape), d_k.new_empty(d_k.shape), (cos, sin), inverse=True)
        return *grads, None, None


def _check(operation: str, q_THK: Tensor, k_THK: Tensor, table: CosSin) -> None:
    num_tokens, _, head_dim = q_THK.shape
    fits = k_THK.shape[0] == num_tokens and k_THK.shape[2] == head_dim and head_dim % 2 == 0
    if not fits or any(part.shape != (num_tokens, head_dim // 2) for part in table):
        shapes = [tuple(x.shape) for x in (q_THK, k_THK, *table)]
        raise ValueError(f"{operation}: q {shapes[0]}, k {shapes[1]}, cos {shapes[2]}, sin {shapes[3]} do not fit")


def rope(q_THK: Tensor, k_THK: Tensor, table: CosSin) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys by their tokens' angles. Q and K may have different numbers of heads."""
    _check("rope", q_THK, k_THK, table)
    if launch.choose_path("rope", *launch.available_paths(q_THK, "triton")) == "triton":
        return _Rope.apply(q_THK, k_THK, *table)  # type: ignore[no-untyped-call, no-any-return]
    if not torch.is_grad_enabled():
        signed = whole_heads(table)
        return rotate_whole(q_THK, signed), rotate_whole(k_THK, signed)
    return rope_reference(q_THK, k_THK, table)
