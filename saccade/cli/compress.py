"""`saccade compress`."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from saccade.cli.hub import checkpoint_folder
from saccade.cli.options import DeviceOption, JsonOption
from saccade.errors import ConfigError

if TYPE_CHECKING:
    from saccade.compress.calibration import CalibrationConfig
    from saccade.compress.run import CompressReport


class CalibrationKind(StrEnum):
    """What calibration samples consist of."""

    IMAGES = "images"
    TEXT = "text"
    RANDOM = "random"


def compress(
    checkpoint: Annotated[str, typer.Argument(help="Checkpoint folder, or ORG/NAME of the Hugging Face Hub.")],
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Compressed checkpoint folder to make; a killed run resumes.")
    ],
    scheme: Annotated[
        str,
        typer.Option(help="int8, int8-rtn, int8-gptq, fp8, w4a16-gptq, w4a16-awq, w4a16-rtn, or a TOML file."),
    ],
    calibration: Annotated[
        list[str] | None, typer.Option(help="Shard folder with calibration samples; may be repeated.")
    ] = None,
    num_samples: Annotated[int, typer.Option(min=1, help="Calibration samples.")] = 128,
    calibrate_with: Annotated[
        CalibrationKind,
        typer.Option(help="Samples as they are, without their images, or random tokens; the latter for comparison."),
    ] = CalibrationKind.IMAGES,
    image_weight: Annotated[
        str,
        typer.Option(help="Weight of an image token beside a text token in the decoder's calibration, or balanced."),
    ] = "1.0",
    group_size: Annotated[
        int | None, typer.Option(help="Inputs per scale of int4 weights.", show_default="128, or the scheme's")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the choice of samples.")] = 0,
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Quantize a checkpoint, vision tower included, as compressed-tensors that other engines load. Resumes automatically."""
    from saccade.compress import compress as run
    from saccade.compress.scheme import load_scheme

    chosen = load_scheme(scheme)
    chosen = chosen if group_size is None else chosen.with_group_size(group_size)
    samples = _calibration(calibration, num_samples, calibrate_with.value, image_weight, seed)
    with _progress() as advance:
        report = run(
            checkpoint_folder(checkpoint), out, scheme=chosen, calibration=samples, device=device, on_block=advance
        )
    if as_json:
        typer.echo(json.dumps({"checkpoint": str(out)} | report.to_json()))
        return
    for line in _lines(out, report):
        typer.echo(line)


def _calibration(
    shards: list[str] | None,
    num_samples: int,
    kind: Literal["images", "text", "random"],
    image_weight: str,
    seed: int,
) -> "CalibrationConfig | None":
    if not shards:
        return None
    from saccade.compress.calibration import CalibrationConfig

    try:
        weight: float | Literal["balanced"] = "balanced" if image_weight == "balanced" else float(image_weight)
    except ValueError as error:
        raise ConfigError(f"--image-weight {image_weight}: give a number, or balanced") from error
    return CalibrationConfig(shards=tuple(shards), num_samples=num_samples, kind=kind, image_weight=weight, seed=seed)


def _lines(out: Path, report: "CompressReport") -> list[str]:
    """What a person wants to know."""
    before, after = (f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.2f} MB" for size in (report.bytes_before, report.bytes_after))  # fmt: skip
    lines = [f"{out}: {report.scheme}, {before} to {after} ({report.ratio:.0%}), {len(report.layers)} projections"]
    lines += [f"  kept: {', '.join(report.kept)}"] if report.kept else []
    notes: dict[str, int] = {}
    for layer in report.layers:
        if layer.note:
            notes[layer.note] = notes.get(layer.note, 0) + 1
    lines += [f"  {count} projections with {note}" for note, count in notes.items()]
    measured = [layer for layer in report.layers if layer.error is not None and layer.rtn_error]
    if measured:
        worst = max(measured, key=lambda layer: layer.error or 0.0)
        mean = sum((layer.error or 0.0) / (layer.rtn_error or 1.0) for layer in measured) / len(measured)
        lines.append(f"  largest error of a projection's output: {worst.error:.2%} ({worst.name}); {mean:.2f} times that of rounding to nearest, on average")  # fmt: skip
    return lines


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """A bar over the blocks on standard error; disabled without a terminal."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("blocks {task.description}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)
        yield lambda name, done, total: bar.update(task, completed=done, total=total, description=name)
