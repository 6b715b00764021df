"""What is remembered of a text to find its near-copies by: MinHash over runs of five bytes, banded.

    text  ->  lower case, single blanks  ->  set of 5-byte runs  ->  120 minima  ->  20 band keys of 6 minima each

Texts whose sets have a Jaccard similarity of 0.8 share a band with 99.8 % probability, of 0.7 with 92 %. A shared band only makes
a candidate: the similarity itself is then computed from the texts. All steps run over many texts at once in numpy.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache

import numpy as np
import xxhash
from numpy.typing import NDArray

NUM_BANDS = 20
_ROWS = 6
_RUN_BYTES = 5
_CHUNK_RUNS = 2048  # runs hashed at a time: 2048 x 120 of 4 bytes stay in the cache


def normalized(text: str) -> str:
    """The text as it is compared: without case, with single blanks."""
    return " ".join(text.casefold().split())


def text_hash(text: str) -> int:
    """64 bits that equal texts share, whatever their case and blanks."""
    return xxhash.xxh3_64_intdigest(normalized(text).encode("utf-8", "surrogatepass"))


def minhash_bands(texts: Sequence[str]) -> NDArray[np.uint32]:
    """[texts, 20]: keys; near-copies agree in at least one column."""
    if not texts:
        return np.zeros((0, NUM_BANDS), np.uint32)
    found, begins = _runs(texts)
    runs = (found * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(32)).astype(np.uint32)
    factor, offset = _permutations()
    minima = np.full((len(texts), NUM_BANDS * _ROWS), np.iinfo(np.uint32).max, np.uint32)
    owners = np.repeat(np.arange(len(texts)), np.diff(np.append(begins, len(runs))))
    for begin in range(0, len(runs), _CHUNK_RUNS):
        chunk = runs[begin : begin + _CHUNK_RUNS]
        hashed = chunk[:, None] * factor + offset
        owner = owners[begin : begin + _CHUNK_RUNS]
        first = np.flatnonzero(np.diff(owner, prepend=-1))
        minima[owner[first]] = np.minimum(minima[owner[first]], np.minimum.reduceat(hashed, first, axis=0))
    return _mixed(minima.reshape(len(texts), NUM_BANDS, _ROWS))


def similarity(one: str, other: str) -> float:
    """Jaccard similarity of two texts' sets of runs, exactly."""
    first, second = _run_set(one), _run_set(other)
    shared = len(first & second)
    return shared / (len(first) + len(second) - shared)


@lru_cache(maxsize=2**16)
def _run_set(text: str) -> frozenset[bytes]:
    data = _padded(text)
    return frozenset(data[begin : begin + _RUN_BYTES] for begin in range(len(data) - _RUN_BYTES + 1))


def _padded(text: str) -> bytes:
    """A text shorter than a run is one run."""
    return normalized(text).encode("utf-8", "surrogatepass").ljust(_RUN_BYTES, b"\0")


def _runs(texts: Sequence[str]) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """The runs of all texts as numbers, and where each text's begin."""
    encoded = [_padded(text) for text in texts]
    num_runs = np.array([len(text) - _RUN_BYTES + 1 for text in encoded])
    data = np.frombuffer(b"".join(encoded) + bytes(8), np.uint8)
    starts = np.cumsum([0, *map(len, encoded)])[:-1]
    begins = np.cumsum(num_runs) - num_runs
    where = np.arange(num_runs.sum()) + np.repeat(starts - begins, num_runs)
    windows = np.lib.stride_tricks.sliding_window_view(data, 8)[where]
    runs = np.ascontiguousarray(windows).view("<u8").reshape(-1) & np.uint64(2 ** (8 * _RUN_BYTES) - 1)
    return runs, begins


def _mixed(rows: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """The numbers of the last axis as one key."""
    key = np.zeros(rows.shape[:-1], np.uint64)
    for number in range(rows.shape[-1]):
        key = (key ^ rows[..., number]) * np.uint64(0x9E3779B97F4A7C15)
        key ^= key >> np.uint64(32)
    return key.astype(np.uint32)


@cache
def _permutations() -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """An odd factor and an offset modulo 2^32 for each minimum, the same on every machine."""
    random = np.random.Generator(np.random.PCG64(20240229))
    drawn = random.integers(0, 2**32, (2, NUM_BANDS * _ROWS), dtype=np.uint32)
    return drawn[0] | np.uint32(1), drawn[1]
