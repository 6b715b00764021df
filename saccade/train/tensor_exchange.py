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
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from saccade.model.language import LayerFeatures
from saccade.model.normed_sum import Input, NormedSum
from saccade.model.shard import Shard
from saccade.world import all_gather_single, reduce_scatter_single

Communication = Callable[[Tensor], Tensor]


class TrainingExchange:
    """The exchange of a training rank, over a process group."""

    def __init__(self, group: dist.ProcessGroup | None, rank: int, size: int) -> None:
        self.group, self.rank, self.size = group, rank, size
        self.num_tokens = 0
        """Tokens of the packed sequence in the decoder, or of the one that backward may compute again."""

    # -------------------------------------------------------------- collectives

    def all_gather(self, x_tD: Tensor) -> Tensor:
        """[t, D] of every rank to [size * t, D]."""
        out = x_tD.new_empty(self.size * len(x_tD), *x_tD.shape[1:])
        all_gather_single(out, x_tD.contiguous(), group=self.group)
        return out

    def reduce_scatter(self, x_TD: Tensor) -> Tensor:
        """The sum over the ranks of [T, D], of which this rank gets its [t, D]."""
        padded = F.pad(x_TD, (0, 0, 0, self.own_length(len(x_TD)) * self.size - len(x_TD))).contiguous()
        out = x_TD.new_empty(len(padded) // self.size, *x_TD.shape[1:])
        reduce_scatter_single(out, padded, group=self.group)
        return out

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over the ranks."""
        out = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(out, group=self.group)
        return out

    def own_length(self, num_tokens: int) -> int:
        """Tokens of a rank."""
        return -(-num_tokens // self.size)

    def own_tokens(self, x_TD: Tensor) -> Tensor:
        """This rank's [t, D] of [T, D]; rows of zeros after the last token."""
        length = self.own_length(len(x_TD))
        own = x_TD[self.rank * length : (self.rank + 1) * length]
        return F.pad(own, (0, 0, 0, length - len(own))) if len(own) < length else own

    def _all_tokens(self, num_tokens: int) -> Communication:
        """[t, D] of every rank to [T, D]."""
        return lambda x_tD: self.all_gather(x_tD)[:num_tokens]

    # -------------------------------------------------------------- see `Exchange`

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def divide(self, x_TD: Tensor, features: LayerFeatures | None) -> tuple[Tensor, LayerFeatures | None]:
        """See `Exchange`. Features of other ranks' tokens become zeros, so the host does not wait for the device."""
        self.num_tokens = len(x_TD)
        own_tD = _exchanged(x_TD, lambda x: self.own_tokens(x).clone(), self._all_tokens(len(x_TD)))
        if features is None:
            return own_tD, None
        assert features.index is not None, "training lists the tokens that have features"
        index_M, is_here_M = self.own_index(features.index, len(own_tD))
        own_LMD = self.share(features.features).masked_fill(~is_here_M[:, None], 0.0)
        return own_tD, LayerFeatures(own_LMD, index_M)

    def own_index(self, index_M: Tensor, num_own: int) -> tuple[Tensor, Tensor]:
        """Index of each token among this rank's `num_own`, and whether it is one of them; if not, any index."""
        own_M = index_M - self.rank * num_own
        return own_M.clamp(0, num_own - 1), (own_M >= 0) & (own_M < num_own)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def enter(self, x: Input) -> Tensor:
        """See `Exchange`."""
        rows_tD = x.normed if isinstance(x, NormedSum) else x
        return _exchanged(rows_tD, self._all_tokens(self.num_tokens), self.reduce_scatter)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def leave(self, x_TD: Tensor) -> Tensor:
        """See `Exchange`."""
        return _exchanged(x_TD, self.reduce_scatter, self._all_tokens(len(x_TD)))

    def leave_before(self, norm: Any) -> Callable[[Tensor], Tensor]:
        """See `Exchange`."""
        return cast(Callable[[Tensor], Tensor], self.leave)

    def collect(self, x_TD: Tensor) -> Tensor:
        """See `Exchange`."""
        return _exchanged(x_TD, self._all_tokens(self.num_tokens), self.own_tokens)

    def total(self, x_TD: Tensor) -> Tensor:
        """See `Exchange`."""
        return _exchanged(x_TD, self.all_reduce, lambda grad: grad)

    def share(self, x_TD: Tensor) -> Tensor:
        """See `Exchange`."""
        return _exchanged(x_TD, lambda x: x.view_as(x), self.all_reduce)

    def gather(self, x_TN: Tensor, shard: Shard) -> Tensor:
        """See `Exchange`."""
        return _exchanged(x_TN, partial(self._gather, shard), lambda grad: grad[:, shard.start : shard.stop])

    def _gather(self, shard: Shard, x_TN: Tensor) -> Tensor:
        padded_NT = F.pad(x_TN.T, (0, 0, 0, max(shard.sizes) - x_TN.shape[1]))
        parts = torch.split(self.all_gather(padded_NT), max(shard.sizes))
        return torch.cat([part[:size] for part, size in zip(parts, shard.sizes, strict=True)]).T

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
        return x_TD.new_empty(self.own_length(len(x_TD)), *x_TD.shape[1:])

    def all_reduce(self, x: Tensor) -> Tensor:
        """See `TrainingExchange`."""
        return torch.empty_like(x)

    def maximum(self, x: Tensor) -> Tensor:
        """See `TrainingExchange`."""
        return x


class _Exchange(torch.autograd.Function):
    """Communication whose gradient is another communication."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Communication, backward: Communication) -> Tensor:
        ctx.backward_of = backward
        return forward(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.backward_of(grad), None, None


def _exchanged(x: Tensor, forward: Communication, backward: Communication) -> Tensor:
    out: Tensor = _Exchange.apply(x, forward, backward)  # type: ignore[no-untyped-call]
    return out
