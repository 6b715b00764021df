"""Read plain jsonl, the format for data of one's own. Each line has

id        text; the line number if not given
image     a path below the image folder; or `images`, a list of them; or neither
question  text; without one the example is an image with captions
answer    text; or `answers`, several accepted ones; or `caption`, `captions`
choices   the options of a multiple-choice question; `answer` is one of them, its letter or its index
group     a category to score apart
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from saccade.errors import DataError
from saccade.evaluate.example import Example
from saccade.evaluate.readers.reader import DataSpec, ImageFolder, load_lines

_FIELDS = {"id", "image", "images", "question", "answer", "answers", "caption", "captions", "choices", "group"}


def read(files: Sequence[Path], spec: DataSpec) -> list[Example]:
    """One example per line."""
    examples = []
    for path in files:
        folder = ImageFolder(path, spec)
        prefix = f"{path.stem}/" if len(files) > 1 else ""
        for number, record in load_lines(path):
            examples.append(_example(record, f"{prefix}{record.get('id', number)}", folder, f"{path}, line {number}"))
    return examples


def _example(record: dict[str, Any], name: str, folder: ImageFolder, where: str) -> Example:
    if surplus := record.keys() - _FIELDS:
        raise DataError(f"{where}: unknown field {min(surplus)!r}. Fields: {', '.join(sorted(_FIELDS))}")
    paths = record.get("images") or ([record["image"]] if record.get("image") else [])
    choices = tuple(map(str, record.get("choices") or ()))
    references = tuple(
        _choice(reference, choices, where) if choices else str(reference).strip() for reference in _references(record)
    )
    if not references:
        raise DataError(f"{where}: no answer. Give it answer, answers, caption or captions")
    return Example(
        id=name,
        images=tuple(folder.find(str(path)) for path in paths),
        question=record.get("question"),
        references=references,
        choices=choices,
        group=str(record.get("group") or ""),
    )


def _references(record: dict[str, Any]) -> tuple[Any, ...]:
    for name in ("answers", "captions"):
        if record.get(name):
            return tuple(record[name])
    return tuple(record[name] for name in ("answer", "caption") if record.get(name) is not None)


def _choice(answer: Any, choices: tuple[str, ...], where: str) -> str:
    """The text of the right choice, given as text, letter or index."""
    if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(choices):
        return choices[answer]
    if str(answer) in choices:
        return str(answer)
    letter = str(answer).strip().upper()
    if len(letter) == 1 and 0 <= ord(letter) - ord("A") < len(choices):
        return choices[ord(letter) - ord("A")]
    raise DataError(f"{where}: the answer {answer!r} is none of the choices {list(choices)}")
