"""Rows of Parquet files, a batch at a time: what lists of links and embedded images have in common."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from saccade.data.readers.reader import InputSpec, Part, file_part
from saccade.errors import ConfigError, DataError

_BUFFER_BYTES = 1 << 20
"""Read ahead for each column. With it a page of a column is in memory, without it all of its row group."""


def list_files(spec: InputSpec) -> list[Part]:
    """One file, or all Parquet files in a folder and below, by name."""
    path = Path(spec.path)
    files = sorted(path.rglob("*.parquet")) if path.is_dir() else [path]
    if not files:
        raise DataError(f"{path}: no .parquet files in it. Check the path")
    return [file_part(str(file)) for file in files]


def schema_of(path: str) -> pa.Schema:
    """The columns of a file."""
    with _open(path) as file:
        return file.schema_arrow


def _open(path: str) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(path, buffer_size=_BUFFER_BYTES, pre_buffer=False)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path}: cannot be read as Parquet: {error}. Copy it again") from error


def read_rows(path: str, columns: Sequence[str], begin: int, batch_rows: int) -> Iterator[dict[str, Any]]:
    """Rows from number `begin` as dicts. Row groups before it are not read."""
    with _open(path) as file:
        groups = list(range(file.num_row_groups))
        while groups and begin >= file.metadata.row_group(groups[0]).num_rows:
            begin -= file.metadata.row_group(groups.pop(0)).num_rows
        try:
            for batch in file.iter_batches(batch_rows, row_groups=groups, columns=list(columns)):
                yield from batch.slice(begin).to_pylist()
                begin = max(0, begin - batch.num_rows)
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"{path}: damaged: {error}. Copy it again") from error


def find_column(spec: InputSpec, schema: pa.Schema, role: str, names: Sequence[str]) -> str | None:
    """The column of a role: as given, else the first of the usual names, whatever their case."""
    if (given := spec.columns.get(role)) is not None:
        if given not in schema.names:
            raise ConfigError(f"{spec.path}: no column {given!r} for {role}. It has {', '.join(schema.names)}")
        return given
    by_lower = {name.lower(): name for name in reversed(schema.names)}
    return next((by_lower[name] for name in names if name in by_lower), None)


def is_text(kind: pa.DataType) -> bool:
    """Text, of any width of offset."""
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def is_binary(kind: pa.DataType) -> bool:
    """Bytes, of any width of offset."""
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind))


def is_list(kind: pa.DataType) -> bool:
    """A list, of any width of offset."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def plain_columns(schema: pa.Schema) -> list[str]:
    """The columns that can go into a json as they are: numbers, texts, dates."""
    return [field.name for field in schema if not pa.types.is_nested(field.type) and not is_binary(field.type)]
