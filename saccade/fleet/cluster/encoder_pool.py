"""The encoder replicas of one version as one engine replica sees them.

    images that the engine does not have -> would it encode them earlier itself? -> choose (routing.Router) -> encode

The features of an image are asked for by its content key. The engine waits for them as long as it would take itself,
twice: after that, or if an encoder fails, it encodes the image itself. Everything here runs in one event loop.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from saccade.engine.core.encoder_cache import salted
from saccade.engine.media import EncodedImage
from saccade.engine.transport.wire import SentRequest, SentTask, decode_image, encode_task
from saccade.fleet.cluster.messages import unpack
from saccade.fleet.config import VersionConfig
from saccade.fleet.costs import H200_8B, CostModel
from saccade.fleet.replicas import Image, Replica, ReplicaStatistics, RoutedRequest
from saccade.fleet.routing import Router

logger = logging.getLogger(__name__)

_HOP_S = 0.002
"""Seconds that features take to the engine."""
_PATIENCE = 2.0
"""Multiple of the time in which the engine would encode an image itself, for which it waits for the pool."""
_LEAST_PATIENCE_S = 0.1
_TRANSIT_S = 0.05
"""Seconds after which an encoder has a request, which the load that it reports then has."""
_PATCHES_PER_TOKEN = 4


class EncoderCalls(Protocol):
    """Calls to the encoder replicas of one version; `ray_calls.py` makes them through Ray's handle."""

    def encode(self, replica: str, message: bytes, media: Awaitable[bytes]) -> Awaitable[tuple[bytes, bytes]]:
        """Have an image encoded, given the bytes of its media."""

    def wake(self) -> None:
        """Have a replica started, if the pool has none. May be called as often as one likes."""


class EncoderPool:
    """Asks encoder replicas for images."""

    def __init__(
        self, version: VersionConfig, calls: EncoderCalls, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._version, self._calls, self._clock = version, calls, clock
        self._router, self._names = Router(), frozenset[str]()
        self._patch_s = (version.costs or H200_8B).patch_s
        self._ids = itertools.count()
        self._in_progress: dict[bytes, asyncio.Task[EncodedImage]] = {}
        self._sent: dict[str, dict[str, float]] = {}
        """Requests in progress by replica, and when they were sent."""
        self.num_patches = self.num_late_patches = 0
        """Patches of images that the pool has encoded, and of those that it was asked for and did not have in time."""

    def set_replicas(self, names: frozenset[str]) -> None:
        """Follow which replicas run."""
        for name in self._names - names:
            self._router.remove(name)
            del self._sent[name]
        cached = self._version.engine.encoder_cache_tokens * _PATCHES_PER_TOKEN
        for name in names - self._names:
            costs, self._sent[name] = _costs(self._patch_s), {}
            self._router.add(
                Replica(name=name, version=self._version.name, costs=costs, cached_patches=cached, cached_tokens=0)
            )
        self._names = names

    async def encode(
        self, sent: SentRequest, numbers: Sequence[int], media: Sequence[Awaitable[bytes]],
        own_s: Callable[[int], float], traceparent: str | None = None,
    ) -> dict[int, EncodedImage]:  # fmt: skip
        """Images of a request that the pool has encoded in time, by the number of their task.

        `numbers`: tasks whose images the engine does not have. `own_s`: seconds in which the engine would have encoded
        so many patches.
        """
        patches = _patches_of(sent, numbers)
        engine_s = own_s(sum(patches.values()))
        if not numbers or not self._is_worth_it(sum(patches.values()), len(numbers), engine_s):
            return {}
        asked = {number: self._image(sent, number, patches[number], media[number], traceparent) for number in numbers}
        patience_s = max(_LEAST_PATIENCE_S, _PATIENCE * engine_s)
        done, _ = await asyncio.wait(asked.values(), timeout=patience_s)
        found = {number: one.result() for number, one in asked.items() if one in done and one.exception() is None}
        self.num_patches += sum(patches[number] for number in found)
        self.num_late_patches += sum(count for number, count in patches.items() if number not in found)
        return found

    def _is_worth_it(self, num_patches: int, num_images: int, engine_s: float) -> bool:
        """Whether the pool is expected to have the features before the engine would have them."""
        if not self._names:
            self._calls.wake()
            return False
        now = self._clock()
        queued_s = min(self._router.queued_s(name, now) for name in self._names)
        pool_s = queued_s + num_patches * self._patch_s / min(num_images, len(self._names)) + _HOP_S
        return pool_s <= engine_s

    def _image(
        self, sent: SentRequest, number: int, num_patches: int, media: Awaitable[bytes], traceparent: str | None
    ) -> asyncio.Task[EncodedImage]:
        """The task that asks for an image, which requests share."""
        task, salt = sent.tasks[number], sent.request.salt
        key = salted(salt, task.digest)
        asking = self._in_progress.get(key)
        if asking is None:
            message = encode_task(SentTask(task=task, salt=salt, num_patches=num_patches, traceparent=traceparent))
            asking = self._in_progress[key] = asyncio.create_task(self._ask(key, message, num_patches, media))
            asking.add_done_callback(lambda done: self._forget(key, done))
        return asking

    def _forget(self, key: bytes, done: asyncio.Task[EncodedImage]) -> None:
        del self._in_progress[key]
        if not done.cancelled() and (error := done.exception()) is not None:
            logger.warning("an image was not encoded by the pool: %r", error)

    async def _ask(self, key: bytes, message: bytes, num_patches: int, media: Awaitable[bytes]) -> EncodedImage:
        """Choose a replica, and ask it for an image."""
        request = RoutedRequest(
            id=str(next(self._ids)), version=self._version.name, prompt_tokens=0, output_tokens=0,
            images=(Image(key, num_patches, 1),),
        )  # fmt: skip
        choice = self._router.choose(request, self._clock())
        if choice is None:
            raise ConnectionError("no encoder replica is ready")
        sent = self._sent[choice.replica]
        sent[request.id] = self._clock()
        try:
            load, image = await self._calls.encode(choice.replica, message, media)
            self._note_load(choice.replica, load)
            return decode_image(image)
        finally:
            del sent[request.id]
            self._router.finish(request.id)

    def _note_load(self, name: str, message: bytes) -> None:
        """Update what choices know of a replica. Its report is as old as this engine's clock says."""
        _, load = unpack(message)
        self._patch_s = load["patch_s"]
        if name in self._names:
            now, sent = self._clock(), self._sent[name]
            accepted = tuple(request_id for request_id, when in sent.items() if when <= now - _TRANSIT_S)
            statistics = ReplicaStatistics(
                as_of=now, queued_s=load["queued_s"], num_running=0, accepted=accepted, costs=_costs(self._patch_s)
            )
            self._router.update(name, statistics)

    def close(self) -> None:
        """Ask for nothing more."""
        for asking in self._in_progress.values():
            asking.cancel()


def _costs(patch_s: float) -> CostModel:
    """Costs of a replica that does nothing but encode."""
    return CostModel(patch_s=patch_s, token_s=0.0, request_s=0.0, step_s=0.0, step_request_s=0.0, target_step_s=1.0)


def _patches_of(sent: SentRequest, numbers: Sequence[int]) -> dict[int, int]:
    """Patches of each task. Those of videos with several spans are estimated."""
    spans = sent.request.images
    if len(spans) == len(sent.tasks):
        return {number: spans[number].num_patches for number in numbers}
    mean = sum(span.num_patches for span in spans) // max(1, len(sent.tasks))
    return dict.fromkeys(numbers, mean)
