"""Running replicas of the applications that a front has handles of. Ray's routers note them, in their own threads."""

from __future__ import annotations

import threading
from collections.abc import Callable

OnReplicas = Callable[[frozenset[str]], None]
"""Called with the names of the running replicas whenever they change, from a thread of Ray."""

_lock = threading.Lock()
_listeners: dict[str, OnReplicas] = {}
_known: dict[str, frozenset[str]] = {}


def watch(app: str, on_replicas: OnReplicas) -> None:
    """Call back with the running replicas of an application, now if they are known and whenever they change."""
    with _lock:
        _listeners[app] = on_replicas
        known = _known.get(app)
    if known is not None:
        on_replicas(known)


def unwatch(app: str) -> None:
    """End `watch`."""
    with _lock:
        _listeners.pop(app, None)
        _known.pop(app, None)


def note_replicas(app: str, names: frozenset[str]) -> None:
    """Pass on the running replicas of an application."""
    with _lock:
        _known[app] = names
        listener = _listeners.get(app)
    if listener is not None:
        listener(names)
