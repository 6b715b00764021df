"""Running replicas of the deployments that a process has handles of. Ray's routers note them, in their own threads."""

from __future__ import annotations

import threading
from collections.abc import Callable

Deployment = tuple[str, str]
"""Names of an application and of a deployment in it."""
OnReplicas = Callable[[frozenset[str]], None]
"""Called with the names of the running replicas whenever they change, from a thread of Ray."""

_lock = threading.Lock()
_listeners: dict[Deployment, OnReplicas] = {}
_known: dict[Deployment, frozenset[str]] = {}


def watch(deployment: Deployment, on_replicas: OnReplicas) -> None:
    """Call back with the running replicas of a deployment, now if they are known and whenever they change."""
    with _lock:
        _listeners[deployment] = on_replicas
        known = _known.get(deployment)
    if known is not None:
        on_replicas(known)


def unwatch(deployment: Deployment) -> None:
    """End `watch`."""
    with _lock:
        _listeners.pop(deployment, None)
        _known.pop(deployment, None)


def note_replicas(deployment: Deployment, names: frozenset[str]) -> None:
    """Pass on the running replicas of a deployment."""
    with _lock:
        _known[deployment] = names
        listener = _listeners.get(deployment)
    if listener is not None:
        listener(names)
