"""Every recipe can be read, and fits the GPU it says it is for."""

from pathlib import Path

import pytest

from saccade.config import load_config
from saccade.model.initialize import named_size
from saccade.train.config import TrainConfig
from saccade.train.memory_planner import gpu_gib, stage_planner

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.toml"))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_loads(recipe):
    config = load_config(TrainConfig, recipe)
    assert config.run == Path("runs") / (recipe.stem.removesuffix("-fsdp"))


@pytest.mark.parametrize(
    ("name", "size", "ranks", "gpu", "stated"),
    [
        ("qwen2.5-vl-3b", "3b", 1, "H200", 111),
        ("qwen2.5-vl-7b-fsdp", "7b", 8, "H100", 52),
        ("qwen2.5-vl-3b-lora", "3b", 1, "31", 26),
    ],
)
def test_recipes_fit_their_gpu_and_state_what_the_planner_says(name, size, ranks, gpu, stated):
    [recipe] = [path for path in RECIPES if path.stem == name]
    config = load_config(TrainConfig, recipe)
    totals = []
    for stage in config.stages:
        planner, row = stage_planner(config, stage, named_size(size), ranks)
        totals.append(planner.plan(row).total_gib)
    assert max(totals) <= gpu_gib(gpu)
    assert max(totals) == pytest.approx(stated, abs=1.0)
    assert str(stated) in recipe.read_text()


@pytest.mark.parametrize(
    ("settings", "stated"),
    [(["stages.instruct.lora.quantize_base=int4"], 22), (["parallel.recompute_language=full"], 14)],
)
def test_with_int4_or_activation_checkpointing_the_lora_recipe_fits_24_gb(settings, stated):
    [recipe] = [path for path in RECIPES if path.stem == "qwen2.5-vl-3b-lora"]
    config = load_config(TrainConfig, recipe, settings)
    planner, row = stage_planner(config, config.stages[0], named_size("3b"), 1)
    assert planner.plan(row).total_gib <= gpu_gib("RTX4090")
    assert planner.plan(row).total_gib == pytest.approx(stated, abs=1.0)
    assert str(stated) in recipe.read_text()
