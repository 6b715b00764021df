"""A model family describes itself: the seam between the model and everything that must not know a family's name.

Its other side is `saccade.processor.families`: how images and videos become patches, tokens and positions. A family is
one file in each folder. The model asks for the tower and the projector; loading and export for names; `saccade init`
for sizes and files; trainer and planner count the modules that were built.

    checkpoint   `parse_config`, `describe_config`, `describe_processor`, the prefixes of tensor names
    tower        `make_tower`: pixels and a layout to the outputs of its blocks (`vision/tower.py`)
    projector    `make_projector`: these outputs to features of D for the embedding, and of D for each layer they enter
                 later
    decoder      `LanguageConfig`: RoPE sections (plain, interleaved; one section is 1-D RoPE), biases, norms, head dim
    training     parts to freeze are the modules `vision`, `projector`, `language`, `head` of every family; a tower has
                 `blocks`

Towers are of two kinds, with the methods of `Tower`: over grids of patches of any size (`patch_tower.py`), and over
square tiles, as CLIP and SigLIP are used (`tile_tower.py`). The latter asks the family which patches each token of an
image is made of (`Gather`): rows of tiles without their padding, newlines, interpolated or pooled features.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from saccade.model.config import ModelConfig, VisionConfig
from saccade.model.vision.tower import Tower

CHATML_VISION_TOKENS = {
    "image": "<|image_pad|>",
    "video": "<|video_pad|>",
    "vision_start": "<|vision_start|>",
    "vision_end": "<|vision_end|>",
}


@dataclass(frozen=True, kw_only=True)
class Family:
    """One model family."""

    model_type: str
    """`model_type` of `config.json`."""
    name: str
    """Published name of the family."""
    summary: str
    """Distinguishing features of the family, in a line."""
    architecture: str
    """Model class in `transformers`."""
    processor_class: str
    """Processor class in `transformers`."""
    parse_config: Callable[[Mapping[str, Any]], ModelConfig]
    """`config.json` to sizes. Unsupported settings are refused."""
    describe_config: Callable[[ModelConfig, Mapping[str, int]], dict[str, Any]]
    """Sizes and ids of the vision tokens to the family's own fields of a new `config.json`."""
    describe_processor: Callable[[ModelConfig], dict[str, dict[str, Any]]]
    """The files that describe images and videos to `transformers`, by name."""
    make_tower: Callable[[VisionConfig], Tower]
    """The vision tower."""
    make_projector: Callable[[VisionConfig, int], nn.Module]
    """The projector to a decoder of this width."""
    disk_prefixes: Mapping[str, str]
    """Prefix on disk, as published, by prefix in the model; longer ones come first."""
    transformers_prefixes: Mapping[str, str]
    """Prefix in `transformers`, by prefix in the model; longer ones come first. Adapters have these names."""
    sizes: Mapping[str, ModelConfig]
    """Models by name; tiny is for tests and laptops, the others are the published shapes."""
    published: Mapping[str, str]
    """Names of sizes by ORG/NAME of checkpoints on the Hugging Face Hub."""
    towers: Mapping[str, VisionConfig]
    """Vision towers for text models, by name."""
    vision_tokens: Mapping[str, str]
    """Control tokens of images and videos, by their names in `config.json`."""
    other_prefixes: tuple[Mapping[str, str], ...] = ()
    """Further prefixes that are read, as versions of `transformers` write them."""
    unused_prefixes: tuple[str, ...] = ()
    """Prefixes on disk of tensors that nothing reads. They are neither loaded nor exported."""
    without_unused: Callable[[Mapping[str, Any]], dict[str, Any]] = dict
    """The `config.json` of a model without these tensors."""
    packs_tower: bool = True
    """Whether `transformers` loads its tower with packed weights (int4). If not, built-in schemes store it in int8."""
    image_text: str = "<|vision_start|><|image_pad|><|vision_end|>"
    """The text of an image in a chat template."""
    video_text: str = "<|vision_start|><|video_pad|><|vision_end|>"
    """The text of a video in a chat template."""
    tool_calls: Literal["hermes"] = "hermes"
    """Format in which its models call tools."""

    def name_on_disk(self, name: str) -> str:
        """Parameter name to name on disk."""
        return _replace_prefix(name, self.disk_prefixes) or name

    def name_in_transformers(self, name: str) -> str:
        """Module or parameter name to its name in `transformers`, which adapters use."""
        return _replace_prefix(name, self.transformers_prefixes) or name

    def all_names(self, name: str) -> list[str]:
        """A module or parameter under every name that is read."""
        prefixes = (self.disk_prefixes, self.transformers_prefixes, *self.other_prefixes)
        return list(dict.fromkeys(_replace_prefix(name, one) or name for one in prefixes))

    def name_in_model(self, name: str) -> str | None:
        """Name on disk to parameter name; None if unknown."""
        for prefixes in (self.transformers_prefixes, self.disk_prefixes, *self.other_prefixes):  # the longer ones first
            if found := _replace_prefix(name, {disk: ours for ours, disk in prefixes.items()}):
                return found
        return None


def _replace_prefix(name: str, prefixes: Mapping[str, str]) -> str | None:
    for old, new in prefixes.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return None
