"""Divide the replicas of a pool among the versions that share it."""

from __future__ import annotations

import math
from collections.abc import Mapping

from saccade.fleet.config import ModelConfig, Pool

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


def encoder_bounds(model: ModelConfig, engines: Bounds) -> Bounds | None:
    """Bounds of a version's encoder replicas, given those of its engines. None: the model has no encoders.

    A version has its part of the pool, and at least one replica at most.
    """
    pool = model.encoders
    if pool is None:
        return None
    share = engines[1] / model.engines.max_replicas
    return math.ceil(pool.min_replicas * share), max(1, math.ceil(pool.max_replicas * share))
