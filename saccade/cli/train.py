"""`saccade train`."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from saccade.cli.options import DeviceOption
from saccade.cli.recipes import check_recipe
from saccade.workers.process import exit_on_interrupt


def _print_keys(requested: bool) -> None:
    if requested:
        from saccade.config import describe_keys
        from saccade.train import TrainConfig

        typer.echo(describe_keys(TrainConfig), nl=False)
        raise typer.Exit


def train(
    recipe: Annotated[Path, typer.Argument(help="TOML file: model, stages, run folder. See recipes/.")],
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="Override a key: key=value, stages by name or number; may be repeated."),
    ] = None,
    device: DeviceOption = "auto",
    check: Annotated[
        bool, typer.Option("--check", help="Validate recipe, checkpoint, data and memory of all stages; do not train.")
    ] = False,
    profile: Annotated[
        bool,
        typer.Option(
            "--profile",
            help="Profile the third to fifth step: traces, exposed communication by kind, and the longest bubble.",
        ),
    ] = False,
    teacher_logits: Annotated[
        bool,
        typer.Option(
            "--teacher-logits",
            help="Compute the teacher's logits of distillation stages with top_k, into files next to the shards; "
            "do not train. Resumes.",
        ),
    ] = False,
    keys: Annotated[
        bool, typer.Option("--keys", is_eager=True, callback=_print_keys, help="Print every recipe key and exit.")
    ] = False,
) -> None:
    """Train from a recipe; resumes automatically. Works alone and under torchrun."""
    with exit_on_interrupt():
        from saccade.config import load_config
        from saccade.train import TrainConfig
        from saccade.train import train as run
        from saccade.train.check import check_run

    check_recipe(recipe)
    config = load_config(TrainConfig, recipe, [*(set_ or []), *(["log.profile=true"] if profile else [])])
    if check:
        for line in check_run(config, device=device):
            typer.echo(line)
        return
    if teacher_logits:
        from saccade.train.objectives.teacher_logits import compute_teacher_logits

        for line in compute_teacher_logits(config, device=device):
            typer.echo(line)
        return
    from saccade.cli.joins.checkpoint_evaluations import CheckpointEvaluations
    from saccade.train.trainer import Ending

    with _signals() as received:
        if not config.evaluation.tasks:
            ending = run(config, device=device)
        else:
            with CheckpointEvaluations(config, device) as evaluations:
                ending = run(config, device=device, on_export=evaluations.start)
                if ending is Ending.FINISHED:
                    evaluations.finish()
        is_interrupted = ending is not Ending.FINISHED and signal.SIGINT in received()
    typer.echo(ending.value, err=True)
    if is_interrupted:
        raise typer.Exit(130)


@contextmanager
def _signals() -> Iterator[Callable[[], bytes]]:
    """The numbers of the signals since the beginning of the block, whoever handles them. For the main thread."""
    reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    previous = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)

    def received() -> bytes:
        try:
            return os.read(reading, 4096)
        except BlockingIOError:
            return b""

    try:
        yield received
    finally:
        signal.set_wakeup_fd(previous)
        os.close(reading)
        os.close(writing)
