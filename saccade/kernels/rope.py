"""Rotary position embedding: 1-D, three-section (M-RoPE) and 2-D vision, one rotation for all of them.

Legend: T tokens, H heads, K head dim, F = K / 2 frequencies, A axes.

An angle table holds cos and sin of one angle per token and frequency, [T, F] each, in fp32. Building it is where the three
kinds differ; rotating is the same for all: channel i and channel i + F of a head turn together,

    out[i]     = x[i] * cos[i] - x[i + F] * sin[i]
    out[i + F] = x[i + F] * cos[i] + x[i] * sin[i]

computed in fp32 and returned in x's dtype. Tables are built once per forward and shared by every layer.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

AngleTable = tuple[Tensor, Tensor]
"""(cos, sin), each [T, F] in fp32."""


def _table(angles_TF: Tensor) -> AngleTable:
    return angles_TF.cos(), angles_TF.sin()


def frequencies(num_frequencies: int, theta: float, device: torch.device) -> Tensor:
    """theta^(-i / F) for i in 0..F-1, in fp32."""
    exponent = torch.arange(num_frequencies, dtype=torch.float32, device=device) / num_frequencies
    return 1.0 / theta**exponent


def text_angles(positions_AT: Tensor, theta: float, sections: Sequence[int]) -> AngleTable:
    """M-RoPE: frequency f takes its position from the axis (time, height, width) whose section holds f.

    `sections` sums to F. Plain text has the same position on all three axes, which makes this ordinary 1-D RoPE.
    """
    assert len(sections) == positions_AT.shape[0], "one section per position axis"
    inverse_F = frequencies(sum(sections), theta, positions_AT.device)
    angles_AT = (
        positions_AT[axis, :, None].float() * part for axis, part in enumerate(torch.split(inverse_F, list(sections)))
    )
    return _table(torch.cat(list(angles_AT), dim=-1))


def vision_angles(positions_2P: Tensor, head_dim: int, theta: float = 10000.0) -> AngleTable:
    """2-D: the first half of the frequencies turns with the patch's row, the second half with its column."""
    inverse = frequencies(head_dim // 4, theta, positions_2P.device)
    rows, columns = positions_2P[0, :, None].float() * inverse, positions_2P[1, :, None].float() * inverse
    return _table(torch.cat([rows, columns], dim=-1))


def rope_reference(q_THK: Tensor, k_THK: Tensor, table: AngleTable) -> tuple[Tensor, Tensor]:
    """The rotation above, in plain PyTorch."""
    cos, sin = (part.unsqueeze(1) for part in table)

    def rotate(x_THK: Tensor) -> Tensor:
        first, second = x_THK.float().chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x_THK.dtype)

    return rotate(q_THK), rotate(k_THK)


def rope(q_THK: Tensor, k_THK: Tensor, table: AngleTable) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys by their tokens' angles. Q and K may have different numbers of heads."""
    return rope_reference(q_THK, k_THK, table)
