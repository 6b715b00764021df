"""Progress bars on standard error; disabled without a terminal."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn

logger = logging.getLogger("saccade.evaluate")
_LOG_EVERY_S = 15.0
"""Seconds between lines of progress without a terminal."""


@contextmanager
def count_progress(unit: str) -> Iterator[Callable[[str], None]]:
    """A counter with a description, for work of unknown length."""
    from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

    count = TextColumn("{task.completed} " + unit)
    with _bar(SpinnerColumn(), count, TimeElapsedColumn(), TextColumn("{task.description}")) as bar:
        task = bar.add_task("", total=None)
        yield lambda name: bar.update(task, advance=1, description=name)


@contextmanager
def bar_progress(unit: str, title: str = "") -> Iterator[Callable[[str, int, int], None]]:
    """A bar that is updated with (description, number done, number in total)."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    titles = [TextColumn(title)] if title else []
    described = TextColumn(unit + " {task.description}")
    with _bar(*titles, BarColumn(), MofNCompleteColumn(), described, TimeElapsedColumn(), TimeRemainingColumn()) as bar:
        task = bar.add_task("", total=None)
        yield lambda name, done, total: bar.update(task, completed=done, total=total, description=name)


@contextmanager
def shard_progress(title: str) -> Iterator[Callable[[Any], None]]:
    """A bar that is updated with `saccade.data.index_files.ShardProgress`."""
    with bar_progress("shards", title) as update:
        yield lambda done: update(f"{done.num_samples:,} samples", done.num_done, done.num_shards)


@contextmanager
def task_progress() -> Iterator[Callable[[str, int, int], None]]:
    """A bar for each task, updated with (task, number done, number in total); lines if there is no terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn

    with _bar(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()) as bar:
        known: dict[str, TaskID] = {}
        last_logged = time.monotonic()

        def update(title: str, done: int, total: int) -> None:
            nonlocal last_logged
            if title not in known:
                known[title] = bar.add_task(title, total=total)
            bar.update(known[title], completed=done)
            if bar.disable and time.monotonic() - last_logged >= _LOG_EVERY_S:
                last_logged = time.monotonic()
                logger.info("%s: %d of %d examples", title, done, total)

        yield update


def _bar(*columns: "ProgressColumn") -> "Progress":
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
