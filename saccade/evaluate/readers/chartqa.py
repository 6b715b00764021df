"""Read ChartQA: https://github.com/vis-nlp/ChartQA. Files of `imgname`, `query` and `label`, charts in `png/`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from saccade.evaluate.example import Example
from saccade.evaluate.readers.reader import DataSpec, ImageFolder, load_records, text_of


def read(files: Sequence[Path], spec: DataSpec) -> list[Example]:
    """One example per question; `human` and `augmented` questions are scored apart."""
    examples = []
    for path in files:
        folder, group = ImageFolder(path, spec), path.stem.rpartition("_")[2]
        examples += [
            Example(
                id=f"{path.stem}/{number}",
                images=(folder.find(text_of(record, "imgname", path)),),
                question=text_of(record, "query", path),
                references=(text_of(record, "label", path),),
                group=group,
            )
            for number, record in enumerate(load_records(path))
        ]
    return examples
