# mypy: allow-untyped-decorators
"""The first half of a gated MLP for many tokens: two products of one input, followed by the activation.

Legend: T tokens, D inputs, I intermediate channels.

    out = silu(gate) * up,   gate = x Wg' + bg,   up = x Wu' + bu,       W [2 I, D] = (Wg, Wu),   bias [2 I] = (bg, bu)

x [T, D], W, bias and out [T, I] share one dtype, bf16 or fp16 for the kernel. Rounding is that of the separate
operations: gate and up are rounded to x's dtype, sums and activation are fp32, out is rounded once. Forward only.

The kernel saves the 8 T I bytes of gate and up that move to memory and back, in 16 bits, and a launch; its products are
7 to 15 % slower than cuBLAS's. It is therefore used for many tokens and few inputs. A program
computes tiles of gate and up of the same channels, one after another; two programs share a multiprocessor, so that one
computes products during the activation of the other. Tiles are loaded by TMA.
"""

import torch
from torch import Tensor

from saccade.kernels import launch
from saccade.kernels.launch import tl, triton
from saccade.kernels.linear import linear
from saccade.kernels.swiglu import swiglu, swiglu_reference

_BLOCK_T, _BLOCK_I, _BLOCK_D = 128, 64, 64
_GROUP = 8
"""Blocks of tokens whose tiles are computed together, so that they find the weights in L2."""
_PROGRAMS_PER_SM = 2
# H200, bf16 (bench/kernels/gated_linear.py): D 1280, I 3424 takes 67 us for 2304 tokens, cuBLAS and swiglu 72; for 4992
# tokens 137 and 157. D 2048, I 11008 takes 151 us for 1024 tokens, cuBLAS and swiglu 150.
_MIN_TOKENS, _MAX_INPUTS = 1024, 1536


def gated_linear_reference(x_TD: Tensor, weight_ND: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """The formula above."""
    gate_TI, up_TI = torch.nn.functional.linear(x_TD, weight_ND, bias_N).chunk(2, dim=-1)
    return swiglu_reference(gate_TI, up_TI)


@triton.jit(do_not_specialize=["num_tokens"])
def _gated_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    num_tokens: tl.tensor,
    I: tl.tensor,  # noqa: E741
    D: tl.tensor,
    HAS_BIAS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """Tiles of the output, one in every num_programs. x, weight and out are descriptors: rows outside read as zero."""
    num_t, num_i = tl.cdiv(num_tokens, BLOCK_T), tl.cdiv(I, BLOCK_I)
    for tile in tl.range(tl.program_id(0), num_t * num_i, tl.num_programs(0)):
        first_t = tile // (GROUP * num_i) * GROUP
        size_t = tl.minimum(num_t - first_t, GROUP)
        t = (first_t + tile % (GROUP * num_i) % size_t) * BLOCK_T
        i = tile % (GROUP * num_i) // size_t * BLOCK_I
        gate = tl.zeros([BLOCK_T, BLOCK_I], tl.float32)
        up = tl.zeros([BLOCK_T, BLOCK_I], tl.float32)
        for d in range(0, D, BLOCK_D):
            x_tile = x.load([t, d])
            gate = tl.dot(x_tile, weight.load([i, d]).T, gate)
            up = tl.dot(x_tile, weight.load([I + i, d]).T, up)
        if HAS_BIAS:
            channel = i + tl.arange(0, BLOCK_I)
            gate += tl.load(bias + channel, mask=channel < I, other=0.0).to(tl.float32)[None, :]
            up += tl.load(bias + I + channel, mask=channel < I, other=0.0).to(tl.float32)[None, :]
        gate = gate.to(x.dtype).to(tl.float32)
        up = up.to(x.dtype).to(tl.float32)
        out.store([t, i], (gate * tl.sigmoid(gate) * up).to(x.dtype))


def _run(x_TD: Tensor, weight_ND: Tensor, bias_N: Tensor | None) -> Tensor:
    from triton.tools.tensor_descriptor import TensorDescriptor

    (num_tokens, D), I = x_TD.shape, len(weight_ND) // 2  # noqa: E741
    out_TI = x_TD.new_empty((num_tokens, I))
    x, weight, out = (
        TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), block)
        for tensor, block in (
            (x_TD, [_BLOCK_T, _BLOCK_D]),
            (weight_ND, [_BLOCK_I, _BLOCK_D]),
            (out_TI, [_BLOCK_T, _BLOCK_I]),
        )
    )
    num_tiles = triton.cdiv(num_tokens, _BLOCK_T) * triton.cdiv(I, _BLOCK_I)
    _gated_kernel[(min(num_tiles, _PROGRAMS_PER_SM * launch.num_sms(x_TD.device)),)](
        x, weight, out_TI if bias_N is None else bias_N, out, num_tokens, I, D, HAS_BIAS=bias_N is not None,
        GROUP=_GROUP, BLOCK_T=_BLOCK_T, BLOCK_I=_BLOCK_I, BLOCK_D=_BLOCK_D, num_warps=4, num_stages=3,
    )  # fmt: skip
    return out_TI


def _can_run(x_TD: Tensor, weight_ND: Tensor, bias_N: Tensor | None) -> bool:
    """Whether the kernel supports the call: TMA needs rows at multiples of 16 bytes."""
    tensors = (x_TD, weight_ND) if bias_N is None else (x_TD, weight_ND, bias_N)
    is_half = x_TD.dtype in (torch.bfloat16, torch.float16) and all(one.dtype == x_TD.dtype for one in tensors)
    is_aligned = all(
        one.stride(-1) == 1 and one.stride(0) % 8 == 0 and one.data_ptr() % 16 == 0 for one in (x_TD, weight_ND)
    )
    has_rows = len(weight_ND) % 16 == 0 and x_TD.numel() > 0
    return is_half and is_aligned and has_rows and launch.has_tma(x_TD.device)


def _is_faster(x_TD: Tensor) -> bool:
    return launch.is_forced("triton") or (len(x_TD) >= _MIN_TOKENS and x_TD.shape[1] <= _MAX_INPUTS)


def gated_linear(x_TD: Tensor, weight_ND: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """silu(gate) * up of [gate, up] = x W' + bias, without gradients in the kernel."""
    if len(weight_ND) % 2 or weight_ND.shape[-1] != x_TD.shape[-1]:
        raise ValueError(f"gated_linear: x {tuple(x_TD.shape)} and weight {tuple(weight_ND.shape)} do not fit")
    is_plain = not weight_ND.is_mkldnn and not launch.is_differentiable() and x_TD.dim() == 2
    can_run = is_plain and _is_faster(x_TD) and _can_run(x_TD, weight_ND, bias_N)
    if can_run and launch.choose_path("gated_linear", *launch.available_paths(x_TD, "triton")) == "triton":
        return _run(x_TD, weight_ND, bias_N)
    return swiglu(*linear(x_TD, weight_ND, bias_N).chunk(2, dim=-1))
