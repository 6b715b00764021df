# mypy: allow-untyped-decorators
"""Splits of the inputs of a product over programs, for `linear_w8a8` and `linear_w4a16`.

Legend: T tokens, D inputs, N outputs, S splits of the inputs.

A product of few tokens has few tiles of outputs. To fill the GPU, several programs compute each tile, one per split of
the inputs; the last of them to finish adds up the sums of all, always in the same order.

The kernels that use it do not start early (programmatic dependent launch): the programs of the next launch would fill
multiprocessors unevenly, and one wave of splits takes as long as its fullest multiprocessor.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from saccade.kernels import launch
from saccade.kernels.launch import tl, triton


@dataclass(frozen=True, kw_only=True)
class SplitTiles:
    """Tile sizes and launch options of a product with splits."""

    block_t: int
    """Tokens of a tile."""
    block_n: int
    """Outputs of a tile."""
    block_d: int
    """Inputs per step."""
    num_warps: int
    """Warps of a program."""
    num_stages: int
    """Steps in flight."""
    programs_per_sm: int
    """Splits of the inputs are added until the GPU has this many programs."""
    stores_sums: bool = False
    """Whether a second kernel adds up the splits, instead of the last program of a tile: faster for large tiles."""


_MIN_STEPS = 4
"""Steps along the inputs that are worth a split of their own."""

_COUNTER_ROWS, _MAX_COUNTERS = 32, 1024
"""Streams that can have counters, and tiles of one launch."""
_all_counters: dict[torch.device, tuple[Tensor, dict[int, int]]] = {}
"""Zeroed counters of a device, a row for each stream; and the row of each stream."""


@triton.jit
def tile_of_program(
    T: tl.tensor, N: tl.tensor, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Rows and columns of a program's tile. Bands of 8 token tiles let concurrent programs share weights in L2."""
    tiles_t = tl.cdiv(T, BLOCK_T)
    tiles_n = tl.cdiv(N, BLOCK_N)
    band = tl.program_id(0) // (8 * tiles_n)
    height = tl.minimum(tiles_t - band * 8, 8)
    index = tl.program_id(0) % (8 * tiles_n)
    t = (band * 8 + index % height) * BLOCK_T + tl.arange(0, BLOCK_T)
    n = index // height * BLOCK_N + tl.arange(0, BLOCK_N)
    return t, n


@triton.jit
def sum_of_splits(
    total: tl.tensor,
    sums: tl.tensor,
    counters: tl.tensor,
    offset: tl.tensor,
    stored: tl.tensor,
    T: tl.tensor,
    N: tl.tensor,
) -> tuple[tl.tensor, tl.tensor]:
    """Store a split's sums [S, T, N]; the last split of a tile to finish adds up all, always in the same order.

    A tile's counter is 0 before and after. The barrier puts the stores of all threads before the one thread that
    counts.
    """
    num_splits = tl.num_programs(1)
    size = tl.cast(T, tl.int64) * N
    tl.store(sums + tl.program_id(1) * size + offset, total, mask=stored)
    tl.debug_barrier()
    is_last = tl.atomic_add(counters + tl.program_id(0), 1, sem="acq_rel") == num_splits - 1
    if is_last:
        tl.store(counters + tl.program_id(0), 0)
        # Loads in flight, as registers allow.
        AHEAD: tl.constexpr = 8 if total.shape[0] * total.shape[1] <= 2048 else 2
        total = tl.zeros_like(total)
        for start in range(0, num_splits, AHEAD):
            for i in tl.static_range(AHEAD):
                split = tl.full([1, 1], start + i, tl.int64)
                is_read = stored & (split < num_splits)
                total += tl.load(sums + split * size + offset, mask=is_read, other=0, cache_modifier=".cg")
    return total, is_last


def layer_shape(num_outputs: int, num_inputs: int) -> str:
    """The name of a layer's shape in the tables."""
    return "wide" if num_outputs > 8192 else "deep" if num_inputs > 4096 else "small"


def split_tiles(table: dict[int, SplitTiles], num_tokens: int) -> SplitTiles:
    """The entry of a table whose keys are the largest numbers of tokens."""
    return next(tiles for most, tiles in table.items() if num_tokens <= most)


def _num_splits(tiles: SplitTiles, num_programs: int, num_inputs: int, num_sms: int) -> int:
    """As many splits as give every multiprocessor the same number of programs, none shorter than `_MIN_STEPS`."""
    most = num_inputs // (tiles.block_d * _MIN_STEPS)
    filling = (per_sm * num_sms // num_programs for per_sm in range(tiles.programs_per_sm, 0, -1))
    return max(1, next((splits for splits in filling if splits <= most), most))


def _counters(device: torch.device) -> Tensor | None:
    """The current stream's counters for `sum_of_splits`. None at a device's first call during a capture.

    As with cuBLAS workspaces, work launched or captured on one stream must not run concurrently: replay graphs captured
    on one stream one at a time.
    """
    is_cuda = device.type == "cuda"
    if device not in _all_counters:
        if is_cuda and torch.cuda.is_current_stream_capturing():
            return None
        _all_counters[device] = torch.zeros((_COUNTER_ROWS, _MAX_COUNTERS), dtype=torch.int32, device=device), {}
    counters, rows = _all_counters[device]
    row = rows.setdefault(torch.cuda.current_stream(device).cuda_stream if is_cuda else 0, len(rows))
    return counters[row] if row < _COUNTER_ROWS else None


def choose_splits(
    tiles: SplitTiles, num_programs: int, num_inputs: int, device: torch.device, num_splits: int | None
) -> tuple[int, Tensor | None]:
    """The number of splits (`num_splits` if given), and their counters unless a second kernel adds them up.

    Without counters there is a single split.
    """
    splits = num_splits or _num_splits(tiles, num_programs, num_inputs, launch.num_sms(device))
    if tiles.stores_sums:
        return splits, None
    counters = _counters(device) if splits > 1 and num_programs <= _MAX_COUNTERS else None
    return (1 if counters is None else splits), counters
