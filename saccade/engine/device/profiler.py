"""A torch profile of the running core. Messages start and stop it between two steps."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from saccade.files import atomic_write

logger = logging.getLogger(__name__)


class CoreProfiler:
    """Profiles the thread that starts it, which is the core's, and the device; one profile at a time."""

    def __init__(self) -> None:
        self._profile: torch.profiler.profile | None = None

    def start(self, begun: Path) -> None:
        """Begin a profile, then create the file `begun`. Drops a profile in progress."""
        if self._profile is not None:
            self._profile.stop()
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profile = torch.profiler.profile(activities=activities)
        self._profile.start()
        try:
            begun.touch()
        except OSError as error:
            logger.warning("%s could not be written: %r", begun, error)

    def stop(self, path: Path) -> None:
        """End the profile and write its trace. An error of the disk is only logged."""
        profile, self._profile = self._profile, None
        if profile is None:
            return
        profile.stop()
        try:
            with atomic_write(path) as temporary:
                profile.export_chrome_trace(str(temporary))
        except (OSError, RuntimeError) as error:
            logger.warning("the profile could not be written to %s: %r", path, error)
