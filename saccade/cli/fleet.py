"""`saccade fleet`: replicas of the server on several machines, described by one file."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from saccade.cli.options import CommandGroup, JsonOption
from saccade.errors import ConfigError

if TYPE_CHECKING:
    from saccade.fleet.config import FleetConfig, ModelConfig

app = typer.Typer(help="Replicas of the server on several machines.", no_args_is_help=True, cls=CommandGroup)
FleetFile = Annotated[Path | None, typer.Argument(metavar="FLEET.toml", help="The fleet; see docs/fleet.md.")]


@app.command()
def check(
    fleet: FleetFile = None,
    keys: Annotated[bool, typer.Option("--keys", help="Print every key of the file as Markdown, and exit.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Read a fleet's file and refuse what could not run. Changes nothing and needs no cluster."""
    from saccade.config import describe_keys, encode
    from saccade.fleet.config import FleetConfig

    if keys:
        typer.echo(describe_keys(FleetConfig), nl=False)
        return
    config = _load(fleet)
    if as_json:
        least, most = config.resources()
        resources = {"least": encode(least), "most": encode(most)}
        record = {"config": encode(config), "resources": resources, "not_here": _not_here(config)}
        typer.echo(json.dumps(record))
        return
    typer.echo("\n".join(_lines(config)))


def _load(fleet: Path | None) -> "FleetConfig":
    from saccade.config import load_config
    from saccade.fleet.config import FleetConfig

    if fleet is None:
        raise ConfigError("no fleet. Give a file such as examples/fleet.toml")
    return load_config(FleetConfig, fleet)


def _lines(config: "FleetConfig") -> list[str]:
    """The fleet in a few aligned lines."""
    least, most = config.resources()
    lines = [f"fleet {config.name}  state {config.state}  fronts {_count(config.front)}"]
    for model in config.models:
        lines += _model_lines(model)
    lines.append(f"reserves {_range(least.cpus, most.cpus)} CPUs, {_range(least.gpus, most.gpus)} GPUs")
    lines += [f"note: {path} is not on this machine; the machines of the engines need it" for path in _not_here(config)]
    return lines


def _model_lines(model: "ModelConfig") -> list[str]:
    encoders = "none" if model.encoders is None else _count(model.encoders)
    pools = f"engines {_count(model.engines)}  encoders {encoders}"
    lines = [f"model {model.name}  {pools}  probes {len(model.probes)}"]
    for version in model.versions:
        adapters = f"  adapters {', '.join(version.adapters)}" if version.adapters else ""
        lines.append(f"  {version.name}  {version.traffic:g} % of traffic  {version.checkpoint}{adapters}")
    return lines


def _count(pool: Any) -> str:
    return _range(pool.min_replicas, pool.max_replicas)


def _range(least: float, most: float) -> str:
    return f"{least:g}" if least == most else f"{least:g} to {most:g}"


def _not_here(config: "FleetConfig") -> list[str]:
    """Folders and images that this machine does not have. They may be on the machines of the cluster."""
    versions = [version for model in config.models for version in model.versions]
    folders = [path for version in versions for path in (version.checkpoint, *version.adapters.values())]
    images = [probe.image for model in config.models for probe in model.probes if probe.image is not None]
    return [path for path in dict.fromkeys(folders + images) if not Path(path).exists()]
