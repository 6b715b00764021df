"""Which steps of the quickstart are done: `quickstart.json` in its folder, replaced after every step."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from saccade.errors import ConfigError
from saccade.files import atomic_write

FILE = "quickstart.json"


class Progress:
    """The settings of a quickstart folder and what each finished step has reported."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], steps: dict[str, Any]) -> None:
        self._path, self._settings, self.steps = folder / FILE, dict(settings), steps

    @staticmethod
    def open(folder: Path, settings: Mapping[str, Any]) -> Progress:
        """The progress of a new folder, or that of a folder with the same settings; anything else is refused."""
        path = folder / FILE
        if not path.is_file():
            if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
                raise ConfigError(f"{folder} is not empty. Remove it or choose another: saccade quickstart --dir NAME")
            return Progress(folder, settings, {})
        saved = json.loads(path.read_text(encoding="utf-8"))
        changed = [name for name, value in settings.items() if saved["settings"].get(name) != value]
        if changed:
            was = ", ".join(f"{name} {saved['settings'].get(name)}" for name in changed)
            raise ConfigError(
                f"{folder} was made with other options ({was}). Use the same, or another folder: saccade quickstart --dir NAME"
            )
        return Progress(folder, settings, saved["steps"])

    def finish(self, step: str, report: Mapping[str, Any]) -> None:
        """Record that a step is done."""
        self.steps[step] = dict(report)
        self.save()

    def save(self) -> None:
        """Replace the file."""
        with atomic_write(self._path) as path:
            path.write_text(json.dumps({"settings": self._settings, "steps": self.steps}, indent=1), encoding="utf-8")
