"""Linear layers, with weights that may be prepacked for a CPU.

Legend: T tokens, D inputs, N outputs.

    out = x W' + bias        x [T, D], W [N, D], bias [N], out [T, N], all of one dtype

`prepack` rewrites a weight once into the blocks that oneDNN's kernels read, an opaque tensor of the same shape and size. Without it torch
calls MKL for fp32, which packs the weight again on every call; for few tokens that costs more than the product. Two cores of an EPYC (Zen 4,
torch 2.13, fp32, GFLOP/s, MKL -> prepacked; bench/kernels/linear.py): 220 x 896 x 4864 158 -> 219, 8 x 896 x 4864 48 -> 210,
1 x 896 x 4864 30 -> 65, where 218 is what a product of 2048 cubed reaches. A row's result does not depend on the number of rows,
but for a single one of some shapes.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

_DTYPES = (torch.float32, torch.bfloat16)


def linear_reference(x: Tensor, weight_ND: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """The formula above, for a plain weight."""
    return F.linear(x, weight_ND, bias_N)


def can_prepack(weight_ND: Tensor) -> bool:
    """Whether this torch has packed kernels for a weight."""
    has_kernels = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return weight_ND.is_cpu and weight_ND.dtype in _DTYPES and has_kernels


def prepack(weight_ND: Tensor) -> Tensor:
    """The weight in oneDNN's blocks, for `linear` alone: it has no elements to look at, and no gradients."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight_ND.detach().contiguous(), None)
    return packed


def linear(x: Tensor, weight_ND: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """x W' + bias, for a plain or prepacked weight."""
    if weight_ND.is_mkldnn:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight_ND, bias_N, "none", [], "")
        return out
    return F.linear(x, weight_ND, bias_N)
