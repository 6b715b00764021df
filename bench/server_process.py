"""A server in a process of its own, for benchmarks: start it, find its processes, see what it holds."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self


def tiny_checkpoint(folder: Path) -> Path:
    """Random weights of the tiny size; made once."""
    import torch

    from saccade.model.initialize import initialize_random, named_size

    path = folder / "tiny"
    if not path.exists():
        initialize_random(path, named_size("tiny"), dtype=torch.float32)
    return path


@dataclass(frozen=True)
class Holdings:
    """What all processes of a server hold."""

    num_processes: int
    num_fds: int
    """File descriptors other than those of shared memory."""
    num_memory_files: int
    """Anonymous shared memory files, each counted once."""
    num_threads: int
    rss_bytes: int


class ServerProcess:
    """`saccade serve` on a port. Killed, it can be started again on the same port, as a service manager does."""

    def __init__(
        self, checkpoint: Path, *options: object, port: int = 0, log: Path | None = None, ready_s: float = 300.0
    ) -> None:
        self._checkpoint, self._options, self._port, self._ready_s = checkpoint, options, port, ready_s
        self.log_path = log or Path(tempfile.mkdtemp()) / "log"
        self.process: subprocess.Popen[bytes] | None = None
        self.url = ""

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> float:
        """Start it and wait until it is ready; the seconds that it took."""
        began = time.perf_counter()
        offset = self.log_path.stat().st_size if self.log_path.exists() else 0
        command = [sys.executable, "-m", "saccade", "serve", self._checkpoint, "--port", self._port, *self._options]
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(list(map(str, command)), stdout=log, stderr=subprocess.STDOUT)
        while not (found := re.search(rb"^(http://\S+:(\d+))", self.log_path.read_bytes()[offset:], re.M)):
            self._check_alive(began)
        self.url, self._port = found[1].decode(), int(found[2])
        while not self.is_ready():
            self._check_alive(began)
        return time.perf_counter() - began

    def _check_alive(self, began: float) -> None:
        assert self.process is not None, "it was started"
        if self.process.poll() is not None or time.perf_counter() - began > self._ready_s:
            raise RuntimeError(f"the server did not start:\n{self.log_path.read_text(errors='replace')[-3000:]}")
        time.sleep(0.02)

    def is_ready(self) -> bool:
        """Whether it can serve requests."""
        with suppress(OSError, urllib.error.URLError), urllib.request.urlopen(f"{self.url}/ready", timeout=5) as answer:
            return bool(answer.status == 200)
        return False

    def kill(self) -> None:
        """Kill the front with SIGKILL."""
        assert self.process is not None, "it was started"
        self.process.kill()
        self.process.wait()

    def stop(self) -> int | None:
        """Drain and end it; its exit status."""
        if self.process is None:
            return None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(180)
        except subprocess.TimeoutExpired:
            self.kill()
            return None

    @property
    def pids(self) -> list[int]:
        """The front and all its descendants."""
        assert self.process is not None, "it was started"
        return [self.process.pid, *descendants(self.process.pid)]

    def find(self, marker: str) -> list[int]:
        """Descendants with this text in their command line."""
        return [pid for pid in self.pids[1:] if marker in command_line(pid)]

    def holdings(self) -> Holdings:
        """What its processes hold now."""
        return holdings(self.pids)


@contextmanager
def running_server(
    checkpoint: Path, folder: Path, options: Sequence[object] = (), ready_s: float = 300
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """The URL of a server that is ready, and its process. Its log is `folder/server.log`."""
    with ServerProcess(checkpoint, *options, log=folder / "server.log", ready_s=ready_s) as server:
        assert server.process is not None, "it was started"
        yield server.url, server.process


def descendants(pid: int) -> list[int]:
    """Processes below this one."""
    found, waiting = [], [pid]
    while waiting:
        with suppress(OSError):
            for task in Path(f"/proc/{waiting.pop()}/task").iterdir():
                children = [int(child) for child in (task / "children").read_text().split()]
                found += children
                waiting += children
    return found


def command_line(pid: int) -> str:
    """The words of a process, or nothing if it has ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""


def holdings(pids: Sequence[int]) -> Holdings:
    """What processes hold together."""
    num_fds, num_threads, rss, memory_files, num_alive = 0, 0, 0, set(), 0
    for pid in pids:
        with suppress(OSError):
            for fd in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    if "memfd" in str(fd.readlink()):
                        memory_files.add(fd.stat().st_ino)
                    else:
                        num_fds += 1
            status = Path(f"/proc/{pid}/status").read_text()
            num_alive += 1
            num_threads += int(re.search(r"Threads:\s+(\d+)", status)[1])  # type: ignore[index]
            rss += 1024 * int((re.search(r"VmRSS:\s+(\d+)", status) or [0, 0])[1])
    return Holdings(num_alive, num_fds, len(memory_files), num_threads, rss)


def is_alive(pid: int) -> bool:
    """Whether a process runs."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def kill(pid: int) -> None:
    """Kill a process, if it still runs."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
