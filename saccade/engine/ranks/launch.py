"""Start the ranks of a tensor-parallel engine, watch them, and end them.

    leader: start_ranks -> a process for each follower -> all join a process group -> load and warm up together -> lead

Ranks find each other through a file in memory that only this user can open, and gloo listens on the loopback interface
alone. torch's TCP store, which listens on all interfaces, is not used.

If a rank dies or hangs, no step can complete: the leader's process ends itself, as if it had crashed. The kernel then
kills the followers, and whoever started the engine restarts it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]

from saccade.device import resolve_device
from saccade.engine.config import EngineConfig
from saccade.engine.core.step_runner import DeviceError, RankCounters
from saccade.engine.device.loading import load_runner
from saccade.engine.device.rank_exchange import RankExchange
from saccade.engine.device.results import StepHandle
from saccade.engine.device.runner import PixelScale, Runner
from saccade.engine.frames.connection import Connection
from saccade.engine.ranks.leading_runner import LeadingRunner
from saccade.engine.ranks.reports import Reports
from saccade.errors import ConfigError, UserError
from saccade.log import logs_json
from saccade.workers.messages import decode_error
from saccade.workers.shared_memory import SharedMemory

logger = logging.getLogger(__name__)

_MAIN = "import gc; gc.disable(); from saccade.engine.ranks.follower import main; main()"
"""Program of a follower. Garbage collection is off until it is loaded: it would slow down the imports."""
_LOADING_S = 1800.0
"""Time limit for collectives while the ranks load. After that, `rank_timeout_s` applies."""
_CLOSE_S = 10.0
_POLL_S = 0.2
"""Interval at which the leader looks for steps that take too long."""
DIED_STATUS = 70
"""Exit status of a leader whose follower died or hung."""


def rank_devices(device: str | torch.device, num_ranks: int) -> list[str]:
    """The device of each rank: GPUs from the given one on, or the CPU for all."""
    resolved = resolve_device(device)
    if resolved.type == "cpu":
        return ["cpu"] * num_ranks
    first, num_gpus = resolved.index or 0, torch.cuda.device_count()
    if first + num_ranks > num_gpus:
        raise ConfigError(
            f"tensor_parallel_size is {num_ranks}, but {num_gpus - first} GPUs are visible from {device} on. Lower it, "
            "or set CUDA_VISIBLE_DEVICES"
        )
    return [f"cuda:{index}" for index in range(first, first + num_ranks)]


def join_group(rank: int, devices: Sequence[str], store: str) -> RankExchange:
    """Join the process group of all ranks: NCCL, or gloo on a CPU or if two ranks share a GPU."""
    device, size = torch.device(devices[rank]), len(devices)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    uses_nccl = device.type == "cuda" and len(set(devices)) == size
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if uses_nccl else "gloo",
        store=FileStore(store, size),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=_LOADING_S),
        device_id=device if uses_nccl else None,
    )
    return RankExchange(rank, size, devices)


def allocated_bytes(device: str) -> int:
    """Memory of this process: on its GPU, or resident on a CPU."""
    if device == "cpu":
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return torch.cuda.memory_reserved(device)


def exit_process(reason: str) -> None:
    """End this process without waiting for anything: its device may never complete what is queued."""
    logger.critical("the engine stops: %s", reason)
    os._exit(DIED_STATUS)


class Ranks:
    """The followers' processes, from the leader's side, and the group that they form. Implements `Followers`."""

    def __init__(
        self, devices: Sequence[str], *, timeout_s: float, on_death: Callable[[str], None] = exit_process
    ) -> None:
        """Start a process for each device but the first, which is the leader's, and join them.

        `timeout_s`: how long a step may take. `on_death` is called from another thread when a rank dies or hangs.
        """
        self.devices, self._timeout_s, self._on_death = list(devices), timeout_s, on_death
        self._reports, self._store = Reports(len(devices)), SharedMemory()
        self._death: str | None = None
        self._is_closing = self._is_serving = False
        self._number = 0  # of the last command
        self._busy_since: float | None = None  # since a command was sent that is not finished
        self._watched: tuple[StepHandle, float] | None = None
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        self._sockets: list[socket.socket] = []
        self._loaded = [threading.Event() for _ in devices]
        self._errors: dict[int, dict[str, Any]] = {}
        try:
            for rank in range(1, len(devices)):
                self._start(rank)
            self._watcher = threading.Thread(target=self._watch_all, name="saccade-ranks", daemon=True)
            self._watcher.start()
            self.exchange = join_group(0, devices, self._store_path)
        except BaseException:
            self.kill()
            raise

    @property
    def _store_path(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self._store.fd}"

    def _start(self, rank: int) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            fds = [theirs.fileno(), self._reports.fd]
            command = [sys.executable, "-c", _MAIN, *map(str, fds), str(os.getpid())]
            environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
            if self.devices[rank] == "cpu":
                environment.setdefault("OMP_NUM_THREADS", str(threads_per_rank(len(self.devices))))
            self._processes.append(
                subprocess.Popen(command, pass_fds=fds, env=environment, process_group=0)  # noqa: S603  our module
            )
        self._sockets.append(ours)
        self._connections.append(Connection(ours))
        setup = {"rank": rank, "devices": self.devices, "store": self._store_path, "logs_json": logs_json()}
        self._connections[-1].send(setup)

    # -------------------------------------------------------------- load

    def load(
        self, folder: str | Path, config: EngineConfig, *, pixels: PixelScale, dtype: str | torch.dtype | None
    ) -> Runner:
        """Load a checkpoint folder on every rank. Returns the leader's runner. Raises the error of any rank."""
        self._is_serving = False
        for event in self._loaded:
            event.clear()
        name = None if dtype is None else str(dtype).removeprefix("torch.")
        self.note("load", (str(folder), dataclasses.asdict(config), [list(pixels.mean), list(pixels.std)], name))
        error: BaseException | None = None
        try:
            runner = load_runner(
                folder, config, pixels=pixels, device=self.devices[0], dtype=dtype, exchange=self.exchange,
                kind=LeadingRunner,
            )  # fmt: skip
        except BaseException as failed:
            error = failed
        for event in self._loaded[1:]:
            event.wait(_CLOSE_S if error is not None else None)
        if self._errors and not isinstance(error, UserError):
            rank, message = min(self._errors.items())
            raise decode_error(message, f"rank {rank} could not load the model") from error
        if error is not None:
            raise error
        if self._death is not None:
            raise RuntimeError(f"the engine could not be loaded: {self._death}; its output is above")
        assert isinstance(runner, LeadingRunner), "as asked"
        self._is_serving = True
        self._reports.set_bytes(0, allocated_bytes(self.devices[0]))
        runner.lead(self)
        return runner

    # -------------------------------------------------------------- commands

    def note(self, name: str, arguments: Any, fds: Sequence[int] = ()) -> None:
        """See `Followers`."""
        self._send(name, 0, arguments, fds)

    def command(self, name: str, arguments: Any, fds: Sequence[int] = ()) -> int:
        """See `Followers`."""
        self._busy_since = time.monotonic()
        self._number += 1
        self._send(name, self._number, arguments, fds)
        return self._number

    def _send(self, name: str, number: int, arguments: Any, fds: Sequence[int]) -> None:
        try:
            for connection in self._connections:
                connection.send((name, number, arguments), fds)
        except ConnectionError as error:
            raise DeviceError(self._death or "a rank is gone") from error

    def wait(self, number: int) -> list[int]:
        """See `Followers`."""
        try:
            return self._reports.wait(number, self._check)
        finally:
            self._busy_since = None

    def _check(self) -> None:
        if self._death is not None:
            raise DeviceError(self._death)

    def watch(self, step: StepHandle) -> None:
        """See `Followers`."""
        self._watched = step, time.monotonic()

    def counters(self) -> tuple[RankCounters, ...]:
        """See `Followers`."""
        reports = self._reports
        return tuple([RankCounters(reports.num_bytes(rank), reports.wait_s[rank]) for rank in range(len(self.devices))])

    # -------------------------------------------------------------- death

    def _watch_all(self) -> None:
        """Read the replies of followers, and notice when one of them dies or hangs."""
        with selectors.DefaultSelector() as selector:
            for rank, ours in enumerate(self._sockets, start=1):
                selector.register(ours, selectors.EVENT_READ, rank)
            while not self._is_closing and self._death is None:
                for key, _ in selector.select(_POLL_S):
                    self._read(key.data)
                if (hung := self._hang()) is not None:
                    self._die(hung)

    def _read(self, rank: int) -> None:
        try:
            message, _ = self._connections[rank - 1].receive()
        except (EOFError, OSError):
            if not self._is_closing:
                self._die(f"rank {rank}'s process died")
            return
        if "error" in message:
            self._errors[rank] = message
        self._loaded[rank].set()

    def _hang(self) -> str | None:
        """What hangs, if anything does."""
        if not self._is_serving:
            return None
        now, since, watched = time.monotonic(), self._busy_since, self._watched
        is_late = since is not None and now - since > self._timeout_s
        if watched is not None and now - watched[1] > self._timeout_s:
            is_late = is_late or not watched[0].is_done
        if not is_late:
            return None
        done = [self._reports.last_command(rank) for rank in range(1, len(self.devices))]
        slowest = 1 + done.index(min(done))
        return f"a step took more than {self._timeout_s:.0f} s; rank {slowest} has finished the fewest commands"

    def _die(self, reason: str) -> None:
        self._death = reason
        for event in self._loaded:
            event.set()
        if not self._errors:
            self._on_death(reason)

    # -------------------------------------------------------------- end

    def unload(self) -> None:
        """Have the followers drop their runners, so that they can load again."""
        self._is_serving, self._watched = False, None
        with contextlib.suppress(DeviceError):
            self.note("close", None)

    def close(self) -> None:
        """See `Followers`."""
        self._is_closing, self._watched = True, None
        for connection in self._connections:
            connection.shut_down(socket.SHUT_WR)
        if dist.is_initialized():
            dist.destroy_process_group()
        deadline = time.monotonic() + _CLOSE_S
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """End the processes without waiting for what they do."""
        self._is_closing = True
        for process in self._processes:
            process.kill()
            process.wait()
        if hasattr(self, "_watcher"):
            self._watcher.join()
        for connection in self._connections:
            connection.close()

    @property
    def pids(self) -> list[int]:
        """Process ids of the followers, by rank from 1."""
        return [process.pid for process in self._processes]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def threads_per_rank(num_ranks: int) -> int:
    """Threads of a rank on a CPU, so that all ranks together have one per core."""
    return max(1, len(os.sched_getaffinity(0)) // num_ranks)
