"""`saccade fleet`: replicas of the server on several machines, described by one file."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from saccade.cli.fleet_report import Reporter
from saccade.cli.options import CommandGroup, JsonOption, check_modules, examples
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


@app.command()
def simulate(
    fleet: FleetFile = None,
    trace: Annotated[Path | None, typer.Option(help="File of requests as JSON lines; see docs/fleet.md.")] = None,
    workload: Annotated[
        str, typer.Option(help="image-groups, own-images, chat or poisson, if there is no trace.")
    ] = "image-groups",
    model: Annotated[str | None, typer.Option(help="Model of the file.", show_default="the first")] = None,
    replicas: Annotated[
        int | None, typer.Option(min=1, help="Engine replicas.", show_default="engines.max_replicas")
    ] = None,
    rate: Annotated[
        float | None, typer.Option(min=0.001, help="Requests per second.", show_default="5 per replica")
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="Number of requests.")] = 3000,
    encoders: Annotated[int, typer.Option(min=0, help="Encoder replicas, which encode images for all engines.")] = 0,
    fronts: Annotated[int, typer.Option(min=1, help="Fronts that route requests.")] = 4,
    seed: Annotated[int, typer.Option(help="Seed of arrivals and requests.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Simulate a fleet's routing under a load, next to simpler policies. Needs no cluster and no GPU."""
    import time
    from dataclasses import asdict

    from saccade.fleet.simulate import POLICIES, simulate
    from saccade.fleet.workloads import WORKLOADS, read_trace, simulated_replicas

    config = _load(fleet)
    served = next((one for one in config.models if model in (None, one.name)), None)
    if served is None:
        raise ConfigError(f"no model {model!r}. Models: {', '.join(one.name for one in config.models)}")
    if workload not in WORKLOADS:
        raise ConfigError(f"unknown workload {workload!r}. Use one of {', '.join(WORKLOADS)}")
    engines = simulated_replicas(served, replicas or served.engines.max_replicas)
    rate = rate or 5.0 * len(engines)
    arrivals = read_trace(trace) if trace else list(WORKLOADS[workload](rate, requests, seed))
    results = []
    for policy in POLICIES:
        result = simulate(
            arrivals, engines, policy, num_fronts=fronts, num_encoders=encoders, seed=seed, clock=time.thread_time
        )
        results.append(asdict(result))
    if as_json:
        record = {"replicas": len(engines), "encoders": encoders, "requests": len(arrivals), "policies": results}
        typer.echo(json.dumps(record))
        return
    pool = f", {encoders} encoders" if encoders else ""
    typer.echo(f"{len(arrivals)} requests on {len(engines)} replicas of {served.name}{pool}, {fronts} fronts")
    typer.echo("\n".join(_table(results)))


_WHERE_HELP = "The fleet's file or its state folder."
Where = Annotated[str, typer.Argument(metavar="FLEET.toml|STATE", help=_WHERE_HELP)]


@app.command(epilog=examples("saccade fleet up examples/fleet.toml", "saccade fleet up FLEET.toml --json"))
def up(fleet: FleetFile = None, as_json: JsonOption = False) -> None:
    """Start a fleet, or bring a running one to its file, and wait until every model is ready.

    Without an address in the file it starts a local Ray, stays in the foreground, and ends the fleet at Ctrl-C.
    """
    from saccade.cli.fleet_up import up_local, up_on_cluster
    from saccade.fleet.operations import with_absolute_paths

    config = with_absolute_paths(_load(fleet))
    check_modules("fleet", ("ray", "fastapi", "uvicorn", "orjson", "prometheus_client"))
    report = Reporter(as_json=as_json)
    if config.address is not None:
        up_on_cluster(config, report)
        return
    if missing := _not_here(config):
        raise ConfigError(
            f"{missing[0]}: no such file or folder, and the fleet would run on this machine. Check the path"
        )
    up_local(config, report)


@app.command(epilog=examples("saccade fleet status", "saccade fleet status s3://fleets/photos --json"))
def status(where: Where = "fleet-state", as_json: JsonOption = False) -> None:
    """Show a fleet's versions, traffic, replicas, rollouts and decisions, from its state folder. Needs no Ray."""
    import time

    from saccade.cli.fleet_status import status_lines
    from saccade.fleet.operations import known_fleet, open_state
    from saccade.fleet.status import fleet_status

    state = open_state(where)
    known_fleet(state)
    found = fleet_status(state, time.time())
    assert found is not None
    typer.echo(json.dumps(found, ensure_ascii=False) if as_json else "\n".join(status_lines(found)))


@app.command(epilog=examples("saccade fleet update examples/fleet.toml"))
def update(fleet: FleetFile = None, as_json: JsonOption = False) -> None:
    """Bring a running fleet to its changed file, and follow the rollouts. Exits with 1 if one is rolled back."""
    import time

    from saccade.fleet.operations import open_state, request_update, with_absolute_paths

    config = with_absolute_paths(_load(fleet))
    state = open_state(config.state)
    change = request_update(state, config, time.time())
    outcome = Reporter(as_json=as_json).follow(state, change.generation)
    raise typer.Exit(1 if outcome.reasons else 0)


@app.command(epilog=examples("saccade fleet rollback assistant", "saccade fleet rollback assistant FLEET.toml"))
def rollback(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Model whose last change is undone.")],
    where: Where = "fleet-state",
    as_json: JsonOption = False,
) -> None:
    """Go back to the versions that a model had before its last change: at once, when they are ready."""
    import time

    from saccade.fleet.operations import open_state, request_rollback

    state = open_state(where)
    change, described = request_rollback(state, model, time.time())
    report = Reporter(as_json=as_json)
    report.say(f"{model} goes back to {described}")
    outcome = report.follow(state, change.generation)
    raise typer.Exit(1 if outcome.reasons else 0)


@app.command(epilog=examples("saccade fleet down", "saccade fleet down FLEET.toml"))
def down(where: Where = "fleet-state", as_json: JsonOption = False) -> None:
    """End a fleet: its fronts finish the requests that they have, then everything stops. The state folder stays."""
    import time

    from saccade.fleet.operations import open_state, request_down

    state = open_state(where)
    change = request_down(state, time.time())
    report = Reporter(as_json=as_json)
    if change is None:
        report.say("the fleet is down already")
        return
    report.follow(state, change.generation)
    report.say("the fleet is down")


_COLUMNS = (
    ("image hits", "image_hit_rate", 100, ".1f", "%"), ("pooled", "pooled_share", 100, ".1f", "%"),
    ("max/mean load", "max_over_mean_load", 1, ".2f", ""),
    ("TTFT p50", "ttft_p50_s", 1000, ".0f", " ms"), ("p90", "ttft_p90_s", 1000, ".0f", " ms"),
    ("p99", "ttft_p99_s", 1000, ".0f", " ms"), ("output/s", "output_tokens_per_s", 1, ".0f", ""),
    ("decision p50", "decision_p50_us", 1, ".0f", " us"), ("p99", "decision_p99_us", 1, ".0f", " us"),
)  # fmt: skip
"""Heading, field, factor, format and unit."""


def _table(results: list[dict[str, Any]]) -> list[str]:
    columns = [one for one in _COLUMNS if one[1] != "pooled_share" or results[0]["pooled_share"] is not None]
    rows = [["policy", *(heading for heading, *_ in columns)]]
    for result in results:
        cells = [
            "-" if result[name] is None else f"{result[name] * factor:{form}}{unit}"
            for _, name, factor, form, unit in columns
        ]
        rows.append([result["policy"], *cells])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


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
    for one in model.experiments:
        variants = ", ".join(f"{variant.name} ({variant.version})" for variant in one.variants)
        lines.append(f"  experiment {one.name}  {100 * one.share:g} % of users: {variants}")
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
