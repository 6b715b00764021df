"""A run: its stages one after another, taken up again wherever it ended.

    read the newest state -> for each stage that is not done: build -> take over -> train -> export -> save

A stage always begins from what lies on disk: the folder the run began with, and the newest state over it. Whether that state was
saved in the middle of this stage or at the end of the one before makes little difference, so a hand-over and a restart after a
crash are one path. What is taken over:

                            same stage      next stage
    weights                 all             all
    optimizer's moments     all             with `continue_optimizer`, of the parameters that learn in both
    step of the schedule    yes             begins anew
    position in the data    yes             begins anew
    losses the guard knows  yes             begins anew
"""

import contextlib
import dataclasses
import gc
import logging
import platform
import threading
from collections.abc import Callable, Iterator

import torch

from saccade import __version__
from saccade.config import encode, load_config, write_config
from saccade.data.index import open_index
from saccade.data.loader import Source, Stream, open_stream
from saccade.errors import ConfigError
from saccade.train.checkpoint import SavedState, Saver, newest_state, restore_random_state, seed_everything
from saccade.train.config import StageConfig, TrainConfig, changed_keys
from saccade.train.feed import Feed
from saccade.train.groups import part_of
from saccade.train.guard import Guard
from saccade.train.journal import Journal
from saccade.train.learner import Learner
from saccade.train.lora import lora_parameters
from saccade.train.optimizer import build_optimizer
from saccade.train.out_of_memory import memory_explained
from saccade.train.parallelize import parallelize, trainable_table
from saccade.train.probe import held_out_probe, together
from saccade.train.process import lock_folder, stop_requests
from saccade.train.progress import Progress
from saccade.train.report import write_report
from saccade.train.trackers import Trackers, open_trackers
from saccade.train.trainer import Ending, Probe, Trainer
from saccade.world import World, open_world

logger = logging.getLogger(__name__)

MEASURING_PATIENCE_S = 7 * 86400.0
"""How long ranks wait for the main one to index and measure the data of a stage, which is done once for each folder."""


def train(config: TrainConfig, *, device: str = "auto", probe: Probe | None = None) -> Ending:
    """Carry out a recipe, from its beginning or from where its run folder says. Every rank calls it."""
    with open_world(device) as world:
        return train_in(world, config, probe=probe)


def train_in(world: World, config: TrainConfig, *, probe: Probe | None = None) -> Ending:
    """The same for ranks that have met already."""
    with (
        stop_requests() as asked_to_stop,
        _open_run_folder(config, world),
        Saver(config.run / "state", config.checkpoint, world) as saver,
    ):
        state = newest_state(saver.folder, world)
        remaining = range(_first_stage(config, state), len(config.stages))
        with _open_trackers(config, state, world) as trackers:
            for number in remaining:
                if _must_stop(asked_to_stop, config.stages[number], world):
                    return Ending.STOPPED
                with memory_explained(config, config.stages[number], world):
                    ending = _run_stage(config, number, saver, trackers, world, probe, asked_to_stop)
                _close_stage(config, world)
                if ending is Ending.STOPPED:
                    return Ending.STOPPED
    return Ending.FINISHED


def _must_stop(asked_to_stop: threading.Event, stage: StageConfig, world: World) -> bool:
    """Whether some rank was asked to stop since the last step of the stage before, when all that is done is saved."""
    must_stop = any(world.gather(asked_to_stop.is_set()))
    if must_stop:
        logger.info("stopped before a step of stage %s was made; the same command goes on from here", stage.name)
    return must_stop


def _close_stage(config: TrainConfig, world: World) -> None:
    """Draw the run so far; free what the stage has left before the next one is built."""
    if world.is_main:
        try:
            write_report(config.run)
        except OSError as error:
            logger.warning("report.html was not written: %s", error)
    gc.collect()
    if world.device.type == "cuda":
        torch.cuda.empty_cache()


@contextlib.contextmanager
def _open_run_folder(config: TrainConfig, world: World) -> Iterator[None]:
    """Hold the run folder for this run alone; say what has changed since it was last trained."""
    with contextlib.ExitStack() as held:
        _on_main(world, lambda: held.enter_context(lock_folder(config.run)))
        if world.is_main:
            _name_changes(config)
            logger.info(
                "saccade %s, torch %s, python %s; run %s on %d x %s",
                __version__, torch.__version__, platform.python_version(), config.run, world.size, world.device.type,
            )  # fmt: skip
        yield


def _name_changes(config: TrainConfig) -> None:
    """Compare with the settings in the run folder, if they can be read."""
    file = config.run / "config.toml"
    try:
        changes = changed_keys(load_config(TrainConfig, file), config) if file.exists() else []
    except ConfigError as error:
        logger.warning(
            "the settings this run was last trained with cannot be read, and will be written anew: %s", error
        )
        return
    if changes:
        logger.warning("settings have changed since this run was last started: %s", "; ".join(changes))


def _write_settings(config: TrainConfig, world: World) -> None:
    """Into the run folder, when all that they ask for is there: those of a run that is refused do not replace the old."""

    def write() -> None:
        try:
            write_config(config, config.run / "config.toml")
        except OSError as error:
            raise ConfigError(
                f"{config.run / 'config.toml'} cannot be written: {error.strerror}. Free space, or choose another folder: --set run=NAME"
            ) from error

    _on_main(world, write)


def _on_main(world: World, do: Callable[[], object]) -> None:
    """Do it on the main rank; what is refused there is refused on every rank."""
    refusal = None
    if world.is_main:
        try:
            do()
        except ConfigError as error:
            refusal = str(error)
    if (refusal := world.share(refusal)) is not None:
        raise ConfigError(refusal)


def _open_trackers(config: TrainConfig, state: SavedState | None, world: World) -> Trackers:
    """The main rank's trackers; none for the others."""
    if not world.is_main:
        return Trackers({})
    return open_trackers(config.log.trackers, config.run, step=state.step if state else 0, settings=encode(config))


def _first_stage(config: TrainConfig, state: SavedState | None) -> int:
    """The stage to begin or go on with; one that was done and has been made longer since is gone on with."""
    if state is None:
        return 0
    if state.progress["fingerprint"] != config.fingerprint:
        logger.warning("the state of step %d was saved under other settings than these", state.step)
    number = int(state.progress["stage"])
    if number >= len(config.stages):
        raise ConfigError(
            f"{config.run} is in stage {number}, the recipe has {len(config.stages)}, counted from 0. Use the recipe the run was "
            "made with, or another run folder"
        )
    if state.progress["is_stage_done"]:
        _check_epochs(config, number, state)
        if state.progress["stage_step"] >= (config.stages[number].known_steps or 0):
            number += 1
    if number == len(config.stages):
        logger.info("every stage of this run is done. Give it more steps, or another run folder")
    return number


def _check_epochs(config: TrainConfig, number: int, state: SavedState) -> None:
    """Refuse more epochs for a stage that is done: where its data ends belongs to the order of its samples."""
    stage, done = config.stages[number], state.progress.get("epochs")
    if stage.epochs is None or "epochs" not in state.progress or (done is not None and stage.epochs <= done):
        return
    length = f"{state.progress['stage_step']} steps" if done is None else f"{done} epochs"
    raise ConfigError(
        f"stage {stage.name} was done after {length}, and epochs = {stage.epochs} cannot make it longer: the order of its samples was "
        f"planned for that length. Add a stage after it, or begin another run from the newest folder in {config.run / 'checkpoints'}"
    )


def _run_stage(
    config: TrainConfig,
    number: int,
    saver: Saver,
    trackers: Trackers,
    world: World,
    probe: Probe | None,
    asked_to_stop: threading.Event,
) -> Ending:
    """Build what the stage needs, take over what was saved, train."""
    stage = config.stages[number]
    parallel = parallelize(
        config.model.folder, stage, config.parallel, world, dtype=config.model.dtype, seed=config.seed
    )
    optimizer = build_optimizer(parallel.model.named_parameters(), stage.optimizer)
    learner = Learner(parallel, optimizer, world, reduce_each_row=config.parallel.reduce_each_row)
    guard = Guard(config.guard)
    progress = _take_over(newest_state(saver.folder, world), number, stage, learner, guard, world, config.seed)
    logger.info(
        "stage %s from step %d, %s\n%s", stage.name, progress.step, parallel.strategy, trainable_table(parallel.model)
    )
    with _open_data(config, stage, progress, world) as stream:
        _write_settings(config, world)
        if _must_stop(asked_to_stop, stage, world):
            return Ending.STOPPED
        return Trainer(
            config=config,
            stage=stage,
            progress=progress,
            learner=learner,
            feed=Feed(stream, parallel.model.config, _trained_parts(learner), world.device),
            guard=guard,
            saver=saver,
            journal=Journal(trackers, stage.name, config.log.every, world),
            world=world,
            asked_to_stop=asked_to_stop,
            num_samples=_num_samples(stage),
            probe=together(probe, held_out_probe(config, stage, world, step=progress.step)),
        ).run()


def _take_over(
    state: SavedState | None, number: int, stage: StageConfig, learner: Learner, guard: Guard, world: World, seed: int
) -> Progress:
    """Load what the newest state has for this stage; see the table above."""
    if state is None:
        seed_everything(seed + world.rank)
        return Progress(stage=number)
    learner.load_weights(state)
    names = [field.name for field in dataclasses.fields(Progress)]
    progress = Progress(**{name: state.progress[name] for name in names})
    if progress.stage == number:
        learner.load_optimizer(state, num_steps=state.progress["optimizer_steps"])
        guard.load_state_dict(state.progress["guard"])
        restore_random_state(state, world, seed)
        progress.is_stage_done = False
        return progress
    if stage.continue_optimizer:
        learner.load_optimizer(state, num_steps=state.progress["optimizer_steps"], only_shared=True)
    seed_everything(seed + world.rank)
    return Progress(stage=number, step=progress.step, samples=progress.samples, tokens=progress.tokens)


def _trained_parts(learner: Learner) -> set[str]:
    """The parts of the model that learn in this stage, for `training_flops`; a head that is the embedding learns with it."""
    model = learner.parallel.model
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    if matrices := lora_parameters(model):
        return {f"{part_of(name)}.lora" for name in names if name in matrices}
    parts = {part_of(name) or "" for name in names}
    return parts | ({"head"} if model.config.tied_head and "embedding" in parts else set())


# ------------------------------------------------------------------ data


def _open_data(config: TrainConfig, stage: StageConfig, progress: Progress, world: World) -> Stream:
    """This rank's stream of the stage. The main rank opens first, for it may have hours of measuring to do."""
    if world.is_main:
        stream = _open_stream(config, stage, progress, world)
    world.barrier(patience_s=MEASURING_PATIENCE_S)
    if not world.is_main:
        stream = _open_stream(config, stage, progress, world)
    return stream


def _open_stream(config: TrainConfig, stage: StageConfig, progress: Progress, world: World) -> Stream:
    data = stage.data
    return open_stream(
        [
            Source(path=source.path, weight=source.weight, rules=source.rules, name=source.name)
            for source in data.sources
        ],
        checkpoint=config.model.folder,
        max_seq_len=data.token_budget,
        max_patches=data.patch_budget,
        global_batch_size=data.rows_per_step,
        seed=config.seed,
        num_epochs=stage.epochs,
        window_shards=data.window_shards,
        packing_buffer_size=data.block_samples,
        rank=world.rank,
        num_ranks=world.size,
        state=progress.data,
        resize=data.resize,
        num_workers=data.workers,
        max_bad_share=data.max_bad_share,
        bad_log=config.run / "bad_samples.jsonl",
        on_progress=lambda what, done: logger.info("%s: %d of %d shards", what, done.num_done, done.num_shards),
    )


def _num_samples(stage: StageConfig) -> int | None:
    """Samples of the stage, where its length is given in epochs."""
    if stage.epochs is None:
        return None
    sizes = [open_index(source.path).kept_sizes.sum() for source in stage.data.sources]
    return stage.epochs * int(sum(sizes))
