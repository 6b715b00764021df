"""What routing knows of replicas and requests: plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from saccade.fleet.costs import CostModel

PREFIX_BLOCK = 256
"""Tokens of a prompt per key in `RoutedRequest.prefix`."""

REPORT_S = 0.1
"""Seconds between two reports of a replica."""
LEAST_REPORT_S = 0.01
"""Seconds between two reports at least, where requests come: what fronts know of each other's requests is so old."""

ReplicaState = Literal["ready", "draining", "unhealthy"]


class Image(NamedTuple):
    """An image of a request."""

    key: bytes
    """Hash of its content."""
    patches: int
    """Patches that the encoder computes."""
    end: int
    """Prompt tokens up to the end of the image. It is not encoded where pages of so many tokens are cached."""

    @property
    def last_block(self) -> int:
        """Number of the prefix block that has the image's last token."""
        return -(-self.end // PREFIX_BLOCK) - 1


@dataclass(frozen=True, kw_only=True)
class RoutedRequest:
    """What routing needs to know of a request."""

    id: str
    """Id of the request, unique among those in progress."""
    version: str
    """Version of the model that answers."""
    prompt_tokens: int
    """Tokens of the prompt, with those of images."""
    output_tokens: int
    """Tokens that the answer is expected to have."""
    images: tuple[Image, ...] = ()
    """Images of the request."""
    prefix: tuple[bytes, ...] = ()
    """Hashes of the first 1, 2, 3, ... blocks of `PREFIX_BLOCK` tokens, images included by content."""
    adapter: str | None = None
    """Adapter that answers. Only replicas that have it are chosen."""


@dataclass(frozen=True, kw_only=True)
class Replica:
    """A replica and the sizes of its caches."""

    name: str
    """Name, the same for every front."""
    version: str
    """Version of the model that it runs."""
    costs: CostModel
    """Its measured coefficients."""
    cached_patches: int
    """Patches of images that its encoder cache has room for."""
    cached_tokens: int
    """Tokens of prefixes that its KV cache has room for."""
    adapters: frozenset[str] = frozenset()
    """Adapters that it has loaded."""


@dataclass(frozen=True, kw_only=True)
class ReplicaStatistics:
    """What a replica reports now and then."""

    as_of: float
    """Time of the report."""
    state: ReplicaState = "ready"
    """Only ready replicas get requests."""
    queued_s: float
    """Seconds of encoder and prompt work that it has accepted and not done."""
    num_running: int
    """Requests that it has accepted and not ended."""
    accepted: tuple[str, ...] = ()
    """Ids of the requests that it has accepted since the last report, which its load has."""
    images: tuple[Image, ...] = ()
    """Images it made resident since the last report, least recently used first; at most a few dozen."""
    prefixes: tuple[bytes, ...] = ()
    """Prefix blocks, likewise."""
    costs: CostModel | None = None
    """Its coefficients as measured by now. None: as before."""
    pooled_patches: int = 0
    """Patches of images whose features it got from encoder replicas since its start."""
    late_patches: int = 0
    """Patches of images for which it asked encoder replicas, and had to encode itself."""
