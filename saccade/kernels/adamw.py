# mypy: allow-untyped-decorators
"""One step of AdamW over lists of tensors, with moments in fp32 or in 8 bits.

    g = grad_scale * gradient
    m = beta1 m + (1 - beta1) g            v = beta2 v + (1 - beta2) g^2
    w = w - lr (weight_decay w + (m / (1 - beta1^step)) / (sqrt(v / (1 - beta2^step)) + eps))

w is the fp32 master, gradients have any float dtype; all arithmetic is fp32. If parameters are given (bf16 copies of
the masters), w is rounded into them. All updates are in place. `step` counts from 1.

`adamw`: m and v are fp32 tensors of the master's shape.

`adamw8bit`: m and v take one byte each, the master stays in fp32. 256 consecutive elements of a row (the first dim
against all others) share an fp32 scale, their largest magnitude; blocks never cross rows, so a tensor sharded by rows
has the same blocks as the whole one. With codes c:

    m = scale * sign(c) (c / 127)^2,  c in -127..127      v = scale * 2^((c - 255) / 8),  c in 1..255; 0 for c = 0

Steps of m are 1.6 % of the largest and become finer towards zero. v has steps of 9 % over 32 octaves: a small v next to
a large one survives; below that range it is rounded up, never to 0. Both are rounded stochastically (the noise is a
hash of element and step): rounding to nearest would lose every change smaller than half a step, that is most changes of
v. After hundreds of steps with beta2 = 0.95, sqrt(v) has the right mean and is within 10 % for eight elements of ten.

A list of tensors is one launch (multi-tensor apply): each program finds its chunk of one tensor in a table of pointers
on the GPU. Lists are split by dtype and by 16-byte alignment. Bytes per element with bf16 gradients and parameters: 28
with fp32 moments (30 with fp32 gradients), 16 with 8-bit moments. The host spends about 3 us a tensor.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from saccade.device import to_device
from saccade.kernels import launch
from saccade.kernels.launch import tl, triton

BLOCK_SIZE = 256
"""Elements of a row that share a scale in 8 bits."""
_TINY = 1e-37
"""A block whose largest value is below this holds zeros: ratios of denormal numbers are inaccurate."""


class Settings(NamedTuple):
    """Hyperparameters of one step."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int
    """The number of this step, from 1."""
    grad_scale: float = 1.0
    """Gradients are multiplied by it."""


class Moment8bit(NamedTuple):
    """One moment of one tensor [R, ...] in 8 bits."""

    codes: Tensor
    """int8 (first moment) or uint8 (second), of the tensor's shape."""
    scales: Tensor
    """[R, blocks of a row] fp32."""


def zero_moment(x: Tensor, dtype: torch.dtype) -> Moment8bit:
    """A moment of zero for a tensor like `x`: int8 for the first, uint8 for the second."""
    scales = torch.zeros(_scales_shape(x), device=x.device)
    return Moment8bit(torch.zeros(x.shape, dtype=dtype, device=x.device), scales)


def adamw_reference(
    gradients: Sequence[Tensor],
    masters: Sequence[Tensor],
    first: Sequence[Tensor],
    second: Sequence[Tensor],
    parameters: Sequence[Tensor] | None,
    settings: Settings,
) -> None:
    """The formula above, in plain PyTorch."""
    lr, beta1, beta2, eps, weight_decay, step, grad_scale = settings
    for i, (gradient, master, m, v) in enumerate(zip(gradients, masters, first, second, strict=True)):
        g = gradient.float() * grad_scale
        m.lerp_(g, 1.0 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1.0 - beta2)
        denominator = (v.sqrt() / math.sqrt(1.0 - beta2**step)).add_(eps)
        master.mul_(1.0 - lr * weight_decay).addcdiv_(m, denominator, value=-lr / (1.0 - beta1**step))
        if parameters is not None:
            parameters[i].copy_(master)


def adamw8bit_reference(
    gradients: Sequence[Tensor],
    masters: Sequence[Tensor],
    first: Sequence[Moment8bit],
    second: Sequence[Moment8bit],
    parameters: Sequence[Tensor] | None,
    settings: Settings,
) -> None:
    """`adamw_reference` with the moments decoded and encoded; the update uses them before rounding."""
    for i, (gradient, master, m8, v8) in enumerate(zip(gradients, masters, first, second, strict=True)):
        m, v = decode_first(m8), decode_second(v8)
        parameter = None if parameters is None else [parameters[i]]
        adamw_reference([gradient], [master], [m], [v], parameter, settings)
        noise_m, noise_v = _noise_reference(master, settings.step)
        _encode_first_reference(m, noise_m, m8)
        _encode_second_reference(v, noise_v, v8)


def decode_first(moment: Moment8bit) -> Tensor:
    """The first moment in fp32."""
    codes = _blocks(moment.codes.float())
    return _unblocked(codes * codes.abs() * (1.0 / 127.0**2) * moment.scales.unsqueeze(-1), moment.codes)


def decode_second(moment: Moment8bit) -> Tensor:
    """The second moment in fp32."""
    codes = _blocks(moment.codes.float())
    values = torch.where(codes > 0, torch.exp2((codes - 255.0) * 0.125), 0.0)
    return _unblocked(values * moment.scales.unsqueeze(-1), moment.codes)


def _encode_first_reference(m: Tensor, noise: Tensor, out: Moment8bit) -> None:
    m_RBE = _blocks(m)
    scales = m_RBE.abs().amax(-1)
    share = m_RBE.abs() / torch.where(scales > _TINY, scales, torch.inf).unsqueeze(-1)
    level = share.sqrt() * 127.0
    low = level.floor()
    # Stochastic rounding: up with probability (level^2 - low^2) / ((low + 1)^2 - low^2)
    code = low + (_blocks(noise) < (level * level - low * low) / (2.0 * low + 1.0))
    out.codes.copy_(_unblocked((code * m_RBE.sign()).to(torch.int8), m))
    out.scales.copy_(scales)


def _encode_second_reference(v: Tensor, noise: Tensor, out: Moment8bit) -> None:
    v_RBE = _blocks(v)
    scales = v_RBE.amax(-1)
    share = v_RBE / torch.where(scales > _TINY, scales, torch.inf).unsqueeze(-1)
    low = (255.0 + 8.0 * torch.log2(share.clamp_min(1e-20))).floor().clamp_min(1.0)
    # Stochastic rounding: up with probability (share / 2^((low - 255) / 8) - 1) / (2^(1/8) - 1)
    rise = share * torch.exp2((255.0 - low) * 0.125) - 1.0
    code = (low + (_blocks(noise) < rise * (1.0 / (2.0**0.125 - 1.0)))).clamp_max(255.0)
    out.codes.copy_(_unblocked(torch.where(share > 0, code, 0.0).to(torch.uint8), v))
    out.scales.copy_(scales)


def _noise_reference(x: Tensor, step: int) -> tuple[Tensor, Tensor]:
    """Two numbers in [0, 1) for each element of `x`: the halves of a 32-bit hash (MurmurHash3's last steps)."""
    h = torch.arange(x.numel(), device=x.device) * 0x9E3779B1 + _seed(step) & 0xFFFFFFFF
    h = (h ^ h >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    h = (h ^ h >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    h = (h ^ h >> 16).view(x.shape)
    return (h & 0xFFFF) * 2.0**-16, (h >> 16) * 2.0**-16


def _seed(step: int) -> int:
    return step * 0x27D4EB2F & 0x7FFFFFFF


def _rows(x: Tensor) -> tuple[int, int]:
    """Number of rows and elements per row."""
    num_rows = x.shape[0] if x.ndim else 1
    return num_rows, x.numel() // max(1, num_rows)


def _scales_shape(x: Tensor) -> tuple[int, int]:
    num_rows, num_columns = _rows(x)
    return num_rows, -(-num_columns // BLOCK_SIZE)


def _blocks(x: Tensor) -> Tensor:
    """[R, B, 256]: rows in blocks, the last one of each zero-padded."""
    num_rows, num_columns = _rows(x)
    padded = F.pad(x.reshape(num_rows, num_columns), (0, -num_columns % BLOCK_SIZE))
    return padded.view(*_scales_shape(x), BLOCK_SIZE)


def _unblocked(x_RBE: Tensor, like: Tensor) -> Tensor:
    return x_RBE.flatten(1)[:, : _rows(like)[1]].reshape(like.shape)


@triton.jit
def _pointer(entry: tl.tensor, dtype: tl.constexpr, ALIGNED: tl.constexpr) -> tl.tensor:
    """The pointer stored at `entry`."""
    pointer = tl.load(entry).to(tl.pointer_type(dtype))
    return tl.multiple_of(pointer, 16) if ALIGNED else pointer


@triton.jit
def _updated(
    g: tl.tensor,
    w: tl.tensor,
    m: tl.tensor,
    v: tl.tensor,
    beta1: tl.tensor,
    beta2: tl.tensor,
    eps: tl.tensor,
    keep: tl.tensor,
    rate: tl.tensor,
    root2: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """New (w, m, v). keep = 1 - lr weight_decay, rate = lr / (1 - beta1^step), root2 = 1 / sqrt(1 - beta2^step)."""
    m = m + (1.0 - beta1) * (g - m)
    v = beta2 * v + (1.0 - beta2) * g * g
    return keep * w - rate * m / (tl.sqrt(v) * root2 + eps), m, v


@triton.jit
def _adamw_kernel(
    table: tl.tensor,
    tensor_of_chunk: tl.tensor,
    beta1: tl.float32,
    beta2: tl.float32,
    eps: tl.float32,
    keep: tl.float32,
    rate: tl.float32,
    root2: tl.float32,
    grad_scale: tl.float32,
    GRADIENT: tl.constexpr,
    PARAMETER: tl.constexpr,
    UNIT: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """CHUNK elements of one tensor.

    A row of the table: gradient, master, m, v, parameter, size / UNIT, size, first chunk. PARAMETER is None without a
    parameter to write. UNIT is 16 if pointers and sizes are aligned, else 1.
    """
    row = table + tl.load(tensor_of_chunk + tl.program_id(0)) * 8
    gradient = _pointer(row, GRADIENT, UNIT > 1)
    master = _pointer(row + 1, tl.float32, UNIT > 1)
    first = _pointer(row + 2, tl.float32, UNIT > 1)
    second = _pointer(row + 3, tl.float32, UNIT > 1)
    if PARAMETER is not None:
        parameter = _pointer(row + 4, PARAMETER, UNIT > 1)
    size = tl.load(row + 5) * UNIT
    begin = (tl.program_id(0) - tl.load(row + 7)) * CHUNK
    for start in range(begin, tl.minimum(begin + CHUNK, size), BLOCK):
        i = start + tl.arange(0, BLOCK)
        mask = i < size
        g = tl.load(gradient + i, mask=mask, other=0.0).to(tl.float32) * grad_scale
        w = tl.load(master + i, mask=mask, other=0.0)
        m = tl.load(first + i, mask=mask, other=0.0)
        v = tl.load(second + i, mask=mask, other=0.0)
        w, m, v = _updated(g, w, m, v, beta1, beta2, eps, keep, rate, root2)
        tl.store(master + i, w, mask=mask)
        tl.store(first + i, m, mask=mask)
        tl.store(second + i, v, mask=mask)
        if PARAMETER is not None:
            tl.store(parameter + i, w.to(PARAMETER), mask=mask)


@triton.jit
def _noise(i: tl.tensor, seed: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """See `_noise_reference`."""
    h = i.to(tl.uint32) * 0x9E3779B1 + seed.to(tl.uint32)
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    h = h ^ (h >> 16)
    return (h & 0xFFFF).to(tl.float32) * 0.0000152587890625, (h >> 16).to(tl.float32) * 0.0000152587890625


@triton.jit(do_not_specialize=["seed"])
def _adamw8bit_kernel(
    table: tl.tensor,
    tensor_of_chunk: tl.tensor,
    beta1: tl.float32,
    beta2: tl.float32,
    eps: tl.float32,
    keep: tl.float32,
    rate: tl.float32,
    root2: tl.float32,
    grad_scale: tl.float32,
    seed: tl.tensor,
    GRADIENT: tl.constexpr,
    PARAMETER: tl.constexpr,
    UNIT: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """CHUNK blocks of 256 of one tensor, BLOCK at a time.

    A row of the table: gradient, master, codes and scales of m, those of v, parameter, columns / UNIT, blocks, first
    chunk.
    """
    row = table + tl.load(tensor_of_chunk + tl.program_id(0)) * 10
    gradient = _pointer(row, GRADIENT, UNIT > 1)
    master = _pointer(row + 1, tl.float32, UNIT > 1)
    first = _pointer(row + 2, tl.int8, UNIT > 1)
    first_scale = _pointer(row + 3, tl.float32, UNIT > 1)
    second = _pointer(row + 4, tl.uint8, UNIT > 1)
    second_scale = _pointer(row + 5, tl.float32, UNIT > 1)
    if PARAMETER is not None:
        parameter = _pointer(row + 6, PARAMETER, UNIT > 1)
    num_columns = tl.load(row + 7) * UNIT
    blocks_per_row = tl.cdiv(num_columns, 256)
    begin = (tl.program_id(0) - tl.load(row + 9)) * CHUNK
    end = tl.minimum(begin + CHUNK, tl.load(row + 8))
    for start in range(begin, end, BLOCK):
        block = start + tl.arange(0, BLOCK)
        column = (block % blocks_per_row * 256)[:, None] + tl.arange(0, 256)[None, :]
        i = (block // blocks_per_row * num_columns)[:, None] + column
        is_block = block < end
        mask = is_block[:, None] & (column < num_columns)
        m_scale = tl.load(first_scale + block, mask=is_block, other=0.0)[:, None]
        v_scale = tl.load(second_scale + block, mask=is_block, other=0.0)[:, None]
        # m = scale sign(c) (c / 127)^2;  v = scale 2^((c - 255) / 8), 0 for c = 0
        c = tl.load(first + i, mask=mask, other=0).to(tl.float32)
        m = c * tl.abs(c) * (1.0 / 16129.0) * m_scale
        c = tl.load(second + i, mask=mask, other=0).to(tl.float32)
        v = tl.where(c > 0, tl.exp2((c - 255.0) * 0.125), 0.0) * v_scale
        g = tl.load(gradient + i, mask=mask, other=0.0).to(tl.float32) * grad_scale
        w = tl.load(master + i, mask=mask, other=0.0)
        w, m, v = _updated(g, w, m, v, beta1, beta2, eps, keep, rate, root2)
        tl.store(master + i, w, mask=mask)
        if PARAMETER is not None:
            tl.store(parameter + i, w.to(PARAMETER), mask=mask)
        noise_m, noise_v = _noise(i, seed)
        # Stochastic rounding; see the references.
        m_scale = tl.max(tl.abs(m), 1)
        share = tl.abs(m) / tl.where(m_scale > 1e-37, m_scale, float("inf"))[:, None]
        level = tl.sqrt(share) * 127.0
        low = tl.floor(level)
        c = low + (noise_m < (level * level - low * low) / (2.0 * low + 1.0)).to(tl.float32)
        tl.store(first + i, tl.where(m < 0, -c, c).to(tl.int8), mask=mask)
        tl.store(first_scale + block, m_scale, mask=is_block)
        v_scale = tl.max(v, 1)
        share = v / tl.where(v_scale > 1e-37, v_scale, float("inf"))[:, None]
        low = tl.maximum(tl.floor(255.0 + 8.0 * tl.log2(tl.maximum(share, 1e-20))), 1.0)
        rise = share * tl.exp2((255.0 - low) * 0.125) - 1.0
        c = tl.minimum(low + (noise_v < rise * 11.048157543).to(tl.float32), 255.0)
        tl.store(second + i, tl.where(share > 0, c, 0.0).to(tl.uint8), mask=mask)
        tl.store(second_scale + block, v_scale, mask=is_block)


class _Cut(NamedTuple):
    chunk: int
    """Elements (8 bits: blocks of 256) per program: enough to hide the latency of the table."""
    block: int
    """Elements (blocks) at a time."""
    num_warps: int


# Not tuned: 8 elements per thread, 16 iterations per program; bench/kernels/adamw.py --tune measures them.
_CONFIGS = {
    "adamw": _Cut(chunk=32768, block=2048, num_warps=8),
    "adamw8bit": _Cut(chunk=128, block=8, num_warps=8),
}

_TRITON_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def _launch(
    operation: str,
    kernel: Any,
    lists: Sequence[Sequence[Tensor]],
    parameters: Sequence[Tensor] | None,
    extents: Sequence[int],
    sizes: Sequence[int],
    factors: tuple[float, ...],
) -> None:
    """Run `kernel` over the tensors of `lists`, the gradients first: one launch for all of one dtype and alignment.

    `extents`: elements between aligned addresses. `sizes`: elements or blocks to be split into chunks.
    """
    config, gradients = _CONFIGS[operation], lists[0]
    lists = (*lists, parameters or [])
    if not all(x.is_contiguous() for tensors in lists for x in tensors):
        raise ValueError(f"{operation}: a tensor is not contiguous")
    columns = [[x.data_ptr() for x in tensors] or [0] * len(gradients) for tensors in lists]
    table = np.array([*columns, extents, sizes], np.int64).T
    units = np.where((table[:, :-1] % 16 == 0).all(1), 16, 1).tolist()
    written = [None] * len(gradients) if parameters is None else [x.dtype for x in parameters]
    buckets: dict[tuple[torch.dtype, torch.dtype | None, int], list[int]] = {}
    for i, gradient in enumerate(gradients):
        if sizes[i]:
            buckets.setdefault((gradient.dtype, written[i], units[i]), []).append(i)
    for (read, write, unit), members in buckets.items():
        rows = table[members]
        rows[:, -2] //= unit
        num_chunks = -(-rows[:, -1] // config.chunk)
        rows = np.column_stack([rows, np.cumsum(num_chunks) - num_chunks])
        tensor_of_chunk = np.repeat(np.arange(len(rows)), num_chunks)
        kernel[(len(tensor_of_chunk),)](
            to_device(rows, gradients[0].device),
            to_device(tensor_of_chunk, gradients[0].device),
            *factors,
            GRADIENT=_TRITON_DTYPES[read],
            PARAMETER=write and _TRITON_DTYPES[write],
            UNIT=unit,
            CHUNK=config.chunk,
            BLOCK=config.block,
            num_warps=config.num_warps,
        )


def _check(
    operation: str,
    shapes: Sequence[tuple[int, ...]],
    *lists: tuple[Sequence[Tensor] | None, torch.dtype | None],
) -> None:
    """Check shapes and, where given, dtypes: the kernels get only pointers."""
    for tensors, dtype in lists:
        for x, shape in zip(tensors, shapes, strict=True) if tensors is not None else ():
            if x.shape != shape or (dtype is not None and x.dtype != dtype):
                wanted = f"{dtype or 'a float dtype'} {tuple(shape)}"
                raise ValueError(f"{operation}: a tensor {x.dtype} {tuple(x.shape)} does not fit; {wanted} is needed")


def _factors(settings: Settings) -> tuple[float, ...]:
    """Scalar arguments of the kernels, computed in fp64."""
    lr, beta1, beta2, eps, weight_decay, step, grad_scale = settings
    rate, root2 = lr / (1.0 - beta1**step), (1.0 - beta2**step) ** -0.5
    return beta1, beta2, eps, 1.0 - lr * weight_decay, rate, root2, grad_scale


def adamw(
    gradients: Sequence[Tensor],
    masters: Sequence[Tensor],
    first: Sequence[Tensor],
    second: Sequence[Tensor],
    parameters: Sequence[Tensor] | None,
    settings: Settings,
) -> None:
    """One step in place, moments in fp32. `parameters`: copies of the masters in another dtype, written too."""
    kept = ((x, torch.float32) for x in (masters, first, second))
    _check("adamw", [x.shape for x in masters], (gradients, None), (parameters, None), *kept)
    if masters and launch.choose_path("adamw", *launch.available_paths(masters[0], "triton")) == "triton":
        sizes = [x.numel() for x in masters]
        lists = (gradients, masters, first, second)
        _launch("adamw", _adamw_kernel, lists, parameters, sizes, sizes, _factors(settings))
    else:
        adamw_reference(gradients, masters, first, second, parameters, settings)


def adamw8bit(
    gradients: Sequence[Tensor],
    masters: Sequence[Tensor],
    first: Sequence[Moment8bit],
    second: Sequence[Moment8bit],
    parameters: Sequence[Tensor] | None,
    settings: Settings,
) -> None:
    """One step in place, moments in 8 bits. `parameters`: copies of the masters in another dtype, written too."""
    codes = [x.codes for x in first], [x.codes for x in second]
    scales = [x.scales for x in first], [x.scales for x in second]
    kept = (masters, torch.float32), (codes[0], torch.int8), (codes[1], torch.uint8)
    _check("adamw8bit", [x.shape for x in masters], (gradients, None), (parameters, None), *kept)
    _check("adamw8bit", [_scales_shape(x) for x in masters], *((x, torch.float32) for x in scales))
    if masters and launch.choose_path("adamw8bit", *launch.available_paths(masters[0], "triton")) == "triton":
        moments = (codes[0], scales[0], codes[1], scales[1])
        columns, sizes = [_rows(x)[1] for x in masters], [x.numel() for x in scales[0]]
        factors = (*_factors(settings), _seed(settings.step))
        _launch("adamw8bit", _adamw8bit_kernel, (gradients, masters, *moments), parameters, columns, sizes, factors)
    else:
        adamw8bit_reference(gradients, masters, first, second, parameters, settings)
