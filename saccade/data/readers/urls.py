"""Read lists of URLs in Parquet, as LAION publishes them: a url, its alt text, and scores that become metadata."""

from collections.abc import Iterator, Mapping
from typing import Any

from saccade.data.readers.parquet import find_column, list_files, plain_columns, read_rows, schema_of
from saccade.data.readers.reader import InputSpec, Item, Link, Part, UnusableError, read_item
from saccade.errors import DataError

URL_NAMES = ("url", "image_url", "img_url")
TEXT_NAMES = ("caption", "text", "alt_text", "alt", "title")
_USUAL_NAMES = {"aesthetic_score": "aesthetic", "clip_similarity": "similarity"}
"""Scores under other names in some published lists."""
_BATCH_ROWS = 4096


def list_parts(spec: InputSpec) -> list[Part]:
    """The Parquet files; each has a column of URLs and one of texts."""
    parts = list_files(spec)
    for part in parts:
        _columns(spec, part)
    return parts


def read_part(spec: InputSpec, part: Part, begin: int) -> Iterator[Item]:
    """Read the rows in order, from number `begin`."""
    url, text = _columns(spec, part)
    rows = read_rows(part.path, plain_columns(schema_of(part.path)), begin, _BATCH_ROWS)
    for number, row in enumerate(rows, begin):
        key = f"{part.name}:{number}"
        yield read_item(key, _link, key, row, url, text)


def _columns(spec: InputSpec, part: Part) -> tuple[str, str]:
    schema = schema_of(part.path)
    url, text = find_column(spec, schema, "url", URL_NAMES), find_column(spec, schema, "text", TEXT_NAMES)
    if url is None or text is None:
        role = "url" if url is None else "text"
        raise DataError(
            f"{part.path}: which column is the {role}? It has {', '.join(schema.names)}. Name it: --column {role}=NAME"
        )
    return url, text


def _link(key: str, row: Mapping[str, Any], url: str, text: str) -> Link:
    if not isinstance(row[url], str) or not row[url].strip():
        raise UnusableError("no url")
    if not isinstance(row[text], str) or not row[text].strip():
        raise UnusableError("no text")
    known = {name.lower(): value for name, value in row.items() if name not in (url, text) and value is not None}
    metadata = {_USUAL_NAMES.get(name, name): value for name, value in known.items()}
    return Link(key, row[url], {"url": row[url], **metadata}, row[text])
