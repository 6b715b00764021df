"""Every recipe can be read, and fits the GPU it says it is for."""

from pathlib import Path

import pytest

from saccade.config import describe_keys, load_config
from saccade.errors import ConfigError
from saccade.model.initialize import named_size
from saccade.plan.gpus import gpu_named
from saccade.train.config import TrainConfig
from saccade.train.memory_check import stage_planner

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.toml"))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_loads(recipe):
    config = load_config(TrainConfig, recipe)
    assert config.run == Path("runs") / (recipe.stem.removesuffix("-fsdp"))


def test_the_reference_page_of_recipe_keys_is_current():
    page = Path(__file__).parents[2] / "docs" / "recipe.md"
    assert page.read_text() == describe_keys(TrainConfig), "run: saccade train --keys > docs/recipe.md"


OLD_KEYS = {
    "parallel.reduce_each_row=true": "reduce_each_micro_batch",
    "parallel.powersgd_start=10": "powersgd_start_step",
}


@pytest.mark.parametrize(("override", "new"), OLD_KEYS.items())
def test_a_former_key_is_refused_with_its_new_name(override, new):
    with pytest.raises(ConfigError, match=f"is now called {new}. Rename the key"):
        load_config(TrainConfig, RECIPES[0], [override])


@pytest.mark.parametrize(
    ("name", "size", "ranks", "gpu", "stated"),
    [
        ("qwen2.5-vl-3b", "3b", 1, "H200", 111),
        ("qwen2.5-vl-7b-fsdp", "7b", 8, "H100", 52),
        ("qwen2.5-vl-7b-long", "7b", 8, "H100", 39),
        pytest.param("qwen2.5-vl-72b", "72b", 64, "H100", 45, marks=pytest.mark.slow),
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
    assert max(totals) <= gpu_named(gpu).gib
    assert max(totals) == pytest.approx(stated, abs=1.0)
    assert str(stated) in recipe.read_text()


@pytest.mark.parametrize(
    ("settings", "stated"),
    [
        pytest.param(["stages.instruct.lora.quantize_base=int4"], 22, marks=pytest.mark.slow),
        (["parallel.recompute_language=full"], 14),
    ],
)
def test_with_int4_or_activation_checkpointing_the_lora_recipe_fits_24_gb(settings, stated):
    [recipe] = [path for path in RECIPES if path.stem == "qwen2.5-vl-3b-lora"]
    config = load_config(TrainConfig, recipe, settings)
    planner, row = stage_planner(config, config.stages[0], named_size("3b"), 1)
    assert planner.plan(row).total_gib <= gpu_named("RTX4090").gib
    assert planner.plan(row).total_gib == pytest.approx(stated, abs=1.0)
    assert str(stated) in recipe.read_text()
