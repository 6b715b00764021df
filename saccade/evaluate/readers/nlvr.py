"""Read NLVR (https://lil.nlp.cornell.edu/nlvr/) and NLVR2: a sentence that is true or false of one image, or of two."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from saccade.evaluate.example import Example, ExampleImage
from saccade.evaluate.readers.reader import DataSpec, ImageFolder, load_records, text_of


def read(files: Sequence[Path], spec: DataSpec) -> list[Example]:
    """One example per sentence."""
    examples = []
    for path in files:
        folder = ImageFolder(path, spec)
        for record in load_records(path):
            shown = _images(record, path, folder)
            noun = "image" if len(shown) == 1 else "two images"
            sentence = text_of(record, "sentence", path)
            examples.append(
                Example(
                    id=f"{path.stem}/{text_of(record, 'identifier', path)}",
                    images=shown,
                    question=f'Is this statement true of the {noun}? "{sentence}"',
                    references=("yes" if str(record.get("label")).lower() == "true" else "no",),
                )
            )
    return examples


def _images(record: dict[str, Any], path: Path, folder: ImageFolder) -> tuple[ExampleImage, ...]:
    """NLVR: `dev-12-0-0.png` of six orders of the same boxes, the first. NLVR2: a left and a right image."""
    name = text_of(record, "identifier", path)
    if "left_url" in record or "right_url" in record:
        stem = name.rpartition("-")[0]
        return tuple(folder.find(f"{stem}-img{side}.png", f"{stem}-img{side}.jpg") for side in (0, 1))
    split, directory = path.stem.partition("_")[0], str(record.get("directory", ""))
    file = f"{split}-{name}-0.png"
    return (folder.find(file, f"{directory}/{file}", f"images/{directory}/{file}"),)
