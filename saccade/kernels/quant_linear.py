# mypy: allow-untyped-decorators
"""Linear layers on quantized weights: 8-bit weights and activations (W8A8), or 4-bit weights and 16-bit activations (W4A16).

Legend: T tokens, D inputs, N outputs, Z groups of inputs that share a scale (D / Z inputs each), S splits of the inputs.

`linear_w8a8`: weight [N, D] in int8 or float8_e4m3fn with one scale per output, [N, 1]; every token is
quantized dynamically with its own scale (`quantize_activation`), so that its largest channel becomes 127.5 (128 is stored as 127) / 448.

    y[t, n] = x_scale[t] * weight_scale[n] * sum_d x8[t, d] * weight[n, d] + bias[n]

int8 is summed exactly in int32 (on a CPU by oneDNN, where it has such instructions), fp8 in fp32 (the library path accumulates with ~14 bits in the tensor core, an error
small beside the 4 bits of a channel). `matmul_w8a8` takes activations that are already quantized.

`linear_w4a16`: integers 0..15 in groups along the inputs; a group has a scale and a zero point (8 where none is given):

    y[t, n] = sum_d x[t, d] * (q[n, d] - zero[n, z(d)]) * weight_scale[n, z(d)] + bias[n]

with the products of a group summed in fp32 before they are scaled. A checkpoint holds (compressed-tensors `pack-quantized`)
  weight_packed      int32 [N, D / 8]: input i in bits 4 (i % 8) of word i // 8, as q = value + 8
  weight_scale       [N, Z]
  weight_zero_point  int32 [ceil(N / 8), Z]: output n in bits 4 (n % 8) of word n // 8, also + 8 (asymmetric weights only)
The kernels read the 16 words of every 128 inputs in another order: input 128 g + 32 m + 8 p + 2 q + b in bits 4 p + 16 b of
word 16 g + 4 q + m. `interleave_int4` permutes `weight_packed` once, when a model is loaded. A lane of the tensor core's left
operand holds inputs 2 q, 2 q + 1 (one register) of every eight: here they are its four words, one 16-byte load, and one shift and
one mask unpack both values of a register.

x and y are [T, D] and [T, N] in one float dtype; scales in any float dtype, used as fp32. Memory-bound up to ~64 tokens:
N * D bytes (w8a8) or N * D / 2 (w4a16) are read once. No backward: quantized weights are not trained.
"""

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from saccade.kernels import launch
from saccade.kernels.launch import tl, triton

LARGEST = {torch.int8: 127.5, torch.float8_e4m3fn: 448.0}
"""What the largest channel of a token becomes, before it is rounded: half of the range, as compressed-tensors defines it."""


_UNITS = {torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9, torch.float32: 1.0}
"""What the kernels of 4 bits make of 1, see `_centred`."""


def quantize_activation_reference(x_TD: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows in 8 bits and their fp32 scales [T]; a row of zeros has scale 0."""
    largest = LARGEST[dtype]
    scale_T = x_TD.float().abs().amax(1) / largest
    scaled = x_TD.float() / torch.where(scale_T > 0, scale_T, 1.0).unsqueeze(1)
    return round_to(scaled, dtype), scale_T


def round_to(scaled: Tensor, dtype: torch.dtype) -> Tensor:
    """Values that were divided by their scale, in int8 or fp8; those beyond the range become its ends."""
    return scaled.round().clamp(-128, 127).to(dtype) if dtype == torch.int8 else scaled.clamp(-448, 448).to(dtype)


def largest_scales(groups_NZG: Tensor, lowest: int, highest: int, dtype: torch.dtype) -> Tensor:
    """[N, Z]: scales with which the largest weight of a group becomes half of the range, as compressed-tensors defines them."""
    largest_NZ = groups_NZG.float().abs().amax(2)
    return (largest_NZ / ((highest - lowest) / 2)).to(dtype).clamp_min(torch.finfo(dtype).tiny)


def group_scales(groups_NZG: Tensor, lowest: int, highest: int, dtype: torch.dtype) -> Tensor:
    """[N, Z]: scales for rounding groups of G weights to the integers `lowest` .. `highest`, in `dtype`.

    They are `largest_scales`, which would move a weight that was rounded before to another grid. So a group whose weights all lie on a
    grid already (a weight exported by quantization-aware training) keeps its scale: rounding to nearest twice is rounding once.
    The host waits for the device.
    """
    largest_NZ = groups_NZG.float().abs().amax(2)
    scale_NZ = largest_scales(groups_NZG, lowest, highest, dtype)
    if groups_NZG.is_meta or not _grid_scales(groups_NZG[:4], largest_NZ[:4], lowest, highest, dtype)[1].any():
        return scale_NZ  # a layer is on a grid as a whole, so a few outputs tell
    found_NZ, is_on_grid_NZ = _grid_scales(groups_NZG, largest_NZ, lowest, highest, dtype)
    return torch.where(is_on_grid_NZ, found_NZ, scale_NZ)


def _grid_scales(
    groups_NZG: Tensor, largest_NZ: Tensor, lowest: int, highest: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Scales with which rounding changes nothing, and where there is one. The largest weight is then `highest` or `lowest` scales, or as many as
    the largest of a grid with fewer bits.

    The products with a scale are rounded to `dtype`, so the quotient may be a neighbour of the scale.
    """
    bits, stored_NZG = torch.int32 if dtype == torch.float32 else torch.int16, groups_NZG.to(dtype)
    found_NZ, is_found_NZ = torch.ones_like(largest_NZ, dtype=dtype), torch.zeros_like(largest_NZ, dtype=torch.bool)
    levels = (highest, -lowest) if highest > 7 else (7, 8, 3, 4, 1, 2)
    for level in levels:
        near_NZ = (largest_NZ / level).to(dtype).clamp_min(torch.finfo(dtype).tiny)
        for step in (0, 1, -1):
            scale_NZ = (near_NZ.view(bits) + step).view(dtype)
            values_NZG = (groups_NZG.float() / scale_NZ.float().unsqueeze(2)).round().clamp(lowest, highest)
            is_exact_NZ = ((values_NZG * scale_NZ.float().unsqueeze(2)).to(dtype) == stored_NZG).all(2)
            is_new_NZ = is_exact_NZ & ~is_found_NZ & (largest_NZ > 0)
            found_NZ, is_found_NZ = torch.where(is_new_NZ, scale_NZ, found_NZ), is_found_NZ | is_new_NZ
    return found_NZ, is_found_NZ


def quantize_weight(weight_ND: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Round to nearest with one scale per output, as compressed-tensors defines it: [N, D] and [N, 1] in the weight's dtype."""
    lowest, highest = (-128, 127) if dtype == torch.int8 else (-448, 448)
    if dtype == torch.int8:
        scale_N1 = group_scales(weight_ND.unsqueeze(1), lowest, highest, weight_ND.dtype)
    else:
        scale_N1 = (weight_ND.abs().amax(1, keepdim=True) / 448.0).clamp_min(torch.finfo(weight_ND.dtype).tiny)
    scaled = (weight_ND.float() / scale_N1.float()).clamp(lowest, highest)
    return (scaled.round() if dtype == torch.int8 else scaled).to(dtype), scale_N1


def matmul_w8a8_reference(
    x8_TD: Tensor,
    x_scale_T: Tensor,
    weight_ND: Tensor,
    weight_scale_N1: Tensor,
    bias_N: Tensor | None = None,
    *,
    out_dtype: torch.dtype,
) -> Tensor:
    """The first formula above, in fp32."""
    y = (x8_TD.float() @ weight_ND.float().T) * x_scale_T.unsqueeze(1) * weight_scale_N1.float().T
    return (y if bias_N is None else y + bias_N.float()).to(out_dtype)


def pack_int4(values_ND: Tensor) -> Tensor:
    """Integers -8..7 into words, eight along the second dim, in the order of a checkpoint. The last word is padded with -8."""
    nibbles = F.pad(values_ND.long() + 8, (0, -values_ND.shape[1] % 8)).reshape(len(values_ND), -1, 8)
    words = (nibbles << (4 * torch.arange(8, device=values_ND.device))).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def unpack_int4(words: Tensor, num_values: int) -> Tensor:
    """The integers -8..7 (int8) that `pack_int4` stored."""
    nibbles = (words.unsqueeze(-1) >> (4 * torch.arange(8, device=words.device, dtype=torch.int32))) & 15
    return nibbles.flatten(-2)[..., :num_values].to(torch.int8) - 8


def quantize_weight_int4(
    weight_ND: Tensor, group_size: int, *, symmetric: bool = True
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Round to nearest per group, as compressed-tensors defines it: `weight_packed`, `weight_scale`, `weight_zero_point`."""
    groups = weight_ND.float().reshape(len(weight_ND), -1, group_size)
    if symmetric:
        scale_NZ = group_scales(groups, -8, 7, weight_ND.dtype)
        zero_NZ = torch.zeros_like(scale_NZ)
    else:
        low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
        scale_NZ = (high - low) / 15
        zero_NZ = (-8 - low / scale_NZ.clamp_min(1e-12)).round().clamp(-8, 7)
    scale_NZ = scale_NZ.to(weight_ND.dtype).clamp_min(torch.finfo(weight_ND.dtype).tiny)
    values = (groups / scale_NZ.float().unsqueeze(2) + zero_NZ.unsqueeze(2)).round().clamp(-8, 7)
    zero_point = None if symmetric else pack_int4(zero_NZ.T).T.contiguous()
    return pack_int4(values.flatten(1)), scale_NZ, zero_point


def round_to_grid(weight_ND: Tensor, group_size: int | None, lowest: int, highest: int) -> Tensor:
    """The weight rounded to nearest with `largest_scales`, in its own dtype: what an int4 (-8 .. 7) or int8 (-128 .. 127) form of it
    computes with. `group_size` None: one scale per output. The host does not wait."""
    groups_NZG = weight_ND.reshape(len(weight_ND), -1, group_size or weight_ND.shape[1])
    scale_NZ1 = largest_scales(groups_NZG, lowest, highest, weight_ND.dtype).float().unsqueeze(2)
    values_NZG = (groups_NZG.float() / scale_NZ1).round().clamp(lowest, highest)
    return (values_NZG * scale_NZ1).to(weight_ND.dtype).view(weight_ND.shape)


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


def linear_w4a16_reference(
    x_TD: Tensor,
    words: Tensor,
    weight_scale_NZ: Tensor,
    weight_zero_point: Tensor | None = None,
    bias_N: Tensor | None = None,
) -> Tensor:
    """The second formula above, in fp32."""
    weight_ND = dequantize_int4_reference(words, weight_scale_NZ, weight_zero_point, torch.float32)
    return F.linear(x_TD.float(), weight_ND, None if bias_N is None else bias_N.float()).to(x_TD.dtype)


@triton.jit
def quantize_values(y: tl.tensor, scale: tl.tensor, LARGEST_VALUE: tl.constexpr, dtype: tl.constexpr) -> tl.tensor:
    """fp32 values divided by their scale (0: as they are) in int8 or fp8."""
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


@triton.jit
def _tile_of_program(
    T: tl.tensor, N: tl.tensor, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Rows and columns of a program's tile, in bands of 8 token tiles, so that concurrent programs share weights in L2."""
    tiles_t = tl.cdiv(T, BLOCK_T)
    tiles_n = tl.cdiv(N, BLOCK_N)
    band = tl.program_id(0) // (8 * tiles_n)
    height = tl.minimum(tiles_t - band * 8, 8)
    index = tl.program_id(0) % (8 * tiles_n)
    t = (band * 8 + index % height) * BLOCK_T + tl.arange(0, BLOCK_T)
    n = index // height * BLOCK_N + tl.arange(0, BLOCK_N)
    return t, n


@triton.jit
def _sum_of_splits(
    total: tl.tensor,
    sums: tl.tensor,
    counters: tl.tensor,
    offset: tl.tensor,
    stored: tl.tensor,
    T: tl.tensor,
    N: tl.tensor,
) -> tuple[tl.tensor, tl.tensor]:
    """Store a split's sums [S, T, N]; the last split of a tile to finish adds up all, always in the same order.

    A tile's counter is 0 before and after. The barrier puts the stores of all threads before the one thread that counts.
    """
    num_splits = tl.num_programs(1)
    size = tl.cast(T, tl.int64) * N
    tl.store(sums + tl.program_id(1) * size + offset, total, mask=stored)
    tl.debug_barrier()
    is_last = tl.atomic_add(counters + tl.program_id(0), 1, sem="acq_rel") == num_splits - 1
    if is_last:
        tl.store(counters + tl.program_id(0), 0)
        AHEAD: tl.constexpr = 8 if total.shape[0] * total.shape[1] <= 2048 else 2  # loads in flight, as registers allow
        total = tl.zeros_like(total)
        for start in range(0, num_splits, AHEAD):
            for i in tl.static_range(AHEAD):
                split = tl.full([1, 1], start + i, tl.int64)
                is_read = stored & (split < num_splits)
                total += tl.load(sums + split * size + offset, mask=is_read, other=0, cache_modifier=".cg")
    return total, is_last


@triton.jit(do_not_specialize=["T"])
def _w8a8_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    x_scale: tl.tensor,
    weight_scale: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    sums: tl.tensor,
    counters: tl.tensor,
    T: tl.tensor,
    N: tl.tensor,
    D: tl.tensor,
    x_stride: tl.tensor,
    weight_stride: tl.tensor,
    HAS_BIAS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLIT: tl.constexpr,
    STORES_SUMS: tl.constexpr,
    EVEN: tl.constexpr,
) -> None:
    """One tile of outputs over one split of the inputs, whose sums are stored for `_scale_kernel` if STORES_SUMS. EVEN: BLOCK_D divides D."""
    t, n = _tile_of_program(T, N, BLOCK_T, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    is_token = (t < T)[:, None]
    # Rows past the end: tokens are not read (one token must not cost the traffic of 16), outputs read row 0.
    x_rows = x + t.to(tl.int64)[:, None] * x_stride + d[None, :]
    weight_rows = weight + tl.where(n < N, n, 0).to(tl.int64)[:, None] * weight_stride + d[None, :]
    steps = tl.cdiv(D, BLOCK_D)
    first = steps * tl.program_id(1) // tl.num_programs(1) * BLOCK_D
    end = steps * (tl.program_id(1) + 1) // tl.num_programs(1) * BLOCK_D
    IS_INT: tl.constexpr = x.dtype.element_ty == tl.int8
    # Few tokens: weights are the left operand, which Hopper's wgmma reads in 64 rows from shared memory. (With 16 tokens on
    # the left every weight passes through registers, and fp8 through fp16.)
    WEIGHT_LEFT: tl.constexpr = BLOCK_T < 64
    if WEIGHT_LEFT:
        total = tl.zeros([BLOCK_N, BLOCK_T], tl.int32 if IS_INT else tl.float32)
    else:
        total = tl.zeros([BLOCK_T, BLOCK_N], tl.int32 if IS_INT else tl.float32)
    for start in range(first, end, BLOCK_D):
        if EVEN:
            x_tile = tl.load(x_rows + start, mask=is_token, other=0.0)
            weight_tile = tl.load(weight_rows + start)
        else:
            is_input = (start + d < D)[None, :]
            x_tile = tl.load(x_rows + start, mask=is_token & is_input, other=0.0)
            weight_tile = tl.load(weight_rows + start, mask=is_input, other=0.0)
        left = weight_tile if WEIGHT_LEFT else x_tile
        right = tl.trans(x_tile) if WEIGHT_LEFT else tl.trans(weight_tile)
        if IS_INT:
            total = tl.dot(left, right, total, out_dtype=tl.int32)
        else:
            # The tensor core's fp8 accumulator is short: it is added to fp32 after every 128 inputs.
            total = tl.dot(left, right, total, max_num_imprecise_acc=128 if BLOCK_D > 128 else BLOCK_D)
    if WEIGHT_LEFT:
        total = tl.trans(total)
    stored = is_token & (n < N)[None, :]
    offset = t.to(tl.int64)[:, None] * N + n[None, :]
    if STORES_SUMS:
        tl.store(sums + tl.program_id(1) * tl.cast(T, tl.int64) * N + offset, total, mask=stored)
        return
    if SPLIT:
        total, is_last = _sum_of_splits(total, sums, counters, offset, stored, T, N)
        if not is_last:
            return
    y = _scale_outputs(total, x_scale, weight_scale, bias, t, n, T, N, HAS_BIAS)
    tl.store(out + offset, y.to(out.dtype.element_ty), mask=stored)


@triton.jit
def _scale_outputs(
    total: tl.tensor,
    x_scale: tl.tensor,
    weight_scale: tl.tensor,
    bias: tl.tensor,
    t: tl.tensor,
    n: tl.tensor,
    T: tl.tensor,
    N: tl.tensor,
    HAS_BIAS: tl.constexpr,
) -> tl.tensor:
    """sums * x_scale[t] * weight_scale[n] + bias[n], in fp32."""
    rows = tl.load(x_scale + t, mask=t < T, other=0.0)
    columns = tl.load(weight_scale + n, mask=n < N, other=0.0).to(tl.float32)
    y = total.to(tl.float32) * rows[:, None] * columns[None, :]
    if HAS_BIAS:
        y += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    return y


@triton.jit(do_not_specialize=["T"])
def _scale_kernel(
    sums: tl.tensor,
    x_scale: tl.tensor,
    weight_scale: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    T: tl.tensor,
    N: tl.tensor,
    SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """Add up the sums of splits [SPLITS, T, N] and scale them."""
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    stored = (t < T)[:, None] & (n < N)[None, :]
    offset = t.to(tl.int64)[:, None] * N + n[None, :]
    total = tl.load(sums + offset, mask=stored, other=0)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(sums + split * tl.cast(T, tl.int64) * N + offset, mask=stored, other=0)
    y = _scale_outputs(total, x_scale, weight_scale, bias, t, n, T, N, HAS_BIAS)
    tl.store(out + offset, y.to(out.dtype.element_ty), mask=stored)


@triton.jit
def _nibble_pairs(words: tl.tensor, p: tl.constexpr, dtype: tl.constexpr) -> tl.tensor:
    """[..., 2]: bits 4 p and 4 p + 16 of every word, two values per register: as numbers in fp32, in 16 bits as the subnormal numbers which
    they are the bits of."""
    bits = (words >> (4 * p)) & 0x000F000F
    if dtype == tl.float32:
        low = (bits & 15).to(dtype)
        high = (bits >> 16).to(dtype)
    else:
        low = bits.to(tl.int16).to(dtype, bitcast=True)
        high = (bits >> 16).to(tl.int16).to(dtype, bitcast=True)
    return tl.join(low, high)


@triton.jit
def _values(words: tl.tensor, g: tl.constexpr, GROUPS: tl.constexpr, dtype: tl.constexpr) -> tl.tensor:
    """[N, 128 / GROUPS]: group g of GROUPS (1, 2, 4 or 8) in words [N, 16] as `_nibble_pairs`; no value changes lanes."""
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
def _centred(
    values: tl.tensor, zero_words: tl.tensor, n: tl.tensor, HAS_ZERO: tl.constexpr, UNIT: tl.constexpr
) -> tl.tensor:
    """[N, ...]: `_values` less the zero points of their outputs, times UNIT; exact in each dtype.

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
def _load_group(
    weight_scale: tl.tensor,
    zero_point: tl.tensor,
    n: tl.tensor,
    group: tl.tensor,
    Z: tl.tensor,
    HAS_ZERO: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """[BLOCK_N] scales of one group, and the words that hold its zero points (the scales again where there are none)."""
    scale = tl.load(weight_scale + n.to(tl.int64) * Z + group)
    return scale, tl.load(zero_point + (n // 8) * Z + group) if HAS_ZERO else scale


@triton.jit(do_not_specialize=["T"])
def _w4a16_kernel(
    x: tl.tensor,
    words: tl.tensor,
    weight_scale: tl.tensor,
    zero_point: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    sums: tl.tensor,
    counters: tl.tensor,
    T: tl.tensor,
    N: tl.tensor,
    Z: tl.tensor,
    x_stride: tl.tensor,
    word_stride: tl.tensor,
    GROUP: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
) -> None:
    """One tile of outputs over one split of the inputs, 128 inputs (16 words per output) a step.

    Weights are the left operand and outputs are transposed: Hopper's wgmma takes its left operand from registers, where the nibbles
    are unpacked, but its right one only from shared memory. 2.6 instructions per weight at 16 tokens in all.
    """
    t, n = _tile_of_program(T, N, BLOCK_T, BLOCK_N)
    GROUPS: tl.constexpr = 128 // GROUP if GROUP < 128 else 1  # groups within a step
    SIZE: tl.constexpr = 128 // GROUPS  # inputs of one of them
    n_read = tl.where(n < N, n, 0)
    is_token = (t < T)[:, None]
    x_rows = x + t.to(tl.int64)[:, None] * x_stride + tl.arange(0, SIZE)[None, :]
    word_rows = words + n_read.to(tl.int64)[:, None] * word_stride + tl.arange(0, 16)[None, :]
    dtype: tl.constexpr = x.dtype.element_ty
    steps = word_stride // 16
    first = steps * tl.program_id(1) // tl.num_programs(1)
    end = steps * (tl.program_id(1) + 1) // tl.num_programs(1)
    total = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    scale, zero_words = _load_group(weight_scale, zero_point, n_read, first * 128 // GROUP, Z, HAS_ZERO)
    for step in range(first, end):
        tile = tl.load(word_rows + step * 16)
        for g in tl.static_range(GROUPS):
            # One group ahead: asynchronous copies hide the latency of words and tokens, this that of scales.
            after = tl.minimum((step * 128 + (g + 1) * SIZE) // GROUP, Z - 1)
            next_scale, next_zero_words = _load_group(weight_scale, zero_point, n_read, after, Z, HAS_ZERO)
            x_tile = tl.load(x_rows + step * 128 + g * SIZE, mask=is_token, other=0.0)
            values = _centred(_values(tile, g, GROUPS, dtype), zero_words, n, HAS_ZERO, UNIT)
            part = tl.dot(values, tl.trans(x_tile), input_precision="ieee")
            total += part * (scale.to(tl.float32) / UNIT)[:, None]
            scale, zero_words = next_scale, next_zero_words
    stored = (t < T)[None, :] & (n < N)[:, None]
    offset = t.to(tl.int64)[None, :] * N + n[:, None]
    if SPLIT:
        total, is_last = _sum_of_splits(total, sums, counters, offset, stored, T, N)
        if not is_last:
            return
    if HAS_BIAS:
        total += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    tl.store(out + offset, total.to(out.dtype.element_ty), mask=stored)


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
    """128 inputs of BLOCK_N outputs, from 4 bits to the weight's dtype."""
    step = tl.program_id(0)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    n_read = tl.where(n < N, n, 0)
    row = n_read.to(tl.int64)[:, None]
    GROUPS: tl.constexpr = 128 // GROUP if GROUP < 128 else 1
    SIZE: tl.constexpr = 128 // GROUPS
    dtype: tl.constexpr = weight.dtype.element_ty
    tile = tl.load(words + row * (D // 8) + step * 16 + tl.arange(0, 16)[None, :])
    for g in tl.static_range(GROUPS):
        scale, zero_words = _load_group(weight_scale, zero_point, n_read, (step * 128 + g * SIZE) // GROUP, Z, HAS_ZERO)
        values = _centred(_values(tile, g, GROUPS, dtype), zero_words, n, HAS_ZERO, UNIT)
        values = values.to(tl.float32) * (scale.to(tl.float32) / UNIT)[:, None]
        offset = row * D + step * 128 + g * SIZE + tl.arange(0, SIZE)[None, :]
        tl.store(weight + offset, values.to(dtype), mask=(n < N)[:, None])


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """Tile sizes and launch options of a matmul."""

    block_t: int
    """Tokens of a tile."""
    block_n: int
    """Outputs of a tile."""
    block_d: int
    """Inputs per step."""
    num_warps: int
    """Warps of a program."""
    num_stages: int
    """Steps in flight."""
    programs_per_sm: int
    """Splits of the inputs are added until the GPU has this many programs."""
    stores_sums: bool = False
    """Whether a second kernel adds up the splits, instead of the last program of a tile: faster for large tiles."""


# Measured on an H200 at the 3B shapes, CUDA-graph replays with cold weights (bench/kernels/quant_linear.py, 2026-11-16). The kernels below do not start
# early (programmatic dependent launch): the programs of the next launch then fill multiprocessors unevenly, and one wave of splits takes
# as long as its fullest multiprocessor. With it int8 down (11008 -> 2048) went from 0.57 to 0.69 of bf16 at 16 tokens and from 0.82 to 1.05 at 64.

# 8 bits: maximum number of tokens -> tiles. At 16 / 64 tokens in us: int8 down 10.6 / 15.4, gate and up
# (2048 -> 22016) 15.2 / 16.6; fp8 11.0 / 14.8 and 15.5 / 16.8; torch in bf16 18.5 / 18.8 and 27.4 / 28.8. At 128 / 256 / 512 tokens int8 down takes
# 14.0 / 17.0 / 26.2 us with sums that are stored, 17.0 / 27.5 / 35.1 where the last program of a tile adds them up, 27.4 / 28.0 / 54.5 in torch.
_W8A8_TILES: dict[int, Tiles] = {
    16: Tiles(block_t=16, block_n=64, block_d=256, num_warps=4, num_stages=3, programs_per_sm=2),
    32: Tiles(block_t=32, block_n=64, block_d=256, num_warps=4, num_stages=3, programs_per_sm=2),
    64: Tiles(block_t=64, block_n=64, block_d=128, num_warps=4, num_stages=4, programs_per_sm=2),
    512: Tiles(block_t=64, block_n=128, block_d=128, num_warps=4, num_stages=4, programs_per_sm=2, stores_sums=True),
    2**62: Tiles(block_t=128, block_n=128, block_d=128, num_warps=8, num_stages=4, programs_per_sm=1),
}
_LARGE_W4A16 = Tiles(block_t=128, block_n=128, block_d=128, num_warps=8, num_stages=4, programs_per_sm=1)
# 4 bits: more than 8192 outputs -> maximum number of tokens -> tiles. At 16 / 32 / 64 tokens in us, torch in bf16 in parentheses: qkv (2048 -> 2560) 5.5 / 6.6 / 7.4
# (6.6 / 6.7 / 6.8), out (2048 -> 2048) 5.3 / 5.9 / 6.9 (6.3 / 6.4 / 6.6), gate and up 13.6 / 20.1 / 20.5 (26.9 / 27.5 / 28.8), down 9.9 / 11.3 / 15.6 (18.2 / 17.6 / 18.4).
_W4A16_TILES: dict[bool, dict[int, Tiles]] = {
    False: {
        16: Tiles(block_t=16, block_n=64, block_d=128, num_warps=4, num_stages=4, programs_per_sm=2),
        64: Tiles(block_t=32, block_n=64, block_d=128, num_warps=4, num_stages=4, programs_per_sm=2),
        2**62: _LARGE_W4A16,
    },
    True: {
        16: Tiles(block_t=16, block_n=64, block_d=128, num_warps=4, num_stages=6, programs_per_sm=4),
        32: Tiles(block_t=32, block_n=128, block_d=128, num_warps=4, num_stages=5, programs_per_sm=3),
        64: Tiles(block_t=64, block_n=64, block_d=128, num_warps=4, num_stages=3, programs_per_sm=2),
        2**62: _LARGE_W4A16,
    },
}
_W4A16_FP32_TILES = Tiles(block_t=16, block_n=64, block_d=128, num_warps=4, num_stages=1, programs_per_sm=2)
"""fp32 tokens have no matrix unit and four bytes: larger tiles need more shared memory than there is. For tests alone."""
_MIN_STEPS = 4
"""Steps along the inputs that are worth a split of their own."""
_ANY = 2**62
# By the weight's dtype (int32: 4 bits) and shape, the number of tokens from which torch's matmul is faster (after unpacking 4 bits). Ours / torch's in us:
# fp8 qkv 9.5 / 7.4 at 64 tokens, out 7.4 / 6.9, down 14.9 / 13.8, gate and up 16.2 / 19.1 at 64 and 28.8 / 18.9 at 128; int8 gate and up 36.4 / 50.0 at 256;
# 4 bits qkv 8.7 / 9.8 at 64 and 16.2 / 10.7 at 256, gate and up 62.7 / 64.5 at 256 and 433 / 265 at 2048, down 35.2 / 40.0 and 195 / 126.
_LIBRARY_TOKENS: dict[torch.dtype, dict[str, int]] = {
    torch.int8: {"small": _ANY, "wide": _ANY, "deep": _ANY},
    torch.float8_e4m3fn: {"small": 64, "wide": 65, "deep": 64},
    torch.int32: {"small": 128, "wide": 257, "deep": 257},
}
# By shape, the number of tokens up to which torch's fp8 matmul with one scale, and our scales behind it, is faster than the one with scales per row: it splits
# the inputs. In us: qkv 8.0 / 9.2 at 256 tokens and 10.2 / 9.4 at 512, down 16.0 / 29.9 at 256, 22.7 / 29.9 at 512 and 36.1 / 32.4 at 1024, gate and up 20.2 / 19.1 at 64.
_SCALED_AFTER_TOKENS = {"small": 384, "wide": 0, "deep": 768}


def _shape_of(num_outputs: int, num_inputs: int) -> str:
    """How the tables name the shape of a layer."""
    return "wide" if num_outputs > 8192 else "deep" if num_inputs > 4096 else "small"


def _prefers_library(dtype: torch.dtype, num_tokens: int, num_outputs: int, num_inputs: int) -> bool:
    """Whether torch's matmul is faster than our kernel, by the table above."""
    return num_tokens >= _LIBRARY_TOKENS[dtype][_shape_of(num_outputs, num_inputs)]


def _tiles_for(table: dict[int, Tiles], num_tokens: int) -> Tiles:
    return next(tiles for most, tiles in table.items() if num_tokens <= most)


def _num_splits(tiles: Tiles, num_programs: int, num_inputs: int, num_sms: int) -> int:
    """As many splits as give every multiprocessor the same number of programs, none shorter than `_MIN_STEPS`."""
    most = num_inputs // (tiles.block_d * _MIN_STEPS)
    filling = (per_sm * num_sms // num_programs for per_sm in range(tiles.programs_per_sm, 0, -1))
    return max(1, next((splits for splits in filling if splits <= most), most))


_unit_scales: dict[torch.device, Tensor] = {}


def _unit_scale(device: torch.device) -> Tensor | None:
    """The fp32 scalar 1 on a device. None at its first use if a graph is being captured just then: it would be written at replay alone."""
    if device not in _unit_scales:
        if torch.cuda.is_current_stream_capturing():
            return None
        _unit_scales[device] = torch.ones((), device=device)
    return _unit_scales[device]


_COUNTER_ROWS, _MAX_COUNTERS = 32, 1024
_all_counters: dict[torch.device, tuple[Tensor, dict[int, int]]] = {}
"""Zeroed counters of a device, a row for each stream; and which stream has which row."""


def _counters(device: torch.device) -> Tensor | None:
    """The current stream's counters for `_sum_of_splits`. None at a device's first call if a graph is being captured just then.

    As with cuBLAS workspaces, work launched or captured on one stream must not run concurrently: replay graphs captured on one stream
    one at a time.
    """
    is_cuda = device.type == "cuda"
    if device not in _all_counters:
        if is_cuda and torch.cuda.is_current_stream_capturing():
            return None
        _all_counters[device] = torch.zeros((_COUNTER_ROWS, _MAX_COUNTERS), dtype=torch.int32, device=device), {}
    counters, rows = _all_counters[device]
    row = rows.setdefault(torch.cuda.current_stream(device).cuda_stream if is_cuda else 0, len(rows))
    return counters[row] if row < _COUNTER_ROWS else None


def _choose_splits(
    tiles: Tiles, num_programs: int, num_inputs: int, device: torch.device, num_splits: int | None
) -> tuple[int, Tensor | None]:
    """Splits (`num_splits` if given) and the counters they need where no second kernel adds them up; a single one where there are no counters."""
    splits = num_splits or _num_splits(tiles, num_programs, num_inputs, launch.num_sms(device))
    if tiles.stores_sums:
        return splits, None
    counters = _counters(device) if splits > 1 and num_programs <= _MAX_COUNTERS else None
    return (1 if counters is None else splits), counters


def _matmul_w8a8_triton(
    x8_TD: Tensor,
    x_scale_T: Tensor,
    weight_ND: Tensor,
    weight_scale_N1: Tensor,
    bias_N: Tensor | None,
    out_dtype: torch.dtype,
    tiles: Tiles,
    num_splits: int | None = None,
) -> Tensor:
    (T, D), N = x8_TD.shape, len(weight_ND)
    num_programs = triton.cdiv(T, tiles.block_t) * triton.cdiv(N, tiles.block_n)
    splits, counters = _choose_splits(tiles, num_programs, D, x8_TD.device, num_splits)
    sum_dtype = torch.int32 if weight_ND.dtype == torch.int8 else torch.float32
    out_TN = x8_TD.new_empty((T, N), dtype=out_dtype)
    stores_sums = tiles.stores_sums and splits > 1
    has_sums = stores_sums or counters is not None
    sums_STN = x8_TD.new_empty((splits, T, N), dtype=sum_dtype) if has_sums else out_TN
    _w8a8_kernel[(num_programs, splits)](
        x8_TD, weight_ND, x_scale_T, weight_scale_N1, out_TN if bias_N is None else bias_N, out_TN, sums_STN,
        out_TN if counters is None else counters, T, N, D, x8_TD.stride(0), weight_ND.stride(0), HAS_BIAS=bias_N is not None,
        BLOCK_T=tiles.block_t, BLOCK_N=tiles.block_n, BLOCK_D=tiles.block_d, SPLIT=counters is not None,
        STORES_SUMS=stores_sums, EVEN=D % tiles.block_d == 0, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    if stores_sums:
        _scale_sums(sums_STN, x_scale_T, weight_scale_N1, bias_N, out_TN)
    return out_TN


def _scale_sums(
    sums_STN: Tensor, x_scale_T: Tensor, weight_scale_N1: Tensor, bias_N: Tensor | None, out_TN: Tensor
) -> None:
    """Write what the sums of all splits are, scaled."""
    (S, T, N), block_t, block_n = sums_STN.shape, 4, 512
    _scale_kernel[(triton.cdiv(T, block_t), triton.cdiv(N, block_n))](
        sums_STN, x_scale_T, weight_scale_N1, out_TN if bias_N is None else bias_N, out_TN, T, N, SPLITS=S,
        HAS_BIAS=bias_N is not None, BLOCK_T=block_t, BLOCK_N=block_n, num_warps=4,
    )  # fmt: skip


def _matmul_w8a8_library(
    x8_TD: Tensor,
    x_scale_T: Tensor,
    weight_ND: Tensor,
    weight_scale_N1: Tensor,
    bias_N: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """torch's int8 matmul on a CPU, and its fp8 matmul on a GPU: with one scale and ours behind it for few tokens, else with scales per row."""
    if weight_ND.dtype == torch.int8:
        y = torch._int_mm(x8_TD, weight_ND.T).float().mul_(x_scale_T.unsqueeze(1)).mul_(weight_scale_N1.float().T)
        return (y if bias_N is None else y.add_(bias_N)).to(out_dtype)
    (T, D), N = x8_TD.shape, len(weight_ND)
    unit = _unit_scale(x8_TD.device) if _SCALED_AFTER_TOKENS[_shape_of(N, D)] >= T else None
    if unit is not None:
        sums_TN = torch._scaled_mm(x8_TD, weight_ND.T, unit, unit, out_dtype=torch.float32, use_fast_accum=True)
        out_TN = sums_TN.new_empty((T, N), dtype=out_dtype)
        _scale_sums(sums_TN.unsqueeze(0), x_scale_T, weight_scale_N1, bias_N, out_TN)
        return out_TN
    has_fused_bias = bias_N is not None and bias_N.dtype == out_dtype
    y = torch._scaled_mm(
        x8_TD, weight_ND.T, x_scale_T.unsqueeze(1), weight_scale_N1.float().T, bias=bias_N if has_fused_bias else None,
        out_dtype=out_dtype, use_fast_accum=True,
    )  # fmt: skip
    return y if bias_N is None or has_fused_bias else y.add_(bias_N)


def _library_takes(x8_TD: Tensor, weight_ND: Tensor, out_dtype: torch.dtype) -> bool:
    """Whether torch's 8-bit matmuls accept these shapes on this device."""
    D, N = x8_TD.shape[1], len(weight_ND)
    if x8_TD.is_cpu:
        is_int8 = weight_ND.dtype == torch.int8 and x8_TD.is_contiguous() and weight_ND.is_contiguous()
        return is_int8 and not torch.compiler.is_compiling() and _has_exact_int8()
    is_fp8 = weight_ND.dtype == torch.float8_e4m3fn and out_dtype == torch.bfloat16
    return x8_TD.is_cuda and is_fp8 and D % 16 == N % 16 == 0 and x8_TD.is_contiguous() and weight_ND.is_contiguous()


@functools.cache
def _has_exact_int8() -> bool:
    """Whether this CPU has int8 dot products that sum in int32, and torch uses them. Without, oneDNN sums pairs in int16, which overflow."""
    if not hasattr(torch, "_int_mm") or not getattr(torch.cpu, "_is_vnni_supported", bool)():
        return False
    weight_ND = torch.tensor([[-128, 127], [127, 127]], dtype=torch.int8).repeat(16, 64)
    exact = weight_ND.float() @ weight_ND.float().T
    return all(torch.equal(torch._int_mm(weight_ND[:rows], weight_ND.T).float(), exact[:rows]) for rows in (1, 32))


def _linear_w4a16_triton(
    x_TD: Tensor,
    words: Tensor,
    weight_scale_NZ: Tensor,
    weight_zero_point: Tensor | None,
    bias_N: Tensor | None,
    tiles: Tiles,
    num_splits: int | None = None,
) -> Tensor:
    (T, D), (N, Z) = x_TD.shape, weight_scale_NZ.shape
    num_programs = triton.cdiv(T, tiles.block_t) * triton.cdiv(N, tiles.block_n)
    splits, counters = _choose_splits(tiles, num_programs, D, x_TD.device, num_splits)
    out_TN = x_TD.new_empty((T, N))
    sums_STN = out_TN if counters is None else x_TD.new_empty((splits, T, N), dtype=torch.float32)
    _w4a16_kernel[(num_programs, splits)](
        x_TD, words, weight_scale_NZ, words if weight_zero_point is None else weight_zero_point,
        out_TN if bias_N is None else bias_N, out_TN, sums_STN, out_TN if counters is None else counters, T, N, Z,
        x_TD.stride(0), words.stride(0), GROUP=D // Z, HAS_ZERO=weight_zero_point is not None, HAS_BIAS=bias_N is not None,
        UNIT=_UNITS[x_TD.dtype], BLOCK_T=tiles.block_t, BLOCK_N=tiles.block_n, SPLIT=counters is not None, num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )  # fmt: skip
    return out_TN


def _dequantize_int4_triton(
    words: Tensor, weight_scale_NZ: Tensor, weight_zero_point: Tensor | None, dtype: torch.dtype
) -> Tensor:
    (N, Z), D = weight_scale_NZ.shape, 8 * words.shape[1]
    weight_ND = words.new_empty((N, D), dtype=dtype)
    _dequantize_kernel[(D // 128, triton.cdiv(N, 64))](
        words, weight_scale_NZ, words if weight_zero_point is None else weight_zero_point, weight_ND, N, D, Z,
        GROUP=D // Z, HAS_ZERO=weight_zero_point is not None, UNIT=_UNITS[dtype], BLOCK_N=64, num_warps=4,
    )  # fmt: skip
    return weight_ND


def dequantize_int4(
    words: Tensor, weight_scale_NZ: Tensor, weight_zero_point: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Dequantize interleaved words to the weight [N, D]; D is a multiple of 128."""
    if launch.choose_path("dequantize_int4", *launch.available_paths(words, "triton")) == "reference":
        return dequantize_int4_reference(words, weight_scale_NZ, weight_zero_point, dtype)
    return _dequantize_int4_triton(words, weight_scale_NZ, weight_zero_point, dtype)


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
            x_TD, x8_TD, scale_T, D, x_TD.stride(0), BLOCK=block, LARGEST_VALUE=LARGEST[dtype], num_warps=4 if block <= 2048 else 8,
            **launch.overlap_options(x_TD.device),
        )  # fmt: skip
    return x8_TD, scale_T


def matmul_w8a8(
    x8_TD: Tensor,
    x_scale_T: Tensor,
    weight_ND: Tensor,
    weight_scale_N1: Tensor,
    bias_N: Tensor | None = None,
    *,
    out_dtype: torch.dtype,
) -> Tensor:
    """Tokens and weights of 8 bits, with their scales, to outputs in `out_dtype`; see the top of this file."""
    (T, D), N = x8_TD.shape, len(weight_ND)
    if (
        weight_ND.shape[1] != D
        or weight_scale_N1.numel() != N
        or x_scale_T.shape != (T,)
        or x8_TD.dtype != weight_ND.dtype
    ):
        raise ValueError(
            f"matmul_w8a8: x {tuple(x8_TD.shape)} {x8_TD.dtype} with {tuple(x_scale_T.shape)} scales and weight "
            f"{tuple(weight_ND.shape)} {weight_ND.dtype} with {tuple(weight_scale_N1.shape)} scales do not fit"
        )
    if weight_ND.stride(1) != 1 or x8_TD.stride(1) != 1 or not weight_scale_N1.is_contiguous():
        raise ValueError("matmul_w8a8: inputs and weights must be contiguous along D, weight scales altogether")
    able: tuple[launch.Path, ...] = launch.available_paths(x8_TD, "triton")
    if _library_takes(x8_TD, weight_ND, out_dtype):
        is_faster = x8_TD.is_cpu or _prefers_library(weight_ND.dtype, T, N, D)
        able = ("library", *able) if is_faster else (*able, "library")
    path = launch.choose_path(f"matmul_w8a8 {_name(weight_ND.dtype)}", *able)
    if path == "reference" or T == 0:
        return matmul_w8a8_reference(x8_TD, x_scale_T, weight_ND, weight_scale_N1, bias_N, out_dtype=out_dtype)
    if path == "library":
        return _matmul_w8a8_library(x8_TD, x_scale_T, weight_ND, weight_scale_N1, bias_N, out_dtype)
    tiles = _tiles_for(_W8A8_TILES, T)
    return _matmul_w8a8_triton(x8_TD, x_scale_T, weight_ND, weight_scale_N1, bias_N, out_dtype, tiles)


def linear_w8a8(x_TD: Tensor, weight_ND: Tensor, weight_scale_N1: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """x @ weight^T + bias on 8-bit weights; tokens are quantized to its dtype."""
    x8_TD, x_scale_T = quantize_activation(x_TD, weight_ND.dtype)
    return matmul_w8a8(x8_TD, x_scale_T, weight_ND, weight_scale_N1, bias_N, out_dtype=x_TD.dtype)


def linear_w8a8_reference(
    x_TD: Tensor, weight_ND: Tensor, weight_scale_N1: Tensor, bias_N: Tensor | None = None
) -> Tensor:
    """The same through the references."""
    x8_TD, x_scale_T = quantize_activation_reference(x_TD, weight_ND.dtype)
    return matmul_w8a8_reference(x8_TD, x_scale_T, weight_ND, weight_scale_N1, bias_N, out_dtype=x_TD.dtype)


def linear_w4a16(
    x_TD: Tensor,
    words: Tensor,
    weight_scale_NZ: Tensor,
    weight_zero_point: Tensor | None = None,
    bias_N: Tensor | None = None,
) -> Tensor:
    """x @ weight^T + bias on 4-bit weights; `words` is `interleave_int4` of a checkpoint's `weight_packed`."""
    (T, D), (N, Z) = x_TD.shape, weight_scale_NZ.shape
    group = D // max(1, Z)
    if words.shape != (N, D // 8) or D % 128 or group * Z != D or (group % 128 and group not in (16, 32, 64)):
        raise ValueError(
            f"linear_w4a16: x {tuple(x_TD.shape)}, words {tuple(words.shape)} and scales {tuple(weight_scale_NZ.shape)} do not "
            "fit; inputs must be a multiple of 128, groups 16, 32, 64 or a multiple of 128 inputs"
        )
    if not (words.is_contiguous() and weight_scale_NZ.is_contiguous()):
        raise ValueError("linear_w4a16: words and scales must be contiguous")
    able: tuple[launch.Path, ...] = launch.available_paths(x_TD, "triton")
    if "triton" in able:
        is_faster = x_TD.is_cuda and _prefers_library(torch.int32, T, N, D)
        able = ("library", *able) if is_faster else (*able, "library")
    path = launch.choose_path("linear_w4a16", *able)
    if path == "reference" or T == 0:
        return linear_w4a16_reference(x_TD, words, weight_scale_NZ, weight_zero_point, bias_N)
    x_TD = x_TD if x_TD.stride(1) == 1 else x_TD.contiguous()
    if path == "library":
        return F.linear(x_TD, _dequantize_int4_triton(words, weight_scale_NZ, weight_zero_point, x_TD.dtype), bias_N)
    tiles = _W4A16_FP32_TILES if x_TD.dtype == torch.float32 else _tiles_for(_W4A16_TILES[N > 8192], T)
    return _linear_w4a16_triton(x_TD, words, weight_scale_NZ, weight_zero_point, bias_N, tiles)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
