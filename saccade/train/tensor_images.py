"""The images of a packed sequence, divided over the tensor ranks that share it: each encodes some, all get features.

Legend: P patches, M image tokens, F features of an image token.

The vision tower is whole on every rank. From the grids alone each rank computes the same assignment, the costliest
image first to the rank with least work. A rank without an image encodes a blank one, so that all ranks run the same
modules, and sends nothing. Gradients of tower and projector are then those of a rank's own images
(`tensor_parallel.py` sums them).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from saccade.data.image_shares import balance, image_cost
from saccade.model.vlm import VLM
from saccade.processor.patches import Grid
from saccade.train.tensor_exchange import TrainingExchange

Encode = Callable[[Tensor, Tensor], Tensor]
"""`VLM.encode_images`."""


def divide_images(model: VLM, exchange: TrainingExchange) -> None:
    """Let a model encode a rank's images alone, and gather the features of all."""
    vars(model)["encode_images"] = partial(_encode, model, model.encode_images, exchange)


def _encode(model: VLM, encode: Encode, exchange: TrainingExchange, pixels: Tensor, image_grids: Tensor) -> Tensor:
    """[M, F]: features of all images, in reading order. See `VLM.encode_images`."""
    grids: list[Grid] = [(t, h, w) for t, h, w in image_grids.tolist()]
    patches = [model.vision.num_patches([grid]) for grid in grids]
    tokens = [model.vision.layout([grid]).sizes.num_tokens for grid in grids]
    owners = balance([image_cost(count) for count in patches], exchange.size)
    own = [image for image, owner in enumerate(owners) if owner == exchange.rank]
    if own:
        rows_P = torch.tensor(_rows(patches, own), device=pixels.device)
        features_MF = encode(pixels.index_select(0, rows_P), image_grids[own])
    else:
        grid, num_patches = model.vision.square_grid(0)
        features_MF = encode(pixels.new_zeros(num_patches, pixels.shape[1]), torch.tensor([grid]))[:0]
    sent = [sum(tokens[image] for image, owner in enumerate(owners) if owner == rank) for rank in range(exchange.size)]
    order = _places(tokens, owners, max(sent))
    found: Tensor = _GatherRows.apply(  # type: ignore[no-untyped-call]
        features_MF, max(sent), order, _rows(tokens, own), exchange
    )
    return found


def _rows(sizes: Sequence[int], chosen: Sequence[int]) -> list[int]:
    """Rows of the chosen items, of consecutive items of these sizes."""
    starts = list(accumulate(sizes, initial=0))
    return [row for item in chosen for row in range(starts[item], starts[item + 1])]


def _places(tokens: Sequence[int], owners: Sequence[int], num_rows: int) -> list[int]:
    """Where each token, in reading order, is among `num_rows` rows of every rank."""
    next_row = {rank: rank * num_rows for rank in owners}
    places: list[int] = []
    for count, owner in zip(tokens, owners, strict=True):
        places += range(next_row[owner], next_row[owner] + count)
        next_row[owner] += count
    return places


class _GatherRows(torch.autograd.Function):
    """All ranks compute the same from the gathered rows, so a rank's gradient is that of its own rows."""

    @staticmethod
    def forward(
        ctx: Any, own_MF: Tensor, num_rows: int, order: list[int], own_rows: list[int], exchange: TrainingExchange
    ) -> Tensor:
        ctx.own_rows = own_rows
        rows = exchange.all_gather(F.pad(own_MF, (0, 0, 0, num_rows - len(own_MF))))
        return rows.index_select(0, torch.tensor(order, device=rows.device))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_MF: Tensor) -> tuple[Tensor | None, ...]:
        own_rows = torch.tensor(ctx.own_rows, dtype=torch.int64, device=grad_MF.device)
        return grad_MF.index_select(0, own_rows), None, None, None, None
