"""`saccade prune`."""

import dataclasses
import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from saccade.cli.hub import checkpoint_folder
from saccade.cli.options import DeviceOption, JsonOption
from saccade.errors import ConfigError

if TYPE_CHECKING:
    from saccade.compress.pruning import PruningReport


class PruningKind(StrEnum):
    """The units that pruning removes."""

    STRUCTURED = "structured"
    UNSTRUCTURED = "unstructured"
    TWO_OF_FOUR = "2:4"


class ImportanceMeasure(StrEnum):
    """How units are compared."""

    ACTIVATION = "activation"
    TAYLOR = "taylor"


def prune(
    checkpoint: Annotated[str, typer.Argument(help="Checkpoint folder, or ORG/NAME of the Hugging Face Hub.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Pruned checkpoint folder to make.")],
    calibration: Annotated[list[str], typer.Option(help="Shard folder to measure importance on; may be repeated.")],
    keep: Annotated[float, typer.Option(help="Share of the model's parameters that stays.")] = 0.7,
    kind: Annotated[
        PruningKind,
        typer.Option(help="A smaller model; or zeros in one of the same size and speed: unstructured, 2:4."),
    ] = PruningKind.STRUCTURED,
    units: Annotated[
        str, typer.Option(help="What a smaller model has fewer of: channels, heads, layers, separated by commas.")
    ] = "channels",
    parts: Annotated[str, typer.Option(help="Parts to prune: vision, language.")] = "vision,language",
    importance: Annotated[
        ImportanceMeasure, typer.Option(help="Size of activations, or first-order change of the loss.")
    ] = ImportanceMeasure.ACTIVATION,
    num_samples: Annotated[int, typer.Option(min=1, help="Samples to measure on.")] = 128,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the choice of samples.")] = 0,
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Remove what matters least from tower and decoder; recover by distillation (recipes/distill.toml)."""
    from saccade.compress.calibration import CalibrationConfig
    from saccade.compress.pruning import PruningConfig
    from saccade.compress.pruning import prune as run

    config = PruningConfig(
        keep=keep,
        kind=kind.value,
        units=_choices(units, ("channels", "heads", "layers"), "--units"),  # type: ignore[arg-type]
        parts=_choices(parts, ("vision", "language"), "--parts"),  # type: ignore[arg-type]
        measure=importance.value,
    )
    samples = CalibrationConfig(shards=tuple(calibration), num_samples=num_samples, max_tokens=1024, seed=seed)
    report = run(checkpoint_folder(checkpoint), out, config=config, calibration=samples, device=device)
    if as_json:
        typer.echo(json.dumps({"checkpoint": str(out)} | dataclasses.asdict(report)))
        return
    for line in _lines(out, report):
        typer.echo(line)


def _choices(text: str, known: tuple[str, ...], flag: str) -> tuple[str, ...]:
    chosen = tuple(name.strip() for name in text.split(",") if name.strip())
    if unknown := [name for name in chosen if name not in known]:
        raise ConfigError(f"{flag} {unknown[0]} is not known. Use {', '.join(known)}")
    return chosen


def _lines(out: Path, report: "PruningReport") -> list[str]:
    before, after = report.parameters_before, report.parameters_after
    lines = [f"{out}: {before:,} to {after:,} parameters ({after / before:.1%})"]
    if report.zeros:
        lines = [f"{out}: {report.zeros:,} of {before:,} parameters are zero ({report.zeros / before:.1%})"]
    lines += [
        f"  {part}: {', '.join(f'{n} {name}' for name, n in sizes.items())}" for part, sizes in report.kept.items()
    ]
    lines.append(f"  loss on other samples: {report.loss_before:.4f} to {report.loss_after:.4f}")
    lines.append(f"  speed: {report.speed}")
    return lines
