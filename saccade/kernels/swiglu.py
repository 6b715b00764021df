# mypy: allow-untyped-decorators
"""SwiGLU, the gated activation of the MLPs.

    y = silu(gate) * up,   silu(g) = g * sigmoid(g)

gate, up and y have one shape and dtype; any float dtype, computed in fp32 and rounded once. gate and up may have any
row stride (the two halves of a fused projection). Saved for backward: gate and up; silu is recomputed:

    dup = dy * silu(gate)          dgate = dy * up * sigmoid(gate) * (1 + gate * (1 - sigmoid(gate)))

Bytes per element in bf16: 6 forward, 10 backward.

`swiglu_linear` is `swiglu` followed by the down projection, out = y W' + bias. A separate linear layer would save y for
its backward; this saves only gate and up, and recomputes y in the pass that computes dgate and dup (12 bytes).

`swiglu_quant` returns y in 8 bits with one fp32 scale per row, as `quantize_activation` would make it of y: 5 bytes, no
backward.
"""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from saccade.kernels import launch
from saccade.kernels.launch import tl, triton
from saccade.kernels.quantize_activation import LARGEST, quantize_activation_reference, quantize_values


def swiglu_reference(gate: Tensor, up: Tensor) -> Tensor:
    """The formula above, in plain PyTorch."""
    return F.silu(gate) * up


def swiglu_linear_reference(gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`swiglu_reference`, then a linear layer."""
    return F.linear(swiglu_reference(gate, up), weight, bias)


def swiglu_quant_reference(gate: Tensor, up: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The formula, rounded to y's dtype, then 8 bits: [..., D] in `dtype` and the scales [...] in fp32."""
    y = swiglu_reference(gate.float(), up.float()).to(gate.dtype)
    quantized, scale = quantize_activation_reference(y.reshape(-1, y.shape[-1]), dtype)
    return quantized.view(y.shape), scale.view(y.shape[:-1])


@triton.jit
def _columns(dim: tl.tensor, BLOCK: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Row and columns of this program."""
    blocks = tl.cdiv(dim, BLOCK)
    return tl.program_id(0) // blocks, tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def _forward_kernel(
    gate: tl.tensor,
    up: tl.tensor,
    y: tl.tensor,
    gate_stride: tl.int64,
    up_stride: tl.int64,
    dim: tl.int64,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """BLOCK columns of one row. `dim` and strides are divided by UNIT: the compiler then knows the rows' alignment."""
    dim = dim * UNIT
    row, d = _columns(dim, BLOCK)
    g = tl.load(gate + row * gate_stride * UNIT + d, mask=d < dim, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride * UNIT + d, mask=d < dim, other=0.0).to(tl.float32)
    tl.store(y + row * dim + d, (g * tl.sigmoid(g) * u).to(y.dtype.element_ty), mask=d < dim)


@triton.jit
def _load_activation(gate: tl.tensor, up: tl.tensor, d: tl.tensor, dim: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Columns d of one row of y in fp32, after rounding to `dtype`."""
    g = tl.load(gate + d, mask=d < dim, other=0.0).to(tl.float32)
    u = tl.load(up + d, mask=d < dim, other=0.0).to(tl.float32)
    return (g * tl.sigmoid(g) * u).to(dtype).to(tl.float32)


@triton.jit
def _quant_kernel(
    gate: tl.tensor,
    up: tl.tensor,
    quantized: tl.tensor,
    scales: tl.tensor,
    gate_stride: tl.int64,
    up_stride: tl.int64,
    dim: tl.int64,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    LARGEST_VALUE: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """One row. IS_WHOLE: it fits in BLOCK; a longer one is computed twice, the second time from the cache."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    dim = dim * UNIT
    row = tl.program_id(0).to(tl.int64)
    gate += row * gate_stride * UNIT
    up += row * up_stride * UNIT
    d = tl.arange(0, BLOCK)
    dtype = gate.dtype.element_ty
    bits = quantized.dtype.element_ty
    y = _load_activation(gate, up, d, dim, dtype)
    peaks = tl.abs(y)
    if not IS_WHOLE:
        for start in range(BLOCK, dim, BLOCK):
            peaks = tl.maximum(peaks, tl.abs(_load_activation(gate, up, start + d, dim, dtype)))
    scale = tl.max(peaks, 0) / LARGEST_VALUE
    tl.store(scales + row, scale)
    tl.store(quantized + row * dim + d, quantize_values(y, scale, LARGEST_VALUE, bits), mask=d < dim)
    if not IS_WHOLE:
        for start in range(BLOCK, dim, BLOCK):
            y = _load_activation(gate, up, start + d, dim, dtype)
            values = quantize_values(y, scale, LARGEST_VALUE, bits)
            tl.store(quantized + row * dim + start + d, values, mask=start + d < dim)


@triton.jit
def _backward_kernel(
    gate: tl.tensor,
    up: tl.tensor,
    d_y: tl.tensor,
    d_gate: tl.tensor,
    d_up: tl.tensor,
    y: tl.tensor,
    gate_stride: tl.int64,
    up_stride: tl.int64,
    d_y_stride: tl.int64,
    dim: tl.int64,
    WITH_Y: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """BLOCK columns of one row. WITH_Y: also recompute the result of forward."""
    dim = dim * UNIT
    row, d = _columns(dim, BLOCK)
    g = tl.load(gate + row * gate_stride * UNIT + d, mask=d < dim, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride * UNIT + d, mask=d < dim, other=0.0).to(tl.float32)
    dy = tl.load(d_y + row * d_y_stride * UNIT + d, mask=d < dim, other=0.0).to(tl.float32)
    # dup = dy silu; dgate = dy up sigmoid (1 + g (1 - sigmoid))
    sigmoid = tl.sigmoid(g)
    dtype = d_gate.dtype.element_ty
    tl.store(d_up + row * dim + d, (dy * g * sigmoid).to(dtype), mask=d < dim)
    tl.store(d_gate + row * dim + d, (dy * u * sigmoid * (1.0 + g * (1.0 - sigmoid))).to(dtype), mask=d < dim)
    if WITH_Y:
        tl.store(y + row * dim + d, (g * sigmoid * u).to(dtype), mask=d < dim)


class _Launch(NamedTuple):
    block: int
    """Columns per program."""
    num_warps: int


_QUANT_BLOCK = 16384
"""Columns of a row that 16 warps hold in registers, 32 each."""
# Forward after its product, H200, bf16: 2048 x 11008 takes 28.8 us, with 2048 columns and 4 warps 43.8. Backward is not
# tuned: bench/kernels/swiglu.py --tune measures it.
_CONFIGS = {"forward": _Launch(block=1024, num_warps=2), "backward": _Launch(block=1024, num_warps=4)}


def _rows_of(*tensors: Tensor) -> tuple[Tensor, ...]:
    """[rows, D] each, with adjacent columns. Contiguous tensors become one long row."""
    if all(x.is_contiguous() for x in tensors):
        return tuple(x.view(1, -1) for x in tensors)
    rows = (x.reshape(-1, x.shape[-1]) for x in tensors)
    return tuple(x if x.stride(1) == 1 else x.contiguous() for x in rows)


def _launch(kernel: Any, config: _Launch, inputs_ND: tuple[Tensor, ...], *outputs: Tensor, **constants: bool) -> None:
    """Run `kernel` over rows of any stride into contiguous outputs."""
    num_rows, dim = inputs_ND[0].shape
    strides = [x.stride(0) for x in inputs_ND]
    unit = math.gcd(16, dim, *strides)
    if num_rows * dim:
        grid = (num_rows * triton.cdiv(dim, config.block),)
        sizes = (size // unit for size in (*strides, dim))
        kernel[grid](
            *inputs_ND, *outputs, *sizes, **constants, UNIT=unit, BLOCK=config.block, num_warps=config.num_warps
        )


def _forward(gate: Tensor, up: Tensor) -> Tensor:
    y = gate.new_empty(gate.shape)
    _launch(_forward_kernel, _CONFIGS["forward"], _rows_of(gate, up), y)
    return y


def _backward(gate: Tensor, up: Tensor, d_y: Tensor, *, with_y: bool) -> tuple[Tensor, Tensor, Tensor]:
    """d_gate, d_up and, with `with_y`, y."""
    d_gate, d_up = gate.new_empty(gate.shape), up.new_empty(up.shape)
    y = gate.new_empty(gate.shape) if with_y else d_up
    _launch(_backward_kernel, _CONFIGS["backward"], _rows_of(gate, up, d_y), d_gate, d_up, y, WITH_Y=with_y)
    return d_gate, d_up, y


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return _forward(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        d_gate, d_up, _ = _backward(gate, up, d_y, with_y=False)
        return d_gate, d_up


class _SwigluLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(gate, up, weight)
        return F.linear(_forward(gate, up), weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        gate, up, weight = ctx.saved_tensors
        wants_weight, wants_bias = ctx.needs_input_grad[2:]
        d_gate, d_up, y = _backward(gate, up, d_out @ weight, with_y=wants_weight)
        rows = d_out.flatten(0, -2)
        d_weight = rows.T @ y.flatten(0, -2) if wants_weight else None
        return d_gate, d_up, d_weight, rows.sum(0) if wants_bias else None


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, elementwise."""
    _check("swiglu", gate, up)
    if launch.choose_path("swiglu", *launch.available_paths(gate, "triton")) == "triton":
        return _Swiglu.apply(gate, up)  # type: ignore[no-untyped-call, no-any-return]
    if not torch.is_grad_enabled():
        return F.silu(gate).mul_(up)  # the reference in place: a third of its time for 220 rows of 2432 on two cores
    return swiglu_reference(gate, up)


def swiglu_linear(gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """(silu(gate) * up) W' + bias, saving only gate and up for backward."""
    _check("swiglu_linear", gate, up)
    if launch.choose_path("swiglu", *launch.available_paths(gate, "triton")) == "triton":
        return _SwigluLinear.apply(gate, up, weight, bias)  # type: ignore[no-untyped-call, no-any-return]
    return swiglu_linear_reference(gate, up, weight, bias)


def swiglu_quant(gate: Tensor, up: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`swiglu` in int8 or float8_e4m3fn, and the fp32 scale of each row. For inference: it has no backward."""
    _check("swiglu_quant", gate, up)
    if dtype not in LARGEST:
        raise ValueError(f"swiglu_quant: {dtype} is none of {', '.join(map(str, LARGEST))}")
    if launch.choose_path("swiglu_quant", *launch.available_paths(gate, "triton")) != "triton":
        return swiglu_quant_reference(gate, up, dtype)
    rows = [x.detach().reshape(-1, x.shape[-1]) for x in (gate, up)]
    gate_ND, up_ND = (x if x.stride(1) == 1 else x.contiguous() for x in rows)
    num_rows, dim = gate_ND.shape
    quantized, scale = gate.new_empty(gate.shape, dtype=dtype), gate.new_empty(num_rows, dtype=torch.float32)
    unit = math.gcd(16, dim, gate_ND.stride(0), up_ND.stride(0))
    block = min(_QUANT_BLOCK, triton.next_power_of_2(dim))
    if num_rows * dim:
        _quant_kernel[(num_rows,)](
            gate_ND, up_ND, quantized, scale, gate_ND.stride(0) // unit, up_ND.stride(0) // unit, dim // unit,
            UNIT=unit, BLOCK=block, IS_WHOLE=dim <= block, LARGEST_VALUE=LARGEST[dtype],
            num_warps=max(1, min(16, block // 512)), **launch.overlap_options(gate.device),
        )  # fmt: skip
    return quantized, scale.view(gate.shape[:-1])


def _check(name: str, gate: Tensor, up: Tensor) -> None:
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(f"{name}: gate {gate.dtype} {tuple(gate.shape)}, up {up.dtype} {tuple(up.shape)} do not fit")
