"""The layout of packed images on the host, and the flat int32 buffer that takes it to the device."""

from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from saccade.device import to_device

Integers = NDArray[np.int64]
Numbers = TypeVar("Numbers", NDArray[np.int32], Tensor)


@dataclass(frozen=True)
class Segments:
    """Segments of packed patches that attend to each other."""

    cu_seqlens: Tensor
    """[segments + 1] int32."""
    max_seqlen: int
    """Bound on the patches of a segment."""


class LayoutSizes:
    """Sizes of a layout in a flat int32 buffer. A layout may be padded to larger sizes (`Layout.write`)."""

    num_tokens: int
    """Image tokens."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """Length of each part of the buffer."""
        raise NotImplementedError

    @property
    def total(self) -> int:
        """Length of the buffer."""
        return sum(map(_aligned, self.lengths))

    def split(self, buffer: Numbers) -> list[Numbers]:
        """The parts of a buffer, each of which starts at an aligned offset."""
        parts, start = [], 0
        for length in self.lengths:
            parts.append(buffer[start : start + length])
            start += _aligned(length)
        return parts

    def inputs(self, buffer: Tensor) -> Any:
        """The tower's inputs, as views of a buffer that a layout was written to."""
        raise NotImplementedError


def _aligned(length: int) -> int:
    """Align parts to 16 bytes: Triton specializes kernels on pointer alignment."""
    return -(-length // 4) * 4


class Layout:
    """The layout of packed images."""

    @property
    def sizes(self) -> LayoutSizes:
        """The sizes without padding."""
        raise NotImplementedError

    def write(self, buffer: NDArray[np.int32], sizes: Any) -> None:
        """Write the layout to a buffer of these sizes."""
        raise NotImplementedError

    def to(self, device: torch.device) -> Any:
        """Copy the layout to the device, asynchronously: the tower's inputs apart from pixels."""
        sizes = self.sizes
        buffer = np.zeros(sizes.total, np.int32)
        self.write(buffer, sizes)
        return sizes.inputs(to_device(buffer, device))
