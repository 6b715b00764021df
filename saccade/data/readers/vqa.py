"""Read VQA v2: a json of questions, a json of answers, a folder of images named by number.

https://visualqa.org/download.html. All questions about an image make one sample.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from saccade.data.readers.reader import (
    InputSpec,
    Item,
    Part,
    UnusableError,
    file_part,
    image_folder,
    load_json,
    make_sample,
    read_image,
    read_item,
    records,
)
from saccade.data.sample import Sample
from saccade.errors import DataError

_EXTENSIONS = (".jpg", ".png", ".jpeg", ".webp")


def list_parts(spec: InputSpec) -> list[Part]:
    """The file of questions; checks that the answers exist."""
    answers_path(spec)
    return [file_part(spec.path)]


def answers_path(spec: InputSpec) -> Path:
    """The annotations: as given, or the file beside the questions with the official name."""
    if spec.annotations is not None:
        if not spec.annotations.is_file():
            raise DataError(f"{spec.annotations}: no such file. Check --annotations")
        return spec.annotations
    path = Path(spec.path)
    expected = path.with_name(path.name.replace("OpenEnded_", "").replace("questions", "annotations"))
    if expected == path or not expected.is_file():
        raise DataError(f"{path}: no answers beside it ({expected.name}). Give the file with --annotations")
    return expected


def read_part(spec: InputSpec, part: Part, begin: int) -> Iterator[Item]:
    """Read the images in the order of their first question, from number `begin`."""
    content = load_json(part.path)
    answers_file = answers_path(spec)
    answers = {
        annotation.get("question_id"): _answer(annotation)
        for annotation in records(load_json(answers_file), "annotations", answers_file)
    }
    subtype = content.get("data_subtype", "")
    questions: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for record in records(content, "questions", part.path):
        questions[record.get("image_id")].append(record)
    for image_id, asked in list(questions.items())[begin:]:
        key = str(image_id)
        yield read_item(key, _sample, spec, key, _image_name(spec, subtype, key), asked, answers)


def _answer(annotation: dict[str, Any]) -> str | None:
    """The consensus answer of the file, or the most frequent one."""
    if isinstance(annotation.get("multiple_choice_answer"), str):
        return str(annotation["multiple_choice_answer"])
    given = Counter(
        answer["answer"]
        for answer in annotation.get("answers") or []
        if isinstance(answer, dict) and isinstance(answer.get("answer"), str)
    )
    return given.most_common(1)[0][0] if given else None


def _image_name(spec: InputSpec, subtype: str, image_id: str) -> str:
    """`COCO_train2014_000000000123.jpg`, or just the number."""
    folder, number = image_folder(spec), image_id.zfill(12)
    stems = [f"COCO_{subtype}_{number}", number, image_id]
    names = [f"{stem}{extension}" for stem in stems for extension in _EXTENSIONS]
    return next((name for name in names if (folder / name).is_file()), names[0])


def _sample(
    spec: InputSpec, key: str, image: str, asked: list[dict[str, Any]], answers: dict[Any, str | None]
) -> Sample:
    questions = [
        {"question": record["question"], "answer": answer, "question_id": record.get("question_id")}
        for record in asked
        if isinstance(record.get("question"), str) and (answer := answers.get(record.get("question_id"))) is not None
    ]
    if not questions:
        raise UnusableError("no answer")
    return make_sample(spec, key, [read_image(image_folder(spec), image)], {"questions": questions, "file_name": image})
