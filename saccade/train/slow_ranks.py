"""Names ranks that hold up all others: a slow processor, or data that arrives late.

All ranks wait for the slowest one in every step, so the time of a step does not tell which one it is. Each logged step
every rank times a fixed matrix product of its own, and reports it with the share of time that it waited for data.
"""

from __future__ import annotations

import logging
import socket
import statistics
import time
from collections.abc import Sequence

import torch

from saccade.world import World

logger = logging.getLogger(__name__)

SLOW_PRODUCT = 1.3
"""A rank whose product takes this many times the median is slow."""
LATE_DATA = 0.1
"""A rank that waits for data this share of the time longer than the median is late."""
NUM_IN_SUCCESSION = 3
"""Reports in succession after which a rank is named: a single one may be chance."""


class SlowRanks:
    """Compares the ranks of a run."""

    def __init__(self, world: World) -> None:
        """Collective over all ranks."""
        self._world, self._is_cuda = world, world.device.type == "cuda"
        self._hosts = world.gather(socket.gethostname())
        self._counts: dict[tuple[str, int], int] = {}
        self._seconds = self._waited_s = 0.0

    def add(self, seconds: float, data_wait_s: float) -> None:
        """Count a step of this rank."""
        self._seconds += seconds
        self._waited_s += data_wait_s

    def report(self) -> None:
        """Compare the ranks since the last report and log those that are slow. Collective over all ranks."""
        if self._world.dims.size == 1:
            return
        found = torch.zeros(self._world.dims.size, 2, dtype=torch.float64, device=self._world.device)
        found[self._world.rank, 0] = self._time_product()
        found[self._world.rank, 1] = self._waited_s / max(self._seconds, 1e-9)
        self._seconds = self._waited_s = 0.0
        products, waits = self._world.all_sum(found).T.tolist()
        self._name("product", slow_products(products), "%s is slow: a product takes %.2f times the median of all ranks")
        self._name("data", late_data(waits), "%s holds up the others: it waits for data %.0f%% of the time")

    def _time_product(self) -> float:
        """Best of three times of a matrix product, in seconds."""
        size, dtype = (4096, torch.bfloat16) if self._is_cuda else (192, torch.float32)
        matrix, times = torch.ones(size, size, device=self._world.device, dtype=dtype), []
        for _ in range(3):
            self._synchronize()
            start = time.perf_counter()
            torch.mm(matrix, matrix)
            self._synchronize()
            times.append(time.perf_counter() - start)
        return min(times)

    def _synchronize(self) -> None:
        if self._is_cuda:
            torch.cuda.synchronize(self._world.device)

    def _name(self, kind: str, found: dict[int, float], message: str) -> None:
        """Log a rank once it was slow several times in succession, and again if it becomes so again."""
        self._counts = {key: count for key, count in self._counts.items() if key[0] != kind or key[1] in found}
        for rank, amount in found.items():
            count = self._counts[kind, rank] = self._counts.get((kind, rank), 0) + 1
            if count == NUM_IN_SUCCESSION and self._world.is_main:
                logger.warning(message, f"rank {rank} on host {self._hosts[rank]}", amount)


def slow_products(seconds: Sequence[float]) -> dict[int, float]:
    """Ranks whose product is slow, with its time in medians."""
    median = statistics.median_low(seconds)
    return {rank: one / median for rank, one in enumerate(seconds) if one > SLOW_PRODUCT * median}


def late_data(shares: Sequence[float]) -> dict[int, float]:
    """Ranks that wait for data much longer than others, with the share of their time in percent."""
    median = statistics.median_low(shares)
    return {rank: 100.0 * share for rank, share in enumerate(shares) if share > median + LATE_DATA}
