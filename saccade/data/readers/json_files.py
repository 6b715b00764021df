"""Records of JSON files: one object per line, an array, or a list under a field."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from saccade.data.readers.reader import UnusableError
from saccade.errors import DataError


def load_json(path: Path | str) -> Any:
    """Load a JSON file."""
    try:
        with Path(path).open(encoding="utf-8-sig") as file:
            return json.load(file)
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: cannot be read as JSON: {error}. Check the file") from error


def records(content: Any, field_name: str, path: Path | str) -> list[dict[str, Any]]:
    """The list of objects under a field of a JSON file."""
    found = content.get(field_name) if isinstance(content, dict) else None
    if not isinstance(found, list) or not all(isinstance(record, dict) for record in found):
        raise DataError(f"{path}: no list of objects called {field_name!r}. Name the kind of the input: KIND:{path}")
    return found


def read_values(path: Path, begin: int = 0) -> Iterator[Any]:
    """The elements of a JSON array, or one value per line, from number `begin`.

    A line that is not JSON gives an `UnusableError` in its place, which has the number of the line.
    """
    with path.open("rb") as file:
        if file.read(64).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
            yield from load_json(path)[begin:]
            return
        file.seek(0)
        for number, line in islice(((n, line) for n, line in enumerate(file, 1) if line.strip()), begin, None):
            try:
                yield json.loads(line)
            except (ValueError, RecursionError) as error:
                yield _broken_line(number, error)


def _broken_line(number: int, error: Exception) -> UnusableError:
    what = f"{error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
    return UnusableError("not a JSON object", f"line {number}: {what}")
