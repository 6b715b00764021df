"""`saccade recipes`: the training recipes that come with the package."""

import json
import shlex
import shutil
from pathlib import Path
from typing import Annotated

import typer

from saccade.cli.options import CommandGroup, JsonOption
from saccade.errors import ConfigError

RECIPES = Path(__file__).parents[1] / "recipes"

app = typer.Typer(help="Training recipes that come with the package.", no_args_is_help=True, cls=CommandGroup)


@app.command("list")
def list_(as_json: JsonOption = False) -> None:
    """List the recipes and what each is for."""
    about = {path.name: _first_sentence(path) for path in _recipes()}
    if as_json:
        typer.echo(json.dumps(about))
        return
    width = max(map(len, about))
    for name, text in about.items():
        typer.echo(f"{name:<{width}}  {text}")


@app.command()
def copy(
    name: Annotated[str, typer.Argument(help="A recipe of saccade recipes list, with or without its extension.")],
    to: Annotated[Path, typer.Argument(help="File to write, or folder: a path without extension.")] = Path(),
) -> None:
    """Copy a recipe, to change it and train with it."""
    known = {path.name: path for path in _recipes()}
    source = known.get(name) or known.get(f"{name}.toml") or known.get(f"{name}.sh")
    if source is None:
        raise ConfigError(f"no recipe {name!r}. Recipes: {', '.join(known)}")
    target = to / source.name if to.is_dir() or not to.suffix else to
    if target.exists():
        raise ConfigError(f"{target} exists. Name another file: saccade recipes copy {name} FILE")
    try:
        if target != to:
            to.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
    except OSError as error:
        raise ConfigError(f"{target}: {error.strerror}. Name a file in a folder that can be written") from error
    file = shlex.quote(str(target))
    next_command = f"sbatch {file} RECIPE" if source.suffix == ".sh" else f"saccade train {file}"
    typer.echo(f"{target}: its first lines say what it needs. next: {next_command}")


def check_recipe(path: Path) -> None:
    """Refuse a file that does not exist; if the package has a recipe of that name, say how to get it."""
    if path.exists():
        return
    known = {recipe.stem: recipe for recipe in _recipes() if recipe.suffix == ".toml"}
    if path.stem in known or path.name in known:
        name = path.stem if path.stem in known else path.name
        raise ConfigError(f"{path}: no such file. The package has a recipe of this name: saccade recipes copy {name}")
    raise ConfigError(f"{path}: no such file. Check the path; saccade recipes list shows the recipes of the package")


def _recipes() -> list[Path]:
    return sorted(path for path in RECIPES.iterdir() if path.suffix in (".toml", ".sh"))


def _first_sentence(path: Path) -> str:
    """The first sentence of the comment that a recipe begins with."""
    lines = [line.removeprefix("#").strip() for line in path.read_text(encoding="utf-8").splitlines()]
    comment = " ".join(line for line in lines[:4] if line and not line.startswith("!"))
    return comment.partition(". ")[0].rstrip(".")
