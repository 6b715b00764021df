"""Read VQA v2: https://visualqa.org/download.html. Questions, and the answers of ten people to each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from saccade.data.readers.vqa import VqaQuestion, find_answers, load_questions
from saccade.evaluate.example import Example
from saccade.evaluate.readers.reader import DataSpec, ImageFolder, text_of


def read(files: Sequence[Path], spec: DataSpec) -> list[Example]:
    """One example per question with answers."""
    return [example for path in files for example in _read(path, spec)]


def _read(path: Path, spec: DataSpec) -> list[Example]:
    folder, questions = ImageFolder(path, spec), load_questions(path, find_answers(path))
    return [_example(asked, path, folder) for asked in questions if asked.consensus is not None]


def _example(asked: VqaQuestion, path: Path, folder: ImageFolder) -> Example:
    return Example(
        id=text_of(asked.record, "question_id", path),
        images=(folder.find(*asked.image_names),),
        question=text_of(asked.record, "question", path),
        references=asked.answers or (str(asked.consensus),),
        group=asked.answer_type,
    )
