"""Find evaluation images that the model was trained on, and score without the examples that show them.

write the evaluation images as shards -> find them in the training data (`saccade.data.curate`) -> scores without them
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from saccade.data.curate import find_contamination
from saccade.data.index import open_index
from saccade.data.readers.reader import UnusableError, check_image
from saccade.data.sample import Sample
from saccade.data.shards import ShardWriter, list_shards
from saccade.errors import DataError
from saccade.evaluate.example import Example
from saccade.evaluate.results import Results
from saccade.evaluate.run import examples_of, score_records

MAX_SAMPLES = 20_000
"""Training samples that are compared without a request: measuring them takes about a minute."""


def check_contamination(results: Results, training: Sequence[str], *, is_asked: bool) -> None:
    """Look for the images of all tasks in the training shards, and note the result with the scores of each task.

    A large training set that was never measured is compared only if `is_asked`.
    """
    scores = results.scores
    skipped = [] if is_asked else [path for path in training if not _is_cheap(path)]
    compared = [path for path in training if path not in skipped]
    tasks = [
        task
        for task in results.settings["tasks"]
        if scores["tasks"][task].get("contamination", {}).get("training") != compared
    ]
    by_data: dict[str, list[str]] = {}
    for task in tasks:
        by_data.setdefault(results.settings["tasks"][task]["data"], []).append(task)
    for same in by_data.values():  # tasks on the same data share their images
        found = _shown_in([example for task in same for example in examples_of(results, task)], compared)
        for task in same:
            scores["tasks"][task]["contamination"] = _note(results, task, found, compared, skipped)
    results.write_scores({key: value for key, value in scores.items() if key != "version"})


def check_training_data(paths: Sequence[str]) -> None:
    """Refuse training data that does not exist before anything is evaluated."""
    for path in paths:
        list_shards(path)


def _is_cheap(path: str) -> bool:
    """Whether a training set is small, or its images were compared before."""
    try:
        index = open_index(path, build=False)
    except DataError:
        return False
    return len(index) <= MAX_SAMPLES or (index.folder / "features").is_dir()


def _shown_in(examples: Sequence[Example], training: Sequence[str]) -> dict[str, bool]:
    """Return the names of the images that training samples show, and whether one of these is the same file."""
    images = {image.name: image for example in examples for image in example.images}
    names = {f"{number:08d}": name for number, name in enumerate(sorted(images))}
    found: dict[str, bool] = {}
    if not images or not training:
        return found
    with TemporaryDirectory() as folder:
        shards = Path(folder) / "evaluation"
        with ShardWriter(shards, max_samples=5000) as writer:
            for key, name in names.items():
                if (members := _members(images[name].read())) is not None:
                    writer.write(Sample(key=key, source="evaluation", members=members))
        for path in training:
            for match in find_contamination(path, shards).matches:
                name = names[match.evaluation.rpartition("/")[2]]
                found[name] = found.get(name, False) or match.is_exact
    return found


def _members(data: bytes) -> dict[str, bytes] | None:
    """Return an image as the members of a sample; None if it cannot be decoded."""
    try:
        return {check_image(data): data, "json": json.dumps({"caption": "image"}).encode()}
    except UnusableError:
        return None


def _note(
    results: Results, task: str, found: Mapping[str, bool], compared: Sequence[str], skipped: Sequence[str]
) -> dict[str, Any]:
    records = results.records(task)
    seen = [record["id"] for record in records if any(name in found for name in record["images"])]
    exact = [record["id"] for record in records if any(found.get(name) for name in record["images"])]
    note: dict[str, Any] = {
        "training": list(compared),
        "not_compared": list(skipped),
        "example_ids": seen,
        "num_exact": len(exact),
    }
    if seen:
        clean = [record for record in records if record["id"] not in set(seen)]
        note["clean_metrics"] = score_records(task, clean, results.settings["seed"]) if clean else {}
    return note | {"text": _text(note, len(records))}


def _text(note: Mapping[str, Any], num_examples: int) -> str:
    more = ""
    if note["not_compared"]:
        names = ", ".join(note["not_compared"])
        more = f"; not compared, because missing or large: {names} (--training-data compares them)"
    if not note["training"]:
        return f"training data was not searched for these images{more}"
    if not note["example_ids"]:
        return f"none of its images is in the training data{more}"
    scores = ", ".join(f"{name} {score['value']:.3f}" for name, score in list(note["clean_metrics"].items())[:3])
    without = f"; without them: {scores}" if scores else ""
    num_seen, num_exact = len(note["example_ids"]), note["num_exact"]
    if num_exact == 0 and num_seen > num_examples / 2:
        return (
            f"{num_seen} of {num_examples} examples show an image that looks like one of the training data, none the "
            f"same file: rendered images look alike to this search{without}{more}"
        )
    return (
        f"possible contamination: {num_seen} of {num_examples} examples show an image of the training data, "
        f"{num_exact} of them the same file{without}{more}"
    )
