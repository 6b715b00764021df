"""Chunks of remote files in a folder of this machine, bounded by bytes and shared by any number of processes.

The folder is flat, and each chunk is one file, written atomically: a chunk is complete or absent, and one that
disappears is downloaded again. A process that downloads a chunk holds a file lock, so that the others wait for it
instead of downloading it too. The least recently used chunks are removed first. While the folder cannot be written (a
full disk), nothing is cached.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

from saccade.data.lru_cache import LRUCache, OpenFile
from saccade.files import atomic_write
from saccade.log import log_once

_TEMPORARY_S = 3600
"""Temporary files that are younger than this are being written; older ones are left over from a crash and removed."""
_NUM_LOCKS = 1024
"""Lock files. Chunks that share one are downloaded one after the other."""


class ChunkCache:
    """Chunk files in one folder, bounded by bytes, shared by any number of processes."""

    _PAUSE_S = 60.0
    """After a failed write nothing is cached for this long: space may be freed."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder, self._max_bytes = folder, max_bytes
        self._files: LRUCache[OpenFile] = LRUCache(64)
        self._paused_until = 0.0
        self._bytes_since_scan: int | None = None  # written since the folder was last scanned; None: never

    def is_usable(self) -> bool:
        """Whether chunks are cached at present."""
        return self._max_bytes > 0 and time.monotonic() >= self._paused_until

    def open(self, name: str, size: int) -> OpenFile | None:
        """A cached chunk; opening it marks it as used."""
        path = self._folder / name
        try:
            file = self._files.get((path, size), lambda: _open_and_touch(path))
            return file if file.num_bytes() == size else None
        except FileNotFoundError:
            return None
        except OSError as error:
            self._pause(error)
            return None

    @contextlib.contextmanager
    def downloading(self, name: str) -> Iterator[None]:
        """Hold the lock of a chunk while it is downloaded: no other thread or process of this machine has it.

        The kernel releases the lock when its holder dies. Where files cannot be locked, nothing is held.
        """
        with contextlib.ExitStack() as held:
            try:
                folder = self._folder.with_name("locks")
                folder.mkdir(parents=True, exist_ok=True)
                file = held.enter_context((folder / f"{int(name[:8], 16) % _NUM_LOCKS:04d}").open("ab"))
                fcntl.flock(file, fcntl.LOCK_EX)
            except OSError as error:
                self._pause(error)
            yield

    def remove(self, name: str) -> None:
        """Remove a chunk, if it is there."""
        with contextlib.suppress(OSError):
            (self._folder / name).unlink(missing_ok=True)
        self._files.clear()

    def num_bytes(self) -> int:
        """Bytes of all chunks in the folder."""
        total = 0
        with contextlib.suppress(FileNotFoundError), os.scandir(self._folder) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    total += entry.stat().st_size
        return total

    def put(self, name: str, data: bytes) -> None:
        """Cache a chunk if it can be written."""
        try:
            with atomic_write(self._folder / name) as temporary:
                self._evict(len(data))
                temporary.write_bytes(data)
        except OSError as error:
            self._pause(error)

    def _pause(self, error: OSError) -> None:
        self._paused_until = time.monotonic() + self._PAUSE_S
        log_once(
            "data",
            f"{self._folder}: {error.strerror}; remote shards are read without a cache, with more requests. "
            "Free space there, or set SACCADE_CACHE to another folder",
            logging.WARNING,
        )

    def _evict(self, incoming: int) -> None:
        """Remove the least recently used chunks until `incoming` bytes fit.

        The folder is scanned now and then, not for every chunk.
        """
        if self._bytes_since_scan is not None and self._bytes_since_scan + incoming <= self._max_bytes // 64:
            self._bytes_since_scan += incoming
            return
        chunks = []
        with os.scandir(self._folder) as entries:
            for entry in entries:
                try:
                    status = entry.stat()
                except FileNotFoundError:
                    continue
                is_temporary = entry.name.startswith(".")
                if not is_temporary or status.st_mtime < time.time() - _TEMPORARY_S:
                    chunks.append((status.st_mtime, status.st_size, entry.path))
        total = sum(size for _, size, _ in chunks) + incoming
        for _, size, path in sorted(chunks) if total > self._max_bytes else []:
            Path(path).unlink(missing_ok=True)
            total -= size
            if total <= 0.9 * self._max_bytes:
                break
        self._bytes_since_scan = incoming


def _open_and_touch(path: Path) -> OpenFile:
    """Open a file and set its modification time, which eviction reads as the time of last use."""
    file = OpenFile.open(str(path))
    os.utime(path)
    return file
