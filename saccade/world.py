"""The processes that train together: who this one is, and the few things they say to each other.

    with open_world() as world:
        total = world.all_sum(tensor)

`torchrun` starts the processes and tells each its place in environment variables; without them the world is one process, which
needs no network. GPUs talk by NCCL. Every world of several also has a gloo group on the CPU, for what is said beside the
training step: small JSON values, and the bookkeeping of a save in the background.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore, PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from saccade.device import resolve_device
from saccade.errors import ConfigError

TIMEOUT_S = 600.0
"""How long a rank waits for another in a collective. A step takes seconds; reading a large checkpoint, minutes."""

FLIGHT_RECORDER_EVENTS = 2000
"""Collectives NCCL remembers per rank, so that the watchdog can say at which one a run stands."""


@dataclass(frozen=True)
class World:
    """This process among those that train together."""

    rank: int
    """0 .. size - 1, one per process; rank 0 is the main one, which writes and logs."""
    size: int
    """Processes in all."""
    local_rank: int
    """The process's number on its machine, and so the number of its GPU."""
    device: torch.device
    """Where this process computes."""
    cpu_group: dist.ProcessGroup | None = field(default=None, repr=False, compare=False)
    """The ranks' gloo group; None in a world of one."""

    @property
    def is_main(self) -> bool:
        """Whether this is the process that writes and logs."""
        return self.rank == 0

    def all_sum(self, tensor: Tensor) -> Tensor:
        """The sum of the ranks' tensors, in place and on every rank; the host does not wait for it on a GPU."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def barrier(self, *, timeout_s: float | None = None) -> None:
        """Wait until every rank is here; for work that may take long on one of them, with more patience than usual."""
        if timeout_s is None:
            self.broadcast(None)
        elif self.size > 1:
            dist.monitored_barrier(self.cpu_group, timeout=timedelta(seconds=timeout_s))

    def any(self, value: bool) -> bool:
        """Whether `value` is true on any rank. Synchronizes the host with the device."""
        if self.size == 1:
            return value
        return bool(self.all_sum(torch.tensor(float(value), device=self.device)) > 0)

    def broadcast(self, value: Any) -> Any:
        """Rank 0's JSON value, on every rank."""
        return self.gather(value if self.is_main else None)[0]

    def gather(self, value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
        """Every rank's JSON value, on every rank, in their order. The host waits: not for the inside of a step."""
        if self.size == 1:
            return [value]
        group = group or self.cpu_group
        text = json.dumps(value).encode()
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([len(text)]), group=group)
        longest = max(int(length) for length in lengths)
        texts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.size)]
        mine = torch.zeros(longest, dtype=torch.uint8)
        mine[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        dist.all_gather(texts, mine, group=group)
        return [json.loads(bytes(text[: int(length)].tolist())) for text, length in zip(texts, lengths, strict=True)]

    def new_cpu_group(self) -> dist.ProcessGroup:
        """Another gloo group of all ranks, for a thread of its own. Every rank must ask for it."""
        self.open_local_group()
        group: dist.ProcessGroup = dist.new_group(backend="gloo")
        return group

    def open_local_group(self) -> None:
        """Give a world of one the process group that sharding and saving ask for; it stays inside this process."""
        if not dist.is_initialized():
            backend = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"
            dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)


@contextmanager
def open_world(device: str | torch.device = "auto", *, timeout_s: float = TIMEOUT_S) -> Iterator[World]:
    """Join the processes the launcher started, leave them at the end."""
    rank, size, local_rank = _place()
    world = World(rank, size, local_rank, _device_of(device, local_rank))
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)
    try:
        yield _joined(world, timeout_s) if size > 1 else world
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _joined(world: World, timeout_s: float) -> World:
    """Meet the other ranks."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(FLIGHT_RECORDER_EVENTS))
    timeout = timedelta(seconds=timeout_s)
    store, _, _ = next(rendezvous("env://", world.rank, world.size, timeout=timeout))
    is_cuda = world.device.type == "cuda"
    dist.init_process_group(
        "nccl" if is_cuda else "gloo",
        store=_fresh(store, world.rank, world.size, timeout_s),
        rank=world.rank,
        world_size=world.size,
        timeout=timeout,
        device_id=world.device if is_cuda else None,
    )
    return replace(world, cpu_group=world.new_cpu_group())


def _fresh(store: Store, rank: int, size: int, timeout_s: float) -> Store:
    """A corner of the store in which no earlier life of the run has left anything.

    torchrun keeps one store over its restarts; addresses that dead processes wrote there would be taken for those of the living.
    So rank 0 names the corner, and a name counts once rank 0 has confirmed the secrets of all ranks alive now.
    """
    secret, deadline = secrets.token_hex(8), time.monotonic() + timeout_s
    if rank == 0:
        answers = [f"saccade/{secret}/{other}" for other in range(1, size)]
        store.set("saccade/corner", secret)
        store.wait(answers, timedelta(seconds=timeout_s))
        store.set(f"saccade/{secret}/confirmed", json.dumps([store.get(answer).decode() for answer in answers]))
        return PrefixStore(secret, store)
    while time.monotonic() < deadline:
        corner = store.get("saccade/corner").decode()
        store.set(f"saccade/{corner}/{rank}", secret)
        confirmed = f"saccade/{corner}/confirmed"
        if store.check([confirmed]) and json.loads(store.get(confirmed))[rank - 1] == secret:
            return PrefixStore(corner, store)
        time.sleep(0.02)
    raise ConfigError(f"rank {rank} has not met rank 0 within {timeout_s:.0f} s. Look at the logs of the other ranks")


def _place() -> tuple[int, int, int]:
    """Rank, size and local rank from the launcher's variables; one process without them."""
    if "WORLD_SIZE" not in os.environ and "RANK" not in os.environ:
        return 0, 1, 0
    size, rank = _number("WORLD_SIZE", at_least=1), _number("RANK")
    local_rank = _number("LOCAL_RANK") if "LOCAL_RANK" in os.environ else 0
    if rank >= size:
        raise ConfigError(f"environment variable RANK is {rank} in a world of {size}. Start through torchrun")
    if size > 1:
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if not os.environ.get(name):
                raise ConfigError(f"WORLD_SIZE is {size}, but {name} is not set. Start through torchrun")
        _number("MASTER_PORT")
    return rank, size, local_rank


def _number(name: str, at_least: int = 0) -> int:
    value = os.environ.get(name, "")
    if not (value.isascii() and value.isdigit() and int(value) >= at_least):
        raise ConfigError(
            f"environment variable {name} is {value!r}, not a number. Start through torchrun, or unset it"
        )
    return int(value)


def _device_of(device: str | torch.device, local_rank: int) -> torch.device:
    """The GPU of a process is the one with its local number, unless one is named."""
    resolved = resolve_device(device)
    if resolved == torch.device("cuda"):
        return resolve_device(f"cuda:{local_rank}")
    return resolved
