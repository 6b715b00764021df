"""The distributed world: this process's rank, and a few collectives.

    with open_world() as world, world.arranged(ParallelDims(replicate=2, shard=4)) as world:
        total = world.all_sum(tensor)
        group = world.group("shard")          # ranks that differ in these axes of the layout only

`torchrun` starts the processes and passes ranks in environment variables; without them the world is one process, which
needs no network. GPUs use NCCL. A world of several ranks also has a gloo group on the CPU for communication outside the
training step: small JSON values, and asynchronous saves.
"""

from __future__ import annotations

import itertools
import json
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore, PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.rendezvous import rendezvous

from saccade.device import resolve_device
from saccade.errors import ConfigError
from saccade.parallel_dims import AXES, DATA, LOSS, Axis, ParallelDims

T = TypeVar("T")
TIMEOUT_S = 600.0
"""Timeout of collectives. A step takes seconds; loading a large checkpoint, minutes."""

FLIGHT_RECORDER_EVENTS = 2000
"""Size of NCCL's flight recorder per rank, which the watchdog dumps."""


# torch 2.13 renamed the collectives of one tensor and warns about the names that torch 2.11 has.
all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
"""(output, input, group=...): the inputs of all ranks, of equal sizes, one after another."""
reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
"""(output, input, group=...): this rank's part of the sum of the inputs of all ranks."""


_NUMBERS = itertools.count(1)
"""Numbers the layouts that this process has had."""


@dataclass(frozen=True)
class World:
    """This process and its world."""

    rank: int
    """0 .. size - 1; rank 0 is the main rank, which writes and logs."""
    size: int
    """Number of processes."""
    local_rank: int
    """Rank on this node, and index of its GPU."""
    device: torch.device
    """Device of this process."""
    local_size: int = 1
    """Number of ranks on this node."""
    store: Store | None = field(default=None, repr=False, compare=False)
    """Key-value store of all ranks; None in a world of one."""
    cpu_group: dist.ProcessGroup | None = field(default=None, repr=False, compare=False)
    """gloo group of all ranks; None in a world of one."""
    dims: ParallelDims = field(default_factory=ParallelDims)
    """The layout; every rank is a replica until `arranged` says otherwise."""
    _groups: dict[tuple[tuple[Axis, ...], str | None, int], dist.ProcessGroup] = field(
        default_factory=dict, repr=False, compare=False
    )
    """Process groups of the layout, by axes, backend and number; opened when they are first asked for."""

    _number: int = field(default=0, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.dims == ParallelDims():
            object.__setattr__(self, "dims", ParallelDims(replicate=self.size))

    @property
    def is_main(self) -> bool:
        """Whether this is the main rank, which writes and logs."""
        return self.rank == 0

    # -------------------------------------------------------------- the layout

    @contextmanager
    def arranged(self, dims: ParallelDims) -> Iterator[World]:
        """This world in a layout; its process groups are closed at the end."""
        assert dims.size == self.size, f"the layout {dims} is for {dims.size} ranks, not {self.size}"
        world = replace(self, dims=dims, _groups={}, _number=next(_NUMBERS))
        try:
            yield world
        finally:
            for group in world._groups.values():
                dist.destroy_process_group(group)

    def index(self, *axes: Axis) -> int:
        """Number of this rank in its group of these axes."""
        return self.dims.index(self.rank, *axes)

    @property
    def data_rank(self) -> int:
        """Which part of the data this rank reads; ranks that differ in context or tensor read the same part."""
        return self.index(*DATA)

    @property
    def num_data_ranks(self) -> int:
        """Number of parts of the data."""
        return self.dims.count(*DATA)

    @property
    def data_ranks_per_node(self) -> int:
        """Number of neighbouring data ranks that share a node."""
        return min(self.num_data_ranks, max(1, self.local_size // self.dims.count("context", "tensor")))

    @property
    def counts_data(self) -> bool:
        """Whether this rank reports the data of its data rank, so that a sum over all ranks has every part once."""
        return self.is_in_first(*DATA)

    def is_in_first(self, *axes: Axis) -> bool:
        """Whether this rank is in the first group of these axes, which has the main rank."""
        return self.index(*(axis for axis in AXES if axis not in axes)) == 0

    @property
    def counts_loss(self) -> bool:
        """Whether this rank reports the loss of its tokens; tensor ranks compute the same loss."""
        return self.index("tensor") == 0 and self.index("pipeline") == self.dims.pipeline - 1

    @property
    def num_loss_ranks(self) -> int:
        """Number of ranks that compute the loss of different tokens: gradients are averaged over them."""
        return self.dims.count(*LOSS)

    def group(self, *axes: Axis) -> dist.ProcessGroup | None:
        """The process group of ranks that differ from this one in these axes only; None if there is no other.

        The first call for a set of axes is collective over all ranks.
        """
        return None if self.dims.count(*axes) == 1 else self._open_group(axes)

    def separate_group(self, *axes: Axis, number: int = 0) -> dist.ProcessGroup | None:
        """`group` with a communicator of its own; another one for every `number`.

        Collectives of one group run one after another: in the group of FSDP a gather of keys would wait for the
        parameters of the next block.
        """
        if self.dims.count(*axes) == 1:
            return None
        return self._open_group(axes, backend=dist.get_backend(), number=number)

    def cpu_group_of(self, *axes: Axis) -> dist.ProcessGroup | None:
        """`group` for tensors on the CPU, which may be another one than that of the device."""
        if self.device.type == "cpu" or self.dims.count(*axes) == 1:
            return self.group(*axes)
        return self.cpu_group if self.dims.count(*axes) == self.size else self._open_group(axes, backend="gloo")

    @property
    def process_groups(self) -> Mapping[tuple[tuple[Axis, ...], str | None, int], dist.ProcessGroup]:
        """The groups that were opened, by axes, backend and number; that of all ranks is not among them."""
        return self._groups

    def _open_group(self, axes: tuple[Axis, ...], backend: str | None = None, number: int = 0) -> dist.ProcessGroup:
        self.open_local_group()
        key = tuple(axis for axis in AXES if axis in axes)
        if backend is None and self.dims.count(*key) == self.size:
            return cast(dist.ProcessGroup, dist.group.WORLD)
        if (key, backend, number) not in self._groups:
            lists, timeout = self.dims.groups(*key), timedelta(seconds=TIMEOUT_S)
            group, _ = dist.new_subgroups_by_enumeration(  # type: ignore[no-untyped-call]
                lists, timeout=timeout, backend=backend
            )
            self._groups[key, backend, number] = group
        return self._groups[key, backend, number]

    def mesh(self, *names: tuple[Axis, ...]) -> DeviceMesh:
        """A device mesh whose dims are groups of the layout, each given by its axes.

        Names differ between layouts: DTensor caches meshes, and would use an equal one of an earlier layout, whose
        groups are closed.
        """
        groups = [self._open_group(axes) for axes in names]
        dim_names = tuple(f"{axes[0]}_{self._number}" for axes in names)
        if len(groups) == 1:
            return DeviceMesh.from_group(groups[0], self.device.type, mesh_dim_names=dim_names)
        axes_of_mesh = [axis for axes in names for axis in axes]
        [ranks] = [ranks for ranks in self.dims.groups(*axes_of_mesh) if self.rank in ranks]
        mesh = torch.tensor(ranks).view([self.dims.count(*axes) for axes in names])
        return DeviceMesh.from_group(groups, self.device.type, mesh=mesh, mesh_dim_names=dim_names)

    def share(self, items: Sequence[T]) -> Sequence[T]:
        """This rank's part of work that any rank can do."""
        return items[self.rank :: self.size]

    # -------------------------------------------------------------- collectives

    def all_sum(self, tensor: Tensor) -> Tensor:
        """All-reduce sum in place; asynchronous to the host on a GPU."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def barrier(self, *, timeout_s: float | None = None) -> None:
        """Wait for every rank; `timeout_s` for work that may take long on one of them."""
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
        """Every rank's JSON value by rank, on every rank. Blocks the host: not for use inside a step."""
        return [value] if self.size == 1 else gather_json(value, self.size, group or self.cpu_group)

    def new_cpu_group(self) -> dist.ProcessGroup:
        """Another gloo group of all ranks, for use in a separate thread. Collective."""
        self.open_local_group()
        group: dist.ProcessGroup = dist.new_group(backend="gloo")
        return group

    def open_store(self) -> SharedStore | None:
        """A connection to the store of all ranks, for one thread; None in a world of one."""
        return None if self.store is None else SharedStore(cast(Any, self.store).clone())

    def open_local_group(self) -> None:
        """Create the process group that FSDP and DCP need in a world of one; it uses no network."""
        if not dist.is_initialized():
            backend = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"
            dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)


def gather_json(value: Any, num_ranks: int, group: dist.ProcessGroup | None) -> list[Any]:
    """The JSON value of every rank of a group on the CPU, by rank. Blocks the host."""
    text = json.dumps(value).encode()
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(num_ranks)]
    dist.all_gather(lengths, torch.tensor([len(text)]), group=group)
    longest = max(int(length) for length in lengths)
    texts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(num_ranks)]
    mine = torch.zeros(longest, dtype=torch.uint8)
    mine[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    dist.all_gather(texts, mine, group=group)
    return [json.loads(bytes(text[: int(length)].tolist())) for text, length in zip(texts, lengths, strict=True)]


class SharedStore:
    """Values that any rank may store and read. It never waits for a value. Safe with threads."""

    def __init__(self, store: Any) -> None:  # torch's annotations lack some of its methods
        self._store, self._lock = store, threading.Lock()

    def put(self, key: str, value: bytes) -> None:
        """Store a value."""
        with self._lock:
            self._store.set(key, value)

    def get(self, keys: Sequence[str]) -> list[bytes] | None:
        """The values of all these keys; None if any is missing."""
        with self._lock:
            return list(self._store.multi_get(list(keys))) if self._store.check(list(keys)) else None

    def remove(self, key: str) -> None:
        """Remove a value, if there is one."""
        with self._lock:
            self._store.delete_key(key)


@contextmanager
def open_world(device: str | torch.device = "auto", *, timeout_s: float = TIMEOUT_S) -> Iterator[World]:
    """Join the world the launcher started; leave it at the end."""
    rank, size, local_rank = _ranks()
    local_size = _number("LOCAL_WORLD_SIZE", at_least=1) if "LOCAL_WORLD_SIZE" in os.environ else size
    world = World(rank, size, local_rank, _device_of(device, local_rank), local_size)
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)
    try:
        yield _join(world, timeout_s) if size > 1 else world
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _join(world: World, timeout_s: float) -> World:
    """Rendezvous with the other ranks."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(FLIGHT_RECORDER_EVENTS))
    timeout = timedelta(seconds=timeout_s)
    store, _, _ = next(rendezvous("env://", world.rank, world.size, timeout=timeout))
    is_cuda, store = world.device.type == "cuda", _fresh_store(store, world.rank, world.size, timeout_s)
    dist.init_process_group(
        "nccl" if is_cuda else "gloo",
        store=store,
        rank=world.rank,
        world_size=world.size,
        timeout=timeout,
        device_id=world.device if is_cuda else None,
    )
    return replace(world, cpu_group=world.new_cpu_group(), store=store)


def _fresh_store(store: Store, rank: int, size: int, timeout_s: float) -> Store:
    """A prefix of the store without keys of earlier attempts.

    torchrun keeps one store across restarts; addresses written by dead processes would be used for live ones. So rank 0
    chooses a prefix, which is valid once rank 0 has confirmed the secrets of all live ranks.
    """
    secret, deadline = secrets.token_hex(8), time.monotonic() + timeout_s
    if rank == 0:
        keys = [f"saccade/{secret}/{other}" for other in range(1, size)]
        store.set("saccade/prefix", secret)
        store.wait(keys, timedelta(seconds=timeout_s))
        store.set(f"saccade/{secret}/confirmed", json.dumps([store.get(key).decode() for key in keys]))
        return PrefixStore(secret, store)
    while time.monotonic() < deadline:
        prefix = store.get("saccade/prefix").decode()
        store.set(f"saccade/{prefix}/{rank}", secret)
        confirmed = f"saccade/{prefix}/confirmed"
        if store.check([confirmed]) and json.loads(store.get(confirmed))[rank - 1] == secret:
            return PrefixStore(prefix, store)
        time.sleep(0.02)
    raise ConfigError(f"rank {rank} did not reach rank 0 within {timeout_s:.0f} s. Look at the logs of the other ranks")


def _ranks() -> tuple[int, int, int]:
    """Rank, world size and local rank from the launcher's environment variables; one process without them."""
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
    """The GPU with the local rank's index, unless one is named."""
    resolved = resolve_device(device)
    if resolved == torch.device("cuda"):
        return resolve_device(f"cuda:{local_rank}")
    return resolved
