"""Evaluate a model: read -> ask -> record -> score.

    task = TaskConfig(task="captioning", data=DataSpec(path="test/"))
    results = evaluate(model, EvaluationConfig(out="results", tasks=(task,)))

The examples of a task are asked from several threads at once, so that the engine or the server batches them. Every
answer is recorded when it arrives.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from saccade import __version__
from saccade.errors import ConfigError, DataError, RequestError
from saccade.evaluate.example import Example, fingerprint, image_key, select_examples, shuffle_images
from saccade.evaluate.model import Decoding, Model
from saccade.evaluate.readers import DataSpec, read_examples
from saccade.evaluate.readers.detect import kind_of
from saccade.evaluate.results import RecordWriter, Results
from saccade.evaluate.statistics import Metric, bootstrap
from saccade.evaluate.tasks import task_named
from saccade.evaluate.tasks.task import Asking, Record, Task

logger = logging.getLogger(__name__)
OnProgress = Callable[[str, int, int], None]
"""Called with the task, the examples done and their number, from any thread."""
_MAX_GROUPS = 8
_MAX_FAILURES_SHOWN = 3
_ADDED = ("contamination",)
"""Keys that others add to the scores of a task; they are kept as long as its answers are the same."""


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """One task on one set of data."""

    task: str
    """Name of the task."""
    data: DataSpec
    """Examples of the task."""
    prompt: str | None = None
    """The user's turn, with `{question}`; None: the task's default."""
    max_tokens: int | None = None
    """Maximum tokens of an answer; None: the task's default."""
    limit: int | None = None
    """Number of examples, chosen at random by the seed; None: all, or the default of the task."""


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Configuration of an evaluation."""

    out: Path
    """Results folder; an interrupted evaluation resumes from it."""
    tasks: tuple[TaskConfig, ...]
    """Tasks, each at most once."""
    name: str = "model"
    """Name of the model in reports."""
    seed: int = 0
    """Seed of the choice of examples, of shuffled images, of sampling and of the bootstrap."""
    temperature: float = 0.0
    """Sampling temperature; 0 is greedy."""
    num_beams: int = 1
    """Beams of the tasks that generate answers; 1: no beam search."""
    shuffle_images: bool = False
    """Exchange the images between examples, to measure what the model scores without looking."""
    concurrency: int = 64
    """Maximum examples that are asked at once."""

    def __post_init__(self) -> None:
        names = [task.task for task in self.tasks]
        if not names or len(set(names)) < len(names):
            raise ConfigError(f"tasks are {', '.join(names) or 'missing'}; name at least one, each once")
        if self.concurrency < 1:
            raise ConfigError(f"concurrency is {self.concurrency}; give 1 or more")
        if self.num_beams < 1:
            raise ConfigError(f"num_beams is {self.num_beams}; give 1 or more")
        if self.num_beams > 1 and self.temperature > 0:
            raise ConfigError("beam search draws no samples. Leave out either the beams or the temperature")


@dataclass(frozen=True)
class PreparedTask:
    """A task with its examples."""

    name: str
    task: Task
    examples: list[Example]
    num_accepted: int
    """Number of examples that the task accepts, before the limit."""
    asking: Asking
    settings: dict[str, Any] = field(repr=False)


def evaluate(model: Model, config: EvaluationConfig, *, on_progress: OnProgress | None = None) -> Results:
    """Ask the model about all examples of all tasks, and score its answers. Resumes from the results folder."""
    prepared = [prepare_task(task, config) for task in config.tasks]
    for one in prepared:
        _check_abilities(one, model)
        _log_default_limit(one)
    results = Results.create(config.out, settings_of(config, model.describe(), prepared))
    scores = results.scores.get("tasks", {})
    for one in prepared:
        num_asked = _ask_missing(one, model, results, config.concurrency, on_progress)
        kept = {} if num_asked else {key: scores[one.name][key] for key in _ADDED if key in scores.get(one.name, {})}
        scores[one.name] = score_task(one, results, config.seed) | kept
    results.write_scores({**results.scores, "tasks": scores})
    return results


def prepare_task(config: TaskConfig, evaluation: EvaluationConfig) -> PreparedTask:
    """Read the examples of a task and choose among them."""
    task = task_named(config.task)
    is_published = kind_of(config.data, task.published) == "published"
    if not is_published and not task.takes_other_data:
        raise DataError(
            f"{config.data.path}: {config.task} is read as it is published, Parquet or TSV. See docs/evaluation.md"
        )
    every = read_examples(config.data, task.published)
    accepted = [example for example in every if task.accepts(example)]
    if not accepted:
        raise DataError(
            f"{config.data.path}: {config.task} takes {task.takes}, and none of its {len(every)} examples is one"
        )
    chosen = select_examples(accepted, config.limit if config.limit is not None else task.limit, evaluation.seed)
    shown = shuffle_images(chosen, evaluation.seed) if evaluation.shuffle_images else chosen
    defaults = task.published if is_published and task.published is not None else task
    decoding = Decoding(
        max_tokens=config.max_tokens or defaults.max_tokens,
        temperature=evaluation.temperature,
        seed=evaluation.seed,
        num_beams=evaluation.num_beams if task.needs is None else 1,
    )
    prompt = config.prompt if config.prompt is not None else defaults.prompt
    asking = Asking(prompt=prompt, decoding=decoding, pool=chosen)
    settings = {
        "data": config.data.path,
        "kind": config.data.kind,
        "images": str(config.data.images) if config.data.images is not None else None,
        "prompt": asking.prompt,
        "decoding": asdict(decoding),
        "limit": config.limit,
        "num_examples": len(chosen),
        "fingerprint": fingerprint(shown),
    }
    return PreparedTask(config.task, task, shown, len(accepted), asking, settings)


def examples_of(results: Results, task: str) -> list[Example]:
    """Read the examples of a task again, as its settings describe them."""
    saved = results.settings["tasks"][task]
    images = Path(saved["images"]) if saved["images"] is not None else None
    data = DataSpec(path=saved["data"], kind=saved["kind"], images=images)
    config = TaskConfig(task=task, data=data, limit=saved["limit"])
    evaluation = EvaluationConfig(
        out=results.folder,
        tasks=(config,),
        seed=results.settings["seed"],
        shuffle_images=results.settings["shuffle_images"],
    )
    return prepare_task(config, evaluation).examples


def settings_of(config: EvaluationConfig, model: dict[str, Any], prepared: Sequence[PreparedTask]) -> dict[str, Any]:
    """Return the content of settings.json: everything that determines the answers."""
    return {
        "saccade": __version__,
        "name": config.name,
        "model": model,
        "seed": config.seed,
        "shuffle_images": config.shuffle_images,
        "tasks": {one.name: one.settings for one in prepared},
    }


def _log_default_limit(prepared: PreparedTask) -> None:
    """Log that a task uses a part of its data if no limit was given."""
    if prepared.settings["limit"] is None and len(prepared.examples) < prepared.num_accepted:
        logger.info(
            "%s: %d of %d examples, the default of the task. Choose with --limit %s=N",
            prepared.name, len(prepared.examples), prepared.num_accepted, prepared.name,
        )  # fmt: skip


def _check_abilities(prepared: PreparedTask, model: Model) -> None:
    if prepared.task.needs == "score" and not model.can_score:
        raise ConfigError(
            f"{prepared.name} needs log-likelihoods, which this server does not give (prompt_logprobs). Evaluate the "
            "checkpoint folder"
        )
    if prepared.asking.decoding.num_beams > 1 and not model.has_beam_search:
        raise ConfigError("a server's API has no beam search. Evaluate the checkpoint folder, or leave out the beams")
    if prepared.task.needs == "embed" and not model.can_embed:
        raise ConfigError(
            f"{prepared.name} needs embeddings, which this model does not have. Use retrieval, by likelihood"
        )


# ------------------------------------------------------------------ ask


def _ask_missing(
    prepared: PreparedTask, model: Model, results: Results, concurrency: int, on_progress: OnProgress | None
) -> int:
    """Ask about the examples without an answer, and again about refused ones. Returns how many were asked."""
    wanted = {example.id for example in prepared.examples}
    answered = {record["id"] for record in results.records(prepared.name) if "failure" not in record} & wanted
    missing = [example for example in prepared.examples if example.id not in answered]
    if answered and missing:
        logger.info("%s: %d of %d examples are answered already", prepared.name, len(answered), len(wanted))
    lock, num_done = threading.Lock(), len(answered)
    writer = RecordWriter(results.examples_path(prepared.name))

    def ask(example: Example) -> None:
        nonlocal num_done
        writer.add(_record(prepared, model, example))
        with lock:
            num_done += 1
            if on_progress is not None:
                on_progress(prepared.name, num_done, len(wanted))

    try:
        in_threads(ask, missing, concurrency)
    finally:
        writer.close()
    return len(missing)


def _record(prepared: PreparedTask, model: Model, example: Example) -> dict[str, Any]:
    """Ask about one example, and return its record."""
    record: dict[str, Any] = {
        "id": example.id,
        "images": [image.name for image in example.images],
        "question": example.question,
        "references": list(example.references),
    }
    if example.group:
        record["group"] = example.group
    if example.details:
        record["details"] = dict(example.details)
    try:
        return record | prepared.task.ask(model, example, prepared.asking)
    except RequestError as error:
        return record | {"failure": str(error)}


def in_threads(do: Callable[[Any], object], items: Sequence[Any], num_threads: int) -> None:
    """Call `do` for every item from several threads; the first error cancels the rest and is raised.

    Ctrl-C does not wait for calls in progress: closing the model ends them.
    """
    pool = ThreadPoolExecutor(max(1, min(num_threads, len(items))), "saccade-evaluate")
    waits = True
    try:
        futures = [pool.submit(do, item) for item in items]
        wait(futures, return_when=FIRST_EXCEPTION)
        for future in futures:
            if future.done() and (error := future.exception()) is not None:
                raise error
    except KeyboardInterrupt:
        waits = False
        raise
    finally:
        pool.shutdown(wait=waits, cancel_futures=True)


# ------------------------------------------------------------------ score


def score_task(prepared: PreparedTask, results: Results, seed: int) -> dict[str, Any]:
    """Score all records of a task, add the scores to them, and return those of the task."""
    by_id = {record["id"]: record for record in results.records(prepared.name)}
    records = [by_id[example.id] for example in prepared.examples]
    metrics = prepared.task.score(records)
    results.replace_records(
        prepared.name, (record | {"scores": _scores_of(metrics, row)} for row, record in enumerate(records))
    )
    failures = [record for record in records if "failure" in record]
    for record in failures[:_MAX_FAILURES_SHOWN]:
        logger.warning("%s: example %s failed: %s", prepared.name, record["id"], record["failure"])
    clusters = [example.image_key for example in prepared.examples]
    return {
        "num_examples": len(records),
        "num_images": len(set(clusters)),
        "num_failures": len(failures),
        "notes": prepared.task.notes(records),
        "metrics": {name: _interval(metric, clusters, seed) for name, metric in metrics.items()},
        "groups": _group_scores(metrics, records, clusters, seed),
    }


def score_records(task: str, records: Sequence[Record], seed: int) -> dict[str, Any]:
    """Compute the metrics of some records with their intervals."""
    clusters = [image_key(record["images"], record["id"]) for record in records]
    return {name: _interval(metric, clusters, seed) for name, metric in task_named(task).score(records).items()}


def _scores_of(metrics: dict[str, Metric], row: int) -> dict[str, float]:
    return {name: round(float(metric.values[row]), 6) for name, metric in metrics.items() if metric.values is not None}


def _interval(metric: Metric, clusters: Sequence[str], seed: int) -> dict[str, Any]:
    return asdict(bootstrap(metric, clusters, seed=seed)) | {"higher_is_better": metric.higher_is_better}


def _group_scores(
    metrics: dict[str, Metric], records: Sequence[Record], clusters: Sequence[str], seed: int
) -> dict[str, Any]:
    """Score each group by the first metric, if there are several groups but not many."""
    groups = [record.get("group", "") for record in records]
    if not 1 < len(set(groups)) <= _MAX_GROUPS:
        return {}
    name, metric = next(iter(metrics.items()))
    scores = {}
    for group in sorted(set(groups)):
        rows = np.array([row for row, of_row in enumerate(groups) if of_row == group])
        scores[group or "other"] = {
            "metric": name,
            "num_examples": len(rows),
            **_interval(metric.subset(rows), [clusters[row] for row in rows], seed),
        }
    return scores
