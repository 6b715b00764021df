"""What a stage starts from: the initial checkpoint folder, overlaid with the newest saved state.

Whether that state was saved in the middle of this stage or at the end of the previous one makes little difference, so
a stage change and a restart after a crash are the same code path. What is loaded:

                            same stage      next stage
    weights                 all             all; their average, where the previous stage kept one
    average of the weights  all             starts from the weights
    optimizer state         all             with `continue_optimizer`: of parameters trained in both
    step of the schedule    yes             starts at 0
    data position           yes             starts at 0
    guard's loss history    yes             starts empty
"""

from __future__ import annotations

import dataclasses
import logging

from saccade.errors import CheckpointError, ConfigError
from saccade.train.config import TrainConfig
from saccade.train.guard import Guard
from saccade.train.position import Position
from saccade.train.random_state import restore_random_state, seed_everything
from saccade.train.saved_state import SavedState, state_of_step
from saccade.train.saver import Saver
from saccade.train.stage_config import StageConfig
from saccade.train.train_state import TrainState
from saccade.world import World

logger = logging.getLogger(__name__)


def first_stage(config: TrainConfig, state: SavedState | None) -> int:
    """Index of the stage to start or resume; a finished stage that was made longer is resumed."""
    if state is None:
        return 0
    if state.progress["fingerprint"] != config.fingerprint:
        logger.warning("the state of step %d was saved with different settings", state.step)
    number = int(state.progress["stage"])
    if number >= len(config.stages):
        raise ConfigError(
            f"{config.run} is in stage {number}, the recipe has {len(config.stages)}, counted from 0. "
            "Use the recipe of this run, or another run folder: --set run=NAME"
        )
    if state.progress["is_stage_done"] and not _was_extended(config.stages[number], state):
        number += 1
    if number == len(config.stages):
        logger.info("every stage of this run is done. Give it more steps, or use another run folder: --set run=NAME")
    return number


def _was_extended(stage: StageConfig, state: SavedState) -> bool:
    """Whether a finished stage is longer in this recipe than it was when it finished."""
    if stage.known_steps is not None:
        return bool(state.progress["stage_step"] < stage.known_steps)
    done = state.progress["epochs"]
    if done is None:
        raise ConfigError(
            f"stage {stage.name} finished after {state.progress['stage_step']} steps, and its length is now "
            "given in epochs. Give it in steps or tokens, or add a stage"
        )
    return bool(stage.epochs is not None and stage.epochs > done)


def start_of_stage(config: TrainConfig, number: int, saved: SavedState | None, saver: Saver) -> SavedState | None:
    """The state that a stage started from, if its objective needs it; it is kept until the next stage."""
    saver.kept_step = None
    if saved is None or not config.needs_start(number):
        return None
    is_started = saved.progress["stage"] == number
    step = saved.progress["step"] - saved.progress["stage_step"] if is_started else saved.step
    start = state_of_step(saver.folder, step)
    if start is None:
        name, stage = f"step-{step:08d}", config.stages[number].name
        raise CheckpointError(
            f"{saver.folder / name}: the state that stage {stage} started from is gone or damaged, and its model is "
            "the reference of the stage. Name a folder with its weights: "
            f"--set stages.{stage}.objective.dpo.reference={config.run / 'checkpoints' / name}"
        )
    saver.kept_step = step
    return start


def load_state(
    saved: SavedState | None, number: int, stage: StageConfig, state: TrainState, guard: Guard, world: World, seed: int
) -> Position:
    """Load what the newest state holds for this stage; see the table above."""
    if saved is None:
        seed_everything(seed + world.data_rank)
        return Position(stage=number)
    names = [field.name for field in dataclasses.fields(Position) if field.name in saved.progress]
    position = Position(**{name: saved.progress[name] for name in names})
    state.load_weights(saved, averaged=position.stage != number)
    if position.stage == number:
        state.load_optimizer(saved, num_steps=saved.progress["optimizer_steps"])
        state.load_average(saved)
        guard.load_state_dict(saved.progress["guard"])
        restore_random_state(saved, world, seed)
        position.is_stage_done = False
        return position
    if stage.continue_optimizer:
        state.load_optimizer(saved, num_steps=saved.progress["optimizer_steps"], only_shared=True)
    seed_everything(seed + world.data_rank)
    return Position(
        stage=number,
        step=position.step,
        samples=position.samples,
        tokens=position.tokens,
        best_loss=position.best_loss,
    )
