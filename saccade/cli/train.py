"""`saccade train` and `saccade plan`."""

import json
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import typer

from saccade.cli.options import DeviceOption, JsonOption
from saccade.errors import ConfigError

Recompute = Literal["none", "selective", "full"]


def train(
    recipe: Annotated[
        Path, typer.Argument(help="TOML file: where to begin, the stages, the run folder. See recipes/.")
    ],
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="key=value over what the recipe says, stages by name or number; may be repeated."),
    ] = None,
    device: DeviceOption = "auto",
) -> None:
    """Carry out a recipe; run again, it goes on where it stopped. Works alone and under torchrun."""
    from saccade.config import load_config
    from saccade.train import TrainConfig
    from saccade.train import train as run

    ending = run(load_config(TrainConfig, recipe, set_ or []), device=device)
    typer.echo(f"{ending.value}", err=True)


def plan(
    model: Annotated[str, typer.Argument(help="Checkpoint folder, size by name (3b, 7b, ...), or a training recipe.")],
    gpu: Annotated[str, typer.Option(help="H200, H100, A100, ..., or its memory in GiB.")] = "H200",
    ranks: Annotated[int, typer.Option(min=1, help="GPUs that train together.")] = 1,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of a row; a recipe brings its own.")] = 16384,
    patches: Annotated[
        int | None, typer.Option(min=0, help="Image patches of a row; 2.25 for each token if not given.")
    ] = None,
    recompute_vision: Annotated[
        str, typer.Option(help="none, selective or full: what the tower computes twice.")
    ] = "none",
    recompute_language: Annotated[str, typer.Option(help="The same for the decoder.")] = "none",
    as_json: JsonOption = False,
) -> None:
    """Whether training fits the memory of a GPU, by component, and what to change where it does not."""
    from saccade.train.plan import report

    _check_recompute(recompute_vision, recompute_language)
    reports = {
        name: report(planner, row, gpu)
        for name, planner, row in _plans(model, ranks, tokens, patches, recompute_vision, recompute_language)
    }
    if as_json:
        typer.echo(json.dumps({name: made.record() for name, made in reports.items()}))
        return
    for name, made in reports.items():
        typer.echo(name)
        for line in made.lines():
            typer.echo(f"  {line}")


def _plans(
    model: str, ranks: int, tokens: int, patches: int | None, vision: str, language: str
) -> list[tuple[str, Any, Any]]:
    """(name, planner, row) of each stage of a recipe, or of the one row that was asked for."""
    from saccade.config import load_config
    from saccade.train.config import ParallelConfig, TrainConfig
    from saccade.train.plan import Planner, RowSize, model_config, of_stage

    if model.endswith(".toml"):
        config = load_config(TrainConfig, Path(model))
        start = model_config(str(config.model.folder))
        return [(f"stage {stage.name}", *of_stage(config, stage, start, ranks)) for stage in config.stages]
    parallel = ParallelConfig(recompute_vision=vision, recompute_language=language)  # type: ignore[arg-type]
    planner = Planner(config=model_config(model), world_size=ranks, parallel=parallel)
    return [(model, planner, RowSize(tokens=tokens, patches=round(2.25 * tokens) if patches is None else patches))]


def _check_recompute(*extents: str) -> None:
    if unknown := [extent for extent in extents if extent not in get_args(Recompute)]:
        raise ConfigError(f"recompute {unknown[0]!r} is unknown. Give {', '.join(get_args(Recompute))}")
