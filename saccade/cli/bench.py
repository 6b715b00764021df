"""`saccade bench`: speed beside peers and beside this device's ceilings."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from saccade.cli.options import JsonOption
from saccade.errors import ConfigError

app = typer.Typer(help="Measure: speed beside peers and beside this device's ceilings.", no_args_is_help=True)


def _checkout() -> Path:
    """The folder the benchmarks lie in, made importable."""
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
    samples: Annotated[int, typer.Option(min=100, help="Pictures to make and read.")] = 2000,
    folder: Annotated[Path | None, typer.Option(help="Keep the pictures here and use them again.")] = None,
    as_json: JsonOption = False,
) -> None:
    """CPU time of reading and decoding a sample beside the readers that are installed (webdataset, mosaicml-streaming, litdata)."""
    from importlib import import_module

    _checkout()
    found = import_module("bench.data").run(samples, folder, (lambda line: None) if as_json else typer.echo)
    if as_json:
        typer.echo(json.dumps({"rows": found}))
