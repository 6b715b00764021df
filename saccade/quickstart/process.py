"""Run a command of this package as a process of its own."""

from __future__ import annotations

import ctypes
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from saccade.errors import ConfigError

_PR_SET_PDEATHSIG = 1


def shown(words: Sequence[str]) -> str:
    """A command as one would type it."""
    return shlex.join(["saccade", *words])


def start(words: Sequence[str], *, stdout: int | None, stderr: IO[bytes] | None = None) -> subprocess.Popen[str]:
    """Start a command. It gets SIGTERM when this process ends, so that nothing works on in a folder that is used again.

    One thread: the models of the quickstart are too small for several.
    """
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    parent, libc = os.getpid(), ctypes.CDLL(None)

    def end_with_parent() -> None:
        if sys.platform == "linux":
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() != parent:
                os._exit(1)

    return subprocess.Popen(  # noqa: S603  our own command
        [sys.executable, "-m", "saccade", *words],
        stdout=stdout,
        stderr=stderr,
        env=environment,
        text=True,
        preexec_fn=end_with_parent,
    )


def run(words: Sequence[str]) -> str:
    """Run a command to its end and return what it printed; its log goes to standard error."""
    with start(words, stdout=subprocess.PIPE) as process:
        try:
            output, _ = process.communicate()
        except KeyboardInterrupt:  # the terminal has sent it to the command too, which saves its state
            process.wait()
            raise
    if process.returncode in (130, -signal.SIGINT, -signal.SIGTERM):
        raise KeyboardInterrupt
    if process.returncode != 0:
        raise ConfigError(f"{shown(words)} failed (exit status {process.returncode}); the lines above say why")
    return output


def checkpoint_of(run_folder: Path) -> Path | None:
    """The last exported checkpoint of a run."""
    found = sorted((run_folder / "checkpoints").glob("step-*"))
    return found[-1] if found else None
