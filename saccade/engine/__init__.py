"""The engine: many requests at once through one model, with paged memory and caches that know images.

    conversation -> prepare -> request -> schedule -> run -> sample -> tokens -> text

Where to start reading: `scheduler.py` decides what a step computes, in plain Python over integers; `core.py` has steps carried
out one after another; `runner.py` runs them on the device; `engine.py` is the door, where tokens become text. `pages.py` and `image_pool.py` say who owns what.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from saccade.engine.config import EngineConfig
    from saccade.engine.engine import Engine
    from saccade.engine.request import Completion, SamplingParams

__all__ = ["Completion", "Engine", "EngineConfig", "SamplingParams"]

_MODULES = {"Engine": "engine", "EngineConfig": "config", "SamplingParams": "request", "Completion": "request"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
