"""An adapter merged into its base model: merged = served = PEFT's own merge; what cannot be merged is refused."""

import json
import shutil

import pytest
import torch
from engine.making_adapters import SETTINGS, write_adapters
from model.hugging_face import SHAPES, make_checkpoint, picture
from safetensors.torch import load_file

from saccade.engine import Engine, EngineConfig, RequestOptions, SamplingParams
from saccade.model import load_model
from saccade.model.weights import PROCESSOR_FILES

CONFIG = EngineConfig(num_workers=0, num_pages=100, max_length=400, max_adapters=1)
CONVERSATIONS = [
    [{"role": "user", "content": "Hello, who are you?"}],
    [{"role": "user", "content": [{"type": "image", "image": picture(90, 60)}, {"type": "text", "text": "What?"}]}],
]
VISION = {
    "r": 4,
    "lora_alpha": 8,
    "target_modules": r".*(visual.*(qkv|merger\.mlp\.0)|language_model.*down_proj)",
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("base") / "model", SHAPES[1])


@pytest.fixture(scope="module")
def adapters(base, tmp_path_factory):
    """Adapters by name, each with PEFT's merge in NAME-merged."""
    settings = {name: SETTINGS[name] for name in ("everything", "attention")} | {"vision": VISION}
    return write_adapters(base, tmp_path_factory.mktemp("adapters"), **settings)


@pytest.mark.parametrize("name", ["everything", "attention", "vision"])
def test_a_merged_checkpoint_equals_what_peft_merges(command, base, adapters, tmp_path, name):
    ended = command("merge", adapters[name], "-o", tmp_path / "merged", "--base", base, "--json")
    assert ended.status == 0, ended.err
    assert json.loads(ended.out)["layers"] == len(load_file(adapters[name] / "adapter_model.safetensors")) // 2
    ours, theirs, before = (
        load_model(folder, device="cpu").state_dict()
        for folder in (tmp_path / "merged", adapters[name].with_name(f"{name}-merged"), base)
    )
    assert any(not torch.equal(ours[key], before[key]) for key in ours)
    for key, value in theirs.items():
        torch.testing.assert_close(ours[key], value, rtol=1e-5, atol=1e-6)
    for file in PROCESSOR_FILES:
        assert (tmp_path / "merged" / file).exists() == (base / file).exists()


def test_a_merged_checkpoint_answers_as_the_served_adapter(command, base, adapters, tmp_path):
    command("merge", adapters["everything"], "-o", tmp_path / "merged", "--base", base)
    greedy = SamplingParams(max_tokens=8, logprobs=1, ignore_eos=True)
    with Engine.load(base, device="cpu", config=CONFIG, adapters={"one": adapters["everything"]}) as engine:
        served = engine.generate(CONVERSATIONS, greedy, options=RequestOptions(adapter="one"))
        plain = engine.generate(CONVERSATIONS, greedy)
    with Engine.load(tmp_path / "merged", device="cpu", config=CONFIG) as engine:
        merged = engine.generate(CONVERSATIONS, greedy)
    assert [one.token_ids for one in merged] == [one.token_ids for one in served] != [one.token_ids for one in plain]
    for a, b in zip(merged, served, strict=True):
        torch.testing.assert_close(
            torch.tensor([x.logprob for x in a.logprobs]), torch.tensor([x.logprob for x in b.logprobs]), rtol=1e-3,
            atol=1e-3
        )  # fmt: skip


def test_the_base_is_the_one_that_the_adapter_names(command, base, adapters, tmp_path, monkeypatch):
    adapter = shutil.copytree(adapters["attention"], tmp_path / "adapter")
    shutil.copytree(base, tmp_path / "model")

    def name_base(name):
        config = json.loads((adapter / "adapter_config.json").read_text()) | {"base_model_name_or_path": name}
        (adapter / "adapter_config.json").write_text(json.dumps(config))

    monkeypatch.chdir(tmp_path)
    name_base("model")
    ended = command("merge", "adapter", "-o", "merged")
    assert ended.status == 0, ended.err
    assert (tmp_path / "merged" / "config.json").is_file()
    for name, expected in (("elsewhere/on/disk", "elsewhere/on/disk is not here"), (None, "names no base model")):
        name_base(name)
        ended = command("merge", "adapter", "-o", "again")
        assert ended.status == 2
        assert expected in ended.err
        assert "--base" in ended.err


def test_what_cannot_be_merged_is_refused_and_nothing_is_written(command, base, adapters, tmp_path):
    other = make_checkpoint(tmp_path / "other", SHAPES[0])
    quantized = shutil.copytree(base, tmp_path / "quantized")
    assert command("compress", base, "--scheme", "int8", "-o", tmp_path / "int8", "--device", "cpu").status == 0
    adapter, out = adapters["everything"], tmp_path / "out"
    for words, expected in (
        ((adapter, "-o", out, "--base", other), "Use the adapter with the model it was trained on"),
        ((adapter, "-o", quantized, "--base", base), "exists and is not empty"),
        ((adapter, "-o", out, "--base", tmp_path / "int8"), "its weights are quantized"),
        ((base, "-o", out, "--base", base), "no adapter_config.json"),
        ((adapter, "-o", out, "--base", tmp_path / "nowhere"), "nowhere"),
    ):
        ended = command("merge", *words)
        assert ended.status == 2, ended
        assert expected in ended.err
        assert len(ended.err.strip().splitlines()) == 1
        assert not out.exists()
