"""The vision encoder of a tensor-parallel engine: every rank encodes some images of a pass, then all get all features.

    images of a pass -> shares, balanced by patches -> each rank encodes its own -> features are added up

Every rank has the whole tower, so that the ranks communicate once per pass and not once per block.

Legend: M image tokens, F features of an image token.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from saccade.engine.core.step import ENCODER_PARTS
from saccade.engine.device.encoder import Encoder
from saccade.engine.device.rank_exchange import RankExchange
from saccade.engine.prompt import PromptImage
from saccade.model.vlm import VLM


def divide(num_patches: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Which images each rank encodes: the largest first, each to the rank with the fewest patches so far."""
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    totals = [0] * num_ranks
    for image in sorted(range(len(num_patches)), key=lambda index: -num_patches[index]):
        rank = totals.index(min(totals))
        shares[rank].append(image)
        totals[rank] += num_patches[image]
    return [sorted(share) for share in shares]


class DividedEncoder(Encoder):
    """An encoder that encodes this rank's share of a pass. All ranks start and run the same passes."""

    def __init__(self, model: VLM, exchange: RankExchange, **settings: Any) -> None:
        """`settings`: see `Encoder`."""
        super().__init__(model, **settings)
        self._exchange, self._feature_size = exchange, model.feature_size
        self._parts_left = 0
        self._num_all_tokens = 0  # of all ranks' images
        self._own_tokens: Sequence[slice] = ()  # where the tokens of this rank's images are
        self._own_MF: Tensor | None = None

    @torch.inference_mode()
    def start(self, images: Sequence[PromptImage], num_parts: int = ENCODER_PARTS) -> None:
        """See `Encoder`. `images`: those of all ranks."""
        own = divide([image.span.num_patches for image in images], self._exchange.size)[self._exchange.rank]
        ends = list(itertools.accumulate(image.span.num_tokens for image in images))
        self._own_tokens = [slice(ends[index] - images[index].span.num_tokens, ends[index]) for index in own]
        self._num_all_tokens, self._parts_left, self._own_MF, self._pass = ends[-1], num_parts, None, None
        if own:
            super().start([images[index] for index in own], num_parts)

    @torch.inference_mode()
    def run(self, num_parts: int) -> Tensor | None:
        """See `Encoder`. If this rank fails in the last part, the others get zeros, so that none waits for it."""
        self._parts_left = max(0, self._parts_left - num_parts)
        failure: Exception | None = None
        own_MF: Tensor | None = None
        try:
            if self._pass is not None:
                self._own_MF = super().run(num_parts)
            own_MF = None if self._parts_left else self._own_features()
        except Exception as error:
            failure = error
        if self._parts_left:
            if failure is not None:
                raise failure
            return None
        if own_MF is None:
            own_MF = self._zeros()
        all_MF = self._exchange.leave(own_MF)
        if failure is not None:
            raise failure
        return all_MF

    def _own_features(self) -> Tensor:
        """[M, F]: the features of this rank's images, and zeros for those of other ranks."""
        found_MF = self._zeros()
        if self._own_MF is not None:
            sizes = [part.stop - part.start for part in self._own_tokens]
            for part, features in zip(self._own_tokens, torch.split(self._own_MF, sizes), strict=True):
                found_MF[part] = features
        return found_MF

    def _zeros(self) -> Tensor:
        return torch.zeros(self._num_all_tokens, self._feature_size, dtype=self.dtype, device=self.device)
