"""Building a vision-language model on a text model: on text alone it gives the text model's logits."""

import json

import pytest
import torch
from closeness import assert_close
from model.hugging_face import CONVERSATIONS, ask, picture
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from saccade.errors import CheckpointError, ConfigError
from saccade.model import generate, load_model
from saccade.model.initialize import initialize_from_text, initialize_random, named_size, random_tensor
from saccade.model.text_files import byte_tokenizer
from saccade.processor import Processor

SIZES = {
    "vocab_size": 280,
    "hidden_size": 192,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
}
TEXT_MODELS = {
    "llama-untied": (
        LlamaForCausalLM, LlamaConfig,
        {"tie_word_embeddings": False, "rope_parameters": {"rope_type": "default", "rope_theta": 5e4}},
    ),
    "llama-tied": (LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": True}),
    "qwen2-tied": (Qwen2ForCausalLM, Qwen2Config, {"tie_word_embeddings": True}),
    "qwen2-untied-sharded": (Qwen2ForCausalLM, Qwen2Config, {"tie_word_embeddings": False}),
}  # fmt: skip


def make_text_checkpoint(folder, name):
    model_class, config_class, options = TEXT_MODELS[name]
    words = byte_tokenizer()
    torch.manual_seed(7)
    model = model_class(config_class(**SIZES, **options, bos_token_id=None, eos_token_id=words.eos_ids[0])).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(folder, max_shard_size="200KB" if "sharded" in name else "5GB")
    (folder / "tokenizer.json").write_text(json.dumps(words.tokenizer))
    (folder / "chat_template.jinja").write_text(words.template)
    return folder


@pytest.fixture(scope="module", params=TEXT_MODELS)
def text(request, tmp_path_factory):
    return make_text_checkpoint(tmp_path_factory.mktemp("text") / "checkpoint", request.param)


@pytest.fixture(scope="module")
def folder(text, tmp_path_factory):
    built = tmp_path_factory.mktemp("vlm") / "checkpoint"
    initialize_from_text(built, text, "tiny", dtype=torch.float32)
    return built


def test_text_logits_equal_those_of_the_text_model(text, folder):
    inputs = Processor.load(folder)([CONVERSATIONS["text-only"]])
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(text)(inputs.token_ids[None]).logits[0]
        ours = load_model(folder, device="cpu")(inputs)
    assert_close("logits", ours[:, : theirs.shape[1]], theirs, 1e-4)


def test_the_text_models_own_template_stays_verbatim_and_images_find_their_place(text, folder):
    processor = Processor.load(folder)
    assert (folder / "chat_template.jinja").read_text().endswith((text / "chat_template.jinja").read_text())
    rendered = processor.tokenizer.decode(
        processor([[ask("x", picture(56, 56), "y")]]).token_ids.tolist(), skip_special=False
    )
    assert (
        "user\nx<|vision_start|><|image_pad|><|image_pad|><|image_pad|><|image_pad|><|vision_end|>y<|im_end|>"
        in rendered
    )
    inputs = processor([[ask(picture(90, 60), "What?")]], add_generation_prompt=True)
    assert len(generate(load_model(folder, device="cpu"), inputs, max_new_tokens=3)[0]) == 3


def test_an_embedding_that_is_too_small_grows_by_the_mean_of_its_rows_to_an_aligned_size(tmp_path):
    text = make_text_checkpoint(tmp_path / "text", "qwen2-tied")
    tokenizer = json.loads((text / "tokenizer.json").read_text())
    tokenizer["added_tokens"] += [
        {
            "id": i,
            "content": f"<|extra{i}|>",
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for i in range(259, 280)
    ]
    (text / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = initialize_from_text(tmp_path / "vlm", text, "tiny", dtype=torch.float32)
    assert config.language.vocab_size == 320
    embedding = load_model(tmp_path / "vlm", device="cpu").language.embed_tokens.weight
    assert torch.allclose(embedding[280:], embedding[:280].mean(0).expand(40, -1), atol=1e-6)
    assert Processor.load(tmp_path / "vlm").rules.image_id == 280


def test_random_weights_depend_on_seed_and_name_alone(tmp_path):
    for folder, shard, seed in (("a", 2**31, 0), ("b", 150_000, 0), ("c", 2**31, 1)):
        initialize_random(tmp_path / folder, named_size("tiny"), seed=seed, max_shard_bytes=shard)
    a, b, c = (dict(load_model(tmp_path / name, device="cpu").named_parameters()) for name in "abc")
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not torch.equal(a["language.layers.0.mlp.up_proj.weight"], c["language.layers.0.mlp.up_proj.weight"])
    weight = random_tensor("some.weight", (400, 500), seed=3)
    assert abs(weight.std() - 0.02) < 2e-4
    assert abs(weight.mean()) < 2e-4


def edit(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "text models of model_type 'gpt2' are not supported. Supported: qwen2, llama"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}, "rope_parameters": None}, "llama3"),
        ({"attention_bias": True}, "attention_bias"),
        ({"head_dim": 32}, "head_dim"),
        ({"num_hidden_layers": 3}, "missing language.layers.2"),
        ({"num_hidden_layers": 1}, "surplus model.layers.1"),
        ({"intermediate_size": 161}, "expected"),
    ],
)
def test_text_models_we_cannot_build_on_are_refused_and_nothing_is_left(tmp_path, changes, message):
    text = make_text_checkpoint(tmp_path / "text", "llama-tied")
    edit(text, **changes)
    with pytest.raises(CheckpointError, match=message):
        initialize_from_text(tmp_path / "vlm", text, "tiny")
    assert [path.name for path in tmp_path.iterdir()] == ["text"]


def test_a_tokenizer_larger_than_the_embedding_is_refused(tmp_path):
    from saccade.config import override_config

    small = override_config(named_size("tiny"), ["language.vocab_size=260"], "size tiny")
    with pytest.raises(ConfigError, match="263 tokens, the model an embedding of 260"):
        initialize_random(tmp_path / "x", small)


def test_not_a_gguf_file_is_refused(tmp_path):
    (tmp_path / "fake.gguf").write_bytes(b"GGUF" + b"\0" * 100)
    with pytest.raises(CheckpointError, match="not a readable GGUF file"):
        initialize_from_text(tmp_path / "vlm", tmp_path / "fake.gguf", "tiny")


def test_a_model_larger_than_the_disk_is_refused_before_anything_is_made(tmp_path):
    from saccade.config import override_config

    vast = override_config(named_size("72b"), ["language.num_layers=2", "language.vocab_size=10000000000"], "size 72b")
    with pytest.raises(CheckpointError, match=r"GiB free. Choose another disk"):
        initialize_random(tmp_path / "vast", vast)
    assert list(tmp_path.iterdir()) == []


def test_everything_wrong_with_a_text_models_tensors_is_named_before_anything_is_written(tmp_path):
    text = make_text_checkpoint(tmp_path / "text", "llama-untied")
    tensors = load_file(text / "model.safetensors")
    del tensors["model.norm.weight"], tensors["model.layers.1.mlp.up_proj.weight"]
    tensors |= {"visual.norm.weight": torch.zeros(3), "model.layers.0.mlp.down_proj.weight": torch.zeros(2, 2)}
    save_file(tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}, text / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        initialize_from_text(tmp_path / "vlm", text, "tiny")
    for part in (
        "missing language.norm.weight",
        "missing language.layers.1.mlp.up_proj.weight",
        "surplus visual.norm.weight",
        "down_proj.weight is [2, 2], expected [192, 160]",
    ):
        assert part in str(caught.value)
    assert "inv_freq" not in str(caught.value)


def test_a_tied_text_model_with_another_head_is_refused(tmp_path):
    text = make_text_checkpoint(tmp_path / "text", "llama-untied")
    edit(text, tie_word_embeddings=True)
    with pytest.raises(CheckpointError, match="differs from the embedding"):
        initialize_from_text(tmp_path / "vlm", text, "tiny")


def test_the_templates_names_for_the_first_and_last_token_come_along(tmp_path):
    text = make_text_checkpoint(tmp_path / "text", "llama-tied")
    (text / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<|endoftext|>", "eos_token": {"content": "<|im_end|>"}})
    )
    (text / "chat_template.jinja").write_text(
        "{{ bos_token }}{% if tools is not none %}tools{% endif %}{{ messages[0].content }}{{ eos_token }}"
    )
    initialize_from_text(tmp_path / "vlm", text, "tiny")
    processor = Processor.load(tmp_path / "vlm")
    ids = processor([[{"role": "user", "content": "hi"}]]).token_ids.tolist()
    assert processor.tokenizer.decode(ids, skip_special=False) == "<|endoftext|>hi<|im_end|>"
