# mypy: allow-untyped-decorators
"""RMS normalisation of rows, alone, after a residual sum, or into 8 bits.

    y = weight * x / sqrt(mean(x^2) + eps)

x [..., D] and weight [D] in any float dtype, y like x. The mean and the division are computed in fp32 and rounded to
x's dtype before the product with the weight (as Hugging Face does, so that bf16 logits agree).

`add_rms_norm` returns (y, s) with s = x + residual in x's dtype and y of s: the two halves of a pre-norm block in one
pass. `rms_norm_quant` returns y in 8 bits with one fp32 scale per row, as `quantize_activation` would make it of y;
`add_rms_norm_quant` does so after a residual sum.

Saved for backward: x (or s) and 1 / sqrt(...) per row. With g = weight * dy, h = x * rstd and means over D:

    dx = rstd * (g - h * mean(g * h))          dweight = sum over rows of dy * h

Backward runs a fixed number of programs; each sums dweight over its rows in registers and writes one row of partial
sums, which are added up afterwards: no atomics, deterministic. Bytes per element of x in bf16: 4 forward, 6 backward
(with a residual 8 and 8).
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from saccade.kernels import launch
from saccade.kernels.launch import tl, triton
from saccade.kernels.quantize_activation import LARGEST, quantize_activation_reference, quantize_values


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The formula above, in plain PyTorch."""
    x32 = x.float()
    normalized = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return (weight * normalized.to(x.dtype)).to(x.dtype)


def _rms_norm_on_cpu(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm_reference` without gradients, in less memory: one pass for the sum of squares, products in place."""
    if torch.is_grad_enabled() or x.dtype != torch.float32 or weight.dtype != torch.float32:
        return rms_norm_reference(x, weight, eps)
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return (x * norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()).mul_(weight)


def add_rms_norm_reference(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(norm of the sum, the sum)."""
    total = x + residual
    return rms_norm_reference(total, weight, eps), total


def rms_norm_quant_reference(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The norm, then 8 bits: [..., D] in `dtype` and the scales [...] in fp32."""
    rows_ND = rms_norm_reference(x, weight, eps).reshape(-1, x.shape[-1])
    quantized, scale = quantize_activation_reference(rows_ND, dtype)
    return quantized.view(x.shape), scale.view(x.shape[:-1])


def add_rms_norm_quant_reference(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """`rms_norm_quant_reference` of the sum, and the sum."""
    total = x + residual
    return *rms_norm_quant_reference(total, weight, eps, dtype), total


@triton.jit
def normalize(
    x: tl.tensor, weight: tl.tensor, eps: tl.tensor, D: tl.constexpr, dtype: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """(y, rstd) of rows x [ROWS, BLOCK_D] in fp32; columns past D are zero."""
    rstd = tl.rsqrt(tl.sum(x * x, 1) / D + eps)
    return (x * rstd[:, None]).to(dtype).to(tl.float32) * weight[None, :], rstd


@triton.jit(do_not_specialize=["num_rows"])
def _forward_kernel(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    y: tl.tensor,
    total: tl.tensor,
    rstd: tl.tensor,
    scale: tl.tensor,
    x_stride: tl.int64,
    residual_stride: tl.int64,
    num_rows: tl.tensor,
    eps: tl.float32,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    LARGEST_VALUE: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """ROWS rows. LARGEST_VALUE: the value of a row's largest channel in 8 bits, 0 for an output in x's dtype."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, BLOCK_D)
    is_row = rows < num_rows
    mask = is_row[:, None] & (d < D)[None, :]
    offset = rows[:, None] * D + d[None, :]
    dtype = x.dtype.element_ty
    w = tl.load(weight + d, mask=d < D, other=0.0).to(tl.float32)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    row = tl.load(x + rows[:, None] * x_stride + d[None, :], mask=mask, other=0.0)
    if HAS_RESIDUAL:
        row += tl.load(residual + rows[:, None] * residual_stride + d[None, :], mask=mask, other=0.0)
        tl.store(total + offset, row, mask=mask)
    out, row_rstd = normalize(row.to(tl.float32), w, eps, D, dtype)
    if LARGEST_VALUE > 0:
        # scale = max |y| / largest; q = round(y / scale)
        out = out.to(dtype).to(tl.float32)
        row_scale = tl.max(tl.abs(out), 1) / LARGEST_VALUE
        tl.store(y + offset, quantize_values(out, row_scale[:, None], LARGEST_VALUE, y.dtype.element_ty), mask=mask)
        tl.store(scale + rows, row_scale, mask=is_row)
    else:
        tl.store(rstd + rows, row_rstd, mask=is_row)
        tl.store(y + offset, out.to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _backward_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    rstd: tl.tensor,
    d_y: tl.tensor,
    d_total: tl.tensor,
    d_x: tl.tensor,
    d_weight: tl.tensor,
    x_stride: tl.int64,
    d_y_stride: tl.int64,
    d_total_stride: tl.int64,
    num_rows: tl.tensor,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """Every num_programs-th group of ROWS rows, and one row of partial sums of dweight."""
    d = tl.arange(0, BLOCK_D)
    dtype = x.dtype.element_ty
    w = tl.load(weight + d, mask=d < D, other=0.0).to(tl.float32)
    sums = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for group in tl.range(tl.program_id(0), tl.cdiv(num_rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        rows = (group * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        is_row = rows < num_rows
        mask = is_row[:, None] & (d < D)[None, :]
        row_rstd = tl.load(rstd + rows, mask=is_row, other=0.0)
        h = tl.load(x + rows[:, None] * x_stride + d[None, :], mask=mask, other=0.0).to(tl.float32) * row_rstd[:, None]
        dy = tl.load(d_y + rows[:, None] * d_y_stride + d[None, :], mask=mask, other=0.0).to(tl.float32)
        # dx = rstd (g - h mean(g h)), g = weight dy; dweight += dy h, h rounded as forward rounded it
        g = dy * w[None, :]
        dx = row_rstd[:, None] * (g - h * (tl.sum(g * h, 1) / D)[:, None])
        sums += dy * h.to(dtype).to(tl.float32)
        if HAS_RESIDUAL:
            dx += tl.load(d_total + rows[:, None] * d_total_stride + d[None, :], mask=mask, other=0.0).to(tl.float32)
        tl.store(d_x + rows[:, None] * D + d[None, :], dx.to(d_x.dtype.element_ty), mask=mask)
    tl.store(d_weight + tl.program_id(0).to(tl.int64) * D + d, tl.sum(sums, 0), mask=d < D)


class _Launch(NamedTuple):
    """Launch options."""

    elements: int
    """Elements per tile: as many whole rows as fit, at least one."""
    num_warps: int
    """For a tile of this many elements; longer rows use proportionally more, up to 16."""
    programs_per_sm: int = 0
    """Backward: persistent programs per SM."""
    num_stages: int = 1
    """Backward: groups of rows in flight."""


# Measured at 16384 x 2048 bf16 (bench/kernels/rms_norm.py --tune, H200): forward 3.66 TB/s, backward 3.05 TB/s.
_CONFIGS = {
    "forward": _Launch(elements=2048, num_warps=4),
    "backward": _Launch(elements=4096, num_warps=4, programs_per_sm=2, num_stages=3),
}


def _tile(kernel: str, dim: int) -> dict[str, int]:
    """Tile and warps for rows of `dim`."""
    config, block = _CONFIGS[kernel], triton.next_power_of_2(dim)
    rows = max(1, config.elements // block)
    num_warps = min(16, max(1, config.num_warps * rows * block // config.elements))
    return {"D": dim, "BLOCK_D": block, "ROWS": rows, "num_warps": num_warps}


def _rows_of(x: Tensor) -> Tensor:
    """[rows, D] with adjacent columns and any row stride; copies if that is not a view."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    dtype: torch.dtype | None = None,
    *,
    overlaps: bool | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, the rows that were normalised, rstd), or with an 8-bit `dtype` the scales instead of rstd.

    `overlaps` None: if the device can.
    """
    rows_ND = _rows_of(x)
    num_rows, dim = rows_ND.shape
    y = rows_ND.new_empty(rows_ND.shape, dtype=dtype or x.dtype)
    statistic = rows_ND.new_empty(num_rows, dtype=torch.float32)
    residual_ND = _rows_of(residual) if residual is not None else rows_ND
    total_ND = rows_ND.new_empty(rows_ND.shape) if residual is not None else rows_ND
    tile = _tile("forward", dim)
    if num_rows:
        _forward_kernel[(triton.cdiv(num_rows, tile["ROWS"]),)](
            *(rows_ND, residual_ND, weight.contiguous(), y, total_ND, statistic, statistic),
            rows_ND.stride(0),
            residual_ND.stride(0),
            num_rows,
            eps,
            **tile,
            HAS_RESIDUAL=residual is not None,
            LARGEST_VALUE=LARGEST[dtype] if dtype else 0.0,
            **launch.overlap_options(x.device, overlaps),
        )
    return y.view(x.shape), total_ND, statistic


def _backward(x_ND: Tensor, weight: Tensor, rstd: Tensor, d_y: Tensor, d_total: Tensor | None) -> tuple[Tensor, Tensor]:
    """dx [rows, D] and dweight. `d_total`: the other gradient of the sum."""
    num_rows, dim = x_ND.shape
    tile, config = _tile("backward", dim), _CONFIGS["backward"]
    num_programs = config.programs_per_sm * launch.num_sms(x_ND.device)
    num_programs = max(1, min(num_programs, triton.cdiv(num_rows, tile["ROWS"])))
    d_y_ND = _rows_of(d_y)
    d_total_ND = _rows_of(d_total) if d_total is not None else d_y_ND
    d_x, partial_PD = x_ND.new_empty(x_ND.shape), x_ND.new_empty(num_programs, dim, dtype=torch.float32)
    _backward_kernel[(num_programs,)](
        *(x_ND, weight.contiguous(), rstd, d_y_ND, d_total_ND, d_x, partial_PD),
        *(rows.stride(0) for rows in (x_ND, d_y_ND, d_total_ND)),
        num_rows,
        **tile,
        HAS_RESIDUAL=d_total is not None,
        STAGES=config.num_stages,
    )
    return d_x, partial_PD.sum(0).to(weight.dtype)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y, rows_ND, rstd = _forward(x, None, weight, eps, overlaps=False)
        ctx.save_for_backward(rows_ND, weight, rstd)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
        rows_ND, weight, rstd = ctx.saved_tensors
        d_x, d_weight = _backward(rows_ND, weight, rstd, d_y, None)
        return d_x.view(d_y.shape), d_weight, None


class _AddRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        y, total_ND, rstd = _forward(x, residual, weight, eps, overlaps=False)
        ctx.save_for_backward(total_ND, weight, rstd)
        return y, total_ND.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor, d_total: Tensor) -> tuple[Tensor | None, ...]:
        total_ND, weight, rstd = ctx.saved_tensors
        d_x, d_weight = _backward(total_ND, weight, rstd, d_y, d_total)
        return d_x.view(d_y.shape), d_x.view(d_y.shape), d_weight, None


def _path(operation: str, x: Tensor, weight: Tensor) -> launch.Path:
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"{operation}: weight {tuple(weight.shape)} does not fit rows of {x.shape[-1]}")
    return launch.choose_path(operation, *launch.available_paths(x, "triton"))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise the last dim of `x` to unit RMS and scale it by `weight`."""
    if _path("rms_norm", x, weight) == "triton":
        if not launch.is_differentiable():
            return _forward(x, None, weight, eps)[0]
        return _RmsNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call, no-any-return]
    return _rms_norm_on_cpu(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(`rms_norm` of x + residual, x + residual)."""
    if x.shape != residual.shape or x.dtype != residual.dtype:
        raise ValueError(
            f"add_rms_norm: x {x.dtype} {tuple(x.shape)}, residual {residual.dtype} {tuple(residual.shape)}"
        )
    if _path("add_rms_norm", x, weight) == "triton":
        if not launch.is_differentiable():
            y, total_ND, _ = _forward(x, residual, weight, eps)
            return y, total_ND.view(x.shape)
        return _AddRmsNorm.apply(x, residual, weight, eps)  # type: ignore[no-untyped-call, no-any-return]
    total = x + residual
    return _rms_norm_on_cpu(total, weight, eps), total


def add_rms_norm_quant(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """(`rms_norm_quant` of x + residual: values and scales, x + residual)."""
    if dtype not in LARGEST or x.shape != residual.shape or x.dtype != residual.dtype:
        raise ValueError(
            f"add_rms_norm_quant: x {x.dtype} {tuple(x.shape)}, residual {residual.dtype} {tuple(residual.shape)} "
            f"to {dtype}"
        )
    if _path("add_rms_norm_quant", x, weight) == "triton":
        quantized, total, scale = _forward(x.detach(), residual.detach(), weight.detach(), eps, dtype)
        return quantized, scale.view(x.shape[:-1]), total.view(x.shape)
    return add_rms_norm_quant_reference(x, residual, weight, eps, dtype)


def rms_norm_quant(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`rms_norm` in int8 or float8_e4m3fn, and the fp32 scale of each row. For inference: it has no backward."""
    if dtype not in LARGEST:
        raise ValueError(f"rms_norm_quant: {dtype} is none of {', '.join(map(str, LARGEST))}")
    if _path("rms_norm_quant", x, weight) == "triton":
        quantized, _, scale = _forward(x.detach(), None, weight.detach(), eps, dtype)
        return quantized, scale.view(x.shape[:-1])
    return rms_norm_quant_reference(x, weight, eps, dtype)
