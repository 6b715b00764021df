"""Futures that are done already, and a callback for the last of several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import count
from typing import Any, TypeVar

_Value = TypeVar("_Value")


def done(value: _Value) -> Future[_Value]:
    """A future that has this result."""
    future: Future[_Value] = Future()
    future.set_result(value)
    return future


def failed(error: Exception) -> Future[Any]:
    """A future that has this error."""
    future: Future[Any] = Future()
    future.set_exception(error)
    return future


def when_all_done(futures: Sequence[Future[Any]], callback: Callable[[], None]) -> None:
    """Call back from the thread that finishes the last of them."""
    num_open = count(len(futures) - 1, -1)

    def one_done(_: Future[Any]) -> None:
        if next(num_open) == 0:
            callback()

    for future in futures:
        future.add_done_callback(one_done)
