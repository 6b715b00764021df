"""The loop of a stage: batch -> rows -> loss -> backward -> clip -> step -> log -> save -> probe.

The host runs ahead of the GPU. It enqueues the forward and backward passes of all rows, fetches the next batch while they compute,
and then waits once, for the numbers of the step: loss, gradient norm, and whether some rank was asked to stop. They are summed over
the ranks, so all ranks see the same numbers and decide alike.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import logging
import math
import threading
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path

import torch
from torch import Tensor

from saccade.device import DTYPES, to_device
from saccade.errors import CheckpointError, DataError
from saccade.train.checkpoint import Saver, newest_state
from saccade.train.config import StageConfig, TrainConfig
from saccade.train.export import export
from saccade.train.feed import Feed, StepRows
from saccade.train.guard import Action, Guard, Verdict
from saccade.train.journal import Journal
from saccade.train.learner import Learner
from saccade.train.loss import TrainedModel
from saccade.train.metrics import Step
from saccade.train.process import garbage_by_hand
from saccade.train.progress import LEARNED_TOKENS, Progress, StepNumbers, brought_by
from saccade.train.trace import Tracer
from saccade.train.watchdog import Watchdog
from saccade.world import World

logger = logging.getLogger(__name__)

Probe = Callable[[TrainedModel, int], Mapping[str, float]]
"""Evaluation while training: called on every rank with the model and the step, gives named scores."""


class Ending(Enum):
    """Why a stage ended."""

    FINISHED = "finished"
    STOPPED = "stopped"
    """By a signal; the state is saved, and the same command goes on from it."""


class Trainer:
    """One stage of a run, from where `progress` says to its end."""

    def __init__(
        self,
        *,
        config: TrainConfig,
        stage: StageConfig,
        progress: Progress,
        learner: Learner,
        feed: Feed,
        guard: Guard,
        saver: Saver,
        world: World,
        journal: Journal,
        asked_to_stop: threading.Event,
        num_samples: int | None = None,
        probe: Probe | None = None,
    ) -> None:
        """`asked_to_stop`: set from outside, on any rank. `num_samples`: of the stage, where its length is given in epochs."""
        self._config, self._stage, self._progress = config, stage, progress
        self._learner, self._feed, self._guard, self._saver, self._world = learner, feed, guard, saver, world
        self._journal, self._num_samples, self._probe = journal, num_samples, probe
        self._asked_to_stop = asked_to_stop
        self._watchdog = Watchdog(config.run / "hang", config.guard.hang_timeout_s, rank=world.rank)
        self._tracer = Tracer(config.log, config.run / "trace", world)
        self._waited_s = 0.0
        self._lr_factor = 0.0
        self._has_checked_gradients = False

    def run(self) -> Ending:
        """Train until the stage is over, or someone asks to stop."""
        with garbage_by_hand():
            with self._watchdog, self._tracer:
                ending = self._make_steps()
            if ending is Ending.FINISHED:
                self._finish()
            else:
                self._stop()
        return ending

    def _make_steps(self) -> Ending:
        rows = self._next_rows(self._progress.stage_step)
        while rows is not None:
            self._tracer.step_begins(self._progress.step + 1)
            losses, results = self._accumulate(rows, must_stop=self._asked_to_stop.is_set())
            upcoming = self._next_rows(self._progress.stage_step + 1)
            numbers = StepNumbers.read(results.tolist(), self._feed.source_names)  # the one wait for the GPU
            verdict = self._guard.judge(numbers.loss, numbers.grad_norm)
            if verdict.action is Action.ACCEPT:
                self._update(numbers)
            else:
                self._reject(verdict, numbers, rows, losses)
            self._begin_journal(numbers)
            self._progress.advance(numbers.work, rows.state)
            self._log(numbers, verdict)
            self._tracer.step_ended(self._progress.step)
            if upcoming is None:
                break
            if numbers.must_stop:
                return Ending.STOPPED
            with self._watchdog.paused():
                self._save_and_export(numbers)
                self._evaluate()
            self._collect_garbage()
            self._watchdog.feed()
            rows = upcoming
        return Ending.FINISHED

    # -------------------------------------------------------------- one step

    def _next_rows(self, stage_step: int) -> StepRows | None:
        """The rows of a step, on their way to the device; None when the stage is over."""
        if self._stage.known_steps is not None and stage_step >= self._stage.known_steps:
            return None
        step = self._progress.step - self._progress.stage_step + stage_step + 1
        rows = self._feed.next(with_sources=step % self._config.log.every == 0)
        self._waited_s = 0.0 if self._is_computing() else self._feed.waited_s
        return rows

    def _is_computing(self) -> bool:
        """Whether the GPU still has work, so that waiting for data has cost nothing."""
        return self._world.device.type == "cuda" and not torch.cuda.current_stream(self._world.device).query()

    def _accumulate(self, rows: StepRows, *, must_stop: bool) -> tuple[list[Tensor], Tensor]:
        """Enqueue forward and backward of every row; (each row's loss, the vector of `progress.py`), on the device."""
        device = self._world.device
        brought = brought_by(rows, must_stop=must_stop, save_failed=self._saver.failure is not None)
        totals = self._world.all_sum(to_device(brought, device))
        count = totals[LEARNED_TOKENS].clamp(min=1.0).float()
        losses, by_source = [], torch.zeros(len(rows.learned_by_source), device=device)
        for number, row in enumerate(rows.on_device, start=1):
            loss, sums = self._learner.backward(row, count, is_last_row=number == rows.num_rows)
            losses.append(loss)
            by_source += sums
        results = self._world.all_sum(torch.cat([by_source, torch.stack(losses).sum()[None]]).double())
        return losses, torch.cat([totals, results, self._learner.grad_norm().double()[None]])

    def _update(self, numbers: StepNumbers) -> None:
        """Clip and step."""
        self._check_gradients()
        self._lr_factor = self._scheduled_factor()
        self._learner.step(self._lr_factor, grad_scale=min(1.0, self._stage.clip_norm / (numbers.grad_norm + 1e-6)))

    def _check_gradients(self) -> None:
        """In the first step, every parameter that is to learn must have been reached by the loss."""
        if not self._has_checked_gradients and (missing := self._learner.without_gradient()):
            raise AssertionError(f"{len(missing)} trained parameters got no gradient: {', '.join(missing[:8])}")
        self._has_checked_gradients = True

    def _scheduled_factor(self) -> float:
        """The schedule's factor for the step at hand; by samples seen where the stage's length is in epochs."""
        schedule, step = self._stage.schedule, self._progress.stage_step
        if self._stage.known_steps is not None:
            return schedule.factor(step, self._stage.known_steps)
        if step < schedule.warmup_steps:
            return schedule.factor(step, schedule.warmup_steps)
        falling = dataclasses.replace(schedule, warmup_steps=0)
        return falling.factor(self._progress.stage_samples, self._num_samples or 1)

    # -------------------------------------------------------------- bad steps

    def _reject(self, verdict: Verdict, numbers: StepNumbers, rows: StepRows, losses: list[Tensor]) -> None:
        """Drop the gradients, name the samples; then go on, go back, or give up."""
        self._learner.drop_gradients()
        file = self._name_samples(verdict, numbers, rows, losses)
        if verdict.action is Action.ROLL_BACK:
            with self._watchdog.paused():
                self._roll_back()
        if verdict.action is Action.GIVE_UP:
            raise DataError(
                f"step {self._progress.step + 1}: {verdict.reason}, and the weights have been set back {self._config.guard.max_rollbacks} times "
                f"already. Look at the samples in {file}; if they are good, lower the learning rate"
            )

    def _name_samples(self, verdict: Verdict, numbers: StepNumbers, rows: StepRows, losses: list[Tensor]) -> Path:
        """Add the step to skipped_steps.jsonl: every row's samples, and whether the row's own loss is a number."""
        mine = [
            {"rank": self._world.rank, "is_finite": bool(torch.isfinite(loss)), "samples": sample_ids}
            for loss, sample_ids in zip(losses, rows.sample_ids, strict=False)
        ]
        record = {
            "step": self._progress.step + 1,
            "stage": self._stage.name,
            "action": verdict.action.value,
            "reason": verdict.reason,
            "loss": str(numbers.loss),
            "grad_norm": str(numbers.grad_norm),
            "rows": [row for of_rank in self._world.gather(mine) for row in of_rank],
        }
        file = self._config.run / "skipped_steps.jsonl"
        if self._world.is_main:
            with file.open("a", encoding="utf-8") as out:
                out.write(json.dumps(record) + "\n")
            logger.warning("step %d is not taken: %s. Its samples are in %s", record["step"], verdict.reason, file)
        return file

    def _roll_back(self) -> None:
        """Weights and optimizer of the last saved state; data, step and learning rate from here."""
        self._saver.finish()
        state = newest_state(self._saver.folder, self._world)
        if state is None or state.progress["stage"] != self._progress.stage:
            logger.warning("this stage has no saved state to go back to yet: the weights stay as they are")
            return
        self._learner.load_weights(state)
        self._learner.load_optimizer(state, num_steps=state.progress["optimizer_steps"])
        logger.warning("weights and optimizer are again those of step %d; the data goes on", state.step)

    # -------------------------------------------------------------- what is written

    def _log(self, numbers: StepNumbers, verdict: Verdict) -> None:
        """Count the step; one record an interval."""
        progress = self._progress
        step = Step(
            number=progress.step,
            loss=numbers.loss,
            grad_norm=numbers.grad_norm,
            seconds=self._journal.seconds_since_last(),
            data_wait_s=self._waited_s,
            work=numbers.work,
            source_losses=numbers.source_losses,
            is_skipped=verdict.action is not Action.ACCEPT,
        )
        self._journal.add(step, {group.name: group.lr * self._lr_factor for group in self._learner.optimizer.groups})

    def _begin_journal(self, numbers: StepNumbers) -> None:
        """At the first step, say how long the stage will be; an estimate where its length is in epochs."""
        if self._journal.has_begun:
            return
        progress = self._progress
        if self._stage.known_steps is not None:
            steps_left = self._stage.known_steps - progress.stage_step
        else:
            samples_left = (self._num_samples or 0) - progress.stage_samples
            steps_left = math.ceil(samples_left / max(1.0, numbers.work.samples))
        self._journal.begin(num_steps=progress.step + steps_left, tokens=progress.tokens, samples=progress.samples)

    def _save_and_export(self, numbers: StepNumbers) -> None:
        if numbers.save_failed:
            self._take_note_of_failure()
        if self._progress.step % self._config.checkpoint.every == 0:
            self._save()
        every = self._config.checkpoint.export_every
        if every is not None and self._progress.step % every == 0:
            self._export()

    def _save(self) -> None:
        """Everything a run goes on from. Training waits for the copy to host memory only."""
        progress = dataclasses.asdict(self._progress) | {
            "guard": self._guard.state_dict(),
            "optimizer_steps": self._learner.optimizer.num_steps,
            "fingerprint": self._config.fingerprint,
            "epochs": self._stage.epochs,
        }
        self._saver.save(self._progress.step, self._learner.tensors(), progress)

    def _take_note_of_failure(self) -> None:
        """Stop or go on, as configured; every rank has heard of it."""
        failure, self._saver.failure = self._saver.failure, None
        if self._config.checkpoint.on_failure == "stop":
            raise CheckpointError(failure or "another rank could not save the state; its log says why")

    def _export(self) -> None:
        """A checkpoint folder that others can read."""
        out = self._config.run / "checkpoints" / f"step-{self._progress.step:08d}"
        export(
            out,
            self._learner.parallel.model,
            self._learner.weights(),
            like=self._config.model.folder,
            dtype=DTYPES[self._config.checkpoint.export_dtype],
            world=self._world,
            only_adapter=self._stage.lora is not None and self._stage.lora.export == "adapter",
        )
        logger.info("exported %s", out)

    def _evaluate(self, *, is_last: bool = False) -> None:
        every = self._config.probe.every
        if self._probe is None or every is None or (self._progress.step % every and not is_last):
            return
        trained = self._learner.parallel.trained.eval()
        with torch.no_grad():
            scores = self._probe(trained, self._progress.step)
        trained.train()
        self._journal.add_scores(self._progress.step, scores)
        self._journal.seconds_since_last()  # the time it took is no step's

    def _collect_garbage(self) -> None:
        if self._progress.step % self._config.gc_every == 0:
            gc.collect(1)

    # -------------------------------------------------------------- endings

    def _stop(self) -> None:
        """Save, and wait until it is on disk."""
        self._save_and_wait()
        logger.info("stopped after step %d; the same command goes on from here", self._progress.step)

    def _save_and_wait(self) -> None:
        """The last save of a stage decides alone: where it works, one that failed before it has done no harm."""
        self._saver.finish()
        self._saver.failure = None
        self._save()
        self._saver.finish_or_raise()

    def _finish(self) -> None:
        """Export, then save the state that says the stage is done: what dies in between is done again."""
        self._evaluate(is_last=True)
        self._export()
        self._progress.is_stage_done = True
        self._save_and_wait()
        logger.info("stage %s is done after %d steps", self._stage.name, self._progress.stage_step)
