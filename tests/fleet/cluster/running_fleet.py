"""`saccade fleet up` in a process, on a free port and with a Ray of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx

READY_S = 120.0


def free_port():
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return opened.getsockname()[1]


class RunningFleet:
    """A fleet of one model, ready when the block is entered."""

    def __init__(self, folder, checkpoint, *, name="test", num_engines=2, num_fronts=1, engine=None, more=""):
        """`more`: further TOML of the model, such as probes."""
        self.folder, self.port = Path(folder), free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log_path = self.folder / "fleet.log"
        settings = {"num_workers": 1, "core_process": True, "num_pages": 400, "max_length": 1000} | (engine or {})
        inline = ", ".join(f"{key} = {json.dumps(value)}" for key, value in settings.items())
        self.file = self.folder / "FLEET.toml"
        self.file.write_text(f"""
name = "{name}"
state = "{self.folder / "state"}"

[server]
port = {self.port}

[front]
min_replicas = {num_fronts}
max_replicas = {num_fronts}
cpus_per_replica = 0.1

[[models]]
name = "tiny"
engines = {{ min_replicas = {num_engines}, max_replicas = {num_engines}, cpus_per_replica = 0.1 }}
{more}

[[models.versions]]
name = "v1"
checkpoint = "{checkpoint}"
traffic = 100
gpus_per_replica = 0
engine = {{ {inline} }}
""")

    def __enter__(self):
        self._temporary = tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp")
        environment = os.environ | {"RAY_TMPDIR": self._temporary.name}
        with self.log_path.open("wb") as log:
            command = [sys.executable, "-m", "saccade", "fleet", "up", str(self.file)]
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, process_group=0)
        try:
            self.wait_until_ready()
        except BaseException:
            self.process.kill()
            raise
        return self

    @property
    def log(self):
        return self.log_path.read_text(errors="replace")

    def is_ready(self):
        try:
            return httpx.get(f"{self.url}/ready", timeout=5).status_code == 200
        except httpx.HTTPError:
            return False

    def wait_until_ready(self):
        deadline = time.monotonic() + READY_S
        while not (self.is_ready() and self._num_ready() > 0):
            assert self.process.poll() is None, self.log
            assert time.monotonic() < deadline, self.log
            time.sleep(0.2)

    def _num_ready(self):
        found = re.findall(r"^saccade:fleet_replicas_ready\{.*\} (\S+)$", self.metrics(), re.M)
        return sum(float(one) for one in found)

    def metrics(self):
        return httpx.get(f"{self.url}/metrics", timeout=10).text

    def chat(self, content="hello", **fields):
        body = {"model": "tiny", "messages": [{"role": "user", "content": content}], "max_tokens": 8} | fields
        return httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=60)

    def __exit__(self, *_):
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        finally:
            self._temporary.cleanup()
