"""Run a fleet in a process, for benchmarks and tests: `saccade fleet up` on a free port, with a Ray of its own."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

ENGINE = {"num_workers": 1, "core_process": True, "num_pages": 400, "max_length": 1000}
"""Settings of a tiny engine."""
_END_S = 240.0
"""Seconds after Ctrl-C until a fleet must have ended; `fleet up` itself gives up waiting after 180."""


class FleetProcess:
    """A fleet of one model, ready when the block is entered."""

    def __init__(
        self, folder: Path, checkpoint: Path, *, name: str = "test", num_engines: int = 2, num_fronts: int = 1,
        engine: Mapping[str, Any] | None = None, model: str = "", version: str = "", gpus: float = 0.0,
        ready_s: float = 180.0,
    ) -> None:  # fmt: skip
        """`folder` gets the file, the state and the log. `model`: further TOML of the model, such as probes; `version`:
        of each version, such as costs. `gpus` of each engine.
        """
        self.folder, self._ready_s = folder, ready_s
        self.port = _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.file, self.log_path = folder / "FLEET.toml", folder / "fleet.log"
        self._version, self._gpus = version, gpus
        self._settings = ENGINE | dict(engine or {})
        self.head = f"""
name = "{name}"
state = "{folder / "state"}"
server = {{ port = {self.port} }}
front = {{ min_replicas = {num_fronts}, max_replicas = {num_fronts}, cpus_per_replica = 0.1 }}

[[models]]
name = "tiny"
engines = {{ min_replicas = {num_engines}, max_replicas = {num_engines}, cpus_per_replica = 0.1 }}
{model}
"""
        self.write(self.version("v1", checkpoint))

    def version(self, name: str, checkpoint: Path, traffic: float = 100) -> str:
        """TOML of a version."""
        engine = ", ".join(f"{key} = {json.dumps(value)}" for key, value in self._settings.items())
        return f"""
[[models.versions]]
name = "{name}"
checkpoint = "{checkpoint}"
traffic = {traffic}
gpus_per_replica = {self._gpus:g}
engine = {{ {engine} }}
{self._version}
"""

    def write(self, *versions: str) -> None:
        """Write the file with these versions."""
        self.file.write_text(self.head + "".join(versions))

    def __enter__(self) -> Self:
        self._temporary = tempfile.TemporaryDirectory(prefix="ray-")
        with self.log_path.open("ab") as log:
            command = [sys.executable, "-m", "saccade", "fleet", "up", str(self.file)]
            environment = os.environ | {"RAY_TMPDIR": self._temporary.name}
            self.process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=environment, process_group=0,
                preexec_fn=_take_ctrl_c,
            )  # fmt: skip
        try:
            self.wait_until_ready()
        except BaseException:
            self.process.kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> int:
        """End the fleet by Ctrl-C; returns its exit status."""
        self.process.send_signal(signal.SIGINT)
        try:
            return self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        finally:
            self._temporary.cleanup()

    @property
    def log(self) -> str:
        """Text that it has printed so far."""
        return self.log_path.read_text(errors="replace")

    def wait_until_ready(self) -> float:
        """Wait until a replica is ready; returns the seconds that it took."""
        began = time.perf_counter()
        while not (self._is_ready() and self.sample("saccade:fleet_replicas_ready") > 0):
            if self.process.poll() is not None or time.perf_counter() - began > self._ready_s:
                raise RuntimeError(f"the fleet did not start:\n{self.log[-3000:]}")
            time.sleep(0.1)
        return time.perf_counter() - began

    def _is_ready(self) -> bool:
        with suppress(OSError, urllib.error.URLError), urllib.request.urlopen(f"{self.url}/ready", timeout=5) as answer:
            return bool(answer.status == 200)
        return False

    def sample(self, name: str) -> float:
        """Sum of the samples of a metric."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as answer:
            page = answer.read().decode()
        return sum(float(value) for value in re.findall(rf"^{name}\{{.*\}} (\S+)$", page, re.MULTILINE))


def _take_ctrl_c() -> None:
    """A shell starts background jobs with SIGINT ignored, and their processes inherit that: `stop` would not end it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _free_port() -> int:
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        port: int = opened.getsockname()[1]
    return port
