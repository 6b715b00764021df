"""Causal attention of some rows of a packed sequence to the keys of all: the queries of one context rank.

Legend: T queries of this rank, S keys of the sequence, H query heads, G key/value heads, K head dim, R rows.

    out[t] = sum_s softmax_s(scale * q[t] . k[s]) v[s]      over the keys s from the start of t's segment to t itself

A row is a run of queries of one segment. Its keys are those from the start of the segment to its last query, so that
rows of one segment share keys, which `attention` cannot express. `window`: earlier keys that a query attends to. A key
that no query attends to has gradients of zero. q [T, H, K], k and v [S, G, K], out [T, H, K]; softmax in fp32.

The kernels are those of `attention`, with a list of tiles instead of cumulative lengths: one launch for all rows, and
the tiles with most work first, so that the multiprocessors finish together whatever the lengths. A tile of keys adds up
the gradients from all rows that read it: nothing is added in memory. Lists are made on the host (`attention_rows`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from saccade.kernels import launch
from saccade.kernels._attention_tile import LISTED_TILE
from saccade.kernels._attention_tiled import can_tile, forward, key_gradient, query_gradient, rows_of
from saccade.kernels.attention import attention_reference


class QueryRow(NamedTuple):
    """A run of queries of one segment."""

    first_query: int
    """Its first query, in the order of this rank."""
    num_queries: int
    first_key: int
    """Start of the segment."""
    num_keys: int
    """Keys up to that of the last query."""


class AttentionRows(NamedTuple):
    """The rows of a rank and the tiles of the kernels, int32."""

    rows: Tensor
    """[R, 4]: `QueryRow`, ascending in queries and keys."""
    query_tiles: Tensor
    """[tiles, 5]: the row, and the first query of the tile in it; most keys first."""
    key_tiles: Tensor
    """[tiles, 5]: first key and number of keys of the segment, first key of the tile in it, first and end of the rows
    that may read it; most queries first."""


def attention_rows(rows: Sequence[QueryRow], window: int | None = None) -> AttentionRows:
    """The tiles of ascending rows, on the CPU."""
    table = np.array(rows, np.int64).reshape(-1, 4)
    parts = [_query_tiles(table, window), _key_tiles(rows, window)]
    tiles = [tiles[np.argsort(-work, kind="stable")] for tiles, work in parts]
    return AttentionRows(*(torch.from_numpy(x.astype(np.int32)) for x in (table, *tiles)))


def _query_tiles(table: np.ndarray, window: int | None) -> tuple[np.ndarray, np.ndarray]:
    """(tiles of queries, keys that each attends to)."""
    num_tiles = -(-table[:, 1] // LISTED_TILE)
    rows = np.repeat(table, num_tiles, axis=0)
    first = LISTED_TILE * (np.arange(len(rows)) - np.repeat(num_tiles.cumsum() - num_tiles, num_tiles))
    position = first + rows[:, 3] - rows[:, 1]
    begin = 0 if window is None else np.maximum(position - window, 0)
    return np.column_stack([rows, first]), np.minimum(rows[:, 3], position + LISTED_TILE) - begin


def _key_tiles(rows: Sequence[QueryRow], window: int | None) -> tuple[np.ndarray, np.ndarray]:
    """(tiles of keys, queries that attend to each)."""
    tiles, work, end_row = [np.zeros((0, 5), np.int64)], [np.zeros(0, np.int64)], 0
    for segment, group in groupby(rows, lambda row: row.first_key):
        of_segment = np.array(list(group), np.int64)
        ends = of_segment[:, 3:]
        starts = ends - of_segment[:, 1:2]
        first = np.arange(0, int(ends[-1, 0]), LISTED_TILE)
        last_query = ends if window is None else np.minimum(ends, first + LISTED_TILE + window)
        queries = np.maximum(last_query - np.maximum(starts, first), 0)
        num_tiles, first_row, end_row = len(first), end_row, end_row + len(of_segment)
        columns = [segment, int(ends[-1, 0]), first, first_row + (ends <= first).sum(0), end_row]
        tiles.append(np.column_stack([np.broadcast_to(column, num_tiles) for column in columns]))
        work.append(queries.sum(0))
    return np.concatenate(tiles), np.concatenate(work)


def context_attention_reference(
    q_THK: Tensor, k_SGK: Tensor, v_SGK: Tensor, rows: AttentionRows, *, window: int | None = None
) -> Tensor:
    """The formula above, one row at a time, in fp32."""
    outs = []
    for query, num_queries, key, num_keys in rows.rows.tolist():
        starts_q, starts_k = (torch.tensor([0, n], dtype=torch.int32) for n in (num_queries, num_keys))
        q, k, v = q_THK[query:][:num_queries], k_SGK[key:][:num_keys], v_SGK[key:][:num_keys]
        outs.append(
            attention_reference(
                q, k, v, starts_q, starts_k, max_seqlen_q=num_queries, max_seqlen_k=num_keys, causal=True, window=window
            )
        )
    return torch.cat(outs)


class _ListedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, rows: Tensor, q_tiles: Tensor, k_tiles: Tensor, window: int | None
    ) -> Tensor:
        q, k, v = rows_of(q), rows_of(k), rows_of(v)
        out, lse = forward(q, k, v, q_tiles, q_tiles, True, window, is_listed=True)
        ctx.save_for_backward(q, k, v, rows, q_tiles, k_tiles, out, lse)
        ctx.window = window
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, rows, q_tiles, k_tiles, out, lse = ctx.saved_tensors
        d_out = rows_of(d_out)
        d_q, delta = query_gradient(q, k, v, out, d_out, lse, q_tiles, q_tiles, True, ctx.window, is_listed=True)
        d_k, d_v = key_gradient(q, k, v, d_out, lse, delta, rows, k_tiles, True, ctx.window, is_listed=True)
        return d_q, d_k, d_v, None, None, None, None


def context_attention(
    q_THK: Tensor, k_SGK: Tensor, v_SGK: Tensor, rows: AttentionRows, *, window: int | None = None
) -> Tensor:
    """Attention of the rows of one rank, see the top of this file; `rows` are those of `attention_rows`."""
    if q_THK.shape[1] % k_SGK.shape[1] or q_THK.shape[2] != k_SGK.shape[2] or k_SGK.shape != v_SGK.shape:
        shapes = ", ".join(str(tuple(x.shape)) for x in (q_THK, k_SGK, v_SGK))
        raise ValueError(f"context_attention: q, k and v {shapes} do not fit")
    if q_THK.numel() == 0:
        return q_THK + 0.0 * (k_SGK.sum() + v_SGK.sum())
    candidates: tuple[launch.Path, ...] = ("triton",) if can_tile(q_THK) else ()
    if launch.choose_path("context_attention", *launch.available_paths(q_THK, *candidates)) == "reference":
        return context_attention_reference(q_THK, k_SGK, v_SGK, rows, window=window)
    out: Tensor = _ListedAttention.apply(q_THK, k_SGK, v_SGK, *rows, window)  # type: ignore[no-untyped-call]
    return out
