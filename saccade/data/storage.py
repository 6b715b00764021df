"""Reading files: local ones by ranges, remote ones (s3://, gs://, hf://, http(s)://) by cached chunks through fsspec.

    range -> chunks of a fixed size -> cached chunk | ranged request with retries -> cache

`chunk_cache.py` holds the chunks, `read_ahead.py` downloads them before they are needed. Chunks divide a file, or a
region of it (a unit): nodes that read different regions download no byte twice. Transient faults are retried with
exponential backoff; any other fault is one `StorageError` that says what to do.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import os
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

from saccade.data.chunk_cache import ChunkCache
from saccade.data.storage_faults import DENIED, MISSING, TRANSIENT, fault_of, reason_of
from saccade.errors import ConfigError, DataError, StorageError

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class StorageConfig:
    """How shards are read and cached. Credentials and endpoints are those of fsspec and of the cloud's own tools."""

    cache_folder: str | None = None
    """Cache of remote chunks and indexes; None: $SACCADE_CACHE, else ~/.cache/saccade."""
    max_cache_bytes: int = 64 * 2**30
    """Size of the chunk cache, all processes together; 0 caches nothing and requests every range."""
    chunk_bytes: int = 8 * 2**20
    """Size of one request and of one cached file."""
    max_attempts: int = 6
    """Attempts for one request; only transient faults are retried."""
    first_wait_s: float = 0.25
    """Wait before the second attempt, in seconds; doubled before each further one, up to 16 s, with random jitter."""
    timeout_s: float = 60.0
    """Timeout of one request, in seconds."""
    num_ahead: int = 4
    """Concurrent requests of each worker process for chunks that it will need; 0 downloads chunks when needed."""
    max_wait_s: float = 300.0
    """How long a stream retries a sample whose storage fails, in seconds; then it stops and can be resumed."""

    def __post_init__(self) -> None:
        if (
            self.chunk_bytes < 1
            or self.max_attempts < 1
            or self.timeout_s <= 0
            or self.first_wait_s < 0
            or self.max_wait_s < 0
            or self.num_ahead < 0
        ):
            raise ConfigError(f"{self}: sizes, attempts and times must be above 0")
        if self.max_cache_bytes and self.max_cache_bytes < self.chunk_bytes:
            raise ConfigError(
                f"max_cache_bytes {self.max_cache_bytes} is less than one chunk of {self.chunk_bytes}. "
                "Raise it, or set 0 for no cache"
            )

    @property
    def folder(self) -> Path:
        """The cache folder, resolved."""
        return Path(self.cache_folder or os.environ.get("SACCADE_CACHE") or Path.home() / ".cache" / "saccade")


def is_remote(path: str) -> bool:
    """Whether a path has a scheme that only fsspec can read."""
    scheme, mark, _ = path.partition("://")
    return mark != "" and "/" not in scheme and scheme != "file"


def shown(url: str) -> str:
    """A URL for messages, without user, password and query, which may hold secrets."""
    if not is_remote(url):
        return url
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def storage(config: StorageConfig) -> Storage:
    """The `Storage` of this process for a configuration."""
    return _storage(config, os.getpid())


@functools.cache
def _storage(config: StorageConfig, pid: int) -> Storage:
    return Storage(config)


class Region(NamedTuple):
    """A part of a file whose chunks are cached by themselves."""

    begin: int
    end: int


class Chunk(NamedTuple):
    """A part of a file that is downloaded at once and cached as a file."""

    url: str
    num_bytes: int
    """Size of the whole file."""
    offset: int
    size: int
    name: str
    """Name of the cached file."""


@dataclass
class StorageCounters:
    """What a process has read of remote files."""

    num_requests: int = 0
    num_bytes: int = 0
    """Bytes downloaded."""
    num_hits: int = 0
    """Chunks read from the cache."""
    num_misses: int = 0
    """Chunks downloaded when they were needed."""
    num_ahead: int = 0
    """Chunks downloaded before they were needed."""
    wait_s: float = 0.0
    """Time that readers waited for chunks, in seconds."""

    def plus(self, other: StorageCounters) -> StorageCounters:
        """The sum of both."""
        mine, theirs = dataclasses.astuple(self), dataclasses.astuple(other)
        return StorageCounters(*(a + b for a, b in zip(mine, theirs, strict=True)))


class _AbsentError(StorageError):
    """The file does not exist, or access is denied."""


class Storage:
    """Remote files through fsspec, one filesystem per scheme. Safe to use from several threads."""

    def __init__(self, config: StorageConfig) -> None:
        self._config = config
        self._cache = ChunkCache(config.folder / "blocks", config.max_cache_bytes)
        self._filesystems: dict[str, Any] = {}
        self._lock = threading.Lock()
        self.counters = StorageCounters()

    def list_folder(self, url: str, *, missing_ok: bool = False) -> dict[str, int | None]:
        """Names of the files in a folder, and their sizes if the listing has them."""
        try:
            entries = self._attempt(url, lambda: self._call(url, "ls", detail=True))
        except _AbsentError:
            if missing_ok:
                return {}
            raise
        files = {entry["name"].rpartition("/")[2]: entry.get("size") for entry in entries if entry["type"] == "file"}
        return {name: size for name, size in files.items() if name}

    def num_bytes(self, url: str) -> int:
        """Size of a file."""
        size = self._attempt(url, lambda: self._call(url, "info")).get("size")
        if size is None:
            raise StorageError(
                f"{shown(url)}: the server does not report the file's size. Copy the shards to a local folder"
            )
        return int(size)

    def read_file(self, url: str) -> bytes | None:
        """Read a small file; None if it does not exist. (S3 denies access to missing files without list permission.)"""
        try:
            return bytes(self._attempt(url, lambda: self._call(url, "cat_file")))
        except _AbsentError:
            return None

    def read_part(self, url: str, offset: int, size: int) -> bytes:
        """Read bytes of a file with one request, not through the cache."""
        return self._download(url, offset + size, offset, size) if size else b""

    def write_file(self, url: str, data: bytes) -> None:
        """Write a file with one request; a reader sees all of it or nothing."""
        self._attempt(url, lambda: self._call(url, "pipe_file", data))

    def remove(self, url: str) -> None:
        """Remove a file, or a folder with its files, if it exists."""
        with contextlib.suppress(_AbsentError):
            self._attempt(url, lambda: self._call(url, "rm", recursive=True))

    def read_range(self, url: str, num_bytes: int, offset: int, size: int, region: Region | None = None) -> bytes:
        """Read a range of a file of `num_bytes`, through the cache. The range is in `region`, by default the file."""
        if offset + size > num_bytes:
            raise DataError(
                f"{shown(url)}: wanted {size} bytes at {offset} of a file of {num_bytes}. Index the folder again"
            )
        if not size or not self._cache.is_usable():
            return self._download(url, num_bytes, offset, size) if size else b""
        parts = []
        for chunk in self.chunks(url, num_bytes, offset, size, region):
            begin = max(offset - chunk.offset, 0)
            parts.append(self._read_chunk(chunk, begin, min(offset + size - chunk.offset, chunk.size)))
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def chunks(self, url: str, num_bytes: int, offset: int, size: int, region: Region | None = None) -> list[Chunk]:
        """The chunks of a range."""
        chunk_bytes = self._config.chunk_bytes
        begin, end = region or (0, num_bytes)
        named = f"{url} {num_bytes} {chunk_bytes}" + (f" {begin} {end}" if region else "")
        digest = hashlib.sha256(named.encode()).hexdigest()[:32]
        numbers = range((offset - begin) // chunk_bytes, (offset + size - 1 - begin) // chunk_bytes + 1)
        starts = [begin + number * chunk_bytes for number in numbers]
        return [
            Chunk(url, num_bytes, start, min(chunk_bytes, end - start), f"{digest}-{number}")
            for number, start in zip(numbers, starts, strict=True)
        ]

    def prefetch(self, url: str, num_bytes: int) -> None:
        """Download every chunk of a file into the cache."""
        for chunk in self.chunks(url, num_bytes, 0, num_bytes) if num_bytes else ():
            if not self.fetch(chunk):
                return

    def fetch(self, chunk: Chunk) -> bool:
        """Download a chunk into the cache, unless it is there; False if nothing is cached at present."""
        if self._cache.is_usable() and self._cache.open(chunk.name, chunk.size) is None:
            with self._cache.downloading(chunk.name):
                if self._cache.open(chunk.name, chunk.size) is None:
                    self._cache.put(chunk.name, self._download(chunk.url, chunk.num_bytes, chunk.offset, chunk.size))
                    self._count(num_ahead=1)
        return self._cache.is_usable()

    def forget(self, url: str, num_bytes: int, offset: int, size: int, region: Region | None = None) -> None:
        """Remove the chunks of a range from the cache: they are damaged."""
        for chunk in self.chunks(url, num_bytes, offset, size, region):
            self._cache.remove(chunk.name)

    @property
    def cached_bytes(self) -> int:
        """Bytes of the cache on disk."""
        return self._cache.num_bytes()

    def _read_chunk(self, chunk: Chunk, begin: int, end: int) -> bytes:
        """Part of one chunk. Threads and processes that need the same chunk wait for the first of them."""
        file = self._cache.open(chunk.name, chunk.size)
        if file is not None:
            self._count(num_hits=1)
            return file.read(begin, end - begin)
        began = time.monotonic()
        with self._cache.downloading(chunk.name):
            file = self._cache.open(chunk.name, chunk.size)
            if file is None:
                data = self._download(chunk.url, chunk.num_bytes, chunk.offset, chunk.size)
                self._cache.put(chunk.name, data)
                self._count(num_misses=1, wait_s=time.monotonic() - began)
                return data[begin:end]
        self._count(num_hits=1, wait_s=time.monotonic() - began)
        return file.read(begin, end - begin)

    def _count(self, **more: float) -> None:
        with self._lock:
            for name, value in more.items():
                setattr(self.counters, name, getattr(self.counters, name) + value)

    def _download(self, url: str, num_bytes: int, offset: int, size: int) -> bytes:
        def request() -> bytes:
            data = bytes(self._call(url, "cat_file", start=offset, end=offset + size))
            if len(data) > size:
                raise StorageError(
                    f"{shown(url)}: requested {size} bytes, got {len(data)}: the server does not support range "
                    "requests. Use one that does, or copy the shards to a local folder"
                )
            self._count(num_requests=1, num_bytes=len(data))
            if len(data) < size:
                raise ConnectionError(f"received {len(data)} of {size} bytes")
            return data

        return self._attempt(url, request)

    def _filesystem(self, url: str) -> Any:
        """fsspec's filesystem for a URL, without caches of its own."""
        scheme = url.partition("://")[0]
        if scheme not in self._filesystems:
            import fsspec

            # Retries are ours; with the client's own, attempts multiply and waits add up.
            once = {"config_kwargs": {"retries": {"max_attempts": 0}}} if scheme in ("s3", "s3a") else {}
            try:
                made = fsspec.filesystem(scheme, use_listings_cache=False, skip_instance_cache=True, **once)
                made.retries = 1
            except ImportError as error:
                extra = {"gs": "gcs", "gcs": "gcs", "hf": "hub"}.get(scheme, scheme)
                raise StorageError(
                    f"{shown(url)}: {scheme}:// needs a package that is not installed ({error}). "
                    f"Install it: pip install 'saccade[{extra}]'"
                ) from error
            except ValueError as error:
                raise StorageError(
                    f"{shown(url)}: unknown storage scheme ({error}). Use s3, gs, hf or http(s)"
                ) from error
            self._filesystems.setdefault(scheme, made)
        return self._filesystems[scheme]

    def _call(self, url: str, method: str, *values: Any, **arguments: Any) -> Any:
        """Call a method of the filesystem.

        Asynchronous ones accept a timeout; the others buffer files unless disabled.
        """
        filesystem = self._filesystem(url)
        if getattr(filesystem, "async_impl", False):
            arguments["timeout"] = self._config.timeout_s
        elif method == "cat_file":
            arguments["cache_type"] = "none"
        return getattr(filesystem, method)(url, *values, **arguments)

    def _attempt(self, url: str, action: Callable[[], T]) -> T:
        """Run `action`, retry transient faults, and raise one `StorageError` that says why it failed."""
        wait_s = self._config.first_wait_s
        for attempt in range(1, self._config.max_attempts + 1):
            try:
                return action()
            except DataError:
                raise
            except Exception as error:  # each filesystem and each of their HTTP clients brings its own classes
                fault = fault_of(error)
                if fault is not TRANSIENT or attempt == self._config.max_attempts:
                    kind = _AbsentError if fault in (MISSING, DENIED) else StorageError
                    tried = f" after {attempt} attempts" if attempt > 1 else ""
                    raise kind(f"{shown(url)}: {reason_of(error)}{tried}. {fault}") from error
                time.sleep(wait_s * random.uniform(0.5, 1.0))  # noqa: S311
                wait_s = min(2 * wait_s, 16.0)
        raise AssertionError("the last attempt returns or raises")
