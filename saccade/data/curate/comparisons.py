"""How likely copies are verified: images by their thumbnails, texts by their shingles (`leaders.Comparison`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from saccade.data.curate.image_match import COPY, same_picture
from saccade.data.curate.partitions import Partitions
from saccade.data.curate.sample_table import Ids, read_texts, read_thumbnails
from saccade.data.curate.text_features import similarity


@dataclass(frozen=True)
class Images:
    """Images are compared by their thumbnails."""

    def payloads(self, partitions: Partitions, ids: Ids) -> list[bytes]:
        """The thumbnails."""
        return [thumbnail.tobytes() for thumbnail in read_thumbnails(partitions.index, ids)]

    def is_same(self, worse: Sequence[bytes], better: Sequence[bytes]) -> NDArray[np.bool_]:
        """Whether they show the same image."""
        one, other = (np.frombuffer(b"".join(side), np.uint8).reshape(len(side), -1) for side in (better, worse))
        return same_picture(one, other, COPY)


@dataclass(frozen=True)
class Texts:
    """Texts are compared by their shingles."""

    min_similarity: float

    def payloads(self, partitions: Partitions, ids: Ids) -> list[bytes]:
        """The texts."""
        return [text.encode("utf-8", "surrogatepass") for text in read_texts(partitions.index, ids)]

    def is_same(self, worse: Sequence[bytes], better: Sequence[bytes]) -> NDArray[np.bool_]:
        """Whether they are nearly the same text."""
        pairs = zip(worse, better, strict=True)
        decoded = [[text.decode("utf-8", "surrogatepass") for text in pair] for pair in pairs]
        return np.array([similarity(*pair) >= self.min_similarity for pair in decoded], bool)
