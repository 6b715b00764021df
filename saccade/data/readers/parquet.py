"""Read Parquet files with embedded images, as Hugging Face `datasets` writes them.

An image is a struct of `bytes` and `path`, or plain bytes; a row has one or a list of them. The text is a caption or
several, a question with its answer, or a conversation. Columns are found by name and type, or given: `{"text": "alt"}`.
Consecutive rows with the same image and a caption each (COCO with one caption per row) become one sample with all
captions.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from saccade.data.readers.chat import split_images
from saccade.data.readers.reader import (
    InputSpec,
    Item,
    Merged,
    Part,
    UnusableError,
    file_part,
    make_sample,
    read_image,
    read_item,
)
from saccade.data.sample import Sample
from saccade.errors import ConfigError, DataError

_NAMES = {
    "image": ("image", "images", "img", "jpg", "png", "webp", "picture", "photo"),
    "conversations": ("conversations", "messages", "conversation", "texts"),
    "question": ("question", "query", "problem"),
    "answer": ("answer", "answers", "label", "multiple_choice_answer"),
    "text": ("caption", "captions", "text", "texts", "txt", "alt_text", "description", "sentences"),
}
_TEXT_ROLES = {"conversations", "question", "answer", "text"}
_BATCH_ROWS = 16
"""Rows in memory at once, with their images."""
_BUFFER_BYTES = 1 << 20
"""Read-ahead per column. With it one page of a column is in memory, without it the whole row group."""


@dataclass(frozen=True)
class Columns:
    """The column of each role, None if there is none."""

    image: str | None
    conversations: str | None
    question: str | None
    answer: str | None
    text: str | None


def list_parts(spec: InputSpec) -> list[Part]:
    """The Parquet files; each has images and text."""
    parts = list_files(spec)
    for part in parts:
        find_columns(spec, schema_of(part.path))
    return parts


def find_columns(spec: InputSpec, schema: pa.Schema) -> Columns:
    """The column of each role. A given form of text wins, else the first: conversations, question and answer, text."""
    fits: dict[str, Callable[[pa.DataType], bool]] = {
        "image": is_image,
        "conversations": lambda kind: _is_turns(kind) or is_text(kind),
        "question": is_text,
        "answer": _is_texts,
        "text": _is_texts,
    }
    is_given = bool(spec.columns.keys() & _TEXT_ROLES)
    wanted = [role for role in fits if role not in _TEXT_ROLES or role in spec.columns or not is_given]
    found = {role: _find(spec, schema, role, fits[role]) if role in wanted else None for role in fits}
    if found["image"] is None:
        images = [field.name for field in schema if is_image(field.type)]
        if len(images) > 1 or not (images or found["conversations"]):
            raise _unclear(spec, schema, "image")
        found["image"] = images[0] if images else None
    if found["conversations"] is not None:
        found |= {"question": None, "answer": None, "text": None}
    elif found["question"] is not None and found["answer"] is not None:
        found |= {"text": None}
    elif found["text"] is None:
        raise _unclear(spec, schema, "text")
    return Columns(**found)


def _find(spec: InputSpec, schema: pa.Schema, role: str, fits: Callable[[pa.DataType], bool]) -> str | None:
    """Search among the columns whose type fits; a given one must fit too."""
    fitting = pa.schema([field for field in schema if fits(field.type)])
    if role in spec.columns and spec.columns[role] in schema.names and spec.columns[role] not in fitting.names:
        kind = schema.field(spec.columns[role]).type
        raise DataError(f"{spec.path}: column {spec.columns[role]!r} cannot be the {role}: its type is {kind}")
    return find_column(spec, fitting, role, _NAMES[role])


def _unclear(spec: InputSpec, schema: pa.Schema, role: str) -> DataError:
    columns = ", ".join(f"{field.name} ({field.type})" for field in schema)
    return DataError(f"{spec.path}: which column is the {role}? It has {columns}. Name it: --column {role}=NAME")


def is_image(kind: pa.DataType) -> bool:
    """Whether a column contains images: bytes, a struct with bytes, or a list of either."""
    if is_list(kind):
        return is_image(kind.value_type)
    if pa.types.is_struct(kind):
        return any(kind.field(n).name == "bytes" and is_binary(kind.field(n).type) for n in range(kind.num_fields))
    return is_binary(kind)


def _is_turns(kind: pa.DataType) -> bool:
    return is_list(kind) and bool(pa.types.is_struct(kind.value_type))


def _is_texts(kind: pa.DataType) -> bool:
    return is_text(kind.value_type if is_list(kind) else kind)


def read_part(spec: InputSpec, part: Part, begin: int) -> Iterator[Item]:
    """Read the rows in order, from number `begin`."""
    schema = schema_of(part.path)
    columns = find_columns(spec, schema)
    roles = [name for name in vars(columns).values() if name is not None]
    first = max(0, begin - 1)  # a row is merged if it has the image of the row before it
    rows = read_rows(part.path, list(dict.fromkeys([*roles, *plain_columns(schema)])), first, _BATCH_ROWS)
    for number, group in _groups(rows, first, columns):
        key = f"{part.name}:{number}"
        if number >= begin:
            yield read_item(key, _sample, spec, key, group, columns)
        for merged in range(max(begin, number + 1), number + len(group)):
            yield Merged(f"{part.name}:{merged}")


def _groups(
    rows: Iterator[dict[str, Any]], number: int, columns: Columns
) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """Consecutive rows with the same image and a caption each, and the number of the first; other rows alone."""
    group: list[dict[str, Any]] = []
    for row in rows:
        if group and _has_same_image(group[0], row, columns):
            del row[columns.image or ""]
            group.append(row)
            continue
        if group:
            yield number, group
            number += len(group)
        group = [row]
    if group:
        yield number, group


def _has_same_image(one: Mapping[str, Any], other: Mapping[str, Any], columns: Columns) -> bool:
    if columns.text is None or columns.image is None or one[columns.image] is None:
        return False
    return bool(one[columns.image] == other[columns.image])


def _sample(spec: InputSpec, key: str, group: Sequence[Mapping[str, Any]], columns: Columns) -> Sample:
    row = group[0]
    taken = {
        *vars(columns).values(),
        "messages",
        "conversations",
        "questions",
        "captions",
    }  # the last four would be read as text
    metadata = {name: value for name, value in row.items() if name not in taken and value is not None}
    if columns.conversations is not None:
        metadata["conversations"] = _turns(row[columns.conversations])
    elif columns.question is not None:
        metadata["questions"] = [{"question": row[columns.question], "answer": _answer(row[columns.answer or ""])}]
    else:
        captions = [text for each in group for text in _texts(each[columns.text or ""])]
        if not captions:
            raise UnusableError("no text")
        metadata["captions"] = list(dict.fromkeys(captions))
    return make_sample(spec, key, _images(spec, row[columns.image]) if columns.image else [], metadata)


def _images(spec: InputSpec, value: Any) -> list[bytes]:
    """The bytes of one image or several; an image stored as a path is read from the image folder."""
    if value is None:
        return []
    images = []
    for image in value if isinstance(value, list) else [value]:
        data = image.get("bytes") if isinstance(image, dict) else image
        if data is None:
            path = image.get("path") if isinstance(image, dict) else None
            if path is None or spec.images is None:
                raise UnusableError(
                    "no image", f"no bytes, path {path!r}. Images that are stored as paths need an image folder"
                )
            data = read_image(spec.images, path)
        images.append(data)
    return images


def _texts(value: Any) -> list[str]:
    return [text.strip() for text in (value if isinstance(value, list) else [value]) if text and text.strip()]


def _answer(value: Any) -> str:
    """One answer, or the most frequent of several."""
    answers = Counter(_texts(value)).most_common(1)
    if not answers:
        raise UnusableError("no text")
    return answers[0][0]


def _turns(value: Any) -> list[Any]:
    """A conversation as a list of messages: from a list, JSON text, or pairs of `user` and `assistant`."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise UnusableError("no conversation", f"text that is not JSON: {error}") from error
    if not isinstance(value, list) or not value:
        raise UnusableError("no conversation")
    if isinstance(value[0], dict) and {"user", "assistant"} <= value[0].keys():
        return [{"role": role, "content": pair.get(role)} for pair in value for role in ("user", "assistant")]
    return list(split_images(value)[0])


# ------------------------------------------------------------------ files, rows, columns


def list_files(spec: InputSpec) -> list[Part]:
    """One file, or all Parquet files below a folder, by name."""
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
    """Read rows as dicts, from number `begin`. Row groups before it are not read."""
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
    """The column of a role: as given, else the first of the usual names, ignoring case."""
    if (given := spec.columns.get(role)) is not None:
        if given not in schema.names:
            raise ConfigError(f"{spec.path}: no column {given!r} for {role}. It has {', '.join(schema.names)}")
        return given
    by_lower = {name.lower(): name for name in reversed(schema.names)}
    return next((by_lower[name] for name in names if name in by_lower), None)


def is_text(kind: pa.DataType) -> bool:
    """Whether a column is text, of any offset width."""
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def is_binary(kind: pa.DataType) -> bool:
    """Whether a column is bytes, of any offset width."""
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind))


def is_list(kind: pa.DataType) -> bool:
    """Whether a column is a list, of any offset width."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def plain_columns(schema: pa.Schema) -> list[str]:
    """The columns that become metadata: numbers, texts, dates."""
    return [field.name for field in schema if not pa.types.is_nested(field.type) and not is_binary(field.type)]
