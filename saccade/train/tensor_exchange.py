"""What tensor ranks exchange in training: with gradients, and with the tokens of the residual stream divided over them.

Legend: T tokens, t tokens of a rank, D decoder width, N outputs.

                forward                              backward
    divide      own tokens of [T, D]                 all-gather
    enter       all-gather [t, D] to [T, D]          reduce-scatter
    leave       reduce-scatter [T, D] to [t, D]      all-gather
    collect     all-gather [t, D] to [T, D]          own tokens
    total       all-reduce [T, D]                    -
    share       -                                    all-reduce
    gather      all-gather of outputs                own outputs

Before `divide` and after `collect` every rank has the same values and the same gradients. In between a rank has
T / ranks consecutive tokens (sequence parallelism), so norms and residual sums are divided too. A packed sequence has
any number of tokens: the last ranks may have rows of zeros, which `enter` and `collect` drop and which have no
gradients. What `enter` has gathered is not saved for backward but gathered again (`regathering`).
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from saccade.model.language import LayerFeatures
from saccade.model.normed_sum import Input, NormedSum
from saccade.model.shard import Shard
from saccade.world import all_gather_single, reduce_scatter_single


class TrainingExchange:
    """The exchange of a training rank, over a process group."""

    def __init__(self, group: dist.ProcessGroup | None, rank: int, size: int) -> None:
        self.group, self.rank, self.size = group, rank, size
        self._num_tokens = 0
        """Tokens of the packed sequence in the decoder; backward computes the same sequence again, if at all."""

    # -------------------------------------------------------------- collectives

    def all_gather(self, x_tD: Tensor) -> Tensor:
        """[t, D] of every rank to [size * t, D]."""
        out = x_tD.new_empty(self.size * len(x_tD), *x_tD.shape[1:])
        all_gather_single(out, x_tD.contiguous(), group=self.group)
        return out

    def reduce_scatter(self, x_TD: Tensor) -> Tensor:
        """The sum over the ranks of [T, D], of which this rank gets its [t, D]."""
        padded = F.pad(x_TD, (0, 0, 0, self._own_length(len(x_TD)) * self.size - len(x_TD))).contiguous()
        out = x_TD.new_empty(len(padded) // self.size, *x_TD.shape[1:])
        reduce_scatter_single(out, padded, group=self.group)
        return out

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over the ranks."""
        out = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(out, group=self.group)
        return out

    def _own_length(self, num_tokens: int) -> int:
        return -(-num_tokens // self.size)

    def own_tokens(self, x_TD: Tensor) -> Tensor:
        """This rank's [t, D] of [T, D]; rows of zeros after the last token."""
        length = self._own_length(len(x_TD))
        own = x_TD[self.rank * length : (self.rank + 1) * length]
        return F.pad(own, (0, 0, 0, length - len(own))) if len(own) < length else own

    # -------------------------------------------------------------- see `Exchange`

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def divide(self, x_TD: Tensor, features: LayerFeatures | None) -> tuple[Tensor, LayerFeatures | None]:
        """See `Exchange`. Features of other ranks' tokens become zeros, so the host does not wait for the device."""
        self._num_tokens = len(x_TD)
        own_tD: Tensor = _Divide.apply(x_TD, self)  # type: ignore[no-untyped-call]
        if features is None:
            return own_tD, None
        assert features.index is not None, "training lists the tokens that have features"
        index_M = features.index - self.rank * len(own_tD)
        is_here_M = (index_M >= 0) & (index_M < len(own_tD))
        shared_LMD: Tensor = _Share.apply(features.features, self)  # type: ignore[no-untyped-call]
        own_LMD = shared_LMD.masked_fill(~is_here_M[:, None], 0.0)
        return own_tD, LayerFeatures(own_LMD, index_M.clamp(0, len(own_tD) - 1))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def enter(self, x: Input) -> Tensor:
        """See `Exchange`."""
        rows_tD = x.normed if isinstance(x, NormedSum) else x
        out: Tensor = _Enter.apply(rows_tD, self._num_tokens, self)  # type: ignore[no-untyped-call]
        return out

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def leave(self, x_TD: Tensor) -> Tensor:
        """See `Exchange`."""
        out: Tensor = _Leave.apply(x_TD, self)  # type: ignore[no-untyped-call]
        return out

    def collect(self, x_TD: Tensor) -> Tensor:
        """See `Exchange`."""
        out: Tensor = _Collect.apply(x_TD, self._num_tokens, self)  # type: ignore[no-untyped-call]
        return out

    def total(self, x_TD: Tensor) -> Tensor:
        """See `Exchange`."""
        out: Tensor = _Total.apply(x_TD, self)  # type: ignore[no-untyped-call]
        return out

    def share(self, x_TD: Tensor) -> Tensor:
        """See `Exchange`."""
        out: Tensor = _Share.apply(x_TD, self)  # type: ignore[no-untyped-call]
        return out

    def gather(self, x_TN: Tensor, shard: Shard) -> Tensor:
        """See `Exchange`."""
        out: Tensor = _Gather.apply(x_TN, shard, self)  # type: ignore[no-untyped-call]
        return out

    def maximum(self, x: Tensor) -> Tensor:
        """See `Exchange`."""
        dist.all_reduce(x, dist.ReduceOp.MAX, self.group)
        return x


class _Regathered:
    """What backward needs of the gathered input of attention or MLP: the rank's own tokens, which it gathers again."""

    def __init__(self, exchange: TrainingExchange, x_TD: Tensor) -> None:
        self._exchange, self._own_tD = exchange, exchange.own_tokens(x_TD.detach()).clone()
        self._storage, self._num_tokens = x_TD.untyped_storage()._cdata, len(x_TD)  # an address, on meta too
        self._again_TD: Tensor | None = None
        self._num_saved = self._num_read = 0

    def pack(self, tensor: Tensor) -> Tensor | torch.Size:
        """A shape instead of the gathered tensor; others stay."""
        is_input = tensor.untyped_storage()._cdata == self._storage
        if not is_input or tensor.numel() != self._num_tokens * self._own_tD.shape[1] or not tensor.is_contiguous():
            return tensor
        self._num_saved += 1
        return tensor.shape

    def unpack(self, saved: Tensor | torch.Size) -> Tensor:
        """Gather again when it is first read, until it was read as often as it was saved."""
        if isinstance(saved, Tensor):
            return saved
        if self._again_TD is None:
            self._again_TD = self._exchange.all_gather(self._own_tD)[: self._num_tokens]
        found, self._num_read = self._again_TD.view(saved), self._num_read + 1
        if self._num_read == self._num_saved:
            self._again_TD, self._num_read = None, 0
        return found


def regathering(forward: Callable[..., Tensor], exchange: TrainingExchange) -> Callable[..., Tensor]:
    """Attention or MLP whose gathered input is not saved for backward: a rank keeps its own tokens of it.

    It costs one more all-gather in backward. Not for modules with activation checkpointing, which saves nothing.
    """

    def run(x_TD: Tensor, *inputs: Any) -> Tensor:
        if not torch.is_grad_enabled():
            return forward(x_TD, *inputs)
        saved = _Regathered(exchange, x_TD)
        with torch.autograd.graph.saved_tensors_hooks(saved.pack, saved.unpack):
            return forward(x_TD, *inputs)

    return run


class DryExchange(TrainingExchange):
    """The exchange of a rank without others, on the meta device: shapes alone."""

    def __init__(self, size: int) -> None:
        super().__init__(None, 0, size)

    def all_gather(self, x_tD: Tensor) -> Tensor:
        """See `TrainingExchange`."""
        return x_tD.new_empty(self.size * len(x_tD), *x_tD.shape[1:])

    def reduce_scatter(self, x_TD: Tensor) -> Tensor:
        """See `TrainingExchange`."""
        return x_TD.new_empty(self._own_length(len(x_TD)), *x_TD.shape[1:])

    def all_reduce(self, x: Tensor) -> Tensor:
        """See `TrainingExchange`."""
        return torch.empty_like(x)

    def maximum(self, x: Tensor) -> Tensor:
        """See `TrainingExchange`."""
        return x


class _Divide(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, exchange: TrainingExchange) -> Tensor:
        ctx.exchange, ctx.num_tokens = exchange, len(x_TD)
        return exchange.own_tokens(x_TD).clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.all_gather(grad)[: ctx.num_tokens], None


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_tD: Tensor, num_tokens: int, exchange: TrainingExchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.all_gather(x_tD)[:num_tokens]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.exchange.reduce_scatter(grad), None, None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, exchange: TrainingExchange) -> Tensor:
        ctx.exchange, ctx.num_tokens = exchange, len(x_TD)
        return exchange.reduce_scatter(x_TD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.all_gather(grad)[: ctx.num_tokens], None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_tD: Tensor, num_tokens: int, exchange: TrainingExchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.all_gather(x_tD)[:num_tokens]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.exchange.own_tokens(grad), None, None


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: TrainingExchange) -> Tensor:
        return exchange.all_reduce(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Share(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: TrainingExchange) -> Tensor:
        ctx.exchange = exchange
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.all_reduce(grad), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TN: Tensor, shard: Shard, exchange: TrainingExchange) -> Tensor:
        ctx.shard = shard
        padded_NT = F.pad(x_TN.T, (0, 0, 0, max(shard.sizes) - x_TN.shape[1]))
        parts = torch.split(exchange.all_gather(padded_NT), max(shard.sizes))
        return torch.cat([part[:size] for part, size in zip(parts, shard.sizes, strict=True)]).T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad[:, ctx.shard.start : ctx.shard.stop], None, None
