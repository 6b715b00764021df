"""The oracle: checkpoints made by `transformers`, and the results of its processor and model for a conversation."""

import json
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from model import llava_next, llava_onevision
from PIL import Image
from transformers import (
    LlavaNextForConditionalGeneration,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from saccade.model.text_files import TextFiles, byte_tokenizer, with_vision_tokens

IMAGE, VIDEO = "<|image_pad|>", "<|video_pad|>"

CLASSES = {
    "qwen2_vl": (Qwen2VLConfig, Qwen2VLForConditionalGeneration),
    "qwen2_5_vl": (Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration),
    "qwen3_vl": (Qwen3VLConfig, Qwen3VLForConditionalGeneration),
    "llava_next": (llava_next.LlavaNextConfig, LlavaNextForConditionalGeneration),
    "llava_onevision": llava_onevision.CLASSES,
}

ORACLES: dict[str, Any] = {"llava_next": llava_next, "llava_onevision": llava_onevision}
"""Families with another processor: modules with SHAPES, `write`, `inputs`, `positions` and `pixels`."""


@dataclass(frozen=True)
class Shape:
    """One configuration of the family, at test size."""

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    sections: tuple[int, int, int]
    tied: bool
    vision_heads: int
    vision_head_dim: int
    vision_depth: int = 3
    full_attention: tuple[int, ...] = (1,)
    extra: dict[str, Any] = field(default_factory=dict)
    """Further fields of the vision config."""
    family: str = "qwen2_5_vl"
    width: int | None = None
    """Hidden size, if heads do not fill it."""

    @property
    def hidden_size(self) -> int:
        return self.width or self.heads * self.head_dim

    def vision_config(self) -> dict[str, Any]:
        """The family's name of its width."""
        width = self.vision_heads * self.vision_head_dim
        common = {"depth": self.vision_depth, "num_heads": self.vision_heads}
        if self.family == "qwen2_vl":
            own = {"embed_dim": width, "hidden_size": self.hidden_size, "mlp_ratio": 2}
        else:
            own = {"hidden_size": width, "intermediate_size": 100, "out_hidden_size": self.hidden_size}
        if self.family == "qwen2_5_vl":
            own |= {"fullatt_block_indexes": list(self.full_attention), "tokens_per_second": 2}
        return common | own | self.extra

    def image_processor(self) -> Qwen2VLImageProcessorPil:
        merge = self.extra.get("spatial_merge_size", 2)
        if self.family != "qwen3_vl":
            return Qwen2VLImageProcessorPil(merge_size=merge)
        half = [0.5, 0.5, 0.5]
        size = {"shortest_edge": 32 * 32 * 4, "longest_edge": 32 * 32 * 400}
        return Qwen2VLImageProcessorPil(patch_size=16, merge_size=merge, image_mean=half, image_std=half, size=size)


SHAPES = [
    Shape("gqa1-d64-tied-windows-and-full", 4, 4, 64, (8, 12, 12), True, 2, 64),
    Shape("gqa2-d64-untied-all-windows", 4, 2, 64, (8, 12, 12), False, 2, 80, full_attention=()),
    Shape("gqa7-d64-tied-all-full", 7, 1, 64, (8, 12, 12), True, 2, 80, full_attention=(0, 1, 2)),
    Shape("gqa8-d64-untied", 8, 1, 64, (8, 12, 12), False, 1, 128, full_attention=(0, 2)),
    Shape("gqa2-d80-untied", 2, 1, 80, (10, 15, 15), False, 2, 64),
    Shape("gqa2-d128-tied", 2, 1, 128, (16, 24, 24), True, 1, 80, extra={"window_size": 56}),
]

OTHER_SHAPES = [
    Shape("qwen2-vl-tied", 4, 2, 64, (8, 12, 12), True, 2, 64, family="qwen2_vl"),
    Shape("qwen2-vl-untied-mlp3", 3, 1, 80, (10, 15, 15), False, 3, 40, family="qwen2_vl", extra={"mlp_ratio": 3}),
    Shape(
        "qwen2-vl-deep-tied-merge3", 7, 1, 64, (8, 12, 12), True, 1, 80, vision_depth=5, family="qwen2_vl",
        extra={"spatial_merge_size": 3},
    ),
    Shape("qwen2-vl-wide-heads-untied", 2, 2, 128, (16, 24, 24), False, 4, 20, vision_depth=1, family="qwen2_vl"),
    Shape(
        "qwen3-vl-tied", 4, 2, 64, (12, 10, 10), True, 2, 32, family="qwen3_vl",
        extra={"deepstack_visual_indexes": [0, 2], "num_position_embeddings": 49},
    ),
    Shape(
        "qwen3-vl-untied-wide-heads", 4, 1, 64, (12, 10, 10), False, 3, 24, family="qwen3_vl", width=144,
        extra={"deepstack_visual_indexes": [1], "num_position_embeddings": 2304},
    ),
    Shape(
        "qwen3-vl-more-features-than-layers-merge1", 3, 3, 80, (16, 12, 12), False, 1, 64, vision_depth=4,
        family="qwen3_vl", width=200,
        extra={"deepstack_visual_indexes": [0, 1, 3], "num_position_embeddings": 16, "spatial_merge_size": 1},
    ),
    Shape(
        "qwen3-vl-no-deepstack-tied", 2, 1, 128, (64, 32, 32), True, 2, 80, family="qwen3_vl",
        extra={"deepstack_visual_indexes": [], "num_position_embeddings": 100},
    ),
]  # fmt: skip
"""The other families, four shapes each."""

FAMILIES = [
    pytest.param(shape, id=shape.name, marks=[pytest.mark.slow] * (number % 4 > 1))
    for shapes in (OTHER_SHAPES, *(module.SHAPES for module in ORACLES.values()))
    for number, shape in enumerate(shapes)
]
"""These shapes as parameters of tests; two of each family are slow variants."""

ONE_PER_FAMILY = [
    pytest.param(*shape.values, id=shape.id, marks=[pytest.mark.slow] * (number % 4 > 0))
    for number, shape in enumerate(FAMILIES)
]
"""The shapes for tests of something other than the model: three of each family are slow variants."""


def words() -> tuple[TextFiles, dict[str, int]]:
    """The byte tokenizer with vision tokens, and the vision tokens' ids."""
    grown, token_ids, _ = with_vision_tokens(byte_tokenizer())
    return grown, token_ids


def make_checkpoint(
    folder: Path, shape: Shape, *, dtype: torch.dtype = torch.float32, max_shard_size: str = "5GB"
) -> Path:
    """A checkpoint folder written by `transformers`; no weight, bias or norm has a value that hides mistakes."""
    if shape.family in ORACLES:
        return ORACLES[shape.family].write(folder, shape, dtype, max_shard_size)
    spoken, token_ids = words()
    eos = spoken.eos_ids[0]
    config_class, model_class = CLASSES[shape.family]
    config = config_class(
        text_config={
            "vocab_size": 320,
            "hidden_size": shape.hidden_size,
            "intermediate_size": 192,
            "num_hidden_layers": 2,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": list(shape.sections)},
            "bos_token_id": None,
            "eos_token_id": eos,
            **({"head_dim": shape.head_dim} if shape.family == "qwen3_vl" else {}),
        },
        vision_config=shape.vision_config(),
        tie_word_embeddings=shape.tied,
        **{f"{name}_token_id": token_id for name, token_id in token_ids.items()},
    )
    torch.manual_seed(len(shape.name) + shape.heads)
    model = model_class(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = 0.1 if parameter.ndim == 1 else 0.08
            centre = 1.0 if ("norm" in name or "ln_q" in name) and name.endswith("weight") else 0.0
            parameter.copy_(centre + spread * torch.randn_like(parameter))
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    tokenizer_for(spoken, folder).save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(spoken.template)
    shape.image_processor().save_pretrained(folder)
    return folder


def tokenizer_for(spoken: TextFiles, folder: Path) -> PreTrainedTokenizerFast:
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(spoken.tokenizer))
    return PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), eos_token="<|im_end|>")


class Oracle:
    """The model and processor of `transformers` for one checkpoint folder."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        self.folder, self.dtype = folder, dtype
        self.tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
        self.family = json.loads((self.folder / "config.json").read_text())["model_type"]
        self.own = ORACLES.get(self.family)
        if self.own is None:
            self.images = Qwen2VLImageProcessorPil.from_pretrained(folder)

    @cached_property
    def model(self) -> PreTrainedModel:
        return CLASSES[self.family][1].from_pretrained(self.folder, dtype=self.dtype).eval()

    def inputs(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = False,
        video: tuple[Any, float] | None = None,
    ) -> dict[str, torch.Tensor]:
        """Input ids, pixels and grids of a conversation with images, as its processor prepares them.

        `video`: grid and frame rate of a video whose frames have times.
        """
        if self.own is not None:
            return self.own.inputs(self.folder, messages, add_generation_prompt=add_generation_prompt)
        template = (self.folder / "chat_template.jinja").read_text()
        text = self.tokenizer.apply_chat_template(
            messages, chat_template=template, tokenize=False, add_generation_prompt=add_generation_prompt
        )
        pictures = [part["image"] for message in messages for part in _parts(message) if part["type"] == "image"]
        prepared: dict[str, torch.Tensor] = {}
        if pictures:
            prepared = dict(self.images(pictures, return_tensors="pt"))
            for grid in prepared["image_grid_thw"]:
                text = text.replace(IMAGE, "<|held|>" * (int(grid.prod()) // self.images.merge_size**2), 1)
        if video is not None:
            text = text.replace(VIDEO, _timed_frames(*video, self.images.merge_size), 1)
        ids = self.tokenizer(text.replace("<|held|>", IMAGE), add_special_tokens=False, return_tensors="pt")[
            "input_ids"
        ]
        return prepared | {"input_ids": ids, "mm_token_type_ids": self.token_types(ids)}

    def token_types(self, ids: torch.Tensor) -> torch.Tensor:
        image, video = (self.tokenizer.convert_tokens_to_ids(token) for token in (IMAGE, VIDEO))
        return (ids == image).int() + 2 * (ids == video).int()

    def pixels(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """[patches, patch_dim] of all images."""
        return inputs["pixel_values"] if self.own is None else self.own.pixels(self.folder, inputs)

    def positions(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        if self.own is not None:
            return self.own.positions(inputs)
        chosen = {k: v for k, v in inputs.items() if k in ("image_grid_thw", "video_grid_thw", "second_per_grid_ts")}
        return self.model.model.get_rope_index(inputs["input_ids"], inputs["mm_token_type_ids"], **chosen)[0][:, 0]

    @torch.no_grad()
    def logits(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        self.model.model.rope_deltas = None
        return self.model(**inputs).logits[0]

    @torch.no_grad()
    def following(self, inputs: dict[str, torch.Tensor], tokens: list[int]) -> list[int]:
        """The most probable token at each position of a continuation; the continuation itself, if it is the greedy one.

        There are two forward passes: the prompt, and the continuation over its KV cache. Random weights may generate a
        placeholder, which is an ordinary token there; in a single pass `transformers` would require an image for it.
        """
        self.model.model.rope_deltas = None
        prompt = self.model(**inputs, use_cache=True)
        rest = self.model(input_ids=torch.tensor([tokens[:-1]]), past_key_values=prompt.past_key_values)
        return torch.cat([prompt.logits[0, -1:], rest.logits[0]]).argmax(-1).tolist()


def _timed_frames(grid: torch.Tensor, fps: float, merge_size: int) -> str:
    """The text of a video of Qwen3-VL's processor, which itself needs torchvision."""
    sizes = SimpleNamespace(merge_size=merge_size, temporal_patch_size=2)
    markers = {"vision_start_token": "<|vision_start|>", "vision_end_token": "<|vision_end|>", "video_token": VIDEO}
    times = partial(Qwen3VLProcessor._calculate_timestamps, None)
    metadata = SimpleNamespace(fps=fps, frames_indices=list(range(2 * int(grid[0, 0]) - 1)))
    processor = SimpleNamespace(video_processor=sizes, _calculate_timestamps=times, **markers)
    found = {"video_grid_thw": grid, "video_metadata": [metadata]}
    return Qwen3VLProcessor.replace_video_token(processor, found, 0)


def _parts(message: dict[str, Any]) -> list[dict[str, Any]]:
    return message["content"] if isinstance(message["content"], list) else []


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Smooth colours with some noise: resizing matters, and so does every pixel."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width]
    waves = [np.sin(x / rng.uniform(3, 40) + y / rng.uniform(3, 40)) * 90 + 128 for _ in range(3)]
    noisy = np.stack(waves, -1) + rng.normal(0, 12, (height, width, 3))
    return Image.fromarray(noisy.clip(0, 255).astype(np.uint8))


def ask(*parts: Any) -> dict[str, Any]:
    """A user message of texts and pictures."""
    content = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": part} for part in parts
    ]
    return {"role": "user", "content": content}


def answer(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


CONVERSATIONS = {
    "text-only": [{"role": "user", "content": "Hello, who are you?"}],
    "28x28": [ask(picture(28, 28), "What is this?")],
    "644x364": [ask("Look: ", picture(644, 364, 1), " and tell.")],
    "1100x60": [ask(picture(1100, 60, 2), "A banner?")],
    "multi-image": [ask(picture(90, 130, 3), "versus", picture(200, 56, 4), picture(57, 57, 5), "?")],
    "multi-turn": [
        {"role": "system", "content": "Be brief."},
        ask(picture(120, 84, 6), "What colour?"),
        answer("Blue, mostly. Ünïcode: 日本語."),
        ask("And this?", picture(84, 120, 7)),
        answer("Green."),
    ],
}
