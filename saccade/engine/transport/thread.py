"""The engine core in a thread of this process."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence

from saccade.engine.core.loop import EngineCore
from saccade.engine.core.messages import Message
from saccade.engine.core.statistics import Statistics
from saccade.engine.request import Failure, RequestOutput

logger = logging.getLogger(__name__)

OnOutputs = Callable[[Sequence[RequestOutput]], None]
OnStop = Callable[[Failure], None]
"""Called once if the core stops by itself; its open requests get no more output."""

_POLL_S = 0.0005
"""Maximum time to wait for a message before checking whether the running step is done."""

STOPPED = Failure("running", "the engine has stopped; restart it", "engine_stopped")


class CoreThread:
    """Runs a core in a thread.

    `send` may be called from any thread. `on_outputs` is called from the core's thread and must return at once.
    """

    def __init__(self, core: EngineCore, on_outputs: OnOutputs, on_stop: OnStop) -> None:
        self.info = core.info
        self._core, self._on_outputs, self._on_stop = core, on_outputs, on_stop
        self._thread = threading.Thread(target=self._serve, name="saccade-engine", daemon=True)
        self._thread.start()

    @property
    def statistics(self) -> Statistics:
        """Counters since the start."""
        return self._core.statistics

    def send(self, message: Message) -> None:
        """Send a message to the core."""
        self._core.inbox.put(message)

    def close(self) -> None:
        """Stop the core after the step in progress. Open requests get no more output."""
        self._core.inbox.put(None)
        self._thread.join()
        self._core.close()

    def _serve(self) -> None:
        try:
            run_core(self._core, self._on_outputs)
        except BaseException:
            logger.exception("the engine has stopped")
            self._on_stop(STOPPED)


def run_core(core: EngineCore, on_outputs: OnOutputs) -> None:
    """Handle messages, run steps and pass on outputs until the inbox has None."""
    is_closing = False

    def handle_one(waits: bool, timeout_s: float | None) -> bool:
        """Handle one message. False: there was none."""
        nonlocal is_closing
        try:
            message = core.inbox.get(waits, timeout_s)
        except queue.Empty:
            return False
        if message is None:
            is_closing = True
        elif isinstance(message, RequestOutput):
            on_outputs([message])
        elif outputs := core.handle(message):
            on_outputs(outputs)
        return True

    def poll() -> None:
        handle_one(True, _POLL_S)

    while not is_closing:
        if not core.has_work:
            if not handle_one(True, core.idle_s()) and (outputs := core.idle()):
                on_outputs(outputs)
            continue
        while handle_one(False, None) and not is_closing:
            pass
        if not is_closing and core.has_work and (outputs := core.step(poll)):
            on_outputs(outputs)
