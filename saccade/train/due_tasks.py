"""What is due after a step, in this order: save, validate, export, evaluate.

A stop request or a crash in between loses nothing: the saved state records what is done (`Position.done`), and the
resumed run begins with the rest.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from saccade.device import DTYPES
from saccade.errors import CheckpointError
from saccade.train.config import TrainConfig
from saccade.train.guard import Guard
from saccade.train.loss import ModelWithLoss
from saccade.train.metrics import MetricsLog
from saccade.train.position import Position
from saccade.train.saver import Saver
from saccade.train.stage_config import StageConfig
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
"""How long the other ranks wait: an evaluation on the device of training may take a while."""


class DueTasks:
    """Saves, validates and exports one stage when it is due."""

    def __init__(
        self,
        *,
        config: TrainConfig,
        stage: StageConfig,
        position: Position,
        state: TrainState,
        guard: Guard,
        saver: Saver,
        world: World,
        metrics_log: MetricsLog,
        validate: Validate | None = None,
        on_export: OnExport | None = None,
    ) -> None:
        self._config, self._stage, self._position, self._state = config, stage, position, state
        self._guard, self._saver, self._world, self._metrics_log = guard, saver, world, metrics_log
        self._validate, self._on_export = validate, on_export
        self._checkpoints = config.run / "checkpoints"
        self._is_save_due = False

    # -------------------------------------------------------------- saving

    def save_if_due(self, *, save_failed: bool) -> None:
        """Save at an interval, but not between bad steps: such a state would replace one that a rollback needs."""
        if save_failed:
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

    # -------------------------------------------------------------- validation, export, evaluation

    def validate_and_export(self, *, is_last: bool = False) -> bool:
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
        out, parallel = self._checkpoints / name, self._state.parallel
        export_checkpoint(
            out,
            parallel.whole,
            self._state.weights_to_export(),
            like=self._config.model.folder,
            dtype=DTYPES[self._config.checkpoint.export_dtype],
            world=self._world,
            only_adapter=self._stage.lora is not None and self._stage.lora.export == "adapter",
            gather=parallel.collected,
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

    # -------------------------------------------------------------- end of a stage

    def stop(self) -> None:
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

    def finish(self) -> bool:
        """Save, do what is due at the end of a stage, mark the stage as done; False if a stop request interrupted it.

        A crash in between loses no step.
        """
        self._save_unless_saved()
        self._saver.finish()
        if not self.validate_and_export(is_last=True):
            return False
        self._position.is_stage_done = True
        if self._save_unless_saved():
            self._saver.update(self._position.step, self._saved_progress())
        self._saver.finish_or_raise()
        logger.info('stage "%s": done after %d steps', self._stage.name, self._position.stage_step)
        return True
