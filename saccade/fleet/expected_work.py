"""Work that a replica has accepted and not done, expected from what its caches probably have.

A replica counts what it reports to fronts as fronts count their reservations (`routing.py`): images and prefix blocks
that earlier requests brought cost nothing.
"""

from __future__ import annotations

from typing import NamedTuple

from saccade.fleet.costs import CostModel
from saccade.fleet.replicas import PREFIX_BLOCK, Replica, RoutedRequest
from saccade.fleet.residency import Residency


class Work(NamedTuple):
    """What a request computes before its first token."""

    patches: float
    """Patches that the engine encodes."""
    tokens: int
    """Prompt tokens that are not cached."""


class ExpectedWork:
    """Requests without output. `end` may be called from another thread than the rest."""

    def __init__(self, replica: Replica) -> None:
        """Begin with empty caches of the replica's sizes."""
        self._images, self._prefixes = Residency(), Residency()
        self._images.add_replica(0, replica.cached_patches)
        self._prefixes.add_replica(0, replica.cached_tokens)
        self._waiting: dict[str, Work] = {}
        self._since = 0.0
        """When the engine began with the first of them, if it computes prompts one after the other."""

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, request: RoutedRequest, now: float, *, encoded_share: float = 1.0) -> Work:
        """Count a request; `encoded_share` of its images are encoded here, unless they are resident."""
        depth = 0
        while depth < len(request.prefix) and self._prefixes.has(0, request.prefix[depth]):
            depth += 1
        missing = [image for image in request.images if image.last_block >= depth]
        patches = sum(image.patches for image in missing if not self._images.has(0, image.key))
        for image in missing:
            self._images.touch(0, image.key, image.patches)
        self._prefixes.touch_all(0, request.prefix[::-1], PREFIX_BLOCK)  # the longest is the first to be forgotten
        if not self._waiting:
            self._since = now
        work = self._waiting[request.id] = Work(encoded_share * patches, request.prompt_tokens - depth * PREFIX_BLOCK)
        return work

    def end(self, request_id: str, now: float) -> None:
        """Note that a request has output or has ended. Unknown ids have no effect."""
        if self._waiting.pop(request_id, None) is not None:
            self._since = now

    def queued_s(self, costs: CostModel, num_decoding: int, now: float) -> float:
        """Seconds until all of them are computed, while so many other requests decode."""
        share = costs.prompt_share(num_decoding)
        times = [costs.request_s + costs.patch_s * patches + costs.token_s * tokens
                 for patches, tokens in list(self._waiting.values())]  # fmt: skip
        if not times:
            return 0.0
        return sum(times) / share - min(times[0] / share, max(0.0, now - self._since))
