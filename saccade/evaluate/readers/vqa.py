"""Read VQA v2: https://visualqa.org/download.html. Questions, and the answers of ten people to each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from saccade.errors import DataError
from saccade.evaluate.example import Example
from saccade.evaluate.readers.reader import IMAGE_SUFFIXES, DataSpec, ImageFolder, load_json, text_of


def read(files: Sequence[Path], spec: DataSpec) -> list[Example]:
    """One example per question with answers."""
    return [example for path in files for example in _read(path, spec)]


def _read(path: Path, spec: DataSpec) -> list[Example]:
    content, answers_path = load_json(path), _answers_path(path)
    annotations = {record["question_id"]: record for record in load_json(answers_path)["annotations"]}
    folder, subtype = ImageFolder(path, spec), content.get("data_subtype", "")
    return [
        Example(
            id=str(asked["question_id"]),
            images=(folder.find(*_image_names(subtype, str(asked["image_id"]))),),
            question=text_of(asked, "question", path),
            references=_answers(annotation),
            group=str(annotation.get("answer_type") or ""),
        )
        for asked in content["questions"]
        if (annotation := annotations.get(asked["question_id"])) is not None
    ]


def _answers_path(path: Path) -> Path:
    """The file beside the questions with the official name."""
    expected = path.with_name(path.name.replace("OpenEnded_", "").replace("questions", "annotations"))
    if expected == path or not expected.is_file():
        raise DataError(f"{path}: no answers beside it ({expected.name}). Put them there")
    return expected


def _answers(annotation: dict[str, Any]) -> tuple[str, ...]:
    given = [str(answer["answer"]) for answer in annotation.get("answers") or []]
    return tuple(given) or (str(annotation["multiple_choice_answer"]),)


def _image_names(subtype: str, image_id: str) -> list[str]:
    """`COCO_val2014_000000000123.jpg`, or just the number."""
    number = image_id.zfill(12)
    return [f"{stem}{suffix}" for stem in (f"COCO_{subtype}_{number}", number, image_id) for suffix in IMAGE_SUFFIXES]
