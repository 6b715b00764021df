"""Run a server in a process, for benchmarks and tests: start it, wait until it is ready, stop it."""

import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Self


class ServerProcess:
    """`saccade serve` on a port.

    After it was killed it can be started again on the same port, as a service manager does.
    """

    def __init__(self, checkpoint: Path, *options: object, log: Path | None = None, ready_s: float = 300.0) -> None:
        self._checkpoint, self._options, self._port, self._ready_s = checkpoint, options, 0, ready_s
        self.log_path = log or Path(tempfile.mkdtemp()) / "log"
        self.url = ""

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> float:
        """Start it and wait; return the seconds that this took."""
        began = time.perf_counter()
        offset = self.log_path.stat().st_size if self.log_path.exists() else 0
        command = [sys.executable, "-m", "saccade", "serve", self._checkpoint, "--port", self._port, *self._options]
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(list(map(str, command)), stdout=log, stderr=subprocess.STDOUT)
        try:
            while not (found := re.search(rb"^(http://\S+:(\d+))", self.log_path.read_bytes()[offset:], re.M)):
                self._check_alive(began)
            self.url, self._port = found[1].decode(), int(found[2])
            while not self.is_ready():
                self._check_alive(began)
        except BaseException:
            self.kill()
            raise
        return time.perf_counter() - began

    def _check_alive(self, began: float) -> None:
        if self.process.poll() is not None or time.perf_counter() - began > self._ready_s:
            raise RuntimeError(f"the server did not start:\n{self.log[-3000:]}")
        time.sleep(0.02)

    def is_ready(self) -> bool:
        """Whether it can serve requests."""
        with suppress(OSError, urllib.error.URLError), urllib.request.urlopen(f"{self.url}/ready", timeout=5) as answer:
            return bool(answer.status == 200)
        return False

    @property
    def log(self) -> str:
        """Text that it has logged so far."""
        return self.log_path.read_text(errors="replace")

    def kill(self) -> None:
        """Kill the front with SIGKILL."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        """Drain and end it, or kill it if that takes long; return its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            return self.process.wait(self._ready_s)
        self.kill()
        return self.process.wait()
