"""Read POPE: https://github.com/AoiDragon/POPE. Files of questions for an object that is or is not in the image."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from saccade.evaluate.example import Example
from saccade.evaluate.readers.reader import DataSpec, ImageFolder, load_records, text_of


def read(files: Sequence[Path], spec: DataSpec) -> list[Example]:
    """One example per question; each file (random, popular, adversarial) is scored apart."""
    examples = []
    for path in files:
        folder, group = ImageFolder(path, spec), path.stem.rpartition("_")[2]
        examples += [
            Example(
                id=f"{path.stem}/{record.get('question_id', number)}",
                images=(folder.find(text_of(record, "image", path)),),
                question=text_of(record, "text", path),
                references=(text_of(record, "label", path).lower(),),
                group=group,
            )
            for number, record in enumerate(load_records(path))
        ]
    return examples
