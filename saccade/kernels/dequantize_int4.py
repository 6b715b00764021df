# mypy: allow-untyped-decorators
"""Weights of 4 bits: the words that a checkpoint and the kernels hold them in, and the weight that they stand for.

Legend: D inputs, N outputs, Z groups of inputs that share a scale (D / Z inputs each).

    weight[n, d] = (q[n, d] - zero[n, z(d)]) * weight_scale[n, z(d)]

with integers q and zero points of 0..15; without zero points they are 8. A checkpoint holds (compressed-tensors
`pack-quantized`)
  weight_packed      int32 [N, D / 8]: input i in bits 4 (i % 8) of word i // 8, as q = value + 8
  weight_scale       [N, Z]
  weight_zero_point  int32 [ceil(N / 8), Z]: output n in bits 4 (n % 8) of word n // 8, also + 8 (asymmetric only)
The kernels read the 16 words of every 128 inputs in another order: input 128 g + 32 m + 8 p + 2 q + b in bits 4 p + 16
b of word 16 g + 4 q + m. `interleave_int4` permutes `weight_packed` once, when a model is loaded. A lane of the tensor
core's left operand holds inputs 2 q, 2 q + 1 (one register) of every eight: here they are its four words, one 16-byte
load, and one shift and one mask unpack both values of a register.

Scales are in any float dtype, used as fp32; products are fp32 and rounded once. Memory-bound: D / 2 bytes per output
are read, 2 D written.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from saccade.kernels import launch
from saccade.kernels.launch import tl, triton

UNITS = {torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9, torch.float32: 1.0}
"""The value that the kernels give to 1 in each dtype, see `centred_values`."""


def pack_int4(values_ND: Tensor) -> Tensor:
    """Pack integers -8..7 into words, eight along the second dim, as a checkpoint does. -8 fills the last word."""
    nibbles = F.pad(values_ND.long() + 8, (0, -values_ND.shape[1] % 8)).reshape(len(values_ND), -1, 8)
    words = (nibbles << (4 * torch.arange(8, device=values_ND.device))).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def unpack_int4(words: Tensor, num_values: int) -> Tensor:
    """The integers -8..7 (int8) that `pack_int4` stored."""
    nibbles = (words.unsqueeze(-1) >> (4 * torch.arange(8, device=words.device, dtype=torch.int32))) & 15
    return nibbles.flatten(-2)[..., :num_values].to(torch.int8) - 8


def interleave_int4(weight_packed: Tensor) -> Tensor:
    """`weight_packed` of a checkpoint in the word order of the kernels, see the top of this file."""
    if weight_packed.shape[1] % 16:
        raise ValueError(
            f"interleave_int4: {8 * weight_packed.shape[1]} inputs are no multiple of 128; keep this layer in 16 bits"
        )
    values = unpack_int4(weight_packed, 8 * weight_packed.shape[1])
    # From m p q b to q m b p.
    return pack_int4(values.view(len(values), -1, 4, 4, 4, 2).permute(0, 1, 4, 2, 5, 3).flatten(1))


def dequantize_int4_reference(
    words: Tensor, weight_scale_NZ: Tensor, weight_zero_point: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Dequantize interleaved words to the weight [N, D]."""
    N, D = len(words), 8 * words.shape[1]
    # From q m b p to m p q b.
    values = unpack_int4(words, D).view(N, -1, 4, 4, 2, 4).permute(0, 1, 3, 5, 2, 4).flatten(1).float()
    groups = values.view(N, weight_scale_NZ.shape[1], -1)
    if weight_zero_point is not None:
        groups = groups - unpack_int4(weight_zero_point.T, N).T.unsqueeze(2)
    return (groups * weight_scale_NZ.float().unsqueeze(2)).flatten(1).to(dtype)


@triton.jit
def _nibble_pairs(words: tl.tensor, p: tl.constexpr, dtype: tl.constexpr) -> tl.tensor:
    """[..., 2]: bits 4 p and 4 p + 16 of every word, two values per register.

    In fp32 they are numbers, in 16 bits the subnormal numbers that have these bits.
    """
    bits = (words >> (4 * p)) & 0x000F000F
    if dtype == tl.float32:
        low = (bits & 15).to(dtype)
        high = (bits >> 16).to(dtype)
    else:
        low = bits.to(tl.int16).to(dtype, bitcast=True)
        high = (bits >> 16).to(tl.int16).to(dtype, bitcast=True)
    return tl.join(low, high)


@triton.jit
def nibble_values(words: tl.tensor, g: tl.constexpr, GROUPS: tl.constexpr, dtype: tl.constexpr) -> tl.tensor:
    """[N, 128 / GROUPS]: group g of GROUPS (1, 2, 4, 8) in words [N, 16] as `_nibble_pairs`; no value changes lanes."""
    N: tl.constexpr = words.shape[0]
    words = words.reshape(N, 4, 2, 2)  # q, m: its high and its low bit
    if GROUPS >= 2:
        low, high = tl.split(words.permute(0, 1, 3, 2))
        words = high if g * 2 // GROUPS == 1 else low
    if GROUPS >= 4:
        low, high = tl.split(words)
        words = high if g * 4 // GROUPS % 2 == 1 else low
    if GROUPS == 8:
        first: tl.constexpr = g % 2 * 2
        numbers = tl.join(_nibble_pairs(words, first, dtype), _nibble_pairs(words, first + 1, dtype))
        numbers = numbers.permute(0, 3, 1, 2)  # q b p -> p q b
    else:
        even = tl.join(_nibble_pairs(words, 0, dtype), _nibble_pairs(words, 2, dtype))
        odd = tl.join(_nibble_pairs(words, 1, dtype), _nibble_pairs(words, 3, dtype))
        numbers = tl.join(even, odd).reshape(N, 4, 4 // GROUPS, 2, 4).permute(0, 2, 4, 1, 3)  # q m b p -> m p q b
    return numbers.reshape(N, 128 // GROUPS)


@triton.jit
def centred_values(
    values: tl.tensor, zero_words: tl.tensor, n: tl.tensor, HAS_ZERO: tl.constexpr, UNIT: tl.constexpr
) -> tl.tensor:
    """[N, ...]: `nibble_values` minus the zero points of their outputs, times UNIT; exact in each dtype.

    The product with a power of two makes subnormal numbers normal: one fused multiply-add for two values.
    """
    dtype: tl.constexpr = values.dtype
    # The least subnormal number becomes UNIT.
    FACTOR: tl.constexpr = 2.0**127 if dtype == tl.bfloat16 else (2.0**15 if dtype == tl.float16 else 1.0)
    if HAS_ZERO:
        zero = (((zero_words >> (4 * (n % 8))) & 15).to(tl.float32) * -UNIT).to(dtype)
    else:
        zero = tl.full(n.shape, -8.0 * UNIT, dtype)
    return values * tl.full([1, 1], FACTOR, dtype) + zero[:, None]


@triton.jit
def load_group(
    weight_scale: tl.tensor,
    zero_point: tl.tensor,
    n: tl.tensor,
    group: tl.tensor,
    Z: tl.tensor,
    HAS_ZERO: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """[BLOCK_N] scales of one group, and the words that hold its zero points (without zero points the scales again)."""
    scale = tl.load(weight_scale + n.to(tl.int64) * Z + group)
    return scale, tl.load(zero_point + (n // 8) * Z + group) if HAS_ZERO else scale


@triton.jit
def _dequantize_kernel(
    words: tl.tensor,
    weight_scale: tl.tensor,
    zero_point: tl.tensor,
    weight: tl.tensor,
    N: tl.tensor,
    D: tl.tensor,
    Z: tl.tensor,
    GROUP: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """128 inputs of BLOCK_N outputs."""
    step = tl.program_id(0)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    n_read = tl.where(n < N, n, 0)
    row = n_read.to(tl.int64)[:, None]
    GROUPS: tl.constexpr = 128 // GROUP if GROUP < 128 else 1
    SIZE: tl.constexpr = 128 // GROUPS
    dtype: tl.constexpr = weight.dtype.element_ty
    tile = tl.load(words + row * (D // 8) + step * 16 + tl.arange(0, 16)[None, :])
    for g in tl.static_range(GROUPS):
        scale, zero_words = load_group(weight_scale, zero_point, n_read, (step * 128 + g * SIZE) // GROUP, Z, HAS_ZERO)
        values = centred_values(nibble_values(tile, g, GROUPS, dtype), zero_words, n, HAS_ZERO, UNIT)
        values = values.to(tl.float32) * (scale.to(tl.float32) / UNIT)[:, None]
        offset = row * D + step * 128 + g * SIZE + tl.arange(0, SIZE)[None, :]
        tl.store(weight + offset, values.to(dtype), mask=(n < N)[:, None])


def dequantize_int4_triton(
    words: Tensor, weight_scale_NZ: Tensor, weight_zero_point: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Launch the kernel, on the device of the words."""
    (N, Z), D = weight_scale_NZ.shape, 8 * words.shape[1]
    weight_ND = words.new_empty((N, D), dtype=dtype)
    _dequantize_kernel[(D // 128, triton.cdiv(N, 64))](
        words, weight_scale_NZ, words if weight_zero_point is None else weight_zero_point, weight_ND, N, D, Z,
        GROUP=D // Z, HAS_ZERO=weight_zero_point is not None, UNIT=UNITS[dtype], BLOCK_N=64, num_warps=4,
    )  # fmt: skip
    return weight_ND


def dequantize_int4(
    words: Tensor, weight_scale_NZ: Tensor, weight_zero_point: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Dequantize interleaved words to the weight [N, D]; D is a multiple of 128."""
    if launch.choose_path("dequantize_int4", *launch.available_paths(words, "triton")) == "reference":
        return dequantize_int4_reference(words, weight_scale_NZ, weight_zero_point, dtype)
    return dequantize_int4_triton(words, weight_scale_NZ, weight_zero_point, dtype)
