"""Tensor parallel = one device: losses, gradients and weights of runs whose matrices are divided over ranks."""

import json
from dataclasses import replace

import pytest
import torch
from model import hugging_face
from safetensors.torch import load_file
from train.recorded import FEW, LORA, MODELS, norm, run_cases
from train.running import losses, make_checkpoint, read_recipe, run_together, write_recipe, write_shards

from saccade.errors import ConfigError
from saccade.model.families import named_size
from saccade.model.shard import TensorRank
from saccade.model.vlm import VLM
from saccade.train import train
from saccade.train.parallelize import build_model
from saccade.train.tensor_images import _places, _rows
from saccade.train.tensor_parallel import divide_model

LAYOUTS = {
    "tensor 4": ["parallel.tensor=4"],
    "tensor 2 x shard 2": ["parallel.tensor=2", "parallel.shard=2"],
    "tensor 2 x replicate 2": ["parallel.tensor=2", "parallel.strategy=ddp"],
    "tensor 2 x context 2": ["parallel.tensor=2", "parallel.context=2"],
}
ALL_LORA = [LORA[0].replace("'q_proj', 'v_proj', 'down_proj'", "'q_proj', 'k_proj', 'o_proj', 'up_proj', 'down_proj'")]
QAT = "stages.0.qat={form='int4', group_size=32, parts=['language']}"
"""Weights alone: sums in another order would round a few 8-bit activations to a neighbouring value."""
SETTINGS = {
    "full": [],
    "recompute": ["parallel.recompute_language=full", "parallel.recompute_vision=selective"],
    "lora": ALL_LORA,
    "qlora": [ALL_LORA[0].replace("rank=4", "rank=4, quantize_base='int8'")],
    "qat": [QAT],
}
CASES = [("tensor 4", "qwen2_5_vl", "full")]
"""The layout of `make test`; the others are slow."""
STEPS = ["stages.0.steps=10", "stages.0.data.global_batch_size=3"]
"""On two parts of the data, one has two micro-batches and the other one and an empty one."""
PAIRS = [
    (layout, list(MODELS)[(first + second) % len(MODELS)], settings)
    for first, layout in enumerate(LAYOUTS)
    for second, settings in enumerate(SETTINGS)
]
"""Every pair of a layout, a model and settings."""


def test_runs_with_tensor_ranks_equal_one_device(tmp_path):
    """Two key/value heads on four ranks; text-only sequences, images of several sizes, empty micro-batches."""
    run_cases(tmp_path, CASES, LAYOUTS, SETTINGS, steps=[*STEPS, *FEW])


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_pair_of_layout_model_and_settings_equals_one_device(layout, tmp_path):
    run_cases(tmp_path, [case for case in PAIRS if case[0] == layout], LAYOUTS, SETTINGS, steps=STEPS)


@pytest.mark.slow
def test_a_run_resumes_on_other_layouts_in_the_middle_of_an_epoch(tmp_path):
    """A state of tensor 2 x shard 2 is loaded by four shards, theirs by four tensor ranks, and theirs by one device."""
    checkpoint = make_checkpoint(tmp_path / "checkpoint")
    shards = write_shards(tmp_path / "shards", text_every=2)
    settings = ["stages.0.ema_decay=0.9", "stages.0.data.global_batch_size=4"]
    recipes = {
        name: write_recipe(tmp_path / f"{name}.toml", run=tmp_path / name, checkpoint=checkpoint, shards=shards)
        for name in ("one", "many")
    }
    train(read_recipe(recipes["one"], *settings, "stages.0.steps=6"), device="cpu")
    layouts = [["parallel.tensor=2", "parallel.shard=2"], ["parallel.shard=4"], ["parallel.tensor=4"]]
    jobs = [
        {"recipe": str(recipes["many"]), "set": [*settings, f"stages.0.steps={steps}", *layout]}
        for steps, layout in zip((3, 4, 5), layouts, strict=True)
    ]
    run_together(jobs, tmp_path, num_ranks=4)
    train(read_recipe(recipes["many"], *settings, "stages.0.steps=6"), device="cpu")
    assert losses(tmp_path / "many") == pytest.approx(losses(tmp_path / "one"), abs=1e-5)
    initial = load_file(checkpoint / "model.safetensors")
    ours, theirs = (load_file(tmp_path / run / "checkpoints/step-00000006/model.safetensors") for run in recipes)
    updates = norm({name: weight - initial[name] for name, weight in theirs.items()})
    assert norm({name: ours[name] - weight for name, weight in theirs.items()}) < 0.01 * updates


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["stages.0.optimizer.kind=muon"], "muon needs whole matrices"),
        (["stages.0.objective.label_smoothing=0.1"], "label_smoothing needs the logits of the whole vocabulary"),
        (["stages.0.qat={form='int4', parts=['language']}"], "no whole groups of 128"),
    ],
)
def test_settings_that_need_whole_matrices_are_refused(settings, words, tmp_path):
    checkpoint = make_checkpoint(tmp_path / "checkpoint")
    recipe = write_recipe(tmp_path / "recipe.toml", run=tmp_path / "run", checkpoint=checkpoint, shards=tmp_path)
    stage = read_recipe(recipe, *settings).stages[0]
    with pytest.raises(ConfigError, match=words):
        build_model(checkpoint, stage, "none", "fp32", TensorRank(0, 2))


def test_a_number_of_ranks_that_does_not_divide_evenly_is_refused():
    """Every rank holds an equal part of a saved state, so that any number of ranks can load it."""
    config = named_size("tiny")
    with torch.device("meta"):
        model = VLM(replace(config, language=replace(config.language, vocab_size=328)))
    with pytest.raises(ConfigError, match=r"^language.embed_tokens: 328 channels cannot be divided evenly over 2 "):
        divide_model(model, TensorRank(0, 2))


def test_images_are_divided_by_cost_and_their_features_are_in_reading_order():
    tokens, owners = [3, 1, 2, 1], [0, 1, 1, 0]
    rows = {0: [*range(10, 13), 60], 1: [30, 40, 41]}
    padded = rows[0] + rows[1] + [None]
    assert [padded[place] for place in _places(tokens, owners, 4)] == [10, 11, 12, 30, 40, 41, 60]
    assert _rows(tokens, [1, 3]) == [3, 6]


@pytest.mark.gpu
def test_two_ranks_on_one_gpu_compute_the_gradients_of_one(tmp_path):
    """With the kernels of a GPU: equal in fp32; in bf16 no further from fp32 than one device is, within a factor."""
    folder = hugging_face.make_checkpoint(tmp_path / "model", hugging_face.SHAPES[1])
    run_together(
        [
            {
                "call": "train.tensor_on_gpu:compare",
                "folder": str(folder),
                "device": "cuda",
                "to": str(tmp_path / "found"),
            }
        ],
        tmp_path,
        num_ranks=2,
    )
    found = json.loads((tmp_path / "found.0").read_text())
    for dtype, loss_bound in (("fp32", 1e-5), ("bf16", 1e-2)):
        ours, theirs = found[dtype]["losses"]
        assert ours == pytest.approx(theirs, rel=loss_bound)
    assert max(found["fp32"]["errors"].values()) < 1e-4
    for name, error in found["bf16"]["errors"].items():
        assert error < 2.0 * found["bf16"]["rounding"][name] + 1e-3, name
