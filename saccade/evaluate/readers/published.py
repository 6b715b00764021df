"""Read published benchmarks in their published layouts:

Parquet, as on the Hugging Face Hub, or TSV with images in base64.

    files of the benchmark  ->  rows  ->  examples, by the task's own function  ->  images, when they are needed

A task describes its benchmark (`Published`). Images are identified by their bytes: many sets repeat an image for each
question.
"""

from __future__ import annotations

import base64
import csv
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cached_property, lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from saccade.data.readers.parquet import is_image, read_rows
from saccade.errors import DataError
from saccade.evaluate.example import Example, ExampleImage

SUFFIXES = (".parquet", ".tsv")
SHORT_ANSWER = "{question}\nAnswer the question using a single word or phrase."
LETTER = "{question}\nAnswer with the option's letter from the given choices directly."
_BATCH_ROWS = 1024
_MIN_BASE64 = 64
"""A shorter cell names another row, which has the image."""


@dataclass(frozen=True, kw_only=True)
class Published:
    """A published benchmark: where it is, and how it is read and asked."""

    hub: str
    """Data set of the benchmark on the Hugging Face Hub."""
    files: tuple[str, ...]
    """Patterns of the paths of its files; the first that matches some counts. The hub has those of the first."""
    example: Callable[[Row], Example]
    """The example of a row."""
    prompt: str
    """The user's turn, with `{question}`."""
    max_tokens: int
    """Maximum tokens of an answer."""


class Row:
    """A row of a published table."""

    def __init__(self, where: str, values: Mapping[str, Any], images: Mapping[str, ExampleImage]) -> None:
        self.number = 0
        """Number of the row in the benchmark, from 0."""
        self._where, self._values, self._images = where, values, images

    def __getitem__(self, name: str) -> Any:
        """The value of a column that must exist."""
        if name not in self._values:
            columns = ", ".join(self._values)
            raise DataError(f"{self._where}: no column {name!r}, as the published table has. It has {columns}")
        return self._values[name]

    def text(self, name: str) -> str:
        """The value of a column as text; empty if it has none."""
        value = self[name]
        return "" if value is None or str(value).strip() == "nan" else str(value).strip()

    def has(self, name: str) -> bool:
        """Whether a column exists and has text."""
        return name in self._values and bool(self.text(name))

    def texts(self, name: str) -> tuple[str, ...]:
        """The values of a column of lists as texts."""
        value = self[name]
        return tuple(str(one).strip() for one in (value if isinstance(value, list) else [value]) if one is not None)

    def image(self, name: str = "image") -> ExampleImage:
        """The image of a column."""
        if name not in self._images:
            raise DataError(f"{self._where}: no image in a column {name!r}, as the published table has. Copy it again")
        return self._images[name]


def read_published(path: str, published: Published) -> list[Example]:
    """The examples of a folder that has the files of a benchmark, or of one of its files."""
    examples: list[Example] = []
    groups = _RowGroups()
    for file in _find_files(Path(path), published):
        for row in _read_tsv(file) if file.suffix == ".tsv" else _read_parquet(file, groups):
            row.number = len(examples)
            examples.append(published.example(row))
    return examples


def has_published(path: str) -> bool:
    """Whether a path is a Parquet or TSV file, or a folder with some; shard folders have Parquet files of their own."""
    where = Path(path)
    if where.is_file():
        return where.suffix in SUFFIXES
    has_shards = next(where.glob("*.tar"), None) is not None
    return where.is_dir() and not has_shards and any(file.suffix in SUFFIXES for file in where.rglob("*"))


def _find_files(where: Path, published: Published) -> list[Path]:
    """Files whose path below the folder matches, else those whose name does."""
    if where.is_file():
        return [where]
    every = sorted(file for file in where.rglob("*") if file.suffix in SUFFIXES)
    for is_named in (False, True):
        for pattern in published.files:
            shown = pattern.rpartition("/")[2] if is_named else pattern
            paths = [(file.name if is_named else file.relative_to(where).as_posix(), file) for file in every]
            if found := [file for path, file in paths if fnmatch(path, shown)]:
                return found
    raise DataError(
        f"{where}: no file {' or '.join(published.files)}, as {published.hub} has. Download them: "
        f"hf download {published.hub} --repo-type dataset --include '{published.files[0]}' --local-dir {where}"
    )


# ------------------------------------------------------------------ Parquet


class _RowGroups:
    """Image columns of Parquet files by row group; those that were read last stay in memory."""

    def __init__(self) -> None:
        self._lock, self._load = threading.Lock(), lru_cache(maxsize=4)(_load_images)

    def read(self, path: Path, column: str, group: int, offset: int) -> bytes:
        with self._lock:  # threads that wait for the same row group read it once
            cells = self._load(path, column, group)
        cell = cells[offset].as_py()
        data = cell.get("bytes") if isinstance(cell, dict) else cell
        if not isinstance(data, bytes):
            raise DataError(
                f"{path}: row {offset} of row group {group} has no image in {column!r}. Copy the file again"
            )
        return data


def _load_images(path: Path, column: str, group: int) -> pa.ChunkedArray:
    try:
        return pq.ParquetFile(path).read_row_group(group, columns=[column])[column]
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path}: cannot be read as Parquet: {error}. Copy it again") from error


@dataclass(frozen=True)
class _ParquetImage:
    """An image in a Parquet file."""

    groups: _RowGroups
    path: Path
    column: str
    group: int
    offset: int

    @cached_property
    def name(self) -> str:
        """Hash of its bytes."""
        return _name(self.read())

    def read(self) -> bytes:
        """Read its row group, unless it is in memory."""
        return self.groups.read(self.path, self.column, self.group, self.offset)


def _read_parquet(path: Path, groups: _RowGroups) -> Iterator[Row]:
    try:
        with pq.ParquetFile(path) as file:
            schema, sizes = file.schema_arrow, [file.metadata.row_group(n).num_rows for n in range(file.num_row_groups)]
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path}: cannot be read as Parquet: {error}. Copy it again") from error
    images = [field.name for field in schema if is_image(field.type)]
    others = [field.name for field in schema if not is_image(field.type)]
    rows = read_rows(str(path), others, 0, _BATCH_ROWS)
    for group, size in enumerate(sizes):
        for offset in range(size):
            shown: dict[str, ExampleImage] = {name: _ParquetImage(groups, path, name, group, offset) for name in images}
            yield Row(str(path), next(rows), shown)


# ------------------------------------------------------------------ TSV


@dataclass(frozen=True)
class _TsvImage:
    """An image of a TSV, in memory."""

    data: bytes
    name: str

    def read(self) -> bytes:
        """The encoded image."""
        return self.data


def _read_tsv(path: Path) -> Iterator[Row]:
    """The rows; the image of one is base64, or the `index` of an earlier row with the same image."""
    csv.field_size_limit(1 << 30)
    images: dict[str, ExampleImage] = {}
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            for values in csv.DictReader(file, delimiter="\t"):
                cell, index = values.pop("image", None) or "", values.get("index") or ""
                if len(cell) >= _MIN_BASE64:
                    data = base64.b64decode(cell)
                    images[index] = _TsvImage(data, _name(data))
                elif cell in images:
                    images[index] = images[cell]
                yield Row(str(path), values, {"image": images[index]} if index in images else {})
    except (OSError, ValueError, csv.Error) as error:
        raise DataError(f"{path}: cannot be read as TSV with images in base64: {error}. Copy it again") from error


def _name(data: bytes) -> str:
    return sha256(data).hexdigest()[:16]
