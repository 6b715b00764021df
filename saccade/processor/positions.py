"""M-RoPE positions: where each token stands in time, height and width. Plain integers, no torch.

Text advances all three axes together. The tokens of an image share one time and spread over height and width; a video's frame
pairs lie `time_step` apart. Text after an image goes on behind its longer spatial side.
"""

from collections.abc import Sequence
from dataclasses import dataclass

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
    """Positions between one frame pair and the next; 1 for an image (which has only one)."""

    @property
    def length(self) -> int:
        """Tokens it takes in the row."""
        return self.frames * self.rows * self.columns


def mrope_positions(spans: Sequence[TextSpan | VisionSpan]) -> NDArray[np.int64]:
    """[3, tokens]: the positions of one conversation made of `spans`, starting at 0."""
    parts, start = [np.zeros((3, 0), dtype=np.int64)], 0
    for span in spans:
        if isinstance(span, TextSpan):
            parts.append(np.broadcast_to(np.arange(start, start + span.length), (3, span.length)))
            start += span.length
        else:
            parts.append(_vision_positions(span) + start)
            start += max(span.rows, span.columns)
    return np.concatenate(parts, axis=1)


def _vision_positions(span: VisionSpan) -> NDArray[np.int64]:
    times = (np.arange(span.frames, dtype=np.float32) * np.float32(span.time_step)).astype(np.int64)
    axes = np.meshgrid(times, np.arange(span.rows), np.arange(span.columns), indexing="ij")
    return np.stack([axis.reshape(-1) for axis in axes]).astype(np.int64)
