"""Awaiting calls of Ray for a limited time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


async def within(timeout_s: float, call: Awaitable[T]) -> T:
    """Await a call; TimeoutError after a while. The call is cancelled then and left alone.

    `asyncio.wait_for` waits for the cancelled call as well, and Ray may never end one.
    """
    task = asyncio.ensure_future(call)
    try:
        done, _ = await asyncio.wait([task], timeout=timeout_s)
    except asyncio.CancelledError:
        task.cancel()
        raise
    if not done:
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        task.cancel()
        raise TimeoutError
    return task.result()
