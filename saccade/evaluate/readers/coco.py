"""Read COCO captions: https://cocodataset.org/#format-data."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from saccade.errors import DataError
from saccade.evaluate.example import Example
from saccade.evaluate.readers.reader import DataSpec, ImageFolder, load_json, text_of


def read(files: Sequence[Path], spec: DataSpec) -> list[Example]:
    """One example per image that has captions."""
    return [example for path in files for example in _read(path, spec)]


def _read(path: Path, spec: DataSpec) -> list[Example]:
    content, captions = load_json(path), defaultdict(list)
    for annotation in _records(content, "annotations", path):
        if isinstance(annotation.get("caption"), str) and annotation["caption"].strip():
            captions[annotation.get("image_id")].append(annotation["caption"].strip())
    if not captions:
        raise DataError(f"{path}: its annotations have no captions. Give captions_*.json, not instances_*.json")
    folder = ImageFolder(path, spec)
    return [
        Example(
            id=str(image["id"]),
            images=(folder.find(text_of(image, "file_name", path)),),
            references=tuple(captions[image["id"]]),
        )
        for image in _records(content, "images", path)
        if image.get("id") in captions
    ]


def _records(content: Any, name: str, path: Path) -> list[dict[str, Any]]:
    found = content.get(name) if isinstance(content, dict) else None
    if not isinstance(found, list) or not all(isinstance(record, dict) for record in found):
        raise DataError(f"{path}: no list of objects called {name!r}, as COCO captions have. Check the file")
    return found
