"""The engine: many requests at once through one model, with paged KV cache, prefix cache and encoder cache.

    conversation -> preprocess -> request -> schedule -> run -> sample -> detokenize -> completion

Start with `engine.py`, the public API, which joins packages: `frontend` turns conversations into tokens and tokens into
text; `core` decides what each step computes, in plain Python over integers; `device` runs the steps, on several
GPUs with `ranks`; `transport` carries messages between front end and core, in the `frames` of processes.
"""

from typing import TYPE_CHECKING

from saccade.imports import lazy_exports

if TYPE_CHECKING:
    from saccade.engine.config import EngineConfig as EngineConfig
    from saccade.engine.engine import Engine as Engine
    from saccade.engine.request import Completion as Completion
    from saccade.engine.request import CompletionDelta as CompletionDelta
    from saccade.engine.request import RequestOptions as RequestOptions
    from saccade.engine.sampling_params import SamplingParams as SamplingParams
    from saccade.engine.structured import StructuredOutput as StructuredOutput

__getattr__ = lazy_exports(
    __name__,
    {
        "Engine": "engine",
        "EngineConfig": "config",
        "SamplingParams": "sampling_params",
        "RequestOptions": "request",
        "Completion": "request",
        "CompletionDelta": "request",
        "StructuredOutput": "structured",
    },
)
