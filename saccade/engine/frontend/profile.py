"""Profile a running core."""

from __future__ import annotations

import time
from pathlib import Path

from saccade.engine.core.messages import StartProfile, StopProfile
from saccade.engine.frontend.open_requests import OpenRequests

_WAIT_S = 60.0
"""Time to start a profile, and to write it."""


def write_profile(requests: OpenRequests, path: Path, seconds: float) -> bool:
    """Profile the core and write a Chrome trace. Waits for the file, and returns whether it exists."""
    path = path.absolute()
    begun = path.with_name(f".{path.name}.begun")
    requests.send(StartProfile(begun=str(begun)))
    if _wait_for(requests, begun):
        requests.wait_until_stopped(seconds)
        begun.unlink(missing_ok=True)
    requests.send(StopProfile(path=str(path)))
    return _wait_for(requests, path)


def _wait_for(requests: OpenRequests, file: Path) -> bool:
    """Wait for a file that the core writes, and return whether it exists."""
    deadline = time.monotonic() + _WAIT_S
    while not file.exists() and time.monotonic() < deadline and not requests.wait_until_stopped(0.02):
        pass
    return file.exists()
