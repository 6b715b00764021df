"""RMS normalisation of rows.

    y = weight * x / sqrt(mean(x^2) + eps)

x [..., D] and weight [D] in any float dtype, y like x. The mean and the division are computed in fp32, the product with the
weight in x's dtype (as Hugging Face does, so that bf16 logits agree).
"""

import torch
from torch import Tensor


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The formula above, in plain PyTorch."""
    x32 = x.float()
    normalized = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return weight * normalized.to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise the last dim of `x` to unit RMS and scale it by `weight`."""
    return rms_norm_reference(x, weight, eps)
