"""Muon: orthogonalized momentum for matrices, so that all directions get updates of similar size (Jordan et al., 2024).

    m = mu m + g            w = w - lr (weight_decay w + 0.2 sqrt(max(rows, columns)) orthogonalized(g + mu m))

The factor gives an update the RMS of AdamW's, about 0.2, so learning rates and decay tuned for AdamW carry over (Liu et
al., 2025). The iteration runs in bf16 on a GPU and in fp32 on a CPU. The momentum of a sharded matrix is sharded too;
each rank gathers it, computes the full update and keeps its shard. Cost: about 20 r^2 c + 10 r^3 FLOPs for the shorter
side r and the longer c.
"""

import math

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from saccade.kernels.adamw import Settings
from saccade.train.dtensor import dtensor_like, local_shard

_QUINTIC = (3.4445, -4.7750, 2.0315)
"""Coefficients of a x + b x^3 + c x^5, which applied five times maps any x from 0.01 to 1 close to 1."""


def muon_step(
    parameter: Tensor, gradient: Tensor, master: Tensor, momentum: Tensor, mu: float, settings: Settings
) -> None:
    """Update one matrix: Nesterov momentum, orthogonalized, scaled to the RMS of an AdamW update."""
    g = gradient.float() * settings.grad_scale
    momentum.mul_(mu).add_(g)
    ahead = g.add_(momentum, alpha=mu).to(torch.bfloat16 if g.is_cuda else torch.float32)
    if isinstance(parameter, DTensor):
        step = local_shard(orthogonalized(dtensor_like(parameter, ahead).full_tensor()), parameter)  # type: ignore[attr-defined]
    else:
        step = orthogonalized(ahead)
    rate = settings.lr * 0.2 * math.sqrt(max(parameter.shape))
    master.mul_(1.0 - settings.lr * settings.weight_decay).add_(step.float(), alpha=-rate)


def orthogonalized(x: Tensor) -> Tensor:
    """Five Newton-Schulz iterations: the singular vectors of `x` with singular values near 1 (0.7 to 1.2)."""
    a, b, c = _QUINTIC
    is_tall = x.shape[0] > x.shape[1]
    x = x.T if is_tall else x
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x
