"""`saccade serve` in a process of its own, for benchmarks and fuzzing."""

import contextlib
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path


@contextlib.contextmanager
def running_server(
    checkpoint: Path, folder: Path, options: Sequence[object] = (), ready_s: float = 300
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Yield the URL of a server that is ready, and its process. Its log is `folder/server.log`."""
    log = folder / "server.log"
    command = [sys.executable, "-m", "saccade", "serve", checkpoint, "--port", 0, *options]
    with log.open("wb") as output:
        process = subprocess.Popen([str(word) for word in command], stdout=output, stderr=subprocess.STDOUT)
    try:
        yield _wait_until_ready(process, log, ready_s), process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_ready(process: subprocess.Popen[bytes], log: Path, ready_s: float) -> str:
    deadline = time.monotonic() + ready_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server has ended:\n{log.read_text()}")
        found = re.search(r"^(http://\S+)", log.read_text(), re.M)
        if found:
            with contextlib.suppress(urllib.error.URLError), urllib.request.urlopen(f"{found[1]}/ready"):
                return found[1]
        time.sleep(0.1)
    raise RuntimeError(f"the server was not ready after {ready_s:.0f} s:\n{log.read_text()}")
