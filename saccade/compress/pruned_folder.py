"""The checkpoint folder of a pruned model: tensors sliced to what stays, and a `config.json` with the new sizes.

Tensors are read and written one by one, by their names; no weight of a module is touched.
"""

from __future__ import annotations

import dataclasses
import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from saccade.compress.importance import block_layers
from saccade.errors import ConfigError
from saccade.model.checkpoint_reader import read_tensors, tensor_files
from saccade.model.checkpoint_writer import CheckpointWriter
from saccade.model.config import ModelConfig
from saccade.model.families import family_of
from saccade.model.vlm import VLM
from saccade.model.weights import PROCESSOR_FILES, config_for_export

Part = Literal["vision", "language"]
BLOCKS: dict[Part, str] = {"vision": "vision.blocks", "language": "language.layers"}
"""Names of the layers of a part."""


@dataclass
class PartPlan:
    """The layers, heads and channels that a part keeps."""

    layers: list[int]
    """Numbers of the layers, ascending."""
    channels: dict[int, Tensor] = field(default_factory=dict)
    """Kept channels by layer."""
    groups: dict[int, Tensor] = field(default_factory=dict)
    """Kept key/value heads by layer."""


def smaller_config(config: ModelConfig, plans: Mapping[Part, PartPlan]) -> ModelConfig:
    """The sizes of the pruned model."""
    vision, language = config.vision, config.language
    if (plan := plans.get("vision")) is not None:
        new_number = {old: new for new, old in enumerate(plan.layers)}
        vision = dataclasses.replace(
            vision,
            num_layers=len(plan.layers),
            intermediate_size=_common(plan.channels, vision.intermediate_size),
            full_attention_layers=tuple(new_number[i] for i in vision.full_attention_layers if i in new_number),
            feature_layers=tuple(new_number[i] for i in vision.feature_layers),
            # Output n is that of the first n layers, of which those that stay are run.
            selected_layers=tuple(bisect_left(plan.layers, n) for n in vision.selected_layers),
        )
    if (plan := plans.get("language")) is not None:
        num_groups = _common(plan.groups, language.num_kv_heads)
        language = dataclasses.replace(
            language,
            num_layers=len(plan.layers),
            intermediate_size=_common(plan.channels, language.intermediate_size),
            num_kv_heads=num_groups,
            num_heads=num_groups * (language.num_heads // language.num_kv_heads),
        )
    return dataclasses.replace(config, vision=vision, language=language)


def _common(kept: Mapping[int, Tensor], otherwise: int) -> int:
    return len(next(iter(kept.values()))) if kept else otherwise


def sizes_of(config: ModelConfig, part: Part) -> dict[str, int]:
    """Sizes of a part, for the report."""
    if part == "vision":
        return {"layers": config.vision.num_layers, "channels": config.vision.intermediate_size}
    language = config.language
    return {
        "layers": language.num_layers,
        "channels": language.intermediate_size,
        "heads": language.num_heads,
        "kv_heads": language.num_kv_heads,
    }


def describe_smaller(checkpoint: Path, before: ModelConfig, after: ModelConfig) -> dict[str, Any]:
    """config.json of the smaller model: that of the checkpoint with the fields that differ."""
    family, raw = family_of(checkpoint), config_for_export(checkpoint)
    ids: Mapping[str, int] = defaultdict(int)
    try:
        old, new = family.describe_config(before, ids), family.describe_config(after, ids)
    except ConfigError as error:
        raise ConfigError(
            f"{error}. Its config.json cannot say this size; leave the part out: --parts language"
        ) from error
    described = _with_changes(raw, old, new)
    if isinstance(inner := described.get("text_config"), dict):
        described["text_config"] = _with_changes(inner, old, new)
    _cut_layer_lists(described, before, after)
    if before.vision.num_layers != after.vision.num_layers and "vision_feature_layer" in new:
        # It is counted from either end, so the same number may now be another layer.
        described["vision_feature_layer"] = new["vision_feature_layer"]
    if family.parse_config(described) != after:
        raise ConfigError("config.json of this family cannot describe the pruned model. Use other --units or --parts")
    return described


def _with_changes(raw: Mapping[str, Any], old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `raw` that both descriptions have, as in `new` where they differ."""
    result = dict(raw)
    for name, value in new.items():
        if isinstance(value, dict) and isinstance(raw.get(name), dict) and isinstance(old.get(name), dict):
            result[name] = _with_changes(raw[name], old[name], value)
        elif old.get(name) != value and name in raw:
            result[name] = value
    return result


def _cut_layer_lists(described: dict[str, Any], before: ModelConfig, after: ModelConfig) -> None:
    """Shorten lists with an entry for each decoder layer; all entries are equal in the models we read."""
    for section in (described, described.get("text_config")):
        listed = section.get("layer_types") if isinstance(section, dict) else None
        if isinstance(section, dict) and isinstance(listed, list) and len(listed) == before.language.num_layers:
            section["layer_types"] = listed[: after.language.num_layers]


Rewrite = Callable[[str, Tensor], tuple[str, Tensor] | None]
"""(parameter name, tensor) to its name and value in the new folder; None: it is gone."""


def slicer(model: VLM, plans: Mapping[Part, PartPlan]) -> Rewrite:
    """Slice the tensors of pruned layers and number the layers that stay from 0."""
    language = model.config.language
    q_per_group = language.head_dim * language.num_heads // language.num_kv_heads

    def rewrite(name: str, tensor: Tensor) -> tuple[str, Tensor] | None:
        found = re.match(r"(vision\.blocks|language\.layers)\.(\d+)\.(.*)", name)
        part: Part = "vision" if name.startswith("vision") else "language"
        plan = plans.get(part)
        if found is None or plan is None:
            return name, tensor
        number, inner = int(found[2]), found[3]
        if number not in plan.layers:
            return None
        block = model.get_submodule(f"{found[1]}.{number}")
        owner = block_layers(model, f"{found[1]}.{number}", block)
        layer = name.rpartition(".")[0]
        if (channels := plan.channels.get(number)) is not None:
            if layer == owner.mlp_out and name.endswith(".weight"):
                tensor = tensor[:, channels]
            elif layer in owner.mlp_in:
                tensor = tensor[channels]
        if (groups := plan.groups.get(number)) is not None:
            if layer == owner.attention_out and name.endswith(".weight"):
                tensor = tensor[:, _rows(groups, q_per_group)]
            elif layer.endswith(("k_proj", "v_proj")):
                tensor = tensor[_rows(groups, language.head_dim)]
            elif layer.endswith("q_proj"):
                tensor = tensor[_rows(groups, q_per_group)]
        return f"{found[1]}.{plan.layers.index(number)}.{inner}", tensor

    return rewrite


def _rows(groups: Tensor, size: int) -> Tensor:
    """Rows of some groups of `size` rows each."""
    return (groups.unsqueeze(1) * size + torch.arange(size)).flatten()


def write_folder(checkpoint: Path, out: Path, raw: Mapping[str, Any], rewrite: Rewrite) -> None:
    """Write a copy of the folder with another config and its tensors rewritten."""
    family, files = family_of(checkpoint), tensor_files(checkpoint)
    with CheckpointWriter(out) as writer:
        writer.write_json("config.json", dict(raw))
        for file in PROCESSOR_FILES:
            if (checkpoint / file).is_file():
                writer.copy(checkpoint / file)
        for disk, tensor in read_tensors(files, list(files), torch.device("cpu")):
            name = family.name_in_model(disk)
            if name is not None and (made := rewrite(name, tensor)) is not None:
                writer.add(family.name_on_disk(made[0]), made[1])
