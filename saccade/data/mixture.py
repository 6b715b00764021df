"""Which source each draw of a mixed stream comes from: exact proportions at every prefix, any draw looked up without history.

After n draws, each source has been drawn less than one draw more or less than n * weight / sum(weights), for every n and any weights;
and after sum(weights) draws exactly its weight, so that weights that are numbers of samples make epochs that visit each sample once.

How: let w be a source's share. Its draw t has a window, from draw floor(t / w) of the stream to before draw ceil((t + 1) / w);
within one draw of the share means every draw in its window. Taking the open window that ends first keeps to all of them, as no more
than sum(floor(y w) - ceil(x w)) <= y - x windows lie between x and y.

That rule goes step by step. To look up any draw, the stream is cut into blocks that are longer than a window, and the counts at a
cut are found from the windows around it. Rare sources have long windows, so they form a group of their own with fewer draws:
together they get floor(n w) draws, the common sources ceil(n w). Either group then has room for the windows of its sources, since
floor(a + b) <= floor(a) + ceil(b) <= ceil(a + b).
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from heapq import heappop, heappush
from math import lcm

import numpy as np

from saccade.data.order import Ints
from saccade.errors import ConfigError

MAX_TOTAL = 1 << 40
"""Weights whose integers sum to no more are exact; others are rounded to one part in 2^40."""

MAX_DRAWS = 1 << 21
"""Most draws of one call: products of offsets and weights stay within 64 bits."""

_LEAST_BLOCK = 1024
"""Draws of a block whose windows are short. Looking up a block costs about 2 us for each of its draws."""


class Mixture:
    """A sequence of draws from sources with the given weights: integers, or decimals such as 0.3 (taken as 3/10)."""

    def __init__(self, weights: Sequence[int | float]) -> None:
        self.weights = _integers(weights)
        """In proportion to the weights given; after sum(weights) draws each source has had exactly this many."""
        common, rare = _groups(self.weights)
        self._common = _Group(common, self.weights, rounds_up=True)
        self._rare = _Group(rare, self.weights, rounds_up=False)

    def counts(self, n: int) -> list[int]:
        """Draws of each source among the first n."""
        counts = self._common.counts(n) | self._rare.counts(n)
        return [counts[source] for source in range(len(self.weights))]

    def draws(self, begin: int, end: int) -> tuple[Ints, Ints]:
        """Source of each of the draws begin .. end - 1, and its number among that source's draws."""
        assert 0 <= begin <= end <= begin + MAX_DRAWS, f"draws {begin} to {end}: at most {MAX_DRAWS} at a time"
        sources, numbers = np.empty((2, end - begin), np.int64)
        counts = self.counts(begin)
        is_rare = np.diff(self._rare.own(begin + np.arange(end - begin + 1))) == 1
        sources[is_rare] = self._rare.sources(begin, end)
        sources[~is_rare] = self._common.sources(begin, end)
        for source, count in enumerate(counts):
            places = np.flatnonzero(sources == source)
            numbers[places] = count + np.arange(len(places))
        return sources, numbers


class _Group:
    """Sources that share a fixed part of the draws. These are numbered anew: the group's own draws, in which windows are meant."""

    def __init__(self, sources: list[int], weights: list[int], *, rounds_up: bool) -> None:
        self._weights = {source: weights[source] for source in sources}
        self._weight, self._whole = sum(self._weights.values()), sum(weights)
        self._rounds_up = rounds_up
        longest_window = self._weight // min(self._weights.values(), default=1) + 4
        self._block_length = max(_LEAST_BLOCK, 1 << longest_window.bit_length())
        self._recent: dict[int, tuple[dict[int, int], Ints]] = {}

    def own(self, draws: Ints) -> Ints:
        """How many of the group's own draws come before these ascending draws of the stream."""
        first = int(draws[0])
        if self._rounds_up:
            return -_floor(-first, first - draws, self._weight, self._whole)
        return _floor(first, draws - first, self._weight, self._whole)

    def counts(self, n: int) -> dict[int, int]:
        """Draws of each source among the first n of the stream."""
        if not self._weights:
            return {}
        block, rest = divmod(int(self.own(np.array([n]))[0]), self._block_length)
        before, sources = self._block(block)
        return {source: count + int((sources[:rest] == source).sum()) for source, count in before.items()}

    def sources(self, begin: int, end: int) -> Ints:
        """The sources of the own draws among draws begin .. end - 1 of the stream."""
        first, last = self.own(np.array([begin, end])).tolist()
        blocks = range(first // self._block_length, -(-last // self._block_length))
        sources = np.concatenate([np.empty(0, np.int64), *(self._block(block)[1] for block in blocks)])
        offset = blocks.start * self._block_length
        return sources[first - offset : last - offset]

    def _block(self, number: int) -> tuple[dict[int, int], Ints]:
        """The counts before a block of own draws, and the sources of its draws: of the open windows, the one that ends first."""
        if number in self._recent:
            return self._recent[number]
        begin, end = number * self._block_length, (number + 1) * self._block_length
        before, after = self._counts_at(begin), self._counts_at(end)
        windows = []
        for source in self._weights:
            opens, closes = self._windows(source, before[source], after[source])
            windows += [(start, stop, source) for start, stop in zip(opens.tolist(), closes.tolist(), strict=True)]
        windows.sort(reverse=True)
        is_open: list[tuple[int, int]] = []
        sources = []
        for draw in range(begin, end):
            while windows and windows[-1][0] <= draw:
                heappush(is_open, windows.pop()[1:])
            closes_at, source = heappop(is_open)
            assert closes_at > draw, f"draw {draw} of a mixture missed its window"
            sources.append(source)
        if len(self._recent) > 1:
            del self._recent[min(self._recent)]
        self._recent[number] = before, np.array(sources)
        return self._recent[number]

    def _counts_at(self, cut: int) -> dict[int, int]:
        """The counts after `cut` own draws, a multiple of the block's length.

        Draws whose windows close by then are counted. Of those whose windows run across the cut, as many more as are missing: the
        ones that close first, unless the draws since their windows opened are taken (the last d before the cut have room for d).
        No other choice leaves fewer early windows to the block after, so that both blocks can keep to all of them.
        """
        least, greatest = self._draws_at(cut)
        counts = {source: greatest * weight // self._whole for source, weight in self._weights.items()}
        block, _ = self._draws_at(max(0, cut - self._block_length))
        ages = [cut - self._windows(s, -(-block * w // self._whole), counts[s])[0] for s, w in self._weights.items()]
        room = np.arange(self._block_length + 1)
        room -= np.cumsum(np.bincount(np.concatenate(ages), minlength=len(room)))
        across = []
        for source, weight in self._weights.items():
            if -(-least * weight // self._whole) > counts[source]:
                opens, closes = self._windows(source, counts[source], counts[source] + 1)
                across.append((int(closes[0]), source, cut - int(opens[0])))
        for _, source, age in sorted(across):
            if sum(counts.values()) < cut and (room[age:] > 0).all():
                room[age:] -= 1
                counts[source] += 1
        assert sum(counts.values()) == cut, f"{counts} draws of a mixture at {cut}"
        return counts

    def _windows(self, source: int, begin: int, end: int) -> tuple[Ints, Ints]:
        """Where the windows of draws begin .. end - 1 of a source open and close, in own draws."""
        weight, steps = self._weights[source], np.arange(end - begin)
        if end <= begin:
            return steps, steps
        opens = _floor(begin, steps, self._whole, weight)
        closes = -_floor(-begin - 1, -steps, self._whole, weight)
        return self.own(opens), self.own(closes)

    def _draws_at(self, own: int) -> tuple[int, int]:
        """The least and the greatest number of draws of the stream of which `own` are the group's."""
        if self._rounds_up:
            return max(0, (own - 1) * self._whole // self._weight + 1), own * self._whole // self._weight
        return -(-own * self._whole // self._weight), -(-(own + 1) * self._whole // self._weight) - 1


def _floor(start: int, steps: Ints, numerator: int, denominator: int) -> Ints:
    """(start + steps) * numerator / denominator rounded down, exact where only the steps' products fit 64 bits."""
    whole, rest = divmod(start * numerator, denominator)
    return whole + (rest + steps * numerator) // denominator


def _groups(weights: list[int]) -> tuple[list[int], list[int]]:
    """Common and rare sources, so divided that the longest window of either is short."""

    def longest(sources: list[int]) -> float:
        return sum(weights[source] for source in sources) / min((weights[source] for source in sources), default=1)

    order = sorted(range(len(weights)), key=lambda source: (-weights[source], source))
    splits = [(order[:size], order[size:]) for size in range(1, len(order) + 1)]
    return min(splits, key=lambda split: max(longest(split[0]), longest(split[1])))


def _integers(weights: Sequence[int | float]) -> list[int]:
    """Integers in proportion to the weights: exactly where their sum stays below `MAX_TOTAL`."""
    if not weights:
        raise ConfigError("a mixture of no sources; give at least one")
    for number, weight in enumerate(weights):
        if not 0 < weight < float("inf"):
            raise ConfigError(
                f"source {number} has weight {weight}; weights are positive, leave the source out instead"
            )
    exact = [Fraction(str(weight)) for weight in weights]  # 0.1 as it was written, not the binary number next to it
    scale = Fraction(lcm(*(weight.denominator for weight in exact)))
    scale = min(scale, Fraction(MAX_TOTAL) / sum(exact))
    return [max(1, round(weight * scale)) for weight in exact]
