"""Training loop of a stage: batch -> micro-batches -> backward -> clip -> optimizer step -> log -> save -> validate.

The host runs ahead of the GPU. It enqueues forward and backward of all micro-batches, fetches the next batch while they
compute, and then synchronizes once, for the metrics of the step: loss, gradient norm, stop requests. These are summed
over the ranks, so every rank sees the same values and makes the same decisions.

What is due after a step is done in this order: save, validate, export, evaluate. A stop request or a crash in between
loses nothing: the saved state records what is done (`Position.done`), and the resumed run begins with the rest.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
import math
import threading
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from saccade.device import DTYPES, to_device
from saccade.errors import CheckpointError, DataError
from saccade.train.batches import BatchIterator, StepBatch
from saccade.train.config import TrainConfig
from saccade.train.guard import Action, Decision, Guard
from saccade.train.loss import ModelWithLoss
from saccade.train.metrics import MetricsLog, Step
from saccade.train.position import Position
from saccade.train.process import Watchdog, manual_gc
from saccade.train.profiling import StepProfiler
from saccade.train.saved_state import state_before
from saccade.train.saver import Saver
from saccade.train.stage_config import StageConfig
from saccade.train.step_metrics import NORMALIZER, StepMetrics, local_step_counters
from saccade.train.trackers import JsonLines
from saccade.train.train_state import TrainState
from saccade.train.weights import export_checkpoint
from saccade.world import World

logger = logging.getLogger(__name__)

Validate = Callable[[ModelWithLoss, int], Mapping[str, float] | None]
"""Validates on every rank, given the model and the step; returns named scores, None if it was interrupted."""


OnExport = Callable[[Path, int], None]
"""Called on the main rank with an exported checkpoint folder and its step; the other ranks wait until it returns. If
the run ends before it returns, the resumed run calls it again."""
EXPORT_TIMEOUT_S = 86400.0
"""How long they wait: an evaluation on the device of training may take a while."""


class Ending(Enum):
    """Why a stage ended."""

    FINISHED = "finished"
    STOPPED = "stopped"
    """A signal stopped the run; the state is saved, and the same command resumes."""


class Trainer:
    """Runs one stage, from `position` to its end."""

    def __init__(
        self,
        *,
        config: TrainConfig,
        stage: StageConfig,
        position: Position,
        state: TrainState,
        batches: BatchIterator,
        guard: Guard,
        saver: Saver,
        world: World,
        metrics_log: MetricsLog,
        stop_requested: threading.Event,
        num_samples: int | None = None,
        validate: Validate | None = None,
        on_export: OnExport | None = None,
    ) -> None:
        """`stop_requested` is set from outside, on any rank; `num_samples` is given if the length is in epochs."""
        self._config, self._stage, self._position = config, stage, position
        self._state, self._batches, self._guard, self._saver, self._world = state, batches, guard, saver, world
        self._metrics_log, self._num_samples, self._validate = metrics_log, num_samples, validate
        self._stop_requested, self._on_export = stop_requested, on_export
        self._watchdog = Watchdog(config.run / "hang", config.guard.hang_timeout_s, rank=world.rank)
        self._profiler = StepProfiler(config.log, config.run / "trace", world)
        self._checkpoints = config.run / "checkpoints"
        self._skipped_steps_file = config.run / "skipped_steps.jsonl"
        self._skipped_steps = JsonLines(self._skipped_steps_file, position.step) if world.is_main else None
        self._is_save_due = False
        self._data_wait_s = 0.0
        self._first_stage_step = position.stage_step
        self._lr_factor = 0.0
        self._objective = state.parallel.module.objective
        self._has_checked_gradients = False

    def run(self) -> Ending:
        """Train until the stage is done or a stop is requested."""
        with manual_gc():
            with self._watchdog, self._profiler:
                ending = self._train()
            if ending is Ending.FINISHED:
                ending = self._finish()
            if ending is Ending.STOPPED:
                self._stop()
        return ending

    def _train(self) -> Ending:
        with self._watchdog.paused():
            if self._position.stage_step and not self._validate_and_export():  # what the run was interrupted before
                return Ending.STOPPED
        batch = self._next_batch(self._position.stage_step)
        while batch is not None:
            self._profiler.start_step(self._position.step + 1)
            losses, vector = self._accumulate(batch)
            if vector is None:
                return Ending.STOPPED
            upcoming = self._next_batch(self._position.stage_step + 1)
            metrics = StepMetrics.read(  # the one host sync of a step
                vector.tolist(), self._batches.source_names, self._objective.metric_names
            )
            decision = self._guard.check(metrics.loss, metrics.grad_norm)
            if decision.action is Action.ACCEPT:
                self._optimizer_step(metrics)
            else:
                self._reject(decision, metrics, batch, losses)
            self._start_metrics_log(metrics)
            is_warmup = self._position.stage_step < self._stage.schedule.warmup_steps
            self._position.advance(metrics.work, batch.state, is_warmup=is_warmup)
            self._log(metrics, decision)
            self._profiler.end_step(self._position.step)
            if metrics.must_stop:
                return Ending.STOPPED
            if upcoming is None:
                break
            with self._watchdog.paused():
                self._save_if_due(metrics)
                if not self._validate_and_export():
                    return Ending.STOPPED
            self._collect_garbage()
            self._watchdog.feed()
            batch = upcoming
        return Ending.FINISHED

    # -------------------------------------------------------------- one step

    def _next_batch(self, stage_step: int) -> StepBatch | None:
        """The micro-batches of a step, with the first copy to the device started; None at the end of the stage."""
        if self._stage.known_steps is not None and stage_step >= self._stage.known_steps:
            return None
        step = self._position.step - self._position.stage_step + stage_step + 1
        is_logged = step % self._config.log.every == 0 or stage_step == self._first_stage_step
        batch = self._batches.next(with_sources=is_logged)
        self._data_wait_s = 0.0 if self._is_gpu_busy() else self._batches.wait_s
        return batch

    def _is_gpu_busy(self) -> bool:
        """Whether the GPU still has work queued, so that waiting for data cost nothing."""
        return self._world.device.type == "cuda" and not torch.cuda.current_stream(self._world.device).query()

    def _accumulate(self, batch: StepBatch) -> tuple[list[Tensor], Tensor | None]:
        """Gradient accumulation: enqueue forward and backward of every micro-batch.

        Returns the loss of each micro-batch and the vector of `train_state.py`, on the device; no vector if a stop was
        requested before the last micro-batch of a step on a CPU, which is then discarded and repeated after a resume.
        """
        device = self._world.device
        counters = local_step_counters(batch, save_failed=self._saver.failure is not None)
        totals = self._world.all_sum(to_device(counters, device))
        count = totals[NORMALIZER].clamp(min=1.0).float()
        losses: list[Tensor] = []
        num_sums = len(batch.loss_tokens_by_source) + len(self._objective.metric_names)
        sums = torch.zeros(num_sums, device=device)
        for number, micro_batch in enumerate(batch.on_device, start=1):
            if self._must_discard_step():
                self._state.drop_gradients()
                return losses, None
            is_last = number == batch.num_micro_batches
            loss, own_sums = self._state.backward(micro_batch, count, is_last_micro_batch=is_last)
            losses.append(loss)
            sums += own_sums
        must_stop = to_device(np.array([self._stop_requested.is_set()], dtype=np.float64), device)
        sums_and_loss = torch.cat([sums, torch.stack(losses).sum()[None]]).double()
        results = self._world.all_sum(torch.cat([sums_and_loss, must_stop]))
        return losses, torch.cat([totals, results, self._state.grad_norm().double()[None]])

    def _must_discard_step(self) -> bool:
        """Whether a stop was requested on any rank. On a GPU a step takes seconds and is always finished."""
        return self._world.device.type == "cpu" and self._world.any(self._stop_requested.is_set())

    def _optimizer_step(self, metrics: StepMetrics) -> None:
        """Clip and step."""
        self._check_gradients()
        self._lr_factor = self._scheduled_factor()
        self._state.step(self._lr_factor, grad_scale=min(1.0, self._stage.clip_norm / (metrics.grad_norm + 1e-6)))

    def _check_gradients(self) -> None:
        """Check that every trainable parameter has a gradient in the first step."""
        if not self._has_checked_gradients and (missing := self._state.without_gradient()):
            raise AssertionError(f"{len(missing)} trained parameters got no gradient: {', '.join(missing[:8])}")
        self._has_checked_gradients = True

    def _scheduled_factor(self) -> float:
        """Learning-rate factor of the current step; in a stage of epochs, progress is measured in samples."""
        position, schedule = self._position, self._stage.schedule
        if self._stage.known_steps is not None:
            return schedule.factor(position.stage_step, self._stage.known_steps)
        return schedule.factor_by_samples(
            position.stage_step, position.stage_samples, position.warmup_samples, self._num_samples or 1
        )

    # -------------------------------------------------------------- bad steps

    def _reject(self, decision: Decision, metrics: StepMetrics, batch: StepBatch, losses: list[Tensor]) -> None:
        """Drop the gradients and log the samples; then continue, roll back, or give up."""
        self._state.drop_gradients()
        self._log_skipped_step(decision, metrics, batch, losses)
        if decision.action is Action.ROLL_BACK:
            with self._watchdog.paused():
                self._roll_back()
        if decision.action is Action.GIVE_UP:
            raise DataError(
                f"step {self._position.step + 1}: {decision.reason}, "
                f"after {self._config.guard.max_rollbacks} rollbacks already. "
                f"Look at the samples in {self._skipped_steps_file}; if they are fine, lower the learning rate"
            )

    def _log_skipped_step(
        self, decision: Decision, metrics: StepMetrics, batch: StepBatch, losses: list[Tensor]
    ) -> None:
        """Append to skipped_steps.jsonl the samples of every micro-batch, and whether its own loss is finite."""
        local = [
            {"rank": self._world.rank, "is_finite": bool(torch.isfinite(loss)), "samples": sample_ids}
            for loss, sample_ids in zip(losses, batch.sample_ids, strict=False)
        ]
        record = {
            "step": self._position.step + 1,
            "stage": self._stage.name,
            "action": decision.action.value,
            "reason": decision.reason,
            "loss": str(metrics.loss),
            "grad_norm": str(metrics.grad_norm),
            "micro_batches": [one for of_rank in self._world.gather(local) for one in of_rank],
        }
        if self._skipped_steps is not None:
            self._skipped_steps.log(record)
            file = self._skipped_steps_file
            logger.warning("step %d skipped: %s. Its samples are in %s", record["step"], decision.reason, file)

    def _roll_back(self) -> None:
        """Load weights and optimizer of an earlier state; data position, step and learning rate continue."""
        self._saver.finish()
        optimizer_steps = self._state.optimizer.num_steps
        state = state_before(
            self._saver.folder, self._world, stage=self._position.stage, optimizer_steps=optimizer_steps
        )
        if state is None:
            logger.warning("this stage has no saved state to roll back to yet: the weights stay as they are")
            return
        self._state.load_weights(state)
        self._state.load_optimizer(state, num_steps=state.progress["optimizer_steps"])
        self._state.load_average(state)
        logger.warning("rolled back weights and optimizer to step %d; the data continues", state.step)

    # -------------------------------------------------------------- logging, saving, validation

    def _log(self, metrics: StepMetrics, decision: Decision) -> None:
        step = Step(
            number=self._position.step,
            loss=metrics.loss,
            grad_norm=metrics.grad_norm,
            seconds=self._metrics_log.seconds_since_last(),
            data_wait_s=self._data_wait_s,
            work=metrics.work,
            source_losses=metrics.source_losses,
            of_objective=metrics.of_objective,
            is_skipped=decision.action is not Action.ACCEPT,
        )
        self._metrics_log.add(step, {group.name: group.lr * self._lr_factor for group in self._state.optimizer.groups})

    def _start_metrics_log(self, metrics: StepMetrics) -> None:
        """At the first step, tell the log the length of the stage; an estimate if it is given in epochs."""
        if self._metrics_log.is_started:
            return
        position = self._position
        if self._stage.known_steps is not None:
            steps_left = self._stage.known_steps - position.stage_step
        else:
            samples_left = (self._num_samples or 0) - position.stage_samples
            steps_left = math.ceil(samples_left / max(1.0, metrics.work.samples))
        self._metrics_log.start(num_steps=position.step + steps_left, tokens=position.tokens, samples=position.samples)

    def _save_if_due(self, metrics: StepMetrics) -> None:
        """Save at an interval, but not between bad steps: such a state would replace one that a rollback needs."""
        if metrics.save_failed:
            self._handle_failed_save()
        self._is_save_due |= self._position.step % self._config.checkpoint.every == 0
        if self._is_save_due and not self._guard.is_in_streak:
            self._save()
            self._is_save_due = False

    def _save(self) -> None:
        """Save the training state. Training waits only for the copy to host memory."""
        self._saver.save(self._position.step, self._state.tensors(), self._saved_progress())

    def _saved_progress(self) -> dict[str, Any]:
        """Everything but tensors and random generators, as JSON."""
        return dataclasses.asdict(self._position) | {
            "guard": self._guard.state_dict(),
            "optimizer_steps": self._state.optimizer.num_steps,
            "fingerprint": self._config.fingerprint,
            "epochs": self._stage.epochs,
        }

    def _handle_failed_save(self) -> None:
        """Stop or continue, as configured; runs on every rank."""
        failure, self._saver.failure = self._saver.failure, None
        if self._config.checkpoint.on_failure == "stop":
            raise CheckpointError(failure or "another rank could not save the state; its log says why")

    def _validate_and_export(self, *, is_last: bool = False) -> bool:
        """Do what is due after this step and not done yet; False if a stop request interrupted it."""
        validation, export = self._config.validation.every, self._config.checkpoint.export_every
        if self._validate is not None and validation is not None and self._is_due("validation", validation, is_last):
            if not self._run_validation(self._validate):
                return False
            self._mark_done("validation")
        name = f"step-{self._position.step:08d}"
        if self._is_due("export", export, is_last):
            self._write_checkpoint(name)
            self._mark_done("export")
        if self._on_export is not None and self._is_due("evaluation", export, is_last):
            if self._world.is_main:
                self._on_export(self._checkpoints / name, self._position.step)
            self._world.barrier(timeout_s=EXPORT_TIMEOUT_S)
            self._mark_done("evaluation")
        return True

    def _is_due(self, task: str, every: int | None, is_last: bool) -> bool:
        is_its_step = is_last or (every is not None and self._position.step % every == 0)
        return is_its_step and task not in self._position.done

    def _mark_done(self, task: str) -> None:
        """Record a task that has ended in the saved state of this step, if there is one."""
        self._position.done.append(task)
        self._saver.update(self._position.step, self._saved_progress())

    def _write_checkpoint(self, name: str) -> None:
        out = self._checkpoints / name
        export_checkpoint(
            out,
            self._state.parallel.model,
            self._state.weights_to_export(),
            like=self._config.model.folder,
            dtype=DTYPES[self._config.checkpoint.export_dtype],
            world=self._world,
            only_adapter=self._stage.lora is not None and self._stage.lora.export == "adapter",
        )
        logger.info("exported %s", out)

    def _run_validation(self, validate: Validate) -> bool:
        """Return False if a stop request interrupted it."""
        logger.info("step %d: validation", self._position.step)
        model = self._state.parallel.module.eval()
        with torch.no_grad(), self._state.averaged():
            scores = validate(model, self._position.step)
        self._state.parallel.reshard()
        model.train()
        if scores is None:
            logger.info("step %d: validation interrupted, no scores", self._position.step)
            return False
        self._keep_best(scores)
        self._metrics_log.add_validation(self._position.step, scores)
        self._metrics_log.seconds_since_last()  # validation does not count as time of a step
        return True

    def _keep_best(self, scores: Mapping[str, float]) -> None:
        """Remember the lowest validation loss of the run, and export its checkpoint if configured."""
        loss, best = scores.get("loss"), self._position.best_loss
        if loss is None or (best is not None and loss >= best):
            return
        self._position.best_loss = loss
        if self._config.validation.export_best:
            logger.info("step %d: validation loss %.4f is the lowest", self._position.step, loss)
            self._write_checkpoint("best")

    def _collect_garbage(self) -> None:
        if self._position.step % self._config.gc_every == 0:
            gc.collect(1)

    # -------------------------------------------------------------- end of a stage

    def _stop(self) -> None:
        """Wait until the state of this step is on disk."""
        self._save_unless_saved()
        self._saver.finish_or_raise()
        logger.info("stopped after step %d; the same command resumes", self._position.step)

    def _save_unless_saved(self) -> bool:
        """Save the state of this step if it is not on disk; whether it was. Earlier failures do not matter any more."""
        is_saved = self._saver.has(self._position.step)
        self._saver.failure = None
        if not is_saved:
            self._save()
        return is_saved

    def _finish(self) -> Ending:
        """Save, do what is due at the end of a stage, mark the stage as done. A crash in between loses no step."""
        self._save_unless_saved()
        self._saver.finish()
        if not self._validate_and_export(is_last=True):
            return Ending.STOPPED
        self._position.is_stage_done = True
        if self._save_unless_saved():
            self._saver.update(self._position.step, self._saved_progress())
        self._saver.finish_or_raise()
        logger.info('stage "%s": done after %d steps', self._stage.name, self._position.stage_step)
        return Ending.FINISHED
