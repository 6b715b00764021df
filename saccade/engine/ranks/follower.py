"""The process of a follower."""

from __future__ import annotations

import contextlib
import gc
import socket
import sys
from typing import Any

from saccade.engine.config import EngineConfig
from saccade.engine.device.loading import load_runner
from saccade.engine.device.rank_exchange import RankExchange
from saccade.engine.device.runner import PixelScale
from saccade.engine.frames.connection import Connection
from saccade.engine.ranks.following_runner import FollowingRunner
from saccade.engine.ranks.launch import allocated_bytes, join_group
from saccade.engine.ranks.reports import Reports
from saccade.log import set_up_logging
from saccade.workers.messages import encode_error
from saccade.workers.process import QuickExit, follow_parent


def serve(connection: Connection, reports_fd: int) -> None:
    """Join the group as the first frame says, then load and follow until the connection is closed."""
    setup, _ = connection.receive()
    if setup["logs_json"]:
        set_up_logging(as_json=True)
    rank, devices = setup["rank"], setup["devices"]
    exchange = join_group(rank, devices, setup["store"])
    reports = Reports(len(devices), reports_fd)
    while True:
        (name, _, arguments), _ = connection.receive()
        assert name == "load", f"a follower without a model was sent {name}"
        runner = _load(exchange, devices[rank], *arguments, connection=connection)
        reports.set_bytes(rank, allocated_bytes(devices[rank]))
        gc.collect()
        gc.enable()
        gc.freeze()  # a full collection over all imported objects would take 0.1 s between two steps
        runner.follow(connection, rank, reports)
        runner.close()
        gc.unfreeze()


def _load(
    exchange: RankExchange, device: str, folder: str, config: dict[str, Any], pixels: tuple[Any, Any],
    dtype: str | None, *, connection: Connection,
) -> FollowingRunner:  # fmt: skip
    mean, std = pixels
    try:
        runner = load_runner(
            folder, EngineConfig(**config), pixels=PixelScale(mean=tuple(mean), std=tuple(std)), device=device,
            dtype=dtype, exchange=exchange, kind=FollowingRunner,
        )  # fmt: skip
    except Exception as error:
        connection.send(encode_error(error))
        raise
    assert isinstance(runner, FollowingRunner), "as asked"
    connection.send({"loaded": True})
    return runner


def main() -> None:
    """Entry point. Arguments: file descriptors of the connection and of the reports, process id of the leader."""
    quick_exit = QuickExit()
    set_up_logging()
    connection_fd, reports_fd, leader = map(int, sys.argv[1:4])
    follow_parent(leader)
    with contextlib.suppress(ConnectionError, EOFError):
        serve(Connection(socket.socket(fileno=connection_fd)), reports_fd)
    quick_exit.status = 0
