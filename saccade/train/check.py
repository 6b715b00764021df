"""Checks of a recipe against the model, the data and the memory, before the first step: `saccade train --check`.

Everything that any remaining stage needs is opened once: checkpoint headers, parameter groups, LoRA targets, indexes,
the first packed sequence of each stage and of the validation data. So a typo in the last stage does not end a run after
two days.
"""

import dataclasses
from collections.abc import Sequence

from saccade.data.config import Source
from saccade.data.sources import open_sources
from saccade.device import DTYPES
from saccade.errors import CheckpointError, ConfigError, DataError, UserError
from saccade.model.families import load_model_config
from saccade.model.shard import TensorRank
from saccade.processor import Processor
from saccade.train.batches import log_indexing, open_validation_stream
from saccade.train.config import TrainConfig
from saccade.train.lora import base_shapes
from saccade.train.memory_check import device_gib, planner_here
from saccade.train.objectives.build import check_objective, check_stored_logits
from saccade.train.parallelize import build_model
from saccade.train.stage_config import StageConfig
from saccade.train.weights import checkpoint_names, checkpoint_tensors, meta_model
from saccade.world import World, open_world


def check_run(config: TrainConfig, *, device: str = "auto") -> list[str]:
    """Check a recipe completely, without training and without touching the run folder; returns a report for people."""
    with open_world(device) as opened, opened.arranged(config.parallel.dims(opened.dims.size)) as world:
        check_stages(config, config.stages, world)
        for _ in checkpoint_tensors(
            config.model.folder, base_shapes(meta_model(config.model.folder, DTYPES[config.model.dtype]))
        ):
            pass  # reads every tensor: raises on NaN and inf
        model = load_model_config(config.model.folder)
        lines = [f"checkpoint {config.model.folder}: {model.family}, all weights are finite"]
        for stage in config.stages:
            planner, size = planner_here(config, stage, model, world)
            plan, gib = planner.plan(size), device_gib(world.device)
            fits = "fits" if plan.total_gib <= gib else "may not fit"
            length = f"{stage.known_steps} steps" if stage.known_steps is not None else f"{stage.epochs} epochs"
            lines.append(
                f'stage "{stage.name}": {length}, {len(stage.data.sources)} sources, '
                f"{plan.total_gib:.1f} GiB planned, "
                f"{fits} in {gib:.1f} GiB "
                f"({world.device.type}{'' if world.device.type == 'cuda' else ', available now'})"
            )
        return lines


def check_stages(config: TrainConfig, stages: Sequence[StageConfig], world: World) -> None:
    """Raise the first error that any of these stages would run into, and build missing indexes and lengths.

    It runs on the main rank.
    """
    if not stages:
        return
    strategy = config.parallel.strategy_of(world.dims)
    load_model_config(config.model.folder)
    Processor.load(config.model.folder)
    for stage in stages:
        try:
            tensor = TensorRank(0, world.dims.tensor)
            model = build_model(config.model.folder, stage, strategy, config.model.dtype, tensor)
            checkpoint_names(config.model.folder, base_shapes(model))
            check_objective(stage.objective, config.model.folder)
            if stage.data.global_batch_size < (num_ranks := world.num_data_ranks):
                raise ConfigError(
                    f"global_batch_size is {stage.data.global_batch_size} for {num_ranks} ranks. "
                    f"Raise it to {num_ranks} or more"
                )
            _check_data(config, stage, stage.data.sources)
            _check_logits(config, stage)
        except CheckpointError:
            raise
        except UserError as error:
            raise type(error)(f"stage {stage.name}: {error}") from error
    if config.validation.sources:
        try:
            _check_data(config, stages[0], config.validation.sources)
        except UserError as error:
            raise type(error)(f"validation: {error}") from error


def _check_logits(config: TrainConfig, stage: StageConfig) -> None:
    """Stored logits of the data of a stage and of validation, where its objective reads them."""
    sources = (*stage.data.sources, *config.validation.sources)
    data = stage.data
    check_stored_logits(
        stage.objective, config.model.folder, config.model.dtype, sources, data.resize, data.max_seq_len
    )


def _check_data(config: TrainConfig, stage: StageConfig, sources: Sequence[Source]) -> None:
    """Index and measure with all workers what is not yet, then pack and decode one sequence in this process."""
    data = dataclasses.replace(stage.data, max_bad_share=1.0)
    open_sources(
        sources,
        checkpoint=config.model.folder,
        pairs=stage.objective.reads_pairs,
        num_workers=data.num_workers,
        on_progress=log_indexing,
        storage=data.storage,
    )
    with open_validation_stream(
        config, dataclasses.replace(stage, data=data), sources=sources, num_samples=data.packing_buffer_size
    ) as stream:
        batch = next(stream)
    if batch.bad and not any(sequence.inputs.num_tokens for sequence in batch.sequences):
        first = batch.bad[0]
        raise DataError(
            f"no sample of the first packed sequence can be used. {first.sample_id}: {first.reason}. Correct the data, "
            "or name other sources"
        )
