"""The oracle of LLaVA-NeXT: folders that `transformers` wrote, in both layouts, and its processor's inputs."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from model import llava
from model.llava import positions as positions
from model.llava import save_random
from safetensors.torch import load_file, save_file
from transformers import (
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
    LlavaNextProcessor,
    PreTrainedTokenizerFast,
)
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.llava_next.modeling_llava_next import image_size_to_num_patches

VICUNA = (
    "{% for message in messages %}"
    "{% if message['role'] != 'system' %}{{ message['role'].upper() + ': '}}{% endif %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}"
    "{% if message['role'] != 'assistant' %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}{{ content['text'] + ' '}}{% "
    "endfor %}"
    "{% else %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{% generation %}{{ content['text'] + ' '}}{% endgeneration %}{% endfor %}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
MISTRAL = (
    "{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ '<<SYS>>\n' + message['content'][0]['text'] + '\n<</SYS>>\n\n' }}"
    "{% elif message['role'] == 'user' %}{{ '[INST] ' }}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}{{ content['text'] }}{% endfor %}"
    "{{' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'][0]['text'] + '</s>'}}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}"
    "{% endfor %}"
)
"""Part lists only; images come first, and texts stay apart."""


@dataclass(frozen=True, kw_only=True)
class Shape(llava.Shape):
    """One configuration, at test size."""

    template: str
    prepends: Literal["first", "every"]
    """Whether the tokenizer writes a space before a prompt, or before each text between control tokens."""
    family: str = "llava_next"

    @property
    def resolutions(self) -> list[list[int]]:
        """The published resolutions, in tiles of this size."""
        side = self.vision["image_size"]
        return [[side, 2 * side], [2 * side, side], [2 * side, 2 * side], [3 * side, side], [side, 3 * side]]


def _text(model_type: str, heads: int, kv_heads: int, width: int, **more: Any) -> dict[str, Any]:
    sizes = {
        "model_type": model_type,
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }
    return sizes | {"intermediate_size": 192, "num_hidden_layers": 2, "vocab_size": 448, "rms_norm_eps": 1e-5} | more


def _vision(heads: int, width: int, image_size: int, patch_size: int, layers: int = 3) -> dict[str, Any]:
    return {
        "model_type": "clip_vision_model", "hidden_size": width, "num_attention_heads": heads, "intermediate_size": 100,
        "num_hidden_layers": layers, "image_size": image_size, "patch_size": patch_size, "projection_dim": 16,
    }  # fmt: skip


SHAPES = [
    Shape(
        "llava-next-mistral-window", _text("mistral", 4, 2, 128, sliding_window=24, max_position_embeddings=4096),
        _vision(2, 64, 28, 14), template=MISTRAL, prepends="first",
    ),
    Shape(
        "llava-next-vicuna-published-layout", _text("llama", 3, 3, 120, max_position_embeddings=2048),
        _vision(3, 72, 30, 14), template=VICUNA, prepends="every", is_published_layout=True,
    ),
    Shape(
        "llava-next-llama-two-layers-tied",
        _text(
            "llama", 4, 1, 96, head_dim=40, max_position_embeddings=4096,
            rope_parameters={"rope_type": "default", "rope_theta": 5e5},
        ),
        _vision(2, 48, 27, 9, 4), True, {"vision_feature_layer": [-3, -1], "multimodal_projector_bias": False},
        template=VICUNA, prepends="first",
    ),
    Shape(
        "llava-next-mistral-no-window-published-layout",
        _text("mistral", 2, 2, 64, sliding_window=None, max_position_embeddings=4096), _vision(1, 40, 16, 8, 2),
        other={"vision_feature_layer": 1}, template=MISTRAL, prepends="every", is_published_layout=True,
    ),
]  # fmt: skip

CONTROL = ("<unk>", "<s>", "</s>")
MERGES = ("h e", "l l", "▁ t", "▁ a", "he ll", "i n", "▁ w", "▁t h", "o r", "A S", "AS S", "r e", "▁▁ ▁▁", "▁ ▁")


def tokenizer_description(prepends: str) -> dict[str, Any]:
    """A SentencePiece tokenizer as `tokenizer.json`: `<s>` before a prompt, bytes for what is not in the vocabulary."""
    pieces = [*CONTROL, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *map(chr, range(0x21, 0x7F))]
    pieces += [merge.replace(" ", "") for merge in sorted(MERGES, key=lambda merge: len(merge))]
    order = list(dict.fromkeys(pieces))
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added = [flags | {"id": i, "content": name} for i, name in enumerate(CONTROL)]
    added.append(flags | {"id": len(order), "content": "<image>"})
    legacy = prepends == "every"
    space = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
        "normalizer": (
            {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, space]} if legacy else None
        ),
        "pre_tokenizer": None if legacy else {
            "type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False,
        },
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"},
                {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {
            "type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True, "byte_fallback": True, "vocab": {piece: i for i, piece in enumerate(order)},
            "merges": [merge.split(" ") for merge in MERGES if merge.replace(" ", "") in order],
        },
    }  # fmt: skip


def write(folder: Path, shape: Shape, dtype: torch.dtype = torch.float32, max_shard_size: str = "5GB") -> Path:
    """A checkpoint folder written by `transformers`, or the same in the layout of the hub."""
    folder.mkdir(exist_ok=True)
    description = tokenizer_description(shape.prepends)
    image_id = description["added_tokens"][-1]["id"]
    config = LlavaNextConfig(
        text_config=shape.text | {"bos_token_id": 1, "eos_token_id": 2}, vision_config=shape.vision,
        tie_word_embeddings=shape.tied, image_token_index=image_id, image_grid_pinpoints=shape.resolutions,
        **shape.other,
    )  # fmt: skip
    torch.manual_seed(len(shape.name))
    model = LlavaNextForConditionalGeneration(config).eval()
    save_random(model, shape, folder, dtype, max_shard_size)
    (folder / "tokenizer.json").write_text(json.dumps(description))
    processor(folder, shape).save_pretrained(folder)
    if shape.is_published_layout:
        _publish(folder)
    return folder


def processor(folder: Path, shape: Shape) -> LlavaNextProcessor:
    """The processor of a shape."""
    side = shape.vision["image_size"]
    images = LlavaNextImageProcessorPil(
        size={"shortest_edge": side}, crop_size={"height": side, "width": side}, image_grid_pinpoints=shape.resolutions
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    return LlavaNextProcessor(
        images, tokenizer, patch_size=shape.vision["patch_size"], vision_feature_select_strategy="default",
        num_additional_image_tokens=1, chat_template=shape.template,
    )  # fmt: skip


def _publish(folder: Path) -> None:
    """Rewrite names of tensors and files as before version 5, and drop defaults from the config."""
    tensors = {_published_name(name): tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    described = json.loads((folder / "processor_config.json").read_text())
    images = described.pop("image_processor")
    (folder / "processor_config.json").write_text(json.dumps(described))
    (folder / "preprocessor_config.json").write_text(json.dumps(images))
    config = json.loads((folder / "config.json").read_text())
    theta = config["text_config"].pop("rope_parameters")["rope_theta"]
    config["text_config"]["rope_theta"] = theta
    unsaid = ("hidden_act", "attention_bias", "mlp_bias", "layer_norm_eps", "projector_hidden_act", "num_channels")
    for part in (config["text_config"], config["vision_config"], config):
        for name in unsaid:
            part.pop(name, None)
    (folder / "config.json").write_text(json.dumps(config))


def _published_name(name: str) -> str:
    name = name.removeprefix("model.")
    if name.startswith("vision_tower.") and not name.startswith("vision_tower.vision_model."):
        return name.replace("vision_tower.", "vision_tower.vision_model.", 1)
    if name.startswith("language_model.") and not name.startswith(("language_model.model.", "language_model.lm_head.")):
        return name.replace("language_model.", "language_model.model.", 1)
    return f"language_model.{name}" if name.startswith("lm_head.") else name


def inputs(
    folder: Path, messages: list[dict[str, Any]], *, add_generation_prompt: bool = False
) -> dict[str, torch.Tensor]:
    """The inputs that its processor makes of a conversation, whose texts must be parts."""
    described = json.loads((folder / "processor_config.json").read_text())
    images = LlavaNextImageProcessorPil.from_pretrained(folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    names = ("patch_size", "vision_feature_select_strategy", "num_additional_image_tokens")
    template = (folder / "chat_template.jinja").read_text()
    theirs = LlavaNextProcessor(images, tokenizer, chat_template=template, **{name: described[name] for name in names})
    found = theirs.apply_chat_template(
        [llava.with_parts(message) for message in messages], tokenize=True, return_dict=True, return_tensors="pt",
        add_generation_prompt=add_generation_prompt,
    )  # fmt: skip
    return dict(found)


def pixels(folder: Path, given: dict[str, torch.Tensor]) -> torch.Tensor:
    """[patches, patch_dim] of the tiles of all images, without the empty ones that fill a batch."""
    config = json.loads((folder / "config.json").read_text())
    resolutions, vision = config["image_grid_pinpoints"], config["vision_config"]
    side, patch = vision["image_size"], vision["patch_size"]
    counts = [image_size_to_num_patches(size, resolutions, side) for size in given["image_sizes"]]
    tiles = torch.cat([image[:count] for image, count in zip(given["pixel_values"], counts, strict=True)])
    whole = side // patch * patch
    patches = tiles[:, :, :whole, :whole].unfold(2, patch, patch).unfold(3, patch, patch)
    return patches.permute(0, 2, 3, 1, 4, 5).reshape(-1, 3 * patch**2)
