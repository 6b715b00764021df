"""The oracle of LLaVA-OneVision: folders that `transformers` wrote, in both layouts, and its processor's inputs."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from model import llava
from model.llava import positions as positions
from model.llava import save_random
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import (
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    LlavaOnevisionProcessor,
    PreTrainedTokenizerFast,
    ProcessorMixin,
)
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil

from saccade.model.families.llava_onevision import FAMILY
from saccade.model.text_files import byte_tokenizer, with_vision_tokens

CLASSES = LlavaOnevisionConfig, LlavaOnevisionForConditionalGeneration

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + ' ' }}"
    "{% for kind in ('image', 'video') %}{% for part in message.content if part.type == kind %}"
    "{{ '<' + kind + '>' }}{% endfor %}{% endfor %}"
    "{% for part in message.content if part.type == 'text' %}{{ '\n' + part.text }}{% endfor %}"
    "{{ '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Like the published one: part lists only, images before videos, and a space in past turns only."""


@dataclass(frozen=True, kw_only=True)
class Shape(llava.Shape):
    """One configuration, at test size."""

    max_tiles: int = 9
    """N of `vision_aspect_ratio` anyres_max_N."""
    tiles: int = 3
    """Maximum tiles per side."""
    family: str = "llava_onevision"

    @property
    def resolutions(self) -> list[list[int]]:
        sides = [self.vision["image_size"] * count for count in range(1, self.tiles + 1)]
        return [[height, width] for height in sides for width in sides]

    @property
    def num_image_tokens(self) -> int:
        return (self.vision["image_size"] // self.vision["patch_size"]) ** 2


def _text(heads: int, kv_heads: int, width: int, **more: Any) -> dict[str, Any]:
    sizes = {"hidden_size": width, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    return (
        {"model_type": "qwen2", "intermediate_size": 192, "num_hidden_layers": 2, "vocab_size": 320}
        | sizes
        | rope
        | more
    )


def _vision(heads: int, width: int, image_size: int, patch_size: int, layers: int = 2, **more: Any) -> dict[str, Any]:
    return {
        "model_type": "siglip_vision_model", "hidden_size": width, "num_attention_heads": heads,
        "intermediate_size": 100, "num_hidden_layers": layers, "image_size": image_size, "patch_size": patch_size,
    } | more  # fmt: skip


NO_HEAD = {"vision_use_head": False}
SHAPES = [
    Shape(
        "onevision-tied-in-text-config", _text(4, 2, 128, tie_word_embeddings=True),
        _vision(2, 64, 30, 7, **NO_HEAD), max_tiles=4,
    ),
    Shape(
        "onevision-untied-published-layout", _text(3, 1, 120), _vision(3, 60, 27, 9, 3, **NO_HEAD), max_tiles=2,
        tiles=4, is_published_layout=True,
    ),
    Shape(
        "onevision-two-layers-pooling-head", _text(7, 1, 112), _vision(2, 36, 28, 14, 3), True,
        other={"vision_feature_layer": [-2, 1], "multimodal_projector_bias": False},
    ),
    Shape(
        "onevision-early-layer-published-layout", _text(2, 2, 96, rms_norm_eps=1e-5),
        _vision(1, 40, 40, 8, 3, **NO_HEAD), max_tiles=1, tiles=2, other={"vision_feature_layer": 2},
        is_published_layout=True,
    ),
]  # fmt: skip


class ImagesOnly(LlavaOnevisionProcessor):
    """The processor without videos, which need torchvision."""

    def __init__(
        self, image_processor: Any = None, tokenizer: Any = None, num_image_tokens: int | None = None,
        vision_aspect_ratio: str = "", vision_feature_select_strategy: str = "full", chat_template: str | None = None,
    ) -> None:  # fmt: skip
        self.num_image_tokens, self.vision_aspect_ratio = num_image_tokens, vision_aspect_ratio
        self.vision_feature_select_strategy = vision_feature_select_strategy
        self.image_token, self.video_token = "<image>", "<video>"
        self.image_token_id, self.video_token_id = tokenizer.convert_tokens_to_ids(["<image>", "<video>"])
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)


def write(folder: Path, shape: Shape, dtype: torch.dtype = torch.float32, max_shard_size: str = "5GB") -> Path:
    """A checkpoint folder written by `transformers`, or the same in the layout of the hub."""
    folder.mkdir(exist_ok=True)
    spoken, token_ids, _ = with_vision_tokens(byte_tokenizer(), FAMILY)
    config = LlavaOnevisionConfig(
        text_config=shape.text | {"eos_token_id": spoken.eos_ids[0]}, vision_config=shape.vision,
        tie_word_embeddings=shape.tied, image_token_index=token_ids["image"], video_token_index=token_ids["video"],
        image_grid_pinpoints=shape.resolutions, vision_aspect_ratio=f"anyres_max_{shape.max_tiles}", **shape.other,
    )  # fmt: skip
    config.tie_word_embeddings = shape.tied or bool(shape.text.get("tie_word_embeddings"))
    torch.manual_seed(len(shape.name))
    model = LlavaOnevisionForConditionalGeneration(config).eval()
    save_random(model, shape, folder, dtype, max_shard_size)
    (folder / "tokenizer.json").write_text(json.dumps(spoken.tokenizer))
    side = shape.vision["image_size"]
    images = LlavaOnevisionImageProcessorPil(
        size={"height": side, "width": side}, image_grid_pinpoints=shape.resolutions, image_mean=[0.5, 0.4, 0.45],
        image_std=[0.5, 0.6, 0.55],
    )  # fmt: skip
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), eos_token="<|im_end|>")
    ImagesOnly(
        images, tokenizer, shape.num_image_tokens, f"anyres_max_{shape.max_tiles}", chat_template=TEMPLATE
    ).save_pretrained(folder)
    _edit(folder / "config.json", lambda config: config | {"tie_word_embeddings": shape.tied})
    if shape.is_published_layout:
        _publish(folder)
    return folder


def _edit(file: Path, change: Any) -> None:
    file.write_text(json.dumps(change(json.loads(file.read_text()))))


def _publish(folder: Path) -> None:
    """Rewrite names of tensors and files as before version 5, and drop defaults from the config."""
    tensors = {
        name.replace("vision_tower.", "vision_tower.vision_model.", 1): tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    described = json.loads((folder / "processor_config.json").read_text())
    (folder / "preprocessor_config.json").write_text(json.dumps(described.pop("image_processor")))
    described |= {"image_token": "<image>", "video_token": "<video>", "processor_class": "LlavaOnevisionProcessor"}
    (folder / "processor_config.json").write_text(json.dumps(described))
    template = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    (folder / "chat_template.jinja").unlink()
    _edit(folder / "config.json", _sparse)


def _sparse(config: dict[str, Any]) -> dict[str, Any]:
    text, vision = config["text_config"], config["vision_config"]
    text["rope_theta"] = text.pop("rope_parameters")["rope_theta"]
    kept = {
        "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "vocab_size", "rope_theta", "tie_word_embeddings", "image_size", "patch_size",
        "vision_use_head", "eos_token_id",
    }  # fmt: skip
    if text["rms_norm_eps"] != 1e-6:
        kept |= {"rms_norm_eps"}
    for name in ("projector_hidden_act", "multimodal_projector_bias", "vision_feature_select_strategy"):
        config.pop(name)
    config |= {"ignore_index": -100, "use_image_newline_parameter": True}
    return config | {"text_config": _only(text, kept), "vision_config": _only(vision, kept)}


def _only(section: dict[str, Any], names: set[str]) -> dict[str, Any]:
    return {name: value for name, value in section.items() if name in names}


def _template(folder: Path) -> str:
    file = folder / "chat_template.jinja"
    return (
        file.read_text() if file.exists() else json.loads((folder / "chat_template.json").read_text())["chat_template"]
    )


def processor(folder: Path) -> ImagesOnly:
    """The processor of a folder."""
    described = json.loads((folder / "processor_config.json").read_text())
    return ImagesOnly(
        LlavaOnevisionImageProcessorPil.from_pretrained(folder),
        PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), eos_token="<|im_end|>"),
        **{name: described[name] for name in ("num_image_tokens", "vision_aspect_ratio")},
        chat_template=_template(folder),
    )


def inputs(
    folder: Path, messages: list[dict[str, Any]], *, add_generation_prompt: bool = False
) -> dict[str, torch.Tensor]:
    """Its processor's inputs of a conversation, whose texts must be parts. Videos are resized like images."""
    theirs, given = processor(folder), [llava.with_parts(message) for message in messages]
    text = theirs.tokenizer.apply_chat_template(
        given, chat_template=theirs.chat_template, tokenize=False, add_generation_prompt=add_generation_prompt
    )
    parts = [part for message in given for part in message["content"]]
    images = [part["image"] for part in parts if part["type"] == "image"]
    videos = [_pixels(part["video"], theirs.image_processor) for part in parts if part["type"] == "video"]
    for number in range(len(videos)):
        written = theirs.replace_video_token({"pixel_values_videos": videos}, number)
        text = text.replace("<video>", written.replace("<video>", "<held>"), 1)
    found = dict(
        theirs(images=[images] if images else None, text=text.replace("<held>", "<video>"), return_tensors="pt")
    )
    return found | ({"pixel_values_videos": torch.stack(videos)} if videos else {})


def _pixels(frames: list[Image.Image], images: LlavaOnevisionImageProcessorPil) -> torch.Tensor:
    side = images.size["height"]
    resized = np.stack([np.asarray(frame.resize((side, side), Image.Resampling.BICUBIC)) for frame in frames])
    scaled = torch.from_numpy(resized).permute(0, 3, 1, 2).float() / 255
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (images.image_mean, images.image_std))
    return (scaled - mean) / std


def pixels(folder: Path, given: dict[str, torch.Tensor]) -> torch.Tensor:
    """[patches, pixels of a patch] of the tiles of all images, without padding, and of the frames of all videos."""
    vision = json.loads((folder / "config.json").read_text())["vision_config"]
    tiles = [values for key in ("pixel_values", "pixel_values_videos") for values in given.get(key, torch.zeros(0))]
    whole = torch.cat(tiles)
    patch = vision["patch_size"]
    side = whole.shape[-1] // patch
    whole = whole[:, :, : side * patch, : side * patch]
    split = whole.unflatten(2, (side, patch)).unflatten(4, (side, patch)).permute(0, 2, 4, 1, 3, 5)
    return split.reshape(len(whole) * side**2, -1)
