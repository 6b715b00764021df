"""Finished blocks on disk, in `OUT.partial`, from which a killed run continues."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from saccade.compress.layer_report import LayerReport
from saccade.errors import ConfigError
from saccade.files import atomic_write

logger = logging.getLogger(__name__)


class FinishedBlocks:
    """Finished blocks in a folder next to the output folder, so that a killed run continues."""

    def __init__(self, out: Path, settings: dict[str, Any]) -> None:
        self.folder = out.with_name(f"{out.name}.partial")
        state = self.folder / "settings.json"
        settings = json.loads(json.dumps(settings))
        if any(self.folder.glob("*.safetensors")):
            if not state.is_file() or json.loads(state.read_text(encoding="utf-8")) != settings:
                raise ConfigError(
                    f"{self.folder} is of a run with other settings. Remove it, or choose another output folder"
                )
            logger.info("continuing %s", self.folder)
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        with atomic_write(state) as path:
            path.write_text(json.dumps(settings), encoding="utf-8")

    def _file(self, block: str) -> Path:
        return self.folder / f"{block}.safetensors"

    def save(self, block: str, tensors: Mapping[str, Tensor], reports: Sequence[LayerReport]) -> None:
        """Save a finished block."""
        kept = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
        with atomic_write(self._file(block), sync=True) as path:
            save_file(kept, path, metadata={"reports": json.dumps([asdict(report) for report in reports])})

    def load(self, block: str) -> tuple[dict[str, Tensor], list[LayerReport]] | None:
        """A finished block; None: it is not finished."""
        if not self._file(block).is_file():
            return None
        with safe_open(self._file(block), framework="pt") as opened:
            reports = [LayerReport(**report) for report in json.loads(opened.metadata()["reports"])]
            return {name: opened.get_tensor(name) for name in opened.offset_keys()}, reports

    def remove(self) -> None:
        """Remove the folder of finished blocks."""
        shutil.rmtree(self.folder, ignore_errors=True)
