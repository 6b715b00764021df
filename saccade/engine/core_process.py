"""The engine core in a process of its own: its interpreter is not shared with tokenizing, image handling and HTTP.

    front end  --frames-->  core process: load, warm up, serve  --frames-->  front end

A frame is a length and a msgpack message of plain data, never a pickle. Patches travel as shared memory, one file descriptor per image,
beside the frame. If the front end dies, the kernel kills the core process. If the core process dies, every open request fails.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import gc
import logging
import math
import mmap
import os
import queue
import socket
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from saccade.device import resolve_device
from saccade.engine.config import EngineConfig
from saccade.engine.core import (
    AddAdapter,
    AddRequest,
    CoreInfo,
    EndRequest,
    FlushCaches,
    Message,
    RemoveAdapter,
    StartProfile,
    Statistics,
    StopProfile,
)
from saccade.engine.core_thread import Inbox, OnOutputs, OnStop, run_core
from saccade.engine.prompt import PromptImage, TokenPrompt
from saccade.engine.request import (
    Failure,
    ImageSpan,
    Request,
    RequestOutput,
    SamplingParams,
    TokenLogprobs,
    new_output,
)
from saccade.fork_server import decode_error, encode_error, follow_parent
from saccade.log import logs_json, set_up_logging
from saccade.shared_memory import SharedMemory
from saccade.startup import QuickExit

logger = logging.getLogger(__name__)

_MAX_FDS = 250
"""File descriptors of a frame; the kernel's limit is 253."""
_MAX_SHARED_IMAGES = 256
"""Images whose shared memory is kept for the next request with them."""
_MAX_SHARED_BYTES = 512 * 2**20
"""Their size; a long video alone has a gigabyte."""
_CLOSE_S = 10.0
_CPU_ENVIRONMENT = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1", "GOMP_SPINCOUNT": "10000"}
"""Of a core that computes on the CPU, unless set by the user. Weights in huge pages: one decode step reads all of them, at 28 GB/s instead of
19 (two cores, fp32). Idle OpenMP threads sleep after about 0.1 ms instead of 4: alone no slower, beside other work several times as fast."""
_MAIN = "import gc; gc.disable(); from saccade.engine.core_process import main; main()"
"""Until the core is loaded nothing is collected: collections while torch is imported take a seventh of the time and find nothing."""
_DIED = Failure("running", "the engine core's process died; restart the engine", "engine_stopped")


# ------------------------------------------------------------------ frames


class Connection:
    """One end of a socket that carries frames. `send` may be called by several threads, `receive` by one."""

    def __init__(self, connection: socket.socket) -> None:
        import msgpack

        self._socket, self._lock = connection, threading.Lock()
        # Outputs are tuples, with a Failure or TokenLogprobs in few of them.
        self._pack: Callable[[Any], bytes] = msgpack.Packer(use_bin_type=True, default=dataclasses.astuple).pack
        self._unpack = msgpack.unpackb

    def send(self, message: Any, fds: Sequence[int] = ()) -> None:
        """Send a message and file descriptors. OSError: the other end is gone."""
        with self._lock:
            data = self._pack(message)
            header = len(data).to_bytes(8, "little") + len(fds).to_bytes(8, "little")
            if fds:
                socket.send_fds(self._socket, [header], fds)
                self._socket.sendall(data)
            else:
                self._socket.sendall(header + data)

    def receive(self, *, as_tuples: bool = False) -> tuple[Any, list[int]]:
        """The next message and its file descriptors; arrays are lists, or tuples. EOFError: the other end is gone."""
        header, fds, _, _ = socket.recv_fds(self._socket, 16, _MAX_FDS)
        while len(header) < 16:
            header += self._read(16 - len(header))
        size, num_fds = int.from_bytes(header[:8], "little"), int.from_bytes(header[8:], "little")
        assert len(fds) == num_fds, "file descriptors were lost on the way"
        message = self._unpack(self._read(size), raw=False, strict_map_key=False, use_list=not as_tuples)
        return message, list(fds)

    def _read(self, size: int) -> bytes:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            num_read = self._socket.recv_into(view)
            if num_read == 0:
                raise EOFError("the other end is gone")
            view = view[num_read:]
        return bytes(data)

    def close(self) -> None:
        """End both directions."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


_ADMINISTRATION: dict[str, type[FlushCaches | StartProfile | StopProfile | AddAdapter | RemoveAdapter]] = {
    kind.__name__: kind for kind in (FlushCaches, StartProfile, StopProfile, AddAdapter, RemoveAdapter)
}


def _encode_message(message: Message) -> dict[str, Any]:
    if isinstance(message, EndRequest):
        return {"type": "end", **dataclasses.asdict(message)}
    if not isinstance(message, AddRequest):
        return {"type": type(message).__name__, **dataclasses.asdict(message)}
    request, prompt = message.request, message.prompt
    fields = {field.name: getattr(request, field.name) for field in dataclasses.fields(request)}
    return {
        "type": "add",
        "request": fields
        | {
            "token_ids": np.asarray(prompt.token_ids, np.int32).tobytes(),
            "images": [],
            "sampling": dataclasses.asdict(request.sampling),
            "stop_ids": list(request.stop_ids),
        },
        "positions": np.ascontiguousarray(prompt.positions, np.int64).tobytes(),
        "images": [
            {"span": dataclasses.asdict(image.span), "grid": image.grid, "shape": image.patches.shape}
            for image in prompt.images
        ],
    }


def _decode_message(message: dict[str, Any], fds: Sequence[int]) -> Message:
    if message["type"] == "end":
        return EndRequest(request_id=message["request_id"], reason=message["reason"])
    if message["type"] in _ADMINISTRATION:
        return _ADMINISTRATION[message.pop("type")](**message)
    images = tuple(
        PromptImage(
            span=ImageSpan(**image["span"]), grid=tuple(image["grid"]), patches=_map_patches(fd, tuple(image["shape"]))
        )
        for image, fd in zip(message["images"], fds, strict=True)
    )
    fields = message["request"]
    token_ids = np.frombuffer(fields["token_ids"], np.int32).tolist()
    request = Request(
        **fields
        | {
            "token_ids": token_ids,
            "images": tuple([image.span for image in images]),
            "sampling": SamplingParams(**fields["sampling"]),
            "stop_ids": frozenset(fields["stop_ids"]),
        }
    )
    positions = np.frombuffer(message["positions"], np.int64).reshape(3, -1)
    return AddRequest(request=request, prompt=TokenPrompt(token_ids=token_ids, positions=positions, images=images))


def _map_patches(fd: int, shape: tuple[int, ...]) -> Any:
    """The patches in shared memory, read only. The mapping lives as long as the array."""
    try:
        memory = mmap.mmap(fd, math.prod(shape), prot=mmap.PROT_READ)
    finally:
        os.close(fd)
    return np.frombuffer(memory, np.uint8).reshape(shape)


def decode_outputs(outputs: Sequence[tuple[Any, ...]]) -> list[RequestOutput]:
    """Outputs of the fields that they were sent as."""
    return [_decode_output(fields) for fields in outputs]


def _decode_output(fields: tuple[Any, ...]) -> RequestOutput:
    _, _, logprobs, prompt_logprobs, _, failure, _, _ = fields
    output = new_output(fields)
    if not (logprobs or prompt_logprobs or failure):
        return output
    return output._replace(
        logprobs=_decode_logprobs(logprobs),
        prompt_logprobs=_decode_logprobs(prompt_logprobs),
        failure=Failure(*failure) if failure else None,
    )


def _decode_logprobs(tokens: tuple[Any, ...]) -> tuple[TokenLogprobs, ...]:
    return tuple([TokenLogprobs(token_id, logprob, list(top)) for token_id, logprob, top in tokens])


# ------------------------------------------------------------------ the front end's side


class CoreProcess:
    """A core in a process of its own. `send` may be called from any thread; `on_outputs` is called from a reader thread."""

    def __init__(
        self,
        folder: Path,
        config: EngineConfig,
        device: str,
        dtype: str | None,
        on_outputs: OnOutputs,
        on_stop: OnStop,
    ) -> None:
        """Start it and wait until it is ready. Raises what loading raised."""
        self._on_outputs, self._on_stop = on_outputs, on_stop
        self._shared: OrderedDict[bytes, SharedMemory] = OrderedDict()
        self._num_shared_bytes = 0
        self._shared_lock = threading.Lock()
        self._is_closing = False
        self._statistics = Statistics()
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-c", _MAIN, str(theirs.fileno()), str(os.getpid())]
            environment = (_CPU_ENVIRONMENT if resolve_device(device).type == "cpu" else {}) | os.environ
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment)  # noqa: S603  our own module
        self._connection = Connection(ours)
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
        """Wait until the core is ready; returns what it says of itself."""
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
        """Of the core process."""
        return self._process.pid

    @property
    def statistics(self) -> Statistics:
        """Counters as of the last output."""
        return self._statistics

    def send(self, message: Message) -> None:
        """Send a message to the core. No effect when it is gone: its requests have failed."""
        fds = []
        with self._shared_lock:
            if isinstance(message, AddRequest):
                fds = [self._share(image) for image in message.prompt.images]
            with contextlib.suppress(OSError):
                self._connection.send(_encode_message(message), fds)
            self._evict_shared()

    def _share(self, image: PromptImage) -> int:
        """The file descriptor of an image's patches in shared memory. Recent ones are kept: prompts often share an image."""
        key, shared = image.span.key, self._shared.pop(image.span.key, None)
        if (
            shared is not None and shared.num_bytes() != image.patches.nbytes
        ):  # preprocessed again, by a worker that sent something else
            self._num_shared_bytes -= shared.num_bytes()
            shared = None
        if shared is None:
            shared = SharedMemory()
            self._num_shared_bytes += shared.write(np.ascontiguousarray(image.patches), 0)
        self._shared[key] = shared  # the most recently used is last
        return shared.fd

    def _evict_shared(self) -> None:
        """Free the least recently used; the core has its own descriptors of those it still needs."""
        while len(self._shared) > _MAX_SHARED_IMAGES or self._num_shared_bytes > _MAX_SHARED_BYTES:
            _, memory = self._shared.popitem(last=False)
            self._num_shared_bytes -= memory.num_bytes()

    def close(self) -> None:
        """Stop the core. Open requests get no more output."""
        self._is_closing = True
        with contextlib.suppress(OSError):
            self._connection.send({"type": "stop"})
        try:
            self._process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()
        self._connection.close()

    def _read(self) -> None:
        try:
            while True:
                message, _ = self._connection.receive(as_tuples=True)
                self._statistics = Statistics(**message["statistics"])
                if message["outputs"]:
                    self._on_outputs(decode_outputs(message["outputs"]))
        except (EOFError, OSError):
            if not self._is_closing:
                self._on_stop(_DIED)


# ------------------------------------------------------------------ the core's side


def serve(connection: Connection) -> None:
    """Load a core as the first frame specifies, then serve until the connection ends."""
    from saccade.engine.core import EngineCore
    from saccade.engine.engine import grammars_of
    from saccade.engine.loading import load_runner
    from saccade.engine.runner import PixelScale
    from saccade.processor import Processor

    setup, _ = connection.receive()
    if resolve_device(setup["device"]).type != "cpu":  # where a start takes long anyway
        import torch._dynamo  # noqa: F401  the profiler needs it: imported on demand, it stalls requests for a second
    if setup["logs_json"]:
        set_up_logging(as_json=True)
    try:
        processor = Processor.load(setup["folder"])
        images = processor.images
        grammars = grammars_of(Path(setup["folder"]), processor)
        runner = load_runner(
            setup["folder"],
            EngineConfig(**setup["config"]),
            pixels=PixelScale(mean=images.mean, std=images.std),
            device=setup["device"],
            dtype=setup["dtype"],
        )
    except Exception as error:
        connection.send(encode_error(error))
        return
    core = EngineCore(runner, grammars=grammars)
    gc.collect()
    gc.enable()
    gc.freeze()  # a full collection over all that torch has imported would take 0.1 s between two steps
    atexit.register(gc.unfreeze)  # else Triton's bindings report leaks
    connection.send({"info": dataclasses.asdict(core.info)})
    inbox: Inbox = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, inbox), name="saccade-core-reader", daemon=True).start()

    def emit(outputs: Sequence[RequestOutput]) -> None:
        connection.send({"outputs": outputs, "statistics": vars(core.statistics)})

    run_core(core, inbox, emit)


def _receive(connection: Connection, inbox: Inbox) -> None:
    """Put messages into the inbox until the connection ends."""
    try:
        while True:
            message, fds = connection.receive()
            if message["type"] == "stop":
                break
            inbox.put(_decode_message(message, fds))
    except (EOFError, OSError):
        pass
    finally:
        inbox.put(None)


def main() -> None:
    """The core process: its arguments are the file descriptor of the connection and the process id of the front end."""
    quick_exit = QuickExit()
    set_up_logging()
    follow_parent(int(sys.argv[2]))
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        serve(Connection(socket.socket(fileno=int(sys.argv[1]))))
    quick_exit.status = 0
