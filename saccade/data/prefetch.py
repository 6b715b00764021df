"""A generator that runs ahead of its reader in a thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator
from typing import Generic, TypeVar

T = TypeVar("T")


class Prefetcher(Generic[T]):
    """Runs a generator in a thread, a few items ahead. Read by one thread; starts with the first `next`."""

    def __init__(self, items: Generator[T], num_ahead: int, cancel: Callable[[], None]) -> None:
        """`cancel`, called from another thread, makes `items` raise while it waits."""
        self._items, self._cancel = items, cancel
        self._ready: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue(num_ahead)
        self._is_closed = threading.Event()
        self._thread: threading.Thread | None = None

    def __next__(self) -> T:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="saccade stream", daemon=True)
            self._thread.start()
        if self._is_closed.is_set():
            raise StopIteration
        item, error = self._ready.get()
        if item is None:
            raise error or StopIteration
        return item

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            for item in self._items:
                self._ready.put((item, None))
                del item  # it belongs to the reader now
                if self._is_closed.is_set():
                    break
        except BaseException as raised:  # raised again in the reader
            error = raised
        self._items.close()
        self._ready.put((None, error))

    def close(self) -> None:
        """Stop the thread; items that are ready are dropped."""
        self._is_closed.set()
        while self._thread and self._thread.is_alive() and self._thread is not threading.current_thread():
            self._cancel()
            while not self._ready.empty():
                self._ready.get_nowait()
            self._thread.join(timeout=0.01)
