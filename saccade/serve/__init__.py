"""The server: an OpenAI-compatible HTTP API in front of the engine.

    client -> connection limits -> gate (keys, limits, errors) -> route -> model -> generation -> engine

Where to start reading: `server.py` starts and stops everything; `app.py` has the list of routes; `gate.py` is what
every request passes first; `routes/chat.py` is the main endpoint; `models.py` says which `Service` answers a request,
and `front.py` what all of them share; `generation.py` connects a request with the engine; `supervisor.py` loads the
engine and replaces a core that died.
"""

from typing import TYPE_CHECKING

from saccade.imports import lazy_exports

if TYPE_CHECKING:
    from saccade.serve.app import create_app as create_app
    from saccade.serve.config import ServeConfig as ServeConfig
    from saccade.serve.server import serve as serve

__getattr__ = lazy_exports(__name__, {"ServeConfig": "config", "create_app": "app", "serve": "server"})
