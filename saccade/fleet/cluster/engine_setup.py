"""What the replicas of one version load, engines and encoders."""

from __future__ import annotations

import json
from dataclasses import dataclass

from saccade.config import decode, encode
from saccade.fleet.config import VersionConfig


@dataclass(frozen=True, kw_only=True)
class EngineSetup:
    """What a replica loads. Replicas restart when it changes."""

    model: str
    """Name of the model."""
    version: VersionConfig
    """Checkpoint, adapters and engine settings."""
    has_encoders: bool = False
    """Whether there are encoder replicas."""
    otlp_endpoint: str | None = None
    """URL of an OpenTelemetry collector that gets spans. None: no spans."""

    def to_json(self) -> str:
        """The setup as JSON text."""
        return json.dumps(encode(self))

    @staticmethod
    def from_json(text: str) -> EngineSetup:
        """Inverse of `to_json`."""
        return decode(EngineSetup, json.loads(text), "setup of a replica")
