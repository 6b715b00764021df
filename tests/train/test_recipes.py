"""Every recipe can be read, and fits the GPU it says it is for."""

from pathlib import Path

import pytest

from saccade.config import load_config
from saccade.model.initialize import named_size
from saccade.train.config import TrainConfig
from saccade.train.plan import gpu_gib, of_stage

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.toml"))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_can_be_read(recipe):
    config = load_config(TrainConfig, recipe)
    assert config.run == Path("runs") / (recipe.stem.removesuffix("-fsdp"))
    for stage in config.stages:
        if stage.known_steps is not None:
            stage.schedule.check(stage.known_steps)


@pytest.mark.parametrize(
    ("name", "size", "ranks", "gpu", "stated"),
    [
        ("qwen2.5-vl-3b", "3b", 1, "H200", 111),
        ("qwen2.5-vl-7b-fsdp", "7b", 8, "H100", 52),
        ("qwen2.5-vl-3b-lora", "3b", 1, "H200", None),
    ],
)
def test_recipes_fit_their_gpu_and_state_what_the_planner_says(name, size, ranks, gpu, stated):
    [recipe] = [path for path in RECIPES if path.stem == name]
    config = load_config(TrainConfig, recipe)
    totals = []
    for stage in config.stages:
        planner, row = of_stage(config, stage, named_size(size), ranks)
        totals.append(planner.plan(row).total_gib)
    assert max(totals) <= gpu_gib(gpu)
    if stated is not None:
        assert max(totals) == pytest.approx(stated, abs=1.0)
        assert str(stated) in recipe.read_text()
