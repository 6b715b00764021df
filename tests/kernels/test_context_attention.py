"""Attention of rows that share keys equals its reference, and its tiles are all tiles, the largest first."""

import functools
import random

import pytest
import torch
from closeness import BOUNDS, assert_close, perturbed

from saccade.kernels import _attention_tiled as tiled
from saccade.kernels import launch
from saccade.kernels.context_attention import (
    AttentionRows,
    QueryRow,
    attention_rows,
    context_attention,
    context_attention_reference,
)

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16
ROWS = [
    QueryRow(0, 30, 0, 37), QueryRow(30, 40, 0, 170), QueryRow(70, 1, 0, 171),
    QueryRow(71, 140, 180, 140), QueryRow(211, 1, 330, 1), QueryRow(212, 5, 331, 20),
]  # fmt: skip
"""Three rows of one segment, a whole segment, one of a single token, and the end of one; keys 171 to 179 have none."""
NUM_QUERIES, NUM_KEYS = 217, 360


@pytest.fixture
def tiles(monkeypatch, device):
    """Small tiles on the CPU, so that short rows have several; the real ones on the GPU."""
    if device == "cpu":
        monkeypatch.setattr(tiled, "FP32_TILES", tiled.AttentionTiles(32, 16, 4, 1))
        for key in tiled.CONFIGS:
            monkeypatch.setitem(tiled.CONFIGS, key, tiled.AttentionTiles(32, 16, 4, 1))


def tensors(device, dtype):
    """q, k, v and d_out."""
    sizes = ((NUM_QUERIES, HEADS), (NUM_KEYS, KV_HEADS), (NUM_KEYS, KV_HEADS), (NUM_QUERIES, HEADS))
    return [torch.randn(*size, HEAD_DIM, device=device).to(dtype) for size in sizes]


def out_and_gradients(run, given):
    *qkv, d_out = given
    qkv = [x.detach().requires_grad_() for x in qkv]
    out = run(*qkv)
    return out, *torch.autograd.grad(out, qkv, d_out.to(out.dtype))


def both(device, dtype, window):
    given = tensors(device, dtype)
    rows = AttentionRows(*(x.to(device) for x in attention_rows(ROWS, window)))
    with launch.forced("triton"):
        found = out_and_gradients(functools.partial(context_attention, rows=rows, window=window), given)
    reference = functools.partial(context_attention_reference, rows=rows, window=window)
    return found, out_and_gradients(reference, [x.float() for x in given])


@pytest.mark.parametrize("window", [None, 50])
def test_kernels_equal_the_reference(window, tiles, device, dtype):
    for name, got, right in zip(("out", "dq", "dk", "dv"), *both(device, dtype, window), strict=True):
        assert_close(name, got, right, BOUNDS[dtype])


def test_an_error_of_twice_the_bound_is_found(tiles, device, one_dtype):
    found, right = both(device, one_dtype, None)
    with pytest.raises(AssertionError):
        assert_close("dk", perturbed(found[2], BOUNDS[one_dtype]), right[2], BOUNDS[one_dtype])


@pytest.mark.parametrize("window", [None, 0, 300])
def test_tiles_are_all_tiles_and_the_largest_first(window):
    rng, reach = random.Random(0), float("inf") if window is None else window
    for _ in range(20):
        rows, query, key = [], 0, 0
        for _ in range(rng.randrange(1, 6)):
            first, end = key, key
            for _ in range(rng.randrange(1, 4)):
                end += rng.randrange(0, 500)
                num_queries = rng.randrange(1, 400)
                end += num_queries
                rows.append(QueryRow(query, num_queries, first, end - first))
                query += num_queries
            key = end + rng.randrange(0, 3)
        made = attention_rows(rows, window)
        work = []
        for first_query, num_queries, _, num_keys, first in made.query_tiles.tolist():
            position = first + num_keys - num_queries
            work.append(min(num_keys, position + 128) - max(0, position - (num_keys if window is None else window)))
            assert any(row.first_query == first_query and first < num_queries == row.num_queries for row in rows)
        assert work == sorted(work, reverse=True)
        assert len(work) == sum(-(-row.num_queries // 128) for row in rows)
        work, listed = [], {}
        for segment, num_keys, first, begin, end in made.key_tiles.tolist():
            listed[segment, first] = range(begin, end)
            work.append(0)
            for row in rows:
                if row.first_key == segment:
                    assert row.num_keys <= num_keys
                    start = row.num_keys - row.num_queries
                    work[-1] += max(0, min(row.num_keys, first + 128 + reach) - max(start, first))
        assert work == sorted(work, reverse=True)
        for number, row in enumerate(rows):
            for first in range(0, row.num_keys, 128):
                assert number in listed[row.first_key, first]
