"""Who owns the engine of a served model, and what it can do now."""

from __future__ import annotations

from typing import Literal, Protocol

from saccade.engine import Engine
from saccade.serve.errors import ApiError

State = Literal["loading", "ready", "restarting", "draining", "failed", "stopped"]

_REFUSALS: dict[State, tuple[str, str, float]] = {
    "loading": ("the model is being loaded", "loading", 5.0),
    "restarting": ("the engine is being restarted", "engine_restarting", 5.0),
    "draining": ("the server is draining and takes no new requests", "draining", 10.0),
    "failed": ("the engine has failed", "engine_failed", 60.0),
    "stopped": ("the server is shutting down", "draining", 10.0),
}


class EngineOwner(Protocol):
    """Owns one engine. A supervisor is one; any thread may read."""

    @property
    def state(self) -> State:
        """The state of the engine; requests are served if it is `ready`."""

    @property
    def engine(self) -> Engine:
        """The engine. Raises an error for the client if requests cannot be served."""

    @property
    def loaded_engine(self) -> Engine | None:
        """The engine in any state, for sizes and statistics; None before there is one."""

    @property
    def num_restarts(self) -> int:
        """Times the engine core was started again."""

    def refusal(self) -> ApiError:
        """Return the error that says why requests cannot be served now."""


def refusal_of(state: State) -> ApiError:
    """Return the error of a request that arrives in this state."""
    message, code, retry_after_s = _REFUSALS.get(state, _REFUSALS["restarting"])
    return ApiError(503, f"{message}; try again later", code=code, retry_after_s=retry_after_s)
