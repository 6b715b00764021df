"""Evaluate the checkpoints that a training run exports, with `saccade evaluate` in a process of its own.

    RUN/checkpoints/step-00000100  ->  RUN/evaluations/step-00000100 (a results folder)  ->  RUN/report.html

On a device of its own an evaluation runs while training continues, one checkpoint at a time; on the device of training,
training waits for it. Checkpoints that an interrupted run did not evaluate are evaluated once when it resumes: the
resumed run names its last checkpoint again if it did not see the end of the evaluation. A failed evaluation is a
warning: training continues.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections import deque
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from saccade.train.config import TrainConfig

logger = logging.getLogger(__name__)


class CheckpointEvaluations:
    """The evaluations of one run. Only the main rank starts any."""

    def __init__(self, config: TrainConfig, device: str) -> None:
        """Check the tasks and their data before training starts. `device`: the device of training."""
        from saccade.evaluate.readers.detect import parse_spec, read_examples
        from saccade.evaluate.tasks import task_named

        self._config, self._folder = config, config.run / "evaluations"
        self._waits = config.evaluation.device == "same"
        self._device = device if self._waits else config.evaluation.device
        self._pending: deque[tuple[Path, int]] = deque()
        self._running: tuple[subprocess.Popen[bytes], Path] | None = None
        for task in config.evaluation.tasks:
            name, _, path = task.partition("=")
            read_examples(parse_spec(path), task_named(name).published)
        if _is_main():
            self._resume()

    def start(self, checkpoint: Path, step: int) -> None:
        """Evaluate a checkpoint: now if training waits for it, else after the previous one."""
        if not (checkpoint / "config.json").is_file():
            logger.warning("%s is an adapter and is not evaluated. Set lora.export = 'merged'", checkpoint)
            return
        self._pending.append((checkpoint, step))
        if self._waits:
            self._free_memory()
            self.finish()
        else:
            self._advance()

    def finish(self) -> None:
        """Wait for all evaluations, then write the run's report with their scores."""
        while self._pending or self._running:
            self._advance()
            if self._running is not None:
                self._running[0].wait()
        if _is_main():
            from saccade.train.report import write_report

            write_report(self._config.run)

    def close(self) -> None:
        """End the process that is running; its results stay and are completed by the next start."""
        self._pending.clear()
        if self._running is not None and self._running[0].poll() is None:
            self._running[0].terminate()
            self._running[0].wait()

    def __enter__(self) -> CheckpointEvaluations:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _resume(self) -> None:
        """Start what an earlier start of the run did not complete."""
        for checkpoint in sorted((self._config.run / "checkpoints").glob("step-*")):
            if (checkpoint / "config.json").is_file() and not self._is_evaluated(checkpoint):
                self.start(checkpoint, int(checkpoint.name.removeprefix("step-")))

    def _is_evaluated(self, checkpoint: Path) -> bool:
        """Whether it has a report, made after it was exported."""
        report = self._folder / checkpoint.name / "report.html"
        return report.is_file() and report.stat().st_mtime_ns >= (checkpoint / "config.json").stat().st_mtime_ns

    def _advance(self) -> None:
        """Log an evaluation that has ended, and start the next one."""
        if self._running is not None:
            process, out = self._running
            if process.poll() is None:
                return
            self._running = None
            _log_scores(out) if process.returncode == 0 else _log_failure(out, process.returncode)
        while self._pending and self._is_evaluated(self._pending[0][0]):
            self._pending.popleft()
        if self._pending:
            checkpoint, step = self._pending.popleft()
            out = self._folder / checkpoint.name
            self._folder.mkdir(parents=True, exist_ok=True)
            with out.with_suffix(".log").open("wb") as log:
                process = subprocess.Popen(self._command(checkpoint, out), stdout=log, stderr=log)  # noqa: S603 - our own command
            self._running = process, out
            logger.info("step %d: evaluating %s", step, checkpoint)

    def _command(self, checkpoint: Path, out: Path) -> list[str]:
        evaluation = self._config.evaluation
        names = [task.partition("=")[0] for task in evaluation.tasks]
        words = [sys.executable, "-m", "saccade", "evaluate", str(checkpoint)]
        words += ["--tasks", ",".join(names), "-o", str(out)]
        for task in evaluation.tasks:
            words += ["--data", task]
        if evaluation.limit is not None:
            words += ["--limit", str(evaluation.limit)]
        words += ["--name", checkpoint.name, "--device", self._device, "--no-contamination"]
        return words

    @staticmethod
    def _free_memory() -> None:
        """Give cached GPU memory back to the device, for the evaluation's process."""
        import torch

        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _is_main() -> bool:
    """Whether this is the main rank; before the world is open only the launcher's variable says so."""
    return os.environ.get("RANK", "0") == "0"


def _log_scores(out: Path) -> None:
    from saccade.evaluate.results import Results

    for task, scores in Results.load(out).scores["tasks"].items():
        shown = "  ".join(f"{name} {score['value']:.4g}" for name, score in scores["metrics"].items())
        logger.info("%s: %s %s", out.name, task, shown)


def _log_failure(out: Path, status: int) -> None:
    log = out.with_suffix(".log")
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    logger.warning(
        "the evaluation of %s failed (exit status %d): %s. See %s", out.name, status, lines[-1] if lines else "", log
    )
