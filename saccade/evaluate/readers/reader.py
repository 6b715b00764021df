"""What the readers share: where data is, json files, and the folder that has the images."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from saccade.data.readers.json_files import read_values
from saccade.data.readers.reader import UnusableError
from saccade.errors import DataError
from saccade.evaluate.example import ImageFile


@dataclass(frozen=True, kw_only=True)
class DataSpec:
    """A location of evaluation data, and its format."""

    path: str
    """A shard folder, a folder with annotation files, or one such file."""
    kind: str | None = None
    """The format; detected if None."""
    images: Path | None = None
    """Folder of the image files; None is found next to the annotations."""


def load_records(path: Path) -> list[dict[str, Any]]:
    """Objects of a JSON array, or of a file with one object per line."""
    return [_object(record, path, number) for number, record in enumerate(_values(path), 1)]


def _values(path: Path) -> Iterator[Any]:
    try:
        yield from read_values(path)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}. Check the file") from error


def _object(value: Any, path: Path, number: int) -> dict[str, Any]:
    if isinstance(value, UnusableError):
        raise DataError(f"{path}: cannot be read as one JSON object per line: {value.detail}. Check the file")
    if not isinstance(value, dict):
        raise DataError(f"{path}, record {number}: a {type(value).__name__}, not a JSON object")
    return value


def text_of(record: dict[str, Any], name: str, path: Path) -> str:
    """A field that must be text, or a number."""
    value = record.get(name)
    if isinstance(value, bool) or not isinstance(value, str | int | float) or not str(value).strip():
        raise DataError(f"{path}: a record without {name!r}: {str(record)[:120]}. Check the file")
    return str(value).strip()


class ImageFolder:
    """Finds the image files that annotations name: in the folder given, or next to the annotations and one level below.

    Images are identified by their path relative to that folder, or to the data: a file name alone may occur in several
    folders.
    """

    def __init__(self, annotations: Path, spec: DataSpec) -> None:
        images, data = spec.images, Path(spec.path)
        if images is not None and not images.is_dir():
            raise DataError(f"{images}: no such folder. Check --images")
        self._root = images or (data if data.is_dir() else data.parent)
        folder = annotations.parent
        near = [folder, *_subfolders(folder)]
        if folder.name == "annotations":  # COCO has its images next to that folder
            near += [folder.parent, *_subfolders(folder.parent)]
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
