"""`saccade bench`: speed beside peers and beside this device's ceilings."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from saccade.cli.options import JsonOption
from saccade.errors import ConfigError

_WORKLOADS = ("first", "latency", "images", "shared", "text", "long")
app = typer.Typer(help="Measure: speed beside peers and beside this device's ceilings.", no_args_is_help=True)


def _checkout() -> Path:
    """The root of the checkout, made importable, which has the benchmarks."""
    root = Path(__file__).parents[2]
    if not (root / "bench").is_dir():
        raise ConfigError(
            "benchmarks are part of the source checkout. Clone it and install with pip install --editable ."
        )
    sys.path.insert(0, str(root))
    return root


@app.command("kernels")
def kernels(
    op: Annotated[
        list[str] | None, typer.Option(help="Only this operation; may be repeated. All if not given.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Time every kernel beside the peers that can be imported (torch, Liger, FlashInfer), on this machine's GPU."""
    from importlib import import_module

    import torch

    root = _checkout()
    known = sorted(file.stem for file in (root / "bench" / "kernels").glob("*.py") if "def rows(" in file.read_text())
    if unknown := set(op or []) - set(known):
        raise ConfigError(f"unknown operation {', '.join(sorted(unknown))}. Known: {', '.join(known)}")
    if not torch.cuda.is_available():
        raise ConfigError(f"kernels are timed on a GPU, and torch {torch.__version__} sees none")
    timing = import_module("bench.kernels.timing")
    rows = [
        row
        for name in op or known
        for row in timing.shown(import_module(f"bench.kernels.{name}").rows(), quiet=as_json)
    ]
    if as_json:
        typer.echo(
            json.dumps(
                {
                    "gpu": torch.cuda.get_device_name(),
                    "torch": torch.__version__,
                    "ceilings": timing.measured_ceilings()._asdict(),
                    "rows": rows,
                }
            )
        )


@app.command("data")
def data(
    samples: Annotated[int, typer.Option(min=100, help="Images to make and read.")] = 2000,
    folder: Annotated[Path | None, typer.Option(help="Keep the images here and reuse them.")] = None,
    as_json: JsonOption = False,
) -> None:
    """CPU time of reading and decoding a sample beside the readers that are installed (webdataset, mosaicml-streaming, litdata)."""
    from importlib import import_module

    _checkout()
    found = import_module("bench.data").run(samples, folder, (lambda line: None) if as_json else typer.echo)
    if as_json:
        typer.echo(json.dumps({"rows": found}))


@app.command("serve")
def serve(
    checkpoint: Annotated[
        Path | None, typer.Option(help="Checkpoint folder; random weights of --size if not given.")
    ] = None,
    size: Annotated[str, typer.Option(help="A named size with random weights: tiny, 3b, 7b.")] = "3b",
    workload: Annotated[
        list[str] | None,
        typer.Option(help="Closed loop: only this one; may be repeated: first, latency, images, shared, text, long."),
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="Closed loop: requests submitted at once.")] = 256,
    side: Annotated[int, typer.Option(min=28, help="Closed loop: side of the images, in pixels.")] = 672,
    rounds: Annotated[int, typer.Option(min=1, help="Closed loop: repetitions; the median is reported.")] = 3,
    profile: Annotated[
        bool, typer.Option(help="Closed loop: also the share of the time in which the GPU computes.")
    ] = False,
    open_loop: Annotated[
        list[float] | None,
        typer.Option(help="Open loop instead: Poisson arrivals at this rate per second; may be repeated."),
    ] = None,
    trace: Annotated[Path | None, typer.Option(help="Open loop with the requests of a JSONL file.")] = None,
    seconds: Annotated[float, typer.Option(min=2, help="Open loop: length of each run.")] = 20.0,
    plot: Annotated[Path | None, typer.Option(help="Open loop: draw latency over load as an SVG file.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Latency and throughput of the engine, without a server, on the workloads of docs/benchmarks.md."""
    import subprocess
    import tempfile

    from saccade.model.families import load_model_config
    from saccade.model.initialize import named_size

    root = _checkout()
    if checkpoint is None:
        named_size(size)
    else:
        load_model_config(checkpoint)
    if unknown := set(workload or ()) - set(_WORKLOADS):
        raise ConfigError(f"--workload {min(unknown)}: no such workload. Use {', '.join(_WORKLOADS)}")
    if not all(0 < rate < float("inf") for rate in open_loop or ()):
        raise ConfigError("--open-loop is a positive number of requests per second, such as --open-loop 4")
    if trace is not None and not trace.is_file():
        raise ConfigError(f"--trace {trace}: no such file. Check the path")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        options: dict[str, object] = {"size": size, "checkpoint": checkpoint and checkpoint.absolute(), "out": out}
        if open_loop or trace:
            options |= {
                "rates": open_loop,
                "trace": trace and trace.absolute(),
                "seconds": seconds,
                "plot": plot and plot.absolute(),
            }
        else:
            options |= {"workload": workload, "requests": requests, "side": side, "rounds": rounds, "profile": profile}
        module = "bench.open_loop" if open_loop or trace else "bench.serve"
        command = [sys.executable, "-m", module, *_arguments(options)]
        shown = subprocess.DEVNULL if as_json else None
        done = subprocess.run(command, cwd=root, stdout=shown, stderr=shown, check=False)  # noqa: S603  our own script
        if done.returncode:
            reason = "Run it without --json to see why" if as_json else "Its output is above"
            raise ConfigError(f"the benchmark ended with status {done.returncode}. {reason}")
        if as_json:
            typer.echo(out.read_text())


def _arguments(options: dict[str, object]) -> list[str]:
    """Command-line arguments; options that are None or False are left out."""
    arguments: list[str] = []
    for name, value in options.items():
        if value is not None and value is not False:
            arguments.append(f"--{name}")
            values = value if isinstance(value, list) else [] if value is True else [value]
            arguments += [str(one) for one in values]
    return arguments
