"""Read loose files: `KEY.jpg` next to `KEY.txt` or `KEY.json`, in a folder and its subfolders."""

import json
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from saccade.data.image_formats import IMAGE_EXTENSIONS, UNSUPPORTED_EXTENSIONS
from saccade.data.readers.reader import (
    InputSpec,
    Item,
    Part,
    UnusableError,
    make_sample,
    read_image_file,
    read_item,
    unsupported_image,
)
from saccade.data.sample import Sample
from saccade.errors import DataError

_TEXT_EXTENSIONS = {"txt", "json"}


def list_parts(spec: InputSpec) -> list[Part]:
    """Every folder with images or json files, by name."""
    parts = []
    for folder, below, names in os.walk(spec.path):
        below.sort()
        if any(_extension(name) in IMAGE_EXTENSIONS | UNSUPPORTED_EXTENSIONS | {"json"} for name in names):
            parts.append(Part(folder, sum((Path(folder) / name).lstat().st_size for name in names)))
    if not parts:
        raise DataError(
            f"{spec.path}: no images in it or below ({', '.join(sorted(IMAGE_EXTENSIONS))}). Check the path"
        )
    return parts


def read_part(spec: InputSpec, part: Part, begin: int) -> Iterator[Item]:
    """Read the keys of one folder by name, from number `begin`."""
    folder = Path(part.path)
    groups: dict[str, dict[str, Path]] = defaultdict(dict)
    for entry in os.scandir(folder):
        extension = _extension(entry.name)
        if extension in IMAGE_EXTENSIONS | UNSUPPORTED_EXTENSIONS | _TEXT_EXTENSIONS and entry.is_file():
            groups[entry.name[: -len(extension) - 1]][extension] = folder / entry.name
    for stem in sorted(groups)[begin:]:
        key = (folder / stem).relative_to(spec.path).as_posix()
        yield read_item(key, _sample, spec, key, groups[stem])


def _extension(name: str) -> str:
    return name.rpartition(".")[2].lower()


def _sample(spec: InputSpec, key: str, files: dict[str, Path]) -> Sample:
    images = [path for extension, path in sorted(files.items()) if extension in IMAGE_EXTENSIONS]
    if not images and (unsupported := UNSUPPORTED_EXTENSIONS & files.keys()):
        raise unsupported_image(min(unsupported))
    if len(images) > 1:
        raise UnusableError("several images of one name", ", ".join(path.name for path in images))
    text = _read_text(files["txt"]) if "txt" in files else None
    fields: Any = _parse(_read_text(files["json"])) if "json" in files else {}
    return make_sample(spec, key, [read_image_file(path) for path in images], fields, text)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UnusableError("text is not UTF-8", f"{path}: {error}") from error
    except OSError as error:
        raise UnusableError("text file unreadable", f"{path}: {error}") from error


def _parse(text: str) -> dict[str, Any]:
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UnusableError("json unreadable", str(error)) from error
    if not isinstance(fields, dict):
        remedy = "Give a file of all conversations as chat:FILE, with --images FOLDER"
        raise UnusableError("json is not an object", f"a {type(fields).__name__}. {remedy}")
    return fields
