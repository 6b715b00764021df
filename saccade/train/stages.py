"""A training run: its stages in order, resumable at any step.

    check every stage -> find the newest state
    -> for each stage that is not done: build -> load state -> train -> export -> save

A stage always starts from disk: `resume.py` says what is loaded.
"""

import contextlib
import gc
import logging
import platform
import socket
import threading
from collections.abc import Callable, Iterator

import torch

from saccade import __version__, errors
from saccade.config import encode, load_config, write_config
from saccade.data.loader import Stream
from saccade.errors import ConfigError, DataError, UserError
from saccade.train.batches import BatchIterator, open_stage_stream
from saccade.train.check import check_stages
from saccade.train.config import TrainConfig, changed_keys
from saccade.train.context_batches import ContextGroup, context_group
from saccade.train.due_tasks import DueTasks, OnExport, Validate
from saccade.train.flops import trained_parts
from saccade.train.guard import Guard
from saccade.train.memory_check import explain_out_of_memory
from saccade.train.metrics import MetricsLog
from saccade.train.optimizer import build_optimizer
from saccade.train.parallelize import parallelize, trainable_table
from saccade.train.position import Position
from saccade.train.process import catch_stop_signals, lock_folder
from saccade.train.rank_agreement import check_ranks_agree
from saccade.train.report import write_report
from saccade.train.resume import first_stage, load_state, start_of_stage
from saccade.train.saved_state import SavedState, newest_state
from saccade.train.saver import Saver
from saccade.train.stage_config import StageConfig
from saccade.train.trackers import Trackers, open_trackers
from saccade.train.train_state import TrainState
from saccade.train.trainer import Ending, Trainer
from saccade.train.validation import combine, held_out_validation
from saccade.world import World, open_world

logger = logging.getLogger(__name__)

INDEX_TIMEOUT_S = 7 * 86400.0
"""How long ranks wait for the main rank to index and measure the data of a stage, once per folder."""


def train(
    config: TrainConfig, *, device: str = "auto", validate: Validate | None = None, on_export: OnExport | None = None
) -> Ending:
    """Train from a recipe, on every rank; resume from the run folder. `on_export` gets every exported checkpoint."""
    with open_world(device) as world:
        return train_in(world, config, validate=validate, on_export=on_export)


def train_in(
    opened: World, config: TrainConfig, *, validate: Validate | None = None, on_export: OnExport | None = None
) -> Ending:
    """Train like `train`, in a world that is already open."""
    if config.evaluation.tasks and on_export is None:
        raise ConfigError(
            "evaluation.tasks are evaluated by the command saccade train. Use it, or pass on_export to train()"
        )
    check_ranks_agree(config, opened)
    with (
        opened.arranged(config.parallel.dims(opened.dims.size)) as world,
        catch_stop_signals() as stop_requested,
        _open_run_folder(config, world),
        Saver(config.run / "state", config.checkpoint, world) as saver,
    ):
        state = newest_state(saver.folder, world, verify=True)
        remaining = range(first_stage(config, state), len(config.stages))
        stages = [config.stages[number] for number in remaining]
        _on_main(world, lambda: check_stages(config, stages, world), timeout_s=INDEX_TIMEOUT_S)
        with _open_trackers(config, state, world) as trackers:
            for number in remaining:
                if _must_stop(stop_requested, config.stages[number], world):
                    return Ending.STOPPED
                with explain_out_of_memory(config, config.stages[number], world):
                    ending = _run_stage(config, number, saver, trackers, world, validate, on_export, stop_requested)
                _close_stage(config, world)
                if ending is Ending.STOPPED:
                    return Ending.STOPPED
    return Ending.FINISHED


def _must_stop(stop_requested: threading.Event, stage: StageConfig, world: World) -> bool:
    """Whether any rank was asked to stop since the last step; everything is saved at this point."""
    must_stop = any(world.gather(stop_requested.is_set()))
    if must_stop:
        logger.info('stage "%s": stopped before its first step; the same command resumes', stage.name)
    return must_stop


def _close_stage(config: TrainConfig, world: World) -> None:
    """Write the report, and free the stage's memory before the next one is built."""
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
    """Lock the run folder and log what changed in the config since the last start."""
    with contextlib.ExitStack() as lock:
        _on_main(world, lambda: lock.enter_context(lock_folder(config.run)))
        if world.is_main:
            _log_changed_settings(config)
            logger.info(
                "saccade %s, torch %s, python %s; run %s on %d x %s",
                __version__, torch.__version__, platform.python_version(), config.run,
                world.dims.size, world.device.type,
            )  # fmt: skip
        yield


def _log_changed_settings(config: TrainConfig) -> None:
    """Compare with config.toml of the run folder, if it can be read."""
    file = config.run / "config.toml"
    try:
        changes = changed_keys(load_config(TrainConfig, file), config) if file.exists() else []
    except ConfigError as error:
        logger.warning("the config of the last start cannot be read and will be overwritten: %s", error)
        return
    if changes:
        logger.warning("settings changed since the last start: %s", "; ".join(changes))


def _write_settings(config: TrainConfig, world: World) -> None:
    """Write config.toml once the stage is built, so that a refused run does not replace the previous config."""

    def write() -> None:
        try:
            write_config(config, config.run / "config.toml")
        except OSError as error:
            raise ConfigError(
                f"{config.run / 'config.toml'} cannot be written: {error.strerror}. "
                "Free space, or choose another folder: --set run=NAME"
            ) from error

    _on_main(world, write)


def _on_main(world: World, do: Callable[[], object], *, timeout_s: float | None = None) -> None:
    """Run it on the main rank; a user error there is raised on every rank. `timeout_s`: if it may take long."""
    failure = None
    if world.is_main:
        try:
            do()
        except UserError as error:
            failure = [type(error).__name__, str(error)]
    if timeout_s is not None:
        world.barrier(timeout_s=timeout_s)
    if (failure := world.broadcast(failure)) is not None:
        raise getattr(errors, failure[0])(failure[1])


def _open_trackers(config: TrainConfig, state: SavedState | None, world: World) -> Trackers:
    """The trackers of the main rank; other ranks have none."""
    if not world.is_main:
        return Trackers({})
    step, is_validated = (state.step, state.is_validated) if state else (0, False)
    return open_trackers(config.log.trackers, config.run, step=step, settings=encode(config), is_validated=is_validated)


def _run_stage(
    config: TrainConfig,
    number: int,
    saver: Saver,
    trackers: Trackers,
    world: World,
    validate: Validate | None,
    on_export: OnExport | None,
    stop_requested: threading.Event,
) -> Ending:
    """Build the stage, load the saved state, train."""
    stage, saved = config.stages[number], newest_state(saver.folder, world)
    start = start_of_stage(config, number, saved, saver)
    parallel = parallelize(
        config.model.folder, stage, config.parallel, world, dtype=config.model.dtype, seed=config.seed, start=start
    )
    optimizer = build_optimizer(
        parallel.model.named_parameters(), stage.optimizer, parallel.masters, parallel.whole.named_parameters()
    )
    state = TrainState(
        parallel,
        optimizer,
        world,
        reduce_each_micro_batch=config.parallel.reduce_each_micro_batch,
        ema_decay=stage.ema_decay,
    )
    guard = Guard(config.guard)
    position = load_state(saved, number, stage, state, guard, world, config.seed)
    ranks = f"{world.dims.size} ranks ({world.dims})"
    strategy = ranks if parallel.strategy == "none" else f"{parallel.strategy} on {ranks}"
    if world.dims.size == 1 and parallel.strategy == "none":
        strategy = "single device"
    logger.info('stage "%s": step %d, %s\n%s', stage.name, position.step, strategy, trainable_table(parallel.whole))
    context = context_group(world)
    with _open_data(config, stage, position, world, context) as stream:
        _write_settings(config, world)
        if _must_stop(stop_requested, stage, world):
            return Ending.STOPPED
        last_validated = position.step - ("validation" not in position.done and position.stage_step > 0)
        held_out = held_out_validation(config, stage, world, step=last_validated, stop_requested=stop_requested)
        metrics_log = MetricsLog(trackers, stage.name, config.log.every, world)
        due = DueTasks(
            config=config,
            stage=stage,
            position=position,
            state=state,
            guard=guard,
            saver=saver,
            world=world,
            metrics_log=metrics_log,
            validate=combine(validate, held_out, device=world.device),
            on_export=on_export,
        )
        return Trainer(
            config=config,
            stage=stage,
            position=position,
            state=state,
            batches=BatchIterator(
                stream,
                parallel.model.config,
                trained_parts(parallel.whole),
                world.device,
                parallel.module.objective,
                context,
            ),
            guard=guard,
            saver=saver,
            metrics_log=metrics_log,
            due=due,
            world=world,
            stop_requested=stop_requested,
            num_samples=_num_samples(stage, stream),
        ).run()


def _open_data(
    config: TrainConfig, stage: StageConfig, position: Position, world: World, context: ContextGroup
) -> Stream:
    """This rank's data stream, resumed. The main rank opens it first, because it builds a missing index."""

    def open_stream(*, check_files: bool) -> Stream:
        return open_stage_stream(
            config,
            stage,
            state=position.data,
            rank=world.data_rank,
            num_ranks=world.num_data_ranks,
            context=context,
            ranks_per_node=world.data_ranks_per_node,
            exchange=world.open_store(),
            check_files=check_files,
        )

    stream = open_stream(check_files=True) if world.is_main else None
    world.barrier(timeout_s=INDEX_TIMEOUT_S)
    fingerprint = world.broadcast(stream.fingerprint if stream else None)
    return stream or _open_same(open_stream, fingerprint)


def _open_same(open_stream: Callable[..., Stream], fingerprint: str) -> Stream:
    """A stream with the data of the main rank: without listing the shards, if this machine sees its index."""
    with contextlib.suppress(DataError):
        stream = open_stream(check_files=False)
        if stream.fingerprint == fingerprint:
            return stream
        stream.close()
    stream = open_stream(check_files=True)
    if stream.fingerprint != fingerprint:
        stream.close()
        raise DataError(
            f"host {socket.gethostname()} sees other shards, index or lengths than the first rank. Use paths or URLs "
            "that are the same folder on every machine; remove an old index from the cache folder"
        )
    return stream


def _num_samples(stage: StageConfig, stream: Stream) -> int | None:
    """Number of samples of a stage whose length is given in epochs."""
    return None if stage.epochs is None else stage.epochs * sum(int(one.sizes.sum()) for one in stream.sources)
