"""Finding copies among many: candidates by shared band keys, certainty by a second look, one leader per group.

    items, best first  ->  pairs that share a band  ->  pairs that pass the check  ->  leader of each item

Items are numbered by quality, 0 the best, so that in every pair the smaller number is the one to keep. An item joins the best
leader it was compared with: groups are stars, not chains, and whatever is dropped looks like what is kept.

Cost: one sort of the keys per band and round. A bucket of `size` items makes at most `size * MAX_COMPARED` pairs, for each item is
compared with the best `MAX_COMPARED` of its bucket only: a million blank pages cost a million times 32, not a million squared. What
found no leader goes into another round with the others that found none (the blank pages of another colour). What is lost is a
pair whose better half ranks below 32 others, not copies of each other, in every bucket the two share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]
Pairs = tuple[Numbers, Numbers]
"""The better and the worse item of each pair."""

MAX_COMPARED = 32
"""Items of a bucket that every other one is compared with."""
_MAX_ROUNDS = 8
_CHUNK = 2**20


def candidate_pairs(bands: Iterable[NDArray[np.uint32]]) -> Iterator[Pairs]:
    """Pairs that share a key in one of the bands (arrays of one key per item), a bounded number at a time, with repeats."""
    for keys in bands:
        order = np.argsort(keys, kind="stable")  # stable: within a bucket the best comes first
        is_first = np.diff(keys[order], prepend=~keys[order[:1]]) != 0
        begins = np.flatnonzero(is_first)
        place = np.arange(len(order)) - np.repeat(begins, np.diff(np.append(begins, len(order))))
        rest = np.arange(len(order))
        for number in range(MAX_COMPARED):
            rest = rest[place[rest] > number]
            for begin in range(0, len(rest), _CHUNK):
                worse = rest[begin : begin + _CHUNK]
                yield order[worse - place[worse] + number], order[worse]


def verified_pairs(
    num_items: int, candidates: Iterable[Pairs], check: Callable[[Numbers, Numbers], NDArray[np.bool_]]
) -> Pairs:
    """The pairs that pass the check, each once, ordered by the better item."""
    found = [np.zeros(0, np.int64)]
    for better, worse in candidates:
        passed = check(better, worse)
        found.append(better[passed] * num_items + worse[passed])
    return np.divmod(np.unique(np.concatenate(found)), max(1, num_items))


def leaders(num_items: int, pairs: Pairs, is_copy: Callable[[int, int], bool] | None = None) -> Numbers:
    """[items]: the leader each belongs to, itself where it leads. `pairs` are ordered by the better item.

    `is_copy` is asked of the better and the worse item of a pair, only where the answer matters.
    """
    leader = np.arange(num_items)
    for better, worse in zip(*(side.tolist() for side in pairs), strict=True):
        if leader[better] == better and leader[worse] == worse and (is_copy is None or is_copy(better, worse)):
            leader[worse] = better
    return leader


def settle(num_items: int, find_leaders: Callable[[Numbers], Numbers]) -> Numbers:
    """[items]: the leader of each, by rounds among those that still lead, until a round changes nothing.

    `find_leaders` takes the items of a round and returns for each the place of its leader among them.
    """
    leader = np.arange(num_items)
    for _ in range(_MAX_ROUNDS):
        leading = np.flatnonzero(leader == np.arange(num_items))
        found = find_leaders(leading)
        if (found == np.arange(len(leading))).all():
            break
        leader[leading] = leading[found]
        leader = leader[leader]  # who followed one that now follows another goes along
    return leader


def first_of_equals(*keys: NDArray[np.uint64]) -> Numbers:
    """[items]: the first item that has the same keys, itself where it is the first."""
    order = np.lexsort(keys[::-1])
    is_first = np.zeros(len(order), bool)
    for key in keys:
        is_first |= np.diff(key[order], prepend=~key[order[:1]]) != 0
    firsts = order[np.flatnonzero(is_first)]
    found = np.empty(len(order), np.int64)
    found[order] = np.repeat(firsts, np.diff(np.append(np.flatnonzero(is_first), len(order))))
    return found
