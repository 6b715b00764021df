"""An engine replica whose work takes the time of a cost model: prompts first come first served, decode concurrently."""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass

from saccade.fleet.replicas import PREFIX_BLOCK, Image, Replica, ReplicaStatistics, RoutedRequest
from saccade.fleet.residency import Residency
from saccade.fleet.simulated_encoders import SimulatedEncoders

_REPORTED_KEYS = 256
"""Keys of each kind in a report, at most, as in `ReplicaService`."""


@dataclass
class Progress:
    """A request on an engine."""

    request: RoutedRequest
    arrived: float
    """Time at which it arrived at the fleet."""
    first_token: float = 0.0
    """Time of the first token."""
    end: float = 0.0
    """Time of the last token."""
    resident_images: int = 0
    """Images that were not encoded for this request."""
    pooled: frozenset[bytes] = frozenset()
    """Keys of images that encoder replicas encode."""
    ready_at: float = 0.0
    """Time at which the features of those have arrived."""


class SimulatedEngine:
    """Caches, queue and decode requests of one replica. `advance` moves it to a time, `next_event` at the latest.

    With encoder replicas an engine asks these for images, unless it would have encoded them earlier itself. Prompts
    whose images are on the way let others pass.
    """

    def __init__(self, replica: Replica, encoders: SimulatedEncoders | None = None) -> None:
        self.replica, self.now, self._encoders = replica, 0.0, encoders
        self._images, self._prefixes = Residency(), Residency()
        self._images.add_replica(0, replica.cached_patches)
        self._prefixes.add_replica(0, replica.cached_tokens)
        self._queue: deque[Progress] = deque()
        self._head: Progress | None = None
        self._head_s = 0.0
        self._tokens = 0.0  # that a request which decodes since the beginning would have
        self._decoding: list[tuple[float, int, Progress]] = []
        self._new_images: deque[Image] = deque(maxlen=_REPORTED_KEYS)
        self._new_prefixes: deque[bytes] = deque(maxlen=_REPORTED_KEYS)
        self._accepted: list[str] = []
        self._count = 0
        self.request_seconds = 0.0
        """Requests in progress, integrated over time."""

    @property
    def num_running(self) -> int:
        """Requests in progress."""
        return len(self._queue) + (self._head is not None) + len(self._decoding)

    def accept(self, progress: Progress) -> None:
        """Queue a request at the present time."""
        if self._encoders is not None:
            self._ask(progress, self._encoders)
        self._accepted.append(progress.request.id)
        self._new_images.extend(progress.request.images)
        self._new_prefixes.extend(reversed(progress.request.prefix))
        self._queue.append(progress)
        if self._head is None:
            self._begin()

    def next_event(self) -> float:
        """Time at which a prompt is computed or an answer ends, if nothing else happens; infinity: never."""
        times = [float("inf")]
        if self._head is not None:
            times.append(self.now + self._head_s / self._prompt_rate())
        elif self._queue:
            times.append(min(progress.ready_at for progress in self._queue))
        if self._decoding:
            times.append(self.now + max(0.0, self._decoding[0][0] - self._tokens) * self._token_s())
        return min(times)

    def advance(self, now: float) -> list[Progress]:
        """Work until `now`. Returns the requests that have their first token or their last since then."""
        elapsed = now - self.now
        self.request_seconds += elapsed * self.num_running
        if self._head is not None:
            self._head_s -= elapsed * self._prompt_rate()
        if self._decoding:
            self._tokens += elapsed / self._token_s()
        self.now = now
        replies = []
        while self._decoding and self._decoding[0][0] <= self._tokens + 1e-6:
            replies.append(heapq.heappop(self._decoding)[2])
            replies[-1].end = now
        if self._head is not None and self._head_s <= 1e-9:
            replies.append(self._head)
            self._start_decode(self._head)
            self._head = None
        if self._head is None:
            self._begin()
        return replies

    @property
    def queued_s(self) -> float:
        """Seconds of prompt and encoder work that is accepted and not done."""
        work = sum(self._work_s(progress) for progress in self._queue) + (0.0 if self._head is None else self._head_s)
        return work / self._prompt_rate()

    def statistics(self) -> ReplicaStatistics:
        """A report of the load, and of what was accepted since the last report."""
        made = ReplicaStatistics(
            as_of=self.now, queued_s=self.queued_s, num_running=self.num_running, accepted=tuple(self._accepted),
            images=tuple(self._new_images), prefixes=tuple(self._new_prefixes),
        )  # fmt: skip
        for news in (self._accepted, self._new_images, self._new_prefixes):
            news.clear()
        return made

    def _prompt_rate(self) -> float:
        return self.replica.costs.prompt_share(len(self._decoding))

    def _token_s(self) -> float:
        """Seconds per token of each request that decodes."""
        costs, running = self.replica.costs, len(self._decoding)
        return costs.mixed_step_s(running) if self._head is not None else costs.decode_step_s(running)

    def _missing_images(self, request: RoutedRequest, cached_tokens: int) -> list[Image]:
        images = (image for image in request.images if (image.last_block + 1) * PREFIX_BLOCK > cached_tokens)
        return [image for image in images if not self._images.has(0, image.key)]

    def _cached_tokens(self, request: RoutedRequest) -> int:
        depth = 0
        while depth < len(request.prefix) and self._prefixes.has(0, request.prefix[depth]):
            depth += 1
        return depth * PREFIX_BLOCK

    def _work_s(self, progress: Progress) -> float:
        request = progress.request
        cached = self._cached_tokens(request)
        missing = self._missing_images(request, cached)
        patches = sum(image.patches for image in missing if image.key not in progress.pooled)
        return self.replica.costs.work_s(patches, request.prompt_tokens - cached)

    def _ask(self, progress: Progress, encoders: SimulatedEncoders) -> None:
        """Ask encoder replicas for the images of a request, unless this engine would have encoded them earlier."""
        missing = self._missing_images(progress.request, self._cached_tokens(progress.request))
        own_s = sum(image.patches for image in missing) * self.replica.costs.patch_s / self._prompt_rate()
        if missing and encoders.ready_at(missing, self.now) <= self.now + self.queued_s + own_s:
            progress.ready_at = encoders.encode(missing, self.now)
            progress.pooled = frozenset(image.key for image in missing)

    def _begin(self) -> None:
        """Begin the first prompt of the queue that does not wait for features, if there is one."""
        ready = next((index for index, one in enumerate(self._queue) if one.ready_at <= self.now), None)
        if ready is None:
            return
        progress = self._head = self._queue[ready]
        del self._queue[ready]
        request = progress.request
        self._head_s = self._work_s(progress)
        cached = self._cached_tokens(request)
        missing = self._missing_images(request, cached)
        progress.resident_images = len(request.images) - len(missing)
        for image in request.images:
            if (image.last_block + 1) * PREFIX_BLOCK > cached:
                self._images.touch(0, image.key, image.patches)
        self._prefixes.touch_all(0, request.prefix[::-1], PREFIX_BLOCK)

    def _start_decode(self, progress: Progress) -> None:
        progress.first_token = self.now
        self._count += 1
        heapq.heappush(self._decoding, (self._tokens + progress.request.output_tokens - 1, self._count, progress))
