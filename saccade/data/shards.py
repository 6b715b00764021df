"""List shards, read ranges of them, write them.

    path (folder, glob, braces, one tar, local or remote)  ->  list of ShardFile  ->  bytes by read_range

A shard is a plain tar as WebDataset and img2dataset write it: files KEY.EXT, those of one key adjacent. Nothing here
depends on an index.
"""

from __future__ import annotations

import fcntl
import fnmatch
import os
import re
import tarfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self, TypeVar

from saccade.data import storage
from saccade.data.lru_cache import LRUCache, OpenFile
from saccade.data.sample import Sample, split_name
from saccade.data.storage import Region, StorageConfig, is_remote, shown
from saccade.data.tar import RECORD, Gap, Member, Window, members
from saccade.errors import ConfigError, DataError, StorageError

T = TypeVar("T")

_REMOTE = StorageConfig()
_OPEN_FILES: LRUCache[OpenFile] = LRUCache(256)
_ALL = "*.tar"


@dataclass(frozen=True, slots=True)
class ShardFile:
    """One tar, and its size when it was listed."""

    url: str
    """A local path, or a URL for fsspec."""
    name: str
    num_bytes: int

    @property
    def is_remote(self) -> bool:
        """Whether it is read through fsspec."""
        return is_remote(self.url)


# ------------------------------------------------------------------ listing


@dataclass(frozen=True)
class ShardPath:
    """A user's path, parsed: a folder, and which of its tars."""

    folder: str
    patterns: tuple[str, ...]
    """File names or globs; named files must exist."""

    @staticmethod
    def parse(path: str | Path) -> ShardPath:
        """Parse a folder, a glob, names in braces, or one tar.

        Wildcards and braces are allowed in the last part of the path.
        """
        text = str(path).removeprefix("file://")
        if not text.endswith(".tar"):
            if re.search(r"[*?{]", text):
                raise DataError(f"{shown(text)}: a pattern of shards ends in .tar, as in folder/{{00000..00009}}.tar")
            return ShardPath(_folder(text), (_ALL,))
        folder, _, pattern = text.rpartition("/")
        if re.search(r"[*?{]", folder):
            raise DataError(f"{shown(text)}: wildcards in a folder's name. List each folder as a source")
        return ShardPath(_folder(folder), tuple(_expand(pattern)))

    @property
    def is_whole_folder(self) -> bool:
        """Whether every tar of the folder is selected."""
        return self.patterns == (_ALL,)

    def matches(self, name: str) -> bool:
        """Whether a file of the folder is selected."""
        return not name.startswith(".") and any(fnmatch.fnmatchcase(name, pattern) for pattern in self.patterns)

    def named(self) -> set[str]:
        """File names without wildcards."""
        return {pattern for pattern in self.patterns if not re.search(r"[*?\[]", pattern)}


def _folder(text: str) -> str:
    """The folder without a trailing slash; a local one is absolute, so that it is valid in other processes."""
    return text.rstrip("/") if is_remote(text) else str(Path(text).expanduser().absolute())


def list_shards(path: str | Path, config: StorageConfig = _REMOTE) -> list[ShardFile]:
    """The shards of a path, sorted by name: a folder, `folder/train-*.tar`, `folder/{00000..00005}.tar`, or one tar."""
    where = ShardPath.parse(path)
    found = _list_remote(where, config) if is_remote(where.folder) else _list_local(where)
    if missing := sorted(where.named() - found.keys()):
        raise DataError(
            f"{shown(where.folder)}: {len(missing)} shards are missing: {', '.join(missing[:5])}. Check the path"
        )
    if not found:
        raise DataError(
            f"{shown(str(path))}: no tar files. Shards are written by saccade data prepare, img2dataset or webdataset"
        )
    return [ShardFile(f"{where.folder}/{name}", name, found[name]) for name in sorted(found)]


def _list_local(where: ShardPath) -> dict[str, int]:
    try:
        with os.scandir(where.folder) as entries:
            return {entry.name: entry.stat().st_size for entry in entries if where.matches(entry.name)}
    except OSError as error:
        raise DataError(f"{where.folder}: {error.strerror}. Check the path") from error


def _list_remote(where: ShardPath, config: StorageConfig) -> dict[str, int]:
    """Sizes by name from the folder's listing; named files are requested one by one if a server lists nothing."""
    remote = storage.storage(config)
    named = where.named()
    try:
        listed = {name: size for name, size in remote.list_folder(where.folder).items() if where.matches(name)}
    except DataError:
        if len(named) < len(where.patterns):
            raise
        listed = {}
    listed |= dict.fromkeys(named - listed.keys())
    unknown = [name for name, size in listed.items() if size is None]
    with ThreadPoolExecutor(16) as pool:
        sizes = pool.map(lambda name: remote.num_bytes(f"{where.folder}/{name}"), unknown)
        known = dict(zip(unknown, sizes, strict=True))
    return {name: known[name] if size is None else size for name, size in listed.items()}


def _expand(pattern: str) -> list[str]:
    """Expand `{00..03}` and `{a,b}`; several braces multiply."""
    found = re.search(r"\{([^{}]*)\}", pattern)
    if not found:
        return [pattern]
    if counted := re.fullmatch(r"(\d+)\.\.(\d+)", found[1]):
        first, last = counted.groups()
        choices = [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]
    else:
        choices = found[1].split(",")
    rest = _expand(pattern[found.end() :])
    return [f"{pattern[: found.start()]}{choice}{tail}" for choice in choices for tail in rest]


# ------------------------------------------------------------------ reading


def read_range(
    file: ShardFile,
    offset: int,
    size: int,
    config: StorageConfig = _REMOTE,
    region: Region | None = None,
    *,
    is_cached: bool = True,
) -> bytes:
    """Read a range of a shard with one system call, or through the cache.

    A shard that became shorter is a `DataError`, other failures a `StorageError`.
    """
    if file.is_remote:
        if not is_cached:
            return storage.storage(config).read_part(file.url, offset, size)
        return storage.storage(config).read_range(file.url, file.num_bytes, offset, size, region)
    try:
        opened = _OPEN_FILES.get((file.url, file.num_bytes), lambda: OpenFile.open(file.url))
        data = opened.read(offset, size)
        if len(data) == size:
            return data
        num_bytes = opened.num_bytes()
    except OSError as error:
        raise StorageError(f"{file.url}: {error.strerror}. Check the file, or index the folder again") from error
    raise DataError(
        f"{file.url}: expected {size} bytes at {offset}, the file has {num_bytes}. It was cut or replaced since it was "
        f"indexed: restore it, or run saccade data index {Path(file.url).parent}"
    )


def window(file: ShardFile, config: StorageConfig = _REMOTE) -> Window:
    """A buffered reader of a shard, from front to back."""
    return Window(lambda offset, size: read_range(file, offset, size, config), file.num_bytes)


def samples(tar: Window, load: Callable[[int, Member], T]) -> Iterator[tuple[str, list[tuple[str, Member, T]]] | Gap]:
    """Key and members of each sample, and a `Gap` wherever the tar is damaged.

    `load` gets the item's number, samples and gaps counted, and a member; it is called while the member is in the
    window. A sample is complete once another one, or the end of the tar, follows it; those on either side of a gap may
    lack members and are left out.
    """
    number, key = 0, None
    parts: list[tuple[str, Member, T]] = []
    is_broken = False
    for entry in members(tar):
        if isinstance(entry, Gap):
            yield entry
            number, key, parts, is_broken = number + 1, None, [], True
            continue
        named = split_name(entry.name)
        if named is None:
            continue
        if named[0] != key:
            if key is not None and not is_broken:
                yield key, parts
                number += 1
            is_broken = is_broken and key is None
            key, parts = named[0], []
        parts.append((named[1], entry, load(number, entry)))
    if key is not None and not is_broken:
        yield key, parts


# ------------------------------------------------------------------ writing


class ShardWriter:
    """Writes samples into numbered tars; a tar appears under its name when it is complete.

    Numbers continue after the highest in the folder. The bytes depend on the samples alone: no times, no owners. A
    second writer on the same folder is refused.
    """

    def __init__(self, folder: str | Path, *, max_samples: int = 10_000, max_bytes: int = 2**30) -> None:
        if max_samples < 1 or max_bytes < 1:
            raise ConfigError(f"max_samples is {max_samples} and max_bytes {max_bytes}; both must be at least 1")
        self._folder, self._max_samples, self._max_bytes = Path(folder), max_samples, max_bytes
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DataError(f"{folder}: {error.strerror}. Choose a writable folder") from error
        self._number = 1 + max((int(p.stem) for p in self._folder.glob("*.tar") if p.stem.isdigit()), default=-1)
        self._file: BinaryIO | None = None
        self._keys: set[str] = set()
        self.finished: list[str] = []
        """Names of the shards written so far."""

    @property
    def num_pending(self) -> int:
        """Samples in the unfinished shard."""
        return len(self._keys)

    def write(self, sample: Sample) -> None:
        """Add a sample; starts a new shard if this one would exceed its limits."""
        files = [(f"{sample.key}.{name}", data) for name, data in sample.members.items()]
        self._check(sample, [name for name, _ in files])
        chunks = [
            chunk for name, data in files for chunk in (_header(name, len(data)), data, bytes(-len(data) % RECORD))
        ]
        num_bytes = sum(map(len, chunks))
        if self._file and (
            len(self._keys) >= self._max_samples or self._file.tell() + num_bytes + 2 * RECORD > self._max_bytes
        ):
            self._finish()
        file = self._file or self._begin()
        file.write(b"".join(chunks))
        self._keys.add(sample.key)

    def close(self) -> None:
        """Finish the last shard."""
        if self._file:
            self._finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        elif self._file:
            self._discard(self._file)

    def _check(self, sample: Sample, names: list[str]) -> None:
        """Refuse a sample that would not read back as it is."""
        for name, extension in zip(names, sample.members, strict=True):
            if split_name(name) != (sample.key, extension) or "\0" in name or sample.key.startswith("/"):
                raise DataError(
                    f"{name!r} cannot be a member's name: a key has no dot in its last part, an extension is lower case"
                )
        if not names:
            raise DataError(f"sample {sample.key} has no members. Skip it")
        if sample.key in self._keys:
            raise DataError(f"key {sample.key} is in this shard already. Keys must be unique in a shard")

    @property
    def _temporary(self) -> Path:
        return self._folder / f".{self._number:05d}.tar.part"

    def _begin(self) -> BinaryIO:
        """Open a new shard under a temporary name; overwrites one left by a crash, not that of a running writer."""
        file = self._temporary.open("ab", buffering=1 << 20)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.close()
            raise DataError(
                f"{self._folder}: another process is writing shards there. Write to another folder"
            ) from error
        if (self._folder / f"{self._number:05d}.tar").exists():  # written by another process since we counted
            self._discard(file)
            self._number += 1
            return self._begin()
        file.truncate(0)
        self._file = file
        return file

    def _discard(self, file: BinaryIO) -> None:
        self._temporary.unlink(missing_ok=True)
        file.close()

    def _finish(self) -> None:
        assert self._file is not None, "only an open shard is finished"
        self._file.write(bytes(2 * RECORD))
        self._file.flush()
        os.fsync(self._file.fileno())
        name = f"{self._number:05d}.tar"
        self._temporary.replace(self._folder / name)
        self._file.close()
        self.finished.append(name)
        self._number, self._file, self._keys = self._number + 1, None, set()


def _header(name: str, size: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size = size
    return info.tobuf(tarfile.GNU_FORMAT, "utf-8", "strict")
