"""What all models of one server process share: limits, keys, rates, media by URL, observers and metrics."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from saccade.serve.config import ServeConfig
from saccade.serve.keys import KeyRing
from saccade.serve.metrics import ServerMetrics
from saccade.serve.metrics_history import MetricsHistory
from saccade.serve.rate_limit import Consumption, RateLimiter
from saccade.serve.record import Observer, log_request
from saccade.serve.remote_media import RemoteMedia
from saccade.serve.tracing import RequestTracer


@dataclass(kw_only=True)
class Front:
    """One process that accepts requests. Used in the event loop."""

    config: ServeConfig
    """Limits of the server."""
    keys: KeyRing | None = None
    """API keys; None: no key is needed."""
    remote_media: RemoteMedia | None = None
    """Fetches images and videos by URL; None: such requests are refused."""
    has_versions: bool = False
    """Whether models have versions, which are then a label of their metrics."""
    created: int = field(default_factory=lambda: int(time.time()))
    """Unix time of the start."""
    rates: RateLimiter = field(default_factory=RateLimiter)
    """Rate limits of the keys."""
    observers: list[Observer] = field(default_factory=lambda: [log_request])
    """Called with every request that has ended."""
    metrics: ServerMetrics = field(init=False)
    """Counters and histograms of all models."""
    history: MetricsHistory = field(default_factory=MetricsHistory)
    """Metrics of the last half hour."""

    tracer: RequestTracer | None = None
    """Makes spans of requests; None: no collector is configured."""

    def __post_init__(self) -> None:
        self.metrics = ServerMetrics(has_versions=self.has_versions)
        self.observers.append(self.metrics.observe)

    def charge(self, consumption: Mapping[str, Consumption]) -> None:
        """Count against rate limits what other processes counted, by the SHA-256 of the key."""
        if self.keys is not None and consumption:
            self.rates.charge(self.keys.by_sha256(), consumption, time.monotonic())

    async def record_history(self) -> None:
        """Record the metrics until cancelled."""
        await self.history.run(self.metrics.collect)

    async def close(self) -> None:
        """Close connections to other servers."""
        if self.remote_media is not None:
            await self.remote_media.close()
