"""Checkpoints by their name on the Hugging Face Hub: `org/name` instead of a folder."""

import re
from pathlib import Path

from saccade.errors import CheckpointError

_FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model")
"""What a checkpoint folder consists of. No code and no pickled weights."""


def checkpoint_folder(name: str | Path) -> Path:
    """The folder of a checkpoint; `org/name` is downloaded into the cache of `huggingface_hub` unless such a folder exists."""
    folder = Path(name)
    if folder.exists() or not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", str(name)):
        return folder
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise CheckpointError(
            f"{name}: no such folder. To download it from the Hugging Face Hub: pip install 'saccade[hub]', then run this again; "
            f"or copy it to a folder of your own: hf download {name} --local-dir {folder.name}"
        ) from error
    try:
        return Path(snapshot_download(str(name), allow_patterns=list(_FILES)))
    except Exception as error:  # the library's errors have no common base class
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f"{name}: no such folder, and the Hugging Face Hub has not given it ({reason}). "
            f"Check the name and the connection; for a private or gated model: hf auth login. To copy it by hand: "
            f"hf download {name} --local-dir {folder.name}"
        ) from error
