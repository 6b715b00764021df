"""A front's engine over engine replicas in this process, with an event loop in a thread: no Ray, no HTTP."""

from __future__ import annotations

import asyncio
import threading
import time
from functools import partial

from fleet.cluster.local_replicas import LocalCalls, LocalReplicas

from saccade.engine import Engine
from saccade.engine.frontend.preprocessing.preprocessor import Preprocessor
from saccade.fleet.cluster.fleet_core import FleetCore
from saccade.fleet.cluster.replica_set import ReplicaSet
from saccade.fleet.continuation import RetryBudget
from saccade.fleet.poison import PoisonList
from saccade.fleet.replicas import REPORT_S
from saccade.processor import MediaLimits, Processor

TIMEOUT_S = 60.0


class LocalFleet:
    """Replicas, and an engine whose core they are."""

    def __init__(
        self, checkpoint, names=("one", "two"), *, front="front", adapters=None, joins=None, tracers=None,
        report_s=REPORT_S, **engine,
    ):  # fmt: skip
        """`joins`: a fleet whose replicas and event loop this front uses."""
        self._thread = None
        if joins is None:
            self.loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
            self._thread.start()
            self.replicas = LocalReplicas(checkpoint, adapters=adapters or {}, tracers=tracers, **engine)
            for name in names:
                self.replicas.start(name, report_s=report_s)
        else:
            self.loop, self.replicas = joins.loop, joins.replicas
        self.poison, self.budget = PoisonList(time.monotonic), RetryBudget()
        self.calls = LocalCalls(self.replicas, front)
        self.set = ReplicaSet("may", front, self.calls, poison=self.poison, budget=self.budget)
        self.run_replicas(names)
        self.wait_until(lambda: self.set.num_ready == len(names))
        limits = MediaLimits(allow_local_files=False)
        preprocessor = Preprocessor(
            checkpoint, num_workers=0, processed_image_cache_bytes=2**20, limits=limits, measures_only=True
        )
        core = partial(FleetCore, self.set, self.loop, frozenset(self.replicas.version.adapters))
        self.engine = Engine(core, Processor.load(checkpoint, limits=limits), preprocessor)

    def run_replicas(self, names):
        """Say which replicas run, as Ray's router does."""
        self.loop.call_soon_threadsafe(self.set.set_replicas, frozenset(names))

    def kill(self, name):
        """End a replica as a lost machine would."""
        self.replicas.kill(name)

    def replica_of_open_requests(self):
        """Name of the replica that has the only open request."""
        [name] = {sent.link.name for sent in self.set._sent.values() if sent.link is not None}
        return name

    def wait_until(self, condition):
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            assert time.monotonic() < deadline, "this takes too long"
            time.sleep(0.005)

    def close(self):
        self.engine.close()
        self.loop.call_soon_threadsafe(self.set.close)
        if self._thread is None:
            return
        asyncio.run_coroutine_threadsafe(self._close(), self.loop).result(TIMEOUT_S)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()
        self.replicas.close()

    async def _close(self):
        await asyncio.sleep(0.05)  # cancelled tasks end
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
