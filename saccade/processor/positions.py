"""M-RoPE positions: time, height and width of each token. Plain integers, no torch.

Text advances all three axes together. The tokens of an image share one time and spread over height and width; the frame
pairs of a video are `time_step` apart. The span after an image or video starts at the largest position of any of its
axes plus one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class TextSpan:
    """`length` tokens of text."""

    length: int


@dataclass(frozen=True)
class VisionSpan:
    """The placeholder tokens of one image or video: frame pairs x rows x columns *of merged patches*."""

    frames: int
    rows: int
    columns: int
    time_step: float = 1.0
    """Positions between consecutive frame pairs; an image has only one."""

    @property
    def length(self) -> int:
        """Number of tokens."""
        return self.frames * self.rows * self.columns


def mrope_positions(spans: Sequence[TextSpan | VisionSpan]) -> NDArray[np.int64]:
    """[3, tokens]: positions of one conversation made of `spans`, starting at 0."""
    parts, start = [np.zeros((3, 0), dtype=np.int64)], 0
    for span in spans:
        if isinstance(span, TextSpan):
            parts.append(np.broadcast_to(np.arange(start, start + span.length), (3, span.length)))
            start += span.length
        else:
            positions, extent = _vision_positions(span)
            parts.append(positions + start)
            start += extent
    return np.concatenate(parts, axis=1)


@lru_cache(maxsize=64)
def _vision_positions(span: VisionSpan) -> tuple[NDArray[np.int64], int]:
    """Positions from 0, and one more than the largest of them. Cached: they take 0.1 ms, and sizes recur."""
    times = (np.arange(span.frames, dtype=np.float32) * np.float32(span.time_step)).astype(np.int64)
    axes = np.meshgrid(times, np.arange(span.rows), np.arange(span.columns), indexing="ij")
    positions = np.stack([axis.reshape(-1) for axis in axes]).astype(np.int64)
    positions.flags.writeable = False
    return positions, int(positions.max()) + 1
