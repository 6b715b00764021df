"""RMSNorm and the MLP, used by vision tower and decoder."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from saccade.kernels.rms_norm import add_rms_norm, rms_norm
from saccade.kernels.small_linear import norm_linear
from saccade.kernels.swiglu import swiglu, swiglu_linear


class RMSNorm(nn.Module):
    """RMS normalisation with a learned weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] to [..., size]."""
        return rms_norm(x, self.weight, self.eps)

    def add_norm(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual), fused."""
        return add_rms_norm(x, residual, self.weight, self.eps)

    def norm_linear(self, layer: nn.Linear, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """(layer(norm(x + residual)), x + residual), without gradients."""
        return norm_linear(x, residual, self.weight, self.eps, layer.weight, layer.bias)


ALIGNMENT = 8
"""Rows of half-precision matrices must start at multiples of 16 bytes, or cuBLAS chooses pre-Hopper kernels: 36864 x 1280 x 3420
runs at 258 TFLOP/s, with 3424 at 731 (H200)."""


_CHUNK_ROWS = 640


def in_row_chunks(function: Callable[..., tuple[Tensor, ...]], *rows: Tensor) -> tuple[Tensor, ...]:
    """Apply `function` to chunks of rows and concatenate the results. For MLPs on a CPU.

    The wide activations then stay in the cache and in memory that is already allocated; allocating them for thousands of rows at
    once costs a third of the MLP time of a prefill.
    """
    if len(rows[0]) <= _CHUNK_ROWS:
        return function(*rows)
    parts = [function(*chunk) for chunk in zip(*(torch.split(x, _CHUNK_ROWS) for x in rows), strict=True)]
    return tuple(torch.cat(column) for column in zip(*parts, strict=True))


class FeedForward(nn.Module):
    """down(silu(gate(x)) * up(x)).

    In memory the intermediate size is padded to a multiple of `ALIGNMENT`; checkpoints hold it as configured. The padding channels
    are zero and have zero gradients, so they stay zero under any optimizer.
    """

    def __init__(self, hidden_size: int, intermediate_size: int, *, bias: bool) -> None:
        super().__init__()
        aligned_size = -(-intermediate_size // ALIGNMENT) * ALIGNMENT
        self.num_padding = aligned_size - intermediate_size
        self.fuse_down_proj = True
        """Whether activation and down projection are one autograd function, which saves less for backward. Off with activation
        checkpointing of the whole layer, which would run the projection twice."""
        self.gate_proj = nn.Linear(hidden_size, aligned_size, bias=bias)
        self.up_proj = nn.Linear(hidden_size, aligned_size, bias=bias)
        self.down_proj = nn.Linear(aligned_size, hidden_size, bias=bias)
        self.gate_up_proj: nn.Linear | None = None
        """Gate and up merged (`merge.py`), which replaces them."""
        self.zero_padding()

    def zero_padding(self) -> None:
        """Zero the padding channels. To be called after initializing the weights."""
        if self.num_padding:
            with torch.no_grad():
                for parameter in (*self.gate_proj.parameters(), *self.up_proj.parameters()):
                    parameter[-self.num_padding :].zero_()
                self.down_proj.weight[:, -self.num_padding :].zero_()

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] to [..., hidden]."""
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
    """Shape of every parameter on disk: without the padding of `FeedForward`."""
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
