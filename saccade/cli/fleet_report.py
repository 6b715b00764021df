"""What the commands of a fleet say while a change is under way: decisions as lines, and what it waits for."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from saccade.fleet.operations import Outcome, Progress
    from saccade.fleet.state import FleetState


class Reporter:
    """Prints lines for people, or one JSON object per line for scripts."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json

    def say(self, text: str, **fields: Any) -> None:
        """Print a line; `fields` are what a script reads instead."""
        typer.echo(json.dumps(fields or {"message": text}, ensure_ascii=False) if self._as_json else text)

    def follow(
        self, state: FleetState, generation: int, *, after_epoch: int = 0, check: Callable[[], None] = lambda: None,
        timeout_s: float | None = None,
    ) -> Outcome:  # fmt: skip
        """Follow a change to its end, and say what was rolled back."""
        from saccade.fleet.operations import follow

        with self.progress() as on_progress:
            outcome = follow(state, generation, on_progress, after_epoch=after_epoch, check=check, timeout_s=timeout_s)
        for reason in outcome.reasons:
            self.say(f"rolled back: {reason}", rolled_back=reason)
        return outcome

    @contextmanager
    def progress(self) -> Iterator[Callable[[Progress], None]]:
        """Print decisions, and what is waited for on a terminal."""
        from rich.console import Console

        from saccade.fleet.status import describe

        console = Console(stderr=True)
        spinner = console.status("") if console.is_terminal and not self._as_json else contextlib.nullcontext()
        with spinner as shown:

            def on_progress(progress: Progress) -> None:
                for decision in progress.decisions:
                    self.say(describe(decision), **decision)
                if shown is not None and progress.waiting_for:
                    shown.update(f"waiting for {progress.waiting_for}")

            yield on_progress
