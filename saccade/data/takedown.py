"""Takedown: samples that are no longer read, although index, order and states of running jobs still count them.

    list of ids or checksums  ->  index/takedown.txt  ->  a stream skips, counts and names each

Positions of the other samples stay, so a run resumes as if the removed samples were unusable. Their bytes are not read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from saccade.data.index import ShardIndex
from saccade.data.index_files import IndexLocation
from saccade.data.shards import ShardPath
from saccade.data.storage import StorageConfig, is_remote
from saccade.errors import DataError

TAKEDOWN = "takedown.txt"
"""The list, within the index."""
_HASH = re.compile("[0-9a-f]{32}")
_DEFAULT = StorageConfig()


class TakenDownError(DataError):
    """A sample that was taken down."""


def take_down(path: str | Path, listed: Iterable[str], config: StorageConfig = _DEFAULT) -> tuple[int, int]:
    """Add samples to the list of a folder; returns how many were added, and how many it has.

    Each is named by `shard/key`, by an id as bad samples are listed (`source/shard/key`), or by the checksum of its
    bytes in the index, as 32 hexadecimal digits.
    """
    folder = ShardPath.parse(path).folder
    location = IndexLocation.of(folder, config, f"{folder}/index" if is_remote(folder) else None)
    lines = [line.strip() for line in listed]
    names = {line for line in lines if line and not line.startswith("#")}
    if bad := sorted(name for name in names if "/" not in name and not _HASH.fullmatch(name)):
        raise DataError(f"{bad[0]!r} is no sample: give shard/key, source/shard/key or 32 hexadecimal digits")
    known = _read(location)
    location.written.write(TAKEDOWN, "".join(f"{name}\n" for name in sorted(known | names)).encode())
    return len(names - known), len(known | names)


def _read(location: IndexLocation) -> set[str]:
    content = location.written.read(TAKEDOWN)
    if content is None:
        content = location.read_shipped(TAKEDOWN)
    return set((content or b"").decode().splitlines())


class Takedown:
    """The samples of a source that were taken down when it was opened. Cheap to ask."""

    def __init__(self, index: ShardIndex) -> None:
        self._index = index
        names = _read(index.location)
        self._hashes = {bytes.fromhex(name) for name in names if _HASH.fullmatch(name)}
        self._samples = {"/".join(name.split("/")[-2:]) for name in names if "/" in name}

    def __len__(self) -> int:
        return len(self._hashes) + len(self._samples)

    def check(self, shard: int, row: int) -> None:
        """Raise `TakenDownError` for a sample that was taken down; reads nothing but the index."""
        if not len(self):
            return
        key, checksum = self._index.identity(shard, row)
        if checksum in self._hashes or f"{self._index.shards[shard].removesuffix('.tar')}/{key}" in self._samples:
            raise TakenDownError("taken down")
