"""Bodies of `/v1/models`."""

from __future__ import annotations

from typing import Literal

from saccade.serve.protocol.common import Wire


class ServedModel(Wire):
    """A served model."""

    id: str
    """Name of the model."""
    object: Literal["model"]
    """model"""
    created: int
    """Unix time of the server's start."""
    owned_by: Literal["saccade"]
    """saccade"""
    max_model_len: int | None
    """Maximum tokens of prompt and output together; null while the model is being loaded."""
    parent: str | None
    """The model that a LoRA adapter adapts; null for that model itself."""


class ModelList(Wire):
    """All served models."""

    object: Literal["list"]
    """list"""
    data: list[ServedModel]
    """The models."""
