"""Parquet files with the images inside, the way Hugging Face `datasets` writes them.

An image is a struct of `bytes` and `path`, or plain bytes; a row has one or a list of them. The text is a caption or several, a
question with its answer, or a conversation. Which column is which is told by names and types, or given: `{"text": "alt"}`.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from saccade.data.readers.chat import take_images
from saccade.data.readers.reader import (
    InputSpec,
    Item,
    Part,
    UnusableError,
    make_sample,
    read_image,
    read_item,
)
from saccade.data.readers.rows import (
    find_column,
    is_binary,
    is_list,
    is_text,
    list_files,
    plain_columns,
    read_rows,
    schema_of,
)
from saccade.data.sample import Sample
from saccade.errors import DataError

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


@dataclass(frozen=True)
class Columns:
    """The column of each role, None where there is none."""

    image: str | None
    conversations: str | None
    question: str | None
    answer: str | None
    text: str | None


def list_parts(spec: InputSpec) -> list[Part]:
    """The Parquet files, each with images and text."""
    parts = list_files(spec)
    for part in parts:
        find_columns(spec, schema_of(part.path))
    return parts


def find_columns(spec: InputSpec, schema: pa.Schema) -> Columns:
    """Which column is which. A form of text that is given counts, else the first: conversations, question and answer, text."""
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
        if len(images) != 1:
            raise _unclear(spec, schema, "image")
        found["image"] = images[0]
    if found["conversations"] is not None:
        found |= {"question": None, "answer": None, "text": None}
    elif found["question"] is not None and found["answer"] is not None:
        found |= {"text": None}
    elif found["text"] is None:
        raise _unclear(spec, schema, "text")
    return Columns(**found)


def _find(spec: InputSpec, schema: pa.Schema, role: str, fits: Callable[[pa.DataType], bool]) -> str | None:
    """Among the columns whose type fits; one that is given must fit too."""
    fitting = pa.schema([field for field in schema if fits(field.type)])
    if role in spec.columns and spec.columns[role] in schema.names and spec.columns[role] not in fitting.names:
        kind = schema.field(spec.columns[role]).type
        raise DataError(f"{spec.path}: column {spec.columns[role]!r} cannot be the {role}: its type is {kind}")
    return find_column(spec, fitting, role, _NAMES[role])


def _unclear(spec: InputSpec, schema: pa.Schema, role: str) -> DataError:
    columns = ", ".join(f"{field.name} ({field.type})" for field in schema)
    return DataError(f"{spec.path}: which column is the {role}? It has {columns}. Name it: --column {role}=NAME")


def is_image(kind: pa.DataType) -> bool:
    """Bytes, a struct with bytes, or a list of either."""
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
    """The rows in order, from number `begin`."""
    schema = schema_of(part.path)
    columns = find_columns(spec, schema)
    roles = [name for name in vars(columns).values() if name is not None]
    rows = read_rows(part.path, list(dict.fromkeys([*roles, *plain_columns(schema)])), begin, _BATCH_ROWS)
    for number, row in enumerate(rows, begin):
        key = f"{part.name}:{number}"
        yield read_item(key, _sample, spec, key, row, columns)


def _sample(spec: InputSpec, key: str, row: Mapping[str, Any], columns: Columns) -> Sample:
    taken = {
        *vars(columns).values(),
        "messages",
        "conversations",
        "questions",
        "captions",
    }  # the last would be read as text
    metadata = {name: value for name, value in row.items() if name not in taken and value is not None}
    if columns.conversations is not None:
        metadata["conversations"] = _turns(row[columns.conversations])
    elif columns.question is not None:
        metadata["questions"] = [{"question": row[columns.question], "answer": _answer(row[columns.answer or ""])}]
    else:
        metadata["captions"] = _texts(row[columns.text or ""])
    return make_sample(spec, key, _images(spec, row[columns.image or ""]), metadata)


def _images(spec: InputSpec, value: Any) -> list[bytes]:
    """The bytes of one image or several; one that is stored as a path is read from the image folder."""
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
    texts = [text.strip() for text in (value if isinstance(value, list) else [value]) if text and text.strip()]
    if not texts:
        raise UnusableError("no text")
    return texts


def _answer(value: Any) -> str:
    """One answer, or the most frequent of several."""
    return Counter(_texts(value)).most_common(1)[0][0]


def _turns(value: Any) -> list[Any]:
    """A conversation as a list of messages: as it is, from JSON in text, or from pairs of `user` and `assistant`."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise UnusableError("no conversation", f"text that is not JSON: {error}") from error
    if not isinstance(value, list) or not value:
        raise UnusableError("no conversation")
    if isinstance(value[0], dict) and {"user", "assistant"} <= value[0].keys():
        return [{"role": role, "content": pair.get(role)} for pair in value for role in ("user", "assistant")]
    return list(take_images(value)[0])
