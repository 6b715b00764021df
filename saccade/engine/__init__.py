"""The engine: many requests at once through one model, with paged KV cache, prefix cache and encoder cache.

    conversation -> preprocess -> request -> schedule -> run -> sample -> detokenize -> completion

Where to start reading: `scheduler.py` decides what a step computes, in plain Python over integers; `core.py` is the engine loop;
`runner.py` runs steps on the device; `engine.py` is the public API. `pages.py` and `encoder_cache.py` allocate device memory.
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
