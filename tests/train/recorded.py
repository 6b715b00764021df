"""Runs whose gradients of the first step are recorded, to compare layouts with one device."""

import contextlib
from pathlib import Path
from unittest import mock

import torch
from safetensors.torch import load_file, save_file
from train import ranks
from train.running import losses, read_recipe, run_together, write_recipe, write_shards

from saccade.data import context_plan
from saccade.model.families import named_size
from saccade.model.initialize import initialize_random
from saccade.train.stages import train, train_in
from saccade.train.train_state import TrainState

MODELS = {"qwen2_5_vl": "tiny", "qwen3_vl": "qwen3_vl/tiny", "llava_next": "llava_next/tiny"}
"""Windows; features for several layers; tiles."""
LORA = ["stages.0.lora={rank=4, targets=['q_proj', 'v_proj', 'down_proj'], parts=['language']}"]
STEPS = ["stages.0.steps=10", "stages.0.data.global_batch_size=5"]
"""On two parts of the data, one has three micro-batches and the other two and an empty one."""
FEW = ["stages.0.steps=4"]
"""For the layouts of `make test`: all steps run the same code."""
_TRAINED = ("lora", "qlora", "qat")
"""Settings that a single device trains with too."""
_BOUNDS = {"qat": {"loss": 2e-2, "update": 0.5}}
"""Bounds of settings whose steps are not continuous: a weight next to a tie rounds to another of 15 values. The loss
and the gradients of the first step are equal."""


@contextlib.contextmanager
def recorded(file):
    """Save the gradients of the first step of a run to a file on the main rank."""
    original, steps = TrainState.step, []

    def step(state, lr_factor, grad_scale):
        if not steps:
            named = {name: p.grad for name, p in state.parallel.model.named_parameters() if p.grad is not None}
            named = {name: getattr(g, "full_tensor", lambda g=g: g)().float().clone() for name, g in named.items()}
            whole = named
            if state.parallel.pipeline is None and (tensor := state.parallel.tensor) is not None:
                whole = {name: tensor.whole(name, gradient) for name, gradient in whole.items()}
            if state.parallel.pipeline is not None:
                every = dict(state.parallel.whole.named_parameters())
                pipeline, tensor = state.parallel.pipeline, state.parallel.tensor
                trained = [name for name, parameter in every.items() if parameter.requires_grad]
                whole = {name: pipeline.collected(name, named.get(name, every[name]), tensor) for name in trained}
            if state._world.is_main:
                save_file({name: gradient.contiguous() for name, gradient in whole.items()}, file)
        steps.append(None)
        return original(state, lr_factor, grad_scale)

    with mock.patch.object(TrainState, "step", step):
        yield


def run_recorded(world, job):
    """A job of `ranks.py`: train with the layout of `set`, in blocks of few tokens."""
    config = read_recipe(Path(job["recipe"]), *job["set"])
    with mock.patch.object(context_plan, "BLOCK_SIZE", job.get("block_size", 1024)), recorded(job["gradients"]):
        train_in(world, config, validate=ranks.no_validation)


def run_one(recipe, *settings, gradients):
    """The same on one device, in this process."""
    with recorded(gradients):
        train(read_recipe(recipe, *settings), device="cpu")


def exported(run):
    """Weights or adapters at the end of a run."""
    [folder] = (run / "checkpoints").iterdir()
    file = "adapter_model.safetensors" if (folder / "adapter_model.safetensors").exists() else "model.safetensors"
    return load_file(folder / file)


def assert_same_run(run, single, initial, *, loss=1e-5, gradient=1e-5, update=0.01):
    """Losses within `loss`, gradients of the first step within `gradient` of their RMS, weights within a share of the
    RMS of the updates. `initial`: weights before training, none of which an adapter has."""
    found, expected = losses(run), losses(single)
    assert len(found) == len(expected)
    assert abs(found[0] - expected[0]) <= 1e-5, "the first losses differ"
    worst = max(abs(a - b) for a, b in zip(found, expected, strict=True))
    assert worst <= loss, f"losses differ by {worst:.2e}"
    gradients = [load_file(str(folder) + ".gradients") for folder in (run, single)]
    assert distance(*gradients) <= gradient, f"gradients differ by {distance(*gradients):.2e} of their RMS"
    ours, theirs = exported(run), exported(single)
    updates = {name: weight - initial.get(name, torch.zeros(())) for name, weight in theirs.items()}
    difference = {name: ours[name] - weight for name, weight in theirs.items()}
    share = norm(difference) / norm(updates)
    assert share <= update, f"weights differ by {share:.2%} of the updates"
    return worst, distance(*gradients), share


def distance(found, expected):
    assert found.keys() == expected.keys()
    return norm({name: found[name] - value for name, value in expected.items()}) / norm(expected)


def norm(tensors):
    return sum(float(tensor.double().square().sum()) for tensor in tensors.values()) ** 0.5


def run_cases(folder, cases, layouts, variants, *, steps=STEPS, make=None):
    """Every case (layout, model, settings) on one device, then all of them on four ranks in one launch.

    `make`: gives the configuration of a size.
    """
    shards = write_shards(folder / "shards", text_every=2, sides=(56, 84, 140, 28))
    jobs, singles, initial = [], {}, {}
    for layout, model, settings in cases:
        checkpoint = folder / f"checkpoint-{model}"
        if model not in initial:
            initialize_random(checkpoint, (make or named_size)(MODELS[model]), dtype=torch.float32)
            initial[model] = load_file(checkpoint / "model.safetensors")
        trained = settings if settings in _TRAINED else "full"

        def recipe(name, checkpoint=checkpoint):
            path = folder / f"{name}.toml"
            return write_recipe(path, run=folder / name, checkpoint=checkpoint, shards=shards)

        single = f"one-{model}-{trained}"
        if single not in singles:
            run_one(recipe(single), *steps, *variants[trained], gradients=f"{folder / single}.gradients")
        singles[single] = True
        name = f"{layout}-{model}-{settings}"
        jobs.append(
            {
                "call": "train.recorded:run_recorded",
                "recipe": str(recipe(name)),
                "set": [*steps, *variants[settings], *layouts[layout]],
                "gradients": f"{folder / name}.gradients",
                "block_size": 16,
            }
        )
    run_together(jobs, folder, num_ranks=4)
    found = {}
    for layout, model, settings in cases:
        single = f"one-{model}-{settings if settings in _TRAINED else 'full'}"
        before = {} if settings == "lora" else initial[model]
        case = f"{layout}-{model}-{settings}"
        found[case] = assert_same_run(folder / case, folder / single, before, **_BOUNDS.get(settings, {}))
    return found
