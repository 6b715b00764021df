"""`saccade train` and `saccade plan`."""

import json
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import typer

from saccade.cli.options import DeviceOption, JsonOption, SetOption
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
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a row; 16384 if not given. A recipe brings its own.")
    ] = None,
    patches: Annotated[
        int | None, typer.Option(min=0, help="Image patches of a row; 2.25 for each token if not given.")
    ] = None,
    recompute_vision: Annotated[
        str | None, typer.Option(help="none, selective or full: what the tower computes twice; none if not given.")
    ] = None,
    recompute_language: Annotated[str | None, typer.Option(help="The same for the decoder.")] = None,
    set_: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Whether training fits the memory of a GPU, by component, and what to change where it does not."""
    from saccade.train.plan import report

    if model.endswith(".toml"):
        _check_left_out(
            {
                "--tokens": (tokens, "stages.NAME.data.token_budget"),
                "--patches": (patches, "stages.NAME.data.patch_budget"),
                "--recompute-vision": (recompute_vision, "parallel.recompute_vision"),
                "--recompute-language": (recompute_language, "parallel.recompute_language"),
            }
        )
        plans = _plans_of_recipe(Path(model), set_ or [], ranks)
    else:
        if set_:
            raise ConfigError("--set changes a recipe. Give one in the place of the model, or leave --set out")
        plans = [_plan_of_row(model, ranks, tokens or 16384, patches, recompute_vision, recompute_language)]
    reports = {name: report(planner, row, gpu) for name, planner, row in plans}
    if as_json:
        typer.echo(json.dumps({name: made.record() for name, made in reports.items()}))
        return
    for name, made in reports.items():
        typer.echo(name)
        for line in made.lines():
            typer.echo(f"  {line}")


def _plans_of_recipe(recipe: Path, overrides: list[str], ranks: int) -> list[tuple[str, Any, Any]]:
    """(name, planner, row) of each stage."""
    from saccade.config import load_config
    from saccade.train.config import TrainConfig
    from saccade.train.plan import folder_config, of_stage

    config = load_config(TrainConfig, recipe, overrides)
    start = folder_config(config.model.folder)
    return [(f"stage {stage.name}", *of_stage(config, stage, start, ranks)) for stage in config.stages]


def _plan_of_row(
    model: str, ranks: int, tokens: int, patches: int | None, vision: str | None, language: str | None
) -> tuple[str, Any, Any]:
    """(name, planner, row) of the one row that was asked for."""
    from saccade.train.config import ParallelConfig
    from saccade.train.plan import Planner, RowSize, model_config

    extents = {"recompute_vision": vision or "none", "recompute_language": language or "none"}
    _check_recompute(*extents.values())
    planner = Planner(config=model_config(model), world_size=ranks, parallel=ParallelConfig(**extents))  # type: ignore[arg-type]
    return model, planner, RowSize(tokens=tokens, patches=round(2.25 * tokens) if patches is None else patches)


def _check_left_out(flags: dict[str, tuple[object, str]]) -> None:
    """Refuse flags that a recipe answers itself."""
    for flag, (value, key) in flags.items():
        if value is not None:
            raise ConfigError(f"{flag} is for a model, and a recipe says it itself. Use --set {key}={value}")


def _check_recompute(*extents: str) -> None:
    if unknown := [extent for extent in extents if extent not in get_args(Recompute)]:
        raise ConfigError(f"recompute {unknown[0]!r} is unknown. Give {', '.join(get_args(Recompute))}")
