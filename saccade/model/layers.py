"""Norms and MLPs, used by vision towers and decoder."""

from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from saccade.kernels.rms_norm import rms_norm
from saccade.model.linear import Linear
from saccade.model.merged_projections import RowAdapters, project, project_gated
from saccade.model.normed_sum import Input, NormedSum
from saccade.model.shard import Shard


class RMSNorm(nn.Module):
    """RMS normalisation with a learned weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] to [..., size]."""
        return rms_norm(x, self.weight, self.eps)

    def add_norm(self, x: Tensor, residual: Tensor | None) -> NormedSum:
        """The norm of x + residual as the input of projections, and the sum."""
        return NormedSum(x, residual, self.weight, self.eps)


class ComputedNorm(NamedTuple):
    """A computed norm as the input of projections, and the sum that was normalised. See `NormedSum`."""

    input: Tensor
    total: Tensor


class LayerNorm(nn.LayerNorm):
    """Layer normalisation with a learned weight and bias."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__(size, eps)

    def add_norm(self, x: Tensor, residual: Tensor | None) -> ComputedNorm:
        """The norm of x + residual as the input of projections, and the sum."""
        total = x if residual is None else x + residual
        return ComputedNorm(self(total), total)


_CHUNK_ROWS = 640


def in_row_chunks(function: Callable[[Input], Tensor], x: Input) -> Tensor:
    """Apply `function` to chunks of rows and concatenate the results, for MLPs on a CPU.

    The wide activations then stay in the cache and in allocated memory; allocating them for thousands of rows takes a
    third of the MLP time of a prefill.
    """
    if len(x) <= _CHUNK_ROWS:
        return function(x)
    chunks = x.split(_CHUNK_ROWS)
    out = torch.cat([function(chunk) for chunk in chunks])
    if isinstance(x, NormedSum):
        x.total = torch.cat([chunk.total for chunk in chunks])
    return out


def row_chunks(num_rows: int) -> list[int]:
    """Sizes of the chunks of `in_row_chunks`."""
    return [min(_CHUNK_ROWS, num_rows - first) for first in range(0, max(1, num_rows), _CHUNK_ROWS)]


class FeedForward(nn.Module):
    """down(silu(gate(x)) * up(x)). In memory the intermediate size is aligned."""

    merged_projections = (("gate_proj", "up_proj"),)
    input_layers: ClassVar[tuple[str, ...]] = ("gate_proj", "up_proj")
    """Layers that read its input."""
    scaled_pair: ClassVar[tuple[str, str]] = ("up_proj", "down_proj")
    """A projection and one whose inputs scale with its outputs."""

    def __init__(self, hidden_size: int, intermediate_size: int, *, bias: bool) -> None:
        super().__init__()
        self.saves_activation = False
        """Whether silu(gate) * up is saved for backward, not computed again from gate and up.

        It is on with activation checkpointing, which would otherwise compute the down projection twice.
        """
        self.gate_proj = Linear(hidden_size, intermediate_size, bias=bias, aligns_out=True)
        self.up_proj = Linear(hidden_size, intermediate_size, bias=bias, aligns_out=True)
        self.down_proj = Linear(intermediate_size, hidden_size, bias=bias, aligns_in=True)

    def forward(self, x: Input, chosen: RowAdapters | None = None) -> Tensor:
        """[..., hidden] to [..., hidden]. `chosen`: the adapter of each row."""
        if chosen is not None:
            return self._forward(x, chosen)
        if x.is_cpu and not torch.is_grad_enabled():
            if isinstance(x, NormedSum):
                return in_row_chunks(self._forward, x)
            return in_row_chunks(self._forward, x.flatten(0, -2)).view(x.shape)
        return self._forward(x)

    def _forward(self, x: Input, chosen: RowAdapters | None = None) -> Tensor:
        hidden = project_gated(x, self.gate_proj, self.up_proj, chosen)
        if hidden is not None:
            return project(hidden, self.down_proj, chosen=chosen)[0]
        gate, up = project(x, self.gate_proj, self.up_proj)
        return self.down_proj.gated(gate, up, saves_activation=self.saves_activation)


class PlainFeedForward(nn.Module):
    """Two linear layers around an activation. Subclasses name the layers as on disk, in `names`."""

    names: ClassVar[tuple[str, str]]

    @property
    def input_layers(self) -> tuple[str, ...]:
        """Layers that read its input."""
        return self.names[:1]

    def __init__(self, hidden_size: int, intermediate_size: int, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.saves_activation = False
        """See `FeedForward`; here the activation is always saved."""
        self._activation = activation
        self.add_module(self.names[0], Linear(hidden_size, intermediate_size, aligns_out=True))
        self.add_module(self.names[1], Linear(intermediate_size, hidden_size, aligns_in=True))

    def forward(self, x: Tensor) -> Tensor:
        """[T, hidden] to [T, hidden]."""
        first, second = (self.get_submodule(name) for name in self.names)
        out: Tensor = second(self._activation(first(x)))
        return out


def make_embedding(num_rows: int, size: int) -> nn.Embedding:
    """An embedding. On the meta device it is not initialized: `normal_` would import torch's compiler for a second."""
    weight_ND = torch.empty(num_rows, size)
    if not weight_ND.is_meta:
        nn.init.normal_(weight_ND)
    return nn.Embedding(num_rows, size, _weight=weight_ND)


class ShardedEmbedding(nn.Embedding):
    """The rows of an embedding that a tensor rank holds, on the meta device; tokens of other ranks have zeros."""

    def __init__(self, shard: Shard, size: int, dtype: torch.dtype) -> None:
        rows = shard.stop - shard.start
        super().__init__(rows, size, _weight=torch.empty(rows, size, device="meta", dtype=dtype))
        self.shard = replace(shard, shapes={"weight": (shard.size, size)})

    def checkpoint_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of its part of every tensor on disk."""
        return {"weight": (self.num_embeddings, self.embedding_dim)}

    def forward(self, token_ids: Tensor) -> Tensor:
        """[T] to [T, D]."""
        row_T = token_ids - self.shard.start
        is_here_T = (row_T >= 0) & (row_T < self.num_embeddings)
        rows_TD = F.embedding(row_T.clamp(0, self.num_embeddings - 1), self.weight)
        return rows_TD.masked_fill(~is_here_T.unsqueeze(-1), 0.0)
