"""Checkpoints and data sets by their name on the Hugging Face Hub: `org/name` instead of a folder."""

import re
from collections.abc import Sequence
from pathlib import Path

from saccade.errors import CheckpointError, DataError, UserError

_FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model")
"""Files of a checkpoint folder: no code and no pickled weights."""


def checkpoint_folder(name: str | Path) -> Path:
    """The folder of a checkpoint; `org/name` that is no folder is downloaded into `huggingface_hub`'s cache."""
    return _download(name, _FILES, "model", CheckpointError)


def is_hub_name(name: str | Path) -> bool:
    """Whether something is named as on the hub, `org/name`, and is not a path that exists."""
    return not Path(name).exists() and re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", str(name)) is not None


def dataset_folder(name: str | Path, files: Sequence[str]) -> Path:
    """The folder of a data set; `org/name` without a folder of that name is downloaded, the `files` that match."""
    return _download(name, files, "dataset", DataError)


def _download(name: str | Path, files: Sequence[str], kind: str, error_class: type[UserError]) -> Path:
    folder = Path(name)
    if not is_hub_name(name):
        return folder
    by_hand = f"hf download {name}{' --repo-type dataset' if kind == 'dataset' else ''} --local-dir {folder.name}"
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise error_class(
            f"{name}: no such folder. To download it from the Hugging Face Hub: "
            f"pip install 'saccade[hub]', then run this again; or copy it to a folder of your own: {by_hand}"
        ) from error
    try:
        return Path(snapshot_download(str(name), repo_type=kind, allow_patterns=list(files)))
    except Exception as error:  # the library's errors have no common base class
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise error_class(
            f"{name}: no such folder, and the Hugging Face Hub has not given it ({reason}). "
            f"Check the name and the connection; for a private or gated {kind}: hf auth login. "
            f"To copy it by hand: {by_hand}"
        ) from error
