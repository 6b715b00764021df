"""The order of a stream, as arithmetic: any draw is looked up directly, nothing is stored per sample.

    draw -> source, number within the source (Mixture) -> epoch, position -> window -> shard, row (EpochOrder)

`Mixture` interleaves the sources in exact proportion to their weights. `EpochOrder` shuffles one source: shards (or the
units they are cut into, `units.py`) are permuted, `window_shards` consecutive ones form a window, and the samples of a
window are permuted together, so a reader works on a few shards at a time. With several lanes (`lanes.py`) the positions
are cut into equal parts, and windows begin at the start of each part. Both permutations are Feistel networks keyed by
seed, epoch and source: the same on every machine, for every numpy version, and independent of the number of processes
that read.

Cost: 12 bytes and about 0.2 us per *shard* to open an epoch, about 0.4 us per position looked up.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from hashlib import blake2b
from math import lcm

import numpy as np
import numpy.typing as npt

from saccade.errors import ConfigError

Ints = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]

MAX_SIZE = 1 << 53
"""Largest permutation: sizes stay exact in the square root of a float64."""
MAX_TOTAL = 1 << 40
"""Weights whose integers sum to at most this are exact; others are rounded to one part in 2^40."""
MAX_DRAWS = 1 << 21
"""Maximum draws of one `Mixture.draws` call: products of draws and weights stay within 64 bits."""

_ROUNDS = 12  # fewer leave permutations of five or six shards visibly unequal in frequency
_GOLDEN = 0x9E3779B97F4A7C15
_ROUND_KEYS = [np.uint64(_GOLDEN * (r + 1) % 2**64) for r in range(_ROUNDS)]
_CHUNK = 1 << 16


def key_of(*parts: int | str) -> int:
    """Hash numbers and strings to a 64-bit key; different tuples give unrelated keys."""
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


# ------------------------------------------------------------------ which source


class Mixture:
    """Interleaves sources in proportion to their weights: integers, or decimals such as 0.3 (taken as 3/10).

    A binary tree over the sources: of the first n draws of a node, its left half gets round(n * left weight / weight).
    So every draw is looked up without history, `sum(weights)` draws hold each source exactly as often as its weight,
    and the counts of any prefix are within half a draw per level of the tree (1 for three or four sources) of the exact
    proportion.
    """

    def __init__(self, weights: Sequence[int | float]) -> None:
        self.weights = _integers(weights)
        """Integers in proportion to the weights given."""

    def draws(self, begin: int, end: int) -> tuple[Ints, Ints]:
        """Source of each of the draws begin .. end - 1, and its number among that source's draws."""
        assert 0 <= begin <= end <= begin + MAX_DRAWS, f"draws {begin} to {end}: at most {MAX_DRAWS} at a time"
        sources, numbers = np.empty((2, end - begin), np.int64)

        def divide(first: int, last: int, num_before: int, draws: Ints) -> None:
            """Divide `draws`, which follow `num_before` earlier ones of this node, among sources first .. last - 1."""
            if last - first == 1:
                sources[draws], numbers[draws] = first, num_before + np.arange(len(draws))
                return
            middle = (first + last) // 2
            left, whole = sum(self.weights[first:middle]), sum(self.weights[first:last])
            left_before, rest = divmod(num_before * left + whole // 2, whole)
            left_counts = (rest + np.arange(len(draws) + 1) * left) // whole
            is_left = np.diff(left_counts) == 1
            divide(first, middle, left_before, draws[is_left])
            divide(middle, last, num_before - left_before, draws[~is_left])

        divide(0, len(self.weights), begin, np.arange(end - begin))
        return sources, numbers


def _integers(weights: Sequence[int | float]) -> list[int]:
    """Integers in proportion to the weights: exact if their sum stays below `MAX_TOTAL`."""
    if not weights:
        raise ConfigError("a mixture of no sources; give at least one")
    for number, weight in enumerate(weights):
        if not 0 < weight < float("inf"):
            raise ConfigError(f"source {number} has weight {weight}; weights must be positive, or remove the source")
    exact = [Fraction(str(weight)) for weight in weights]  # 0.1 as written, not the nearest binary number
    scale = Fraction(lcm(*(weight.denominator for weight in exact)))
    scale = min(scale, Fraction(MAX_TOTAL) / sum(exact))
    return [max(1, round(weight * scale)) for weight in exact]


# ------------------------------------------------------------------ which sample of the source


class EpochOrder:
    """The samples of one source in the order of one epoch."""

    def __init__(
        self,
        shard_sizes: npt.ArrayLike,
        *,
        seed: int,
        epoch: int,
        window_shards: int,
        source: str = "",
        num_lanes: int = 1,
    ) -> None:
        """`shard_sizes`: samples of each shard, 0 allowed; `source` gives sources of one seed different orders."""
        if window_shards < 1:
            raise ValueError(f"window_shards is {window_shards}; a window has at least one shard")
        sizes = np.asarray(shard_sizes)
        shards = Permutation(len(sizes), key_of("shards", seed, epoch, source))
        self._shards = shards.whole()
        self._starts = np.zeros(len(sizes) + 1, np.int64)  # first position of each permuted shard, and the end
        np.cumsum(sizes[self._shards], out=self._starts[1:])
        self._window_starts = _window_starts(self._starts, window_shards, num_lanes)
        self._key = np.uint64(key_of("samples", seed, epoch, source))

    def __len__(self) -> int:
        return int(self._starts[-1])

    def locate(self, positions: npt.ArrayLike) -> tuple[Ints, Ints]:
        """Shard and row (of the shard's `shard_sizes` rows) of the samples at these positions of the epoch."""
        flat = _checked(positions, len(self))
        window = np.searchsorted(self._window_starts, flat, side="right") - 1
        begin = self._window_starts[window]
        size = (self._window_starts[window + 1] - begin).astype(np.uint64)
        key = _mix(self._key + window.astype(np.uint64) * np.uint64(_GOLDEN))
        shuffled = begin + _permute(flat - begin, size, key)
        shard = np.searchsorted(self._starts, shuffled, side="right") - 1
        return self._shards[shard].astype(np.int64), shuffled - self._starts[shard]


def part(total: int, number: int, num_parts: int) -> tuple[int, int]:
    """First item of one of `num_parts` equal parts, and the one after its last; they differ by one item at most."""
    return number * total // num_parts, (number + 1) * total // num_parts


def _window_starts(starts: Ints, window: int, num_lanes: int) -> Ints:
    """First position of each window, and the end: every `window` shards from the start of each lane."""
    total = int(starts[-1])
    bounds = [part(total, lane, num_lanes) for lane in range(num_lanes)]
    begins, ends = np.array(bounds, np.int64).T
    first = np.where(begins > 0, np.searchsorted(starts, begins, side="right") - 1, 0)  # the shard a lane begins in
    after = np.searchsorted(starts, ends, side="left")
    lanes = zip(begins.tolist(), first.tolist(), after.tolist(), strict=True)
    pieces = [piece for begin, a, b in lanes for piece in ([begin], starts[a + window : b : window])]
    return np.concatenate([*pieces, [total]])


class Permutation:
    """A keyed bijection of 0 .. size - 1, computed value by value."""

    def __init__(self, size: int, key: int) -> None:
        if not 0 <= size <= MAX_SIZE:
            raise ValueError(f"a permutation of {size} values: the size must be between 0 and {MAX_SIZE}")
        self._size = np.array([size], np.uint64)
        self._key = np.array([key], np.uint64)

    def __len__(self) -> int:
        return int(self._size[0])

    def __call__(self, positions: npt.ArrayLike) -> Ints:
        """The value at each position."""
        flat = _checked(positions, len(self))
        mapped = np.empty_like(flat)
        for begin in range(0, len(flat), _CHUNK):
            part = slice(begin, begin + _CHUNK)
            mapped[part] = _permute(flat[part], self._size, self._key)
        return mapped

    def whole(self) -> npt.NDArray[np.int32]:
        """The values at all positions of a permutation of less than 2^31."""
        mapped = np.empty(len(self), np.int32)
        for begin in range(0, len(self), _CHUNK):
            positions = np.arange(begin, min(begin + _CHUNK, len(self)))
            mapped[begin : begin + _CHUNK] = _permute(positions, self._size, self._key)
        return mapped


def _checked(numbers: npt.ArrayLike, size: int) -> Ints:
    flat = np.atleast_1d(np.asarray(numbers, np.int64))
    if len(flat) and not (flat.min() >= 0 and flat.max() < size):
        raise IndexError(f"positions {flat.min()} to {flat.max()} of an order of {size}")
    return flat


def _permute(numbers: Ints, size: _Words, key: _Words) -> Ints:
    """Map each number below its `size` under its `key`; both have one entry, or one per number.

    A Feistel network on pairs (left < a, right < b) with a = ceil(sqrt(size)) and b = ceil(size / a): fewer than a of
    the a * b pairs are outside, so hardly any number needs another step until it is inside again (cycle walking).
    """
    a = np.ceil(np.sqrt(size)).astype(np.uint64)
    b = (size + a - np.uint64(1)) // np.maximum(a, np.uint64(1))
    size, key, a, b = (np.broadcast_to(x, numbers.shape) for x in (size, key, a, b))
    values = _feistel(numbers.astype(np.uint64), a, b, key)
    outside = np.flatnonzero(values >= size)
    while len(outside):
        values[outside] = _feistel(values[outside], a[outside], b[outside], key[outside])
        outside = outside[values[outside] >= size[outside]]
    return values.astype(np.int64)


def _feistel(values: _Words, a: _Words, b: _Words, key: _Words) -> _Words:
    right, left = np.divmod(values, a)
    for r in range(_ROUNDS):
        if r % 2:
            right = _rotated(right, b, by=left, key=key ^ _ROUND_KEYS[r])
        else:
            left = _rotated(left, a, by=right, key=key ^ _ROUND_KEYS[r])
    return left + right * a


def _rotated(half: _Words, modulus: _Words, *, by: _Words, key: _Words) -> _Words:
    """Add to `half`, modulo `modulus`, a pseudo-random step that depends on the other half."""
    step = ((_mix(key + by) >> np.uint64(32)) * modulus) >> np.uint64(32)  # 32 random bits scaled to 0 .. modulus - 1
    moved = half + step
    return np.where(moved >= modulus, moved - modulus, moved)


def _mix(words: _Words) -> _Words:
    """The finaliser of splitmix64: every bit of the result depends on every bit of the word."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
