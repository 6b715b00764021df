"""A worker for the tests of the worker pool: it does what a message asks for."""

import os
import signal
import time
from pathlib import Path

from saccade.errors import ConfigError
from saccade.workers.messages import encode_error, receive, send


def initialize(config):
    if "error" in config:
        raise ConfigError(config["error"])
    died = Path(config.get("dies_once", "/"))
    if config.get("dies") or not died.exists():
        if "dies_once" in config:
            died.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return run_worker, {"config": config}


def run_worker(connection):
    while (message := receive(connection)) is not None:
        if "raise" in message:
            send(connection, encode_error({"user": ConfigError("bad"), "bug": KeyError("bug")}[message["raise"]]))
        elif "bytes" in message:
            connection.sendall(bytes(message["bytes"]))
        else:
            time.sleep(message.get("sleep", 0))
            if message.get("exit"):
                os._exit(1)
            send(connection, {"pid": os.getpid(), "echo": message.get("echo")})
