"""Divide the replicas of a pool among the versions that share it."""

from __future__ import annotations

from collections.abc import Mapping

from saccade.fleet.config import Pool

Bounds = tuple[int, int]
"""Fewest and most replicas of a version."""


def divide(total: int, shares: Mapping[str, float]) -> dict[str, int]:
    """Divide a number by shares, with at least 1 for each version (Sainte-Lague's method).

    A larger total takes nothing from any version, so bounds that are divided separately remain in order.
    """
    counts = dict.fromkeys(shares, 1)
    for _ in range(total - len(counts)):
        largest = max(counts, key=lambda name: shares[name] / (counts[name] + 0.5))
        counts[largest] += 1
    return counts


def bounds_of(pool: Pool, shares: Mapping[str, float]) -> dict[str, Bounds]:
    """Bounds of each version by its share of the users. An empty pool is allowed to have no replicas of any."""
    if not shares:
        return {}
    most = divide(pool.max_replicas, shares)
    least = divide(pool.min_replicas, shares) if pool.min_replicas else dict.fromkeys(shares, 0)
    return {name: (least[name], most[name]) for name in shares}
