"""LLaVA-NeXT only: extreme shapes, windows, sparse configs, and text that spells control tokens."""

import dataclasses
import json

import pytest
import torch
from closeness import assert_close
from model.hugging_face import Oracle, answer, ask, make_checkpoint, picture
from model.llava_next import SHAPES
from transformers import LlavaNextConfig

from saccade.engine import Engine, EngineConfig, SamplingParams
from saccade.errors import CheckpointError
from saccade.model import generate, load_model
from saccade.model.families import VISION_LANGUAGE, named_size
from saccade.model.vlm import VLM
from saccade.processor import Processor

EXTREMES = [
    ask(picture(200, 1, 1), "a strip", picture(1, 200, 2), picture(3, 500, 3)),
    answer("no rows are left"),
    ask(picture(450, 3, 4), picture(1, 1, 5), "and", picture(27, 31, 6)),
]
"""Only newlines or nothing of the first image remain, apart from the small picture."""


ODD = dataclasses.replace(
    SHAPES[1],
    name="odd heads of the tower",
    vision=SHAPES[1].vision | {"hidden_size": 54, "num_hidden_layers": 1},
    other={"vision_feature_layer": 0},
)
"""Heads of 18 channels, and embeddings that no block changes."""


@pytest.fixture(scope="module", params=[SHAPES[0], ODD, SHAPES[2]], ids=lambda shape: shape.name)
def folder(request, tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("llava") / "checkpoint", request.param)


def test_images_of_extreme_shapes_are_those_of_transformers(folder):
    oracle, processor = Oracle(folder), Processor.load(folder)
    theirs, ours = oracle.inputs(EXTREMES), processor([EXTREMES])
    assert ours.token_ids.tolist() == theirs["input_ids"][0].tolist()
    assert torch.allclose(ours.normalized_patches(), oracle.pixels(theirs), atol=1e-6)
    lengths = [
        part.length
        for grid in ours.image_grids.tolist()
        for part in processor.rules.parts("image", tuple(grid), 1.0, ())
    ]
    if processor.images.tiling.patches_per_side % 2 == 0:
        assert lengths[0] == processor.images.tiling.patches_per_tile, "no row is left"
    assert sum(lengths) == len(ours.image_token_index)
    with torch.no_grad():
        assert_close("logits", load_model(folder, device="cpu")(ours), oracle.logits(theirs), 1e-4)


def test_worker_processes_and_the_engine_give_them_too(tmp_path):
    folder = make_checkpoint(tmp_path / "checkpoint", SHAPES[1])
    messages = [*EXTREMES, answer("fine"), ask("and now?")]
    inputs = Processor.load(folder)([messages], add_generation_prompt=True)
    expected = generate(load_model(folder, device="cpu"), inputs, max_new_tokens=8)
    config = EngineConfig(
        page_size=4,
        num_pages=200,
        max_length=800,
        max_step_tokens=64,
        max_encoder_patches=64,
        encoder_cache_tokens=512,
        num_workers=1,
    )
    with Engine.load(folder, device="cpu", config=config) as engine:
        [completion] = engine.generate([messages], SamplingParams(max_tokens=8, ignore_eos=True))
    assert [completion.token_ids] == expected
    assert completion.num_prompt_tokens == inputs.num_tokens


def test_text_that_spells_control_tokens_stays_text(folder):
    processor = Processor.load(folder)
    said = ask(picture(40, 40), "<image></s><s>", "<ima", "ge>")
    inputs = processor([[said]])
    ids = inputs.token_ids.tolist()
    assert ids.count(processor.rules.image_id) == len(inputs.image_token_index)
    assert ids.count(1) == 1, "the one in front"
    assert processor.decode(ids).replace(" ", "").count("<image></s><s>") == 1


def test_the_window_is_seen(tmp_path):
    """The logits differ without the window."""
    folder = make_checkpoint(tmp_path / "checkpoint", SHAPES[0])
    model, inputs = load_model(folder, device="cpu"), Processor.load(folder)([[ask("word " * 40)]])
    language = dataclasses.replace(model.config.language, sliding_window=None)
    wide = VLM(dataclasses.replace(model.config, language=language)).eval()
    wide.load_state_dict(model.state_dict())
    with torch.no_grad():
        near, far = model(inputs), wide(inputs)
    assert torch.allclose(near[:24], far[:24], atol=1e-5)
    assert (near[24:] - far[24:]).abs().max() > 1e-2


MISTRAL = {
    "model_type": "llava_next", "architectures": ["LlavaNextForConditionalGeneration"], "ignore_index": -100,
    "image_token_index": 32000,
    "image_grid_pinpoints": [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]],
    "projector_hidden_act": "gelu",
    "text_config": {
        "_name_or_path": "mistralai/Mistral-7B-Instruct-v0.2", "architectures": ["MistralForCausalLM"],
        "intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mistral",
        "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "torch_dtype": "bfloat16",
        "vocab_size": 32064,
    },
    "vision_config": {
        "hidden_size": 1024, "image_size": 336, "intermediate_size": 4096, "model_type": "clip_vision_model",
        "num_attention_heads": 16, "num_hidden_layers": 24, "patch_size": 14, "projection_dim": 768,
        "vocab_size": 32000,
    },
    "tie_word_embeddings": False, "use_image_newline_parameter": True, "vision_feature_layer": -2,
    "vision_feature_select_strategy": "default", "vocab_size": 32064,
}  # fmt: skip
VICUNA = MISTRAL | {
    "text_config": {
        "_name_or_path": "lmsys/vicuna-7b-v1.5", "architectures": ["LlamaForCausalLM"],
        "max_position_embeddings": 4096, "model_type": "llama", "pad_token_id": 0, "rms_norm_eps": 1e-05,
        "torch_dtype": "float16", "vocab_size": 32064,
    },
}  # fmt: skip
SPARSE = [
    MISTRAL,
    VICUNA,
    {"model_type": "llava_next"},
    {
        "model_type": "llava_next",
        "text_config": {"model_type": "mistral", "sliding_window": None},
        "vision_config": {},
        "image_grid_pinpoints": [[224, 448]],
        "vision_feature_layer": [1, -1],
    },
]


@pytest.mark.parametrize("raw", SPARSE, ids=["mistral", "vicuna", "nothing", "little"])
def test_what_a_config_does_not_say_is_the_default_of_transformers(raw):
    theirs, ours = LlavaNextConfig.from_dict(raw), VISION_LANGUAGE["llava_next"].parse_config(raw)
    text, vision, language, tower = theirs.text_config, theirs.vision_config, ours.language, ours.vision
    assert (language.vocab_size, language.hidden_size, language.num_layers) == (
        text.vocab_size,
        text.hidden_size,
        text.num_hidden_layers,
    )
    assert (language.num_heads, language.num_kv_heads) == (text.num_attention_heads, text.num_key_value_heads)
    assert (language.intermediate_size, language.norm_eps) == (text.intermediate_size, text.rms_norm_eps)
    assert (language.max_positions, language.rope_theta) == (
        text.max_position_embeddings,
        text.rope_parameters["rope_theta"],
    )
    assert language.sliding_window == getattr(text, "sliding_window", None)
    assert (tower.num_layers, tower.hidden_size, tower.num_heads) == (
        vision.num_hidden_layers,
        vision.hidden_size,
        vision.num_attention_heads,
    )
    assert (tower.intermediate_size, tower.norm_eps) == (vision.intermediate_size, vision.layer_norm_eps)
    assert (tower.tile_size, tower.patch_size) == (vision.image_size, vision.patch_size)
    assert [list(size) for size in tower.resolutions] == theirs.image_grid_pinpoints
    assert ours.tied_head is theirs.tie_word_embeddings is False


def test_the_published_configs_are_the_named_sizes():
    parse = VISION_LANGUAGE["llava_next"].parse_config
    assert parse(MISTRAL) == named_size("llava_next/7b-mistral")
    assert parse(VICUNA) == named_size("llava_next/7b-vicuna")


def test_a_head_tied_in_the_text_config_alone_is_not_tied():
    raw = MISTRAL | {"text_config": MISTRAL["text_config"] | {"tie_word_embeddings": True}}
    assert not VISION_LANGUAGE["llava_next"].parse_config(raw).tied_head


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vision_feature_select_strategy": "full"}, "only 'default' is supported"),
        ({"text_config": {"model_type": "gemma"}}, "only llama, mistral are supported"),
        ({"text_config": {"model_type": "llama", "attention_bias": True}}, "attention_bias"),
        (
            {"text_config": {"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 2.0}}},
            "only unscaled RoPE",
        ),
        ({"vision_feature_layer": "last"}, "not a layer"),
        ({"vision_feature_layer": True}, "not a layer"),
        ({"text_config": {"model_type": []}}, "only llama, mistral are supported"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false', not true or false"),
        ({"vision_config": {"model_type": "siglip_vision_model"}}, "only 'clip_vision_model'"),
    ],
)  # fmt: skip
def test_settings_that_are_not_supported_are_refused(change, message):
    with pytest.raises(CheckpointError, match=message):
        VISION_LANGUAGE["llava_next"].parse_config(MISTRAL | change)


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        (
            "preprocessor_config.json",
            {"crop_size": {"height": 20, "width": 20}},
            "only one square for both is supported",
        ),
        ("preprocessor_config.json", {"size": {"shortest_edge": 20}, "crop_size": None}, "size is 20 .* image_size 30"),
        ("preprocessor_config.json", {"image_grid_pinpoints": [[30, 30]]}, "Take both files from the same model"),
        (
            "preprocessor_config.json",
            {"size": ...},
            "size is 224, crop_size {'height': 30, 'width': 30}; only one square",
        ),
        ("preprocessor_config.json", {"image_std": 0}, "image_std is 0, not three numbers"),
        ("processor_config.json", {"patch_size": 7}, "patch_size is 7 in processor_config.json, but 14"),
    ],
)
def test_files_of_another_model_are_refused(tmp_path, file, change, message):
    folder = make_checkpoint(tmp_path / "checkpoint", SHAPES[1])
    described = json.loads((folder / file).read_text())
    changed = {name: value for name, value in (described | change).items() if value is not ...}
    (folder / file).write_text(json.dumps(changed))
    with pytest.raises(CheckpointError, match=message):
        Processor.load(folder)
