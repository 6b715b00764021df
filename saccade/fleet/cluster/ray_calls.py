"""Calls of a front to the engine replicas of one version, through a handle of Ray Serve."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import ray
from ray import serve

from saccade.fleet.cluster.names import ENGINE


class RayCalls:
    """Implements `replica_link.Calls`. Ray sends a call to the replica that its argument names (`ray_router.py`).

    Requests and outputs do not pass Ray, which takes milliseconds for a call: see `replica_connection.py`.
    """

    def __init__(self, front: str, app: str) -> None:
        """`front`: id of the front's process. `app`: the application of the version's engines."""
        self._front = front
        self._handle = serve.get_deployment_handle(ENGINE, app, _check_exists=False)  # it may be deployed in a moment
        self._streams = self._handle.options(stream=True)
        self._waking: asyncio.Future[Any] | None = None

    def channel(self, replica: str) -> Any:
        """Ask a replica for its address, and have Ray keep it: an asynchronous iterator, which can be cancelled."""
        return self._streams.channel.remote(self._front, replica=replica)

    def wake(self) -> None:
        """Have a replica started, if the pool has none: a call that waits at the handle counts as demand."""
        if self._waking is None or self._waking.done():
            self._waking = asyncio.ensure_future(self._call_any())

    async def _call_any(self) -> None:
        await self._handle.wake.remote(replica=None)

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

    async def encode(self, replica: str, message: bytes, media: Awaitable[bytes]) -> tuple[bytes, bytes]:
        """Have an image encoded, given the bytes of its media, which travel through Ray's object store."""
        reference = await asyncio.to_thread(ray.put, await media)
        answer: tuple[bytes, bytes] = await self._handle.encode.remote(message, [reference], replica=replica)
        return answer

    def wake(self) -> None:
        """Have a replica started, if the pool has none: a call that waits at the handle counts as demand."""
        if self._waking is None or self._waking.done():
            self._waking = asyncio.ensure_future(self._call_any())

    async def _call_any(self) -> None:
        await self._handle.wake.remote(replica=None)
