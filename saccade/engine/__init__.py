"""The engine: many requests at once through one model, with paged KV cache, prefix cache and encoder cache.

    conversation -> preprocess -> request -> schedule -> run -> sample -> detokenize -> completion

Where to start reading: `step.py` has the plan and the result of a step; `scheduler.py` decides what a step computes, in plain Python over
integers; `runner.py` runs it on the device; `core.py` is the engine loop; `engine.py` is the public API.
"""

from typing import TYPE_CHECKING

from saccade.imports import lazy_exports

if TYPE_CHECKING:
    from saccade.engine.config import EngineConfig as EngineConfig
    from saccade.engine.frontend.api import Engine as Engine
    from saccade.engine.request import Completion as Completion
    from saccade.engine.request import SamplingParams as SamplingParams
    from saccade.engine.structured import StructuredOutput as StructuredOutput

__getattr__ = lazy_exports(
    __name__,
    {
        "Engine": "frontend.api",
        "EngineConfig": "config",
        "SamplingParams": "request",
        "Completion": "request",
        "StructuredOutput": "structured",
    },
)
