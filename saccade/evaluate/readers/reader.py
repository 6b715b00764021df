"""What the readers share: where data is, json files, and the folder that has the images."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from saccade.errors import DataError
from saccade.evaluate.example import ImageFile

IMAGE_SUFFIXES = (".jpg", ".png", ".jpeg", ".webp")


@dataclass(frozen=True, kw_only=True)
class DataSpec:
    """Where evaluation data is and how to read it."""

    path: str
    """A shard folder, a folder with annotation files, or one such file."""
    kind: str | None = None
    """The format; detected if None."""
    images: Path | None = None
    """Folder of the image files; found beside the annotations if None."""


def load_json(path: Path) -> Any:
    """The content of a JSON file."""
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: cannot be read as JSON: {error}. Check the file") from error


def load_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Numbered objects of a file with one JSON object per line."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, _object(json.loads(line), path, number)
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: cannot be read as one JSON object per line: {error}. Check the file") from error


def _object(value: Any, path: Path, number: int) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DataError(f"{path}, line {number}: a {type(value).__name__}, not a JSON object")
    return value


def load_records(path: Path) -> list[dict[str, Any]]:
    """Objects of a JSON array, or of a file with one object per line."""
    with path.open("rb") as file:
        is_array = file.read(64).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")
    if not is_array:
        return [record for _, record in load_lines(path)]
    return [_object(record, path, number) for number, record in enumerate(load_json(path), 1)]


def text_of(record: dict[str, Any], name: str, path: Path) -> str:
    """A field that must be text, or a number."""
    value = record.get(name)
    if isinstance(value, bool) or not isinstance(value, str | int | float) or not str(value).strip():
        raise DataError(f"{path}: a record without {name!r}: {str(record)[:120]}. Check the file")
    return str(value).strip()


class ImageFolder:
    """Finds the image files that annotations name: in the folder given, or beside the annotations and one level below.

    Images are identified by their path relative to that folder, or to the data: a file name alone may occur in several folders.
    """

    def __init__(self, annotations: Path, spec: DataSpec) -> None:
        images, data = spec.images, Path(spec.path)
        if images is not None and not images.is_dir():
            raise DataError(f"{images}: no such folder. Check --images")
        self._root = images or (data if data.is_dir() else data.parent)
        beside = annotations.parent
        near = [beside, *_subfolders(beside)]
        if beside.name == "annotations":  # COCO has its images beside that folder
            near += [beside.parent, *_subfolders(beside.parent)]
        self._annotations, self._folders = annotations, [images] if images is not None else near

    def find(self, *names: str) -> ImageFile:
        """The first of these names that is a file; with their folder's names they may not leave the folder."""
        for name in names:
            if Path(name).is_absolute() or ".." in Path(name).parts:
                raise DataError(f"{self._annotations}: the image {name} is outside of the image folder. Correct it")
        for folder in self._folders:
            for name in names:
                if (folder / name).is_file():
                    self._folders = [folder, *(other for other in self._folders if other != folder)]
                    path = folder / name
                    return ImageFile(path, Path(os.path.relpath(path, self._root)).as_posix())
        raise DataError(f"{self._annotations}: the image {names[0]} is missing. Give its folder: --images FOLDER")


def _subfolders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir())
