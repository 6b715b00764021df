"""One version of a model at a front: the replicas of its engines, and the engine object that the server's routes use.

The engine's front end (templates, tokens, detokenizer) runs here; its core is the replicas of the version.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from saccade.engine import Engine
from saccade.engine.frontend.preprocessing.preprocessor import Preprocessor
from saccade.fleet.cluster.fleet_core import FleetCore
from saccade.fleet.cluster.names import ENGINE, engine_app
from saccade.fleet.cluster.replica_link import Calls
from saccade.fleet.cluster.replica_set import ReplicaSet
from saccade.fleet.cluster.running_replicas import unwatch, watch
from saccade.fleet.config import VersionConfig
from saccade.fleet.continuation import RetryBudget
from saccade.fleet.poison import PoisonList
from saccade.processor import MediaLimits, Processor
from saccade.serve.engine_owner import State, refusal_of
from saccade.serve.errors import ApiError

logger = logging.getLogger(__name__)

Connect = Callable[[str, str], Calls]
"""Returns the calls of a front to the replicas of an application."""
_MEASURED_BYTES = 16 * 2**20
"""Memory for the sizes of images that were sent before."""


@dataclass(frozen=True, kw_only=True)
class FrontContext:
    """What all versions at a front share."""

    fleet: str
    """Name of the fleet."""
    front: str
    """Id of the front's process, unique for all time."""
    connect: Connect
    """Connects to replicas."""
    loop: asyncio.AbstractEventLoop
    """Event loop of the front."""
    poison: PoisonList
    """Requests that are refused."""
    budget: RetryBudget
    """Bound of the retries."""
    limits: MediaLimits
    """Limits on images and videos of clients."""
    num_workers: int
    """Processes that read the headers of images."""


class ServedVersion:
    """An `EngineOwner` whose engine is ready once a replica was. Used in the event loop; any thread may read."""

    def __init__(
        self, context: FrontContext, model: str, version: VersionConfig, on_loaded: Callable[[], None]
    ) -> None:
        """`on_loaded` is called in the event loop when the engine can be used."""
        self.version = version
        self._context, self._on_loaded = context, on_loaded
        self._app = engine_app(context.fleet, model, version.name)
        self._calls = context.connect(context.front, self._app)
        self.replicas = ReplicaSet(
            version.name, context.front, self._calls, poison=context.poison, budget=context.budget
        )
        self.replicas.on_ready = self._start_loading
        self._engine: Engine | None = None
        self._is_closed = False
        watch((self._app, ENGINE), self._set_replicas)

    def _set_replicas(self, names: frozenset[str]) -> None:
        """Note which replicas run; called from a thread of Ray."""
        self._context.loop.call_soon_threadsafe(partial(self.replicas.set_replicas, names))

    # ------------------------------------------------------------------ an EngineOwner

    num_restarts = 0
    """The front end's core is never restarted: replicas that die are replaced."""

    @property
    def state(self) -> State:
        """What can be done now."""
        if self._is_closed:
            return "stopped"
        return "loading" if self._engine is None else "ready"

    @property
    def engine(self) -> Engine:
        """The engine. Raises an error for the client if requests cannot be served; an empty pool is then woken."""
        engine = self._engine
        if engine is None or self._is_closed:
            self.wake()
            raise self.refusal()
        return engine

    def wake(self) -> None:
        """Have a replica started if there is none."""
        if not self.replicas.num_ready and not self._is_closed:
            self._context.loop.call_soon_threadsafe(self._calls.wake)

    @property
    def loaded_engine(self) -> Engine | None:
        """The engine; None before a replica was ready."""
        return self._engine

    def refusal(self) -> ApiError:
        """Return the error that says why requests cannot be served now."""
        return refusal_of(self.state)

    # ------------------------------------------------------------------ start and end

    def _start_loading(self) -> None:
        """Load the front end in a thread that lives as long as its worker processes."""
        threading.Thread(target=self._load, name="saccade-front-loader", daemon=True).start()

    def _load(self) -> None:
        folder, config, limits = Path(self.version.checkpoint), self.version.engine, self._context.limits
        try:
            processor = Processor.load(folder, limits=limits, chat_template=config.chat_template)
            preprocessor = Preprocessor(
                folder, num_workers=self._context.num_workers, processed_image_cache_bytes=_MEASURED_BYTES,
                timeout_s=config.preprocess_timeout_s, max_images=config.max_images_per_request, limits=limits,
                chat_template=config.chat_template, measures_only=True,
            )  # fmt: skip
            preprocessor.wait_until_ready()
            core = partial(FleetCore, self.replicas, self._context.loop, frozenset(self.version.adapters))
            engine = Engine(core, processor, preprocessor)
            for name, adapter in self.version.adapters.items():
                engine.add_adapter(name, adapter)
        except Exception:
            logger.exception("version %s cannot be served by this front", self.version.name)
            return
        self._context.loop.call_soon_threadsafe(self._use, engine)

    def _use(self, engine: Engine) -> None:
        if self._is_closed:
            threading.Thread(target=engine.close, daemon=True).start()
            return
        self._engine = engine
        self._on_loaded()

    def close(self) -> None:
        """Take no more requests and close the channels. Open requests must have ended."""
        self._is_closed = True
        unwatch((self._app, ENGINE))
        self._calls.close()
        self.replicas.close()
        if self._engine is not None:
            threading.Thread(target=self._engine.close, daemon=True).start()
