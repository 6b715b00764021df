"""Read VQA v2: a json of questions, a json with the answers of ten people to each, a folder of images named by number.

https://visualqa.org/download.html. All questions about an image make one sample.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from saccade.data.readers.json_files import load_json, records
from saccade.data.readers.reader import (
    InputSpec,
    Item,
    Part,
    UnusableError,
    file_part,
    image_folder,
    make_sample,
    read_image,
    read_item,
)
from saccade.data.sample import Sample
from saccade.errors import DataError

_SUFFIXES = (".jpg", ".png", ".jpeg", ".webp")


@dataclass(frozen=True)
class VqaQuestion:
    """One question about an image."""

    record: dict[str, Any]
    """`question_id`, `image_id` and `question`, as in the file."""
    subtype: str
    """The split in the names of its images, such as val2014."""
    answers: tuple[str, ...]
    """The answers of all people."""
    consensus: str | None
    """The consensus answer of the file, or the most frequent one; None without an answer."""
    answer_type: str
    """Category of the answer: yes/no, number or other."""

    @property
    def image_names(self) -> list[str]:
        """Names its image may have: `COCO_train2014_000000000123.jpg`, or just the number."""
        image_id = str(self.record.get("image_id"))
        number = image_id.zfill(12)
        return [f"{stem}{end}" for stem in (f"COCO_{self.subtype}_{number}", number, image_id) for end in _SUFFIXES]


def load_questions(path: Path | str, answers: Path) -> list[VqaQuestion]:
    """Load the questions of a file, with their answers from another one."""
    content = load_json(path)
    subtype = content.get("data_subtype", "") if isinstance(content, dict) else ""
    given = {one.get("question_id"): one for one in records(load_json(answers), "annotations", answers)}
    return [
        _question(record, subtype, given.get(record.get("question_id")) or {})
        for record in records(content, "questions", path)
    ]


def _question(record: dict[str, Any], subtype: str, annotation: dict[str, Any]) -> VqaQuestion:
    given = tuple(
        answer["answer"]
        for answer in annotation.get("answers") or []
        if isinstance(answer, dict) and isinstance(answer.get("answer"), str)
    )
    consensus = annotation.get("multiple_choice_answer")
    if not isinstance(consensus, str):
        consensus = Counter(given).most_common(1)[0][0] if given else None
    return VqaQuestion(record, subtype, given, consensus, str(annotation.get("answer_type") or ""))


def find_answers(path: Path) -> Path:
    """The file of answers next to the questions, by its official name."""
    expected = path.with_name(path.name.replace("OpenEnded_", "").replace("questions", "annotations"))
    if expected == path or not expected.is_file():
        raise DataError(f"{path}: no answers next to it ({expected.name}). Put them there, or give --annotations FILE")
    return expected


def list_parts(spec: InputSpec) -> list[Part]:
    """The file of questions; checks that the answers exist."""
    _answers_path(spec)
    return [file_part(spec.path)]


def _answers_path(spec: InputSpec) -> Path:
    if spec.annotations is None:
        return find_answers(Path(spec.path))
    if not spec.annotations.is_file():
        raise DataError(f"{spec.annotations}: no such file. Check --annotations")
    return spec.annotations


def read_part(spec: InputSpec, part: Part, begin: int) -> Iterator[Item]:
    """Read the images in the order of their first question, from number `begin`."""
    questions: dict[Any, list[VqaQuestion]] = defaultdict(list)
    for question in load_questions(part.path, _answers_path(spec)):
        questions[question.record.get("image_id")].append(question)
    for image_id, asked in list(questions.items())[begin:]:
        key = str(image_id)
        yield read_item(key, _sample, spec, key, asked)


def _sample(spec: InputSpec, key: str, asked: list[VqaQuestion]) -> Sample:
    questions = [
        {"question": one.record["question"], "answer": one.consensus, "question_id": one.record.get("question_id")}
        for one in asked
        if isinstance(one.record.get("question"), str) and one.consensus is not None
    ]
    if not questions:
        raise UnusableError("no answer")
    folder, names = image_folder(spec), asked[0].image_names
    image = next((name for name in names if (folder / name).is_file()), names[0])
    return make_sample(spec, key, [read_image(folder, image)], {"questions": questions, "file_name": image})
