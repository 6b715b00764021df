"""`saccade bench`: speed compared with peers and with this device's ceilings."""

import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from saccade.cli.options import CommandGroup, JsonOption, check_modules
from saccade.errors import ConfigError


class ImagesOfLoad(StrEnum):
    """Images of the requests to a server."""

    UNIQUE = "unique"
    REPEATED = "repeated"
    MIXED = "mixed"
    NONE = "none"


_WORKLOADS = ("first", "latency", "images", "shared", "text", "long")
app = typer.Typer(
    help="Measure: speed compared with peers and with this device's ceilings.", no_args_is_help=True, cls=CommandGroup
)


def _checkout() -> Path:
    """The root of the checkout, made importable, which has the benchmarks."""
    root = Path(__file__).parents[2]
    if not (root / "bench").is_dir():
        raise ConfigError(
            "this benchmark is part of the source checkout, not of the installed package: "
            "clone it and pip install --editable . (saccade bench serve URL needs no checkout)"
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
    """Time every kernel and the peers that can be imported (torch, Liger, FlashInfer), on this machine's GPU."""
    from importlib import import_module

    import torch

    root = _checkout()
    known = sorted(file.stem for file in (root / "bench" / "kernels").glob("*.py") if "def rows(" in file.read_text())
    if unknown := set(op or []) - set(known):
        raise ConfigError(f"unknown operation {', '.join(sorted(unknown))}. Known: {', '.join(known)}")
    if not torch.cuda.is_available():
        raise ConfigError(
            f"kernels are timed on a GPU, and torch {torch.__version__} sees none. "
            "Run it on a machine with an NVIDIA GPU"
        )
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
    """Measure the CPU time of reading and decoding a sample, compared with the installed readers.

    The readers are webdataset, mosaicml-streaming and litdata.
    """
    from importlib import import_module

    _checkout()
    found = import_module("bench.data").run(samples, folder, (lambda line: None) if as_json else typer.echo)
    if as_json:
        typer.echo(json.dumps({"rows": found}))


@app.command("serve")
def serve(
    url: Annotated[
        str | None,
        typer.Argument(help="Load a server with OpenAI's API at this URL instead, such as http://127.0.0.1:8000."),
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Checkpoint folder; random weights of --size if not given.")
    ] = None,
    size: Annotated[str, typer.Option(help="A named size with random weights: tiny, 3b, 7b.")] = "3b",
    workload: Annotated[
        list[str] | None,
        typer.Option(help="Closed loop: only this one; may be repeated: first, latency, images, shared, text, long."),
    ] = None,
    requests: Annotated[
        int, typer.Option(min=1, help="Closed loop: requests, submitted at once or by --concurrency.")
    ] = 256,
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
    concurrency: Annotated[
        list[int] | None,
        typer.Option(min=1, help="URL, closed loop: clients with one request at a time; may be repeated."),
    ] = None,
    images: Annotated[ImagesOfLoad, typer.Option(help="URL: images of the requests.")] = ImagesOfLoad.UNIQUE,
    words: Annotated[int, typer.Option(min=1, help="URL: words of each prompt.")] = 64,
    output: Annotated[int, typer.Option(min=1, help="URL: tokens of each answer.")] = 64,
    seed: Annotated[
        int, typer.Option(help="Of images and prompts; another one for another run, which caches must not help.")
    ] = 0,
    model: Annotated[str | None, typer.Option(help="URL: name of the model.", show_default="the first")] = None,
    api_key: Annotated[str | None, typer.Option(help="URL: API key.")] = None,
    processes: Annotated[
        int, typer.Option(min=1, help="URL: processes of clients; one reads about 40,000 chunks per second.")
    ] = 1,
    as_json: JsonOption = False,
) -> None:
    """Measure latency and throughput of the engine without a server, or of a server, given its URL.

    The engine runs the workloads of docs/results/serving.md.
    """
    import subprocess
    import tempfile

    if not all(0 < rate < float("inf") for rate in open_loop or ()):
        raise ConfigError("--open-loop is a positive number of requests per second, such as --open-loop 4")
    if url is not None:
        engine_only = {"--checkpoint": checkpoint, "--workload": workload, "--trace": trace, "--profile": profile}
        if given := [name for name, value in engine_only.items() if value]:
            raise ConfigError(f"{given[0]} is for the engine without a server; leave it out, or leave the URL out")
        workload_fields = {
            "num_requests": requests,
            "images": images.value,
            "side": side,
            "num_words": words,
            "num_output": output,
            "seed": seed,
        }
        loads: list[dict[str, Any]] = [{"concurrency": one} for one in concurrency or ()]
        loads += [{"rate": rate, "seconds": seconds} for rate in open_loop or ()]
        _load_server(url, loads or [{"concurrency": 1}], workload_fields, model, api_key, processes, plot, as_json)
        return
    if concurrency:
        raise ConfigError("--concurrency is for a server: give its URL, such as http://127.0.0.1:8000")
    from saccade.model.families import load_model_config
    from saccade.model.initialize import named_size

    root = _checkout()
    if checkpoint is None:
        named_size(size)
    else:
        load_model_config(checkpoint)
    if unknown := set(workload or ()) - set(_WORKLOADS):
        raise ConfigError(f"--workload {min(unknown)}: no such workload. Use {', '.join(_WORKLOADS)}")
    if trace is not None and not trace.is_file():
        raise ConfigError(f"--trace {trace}: no such file. Check the path")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        options: dict[str, object] = {
            "size": size,
            "checkpoint": checkpoint and checkpoint.absolute(),
            "seed": seed,
            "out": out,
        }
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


def _load_server(
    url: str,
    loads: list[dict[str, Any]],
    workload: dict[str, Any],
    model: str | None,
    api_key: str | None,
    num_processes: int,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Run the loads one after another; show each result as it comes."""
    check_modules("bench", ["aiohttp"])
    from aiohttp import ClientError

    from saccade.serve.load import loops
    from saccade.serve.load.summary import Load, plot_results, result_block
    from saccade.serve.load.workload import Workload

    show = (lambda result: None) if as_json else (lambda result: typer.echo(result_block(result)))
    try:
        results = loops.run(
            url.rstrip("/"),
            [Load(**load) for load in loads],
            Workload(**workload),
            model=model,
            api_key=api_key,
            num_processes=num_processes,
            on_result=show,
        )
    except (ClientError, OSError, ValueError, LookupError) as error:
        raise ConfigError(
            f"{url}: no server with OpenAI's API answers there ({type(error).__name__}). "
            "Start one: saccade serve CHECKPOINT"
        ) from error
    if plot is not None:
        plot_results(results, plot)
    if as_json:
        typer.echo(json.dumps(results))


def _arguments(options: dict[str, object]) -> list[str]:
    """Command-line arguments; options that are None or False are left out."""
    arguments: list[str] = []
    for name, value in options.items():
        if value is not None and value is not False:
            arguments.append(f"--{name}")
            values = value if isinstance(value, list) else [] if value is True else [value]
            arguments += [str(one) for one in values]
    return arguments
