"""What several commands share: options, and how progress is shown."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Annotated, Any

import typer


class Dtype(StrEnum):
    """Number formats of weights."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"


DtypeOption = Annotated[Dtype | None, typer.Option(help="Number format to compute in; the stored one if not given.")]
DeviceOption = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, or auto: the GPU when there is one.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object for scripts.")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", help="key=value over what the file says; may be repeated.")
]
WorkersOption = Annotated[
    int | None,
    typer.Option("--workers", min=1, help="Processes to use; one per core where there is much to do, if not given."),
]


@contextmanager
def progress(unit: str) -> Iterator[Callable[[str], None]]:
    """A counter on standard error that names the current thing; silent where nobody watches."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn(),
        TextColumn("{task.completed} " + unit),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)
        yield lambda name: bar.update(task, advance=1, description=name)


@contextmanager
def shard_progress(title: str) -> Iterator[Callable[[Any], None]]:
    """A bar on standard error fed with `saccade.data.index.Progress`; silent where nobody watches."""
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
        TextColumn(title),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("shards {task.description}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)
        yield lambda done: bar.update(
            task, completed=done.num_done, total=done.num_shards, description=f"{done.num_samples:,} samples"
        )
