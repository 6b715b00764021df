"""Evaluate two checkpoints on the same questions and say which one is better.

python examples/evaluate_and_compare.py BEFORE AFTER test/ results/
"""

import sys
from pathlib import Path

from saccade.cli.joins.engine_model import EngineModel
from saccade.evaluate import EvaluationConfig, Results, TaskConfig, compare, evaluate
from saccade.evaluate.readers import DataSpec


def answers_of(checkpoint: str, data: str, out: Path) -> Results:
    """Ask the checkpoint every question; an interrupted evaluation resumes."""
    task = TaskConfig(task="vqa", data=DataSpec(path=data))
    with EngineModel(Path(checkpoint)) as model:
        return evaluate(model, EvaluationConfig(out=out, tasks=(task,), name=out.name))


def main(before: str, after: str, data: str, results: str) -> None:
    """Print both scores, and whether the difference is significant."""
    old = answers_of(before, data, Path(results) / "before")
    new = answers_of(after, data, Path(results) / "after")
    for one in (old, new):
        score = one.scores["tasks"]["vqa"]["metrics"]["vqa_accuracy"]
        print(f"{one.name}: {score['value']:.3f} [{score['low']:.3f}, {score['high']:.3f}]")
    difference = compare(new, old).of("vqa", "vqa_accuracy")
    verdict = "significant" if difference.is_significant else "not significant"
    print(f"difference {difference.difference:+.3f} [{difference.low:+.3f}, {difference.high:+.3f}], {verdict}")


if __name__ == "__main__":
    main(*sys.argv[1:])
