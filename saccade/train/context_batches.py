"""Context parallelism of micro-batches: what each rank gets of a packed sequence and of its labels.

    packed sequence, rank that encodes each image -> plan of the tokens -> this rank's `ContextInputs` and labels

Everything is computed on the host from lengths, the same on every rank of the group: nothing is communicated.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from saccade.data import context_plan
from saccade.data.context_plan import ContextShare, Piece, plan_context
from saccade.kernels.context_attention import AttentionRows, QueryRow, attention_rows
from saccade.model.context_parallel import ContextInputs
from saccade.processor.inputs import IGNORED, ModelInputs, count_labels
from saccade.world import World, gather_json

MIN_TOKENS_PER_RANK = 2
"""torch.compile specializes on a length of one, and a rank without tokens would take no part in collectives."""


@dataclass(frozen=True)
class ContextGroup:
    """The ranks that share packed sequences."""

    rank: int = 0
    """This rank among them."""
    num_ranks: int = 1
    """Number of these ranks."""
    group: dist.ProcessGroup | None = None
    """Their process group on the device; None for one rank."""
    host_group: dist.ProcessGroup | None = None
    """The process group on the CPU of all ranks with the same packed sequences: those of a pipeline too."""
    num_sharers: int = 1
    """Number of ranks of `host_group`."""
    has_images: bool = True
    """Whether this rank decodes images: the first ranks of a pipeline do."""
    block_size: int = field(default_factory=lambda: context_plan.BLOCK_SIZE)
    """Most tokens of a block, see `plan_context`."""

    def gather(self, value: Any) -> list[Any]:
        """Every rank's JSON value, by rank."""
        return [value] if self.num_sharers == 1 else gather_json(value, self.num_sharers, self.host_group)

    @property
    def min_tokens(self) -> int:
        """The least tokens of a packed sequence."""
        return self.num_ranks * MIN_TOKENS_PER_RANK if self.num_ranks > 1 else 0


ONE_RANK = ContextGroup()
"""No other rank has tokens of the packed sequences."""


def context_group(world: World) -> ContextGroup:
    """The ranks that share the packed sequences of this one. Collective over all ranks."""
    return ContextGroup(
        world.index("context"),
        world.dims.context,
        world.separate_group("context"),
        world.cpu_group_of("pipeline", "context"),
        num_sharers=world.dims.count("pipeline", "context"),
        has_images=world.index("pipeline") == 0,
    )


def pad_inputs(inputs: ModelInputs, min_tokens: int) -> ModelInputs:
    """Add a conversation without labels to a sequence that is too short to be divided."""
    if inputs.num_tokens >= min_tokens:
        return inputs
    padding = ModelInputs.empty(
        patch_dim=inputs.patches.shape[1],
        pixel_mean=inputs.pixel_mean,
        pixel_std=inputs.pixel_std,
        num_tokens=min_tokens - inputs.num_tokens,
    )
    padding = dataclasses.replace(padding, patches=padding.patches.to(inputs.patches.dtype))
    return ModelInputs.pack([inputs, padding])


class SequenceShare:
    """One rank's share of a packed sequence: which tokens, labels and images."""

    def __init__(
        self,
        inputs: ModelInputs,
        context: ContextGroup,
        *,
        image_ranks: Sequence[int],
        image_tokens: Sequence[int],
        window: int | None = None,
    ) -> None:
        """`image_ranks`: the rank that encodes each image, `image_tokens`: tokens of each; patches are this rank's."""
        assert len(image_ranks) == len(image_tokens) == len(inputs.image_grids), "a rank for every image"
        self._inputs, self._context, self._image_ranks = inputs, context, np.array(image_ranks, np.int64)
        self._window = window
        self._encoder_of_token = np.repeat(self._image_ranks, np.array(image_tokens, np.int64))
        self._shares = plan_context(
            inputs.cu_seqlens.diff().tolist(), context.num_ranks, block_size=context.block_size, window=window
        )
        self._tokens = torch.from_numpy(self._mine.tokens)

    @property
    def _mine(self) -> ContextShare:
        return self._shares[self._context.rank]

    def labels(self, labels: Tensor) -> tuple[Tensor, int]:
        """This rank's labels, and the number of its loss tokens."""
        own = labels[self._tokens]
        return own, count_labels(own)

    def loss_rows(self, labels: Tensor, rows: Tensor) -> Tensor:
        """This rank's rows of a tensor with one row per loss token of the sequence."""
        number_of_token = (labels != IGNORED).cumsum(0) - 1
        own = self._tokens[labels[self._tokens] != IGNORED]
        return rows[number_of_token[own]]

    def inputs(self) -> ContextInputs:
        """This rank's inputs."""
        whole, rank, num_ranks = self._inputs, self._context.rank, self._context.num_ranks
        tokens_per_rank = max(share.num_tokens for share in self._shares)
        owner, slot = np.zeros((2, whole.num_tokens), np.int64)
        for number, share in enumerate(self._shares):
            owner[share.tokens], slot[share.tokens] = number, np.arange(share.num_tokens)
        rows = _attention_rows(self._mine.pieces, self._window)
        image_tokens = whole.image_token_index.numpy()
        receiver_of_token, encoder_of_token = owner[image_tokens], self._encoder_of_token
        receivers = receiver_of_token[encoder_of_token == rank]
        arriving = np.flatnonzero(receiver_of_token == rank)
        encoders = encoder_of_token[arriving]
        arriving = arriving[np.argsort(encoders, kind="stable")]
        changed = {
            "token_ids": whole.token_ids[self._tokens],
            "positions": whole.positions[:, self._tokens],
            "loss_mask": whole.loss_mask[self._tokens],
            "image_grids": whole.image_grids[torch.from_numpy(self._image_ranks == rank)],
            "image_token_index": torch.from_numpy(slot[image_tokens[arriving]]),
        }
        kept = {field.name: getattr(whole, field.name) for field in dataclasses.fields(whole)}
        return ContextInputs(
            **(kept | changed),
            tokens=self._tokens,
            **rows._asdict(),
            gathered=torch.from_numpy(owner * tokens_per_rank + slot),
            tokens_per_rank=tokens_per_rank,
            sent=torch.from_numpy(np.argsort(receivers, kind="stable")),
            send_sizes=tuple(np.bincount(receivers, minlength=num_ranks).tolist()),
            receive_sizes=tuple(np.bincount(encoders, minlength=num_ranks).tolist()),
            group=self._context.group,
        )


def _attention_rows(pieces: Sequence[Piece], window: int | None) -> AttentionRows:
    """The pieces of a rank as rows of attention."""
    rows, begin = [], 0
    for piece in pieces:
        num_queries = piece.end - piece.start
        rows.append(QueryRow(begin, num_queries, piece.segment, piece.end - piece.segment))
        begin += num_queries
    return attention_rows(rows, window)
