"""Memory of this GPU that the GPUs of the other ranks read, for `kernels/peer_all_reduce.py`.

    allocate -> exchange handles (CUDA IPC) over the process group -> map the memory of the others -> try a sum

Every rank opens it at the same time, and all use it or none does. The driver is called directly: torch's way of sharing
memory between processes counts references in files that stay in /dev/shm when a process is killed. The memory is some
MB, and is kept until the process ends, since another process may still read it.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Sequence
from typing import Any

import torch

from saccade.engine.device.rank_exchange import RankExchange
from saccade.kernels.peer_all_reduce import MAX_RANKS, PeerBuffers, peer_all_reduce, peer_all_reduce_norm

logger = logging.getLogger(__name__)

_MESSAGE_BYTES = {4: 512 * 2**10, MAX_RANKS: 256 * 2**10}
"""Largest sum for up to so many ranks: the limits of vLLM's one-shot all-reduce, not measured here."""
_MAX_ROWS = 128
"""Programs of a sum: all run at once."""
_COLUMN_UNIT = 128
_SHARED_BYTES = 2**21
"""Smaller allocations could be parts of one, which would be shared as a whole."""
_EPS, _TOLERANCE = 1e-6, 0.01


class _Handle(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = [("reserved", ctypes.c_ubyte * 64)]


class _NoAccessError(Exception):
    """Why the memory of the peers cannot be used."""


def open_peers(exchange: RankExchange, width: int, dtype: torch.dtype) -> PeerBuffers | None:
    """Buffers for sums of rows of `width`. None: the ranks cannot access each other's memory.

    All ranks call this at the same time.
    """
    if exchange.size == 1 or not exchange.devices or exchange.device.type != "cuda":
        return None
    columns = -(-width // _COLUMN_UNIT) * _COLUMN_UNIT
    message_bytes = next((most for size, most in _MESSAGE_BYTES.items() if exchange.size <= size), 0)
    rows = max(1, min(_MAX_ROWS, message_bytes // (columns * dtype.itemsize)))
    with torch.cuda.device(exchange.device):
        reason, addresses = _map(exchange, PeerBuffers.num_bytes(rows, columns, dtype))
        if exchange.least(int(reason is None), exchange.device):
            buffers = PeerBuffers(
                rank=exchange.rank, addresses=torch.tensor(addresses, device=exchange.device),
                uses=torch.zeros(rows + 1, dtype=torch.int64, device=exchange.device), max_columns=columns, dtype=dtype,
            )  # fmt: skip
            is_right = _try_sums(buffers, width)
            if exchange.least(int(is_right), exchange.device):
                logger.info("sums of up to %d tokens go through the memory of the GPUs", rows)
                return buffers
            reason = None if is_right else "its first sums were wrong"
    logger.warning("all sums go through the process group: %s", reason or "another rank cannot use the GPUs' memory")
    return None


def _map(exchange: RankExchange, num_bytes: int) -> tuple[str | None, list[int]]:
    """(why it is not possible, where the memory of every rank is). All ranks exchange handles, whatever fails."""
    reason, address, handle = None, 0, _Handle()
    try:
        _check_access(exchange.device, [torch.device(other) for other in exchange.devices])
        address = _allocate(num_bytes)
        _call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
    except _NoAccessError as error:
        reason = str(error)
    handles = exchange.gather_bytes(bytes(handle), exchange.device)
    if reason is None and not all(map(any, handles)):  # a rank that failed sends zeros
        reason = "another rank cannot share its memory"
    if reason is not None:
        return reason, []
    try:
        return None, [address if rank == exchange.rank else _open(one) for rank, one in enumerate(handles)]
    except _NoAccessError as error:
        return str(error), []


def _check_access(own: torch.device, others: Sequence[torch.device]) -> None:
    if len(others) > MAX_RANKS:
        raise _NoAccessError(f"{len(others)} ranks are more than {MAX_RANKS}")
    for other in others:
        if other != own and not torch.cuda.can_device_access_peer(own, other):
            raise _NoAccessError(f"{own} cannot access {other}")


def _allocate(num_bytes: int) -> int:
    """The address of memory of the current GPU, with zeros."""
    address, num_bytes = ctypes.c_uint64(), -(-num_bytes // _SHARED_BYTES) * _SHARED_BYTES
    torch.cuda.synchronize()  # this thread has a current context afterwards
    _call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(num_bytes))
    _call("cuMemsetD8_v2", address, ctypes.c_ubyte(0), ctypes.c_size_t(num_bytes))
    torch.cuda.synchronize()
    return address.value


def _open(handle: bytes) -> int:
    """The address of another process's memory."""
    address, with_peer_access = ctypes.c_uint64(), ctypes.c_uint(1)
    _call("cuIpcOpenMemHandle_v2", ctypes.byref(address), _Handle.from_buffer_copy(handle), with_peer_access)
    return address.value


@functools.cache
def _driver() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise _NoAccessError(f"there is no CUDA driver library: {error}") from error


def _call(name: str, *arguments: Any) -> None:
    if code := getattr(_driver(), name)(*arguments):
        raise _NoAccessError(f"{name} failed with error {code}")


def _try_sums(buffers: PeerBuffers, width: int) -> bool:
    """Whether sums over the ranks are right. It also compiles and loads the kernels, which cannot be done in a capture.

    Every rank adds rows of its number, from 1 on, three times: each slot is used, and one of them again.
    """
    device, num_ranks = buffers.uses.device, len(buffers.addresses)
    own, total = buffers.rank + 1, num_ranks * (num_ranks + 1) // 2
    rows_TD = torch.full((buffers.max_rows, width), own, dtype=buffers.dtype, device=device)
    weight_D = torch.ones_like(rows_TD[0])
    sums = [peer_all_reduce(rows_TD.clone(), buffers) for _ in range(3)]
    normed, with_residual = peer_all_reduce_norm(rows_TD, rows_TD, weight_D, _EPS, buffers)
    are_right = [(found == total).all() for found in sums] + [(with_residual == total + own).all()]
    return bool(torch.stack([*are_right, ((normed - 1.0).abs() < _TOLERANCE).all()]).all())
