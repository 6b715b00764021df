"""Qwen2.5-VL: Qwen2-VL whose positions of a video's frames follow its clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from saccade.errors import CheckpointError
from saccade.processor.families import qwen2_vl
from saccade.processor.parts import VisualKind

MODEL_TYPE = "qwen2_5_vl"


@dataclass(frozen=True, kw_only=True)
class Rules(qwen2_vl.Rules):
    """See `VisionRules`."""

    tokens_per_second: float
    """Time positions per second of video."""

    @classmethod
    def fields(cls, folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of the rules, from the files of a checkpoint folder."""
        rate = (config.get("vision_config") or {}).get("tokens_per_second", 4)
        if not isinstance(rate, int | float) or isinstance(rate, bool) or rate <= 0:
            raise CheckpointError(f"{folder}/config.json: tokens_per_second is {rate!r}, not a number above 0")
        return super().fields(folder, config) | {"tokens_per_second": float(rate)}

    def time_step(self, kind: VisualKind, fps: float) -> float:
        """Positions between two frame pairs."""
        return 1.0 if kind == "image" else self.tokens_per_second * (self.videos.temporal_patch_size / fps)
