"""Layer normalisation of rows, for vision towers that use it.

    y = weight * (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) + bias

x [..., D], weight and bias [D] (bias optional) in one float dtype, y like x; statistics in fp32. torch's own kernel is within
a few percent of the memory bound at these widths, forward and backward, so it is the fast path; it saves mean and rstd per row.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from saccade.kernels import launch


def layer_norm_reference(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """The formula above, in plain PyTorch."""
    centred = x.float() - x.float().mean(-1, keepdim=True)
    y = weight.float() * centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    return (y if bias is None else y + bias.float()).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Normalise the last dim of `x` to mean 0 and variance 1, scale it by `weight` and shift it by `bias`."""
    if launch.choose("layer_norm", "library") == "library":
        return F.layer_norm(x, weight.shape, weight, bias, eps)
    return layer_norm_reference(x, weight, bias, eps)
