"""Load the engine, replace a core that died, and say whether the server is ready.

    loading -> ready -> (core dies) restarting -> ready -> ... -> draining -> stopped
                                     too often -> failed

A thread of the supervisor does the slow parts. It lives as long as the server, because the kernel kills the engine's
processes when the thread that started them ends.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from saccade.engine import Engine
from saccade.serve.engine_owner import State, refusal_of
from saccade.serve.errors import ApiError

logger = logging.getLogger(__name__)

_WINDOW_S = 600.0
"""Window in which restarts are counted."""
_MAX_BACKOFF_S = 60.0
_STOP_S = 15.0


class Supervisor:
    """An `EngineOwner` that loads its engine. Its thread, `drain` and `stop` change the state; any thread may read."""

    def __init__(self, load: Callable[[], Engine], *, max_restarts: int, backoff_s: float) -> None:
        """`load` loads and warms up the engine."""
        self._load = load
        self._max_restarts, self._backoff_s = max_restarts, backoff_s
        self._lock = threading.Lock()
        self._state: State = "loading"
        self._engine: Engine | None = None
        self._must_stop = threading.Event()
        self._restarts: list[float] = []
        self.num_restarts = 0
        """Restarts of the core so far."""
        self.loaded_s: float | None = None
        """Time the first load took."""
        self.restarted_s: float | None = None
        """Time the last restart took, from the death of the core to ready."""
        self.error: BaseException | None = None
        """Why the engine could not be loaded or kept alive."""
        self.on_failed: Callable[[], None] = lambda: None
        """Called once, from the supervisor's thread, when the engine has failed for good."""
        self._thread = threading.Thread(target=self._run, name="saccade-supervisor", daemon=True)

    @property
    def state(self) -> State:
        """State of the server. A client that has seen the death of the core finds it restarting, not ready."""
        engine = self._engine
        if self._state == "ready" and engine is not None and engine.has_failed:
            return "restarting"
        return self._state

    @property
    def engine(self) -> Engine:
        """The engine. Raises an error for the client if requests cannot be served."""
        engine = self._engine
        if self.state != "ready" or engine is None:
            raise self.refusal()
        return engine

    @property
    def loaded_engine(self) -> Engine | None:
        """The engine in any state, for statistics; None before it is loaded."""
        return self._engine

    def refusal(self) -> ApiError:
        """Return the error that says why requests cannot be served now."""
        return refusal_of(self.state)

    def start(self) -> None:
        """Begin loading."""
        self._thread.start()

    def drain(self) -> None:
        """Refuse new requests; those in progress continue."""
        with self._lock:
            if self._state in ("loading", "ready", "restarting"):
                self._state = "draining"

    def resume(self) -> None:
        """Accept requests again after `drain`, if the engine is ready."""
        with self._lock:
            if self._state == "draining" and self._engine is not None and not self._engine.has_failed:
                self._state = "ready"

    def stop(self) -> None:
        """Close the engine and end the thread. A model that is being loaded is not waited for.

        The processes that load it end with this one.
        """
        self._must_stop.set()
        with self._lock:
            self._state = "stopped"
        if self._thread.is_alive() and self._engine is not None:
            self._thread.join(_STOP_S)

    # -------------------------------------------------------------- the supervisor's thread

    def _run(self) -> None:
        try:
            started_at = time.perf_counter()
            self._engine = self._load()
            self.loaded_s = time.perf_counter() - started_at
            logger.info("ready after %.1f s", self.loaded_s)
            self._change("loading", "ready")
            self._watch(self._engine)
        except BaseException as error:
            self._fail(error)
        finally:
            if self._engine is not None:
                self._engine.close()

    def _watch(self, engine: Engine) -> None:
        """Restart the core whenever it dies, until the server stops."""
        while not self._must_stop.is_set():
            if not engine.wait_until_stopped(0.2):
                continue
            died_at = time.perf_counter()
            logger.error("the engine core has died; its requests have failed")
            self._change("ready", "restarting")
            while not self._must_stop.is_set() and not self._restart(engine):
                pass
            self.restarted_s = time.perf_counter() - died_at
            if not self._must_stop.is_set():
                logger.warning("the engine core is back after %.1f s", self.restarted_s)
                self._change("restarting", "ready")

    def _restart(self, engine: Engine) -> bool:
        """Try once, after a delay that grows; whether the core is back. Raises when that was once too often."""
        now = time.monotonic()
        self._restarts = [moment for moment in self._restarts if now - moment < _WINDOW_S]
        if len(self._restarts) >= self._max_restarts:
            raise RuntimeError(
                f"the engine core died {len(self._restarts) + 1} times within {_WINDOW_S / 60:.0f} minutes"
            )
        delay = min(_MAX_BACKOFF_S, self._backoff_s * 2 ** len(self._restarts)) if self._restarts else 0.0
        self._restarts.append(now)
        if self._must_stop.wait(delay):
            return False
        self.num_restarts += 1
        try:
            engine.restart()
        except Exception:
            logger.exception("the engine core could not be restarted")
            return False
        return True

    def _change(self, old: State, new: State) -> None:
        """Change from one state to another, unless the server drains or stops meanwhile."""
        with self._lock:
            if self._state == old:
                self._state = new

    def _fail(self, error: BaseException) -> None:
        if self._must_stop.is_set():
            return
        self.error = error
        with self._lock:
            self._state = "failed"
        self.on_failed()
