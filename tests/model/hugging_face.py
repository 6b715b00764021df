"""The oracle: checkpoints made by `transformers`, and what its processor and model say about a conversation."""

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import PreTrainedTokenizerFast, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from saccade.model.initialize import TextFiles, byte_tokenizer, with_vision_tokens

IMAGE, VIDEO = "<|image_pad|>", "<|video_pad|>"


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

    @property
    def hidden_size(self) -> int:
        return self.heads * self.head_dim


SHAPES = [
    Shape("gqa1-d64-tied-windows-and-full", 4, 4, 64, (8, 12, 12), True, 2, 64),
    Shape("gqa2-d64-untied-all-windows", 4, 2, 64, (8, 12, 12), False, 2, 80, full_attention=()),
    Shape("gqa7-d64-tied-all-full", 7, 1, 64, (8, 12, 12), True, 2, 80, full_attention=(0, 1, 2)),
    Shape("gqa8-d64-untied", 8, 1, 64, (8, 12, 12), False, 1, 128, full_attention=(0, 2)),
    Shape("gqa2-d80-untied", 2, 1, 80, (10, 15, 15), False, 2, 64),
    Shape("gqa2-d128-tied", 2, 1, 128, (16, 24, 24), True, 1, 80, extra={"window_size": 56}),
]


def words() -> tuple[TextFiles, dict[str, int]]:
    """The byte tokenizer with vision tokens, and the vision tokens' ids."""
    grown, token_ids, _ = with_vision_tokens(byte_tokenizer())
    return grown, token_ids


def make_checkpoint(
    folder: Path, shape: Shape, *, dtype: torch.dtype = torch.float32, max_shard_size: str = "5GB"
) -> Path:
    """A checkpoint folder written by `transformers`; no weight, bias or norm is left at a value that hides mistakes."""
    spoken, token_ids = words()
    eos = spoken.eos_ids[0]
    config = Qwen2_5_VLConfig(
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
        },
        vision_config={
            "depth": shape.vision_depth,
            "hidden_size": shape.vision_heads * shape.vision_head_dim,
            "intermediate_size": 100,
            "num_heads": shape.vision_heads,
            "out_hidden_size": shape.hidden_size,
            "fullatt_block_indexes": list(shape.full_attention),
            "tokens_per_second": 2,
            **shape.extra,
        },
        tie_word_embeddings=shape.tied,
        **{f"{name}_token_id": token_id for name, token_id in token_ids.items()},
    )
    torch.manual_seed(len(shape.name) + shape.heads)
    model = Qwen2_5_VLForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = 0.1 if parameter.ndim == 1 else 0.08
            centre = 1.0 if "norm" in name or "ln_q" in name else 0.0
            parameter.copy_(centre + spread * torch.randn_like(parameter))
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    tokenizer_for(spoken, folder).save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(spoken.template)
    Qwen2VLImageProcessorPil().save_pretrained(folder)
    return folder


def tokenizer_for(spoken: TextFiles, folder: Path) -> PreTrainedTokenizerFast:
    import json

    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(spoken.tokenizer))
    return PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), eos_token="<|im_end|>")


class Oracle:
    """What `transformers` makes of one checkpoint folder."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        self.folder, self.dtype = folder, dtype
        self.tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
        self.images = Qwen2VLImageProcessorPil.from_pretrained(folder)

    @cached_property
    def model(self) -> Qwen2_5_VLForConditionalGeneration:
        return Qwen2_5_VLForConditionalGeneration.from_pretrained(self.folder, dtype=self.dtype).eval()

    def inputs(self, messages: list[dict[str, Any]], *, add_generation_prompt: bool = False) -> dict[str, torch.Tensor]:
        """Input ids, pixels and grids of a conversation with images, as its processor prepares them."""
        template = (self.folder / "chat_template.jinja").read_text()
        text = self.tokenizer.apply_chat_template(
            messages, chat_template=template, tokenize=False, add_generation_prompt=add_generation_prompt
        )
        pictures = [part["image"] for message in messages for part in _parts(message) if part["type"] == "image"]
        prepared: dict[str, torch.Tensor] = {}
        if pictures:
            prepared = dict(self.images(pictures, return_tensors="pt"))
            for grid in prepared["image_grid_thw"]:
                text = text.replace(IMAGE, "<|held|>" * (int(grid.prod()) // 4), 1)
        ids = self.tokenizer(text.replace("<|held|>", IMAGE), add_special_tokens=False, return_tensors="pt")[
            "input_ids"
        ]
        return prepared | {"input_ids": ids, "mm_token_type_ids": self.token_types(ids)}

    def token_types(self, ids: torch.Tensor) -> torch.Tensor:
        image, video = (self.tokenizer.convert_tokens_to_ids(token) for token in (IMAGE, VIDEO))
        return (ids == image).int() + 2 * (ids == video).int()

    def positions(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        chosen = {k: v for k, v in inputs.items() if k in ("image_grid_thw", "video_grid_thw", "second_per_grid_ts")}
        return self.model.model.get_rope_index(inputs["input_ids"], inputs["mm_token_type_ids"], **chosen)[0][:, 0]

    @torch.no_grad()
    def logits(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        self.model.model.rope_deltas = None
        return self.model(**inputs).logits[0]

    @torch.no_grad()
    def continuation(self, inputs: dict[str, torch.Tensor], num_tokens: int) -> list[int]:
        self.model.model.rope_deltas = None
        out = self.model.generate(
            **inputs,
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        return out[0, inputs["input_ids"].shape[1] :].tolist()


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
