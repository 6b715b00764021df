"""Files on this machine: written whole or not at all, kept open for reading, cached within bounds.

The cache is a flat folder of block files, written under a hidden name and renamed, so that any number of processes share it: a
file is whole or not there, and one that vanishes is made again. It is bounded by bytes; the blocks opened longest ago leave
first. Where it cannot be written (a full disk), nothing is cached and a warning says so once.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import OrderedDict
from pathlib import Path

from saccade.files import atomic_write
from saccade.log import log_once


class OpenFile:
    """A file open for reading; closed when the last one who reads it lets go, so that leaving a cache is safe at any time."""

    __slots__ = ("_fd",)

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def read(self, offset: int, size: int) -> bytes:
        """These bytes, fewer only where the file ends."""
        data = os.pread(self._fd, size, offset)
        if len(data) < size and data:  # one call reads at most 2 GiB
            return data + self.read(offset + len(data), size - len(data))
        return data

    def num_bytes(self) -> int:
        """Size of the file as it is now."""
        return os.fstat(self._fd).st_size

    def __del__(self) -> None:
        os.close(self._fd)


class OpenFiles:
    """The files read last, kept open; a bounded number. Safe with threads and after a fork.

    With `touch`, opening a file makes it the youngest of its folder.
    """

    def __init__(self, max_files: int, *, touch: bool = False) -> None:
        self._max_files, self._touch = max_files, touch
        self._forget()
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        self._lock = threading.Lock()  # another thread may have held it when the process was forked
        self._files: OrderedDict[tuple[str, int], OpenFile] = OrderedDict()

    def get(self, path: str, version: int) -> OpenFile:
        """The open file; another `version` (its size when it was listed) opens it anew. Raises OSError as `open` does."""
        key = (path, version)
        with self._lock:
            file = self._files.get(key)
            if file is not None:
                self._files.move_to_end(key)
                return file
        file = OpenFile(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        if self._touch:
            os.utime(path)
        with self._lock:
            self._files[key] = file
            if len(self._files) > self._max_files:
                self._files.popitem(last=False)
        return file


class BlockCache:
    """Block files in one folder, bounded by bytes, shared by any number of processes."""

    _PAUSE_S = 60.0
    """After a failed write nothing is cached for this long: the disk may get room again."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder, self._max_bytes = folder, max_bytes
        self._files = OpenFiles(64, touch=True)
        self._paused_until = 0.0
        self._unseen_bytes: int | None = None  # written since the folder was last looked through; None: never

    def is_usable(self) -> bool:
        """Whether blocks are kept at present."""
        return self._max_bytes > 0 and time.monotonic() >= self._paused_until

    def open(self, name: str, size: int) -> OpenFile | None:
        """A cached block; opening it makes it the youngest."""
        path = self._folder / name
        try:
            file = self._files.get(str(path), size)
            return file if file.num_bytes() == size else None
        except FileNotFoundError:
            return None
        except OSError as error:
            self._pause(error)
            return None

    def put(self, name: str, data: bytes) -> None:
        """Keep a block if it can be written."""
        try:
            with atomic_write(self._folder / name) as hidden:
                self._make_room(len(data))
                hidden.write_bytes(data)
        except OSError as error:
            self._pause(error)

    def _pause(self, error: OSError) -> None:
        self._paused_until = time.monotonic() + self._PAUSE_S
        log_once(
            "data",
            f"{self._folder}: {error.strerror}; remote shards are read without a cache, which costs more requests. "
            "Free space there, or set SACCADE_CACHE to another folder",
            logging.WARNING,
        )

    def _make_room(self, incoming: int) -> None:
        """Let the oldest blocks leave until there is room. The folder is looked through now and then, not at every block."""
        if self._unseen_bytes is not None and self._unseen_bytes + incoming <= self._max_bytes // 64:
            self._unseen_bytes += incoming
            return
        blocks = []
        with os.scandir(self._folder) as entries:
            for entry in entries:
                try:
                    status = entry.stat()
                except FileNotFoundError:
                    continue
                if not entry.name.startswith(".") or status.st_mtime < time.time() - 3600:  # others are being written
                    blocks.append((status.st_mtime, status.st_size, entry.path))
        total = sum(size for _, size, _ in blocks) + incoming
        for _, size, path in sorted(blocks) if total > self._max_bytes else []:
            Path(path).unlink(missing_ok=True)
            total -= size
            if total <= 0.9 * self._max_bytes:
                break
        self._unseen_bytes = incoming
