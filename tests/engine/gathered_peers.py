"""On a CPU, the memory of peers is replaced by gathering over the process group; the rest of its way is as on GPUs.

All ranks plant it; the leader chooses for each engine whether it is used (`used`).
"""

import contextlib
from unittest.mock import patch

import torch
import torch.distributed as dist

from saccade.engine.device import loading, rank_exchange
from saccade.kernels.peer_all_reduce import (
    PeerBuffers,
    peer_all_reduce_norm_reference,
    peer_all_reduce_reference,
)

MAX_ROWS = 9
"""Larger sums go through the process group."""
is_wanted = [False]
num_sums = [0]
_kept = contextlib.ExitStack()


def _open(exchange, width, dtype):
    wants = is_wanted[0] or exchange.rank > 0
    if not exchange.least(int(wants), torch.device("cpu")):
        return None
    uses = torch.zeros(MAX_ROWS + 1, dtype=torch.int64)
    return PeerBuffers(rank=exchange.rank, addresses=uses, uses=uses, max_columns=width, dtype=dtype)


def _gathered(x):
    num_sums[0] += 1
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return parts


def _norm(x, residual, weight, eps, _):
    return peer_all_reduce_norm_reference(_gathered(x), residual, weight, eps)


@contextlib.contextmanager
def planted():
    """Inside the `with` block this process opens such memory."""
    with (
        patch.object(loading, "open_peers", _open),
        patch.object(rank_exchange, "peer_all_reduce", lambda x, _: x.copy_(peer_all_reduce_reference(_gathered(x)))),
        patch.object(rank_exchange, "peer_all_reduce_norm", _norm),
    ):
        yield


def plant():
    """Open such memory from now on, in a follower."""
    _kept.enter_context(planted())


@contextlib.contextmanager
def used():
    """Inside the `with` block the leader's engines use it."""
    is_wanted[0], num_sums[0] = True, 0
    try:
        yield
        assert num_sums[0], "no sum fitted"
    finally:
        is_wanted[0] = False
