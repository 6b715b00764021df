"""Images of a packed sequence divided over the ranks that share it, by the sizes in their headers.

Every rank reads all samples and computes the same assignment before it decodes anything; then it decodes its own images
only. The others have tokens, positions and grids, but no patches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from saccade.data.header import upright_size
from saccade.processor.messages import Message
from saccade.processor.parts import feature_spans
from saccade.processor.processor import Processor

_QUADRATIC = 8192
"""Patches at which attention of a tower that attends to whole images costs as much as its matrices, which are 1,280
wide: six times the width."""


@dataclass
class SharedConversation:
    """A conversation, and what its images cost."""

    messages: list[Message]
    sizes: list[tuple[int, int]]
    """Upright width and height of each image."""
    patches: list[int]
    """Patches of each image."""
    tokens: list[int]
    """Tokens of each image."""
    ranks: list[int] = field(default_factory=list)
    """The rank that encodes each image."""

    @staticmethod
    def of(messages: list[Message], processor: Processor) -> SharedConversation:
        """Read the headers of the images of a conversation."""
        sizes = [upright_size(data) for data in _encoded_images(messages)]
        grids = [processor.rules.image_grid(height, width, len(sizes)) for width, height in sizes]
        parts = [processor.rules.parts("image", grid, 1.0, ()) for grid in grids]
        patches = [processor.rules.num_patches(grid) for grid in grids]
        tokens = [sum(span.length for span in feature_spans(of_image)) for of_image in parts]
        return SharedConversation(messages, sizes, patches, tokens)

    def elsewhere(self, rank: int | None) -> dict[int, tuple[int, int]]:
        """Numbers and sizes of the images that other ranks encode; None: of all images."""
        return {number: size for number, size in enumerate(self.sizes) if self.ranks[number] != rank}

    def patches_of(self, rank: int | None) -> int:
        """Patches that a rank encodes."""
        return sum(patches for patches, owner in zip(self.patches, self.ranks, strict=True) if owner == rank)


def share_images(conversations: Sequence[SharedConversation], num_ranks: int) -> None:
    """Choose the rank of every image."""
    ranks = iter(balance([cost for one in conversations for cost in map(image_cost, one.patches)], num_ranks))
    for one in conversations:
        one.ranks = [next(ranks) for _ in one.patches]


def image_cost(num_patches: int) -> float:
    """Relative cost of encoding an image: its matrices, and attention."""
    return num_patches * (1.0 + num_patches / _QUADRATIC)


def balance(costs: Sequence[float], num_ranks: int) -> list[int]:
    """A rank for each item: the costliest goes first, to the rank with least work."""
    ranks, work = [0] * len(costs), [0.0] * num_ranks
    for item in sorted(range(len(costs)), key=lambda item: (-costs[item], item)):
        ranks[item] = min(range(num_ranks), key=lambda rank: (work[rank], rank))
        work[ranks[item]] += costs[item]
    return ranks


def _encoded_images(messages: Sequence[Message]) -> Iterator[Any]:
    for message in messages:
        if not isinstance(message["content"], str):
            yield from (part["image"] for part in message["content"] if part["type"] == "image")
