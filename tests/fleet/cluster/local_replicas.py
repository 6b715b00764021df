"""Engine replicas in this process, without Ray: real engines and connections, which tests can break."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

from saccade.engine.config import EngineConfig
from saccade.engine.encoder_host import EncoderHost
from saccade.engine.host import EngineHost
from saccade.fleet.cluster.encoder_pool import EncoderPool
from saccade.fleet.cluster.encoder_service import EncoderService
from saccade.fleet.cluster.replica_server import ReplicaServer
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
        self.loop = asyncio.new_event_loop()
        """The event loop of all replicas, in a thread of its own."""
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self.encoders: dict[str, EncoderService] = {}
        self.pools: list[EncoderPool] = []
        self.tracers = tracers or {}
        """Tracers of replicas by name."""
        self.has_pool, self.stuck = num_encoders > 0, asyncio.Event()
        for number in range(num_encoders):
            self.start_encoder(f"encoder {number}")
        self.services: dict[str, ReplicaService] = {}
        self.servers: dict[str, ReplicaServer] = {}
        self.killed: dict[str, threading.Event] = {}
        self.hosts: dict[str, EngineHost] = {}

    def start(self, name, *, version="may", **options):
        host = EngineHost.load(
            self.version.checkpoint, device="cpu", dtype="float32", config=self.version.engine,
            limits=MediaLimits(allow_local_files=False), adapters=self.version.adapters,
        )  # fmt: skip
        self.hosts[name], self.killed[name] = host, threading.Event()
        self.services[name] = ReplicaService(
            name, replace(self.version, name=version), host, tracer=self.tracers.get(name),
            open_pool=self._open_pool if self.has_pool else None, **options,
        )  # fmt: skip
        self.servers[name] = ReplicaServer(self.services[name], "127.0.0.1")

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
        self.loop.call_soon_threadsafe(self.servers[name].close)

    def close(self):
        asyncio.run_coroutine_threadsafe(self._close(), self.loop).result()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    async def _close(self):
        for one in (*self.servers.values(), *self.services.values(), *self.encoders.values()):
            one.close()
        await asyncio.sleep(0.05)  # connections and cancelled tasks end
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)


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
        if self.replicas.killed[replica].is_set():
            raise ConnectionError("the replica is gone")
        return _Channel(self.replicas, replica, self.front)

    def wake(self):
        self.num_woken += 1

    def close(self):
        pass


class _Channel:
    """The call by which a front holds a replica."""

    def __init__(self, replicas, replica, front):
        self._loop, self._server, self._service = replicas.loop, replicas.servers[replica], replicas.services[replica]
        self._front, self._held = front, None

    def cancel(self):
        if self._held is not None:
            self._held.cancel()

    async def __aiter__(self):
        yield (await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._address(), self._loop))).to_bytes()

    async def _address(self):
        self._held = asyncio.create_task(self._service.hold(self._front))
        return self._server.address()
