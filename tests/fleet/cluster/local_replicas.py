"""Engine replicas in this process, without Ray: real engines, and a front's calls to them, which tests can break."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace

from saccade.engine.config import EngineConfig
from saccade.engine.encoder_host import EncoderHost
from saccade.engine.host import EngineHost
from saccade.engine.transport.wire import media_of
from saccade.fleet.cluster.encoder_pool import EncoderPool
from saccade.fleet.cluster.encoder_service import EncoderService
from saccade.fleet.cluster.replica_service import ReplicaService
from saccade.fleet.config import VersionConfig
from saccade.processor import MediaLimits


class LocalReplicas:
    """Replicas of one version by name. `kill` ends one as a lost machine would: no call to it returns any more."""

    def __init__(self, checkpoint, adapters, *, costs=None, num_encoders=0, tracers=None, **engine):
        self.version = VersionConfig(
            name="may", checkpoint=str(checkpoint), traffic=100, gpus_per_replica=0, adapters=adapters,
            engine=EngineConfig(num_workers=0, num_pages=512, **engine), costs=costs,
        )  # fmt: skip
        self.encoders: dict[str, EncoderService] = {}
        self.pools: list[EncoderPool] = []
        self.tracers = tracers or {}
        """Tracers of replicas by name."""
        self.has_pool, self.stuck = num_encoders > 0, asyncio.Event()
        for number in range(num_encoders):
            self.start_encoder(f"encoder {number}")
        self.services: dict[str, ReplicaService] = {}
        self.killed: dict[str, asyncio.Event] = {}
        self.hosts: dict[str, EngineHost] = {}
        self.num_media_read = 0

    def start(self, name, *, version="may"):
        host = EngineHost.load(
            self.version.checkpoint, device="cpu", dtype="float32", config=self.version.engine,
            limits=MediaLimits(allow_local_files=False), adapters=self.version.adapters,
        )  # fmt: skip
        self.hosts[name], self.killed[name] = host, asyncio.Event()
        self.services[name] = ReplicaService(
            name, replace(self.version, name=version), host, tracer=self.tracers.get(name),
            open_pool=self._open_pool if self.has_pool else None,
        )  # fmt: skip

    def start_encoder(self, name):
        host = EncoderHost.load(
            self.version.checkpoint, device="cpu", dtype="float32", config=self.version.engine,
            limits=MediaLimits(allow_local_files=False),
        )  # fmt: skip
        self.encoders[name] = EncoderService(self.version, host, self.tracers.get("encoder"))

    def _open_pool(self):
        pool = EncoderPool(self.version, LocalEncoderCalls(self))
        pool.set_replicas(frozenset(self.encoders))
        self.pools.append(pool)
        return pool

    def kill(self, name):
        self.killed[name].set()

    def close(self):
        for service in (*self.services.values(), *self.encoders.values()):
            service.close()

    async def media(self, data):
        self.num_media_read += 1
        return data


class LocalEncoderCalls:
    """Implements `encoder_pool.EncoderCalls`. Encoders that are gone fail; those that are stuck never answer."""

    def __init__(self, replicas):
        self.replicas, self.num_woken = replicas, 0
        self.asked = []

    async def encode(self, replica, message, media):
        self.asked.append(replica)
        if replica not in self.replicas.encoders:
            raise ConnectionError("the encoder is gone")
        if self.replicas.stuck.is_set():
            await asyncio.sleep(3600)
        return await self.replicas.encoders[replica].encode(message, media)

    def wake(self):
        self.num_woken += 1


class LocalCalls:
    """Implements `replica_link.Calls` for one front."""

    def __init__(self, replicas, front):
        self.replicas, self.front = replicas, front
        self.num_woken = 0

    def channel(self, replica):
        return _Channel(self.replicas, replica, self.front)

    async def submit(self, replica, message, media):
        waiting = [_Media(self.replicas, one) for one in media]
        await self._call(replica, self.replicas.services[replica].submit(self.front, message, waiting))

    async def cancel(self, replica, request_ids):
        await self._call(replica, self.replicas.services[replica].cancel(self.front, request_ids))

    async def heartbeat(self, replica):
        await self._call(replica, self.replicas.services[replica].heartbeat(self.front))

    def wake(self):
        self.num_woken += 1

    def close(self):
        pass

    async def _call(self, replica, call):
        if self.replicas.killed[replica].is_set():
            call.close()
            raise ConnectionError("the replica is gone")
        await call


def share(message):
    return media_of(message.prompt)


class _Media:
    def __init__(self, replicas, data):
        self.replicas, self.data = replicas, data

    def __await__(self):
        return self.replicas.media(self.data).__await__()


class _Channel:
    """Messages of a replica until it is killed."""

    def __init__(self, replicas, replica, front):
        self._messages = replicas.services[replica].channel(front)
        self._killed = replicas.killed[replica]
        self._next = None

    def cancel(self):
        if self._next is not None:
            self._next.cancel()

    async def __aiter__(self):
        try:
            while True:
                self._next = asyncio.ensure_future(anext(self._messages))
                killed = asyncio.ensure_future(self._killed.wait())
                try:
                    await asyncio.wait((self._next, killed), return_when=asyncio.FIRST_COMPLETED)
                finally:
                    killed.cancel()
                if self._killed.is_set():
                    raise ConnectionError("the replica is gone")
                yield self._next.result()
        finally:
            self._next.cancel()
            with suppress(BaseException):
                await self._next
            await self._messages.aclose()
