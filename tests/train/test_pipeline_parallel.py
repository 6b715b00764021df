"""Pipeline parallel = one device: losses, gradients and weights of runs whose layers are divided over ranks."""

import dataclasses
import json
from itertools import product

import pytest
import torch
from safetensors.torch import load_file
from train.recorded import FEW, LORA, MODELS, norm, run_cases
from train.recorded import STEPS as TEN_STEPS
from train.running import losses, read_recipe, run_together, write_recipe, write_shards

from saccade.errors import ConfigError
from saccade.model.families import named_size
from saccade.model.initialize import initialize_random
from saccade.model.vlm import VLM
from saccade.train.dry_run import MicroBatchSize
from saccade.train.parallel_config import ParallelConfig
from saccade.train.pipeline import check_pipeline
from saccade.train.pipeline_schedule import Pass, plan_schedule, split_layers
from saccade.train.pipeline_stages import pipeline_stages
from saccade.train.stages import train

INTERLEAVED = "parallel.pipeline_schedule=interleaved"
ZERO_BUBBLE = "parallel.pipeline_schedule=zero-bubble"
LAYOUTS = {
    "pipeline 4": ["parallel.pipeline=4"],
    "pipeline 4 interleaved": ["parallel.pipeline=4", INTERLEAVED],
    "pipeline 4 zero-bubble": ["parallel.pipeline=4", ZERO_BUBBLE],
    "pipeline 2 zero-bubble x replicate 2": [
        "parallel.pipeline=2",
        "parallel.replicate=2",
        "parallel.shard=1",
        ZERO_BUBBLE,
    ],
    "pipeline 2 zero-bubble x tensor 2": ["parallel.pipeline=2", "parallel.tensor=2", ZERO_BUBBLE],
    "pipeline 4, fsdp": ["parallel.pipeline=4", "parallel.strategy=fsdp", "parallel.reduce_each_micro_batch=false"],
    "pipeline 2 x shard 2": ["parallel.pipeline=2", "parallel.shard=2"],
    "pipeline 2 interleaved x shard 2": ["parallel.pipeline=2", "parallel.shard=2", INTERLEAVED],
    "pipeline 2 x replicate 2": ["parallel.pipeline=2", "parallel.replicate=2", "parallel.shard=1"],
    "pipeline 2 x tensor 2": ["parallel.pipeline=2", "parallel.tensor=2"],
    "pipeline 2 x context 2": ["parallel.pipeline=2", "parallel.context=2"],
    "pipeline 2 x context 2, ddp": ["parallel.pipeline=2", "parallel.context=2", "parallel.strategy=ddp"],
}
SETTINGS = {
    "full": [],
    "recompute": ["parallel.recompute_language=full", "parallel.recompute_vision=selective"],
    "lora": LORA,
}
CASES = [("pipeline 2 interleaved x shard 2", "qwen3_vl", "recompute")]
"""The layout of `make test`; the others are slow."""


def deep(size):
    """A tiny model with layers for several stages."""
    config = named_size(size)
    return dataclasses.replace(config, language=dataclasses.replace(config.language, num_layers=8))


def test_runs_with_pipeline_ranks_equal_one_device(tmp_path):
    """Stages with tower, embedding and a tied head; features for several layers; sequences of all sizes."""
    run_cases(tmp_path, CASES, LAYOUTS, SETTINGS, make=deep, steps=[*TEN_STEPS, *FEW])


@pytest.mark.slow
def test_a_run_resumes_on_pipelines_of_two_layouts_and_ends_on_one_device(tmp_path):
    checkpoint, shards = tmp_path / "checkpoint", write_shards(tmp_path / "toy", text_every=2)
    initialize_random(checkpoint, deep("tiny"), dtype=torch.float32)
    recipes = {
        name: write_recipe(tmp_path / f"{name}.toml", run=tmp_path / name, checkpoint=checkpoint, shards=shards)
        for name in ("one", "many")
    }
    settings = [
        "stages.0.ema_decay=0.9",
        "stages.0.schedule.warmup_steps=1",
        "stages.0.data.global_batch_size=4",
        "validation.every=2",
        f"validation.sources=[{{path='{shards}'}}]",
        "validation.num_samples=9",
        "validation.num_generations=1",
    ]
    for name, steps in (("one", 6), ("many", 2)):
        train(read_recipe(recipes[name], *settings, f"stages.0.steps={steps}"), device="cpu")
    layouts = ["pipeline 4 interleaved", "pipeline 2 x tensor 2"]
    jobs = [
        {"recipe": str(recipes["many"]), "set": [*settings, f"stages.0.steps={steps}", *LAYOUTS[layout]]}
        for steps, layout in zip((3, 5), layouts, strict=True)
    ]
    run_together(jobs, tmp_path, num_ranks=4)
    train(read_recipe(recipes["many"], *settings, "stages.0.steps=6"), device="cpu")
    assert losses(tmp_path / "many") == pytest.approx(losses(tmp_path / "one"), abs=1e-5)
    validated = [validation_losses(tmp_path / name) for name in ("many", "one")]
    assert [validated[0][step] for step in (2, 4, 6)] == pytest.approx([*validated[1].values()], abs=1e-5)
    initial = load_file(checkpoint / "model.safetensors")
    ours, theirs = (
        load_file(tmp_path / run / "checkpoints/step-00000006/model.safetensors") for run in ("many", "one")
    )
    updates = norm({name: weight - initial[name] for name, weight in theirs.items()})
    assert norm({name: ours[name] - weight for name, weight in theirs.items()}) < 0.01 * updates


def validation_losses(run):
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["validation"]["loss"] for line in lines if "validation" in line}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_runs_with_pipeline_ranks_equal_one_device(layout, tmp_path):
    cases = [
        (layout, model, settings)
        for model, settings in product(MODELS, SETTINGS)
        if not (settings == "recompute" and "zero-bubble" in layout)
    ]
    run_cases(tmp_path, cases, LAYOUTS, SETTINGS, make=deep, steps=TEN_STEPS)


# ------------------------------------------------------------------ decisions


@pytest.mark.parametrize("num_chunks", [1, 2, 3])
def test_a_schedule_runs_every_pass_once_waits_as_little_as_possible_and_holds_few_activations(num_chunks):
    """With fewer micro-batches than ranks it only has to end; a plan in which ranks wait for each other fails."""
    for num_ranks, num_batches in product((2, 3, 4, 8), range(1, 20)):
        schedule = plan_schedule(num_ranks, num_chunks, num_batches)
        every = {Pass(*one) for one in product((True, False), range(num_chunks), range(num_batches))}
        for rank, passes in enumerate(schedule.passes):
            assert set(passes) == every
            assert len(passes) == len(every)
            held = [sum(1 if one.is_forward else -1 for one in passes[:number]) for number in range(len(passes) + 1)]
            if num_chunks == 1:
                assert max(held) == min(num_ranks - rank, num_batches), "1F1B"
        if num_batches >= num_ranks:
            ramp = (num_ranks - 1) / num_chunks
            assert schedule.bubble == pytest.approx(ramp / (num_batches + ramp))


def test_gradients_of_weights_fill_the_time_in_which_ranks_would_wait():
    """The bubble is the least for passes that take equally long, with no more activations than the first rank's."""
    for num_ranks, num_batches in product((2, 3, 4, 8), range(1, 20)):
        schedule, plain = (plan_schedule(num_ranks, 1, num_batches, defers_weights=defers) for defers in (True, False))
        for rank, passes in enumerate(schedule.passes):
            assert [one for one in passes if not one.is_of_weights] == list(plain.passes[rank])
            backward = [one for one in plain.passes[rank] if not one.is_forward]
            weights = [one._replace(is_of_weights=True) for one in backward]
            assert [one for one in passes if one.is_of_weights] == weights
            held = 0
            for number, one in enumerate(passes):
                held += one.is_forward - one.is_of_weights
                assert held <= num_ranks
                if one.is_of_weights:
                    assert one._replace(is_of_weights=False) in passes[:number]
        if num_batches >= num_ranks:
            assert schedule.bubble == pytest.approx((num_ranks - 1) / (3 * num_batches + num_ranks - 1))
        assert schedule.duration <= plain.duration


def test_messages_between_two_ranks_are_expected_in_the_order_in_which_they_are_sent():
    for num_ranks, num_chunks, num_batches in product((2, 4), (1, 2, 3), (1, 3, 4, 7, 8)):
        passes = plan_schedule(num_ranks, num_chunks, num_batches).passes
        for is_forward in (True, False):
            orders = [[one for one in of_rank if one.is_forward == is_forward] for of_rank in passes]
            assert all(order == orders[0] for order in orders), "the same on all ranks"
        forwards = [one for one in passes[0] if one.is_forward]
        sent = [one._replace(chunk=one.chunk + 1) for one in forwards if one.chunk + 1 < num_chunks]
        assert sent == [one for one in forwards if one.chunk > 0], "from the last rank to the first"


def test_stages_are_split_by_cost_and_the_tower_counts(stage):
    assert split_layers(0, [1] * 8, 0, 4) == (0, 2, 4, 6, 8)
    assert split_layers(2, [1] * 9, 1, 4) == (0, 1, 4, 7, 9)
    assert split_layers(9, [1] * 6, 0, 4) == (0, 0, 2, 4, 6), "a tower alone"
    many_patches = stage("stages.0.data.max_patches=4096")
    found = [stages_of(many_patches, pipeline_layers=layers) for layers in (None, (1, 3, 3, 1))]
    assert [stages.bounds for stages in found] == [(0, 0, 3, 6, 8), (0, 1, 4, 7, 8)]
    assert sum(found[0].costs) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("parallel", "words"),
    [
        ({"pipeline_schedule": "interleaved", "pipeline_chunks": 3}, "8 layers cannot be divided over 12 pipeline st"),
        ({"pipeline_layers": (4, 4)}, "pipeline_layers has 2 stages with 8 layers, the pipeline has 4 stages and"),
        ({"pipeline_layers": (4, 0, 2, 2)}, "only the first and the last stage may have no layer"),
    ],
)
def test_stages_that_are_impossible_are_refused(parallel, words, stage):
    with pytest.raises(ConfigError, match=words):
        stages_of(stage(), **parallel)


@pytest.mark.parametrize(
    ("settings", "parallel", "words"),
    [
        (["stages.0.objective.dpo={}"], {}, "objective.dpo runs a second model"),
        ([], {"strategy": "ddp", "compress_gradients": "bf16"}, "a pipeline averages gradients itself"),
        ([], {"pipeline_schedule": "zero-bubble"}, "later, and fsdp reduces the gradients of a block at once"),
        ([], {"strategy": "ddp", "pipeline_schedule": "zero-bubble", "compile": True}, "later, and compile generates"),
        (
            [],
            {"strategy": "ddp", "pipeline_schedule": "zero-bubble", "recompute_language": "full"},
            "later, and keeps the activations that recompute frees",
        ),
    ],
)
def test_settings_that_a_pipeline_does_not_have_are_refused(settings, parallel, words, stage):
    with pytest.raises(ConfigError, match=words):
        check_pipeline(stage(*settings), ParallelConfig(pipeline=4, **parallel), is_sharded="strategy" not in parallel)


def stages_of(stage, **parallel):
    with torch.device("meta"):
        model = VLM(deep("tiny"))
    size = MicroBatchSize(tokens=stage.data.max_seq_len, patches=stage.data.max_patches)
    return pipeline_stages(model, size, ParallelConfig(pipeline=4, **parallel), 4)


@pytest.fixture
def stage(tmp_path):
    """A stage of a recipe with settings, without its data."""
    recipe = write_recipe(tmp_path / "recipe.toml", run=tmp_path / "run", checkpoint=tmp_path, shards=tmp_path)
    return lambda *settings: read_recipe(recipe, *settings).stages[0]
