"""Read the JSON files of a checkpoint folder, with errors that name the file."""

import json
import re
from pathlib import Path
from typing import Any

from saccade.errors import CheckpointError

_OUR_FOLDERS = ("checkpoints", "runs")


def read_config(folder: Path) -> dict[str, Any]:
    """`config.json`: a folder without it is not a checkpoint."""
    if not folder.exists():
        hint = "Check the path; saccade init makes a new checkpoint folder"
        if _may_be_on_the_hub(folder):
            hint = (
                f"{hint}. A model of the Hugging Face Hub is downloaded first: hf download {folder} --local-dir "
                f"{folder.name} (pip install huggingface_hub), then use the folder {folder.name}"
            )
        raise CheckpointError(f"{folder}: no such folder. {hint}")
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: a file, not a checkpoint folder. Use the folder that holds config.json")
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder}: no config.json, so it is not a checkpoint folder. saccade init makes one")
    return read_json(folder / "config.json")


def _may_be_on_the_hub(folder: Path) -> bool:
    """Whether a folder that does not exist may be ORG/NAME. Recipes name folders in `checkpoints` and `runs`."""
    if folder.parent.name in _OUR_FOLDERS or folder.parent.is_dir():
        return False
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", str(folder)) is not None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; empty if the file does not exist."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON: {error}. Copy it from the original again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: not a JSON object. Copy it from the original again")
    return content
