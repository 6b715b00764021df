"""What the oracles of both LLaVA families share."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Shape:
    """One configuration, at test size."""

    name: str
    text: dict[str, Any]
    """Fields of the text config."""
    vision: dict[str, Any]
    """Fields of the vision config."""
    tied: bool = False
    """`tie_word_embeddings` of the outer config."""
    other: dict[str, Any] = field(default_factory=dict)
    """Further fields of the config."""
    is_published_layout: bool = False
    """Whether names and files are those of the hub, from before version 5."""


def save_random(model: Any, shape: Shape, folder: Path, dtype: torch.dtype, max_shard_size: str) -> None:
    """Give a model random weights that depend on the shape's name, and save it."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            centre = 1.0 if "norm" in name and name.endswith("weight") else 0.0
            parameter.copy_(centre + (0.1 if parameter.ndim == 1 else 0.08) * torch.randn_like(parameter))
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)


def with_parts(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its text as a part."""
    content = message["content"]
    return message | {"content": [{"type": "text", "text": content}] if isinstance(content, str) else list(content)}


def positions(given: dict[str, torch.Tensor]) -> torch.Tensor:
    """[3, tokens]: consecutive positions."""
    return torch.arange(given["input_ids"].shape[1]).expand(3, -1)
