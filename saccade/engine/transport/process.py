"""The engine core in its own process, so that tokenizing, image handling and HTTP do not share its interpreter.

    front end  --frames-->  core process: load, warm up, serve  --frames-->  front end

Frames carry msgpack messages of plain data, never a pickle. Patches are passed in shared memory, by file descriptors
that are sent with the frame (`frames/`). If a request cannot be sent or read, only that request
fails. If the front end dies, the kernel kills the core process. If the core process dies, or its outputs cannot be
read, every open request fails.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import gc
import logging
import os
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from saccade.engine.config import EngineConfig
from saccade.engine.core.messages import (
    AddAdapter,
    AddRequest,
    CoreInfo,
    EndRequest,
    FlushCaches,
    Message,
    RemoveAdapter,
    StartProfile,
    StopProfile,
)
from saccade.engine.core.statistics import Statistics
from saccade.engine.frames.connection import Connection
from saccade.engine.frames.plain import outputs_from_plain
from saccade.engine.frames.prompts import decode_prompt, encode_prompt
from saccade.engine.frames.shared_images import Place, SharedImages
from saccade.engine.request import Failure, RequestOutput
from saccade.engine.transport.spawn import SpawnedCore, is_cpu
from saccade.engine.transport.thread import OnOutputs, OnStop, run_core
from saccade.log import logs_json, set_up_logging
from saccade.workers.messages import decode_error, encode_error
from saccade.workers.process import QuickExit, follow_parent

logger = logging.getLogger(__name__)

_CLOSE_S = 10.0
_DIED = Failure("running", "the engine core's process died; restart the engine", "engine_stopped")
_UNREADABLE = Failure("running", "the engine core's outputs cannot be read; restart the engine", "engine_stopped")
_NO_RESOURCES = Failure(
    "waiting", "the engine core lacks memory or file descriptors for the request; try again later", "overloaded"
)
_NOT_READ = Failure("waiting", "the engine core could not read the request; other requests continue")


# ------------------------------------------------------------------ messages

_ADMINISTRATION: dict[str, type[FlushCaches | StartProfile | StopProfile | AddAdapter | RemoveAdapter]] = {
    kind.__name__: kind for kind in (FlushCaches, StartProfile, StopProfile, AddAdapter, RemoveAdapter)
}


def _encode_message(message: Message, places: Sequence[Place] = ()) -> dict[str, Any]:
    """A message as plain data. `places`: the patches of a request's images in shared memory."""
    if isinstance(message, EndRequest):
        return {"type": "end", **dataclasses.asdict(message)}
    if not isinstance(message, AddRequest):
        return {"type": type(message).__name__, **dataclasses.asdict(message)}
    return {"type": "add", **encode_prompt(message.request, message.prompt, places)}


def _decode_message(message: dict[str, Any], fds: Sequence[int]) -> Message:
    if message["type"] == "end":
        return EndRequest(request_id=message["request_id"], reason=message["reason"])
    if message["type"] in _ADMINISTRATION:
        return _ADMINISTRATION[message.pop("type")](**message)
    request, prompt = decode_prompt(message, fds)
    return AddRequest(request=request, prompt=prompt)


# ------------------------------------------------------------------ the front end's side


class CoreProcess:
    """A core in its own process. `send` may be called from any thread; `on_outputs` is called from a reader thread."""

    def __init__(
        self,
        folder: Path,
        config: EngineConfig,
        device: str,
        dtype: str | None,
        spawn: Callable[[bool], SpawnedCore],
        on_outputs: OnOutputs,
        on_stop: OnStop,
    ) -> None:
        """Start the process with `spawn` and wait until it is ready. Raises the errors of loading."""
        self._on_outputs, self._on_stop = on_outputs, on_stop
        self._shared = SharedImages()
        self._is_closing = False
        self._statistics = Statistics()
        spawned = spawn(is_cpu(device))
        self._process, self._connection = spawned.process, Connection(spawned.connection)
        try:
            ready = self._load(
                {
                    "folder": str(folder),
                    "config": dataclasses.asdict(config),
                    "device": device,
                    "dtype": dtype,
                    "logs_json": logs_json(),
                }
            )
        except BaseException:
            self._process.kill()
            self._process.wait()
            self._connection.close()
            raise
        self.info = CoreInfo(**ready["info"])
        self._reader = threading.Thread(target=self._read, name="saccade-core-reader", daemon=True)
        self._reader.start()

    def _load(self, setup: dict[str, Any]) -> dict[str, Any]:
        """Send the setup and wait until the core is ready. Returns its reply."""
        try:
            self._connection.send(setup)
            ready, _ = self._connection.receive()
        except (EOFError, OSError) as error:
            raise RuntimeError("the engine core's process died while loading; its output is above") from error
        if "error" in ready:
            raise decode_error(ready, "the engine core could not be loaded")
        loaded: dict[str, Any] = ready
        return loaded

    @property
    def pid(self) -> int:
        """Process id of the core process."""
        return self._process.pid

    @property
    def statistics(self) -> Statistics:
        """Counters as of the last output."""
        return self._statistics

    def send(self, message: Message) -> None:
        """Send a message to the core. A request that cannot be sent fails.

        No effect if the core process is gone: its requests have failed already.
        """
        with contextlib.suppress(ConnectionError):
            if not isinstance(message, AddRequest):
                self._connection.send(_encode_message(message))
                return
            try:
                segments, places = self._shared.share(message.prompt.images)
                self._connection.send(_encode_message(message, places), [segment.fd for segment in segments])
            except ConnectionError:
                raise
            except OSError as error:
                logger.warning("request %s could not be sent to the engine core: %r", message.request.id, error)
                self._on_outputs([_failed(message.request.id, _NO_RESOURCES)])

    def close(self) -> None:
        """Stop the core. Open requests get no more output."""
        self._is_closing = True
        self._connection.shut_down(socket.SHUT_WR)  # the core stops when it has read all messages
        try:
            self._process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()
        self._connection.close()

    def _read(self) -> None:
        failure = _DIED
        try:
            while True:
                message, _ = self._connection.receive()
                self._statistics = Statistics(**message["statistics"])
                if message["outputs"]:
                    self._on_outputs(outputs_from_plain(message["outputs"]))
        except (EOFError, OSError):
            pass
        except BaseException:
            logger.exception("the engine core's outputs cannot be read")
            failure = _UNREADABLE
            self._connection.shut_down()  # the core stops, as it can send no more
        if not self._is_closing:
            self._on_stop(failure)


# ------------------------------------------------------------------ the core's side


def serve(connection: Connection) -> None:
    """Load a core as the first frame specifies, then serve until the connection is closed."""
    from saccade.engine.load_core import load_core
    from saccade.processor import Processor

    setup, _ = connection.receive()
    if setup["logs_json"]:
        set_up_logging(as_json=True)
    try:
        config = EngineConfig(**setup["config"])
        processor = Processor.load(setup["folder"], chat_template=config.chat_template)
        core = load_core(Path(setup["folder"]), config, processor, device=setup["device"], dtype=setup["dtype"])
    except Exception as error:
        connection.send(encode_error(error))
        return
    gc.collect()
    gc.enable()
    gc.freeze()  # a full collection over all imported objects would take 0.1 s between two steps
    atexit.register(gc.unfreeze)  # otherwise Triton's bindings report leaks
    connection.send({"info": dataclasses.asdict(core.info)})
    threading.Thread(target=_receive, args=(connection, core.inbox), name="saccade-core-reader", daemon=True).start()

    def emit(outputs: Sequence[RequestOutput]) -> None:
        connection.send({"outputs": outputs, "statistics": vars(core.statistics)})

    run_core(core, emit)


def _receive(connection: Connection, inbox: queue.SimpleQueue[Any]) -> None:
    """Put messages into the inbox until the connection is closed. A request that cannot be read fails alone."""
    try:
        while True:
            message, fds = connection.receive()
            try:
                decoded = _decode_message(message, fds)
                if isinstance(decoded, StartProfile):
                    threading.Thread(target=_start_profile, args=(decoded, inbox), daemon=True).start()
                else:
                    inbox.put(decoded)
            except Exception as error:
                if message["type"] != "add":
                    raise
                request_id = message["request"]["id"]
                logger.warning("request %s cannot be read: %r", request_id, error, exc_info=error)
                inbox.put(_failed(request_id, _NO_RESOURCES if isinstance(error, OSError) else _NOT_READ))
            finally:
                for fd in fds:
                    os.close(fd)
    except (EOFError, ConnectionError):
        pass
    except BaseException:
        logger.exception("messages of the front end cannot be read; the engine core stops")
    finally:
        inbox.put(None)


def _start_profile(message: StartProfile, inbox: queue.SimpleQueue[Any]) -> None:
    """Import what the profiler needs, which takes seconds, while requests are served; then pass on the message."""
    import torch._dynamo  # noqa: F401

    inbox.put(message)


def _failed(request_id: str, failure: Failure) -> RequestOutput:
    return RequestOutput(request_id=request_id, finish_reason="failed", failure=failure)


def main() -> None:
    """Entry point of the core process. Arguments: file descriptor of the connection, process id of the front end."""
    quick_exit = QuickExit()
    set_up_logging()
    follow_parent(int(sys.argv[2]))
    with contextlib.suppress(ConnectionError):
        serve(Connection(socket.socket(fileno=int(sys.argv[1]))))
    quick_exit.status = 0
