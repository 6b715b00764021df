"""The shards of an index as columns: half a million of them take 20 MB, shared by all processes that map the file.

    shards.json  --write_entries-->  shards.arrow  --memory map-->  ShardTable  ->  entries, one by one when asked for

`shards.json` is what the format says; `shards.arrow` repeats it for opening at once, and is used only if it was written
for a `shards.json` of the present size.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar, overload

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from saccade.data.index_files import ShardEntry
from saccade.data.order import Ints

T = TypeVar("T")

_SCHEMA = pa.schema(
    [
        pa.field("name", pa.string(), nullable=False),
        pa.field("bytes", pa.int64(), nullable=False),
        pa.field("num_samples", pa.int64(), nullable=False),
        pa.field("num_errors", pa.int64(), nullable=False),
        pa.field("damage", pa.string()),
        pa.field("lost_bytes", pa.int64(), nullable=False),
    ]
)


class Rows(Sequence[T], Generic[T]):
    """A sequence whose items are made when they are asked for."""

    def __init__(self, length: int, make: Callable[[int], T]) -> None:
        self._length, self._make = length, make

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, number: int) -> T: ...
    @overload
    def __getitem__(self, number: slice) -> list[T]: ...
    def __getitem__(self, number: int | slice) -> T | list[T]:
        if isinstance(number, slice):
            return [self._make(each) for each in range(*number.indices(self._length))]
        if not -self._length <= number < self._length:
            raise IndexError(f"{number} of {self._length}")
        return self._make(int(number) % self._length)

    def __iter__(self) -> Iterator[T]:
        return map(self._make, range(self._length))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]


class ShardTable:
    """Name, bytes and numbers of samples of each shard."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table.combine_chunks()
        self._names = _column(self._table, "name")

    @staticmethod
    def of(entries: Sequence[ShardEntry]) -> ShardTable:
        """The table of these entries."""
        columns = {
            "name": [entry.name for entry in entries],
            "bytes": [entry.num_bytes for entry in entries],
            "num_samples": [entry.num_samples for entry in entries],
            "num_errors": [entry.num_errors for entry in entries],
            "damage": [entry.damage for entry in entries],
            "lost_bytes": [entry.lost_bytes for entry in entries],
        }
        return ShardTable(pa.table(columns, _SCHEMA))

    @staticmethod
    def open(path: Path, json_bytes: int) -> ShardTable | None:
        """Map a file; None if there is none, or it was not written for a `shards.json` of this size."""
        try:
            with pa.memory_map(str(path)) as file:
                # A stream: reading a file of record batches starts threads, and workers are forked from processes that
                # have opened an index.
                table = pa.ipc.open_stream(file).read_all()
        except (OSError, pa.ArrowException):
            return None
        is_current = (table.schema.metadata or {}).get(b"json_bytes") == str(json_bytes).encode()
        return ShardTable(table) if is_current and table.schema.equals(_SCHEMA) else None

    def to_bytes(self, json_bytes: int) -> bytes:
        """The content of a file for `open`."""
        note = {"json_bytes": str(json_bytes), "fingerprint": self.fingerprint}
        table, buffer = self._table.replace_schema_metadata(note), pa.BufferOutputStream()
        with pa.ipc.new_stream(buffer, table.schema) as writer:
            writer.write_table(table)
        return bytes(buffer.getvalue())

    def __len__(self) -> int:
        return len(self._names)

    def take(self, shards: Sequence[int]) -> ShardTable:
        """The table of some of the shards, in this order."""
        return ShardTable(self._table.take(pa.array(shards, pa.int64())).replace_schema_metadata(None))

    @cached_property
    def fingerprint(self) -> str:
        """Changes with the names, sizes and numbers of samples of the shards."""
        written = (self._table.schema.metadata or {}).get(b"fingerprint")
        if written is not None:
            return str(written.decode())
        columns = (self._names.to_pylist(), self.num_bytes.tolist(), self.num_samples.tolist())
        lines = [f"{name}\t{size}\t{count}\n" for name, size, count in zip(*columns, strict=True)]
        return hashlib.sha256("".join(lines).encode()).hexdigest()[:16]

    @property
    def num_bytes(self) -> Ints:
        """Bytes of each shard."""
        return self._ints("bytes")

    @property
    def num_samples(self) -> Ints:
        """Samples of each shard, usable or not."""
        return self._ints("num_samples")

    @property
    def num_errors(self) -> Ints:
        """Samples of each shard that cannot be used."""
        return self._ints("num_errors")

    @property
    def lost_bytes(self) -> int:
        """Bytes that damage made unreadable."""
        return int(self._ints("lost_bytes").sum())

    @property
    def names(self) -> Rows[str]:
        """Names of the shards."""
        return Rows(len(self), lambda shard: str(self._names[shard].as_py()))

    @property
    def entries(self) -> Rows[ShardEntry]:
        """The shards as entries."""
        return Rows(len(self), self._entry)

    def damaged(self) -> dict[str, str]:
        """Damaged or truncated shards, and where."""
        some = self._table.filter(pc.is_valid(self._table["damage"]))
        return dict(zip(some["name"].to_pylist(), some["damage"].to_pylist(), strict=True))

    def _entry(self, shard: int) -> ShardEntry:
        values: dict[str, Any] = {name: self._table[name][shard].as_py() for name in self._table.schema.names}
        return ShardEntry.from_json(values)

    def _ints(self, name: str) -> Ints:
        values: Ints = _column(self._table, name).to_numpy() if len(self) else np.zeros(0, np.int64)
        return values


def _column(table: pa.Table, name: str) -> Any:
    """A column as one array, without copying it."""
    column = table[name]
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
