"""Read captions or questions from a table: one JSON object per line, a JSON array, or CSV or TSV with a header.

    image      a path below the image folder, or a data URL; `images` for several; `file_name` in image folders
    caption    or `captions`, `text`; consecutive rows with the same image and a caption each are one entry
    question   with `answer` or `answers`, and `choices` if it has some
    id         optional

Other fields are metadata. Entries know where their images are, so that evaluation reads the same tables without reading
their images.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from saccade.data.readers.json_files import read_values
from saccade.data.readers.reader import (
    InputSpec,
    Item,
    Merged,
    Part,
    Skipped,
    UnusableError,
    file_part,
    make_sample,
    read_image,
    read_item,
)
from saccade.data.sample import Sample
from saccade.errors import DataError

SUFFIXES = (".jsonl", ".csv", ".tsv")
_IMAGES = ("images", "image", "file_name", "file_names", "image_path", "filename")
_ANSWERS, _CAPTIONS = ("answers", "answer"), ("captions", "caption", "text")
_QUESTION, _CHOICES = "question", "choices"
_TAKEN = frozenset({*_IMAGES, *_ANSWERS, *_CAPTIONS, _QUESTION, _CHOICES})
_DELIMITERS = ",;\t|"
_HEAD_BYTES = 1 << 16


@dataclass(frozen=True)
class Entry:
    """The content of one row, or of several rows that caption the same image."""

    number: int
    """Number of its first row, from 0; blank lines and the header are not counted."""
    num_rows: int
    images: tuple[str, ...]
    """Paths or data URLs."""
    question: str | None
    texts: tuple[Any, ...]
    """Captions, or the answers to the question: texts, or numbers if the table has numbers."""
    choices: tuple[str, ...]
    fields: dict[str, Any]
    """The other fields of the first row."""


def list_parts(spec: InputSpec) -> list[Part]:
    """The file; in a folder of images, every table that names images."""
    path = Path(spec.path)
    tables = find_tables(path) if path.is_dir() else [path]
    if not tables:
        raise DataError(f"{path}: no table ({', '.join(SUFFIXES)}) that names images. Check the path")
    return [file_part(str(table)) for table in tables]


def find_tables(folder: Path) -> list[Path]:
    """The tables directly in a folder that name images and texts."""
    return [path for path in sorted(folder.iterdir()) if path.suffix in SUFFIXES and is_table(path)]


def is_table(path: Path) -> bool:
    """Whether the first row of a file has an image and a caption or a question."""
    try:
        row = next(_read_cells(path), None) if path.suffix in (".csv", ".tsv") else _first_object(path)
    except (OSError, ValueError, RecursionError, csv.Error):
        return False
    return isinstance(row, dict) and bool(row.keys() & set(_IMAGES)) and bool(row.keys() & {_QUESTION, *_CAPTIONS})


def _first_object(path: Path) -> Any:
    """The first object of an array or of lines; an error if it does not fit into the beginning of the file."""
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES).decode("utf-8-sig", errors="replace")
    return json.JSONDecoder().raw_decode(head.lstrip("[ \t\r\n"))[0]


def read_part(spec: InputSpec, part: Part, begin: int) -> Iterator[Item]:
    """Read the rows in order, from number `begin`."""
    folder = spec.images if spec.images is not None else Path(part.path).parent
    first = max(0, begin - 1)  # a row is merged if it has the image of the row before it
    for entry in read_entries(Path(part.path), first):
        if isinstance(entry, Skipped):
            if int(entry.key) >= begin:
                yield entry
            continue
        if entry.number >= begin:
            key = str(entry.fields.get("id", entry.number))
            yield read_item(key, _sample, spec, key, entry, folder)
        for merged in range(max(begin, entry.number + 1), entry.number + entry.num_rows):
            yield Merged(str(merged))


def _sample(spec: InputSpec, key: str, entry: Entry, folder: Path) -> Sample:
    if not entry.images:
        raise UnusableError("no image")
    texts = [str(text).strip() for text in entry.texts]
    metadata = dict(entry.fields)
    if entry.question is not None:
        asked: dict[str, Any] = {"question": entry.question, "answer": texts[0]}
        if len(texts) > 1:
            asked["answers"] = texts
        if entry.choices:
            asked["choices"] = list(entry.choices)
        metadata["questions"] = [asked]
    else:
        metadata["captions"] = list(dict.fromkeys(texts))
    paths = [image for image in entry.images if not image.startswith("data:")]
    metadata |= {"file_names": paths} if paths else {}
    return make_sample(spec, key, [read_image(folder, image) for image in entry.images], metadata)


# ------------------------------------------------------------------ rows and entries


def read_entries(path: Path, begin: int = 0) -> Iterator[Entry | Skipped]:
    """The entries from row number `begin`; rows that are none are skipped, with their number as key."""
    group: Entry | None = None
    for number, row in enumerate(_read_rows(path, begin), begin):
        try:
            entry = _entry(number, row)
        except UnusableError as error:
            if group is not None:
                yield group
            group = None
            yield Skipped(str(number), error.reason, error.detail)
            continue
        if group is not None and _captions_same_image(group, entry):
            texts = (*group.texts, *entry.texts)
            group = Entry(group.number, group.num_rows + 1, group.images, None, texts, (), group.fields)
            continue
        if group is not None:
            yield group
        group = entry
    if group is not None:
        yield group


def _captions_same_image(one: Entry, other: Entry) -> bool:
    return bool(one.images) and one.images == other.images and one.question is None and other.question is None


def _entry(number: int, row: Any) -> Entry:
    if not isinstance(row, dict):
        raise row if isinstance(row, UnusableError) else UnusableError("not a JSON object", f"a {type(row).__name__}")
    if None in row:
        raise UnusableError("more cells than the header", str(row[None])[:80])
    question = row.get(_QUESTION)
    texts = _listed(row, _ANSWERS if question is not None else (*_CAPTIONS, *_ANSWERS))
    if not texts:
        raise UnusableError("no text", "no answer" if question is not None else "no caption")
    fields = {name: value for name, value in row.items() if name not in _TAKEN and value is not None}
    images, choices = (tuple(map(str, _listed(row, names))) for names in (_IMAGES, (_CHOICES,)))
    return Entry(number, 1, images, None if question is None else str(question), texts, choices, fields)


def _listed(row: dict[str, Any], names: Sequence[str]) -> tuple[Any, ...]:
    """The values of the first of these fields that has some: a list, one value, or a list as JSON text in a cell."""
    for name in names:
        value = row.get(name)
        if isinstance(value, str) and value.startswith("["):
            with suppress(ValueError):
                value = json.loads(value)
        values = value if isinstance(value, list) else [value]
        if found := tuple(one for one in values if one is not None and str(one).strip()):
            return found
    return ()


def _read_rows(path: Path, begin: int) -> Iterator[Any]:
    """The rows of a table as dicts, from number `begin`; a line that is not JSON is an `UnusableError` in its place."""
    try:
        if path.suffix in (".csv", ".tsv"):
            yield from islice(_read_cells(path), begin, None)
        else:
            yield from read_values(path, begin)
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}: cannot be read as a table: {error}. Check the file") from error
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}. Check the path") from error


def _read_cells(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a CSV or TSV; the delimiter is the most frequent one of the header. Empty cells have no value."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        header = file.readline()
        file.seek(0)
        delimiter = "\t" if path.suffix == ".tsv" else max(_DELIMITERS, key=header.count)
        rows = csv.DictReader(file, delimiter=delimiter, skipinitialspace=True)
        rows.fieldnames = [name.strip().lower() for name in rows.fieldnames or []]
        yield from ({name: value or None for name, value in row.items()} for row in rows)
