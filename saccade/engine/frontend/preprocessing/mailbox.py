"""Memory shared with a preprocessing worker."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from saccade.workers.pool import WorkerLostError
from saccade.workers.shared_memory import SharedMemory

_KEPT_BYTES = 32 * 2**20
"""Larger inboxes and outboxes are freed after use; smaller ones are kept, since fresh memory is slow."""
_Number = TypeVar("_Number", np.int64, np.uint8)


class Mailbox:
    """Memory shared with one worker: an inbox for its requests, an outbox for its results."""

    def __init__(self, fds: tuple[int, int] | None = None) -> None:
        """Create one, or open one in the worker."""
        self.inbox, self.outbox = (SharedMemory(), SharedMemory()) if fds is None else map(SharedMemory, fds)

    @property
    def fds(self) -> tuple[int, int]:
        """Passed to the worker."""
        return self.inbox.fd, self.outbox.fd

    def read_outbox(self, shape: tuple[int, ...], dtype: type[_Number]) -> NDArray[_Number]:
        """A copy of the result, read-only."""
        array = np.empty(shape, dtype)
        if not self.outbox.read_into(array):
            raise WorkerLostError("it sent less than it said")
        array.flags.writeable = False
        return array

    def free_if_large(self) -> None:
        """Free the memory of unusually large images."""
        self.inbox.free_if_larger(_KEPT_BYTES)
        self.outbox.free_if_larger(_KEPT_BYTES)
