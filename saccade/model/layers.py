"""The two small modules both towers are made of."""

import torch
from torch import Tensor, nn

from saccade.kernels.rms_norm import add_rms_norm, rms_norm
from saccade.kernels.swiglu import swiglu


class RMSNorm(nn.Module):
    """Rows to unit RMS, times a learned weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] to the same."""
        return rms_norm(x, self.weight, self.eps)

    def of_sum(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm of x + residual, x + residual), in one pass over memory."""
        return add_rms_norm(x, residual, self.weight, self.eps)


class FeedForward(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden_size: int, intermediate_size: int, *, bias: bool) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] to the same."""
        out: Tensor = self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))
        return out
