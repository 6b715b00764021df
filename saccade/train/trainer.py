"""Training loop of a stage: batch -> micro-batches -> backward -> clip -> optimizer step -> log -> save -> validate.

The host runs ahead of the GPU. It enqueues forward and backward of all micro-batches, fetches the next batch while they
compute, and then synchronizes once, for the metrics of the step: loss, gradient norm, stop requests. These are summed
over the ranks, so every rank sees the same values and makes the same decisions.

What is due after a step, from saving to evaluation, is in `due_tasks.py`.
"""

from __future__ import annotations

import gc
import logging
import math
import threading
from enum import Enum

import numpy as np
import torch
from torch import Tensor

from saccade.device import to_device
from saccade.errors import DataError
from saccade.train.batches import BatchIterator, StepBatch
from saccade.train.config import TrainConfig
from saccade.train.due_tasks import DueTasks
from saccade.train.guard import Action, Decision, Guard
from saccade.train.metrics import MetricsLog, Step
from saccade.train.position import Position
from saccade.train.process import Watchdog, manual_gc
from saccade.train.profiling import StepProfiler
from saccade.train.saved_state import state_before
from saccade.train.saver import Saver
from saccade.train.slow_ranks import SlowRanks
from saccade.train.stage_config import StageConfig
from saccade.train.step_metrics import NORMALIZER, StepMetrics, local_step_counters
from saccade.train.trackers import JsonLines
from saccade.train.train_state import TrainState
from saccade.world import World

logger = logging.getLogger(__name__)


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
        due: DueTasks,
        stop_requested: threading.Event,
        num_samples: int | None = None,
    ) -> None:
        """`stop_requested` is set from outside, on any rank; `num_samples` is given if the length is in epochs."""
        self._config, self._stage, self._position = config, stage, position
        self._state, self._batches, self._guard, self._saver, self._world = state, batches, guard, saver, world
        self._metrics_log, self._due, self._num_samples = metrics_log, due, num_samples
        self._stop_requested = stop_requested
        self._watchdog = Watchdog(config.run / "hang", config.guard.hang_timeout_s, rank=world.rank)
        self._profiler = StepProfiler(config.log, config.run / "trace", world)
        self._skipped_steps_file = config.run / "skipped_steps.jsonl"
        self._skipped_steps = JsonLines(self._skipped_steps_file, position.step) if world.is_main else None
        self._slow_ranks = SlowRanks(world)
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
            if ending is Ending.FINISHED and not self._due.finish():
                ending = Ending.STOPPED
            if ending is Ending.STOPPED:
                self._due.stop()
        return ending

    def _train(self) -> Ending:
        with self._watchdog.paused():
            is_resumed = self._position.stage_step > 0
            if is_resumed and not self._due.validate_and_export():  # the rest of what was due after the last step
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
                self._due.save_if_due(save_failed=metrics.save_failed)
                if not self._due.validate_and_export():
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

        Returns the loss of each micro-batch and the vector of `step_metrics.py`, on the device; no vector if a stop was
        requested before the last micro-batch of a step on a CPU, which is then discarded and repeated after a resume.
        """
        device = self._world.device
        counters = local_step_counters(
            batch, save_failed=self._saver.failure is not None, counts_data=self._world.counts_data
        )
        totals = self._world.all_sum(to_device(counters, device))
        count = totals[NORMALIZER].clamp(min=1.0).float()
        losses, sums = self._run_micro_batches(batch, count)
        if sums is None:
            self._state.drop_gradients()
            return losses, None
        must_stop = to_device(np.array([self._stop_requested.is_set()], dtype=np.float64), device)
        sums_and_loss = torch.cat([sums, torch.stack(losses).sum()[None]]).double() * self._world.counts_loss
        results = self._world.all_sum(torch.cat([sums_and_loss, must_stop]))
        return losses, torch.cat([totals, results, self._state.grad_norm().double()[None]])

    def _run_micro_batches(self, batch: StepBatch, count: Tensor) -> tuple[list[Tensor], Tensor | None]:
        """(Loss of each micro-batch, sums by source and metrics); no sums if the step must be discarded."""
        num_sums = len(batch.loss_tokens_by_source) + len(self._objective.metric_names)
        if self._state.parallel.pipeline is not None:
            return ([], None) if self._must_discard_step() else self._state.run_pipeline(batch, count, num_sums)
        losses: list[Tensor] = []
        sums = torch.zeros(num_sums, device=self._world.device)
        for number, micro_batch in enumerate(batch.on_device, start=1):
            if self._must_discard_step():
                return losses, None
            is_last = number == batch.num_micro_batches
            loss, own_sums = self._state.backward(micro_batch, count, is_last_micro_batch=is_last)
            losses.append(loss)
            sums += own_sums
        return losses, sums

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
            if self._world.counts_loss
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

    # -------------------------------------------------------------- logging

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
        lrs = {group.name: group.lr * self._lr_factor for group in self._state.optimizer.groups}
        self._metrics_log.add(step, lrs, self._batches.remote_reads)
        self._slow_ranks.add(step.seconds, step.data_wait_s)
        if step.number % self._config.log.every == 0:
            self._slow_ranks.report()

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

    def _collect_garbage(self) -> None:
        if self._position.step % self._config.gc_every == 0:
            gc.collect(1)
