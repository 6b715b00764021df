"""Every family has sizes for `saccade init` that load in `transformers`, names, adapters, and a memory plan."""

import copy
import dataclasses
import json
import shutil

import pytest
import torch
from model.hugging_face import CLASSES, CONVERSATIONS, Oracle

from saccade.errors import CheckpointError, ConfigError
from saccade.model import load_model, save_model
from saccade.model.families import DEFAULT_FAMILY, VISION_LANGUAGE, load_model_config, named_size, named_sizes
from saccade.model.initialize import initialize_random
from saccade.model.linear import checkpoint_shapes, projections
from saccade.model.quantization import QuantizationConfig, StoredScheme
from saccade.model.quantized_linear import QuantizedLinear, quantize_storage
from saccade.model.vlm import VLM
from saccade.processor import Processor

pytestmark = pytest.mark.filterwarnings("ignore:.*pad_token_id.*")


@pytest.fixture(scope="module", params=VISION_LANGUAGE.values(), ids=VISION_LANGUAGE)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def made(family, tmp_path_factory):
    folder = tmp_path_factory.mktemp("made") / "checkpoint"
    initialize_random(folder, family.sizes["tiny"], dtype=torch.float32)
    return folder


def test_a_checkpoint_of_random_weights_loads_in_transformers_with_the_same_logits(family, made):
    _, report = CLASSES[family.model_type][1].from_pretrained(made, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    messages, oracle = CONVERSATIONS["multi-image"], Oracle(made)
    with torch.no_grad():
        ours = load_model(made, device="cpu")(Processor.load(made)([messages]))
    assert torch.allclose(ours, oracle.logits(oracle.inputs(messages)), atol=1e-4)


def test_what_is_saved_is_what_was_loaded(made, tmp_path):
    model = load_model(made, device="cpu")
    save_model(model, tmp_path / "copy", like=made)
    again = load_model(tmp_path / "copy", device="cpu")
    assert again.config == model.config
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))


def test_a_folder_that_says_only_what_is_no_default_loads_alike(family, made, tmp_path):
    """Quantize a folder like published ones."""
    shutil.copytree(made, tmp_path / "sparse")
    raw, config_class = json.loads((made / "config.json").read_text()), CLASSES[family.model_type][0]
    full = config_class.from_dict(copy.deepcopy(raw))
    for part in ("vision_config", "text_config"):
        default = type(getattr(full, part))().to_dict()
        if part in raw:
            said = {k: v for k, v in raw[part].items() if k == "model_type" or v != default.get(k, ...)}
            assert part == "text_config" or len(said) < len(raw[part])
            raw[part] = said
    (tmp_path / "sparse" / "config.json").write_text(json.dumps(raw))
    assert load_model_config(tmp_path / "sparse") == load_model_config(made)
    assert Processor.load(tmp_path / "sparse").rules == Processor.load(made).rules


@pytest.mark.parametrize("preset", ["W8A8", "W4A16"])
def test_a_folder_of_quantized_weights_gives_the_logits_of_its_decompressed_weights(preset, family, tmp_path):
    pytest.importorskip("compressed_tensors")
    from model.compressed import write_quantized

    size = family.sizes["tiny"]
    language = dataclasses.replace(size.language, intermediate_size=384, num_layers=1)
    initialize_random(tmp_path / "source", dataclasses.replace(size, language=language, tied_head=False))
    folder = write_quantized(tmp_path / "source", tmp_path / "quantized", preset)
    plain = folder.with_name("quantized-plain")
    inputs = Processor.load(folder)([CONVERSATIONS["28x28"]])
    with torch.no_grad():
        ours, expected = (load_model(one, device="cpu", dtype="fp32")(inputs) for one in (folder, plain))
    assert float((ours - expected).norm() / expected.norm()) < 2e-2


def test_names_on_disk_lead_back_to_the_parameters(family):
    for config in family.sizes.values():
        with torch.device("meta"):
            names = checkpoint_shapes(VLM(dataclasses.replace(config, vision=config.vision.with_few_layers())))
        for name in names:
            assert family.name_in_model(family.name_on_disk(name)) == name
            assert family.name_in_model(family.name_in_transformers(name)) == name


def test_layers_are_ignored_under_every_name_that_they_have(family):
    """A folder that `transformers` 5 wrote ignores them by names that neither the hub nor its modules use."""
    everything = (("Linear",), StoredScheme("int8"))
    for number in range(len(family.all_names("head.weight"))):
        with torch.device("meta"):
            model = VLM(family.sizes["tiny"])
            layers = [name for name, _ in projections(model) if not name.startswith("language.")]
        names = [family.all_names(f"{name}.weight") for name in layers]
        ignore = tuple(one[min(number, len(one) - 1)].removesuffix(".weight") for one in names)
        quantize_storage(model, QuantizationConfig((everything,), ignore), family)
        quantized = {name for name, layer in projections(model) if isinstance(layer, QuantizedLinear)}
        assert quantized
        assert not quantized & set(layers)


def test_sizes_are_named_by_family_and_those_of_the_default_family_without(family):
    for name, config in family.sizes.items():
        assert named_size(name if family is DEFAULT_FAMILY else f"{family.model_type}/{name}") == config
        assert config.family == family.model_type
    assert len(named_sizes()) == sum(len(one.sizes) for one in VISION_LANGUAGE.values())
    with pytest.raises(ConfigError, match="unknown size 'none'"):
        named_size("none")


def test_config_json_says_the_sizes_back(family, tmp_path):
    for config in family.sizes.values():
        token_ids = {name: number for number, name in enumerate(family.vision_tokens)}
        assert family.parse_config(family.describe_config(config, token_ids)) == config


PUBLISHED = {
    "qwen2_vl/2b": {
        "model_type": "qwen2_vl", "attention_dropout": 0.0, "hidden_act": "silu", "hidden_size": 1536,
        "intermediate_size": 8960,
        "max_position_embeddings": 32768, "max_window_layers": 28, "num_attention_heads": 12, "num_hidden_layers": 28,
        "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 32768,
        "tie_word_embeddings": True, "use_sliding_window": False, "vocab_size": 151936,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "vision_config": {
            "depth": 32, "embed_dim": 1280, "mlp_ratio": 4, "num_heads": 16, "in_chans": 3, "hidden_size": 1536,
            "patch_size": 14, "spatial_merge_size": 2, "spatial_patch_size": 14, "temporal_patch_size": 2,
        },
    },
    "qwen3_vl/4b": {
        "model_type": "qwen3_vl", "tie_word_embeddings": True,
        "text_config": {
            "attention_bias": False, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2560,
            "intermediate_size": 9728, "max_position_embeddings": 262144, "model_type": "qwen3_vl_text",
            "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
            "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
            "rope_theta": 5000000, "vocab_size": 151936,
        },
        "vision_config": {
            "deepstack_visual_indexes": [5, 11, 17], "depth": 24, "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": 1024, "in_channels": 3, "intermediate_size": 4096, "model_type": "qwen3_vl",
            "num_heads": 16, "num_position_embeddings": 2304, "out_hidden_size": 2560, "patch_size": 16,
            "spatial_merge_size": 2, "temporal_patch_size": 2,
        },
    },
    "llava_onevision/0.5b": {
        "model_type": "llava_onevision", "ignore_index": -100, "image_token_index": 151646,
        "video_token_index": 151647, "projector_hidden_act": "gelu",
        "image_grid_pinpoints": [[384 * height, 384 * width] for height in range(1, 7) for width in range(1, 7)],
        "tie_word_embeddings": False,
        "text_config": {
            "bos_token_id": 151643, "eos_token_id": 151645, "hidden_size": 896, "intermediate_size": 4864,
            "max_window_layers": 24, "model_type": "qwen2", "num_attention_heads": 14, "num_hidden_layers": 24,
            "num_key_value_heads": 2, "rope_theta": 1000000.0, "tie_word_embeddings": True, "vocab_size": 152000,
        },
        "use_image_newline_parameter": True, "vision_aspect_ratio": "anyres_max_9", "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
        "vision_config": {
            "hidden_size": 1152, "image_size": 384, "intermediate_size": 4304, "model_type": "siglip_vision_model",
            "num_attention_heads": 16, "num_hidden_layers": 26, "patch_size": 14, "vision_use_head": False,
        },
    },
    "llava_onevision/7b": {
        "model_type": "llava_onevision",
        "text_config": {
            "hidden_size": 3584, "intermediate_size": 18944, "model_type": "qwen2", "num_attention_heads": 28,
            "num_hidden_layers": 28, "num_key_value_heads": 4, "rope_theta": 1000000.0, "vocab_size": 152128,
        },
    },
}  # fmt: skip
"""Published configs: sparse, with the decoder at the top level in the oldest family; one relies on all defaults."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_the_named_size(name):
    raw = PUBLISHED[name]
    config = VISION_LANGUAGE[raw["model_type"]].parse_config(raw)
    assert config == named_size(name)


SPARSE = {
    "nothing": {},
    "defaults of text and tower": {
        "text_config": {"intermediate_size": 100, "num_hidden_layers": 3},
        "vision_config": {"spatial_merge_size": 1},
    },
    "heads under their other name": {"vision_config": {"num_attention_heads": 8, "depth": 27}},
    "scaling and parameters": {
        "text_config": {"rope_scaling": {"rope_theta": 3e6}, "rope_parameters": {"rope_theta": 7.0}},
    },
}  # fmt: skip


@pytest.mark.parametrize("name", SPARSE)
@pytest.mark.parametrize("model_type", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_what_a_config_does_not_say_is_the_default_of_transformers(model_type, name):
    raw, default = copy.deepcopy(SPARSE[name]), {"mrope_section": [16, 24, 24]}
    theirs = CLASSES[model_type][0].from_dict(copy.deepcopy(raw))
    ours, text, vision = VISION_LANGUAGE[model_type].parse_config(raw), theirs.text_config, theirs.vision_config
    language, tower = ours.language, ours.vision
    assert (language.vocab_size, language.hidden_size, language.num_layers) == (
        text.vocab_size,
        text.hidden_size,
        text.num_hidden_layers,
    )
    assert (language.num_heads, language.num_kv_heads) == (text.num_attention_heads, text.num_key_value_heads)
    assert (language.intermediate_size, language.norm_eps) == (text.intermediate_size, text.rms_norm_eps)
    assert language.max_positions == text.max_position_embeddings
    assert language.rope_theta == text.rope_parameters["rope_theta"]
    if model_type != "qwen3_vl":
        assert list(language.rope_sections) == (default | text.rope_parameters)["mrope_section"]
    assert (tower.num_layers, tower.num_heads) == (vision.depth, vision.num_heads)
    assert (tower.patch_size, tower.merge_size) == (vision.patch_size, vision.spatial_merge_size)
    if model_type != "qwen2_vl":
        assert (tower.hidden_size, tower.intermediate_size) == (vision.hidden_size, vision.intermediate_size)


def test_full_attention_in_blocks_that_a_tower_does_not_have_is_ignored():
    """The default names blocks up to 31."""
    config = VISION_LANGUAGE["qwen2_5_vl"].parse_config({"vision_config": {"depth": 16}})
    assert config.vision.full_attention_layers == (7, 15)


def test_a_head_tied_in_the_text_config_alone_counts_where_transformers_counts_it():
    tied_inside = {}
    for name in PUBLISHED:
        raw = PUBLISHED[name] | {"tie_word_embeddings": False}
        raw["text_config"] = dict(raw.get("text_config", raw)) | {"tie_word_embeddings": True}
        tied_inside[name] = VISION_LANGUAGE[raw["model_type"]].parse_config(raw).tied_head
    assert tied_inside == {
        "qwen2_vl/2b": True,
        "qwen3_vl/4b": False,
        "llava_onevision/0.5b": True,
        "llava_onevision/7b": True,
    }


@pytest.mark.parametrize(
    ("name", "part", "change", "message"),
    [
        ("qwen2_vl/2b", "vision_config", {"hidden_act": "gelu"}, "hidden_act is 'gelu'; only 'quick_gelu'"),
        ("qwen2_vl/2b", "vision_config", {"hidden_size": 1280}, "hidden_size is 1280; only 1536"),
        ("qwen3_vl/4b", "text_config", {"attention_bias": True}, "attention_bias is True"),
        ("qwen3_vl/4b", "vision_config", {"deepstack_visual_indexes": [11, 5]}, "must ascend"),
        ("qwen3_vl/4b", "vision_config", {"num_position_embeddings": 2300}, "no square"),
        (
            "llava_onevision/0.5b", "vision_config", {"hidden_act": "gelu"},
            "hidden_act is 'gelu'; only 'gelu_pytorch_tanh'",
        ),
        (
            "llava_onevision/0.5b", "vision_config", {"model_type": "clip_vision_model"},
            "model_type is 'clip_vision_model'",
        ),
        ("llava_onevision/0.5b", "vision_config", {"image_size": 336}, "not made of whole tiles of 336"),
        ("llava_onevision/0.5b", "vision_config", {"patch_size": 400}, "do not fit tiles of 384"),
        ("llava_onevision/0.5b", "text_config", {"use_sliding_window": True}, "use_sliding_window is True"),
        ("qwen3_vl/4b", "vision_config", {"rope_parameters": {"rope_theta": 5000.0}}, "rope_theta is 5000.0"),
        ("qwen3_vl/4b", "vision_config", {"rope_theta": 5000.0}, "rope_theta is 5000.0"),
        (
            "qwen3_vl/4b", "text_config",
            {"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"rope_type": "yarn"}},
            "'yarn' is not supported",
        ),
        ("llava_onevision/0.5b", "text_config", {"rope_scaling": {"type": "mrope"}}, "'mrope' is not supported"),
    ],
)  # fmt: skip
def test_settings_that_are_not_supported_are_refused(name, part, change, message):
    raw = PUBLISHED[name]
    with pytest.raises((CheckpointError, ConfigError), match=message):
        VISION_LANGUAGE[raw["model_type"]].parse_config(raw | {part: raw[part] | change})
