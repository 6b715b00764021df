"""The quickstart: the steps in order. A step that is done is not repeated, so a second start continues where the first ended."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from saccade.data.sample import description, images
from saccade.data.scenes import scene_sample
from saccade.errors import ConfigError, DataError
from saccade.files import atomic_write
from saccade.quickstart.plan import (
    QuickstartConfig,
    evaluate_command,
    init_command,
    prepare_commands,
    train_command,
)
from saccade.quickstart.process import checkpoint_of, run, shown
from saccade.quickstart.progress import Progress

Say = Callable[[str], None]
Report = dict[str, Any]
"""What a step reports: `lines` for the user, and values for scripts."""


def quickstart(config: QuickstartConfig, say: Say) -> dict[str, Any]:
    """Make data, train and evaluate in `config.folder`; returns what every step has reported."""
    progress = Progress.open(config.folder, config.settings())
    steps: list[tuple[str, Callable[[QuickstartConfig, Say], Report]]] = [
        ("data", make_data),
        ("prepare", prepare),
        ("init", initialize),
        ("train", train),
        ("evaluate", evaluate),
    ]
    for number, (name, step) in enumerate(steps, 1):
        is_done = name in progress.steps
        if not is_done:
            began = time.monotonic()
            report = step(config, say)
            progress.finish(name, {**report, "seconds": round(time.monotonic() - began, 1)})
        _print_step(number, progress.steps[name], say, is_done=is_done)
    return progress.steps


def _print_step(number: int, report: Mapping[str, Any], say: Say, *, is_done: bool) -> None:
    first, *others = report["lines"]
    say(f"{number}. {first}  ({'done before' if is_done else str(report['seconds']) + ' s'})")
    for line in others:
        say(f"   {line}" if line else "")


# ------------------------------------------------------------------ data


def make_data(config: QuickstartConfig, _say: Say) -> Report:
    """Draw scenes, unless there is data."""
    if config.data is not None:
        if not config.data.exists():
            raise DataError(f"{config.data}: no such folder. --data takes shards, or images beside their captions")
        return {"lines": [f"data: {config.data}"]}
    config.raw.mkdir(parents=True, exist_ok=True)
    for name, count in (("train", config.scenes), ("held-out", config.held_out_scenes)):
        if not (config.raw / name).exists():
            with atomic_write(config.raw / name) as folder:
                _draw(folder, count, config.seed, held_out=name == "held-out")
    lines = [
        f"drew {config.scenes:,} scenes with captions and questions, and {config.held_out_scenes} held-out ones that combine them as no "
        "training scene does",
        str(config.raw),
    ]
    return {"lines": lines, "folder": str(config.raw)}


def _draw(folder: Path, count: int, seed: int, *, held_out: bool) -> None:
    """Scenes as files: an image, and its caption or questions beside it."""
    folder.mkdir()
    for number in range(count):
        sample = scene_sample(number, seed=seed, held_out=held_out)
        for extension, content in sample.members.items():
            (folder / f"{sample.key}.{extension}").write_bytes(content)


def prepare(config: QuickstartConfig, _say: Say) -> Report:
    """Shards of the data, filtered and deduplicated, divided into training and held-out samples."""
    commands = prepare_commands(config)
    reports = [json.loads(run([*words, "--json"]))["curation"] for words in commands]
    kept, found = (sum(report[name] for report in reports) for name in ("num_kept", "num_samples"))
    dropped = [f"{count:,} {reason}" for report in reports for reason, count in report["dropped"].items()]
    about = "the search for near-copies is off: rendered scenes resemble each other" if config.data is None else ""
    lines = [f"prepared and deduplicated: {kept:,} of {found:,} samples kept", *dropped, about]
    if config.data is not None:
        from saccade.data.split import split_shards

        shutil.rmtree(config.training, ignore_errors=True)
        shutil.rmtree(config.held_out, ignore_errors=True)
        sizes = split_shards(config.everything, config.training, config.held_out, max_held_out=200)
        lines.append(f"{sizes[0]:,} to train on, {sizes[1]:,} held out, no image in both")
    lines += [*map(shown, commands), f"{config.training}  {config.held_out}"]
    return {"lines": [line for line in lines if line], "kept": kept, "samples": found}


# ------------------------------------------------------------------ model


def initialize(config: QuickstartConfig, _say: Say) -> Report:
    """Make the initial checkpoint; one that was left half-written is made again."""
    shutil.rmtree(config.untrained, ignore_errors=True)
    made = json.loads(run([*init_command(config), "--json"]))
    what = "random weights" if config.text_model is None else f"{config.text_model.name} and a new vision tower"
    lines = [
        f"made a checkpoint: {what}, {made['bytes'] / 1e6:.1f} MB",
        shown(init_command(config)),
        str(config.untrained),
    ]
    return {"lines": lines, "checkpoint": str(config.untrained)}


def train(config: QuickstartConfig, say: Say) -> Report:
    """Train the recipe; resumes a run that was interrupted."""
    words = train_command(config)
    say(f"   training: {shown(words)}")
    run(words)
    checkpoint = checkpoint_of(config.run)
    if checkpoint is None:
        raise ConfigError(f"training has stopped early. Run the same command again: it resumes {config.run}")
    lines = [f"trained: {checkpoint.name}", str(checkpoint), f"curves: {config.run / 'report.html'}"]
    return {"lines": lines, "checkpoint": str(checkpoint), "run": str(config.run)}


def trained_checkpoint(steps: Mapping[str, Any]) -> Path:
    """The checkpoint that the step `train` has reported."""
    return Path(steps["train"]["checkpoint"])


# ------------------------------------------------------------------ evaluation


def evaluate(config: QuickstartConfig, say: Say) -> Report:
    """Evaluate on held-out data beside two baselines."""
    checkpoint = checkpoint_of(config.run)
    assert checkpoint is not None, "evaluated before training"
    words = evaluate_command(config, checkpoint, tasks_of(config.held_out))
    say(f"   evaluating: {shown(words)}")
    table = run(words).rstrip().splitlines()
    lines = ["evaluated on held-out data, beside the same model shown other images and its untrained self", *table]
    return {"lines": lines, "results": str(config.results), "scores": scores_of(config.results)}


def tasks_of(shards: Path) -> list[str]:
    """The tasks that a shard folder has examples of."""
    from saccade.data.index import open_index

    index = open_index(str(shards))
    fields = [
        description(index.read_sample(shard, row))
        for shard in range(len(index.shards))
        for row in index.kept(shard).tolist()
    ]
    kinds = {bool(any(one.get(name) for name in ("questions", "messages", "conversations"))) for one in fields}
    return [task for task, asks in (("vqa", True), ("captioning", False)) if asks in kinds]


def scores_of(results: Path) -> dict[str, dict[str, dict[str, float]]]:
    """Metrics by task and model: of the trained one and of the baselines."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    folders = {"trained": results} | {path.name: path for path in sorted((results / "baselines").iterdir())}
    for name, folder in folders.items():
        tasks = json.loads((folder / "scores.json").read_text(encoding="utf-8"))["tasks"]
        for task, scores in tasks.items():
            metrics = {metric: one["value"] for metric, one in scores["metrics"].items()}
            found.setdefault(task, {})[name] = metrics
    return found


def held_out_image(config: QuickstartConfig) -> tuple[Path, str]:
    """The first held-out image as a file, and a question about it."""
    from saccade.data.index import open_index

    index = open_index(str(config.held_out))
    samples = (
        index.read_sample(shard, row) for shard in range(len(index.shards)) for row in index.kept(shard).tolist()
    )
    every = [sample for _, sample in zip(range(8), samples, strict=False)]
    sample = next((one for one in every if description(one).get("questions")), every[0])
    asked = description(sample).get("questions")
    name = next(name for name, content in sample.members.items() if content == images(sample)[0])
    path = config.folder / f"held-out.{name.rpartition('.')[2]}"
    path.write_bytes(images(sample)[0])
    return path, asked[0]["question"] if asked else "Describe the image."
