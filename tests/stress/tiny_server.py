"""A server on a tiny random model, and what its processes hold."""

import os
import re
import signal
import tempfile
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.server_process import ServerProcess
from saccade.model.initialize import initialize_random, named_size


@contextmanager
def tiny_server(*options, log=None):
    """A running server on random weights of the tiny size."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "tiny"
        initialize_random(checkpoint, named_size("tiny"), dtype=torch.float32)
        with ServerProcess(checkpoint, *options, log=log) as server:
            yield server


@dataclass(frozen=True)
class Holdings:
    """What processes hold together."""

    num_processes: int
    num_fds: int
    """File descriptors other than those of shared memory."""
    num_memory_files: int
    """Anonymous shared memory files, each counted once."""
    num_threads: int
    memory_mb: float
    """Anonymous and shared memory: file mappings depend on other processes."""


def pids_of(server):
    """The front and all its descendants."""
    found = [server.process.pid]
    for pid in found:  # the list grows meanwhile
        with suppress(OSError):
            for task in Path(f"/proc/{pid}/task").iterdir():
                found += [int(child) for child in (task / "children").read_text().split()]
    return found


def find(server, marker):
    """Descendants of the front with this text in their command line."""
    return [pid for pid in pids_of(server)[1:] if marker in _command_line(pid)]


def _command_line(pid):
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""


def holdings(server):
    """What the processes of a server hold now."""
    num_fds, num_threads, memory_kib, memory_files, num_alive = 0, 0, 0, set(), 0
    for pid in pids_of(server):
        with suppress(OSError):
            for fd in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    if "memfd" in str(fd.readlink()):
                        memory_files.add(fd.stat().st_ino)
                    else:
                        num_fds += 1
            num_threads += int(re.search(r"Threads:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1])
            maps = Path(f"/proc/{pid}/smaps_rollup").read_text()
            memory_kib += sum(map(int, re.findall(r"^Pss_(?:Anon|Shmem):\s+(\d+)", maps, re.M)))
            num_alive += 1
    return Holdings(num_alive, num_fds, len(memory_files), num_threads, memory_kib / 1024)


def kill(pid):
    """Kill a process, if it still runs."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
