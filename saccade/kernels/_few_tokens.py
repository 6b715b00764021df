# mypy: allow-untyped-decorators
"""Tiles and limits of the kernels for one or two tokens, `small_linear_w4a16` and `small_matmul_w8a8`.

They are memory-bound. A program computes BLOCK_N outputs; a thread reads the same 16 bytes of each of them, directly
into registers, one tile ahead of its use, and no tensor core is needed. There are no splits and no atomics: results are
deterministic. On Hopper (programmatic dependent launch) the first tile of weights is read before the previous kernel
has ended; `small_linear.py` says what that demands of others.
"""

from typing import NamedTuple

import torch

from saccade.kernels import launch
from saccade.kernels.launch import tl, triton

MAX_TOKENS = 2
"""More tokens would need too many registers and instructions."""


class VectorTiles(NamedTuple):
    """Tile sizes of a layer."""

    block_n: int
    """Outputs of a program for one token; for two tokens half of them, but at least two."""
    num_warps: int
    """A thread reads 16 bytes of each output: a tile has 1024 4-bit or 512 8-bit inputs per warp."""


# (more than 4096 inputs, more than 8192 outputs) -> tokens up to which these kernels are faster than `linear_w4a16` and
# `matmul_w8a8`, H200: two tokens take 4.2 us here in int4, 2048 -> 2560, four take 7.0 us there.
_WORTHWHILE_TOKENS = {
    torch.int32: {(False, False): 2, (False, True): 1, (True, False): 1, (True, True): 1},
    torch.int8: {(False, False): 2, (False, True): 0, (True, False): 0, (True, True): 0},
    torch.float8_e4m3fn: {(False, False): 2, (False, True): 1, (True, False): 0, (True, True): 0},
}

_FUSED_TOKENS = 1
"""With norm or activation two tokens exceed the registers: four layers take 56 us, with separate kernels 41."""

MAGIC = 0x43000000
"""The bits of 2^7 in fp32."""


@triton.jit
def sum_of_vectors(x: tl.tensor, VECTOR: tl.constexpr) -> tl.tensor:
    """[R, C] to [R, C / VECTOR]: VECTOR adjacent elements are in one thread, loaded by one instruction."""
    return tl.sum(x.reshape(x.shape[0], x.shape[1] // VECTOR, VECTOR), 2)


def vector_tiles(
    table: dict[tuple[bool, bool], VectorTiles], num_outputs: int, num_inputs: int, num_tokens: int
) -> VectorTiles:
    """The entry of a layer's shape, for a number of tokens."""
    tiles = table[num_inputs > 4096, num_outputs > 8192]
    return tiles._replace(block_n=max(2, tiles.block_n // num_tokens))


def max_tokens(weight_dtype: torch.dtype, num_outputs: int, num_inputs: int, *, is_fused: bool = False) -> int:
    """Tokens up to which a kernel is used: where it is faster, or MAX_TOKENS if Triton is forced."""
    if launch.is_forced("triton"):
        return MAX_TOKENS
    most = _WORTHWHILE_TOKENS[weight_dtype][num_inputs > 4096, num_outputs > 8192]
    return min(most, _FUSED_TOKENS) if is_fused else most
