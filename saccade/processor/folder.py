"""The JSON files of a checkpoint folder, read with errors that name the file."""

import json
from pathlib import Path
from typing import Any

from saccade.errors import CheckpointError


def read_config(folder: Path) -> dict[str, Any]:
    """`config.json`, without which a folder is no checkpoint."""
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder}: no config.json, so it is not a checkpoint folder. saccade init makes one")
    return read_json(folder / "config.json")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; a file that is not there is an empty one."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON: {error}. Copy it from the original again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: not a JSON object. Copy it from the original again")
    return content
