"""Encoder replicas in simulated time: they encode images for all engines, and features travel by content key."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from saccade.fleet.costs import CostModel
from saccade.fleet.replicas import Image

_PATCHES_PER_TOKEN = 4
_TOKEN_BYTES = 8192
"""Features of an image token: 4,096 numbers in bf16."""
_BYTES_PER_S, _HOP_S = 10e9, 1e-3
"""Rate at which features travel to an engine, and the time of the first byte."""


class SimulatedEncoders:
    """A pool of encoder replicas with one queue: the replica that is free first takes the next image."""

    def __init__(self, count: int, costs: CostModel, cached_patches: int) -> None:
        """`cached_patches`: images whose features each replica keeps, in patches."""
        self._patch_s, self._capacity = costs.patch_s, count * cached_patches
        self._free_at = [0.0] * count
        self._encoded_at: OrderedDict[bytes, float] = OrderedDict()  # of features that are kept, oldest first
        self._patches: dict[bytes, int] = {}
        self._kept = 0
        self.busy_s = 0.0
        """Seconds of all replicas that encoded."""

    def ready_at(self, images: Sequence[Image], now: float) -> float:
        """Time at which an engine would have the features of images that it asks for now."""
        return self._plan(images, now, list(self._free_at), {})

    def encode(self, images: Sequence[Image], now: float) -> float:
        """Encode images that are not kept or under way. Returns the time at which the engine has the features."""
        encoded_at: dict[bytes, float] = {}
        ready = self._plan(images, now, self._free_at, encoded_at)
        for image in images:
            if image.key in encoded_at:
                self._keep(image, encoded_at[image.key])
            else:
                self._encoded_at.move_to_end(image.key)
        while self._kept > self._capacity:
            key, _ = self._encoded_at.popitem(last=False)
            self._kept -= self._patches.pop(key)
        return ready

    def _plan(self, images: Sequence[Image], now: float, free_at: list[float], encoded_at: dict[bytes, float]) -> float:
        """Add images to the queues `free_at`, and the times of new ones to `encoded_at`."""
        latest = now
        for image in images:
            end = self._encoded_at.get(image.key) or encoded_at.get(image.key)
            if end is None:
                first = min(range(len(free_at)), key=free_at.__getitem__)
                end = free_at[first] = encoded_at[image.key] = max(now, free_at[first]) + image.patches * self._patch_s
            latest = max(latest, end)
        num_tokens = sum(image.patches for image in images) / _PATCHES_PER_TOKEN
        return latest + _HOP_S + num_tokens * _TOKEN_BYTES / _BYTES_PER_S

    def _keep(self, image: Image, encoded_at: float) -> None:
        self._encoded_at[image.key], self._patches[image.key] = encoded_at, image.patches
        self._kept += image.patches
        self.busy_s += image.patches * self._patch_s
