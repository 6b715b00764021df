"""The same on a GPU: losses near those of the CPU, one wait for the GPU in a step."""

import warnings

import pytest
import torch
from train.running import losses, make_root, read_recipe, recipe_in

from saccade.train.stages import train

pytestmark = pytest.mark.gpu

SETTINGS = ["stages.0.steps=8", "model.dtype=bf16"]
VARIANTS = {
    "plain": [],
    "sharded": ["parallel.strategy=fsdp"],
    "offloaded": ["parallel.strategy=fsdp", "parallel.offload=true"],
    "ddp": ["parallel.strategy=ddp", "parallel.compress_gradients=bf16"],
    "recomputed": ["parallel.recompute_vision=full", "parallel.recompute_language=selective"],
    "compiled": ["parallel.compile=true", "parallel.recompute_language=full"],
    "dropped": ["stages.0.drop_path=0.3", "parallel.recompute_vision=full"],
}


@pytest.fixture(scope="module")
def run_root(tmp_path_factory):
    """A run on the CPU in fp32 to compare with."""
    folder = make_root(tmp_path_factory.mktemp("gpu"))
    train(read_recipe(recipe_in(folder, "cpu"), "stages.0.steps=8"), device="cpu")
    return folder


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute:UserWarning")
@pytest.mark.parametrize("name", VARIANTS)
def test_every_configuration_has_the_losses_of_the_cpu_within_bf16(run_root, name):
    train(read_recipe(recipe_in(run_root, name), *SETTINGS, *VARIANTS[name]), device="cuda")
    assert losses(run_root / name) == pytest.approx(losses(run_root / "cpu"), abs=0.05)


def test_a_run_resumes_on_the_gpu(run_root):
    for steps in (4, 8):
        train(read_recipe(recipe_in(run_root, "two-parts"), *SETTINGS, f"stages.0.steps={steps}"), device="cuda")
    assert losses(run_root / "two-parts") == pytest.approx(losses(run_root / "cpu"), abs=0.05)


@pytest.mark.parametrize("settings", [[], ["stages.0.drop_path=0.3"]], ids=["plain", "dropped"])
def test_a_step_waits_for_the_gpu_once(run_root, settings):
    """Steps 5 and 6 are watched; by then everything is compiled."""
    name = f"watched-{len(settings)}"
    waits = []

    def validate(model, step):
        torch.cuda.set_sync_debug_mode("warn" if 4 <= step < 6 else "default")
        if step == 4:
            waits.append(len(caught))
        if step == 6:
            waits.append(len(caught))
        return {}

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config = read_recipe(recipe_in(run_root, name), *SETTINGS, *settings, "validation.every=1")
        train(config, device="cuda", validate=validate)
    assert waits[1] - waits[0] == 2, [str(warning.message) for warning in caught]
