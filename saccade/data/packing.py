"""Samples into rows, rows onto ranks: rows full of tokens, with vision work spread evenly.

`pack` takes the samples in descending size and puts each into the row where it adds least to the sum of squares of the rows' tokens
and patches, both as parts of the whole: a text goes where tokens are fewest, an image also where patches are. It begins with as many
rows as the sums demand and starts again with more when a sample finds no room. Everything is in integers, so that every machine
packs alike. 4096 samples take about 20 ms, and as much again for each new start; two are rare.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from saccade.data.order import Ints

_WHOLE = 1 << 31
"""Integer that stands for all tokens, and for all patches; its square fits 64 bits."""

_NO_ROOM = np.iinfo(np.int64).max


@dataclass(frozen=True)
class Packing:
    """Rows of sample numbers, ascending in each row, and the samples that exceed a budget by themselves."""

    sequences: list[list[int]]
    too_large: list[int]


def pack(tokens: npt.ArrayLike, patches: npt.ArrayLike, *, max_seq_len: int, max_patches: int) -> Packing:
    """Rows of at most `max_seq_len` tokens and `max_patches` patches that hold every sample not too large by itself."""
    sizes, budgets = np.stack([tokens, patches]).astype(np.int64), np.array([[max_seq_len], [max_patches]])
    fits = (sizes <= budgets).all(axis=0)
    samples, sizes = np.flatnonzero(fits), sizes[:, fits]
    parts = sizes * _WHOLE // np.maximum(sizes.sum(axis=1, keepdims=True), 1)
    descending = np.argsort(-parts.max(axis=0), kind="stable")
    items = np.concatenate([sizes, parts])[:, descending].T.tolist()
    num_sequences, step = _fewest_rows(sizes, budgets), 1
    while (chosen := _place(items, max_seq_len, max_patches, num_sequences)) is None:
        num_sequences, step = num_sequences + step, 2 * step
    rows: list[list[int]] = [[] for _ in range(num_sequences)]
    for sample, row in sorted(zip(samples[descending].tolist(), chosen, strict=True)):
        rows[row].append(sample)
    return Packing([row for row in rows if row], np.flatnonzero(~fits).tolist())


def assign(costs: Sequence[float], num_ranks: int) -> list[list[int]]:
    """Row numbers for each rank, ascending: even work, and numbers of rows that differ by one at most.

    Rows go out in descending cost, one to each rank in turn; in every turn the costliest goes to the rank with least work so far.
    """
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    work = [0.0] * num_ranks
    rows = sorted(range(len(costs)), key=lambda row: (-costs[row], row))
    for begin in range(0, len(rows), num_ranks):
        least_first = sorted(range(num_ranks), key=lambda rank: (work[rank], rank))
        for rank, row in zip(least_first, rows[begin : begin + num_ranks], strict=False):
            ranks[rank].append(row)
            work[rank] += costs[row]
    return [sorted(rows) for rows in ranks]


def _fewest_rows(sizes: Ints, budgets: Ints) -> int:
    """No packing has fewer rows: by the sums, and because two samples over half a budget never share a row."""
    by_sum = -(-sizes.sum(axis=1, keepdims=True) // budgets)
    over_half = (2 * sizes > budgets).sum(axis=1)
    return int(max(1, by_sum.max(), over_half.max()))


def _place(items: list[list[int]], max_seq_len: int, max_patches: int, num_sequences: int) -> list[int] | None:
    """The row of each item (tokens, patches, and these as parts of the whole), or None when one finds no room."""
    token_load, patch_load, score, of_patches = np.zeros((4, num_sequences), np.int64)
    token_room, patch_room = np.full(num_sequences, max_seq_len), np.full(num_sequences, max_patches)
    chosen = []
    for tokens, patches, token_part, patch_part in items:
        np.multiply(token_load, token_part, out=score)
        if patch_part:
            np.multiply(patch_load, patch_part, out=of_patches)
            np.add(score, of_patches, out=score)
        row = int(score.argmin())
        if token_room[row] < tokens or patch_room[row] < patches:
            has_room = (token_room >= tokens) & (patch_room >= patches)
            if not has_room.any():
                return None
            row = int(np.where(has_room, score, _NO_ROOM).argmin())
        token_load[row] += token_part
        patch_load[row] += patch_part
        token_room[row] -= tokens
        patch_room[row] -= patches
        chosen.append(row)
    return chosen
