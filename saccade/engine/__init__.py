"""The engine: many requests at once through one model, with paged memory and caches that know images.

    conversation -> prepare -> request -> schedule -> run -> sample -> tokens -> text

Where to start reading: `scheduler.py` decides what a step computes, in plain Python over integers; `core.py` has steps carried
out one after another; `runner.py` runs them on the device; `engine.py` is the door, where tokens become text. `pages.py` and `image_pool.py` say who owns what.
"""

from typing import TYPE_CHECKING

from saccade.lazy import lazy_exports

if TYPE_CHECKING:
    from saccade.engine.config import EngineConfig as EngineConfig
    from saccade.engine.engine import Engine as Engine
    from saccade.engine.request import Completion as Completion
    from saccade.engine.request import SamplingParams as SamplingParams

__getattr__ = lazy_exports(
    __name__, {"Engine": "engine", "EngineConfig": "config", "SamplingParams": "request", "Completion": "request"}
)
