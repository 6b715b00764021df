# mypy: allow-untyped-decorators
"""Dynamic quantization of tokens to 8 bits: every token has its own scale.

Legend: T tokens, D channels.

    scale[t] = max_d |x[t, d]| / LARGEST,   x8[t, d] = round(x[t, d] / scale[t])

x [T, D] in any float dtype, x8 in int8 or float8_e4m3fn, scale [T] in fp32. The largest channel of a token becomes
127.5 (stored as 127 if positive) or 448; a token of zeros has scale 0. Everything is computed in fp32. x is read once
(a row of more than 8192 channels twice, the second time from the cache), and one byte per channel is written. No
backward.

`rms_norm_quant` and `swiglu_quant` quantize their outputs in their own kernels, with `quantize_values`.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from saccade.kernels import launch
from saccade.kernels.launch import tl, triton

LARGEST = {torch.int8: 127.5, torch.float8_e4m3fn: 448.0}
"""The value of a token's largest channel before it is rounded: half of the range, as compressed-tensors defines it."""


def quantize_activation_reference(
    x_TD: Tensor, dtype: torch.dtype, maximum: Callable[[Tensor], Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Rows in 8 bits and their fp32 scales [T]; a row of zeros has scale 0.

    `maximum`: over the ranks that hold the other channels of the rows; None: these are all.
    """
    largest_T = x_TD.float().abs().amax(1)
    scale_T = (largest_T if maximum is None else maximum(largest_T)) / LARGEST[dtype]
    scaled = x_TD.float() / torch.where(scale_T > 0, scale_T, 1.0).unsqueeze(1)
    return round_to(scaled, dtype), scale_T


def round_to(scaled: Tensor, dtype: torch.dtype) -> Tensor:
    """Round values that were divided by their scale to int8 or fp8; those beyond the range become its ends."""
    return scaled.round().clamp(-128, 127).to(dtype) if dtype == torch.int8 else scaled.clamp(-448, 448).to(dtype)


@triton.jit
def quantize_values(y: tl.tensor, scale: tl.tensor, LARGEST_VALUE: tl.constexpr, dtype: tl.constexpr) -> tl.tensor:
    """Divide fp32 values by their scale (0: leave them) and round them to int8 or fp8."""
    scaled = tl.clamp(y / tl.where(scale > 0, scale, 1.0), -LARGEST_VALUE, LARGEST_VALUE)
    if dtype == tl.int8:
        # Adding 1.5 * 2^23 leaves no bits for a fraction: fp32 rounds half to even, as torch.round does.
        scaled = tl.minimum((scaled + 12582912.0) - 12582912.0, 127.0)
    return scaled.to(dtype)


@triton.jit
def _quantize_kernel(
    x: tl.tensor,
    quantized: tl.tensor,
    scales: tl.tensor,
    D: tl.tensor,
    x_stride: tl.tensor,
    BLOCK: tl.constexpr,
    LARGEST_VALUE: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """One token. A row longer than BLOCK is read twice, the second time from the cache."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    t = tl.program_id(0).to(tl.int64)
    peaks = tl.zeros([BLOCK], tl.float32)
    for start in range(0, D, BLOCK):
        d = start + tl.arange(0, BLOCK)
        peaks = tl.maximum(peaks, tl.abs(tl.load(x + t * x_stride + d, mask=d < D, other=0.0).to(tl.float32)))
    scale = tl.max(peaks, 0) / LARGEST_VALUE
    tl.store(scales + t, scale)
    for start in range(0, D, BLOCK):
        d = start + tl.arange(0, BLOCK)
        row = tl.load(x + t * x_stride + d, mask=d < D, other=0.0).to(tl.float32)
        values = quantize_values(row, scale, LARGEST_VALUE, quantized.dtype.element_ty)
        tl.store(quantized + t * D + d, values, mask=d < D)


def quantize_activation(x_TD: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Tokens in int8 or float8_e4m3fn, and their fp32 scales [T]."""
    if launch.choose_path("quantize_activation", *launch.available_paths(x_TD, "triton")) == "reference":
        return quantize_activation_reference(x_TD, dtype)
    T, D = x_TD.shape
    x_TD = x_TD if x_TD.stride(1) == 1 else x_TD.contiguous()
    x8_TD, scale_T = x_TD.new_empty((T, D), dtype=dtype), x_TD.new_empty(T, dtype=torch.float32)
    if T:
        block = min(8192, triton.next_power_of_2(D))
        _quantize_kernel[(T,)](
            x_TD, x8_TD, scale_T, D, x_TD.stride(0), BLOCK=block, LARGEST_VALUE=LARGEST[dtype],
            num_warps=4 if block <= 2048 else 8, **launch.overlap_options(x_TD.device),
        )  # fmt: skip
    return x8_TD, scale_T
