"""Read COCO captions: https://cocodataset.org/#format-data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from saccade.data.readers.coco import load_captions
from saccade.evaluate.example import Example
from saccade.evaluate.readers.reader import DataSpec, ImageFolder, text_of


def read(files: Sequence[Path], spec: DataSpec) -> list[Example]:
    """One example per image that has captions."""
    return [example for path in files for example in _read(path, spec)]


def _read(path: Path, spec: DataSpec) -> list[Example]:
    content, folder = load_captions(path), ImageFolder(path, spec)
    return [
        Example(
            id=str(image["id"]),
            images=(folder.find(text_of(image, "file_name", path)),),
            references=tuple(content.captions[image["id"]]),
        )
        for image in content.images
        if image.get("id") in content.captions
    ]
