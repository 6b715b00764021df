"""Calls of a front to the engine replicas of one version, through a handle of Ray Serve."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Sequence
from typing import Any

import ray
from ray import serve

from saccade.engine.core.messages import AddRequest
from saccade.engine.prompt import TokenPrompt
from saccade.engine.transport.wire import media_of
from saccade.fleet.cluster.names import ENGINE
from saccade.fleet.cluster.replica_set import ShareMedia


class RayCalls:
    """Implements `replica_link.Calls`. Ray sends a call to the replica that its argument names (`ray_router.py`)."""

    def __init__(self, front: str, app: str) -> None:
        """`front`: id of the front's process. `app`: the application of the version's engines."""
        self._front = front
        self._handle = serve.get_deployment_handle(ENGINE, app, _check_exists=False)  # it may be deployed in a moment
        self._streams = self._handle.options(stream=True)
        self._waking: asyncio.Future[Any] | None = None

    def channel(self, replica: str) -> Any:
        """Open the channel of a replica: an asynchronous iterator of messages, which can be cancelled."""
        return self._streams.channel.remote(self._front, replica=replica)

    async def submit(self, replica: str, message: bytes, media: Sequence[Any]) -> None:
        """Send a request with references to the bytes of its media."""
        await self._handle.submit.remote(self._front, message, list(media), replica=replica)

    async def cancel(self, replica: str, request_ids: Sequence[str]) -> None:
        """Cancel requests."""
        await self._handle.cancel.remote(self._front, list(request_ids), replica=replica)

    async def heartbeat(self, replica: str) -> None:
        """Say that this front is alive."""
        await self._handle.heartbeat.remote(self._front, replica=replica)

    def wake(self) -> None:
        """Have a replica started, if the pool has none: a call that waits at the handle counts as demand."""
        if self._waking is None or self._waking.done():
            self._waking = asyncio.ensure_future(self._call_any())

    async def _call_any(self) -> None:
        await self._handle.heartbeat.remote(self._front, replica=None)

    def close(self) -> None:
        """Stop waiting for a replica."""
        if self._waking is not None:
            self._waking.cancel()


class RayEncoderCalls:
    """Implements `encoder_pool.EncoderCalls`, for an engine replica."""

    def __init__(self, encoders: Any) -> None:
        """`encoders`: the handle of their deployment."""
        self._handle = encoders
        self._waking: asyncio.Future[Any] | None = None

    async def encode(self, replica: str, message: bytes, media: Any) -> tuple[bytes, bytes]:
        """Have an image encoded, given a reference to the bytes of its media."""
        answer: tuple[bytes, bytes] = await self._handle.encode.remote(message, [media], replica=replica)
        return answer

    def wake(self) -> None:
        """Have a replica started, if the pool has none: a call that waits at the handle counts as demand."""
        if self._waking is None or self._waking.done():
            self._waking = asyncio.ensure_future(self._call_any())

    async def _call_any(self) -> None:
        await self._handle.wake.remote(replica=None)


def connect(front: str, app: str) -> tuple[RayCalls, ShareMedia]:
    """Connect a front to the replicas of an application."""
    return RayCalls(front, app), MediaStore().share


class MediaStore:
    """Puts the media of requests into Ray's object store. Completions of one prompt share them."""

    def __init__(self) -> None:
        self._refs: weakref.WeakValueDictionary[int, _SharedMedia] = weakref.WeakValueDictionary()

    def share(self, message: AddRequest) -> Sequence[Any]:
        """References to the media of a request, which keep them in the store. Called from worker threads."""
        prompt = message.prompt
        shared = self._refs.get(id(prompt))
        if shared is None or shared.prompt is not prompt:
            shared = self._refs[id(prompt)] = _SharedMedia(prompt)
        return shared


class _SharedMedia(Sequence[Any]):
    """References to the media of one prompt."""

    def __init__(self, prompt: TokenPrompt) -> None:
        self.prompt = prompt
        self._refs = [ray.put(one) for one in media_of(prompt)]

    def __len__(self) -> int:
        return len(self._refs)

    def __getitem__(self, index: Any) -> Any:
        return self._refs[index]
