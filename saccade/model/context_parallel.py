"""Context parallelism: the ranks of a group have different tokens of a packed sequence, and encode different images.

Legend: T tokens of this rank, S tokens of the sequence, H query heads, G key/value heads, K head dim, M image tokens,
F features of an image token.

    ContextInputs     what one rank gets of a packed sequence
    ContextAttention  keys and values of all ranks are gathered once per layer; backward reduce-scatters their gradients
    exchange_rows     features go from the rank that encoded an image to the ranks that have its tokens

`saccade.data.context_plan` chooses the tokens. Its pieces are rows of `context_attention`, which reads the gathered
keys as they are: they are saved once, and nothing is copied.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from saccade.kernels.context_attention import AttentionRows, context_attention
from saccade.kernels.rope import CosSin, rope
from saccade.processor.inputs import ModelInputs
from saccade.world import all_gather_single, reduce_scatter_single


@dataclass(frozen=True, kw_only=True)
class ContextInputs(ModelInputs):
    """The part of a packed sequence that one rank of a group has.

    Token ids, positions and loss mask are those of its tokens; patches and grids those of the images that it encodes;
    `image_token_index` its image tokens in the order in which their features arrive. `cu_seqlens` and `max_seqlen` are
    those of the whole sequence.
    """

    tokens: Tensor
    """[T] int64: offset of each token in the sequence."""
    rows: Tensor
    """The rows of attention, see `AttentionRows`."""
    query_tiles: Tensor
    """Tiles of its kernels."""
    key_tiles: Tensor
    """Tiles of keys."""
    gathered: Tensor
    """[S] int64: row of each token of the sequence among the gathered ones, `tokens_per_rank` of each rank."""
    tokens_per_rank: int
    """The most tokens of any rank."""
    sent: Tensor
    """int64: rows of this rank's features in the order in which they are sent, by receiving rank."""
    send_sizes: tuple[int, ...]
    """Features sent to each rank."""
    receive_sizes: tuple[int, ...]
    """Features received from each rank."""
    group: dist.ProcessGroup | None
    """The ranks that share the sequence; None: this one alone."""

    @property
    def num_ranks(self) -> int:
        """Ranks that share the sequence."""
        return len(self.send_sizes)

    def conversation_of_token(self) -> Tensor:
        """[T]: number of the conversation each token belongs to."""
        return conversation_of_token(self.cu_seqlens, len(self.gathered))[self.tokens]


def conversation_of_token(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """[S]: number of the conversation each token of a sequence belongs to."""
    lengths_N = cu_seqlens.diff().long()
    numbers_N = torch.arange(len(lengths_N), device=lengths_N.device)
    return numbers_N.repeat_interleave(lengths_N, output_size=num_tokens)


class ContextAttention:
    """`AttentionContext` of the tokens of one rank: causal attention within each conversation of the whole sequence."""

    def __init__(self, cos_sin: CosSin, inputs: ContextInputs, window: int | None = None) -> None:
        """`window`: earlier tokens that a token attends to; None: all."""
        self._cos_sin, self._inputs, self._window = cos_sin, inputs, window

    def __call__(self, layer: int, q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor) -> Tensor:
        """See `AttentionContext`."""
        q_THK, k_TGK = rope(q_THK, k_TGK, self._cos_sin)
        k_SGK, v_SGK = gather_keys(k_TGK, v_TGK, self._inputs)
        return attend_to_sequence(q_THK, k_SGK, v_SGK, self._inputs, self._window)


def attend_to_sequence(
    q_THK: Tensor, k_SGK: Tensor, v_SGK: Tensor, inputs: ContextInputs, window: int | None = None
) -> Tensor:
    """[T, H, K]: the queries of one rank attend to the keys of the whole sequence."""
    rows = AttentionRows(inputs.rows, inputs.query_tiles, inputs.key_tiles)
    return context_attention(q_THK, k_SGK, v_SGK, rows, window=window)


def gather_keys(k_TGK: Tensor, v_TGK: Tensor, inputs: ContextInputs) -> tuple[Tensor, Tensor]:
    """[S, G, K] each: keys and values of the whole sequence. Collective, in backward too."""
    keys, values = _GatherKeys.apply(  # type: ignore[no-untyped-call]
        k_TGK, v_TGK, inputs.gathered, inputs.tokens_per_rank, inputs.num_ranks, inputs.group
    )
    return keys, values


class _GatherKeys(torch.autograd.Function):
    """All-gather of keys and values together; backward sums their gradients over the ranks, each rank its own tokens.

    Ranks have unequal numbers of tokens, and collectives that gloo supports equal ones: the shorter are padded.
    """

    @staticmethod
    def forward(
        ctx: Any, k: Tensor, v: Tensor, gathered: Tensor, tokens_per_rank: int, num_ranks: int, group: Any
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(gathered)
        ctx.num_tokens, ctx.tokens_per_rank, ctx.num_ranks, ctx.group = len(k), tokens_per_rank, num_ranks, group
        own = k.new_zeros(tokens_per_rank, 2, *k.shape[1:])
        torch.stack([k, v], dim=1, out=own[: len(k)])
        rows = own
        if num_ranks > 1:
            rows = own.new_empty(num_ranks * tokens_per_rank, *own.shape[1:])
            all_gather_single(rows, own, group=group)
        keys, values = rows.index_select(0, gathered).unbind(1)
        return keys, values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_keys: Tensor, d_values: Tensor) -> tuple[Tensor | None, ...]:
        [gathered] = ctx.saved_tensors
        rows = d_keys.new_zeros(ctx.num_ranks * ctx.tokens_per_rank, 2, *d_keys.shape[1:])
        rows.index_copy_(0, gathered, torch.stack([d_keys, d_values], dim=1))
        own = rows
        if ctx.num_ranks > 1:
            own = rows.new_empty(ctx.tokens_per_rank, *rows.shape[1:])
            reduce_scatter_single(own, rows, group=ctx.group)
        d_k, d_v = own[: ctx.num_tokens].unbind(1)
        return d_k, d_v, None, None, None, None


def sum_over_ranks(x: Tensor, inputs: ModelInputs) -> Tensor:
    """The sum of a tensor over the ranks that share a sequence; backward sums its gradient too. Collective."""
    if not isinstance(inputs, ContextInputs) or inputs.num_ranks == 1:
        return x
    total: Tensor = _SumOverRanks.apply(x, inputs.group)  # type: ignore[no-untyped-call]
    return total


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


def exchange_features(features_MF: Tensor, inputs: ContextInputs) -> Tensor:
    """Features of the images that this rank encoded to those of the image tokens that it has. Collective."""
    return exchange_rows(
        features_MF.index_select(0, inputs.sent), inputs.send_sizes, inputs.receive_sizes, inputs.group
    )


def exchange_rows(
    rows: Tensor, send_sizes: tuple[int, ...], receive_sizes: tuple[int, ...], group: dist.ProcessGroup | None
) -> Tensor:
    """All-to-all of consecutive rows, `send_sizes` to each rank; differentiable."""
    if len(send_sizes) == 1:
        return rows
    received: Tensor = _ExchangeRows.apply(rows, send_sizes, receive_sizes, group)  # type: ignore[no-untyped-call]
    return received


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, send_sizes: tuple[int, ...], receive_sizes: tuple[int, ...], group: Any
    ) -> Tensor:
        ctx.send_sizes, ctx.receive_sizes, ctx.group = send_sizes, receive_sizes, group
        return _all_to_all(rows, send_sizes, receive_sizes, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _all_to_all(gradient, ctx.receive_sizes, ctx.send_sizes, ctx.group), None, None, None


def _all_to_all(rows: Tensor, send_sizes: tuple[int, ...], receive_sizes: tuple[int, ...], group: Any) -> Tensor:
    received = rows.new_empty(sum(receive_sizes), *rows.shape[1:])
    dist.all_to_all_single(received, rows.contiguous(), [*receive_sizes], [*send_sizes], group=group)
    return received
