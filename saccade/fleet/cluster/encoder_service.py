"""One encoder replica without Ray: what engine replicas call.

    engine replica -> encode(task, media) -> EncoderHost -> features, kept by content key

An image that several engines ask for is encoded once. A reply has the load of the replica, by which engines choose one
for the next image.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable

from saccade.engine.core.encoder_cache import salted
from saccade.engine.encoder_host import EncoderHost
from saccade.engine.transport.wire import SentTask, decode_task, encode_image
from saccade.fleet.cluster.messages import pack
from saccade.fleet.cluster.replica_tracing import ReplicaTracer
from saccade.fleet.config import VersionConfig
from saccade.fleet.costs import H200_8B

_WEIGHT = 0.05
"""Weight of the newest image in the mean time of an image."""


class EncoderService:
    """Encodes images for engine replicas. Everything runs in one event loop."""

    def __init__(self, version: VersionConfig, host: EncoderHost, tracer: ReplicaTracer | None = None) -> None:
        self._version, self._host, self._tracer = version, host, tracer
        engine = version.engine
        self._max_tokens = engine.encoder_cache_tokens if engine.encoder_cache else 0
        self._kept: OrderedDict[bytes, tuple[bytes, int]] = OrderedDict()
        """Encoded images as messages and their tokens, by salted digest; the least recently used is first."""
        self._num_kept = 0
        self._in_progress: dict[bytes, asyncio.Task[bytes]] = {}
        self._queued_patches = self._num_open = 0
        self._arrived_s = self._request_s = 0.0

    async def encode(self, message: bytes, media: Awaitable[bytes]) -> tuple[bytes, bytes]:
        """The load of this replica, and an encoded image as a message. The media are read only if it is not kept.

        Raises ImageError if it cannot be encoded.
        """
        sent, begun = decode_task(message), time.monotonic()
        key = salted(sent.salt, sent.task.digest)
        is_kept = key in self._kept
        span = None if self._tracer is None else self._tracer.begin("encode", sent.traceparent)
        self._num_open += 1
        try:
            image = await self._image(key, sent, media)
        finally:
            self._num_open -= 1
            elapsed_s = time.monotonic() - begun
            self._request_s += (elapsed_s - self._request_s) * (_WEIGHT if self._request_s else 1.0)
            if span is not None:
                span.end({"saccade.patches": sent.num_patches, "saccade.is_kept": is_kept})
        return pack("encoder", {"queued_s": self.queued_s, "patch_s": self.patch_s}), image

    async def _image(self, key: bytes, sent: SentTask, media: Awaitable[bytes]) -> bytes:
        """An image that is kept, being encoded, or encoded now."""
        if (kept := self._kept.get(key)) is not None:
            self._kept.move_to_end(key)
            return kept[0]
        if key not in self._in_progress:
            self._in_progress[key] = asyncio.create_task(self._encode(key, sent, media))
        return await asyncio.shield(self._in_progress[key])

    async def _encode(self, key: bytes, sent: SentTask, media: Awaitable[bytes]) -> bytes:
        self._queued_patches += sent.num_patches
        self._arrived_s += sent.num_patches * self.patch_s
        try:
            data = await media
            encoding = await asyncio.to_thread(self._host.encode, sent.task, data)  # it may wait
            encoded = await asyncio.wrap_future(encoding)
        finally:
            self._queued_patches -= sent.num_patches
            del self._in_progress[key]
        image = encode_image(encoded)
        self._keep(key, image, len(encoded.features))
        return image

    def _keep(self, key: bytes, image: bytes, num_tokens: int) -> None:
        if num_tokens > self._max_tokens:
            return
        self._kept[key] = image, num_tokens
        self._num_kept += num_tokens
        while self._num_kept > self._max_tokens:
            self._num_kept -= self._kept.popitem(last=False)[1][1]

    # ------------------------------------------------------------------ the replica

    @property
    def patch_s(self) -> float:
        """Seconds per patch: those that the file states, else the measured ones, else those of an 8B model."""
        if self._version.costs is not None:
            return self._version.costs.patch_s
        return self._host.patch_s or H200_8B.patch_s

    @property
    def queued_s(self) -> float:
        """Seconds of work that is accepted and not done."""
        return self._queued_patches * self.patch_s

    @property
    def has_failed(self) -> bool:
        """Whether the encoder has stopped."""
        return self._host.has_failed

    def scaling_load(self) -> dict[str, float]:
        """Load of this replica for the scaling of its pool, as `saccade.fleet.scaling` counts it."""
        return {
            "arrived_s": self._arrived_s,
            "waiting_s": self.queued_s,
            "num_running": float(self._num_open),
            "slots": 1.0,
            "request_s": self._request_s,
        }

    def close(self) -> None:
        """Stop the encoder."""
        self._host.close()
