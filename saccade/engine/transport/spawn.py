"""Start the process of an engine core, before the caller has imported anything else.

The process waits for its setup (`process.py`).
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_CPU_ENVIRONMENT = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1", "GOMP_SPINCOUNT": "10000"}
"""Environment of a core that computes on a CPU, unless the user sets these variables.

Weights are in huge pages, because a decode step reads all of them. Idle OpenMP threads sleep after about 0.1 ms
instead of 4, so that other processes can use the CPU.
"""
_MAIN = "import gc; gc.disable(); from saccade.engine.transport.process import main; main()"
"""Program of the core process. Garbage collection is off until the core is loaded: it would slow down the imports."""


_DEV = Path("/dev")
_GPU_FILES = ("nvidia[0-9]*", "kfd", "dxg", "nvhost-gpu", "nvmap")
"""Files of GPUs: of NVIDIA and AMD, below Windows, and on small boards."""


class SpawnedCore(NamedTuple):
    """A core process that waits for its setup on a connection."""

    process: subprocess.Popen[bytes]
    connection: socket.socket
    is_cpu: bool
    """Whether its environment is that of a core that computes on a CPU."""

    def kill(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()
        self.connection.close()


def spawn_core(is_cpu: bool) -> SpawnedCore:
    """Start a core process. The kernel kills it when the calling thread exits."""
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, "-c", _MAIN, str(theirs.fileno()), str(os.getpid())]
        environment = (_CPU_ENVIRONMENT if is_cpu else {}) | os.environ
        # In a group of its own, so that a Ctrl-C in the terminal reaches this process alone.
        process = subprocess.Popen(  # noqa: S603  our module
            command, pass_fds=[theirs.fileno()], env=environment, process_group=0
        )
    return SpawnedCore(process, ours, is_cpu)


class SpareCore:
    """A core process that is started ahead, for whoever connects first."""

    def __init__(self, spawned: SpawnedCore | None) -> None:
        self._spawned = spawned

    def take(self, is_cpu: bool) -> SpawnedCore:
        """The process started ahead, if its environment fits and it is still free; else a new one."""
        spawned, self._spawned = self._spawned, None
        if spawned is not None and spawned.is_cpu == is_cpu:
            return spawned
        if spawned is not None:
            spawned.kill()
        return spawn_core(is_cpu)

    def close(self) -> None:
        """End the process unless it was taken."""
        if self._spawned is not None:
            self._spawned.kill()
            self._spawned = None


@contextlib.contextmanager
def spare_core(device: str, *, is_needed: bool) -> Iterator[SpareCore]:
    """Start a core process ahead if it `is_needed`. It ends with the body unless it is taken."""
    spare = SpareCore(spawn_core(_looks_like_cpu(device)) if is_needed else None)
    try:
        yield spare
    finally:
        spare.close()


def is_cpu(device: str) -> bool:
    """Whether a device is a CPU. Torch, which takes 2 s to import, is asked only if there may be a GPU."""
    if _looks_like_cpu(device):
        return True
    from saccade.device import resolve_device

    return resolve_device(device).type == "cpu"


def _looks_like_cpu(device: str) -> bool:
    """Whether a device is a CPU for certain, as far as that is known without torch."""
    return device == "cpu" or (device == "auto" and not any(path for name in _GPU_FILES for path in _DEV.glob(name)))
