"""A small LRU cache for tables and open files, safe with threads and after a fork."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


class LRUCache(Generic[T]):
    """The values used last, at most `max_items` of them."""

    def __init__(self, max_items: int) -> None:
        self._max_items = max_items
        self.clear()

    def __reduce__(self) -> tuple[type[LRUCache[T]], tuple[int]]:
        """A pickled cache is empty."""
        return LRUCache, (self._max_items,)

    def clear(self) -> None:
        """Drop all values."""
        self._pid = os.getpid()
        self._items: OrderedDict[Hashable, T] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """The value, made if missing; two threads may both make it."""
        if self._pid != os.getpid():  # in a forked process: a thread of the parent may have held the lock
            self.clear()
        with self._lock:
            if key in self._items:
                self._items.move_to_end(key)
                return self._items[key]
        value = make()
        with self._lock:
            self._items[key] = value
            if len(self._items) > self._max_items:
                self._items.popitem(last=False)
        return value


class OpenFile:
    """A file open for reading; closed with the last reference, so that eviction from a cache is safe at any time."""

    __slots__ = ("_fd",)

    def __init__(self, fd: int) -> None:
        self._fd = fd

    @staticmethod
    def open(path: str) -> OpenFile:
        """Open a local file. Raises OSError as `os.open` does."""
        return OpenFile(os.open(path, os.O_RDONLY | os.O_CLOEXEC))

    def read(self, offset: int, size: int) -> bytes:
        """Read a range; shorter only at the end of the file."""
        data = os.pread(self._fd, size, offset)
        if len(data) < size and data:  # one call reads at most 2 GiB
            return data + self.read(offset + len(data), size - len(data))
        return data

    def num_bytes(self) -> int:
        """Current size of the file."""
        return os.fstat(self._fd).st_size

    def __del__(self) -> None:
        os.close(self._fd)
