"""`saccade train` and `saccade plan`."""

import json
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import typer

from saccade.cli.options import DeviceOption, JsonOption, SetOption
from saccade.errors import ConfigError

Recompute = Literal["none", "selective", "full"]


def _print_keys(requested: bool) -> None:
    if requested:
        from saccade.config import describe_keys
        from saccade.train import TrainConfig

        typer.echo(describe_keys(TrainConfig), nl=False)
        raise typer.Exit


def train(
    recipe: Annotated[Path, typer.Argument(help="TOML file: model, stages, run folder. See recipes/.")],
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="Override a key: key=value, stages by name or number; may be repeated."),
    ] = None,
    device: DeviceOption = "auto",
    check: Annotated[
        bool, typer.Option("--check", help="Validate recipe, checkpoint, data and memory of all stages; do not train.")
    ] = False,
    keys: Annotated[
        bool, typer.Option("--keys", is_eager=True, callback=_print_keys, help="Print every recipe key and exit.")
    ] = False,
) -> None:
    """Train from a recipe; resumes automatically. Works alone and under torchrun."""
    from saccade.config import load_config
    from saccade.train import TrainConfig
    from saccade.train import train as run
    from saccade.train.check import check_run

    config = load_config(TrainConfig, recipe, set_ or [])
    if check:
        for line in check_run(config, device=device):
            typer.echo(line)
        return
    if not config.evaluation.tasks:
        typer.echo(run(config, device=device).value, err=True)
        return
    from saccade.cli.train_evaluation import CheckpointEvaluations
    from saccade.train.trainer import Ending

    with CheckpointEvaluations(config, device) as evaluations:
        ending = run(config, device=device, on_export=evaluations.start)
        if ending is Ending.FINISHED:
            evaluations.finish()
    typer.echo(ending.value, err=True)


def plan(
    model: Annotated[str, typer.Argument(help="Checkpoint folder, size by name (3b, 7b, ...), or a training recipe.")],
    gpu: Annotated[str, typer.Option(help="H200, H100, A100, ..., or its memory in GiB.")] = "H200",
    ranks: Annotated[int, typer.Option(min=1, help="Number of GPUs.")] = 1,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a packed sequence; default 16384. A recipe has its own.")
    ] = None,
    patches: Annotated[
        int | None, typer.Option(min=0, help="Vision patches of a packed sequence; default 2.25 per token.")
    ] = None,
    recompute_vision: Annotated[
        str | None,
        typer.Option(help="Activation checkpointing of the vision tower: none (default), selective or full."),
    ] = None,
    recompute_language: Annotated[
        str | None, typer.Option(help="Activation checkpointing of the decoder, likewise.")
    ] = None,
    set_: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Plan the GPU memory of training: by component, and what to change if it does not fit."""
    from saccade.train.memory_planner import report

    if model.endswith(".toml"):
        _check_left_out(
            {
                "--tokens": (tokens, "stages.NAME.data.max_seq_len"),
                "--patches": (patches, "stages.NAME.data.max_patches"),
                "--recompute-vision": (recompute_vision, "parallel.recompute_vision"),
                "--recompute-language": (recompute_language, "parallel.recompute_language"),
            }
        )
        plans = _plans_of_recipe(Path(model), set_ or [], ranks)
    else:
        if set_:
            raise ConfigError("--set applies to a recipe. Give a recipe instead of a model, or remove --set")
        plans = [_plan_of_model(model, ranks, tokens or 16384, patches, recompute_vision, recompute_language)]
    reports = {name: report(planner, size, gpu) for name, planner, size in plans}
    if as_json:
        typer.echo(json.dumps({name: made.record() for name, made in reports.items()}))
        return
    for name, made in reports.items():
        typer.echo(name)
        for line in made.lines():
            typer.echo(f"  {line}")


def _plans_of_recipe(recipe: Path, overrides: list[str], ranks: int) -> list[tuple[str, Any, Any]]:
    """(name, planner, size of a micro-batch) of each stage."""
    from saccade.config import load_config
    from saccade.train.config import TrainConfig
    from saccade.train.memory_planner import folder_config, stage_planner

    config = load_config(TrainConfig, recipe, overrides)
    start = folder_config(config.model.folder)
    return [(f"stage {stage.name}", *stage_planner(config, stage, start, ranks)) for stage in config.stages]


def _plan_of_model(
    model: str, ranks: int, tokens: int, patches: int | None, vision: str | None, language: str | None
) -> tuple[str, Any, Any]:
    """(name, planner, size of a micro-batch) of one model and size."""
    from saccade.train.config import ParallelConfig
    from saccade.train.memory_planner import MicroBatchSize, Planner, model_config

    extents = {"recompute_vision": vision or "none", "recompute_language": language or "none"}
    _check_recompute(*extents.values())
    planner = Planner(config=model_config(model), world_size=ranks, parallel=ParallelConfig(**extents))  # type: ignore[arg-type]
    return model, planner, MicroBatchSize(tokens=tokens, patches=round(2.25 * tokens) if patches is None else patches)


def _check_left_out(flags: dict[str, tuple[object, str]]) -> None:
    """Refuse flags that a recipe sets itself."""
    for flag, (value, key) in flags.items():
        if value is not None:
            raise ConfigError(f"{flag} applies to a model, but a recipe was given. Use --set {key}={value}")


def _check_recompute(*extents: str) -> None:
    if unknown := [extent for extent in extents if extent not in get_args(Recompute)]:
        raise ConfigError(f"recompute {unknown[0]!r} is unknown. Use one of {', '.join(get_args(Recompute))}")
