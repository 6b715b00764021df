"""The two small modules both towers are made of."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from saccade.kernels.rms_norm import add_rms_norm, rms_norm
from saccade.kernels.small_linear import norm_linear
from saccade.kernels.swiglu import swiglu, swiglu_linear


class RMSNorm(nn.Module):
    """Rows to unit RMS, times a learned weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] to the same."""
        return rms_norm(x, self.weight, self.eps)

    def add_norm(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual), fused."""
        return add_rms_norm(x, residual, self.weight, self.eps)

    def norm_linear(self, layer: nn.Linear, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """(layer(norm(x + residual)), x + residual), without gradients."""
        return norm_linear(x, residual, self.weight, self.eps, layer.weight, layer.bias)


ALIGNMENT = 8
"""Rows of half-precision matrices start at multiples of 16 bytes, or cuBLAS takes kernels of the generation before Hopper: a
tower's 36864 x 1280 x 3420 runs at 258 TFLOP/s, with 3424 at 731 (H200)."""


_BLOCK_ROWS = 640


def in_row_chunks(function: Callable[..., tuple[Tensor, ...]], *rows: Tensor) -> tuple[Tensor, ...]:
    """`function` of a few rows at a time, its results joined. On a CPU, for what makes wide rows on the way to narrow ones.

    These then stay in the cache and in memory the process already has. Thousands of rows of 10,000 numbers take fresh memory from
    the system every time, which costs a third of a prompt's feed-forward time.
    """
    if len(rows[0]) <= _BLOCK_ROWS:
        return function(*rows)
    parts = [function(*block) for block in zip(*(torch.split(x, _BLOCK_ROWS) for x in rows), strict=True)]
    return tuple(torch.cat(column) for column in zip(*parts, strict=True))


class FeedForward(nn.Module):
    """down(silu(gate(x)) * up(x)).

    In memory the intermediate size is rounded up to `ALIGNMENT`; checkpoints hold it as configured. The added channels are zero,
    contribute nothing and have zero gradients, so they stay zero under any optimizer.
    """

    def __init__(self, hidden_size: int, intermediate_size: int, *, bias: bool) -> None:
        super().__init__()
        aligned_size = -(-intermediate_size // ALIGNMENT) * ALIGNMENT
        self.num_padding = aligned_size - intermediate_size
        self.fuse_down_proj = True
        """Whether training keeps less for backward by one function for activation and down projection. Off where the whole layer
        is computed again anyway: the second forward would run the projection for nothing."""
        self.gate_proj = nn.Linear(hidden_size, aligned_size, bias=bias)
        self.up_proj = nn.Linear(hidden_size, aligned_size, bias=bias)
        self.down_proj = nn.Linear(aligned_size, hidden_size, bias=bias)
        self.gate_up_proj: nn.Linear | None = None
        """Gate and up as one, in a model that was merged (`merge.py`); they are then gone."""
        self.zero_padding()

    def zero_padding(self) -> None:
        """Set the added channels to zero, as everything that fills the weights anew must."""
        if self.num_padding:
            with torch.no_grad():
                for parameter in (*self.gate_proj.parameters(), *self.up_proj.parameters()):
                    parameter[-self.num_padding :].zero_()
                self.down_proj.weight[:, -self.num_padding :].zero_()

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] to the same."""
        if x.is_cpu and not torch.is_grad_enabled():
            [out] = in_row_chunks(lambda rows: (self._forward(rows),), x.flatten(0, -2))
            return out.view(x.shape)
        return self._forward(x)

    def _forward(self, x: Tensor) -> Tensor:
        if self.gate_up_proj is not None:
            gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        else:
            gate, up = self.gate_proj(x), self.up_proj(x)
        if self.fuse_down_proj and torch.is_grad_enabled() and type(self.down_proj) is nn.Linear:
            return swiglu_linear(gate, up, self.down_proj.weight, self.down_proj.bias)
        out: Tensor = self.down_proj(swiglu(gate, up))
        return out


def checkpoint_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter as a checkpoint holds it: without what `FeedForward` adds."""
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    for prefix, module in model.named_modules():
        if isinstance(module, FeedForward) and module.num_padding:
            for name in (f"{prefix}.gate_proj", f"{prefix}.up_proj"):
                for parameter in (f"{name}.weight", f"{name}.bias"):
                    if parameter in shapes:
                        shapes[parameter] = (shapes[parameter][0] - module.num_padding, *shapes[parameter][1:])
            rows, columns = shapes[f"{prefix}.down_proj.weight"]
            shapes[f"{prefix}.down_proj.weight"] = (rows, columns - module.num_padding)
    return shapes
