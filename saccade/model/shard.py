"""What a tensor rank holds of a model, and how it communicates with the other ranks.

    TensorRank   this rank and the number of ranks that divide the matrices of every layer
    Shard        the part of one projection, or of the embedding, that it holds
    Exchange     communication at the places where a divided model needs it

`tensor_parallel.py` divides a model. Training and serving give it different exchanges: training needs gradients and
divides the tokens of the residual stream, serving needs neither.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch.distributed as dist
from torch import Tensor

from saccade.errors import CheckpointError

if TYPE_CHECKING:
    from saccade.model.normed_sum import Input


@dataclass(frozen=True)
class TensorRank:
    """One of the ranks that divide the matrices of every layer."""

    rank: int = 0
    size: int = 1


@dataclass(frozen=True)
class Shard:
    """The outputs or inputs of a projection, or the rows of an embedding, that a rank holds."""

    dim: Literal[0, 1]
    """0: outputs (column-parallel) or rows of an embedding; 1: inputs (row-parallel)."""
    bounds: tuple[int, ...]
    """Where each part begins, and where the last one ends; without padding."""
    index: int
    """The part of this rank."""
    copies: int = 1
    """Ranks that hold the same part: neighbours, if there are more ranks than key/value heads."""
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Shape in a checkpoint folder of every whole tensor, by its name in the module."""

    @property
    def start(self) -> int:
        """First output or input of this rank."""
        return self.bounds[self.index]

    @property
    def stop(self) -> int:
        """The one after its last."""
        return self.bounds[self.index + 1]

    @property
    def size(self) -> int:
        """Outputs or inputs of all ranks."""
        return self.bounds[-1]

    @property
    def num_parts(self) -> int:
        """Different parts."""
        return len(self.bounds) - 1

    @property
    def sizes(self) -> tuple[int, ...]:
        """Outputs or inputs of every part."""
        return tuple(stop - start for start, stop in pairwise(self.bounds))

    def slices(self, name: str, own_shape: tuple[int, ...]) -> tuple[slice, ...]:
        """The part of a stored tensor that this rank reads. `own_shape`: its shape in a checkpoint of this part alone.

        It follows from both shapes, whatever the storage form packs along a dim: values, words, groups, scales.
        """
        found = []
        for have, want in zip(self.shapes[name], own_shape, strict=True):
            first, rest = divmod(self.start * have, self.size)
            if have != want and rest:
                raise CheckpointError(
                    f"{name} packs {self.size} channels in {have} entries, and {self.start} is inside one of them. "
                    "Use fewer tensor-parallel ranks"
                )
            found.append(slice(None) if have == want else slice(first, first + want))
        return tuple(found)


class Exchange(Protocol):
    """Communication of the tensor ranks, each of which computes its part of every layer.

    Between `divide` and `collect` an exchange may keep the residual stream divided by tokens.
    """

    group: dist.ProcessGroup | None
    """The ranks, for reductions over the vocabulary; None: there are none."""

    def divide(self, x_TD: Tensor, features: Any) -> tuple[Tensor, Any]:
        """The decoder's input, the same on every rank, to this rank's residual stream. `features`: `LayerFeatures`."""
        ...

    def enter(self, x: Input) -> Input:
        """The residual stream's norm to the input of attention or MLP: all tokens."""
        ...

    def leave(self, x_TD: Tensor) -> Tensor:
        """This rank's part of the output of attention or MLP to the residual stream: the sum over the ranks."""
        ...

    def leave_before(self, norm: Any) -> Callable[[Tensor], Tensor]:
        """`leave` of an output that without gradients nothing but this norm reads, which may then compute the sum."""
        ...

    def collect(self, x_TD: Tensor) -> Tensor:
        """The decoder's output to the same on every rank: all tokens."""
        ...

    def total(self, x_TD: Tensor) -> Tensor:
        """Embeddings of the tokens that this rank holds, zeros for others, to those of all tokens."""
        ...

    def share(self, x_TD: Tensor) -> Tensor:
        """The head's input, the same on every rank; each uses it for its part of the vocabulary."""
        ...

    def gather(self, x_TN: Tensor, shard: Shard) -> Tensor:
        """This rank's outputs of a column-parallel projection to the outputs of all ranks."""
        ...

    def maximum(self, x: Tensor) -> Tensor:
        """The maximum over the ranks, in place and without gradients."""
        ...
