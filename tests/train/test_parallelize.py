"""Sharded = single device, whatever the strategy; a run resumes on another number of ranks."""

import functools
import json
from itertools import islice

import pytest
import torch
import torch._dynamo as dynamo
from safetensors.torch import load_file
from train.running import (
    losses,
    make_checkpoint,
    read_recipe,
    records,
    run_together,
    skipped,
    write_recipe,
    write_shards,
)

from saccade.data import open_stream
from saccade.errors import ConfigError
from saccade.processor import Processor
from saccade.train.loss import count_labels, next_token_labels
from saccade.train.parallelize import parallelize, trainable_table
from saccade.train.stages import train
from saccade.world import World

VARIANTS = {  # hsdp has a test of its own, on four ranks
    "fsdp": ["stages.0.steps=5"],
    "ddp": ["parallel.strategy=ddp", "stages.0.steps=3"],
    "zero2": ["parallel.reshard_after_forward=false", "parallel.recompute_language=full", "stages.0.steps=3"],
    "zero1": ["parallel.reshard_after_forward=false", "parallel.reduce_each_micro_batch=false", "stages.0.steps=3"],
    "offload": [
        "parallel.offload=true", "parallel.recompute_vision=full", "parallel.strategy=fsdp", "stages.0.steps=3",
    ],
}  # fmt: skip

GLOO_THREADS = 6
"""Three each for the default group and the CPU group of the world."""


@pytest.fixture(scope="module")
def run_root(tmp_path_factory):
    """Runs on one rank in this process, then everything that needs two ranks, in two processes."""
    folder = tmp_path_factory.mktemp("parallel")
    checkpoint, shards = make_checkpoint(folder / "checkpoint"), write_shards(folder / "shards")
    mixed = write_shards(folder / "mixed", text_every=6)

    def recipe(name, data=shards):
        return write_recipe(folder / f"{name}.toml", run=folder / name, checkpoint=checkpoint, shards=data)

    # More packed sequences than ranks, and not a multiple: one rank runs an empty micro-batch.
    rows = ["stages.0.data.global_batch_size=3"]
    train(read_recipe(recipe("one"), "stages.0.steps=10", *rows), device="cpu")
    train(read_recipe(recipe("mixed-one", mixed), "stages.0.steps=4", "stages.0.data.max_seq_len=120"), device="cpu")
    train(read_recipe(recipe("one-then-two"), "stages.0.steps=3", *rows), device="cpu")
    named = ["guard.max_grad_norm=1e-9", "guard.max_skips=1000", "stages.0.schedule.warmup_steps=2", *rows]
    train(read_recipe(recipe("named-one-then-two"), "stages.0.steps=2", *named), device="cpu")
    lanes = ["stages.0.data.num_lanes=4", "stages.0.data.unit_bytes=20000", "stages.0.data.global_batch_size=4"]
    train(read_recipe(recipe("lanes-one"), "stages.0.steps=5", *lanes), device="cpu")
    train(read_recipe(recipe("lanes-one-then-two"), "stages.0.steps=3", *lanes), device="cpu")
    jobs = [{"world": str(folder / "world.json")}]
    jobs += [{"recipe": str(recipe(name)), "set": [*rows, *settings]} for name, settings in VARIANTS.items()]
    jobs += [
        {"recipe": str(recipe("mixed-two", mixed)), "set": ["stages.0.steps=4", "stages.0.data.max_seq_len=120"]},
        {
            "recipe": str(recipe("mixed-ddp", mixed)),
            "set": ["stages.0.steps=4", "stages.0.data.max_seq_len=120", "parallel.strategy=ddp"],
        },
        {"recipe": str(recipe("one-then-two")), "set": ["stages.0.steps=5", *rows]},
        {"recipe": str(recipe("two-then-one")), "set": ["stages.0.steps=3", *rows]},
        {"recipe": str(recipe("named-two")), "set": ["stages.0.steps=4", *named]},
        {"recipe": str(folder / "named-one-then-two.toml"), "set": ["stages.0.steps=4", *named]},
        {"recipe": str(folder / "lanes-one-then-two.toml"), "set": ["stages.0.steps=5", *lanes]},
        {"threads": str(folder / "threads"), "expected": GLOO_THREADS},
    ]  # fmt: skip
    run_together(jobs, folder, num_ranks=2)
    train(read_recipe(folder / "two-then-one.toml", "stages.0.steps=5", *rows), device="cpu")
    return folder


@pytest.mark.slow
def test_hsdp_on_a_2_x_2_mesh_computes_the_losses_of_a_single_device(run_root, tmp_path):
    """Two replicas have two shards each; a step has five packed sequences, so some ranks run an empty micro-batch."""
    settings = ["stages.0.steps=3", "stages.0.data.global_batch_size=5"]
    recipes = {
        name: write_recipe(
            tmp_path / f"{name}.toml",
            run=tmp_path / name,
            checkpoint=run_root / "checkpoint",
            shards=run_root / "shards",
        )
        for name in ("single", "hsdp")
    }
    train(read_recipe(recipes["single"], *settings), device="cpu")
    hsdp = [*settings, "parallel.strategy=hsdp", "parallel.shard=2"]
    run_together([{"recipe": str(recipes["hsdp"]), "set": hsdp}], tmp_path, num_ranks=4)
    assert losses(tmp_path / "hsdp") == pytest.approx(losses(tmp_path / "single"), abs=1e-5)
    norms = [records(tmp_path / name)[3]["grad_norm"] for name in recipes]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
    exported = [load_file(tmp_path / name / "checkpoints/step-00000003/model.safetensors") for name in recipes]
    for name, tensor in exported[0].items():
        assert torch.allclose(tensor, exported[1][name], atol=1e-4), name


def test_two_ranks_sum_gather_and_broadcast(run_root):
    for rank in range(2):
        found = json.loads((run_root / f"world.{rank}").read_text())
        assert found == {"sum": [2.0, 1.0], "gathered": [{"rank": 0}, {"rank": 1}], "broadcast": 0}


@pytest.mark.parametrize("rank", range(2))
def test_a_run_closes_the_process_groups_it_opened(run_root, rank):
    """A process has as many threads after a dozen runs as before the first one."""
    assert (run_root / f"threads.{rank}").read_text() == str(GLOO_THREADS)


def test_a_rank_that_crashes_fails_the_test_with_the_stacks_of_its_threads(tmp_path):
    with pytest.raises(AssertionError) as failure:
        run_together([{"crash": 1}], tmp_path, num_ranks=2)
    message = str(failure.value)
    assert "rank 1: exit code -11" in message
    assert "in crash" in message, "the Python stack"
    assert "c10d::ProcessGroupGloo::runLoop" in message, "the stacks of threads that run no Python"


@pytest.mark.parametrize("name", VARIANTS)
def test_two_ranks_compute_the_losses_of_one(run_root, name):
    single = losses(run_root / "one")
    assert len(single) == 10
    assert single[0] > single[-1] + 0.5, "it learns"
    many = losses(run_root / name)
    assert len(many) == (5 if name == "fsdp" else 3)
    assert many == pytest.approx(single[: len(many)], abs=1e-5)
    norms = [(records(run_root / run)[3]["grad_norm"]) for run in (name, "one")]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


def test_a_run_with_lanes_resumed_on_two_ranks_continues_as_one(run_root):
    """The ranks plan their own lanes, and get the others through the store of the job."""
    assert losses(run_root / "lanes-one-then-two") == pytest.approx(losses(run_root / "lanes-one"), abs=1e-5)
    assert losses(run_root / "lanes-one")[0] != losses(run_root / "one")[0], "lanes change the order"


@pytest.mark.parametrize("name", ["mixed-two", "mixed-ddp"])
def test_a_rank_without_images_trains_beside_one_with_images(run_root, name):
    """They would wait for each other forever if they ran different blocks."""
    assert losses(run_root / name) == pytest.approx(losses(run_root / "mixed-one"), abs=1e-5)


def test_those_ranks_do_have_micro_batches_with_and_without_images(run_root):
    settings = {"max_seq_len": 120, "max_patches": 512, "global_batch_size": 2, "seed": 3, "num_workers": 0}
    with open_stream(run_root / "mixed", checkpoint=run_root / "checkpoint", **settings) as stream:
        has_image = [[len(row.inputs.patches) > 0 for row in batch.sequences] for batch in islice(stream, 4)]
    assert any(any(step) and not all(step) for step in has_image), "a step with both"
    assert any(not any(step) for step in has_image), "a step without images"


@pytest.mark.parametrize("name", ["one-then-two", "two-then-one"])
def test_a_run_resumes_on_another_number_of_ranks(run_root, name):
    assert losses(run_root / name) == pytest.approx(losses(run_root / "one")[:5], abs=1e-6)


def test_another_number_of_ranks_sees_the_same_samples(run_root):
    """Every step is skipped here, so every step's samples are logged."""

    def samples(name):
        steps = skipped(run_root / name)
        return {
            step["step"]: sorted(sample for row in step["micro_batches"] for sample in row["samples"]) for step in steps
        }

    changed = samples("named-one-then-two")
    assert list(changed) == [1, 2, 3, 4]
    assert changed == samples("named-two")


# ------------------------------------------------------------------ one rank


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model") / "checkpoint")


def built(checkpoint, tmp_path, *overrides):
    recipe = write_recipe(tmp_path / "recipe.toml", run=tmp_path / "run", checkpoint=checkpoint, shards=tmp_path)
    config = read_recipe(recipe, *overrides)
    world = World(0, 1, 0, torch.device("cpu"))
    return parallelize(checkpoint, config.stages[0], config.parallel, world, dtype=config.model.dtype)


def rows_of(checkpoint):
    """Packed sequences of different lengths, with and without images."""
    from model.hugging_face import answer, ask, picture

    processor = Processor.load(checkpoint)
    conversations = [
        [ask(picture(56, 84), "What is it?"), answer("A wave.")],
        [ask("Hello?"), answer("Yes, hello, how are you?")],
        [ask(picture(140, 28), "And this?"), answer("Another.")],
    ]
    return [processor(conversations[:1]), processor(conversations), processor(conversations[1:2])]


def loss_and_gradients(parallel, inputs):
    labels = next_token_labels(inputs)
    parallel.module.zero_grad()
    loss, _ = parallel.wrapped(inputs, labels, torch.tensor(float(count_labels(labels))), count_labels(labels))
    loss.backward()
    return float(loss.detach()), {name: parameter.grad.clone() for name, parameter in parallel.model.named_parameters()}


def assert_same(one, other, inputs, tolerance):
    (loss, gradients), (other_loss, other_gradients) = (
        loss_and_gradients(one, inputs),
        loss_and_gradients(other, inputs),
    )
    assert other_loss == pytest.approx(loss, abs=tolerance)
    for name, gradient in gradients.items():
        assert torch.allclose(gradient, other_gradients[name], atol=tolerance), name


@pytest.mark.parametrize("extent", ["selective", "full"])
def test_activation_checkpointing_changes_no_bit(checkpoint, tmp_path, extent):
    plain = built(checkpoint, tmp_path)
    other = built(checkpoint, tmp_path, f"parallel.recompute_vision={extent}", f"parallel.recompute_language={extent}")
    for inputs in rows_of(checkpoint):
        assert_same(plain, other, inputs, tolerance=0.0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute:UserWarning")
@pytest.mark.parametrize("extent", [pytest.param("none", marks=pytest.mark.slow), "full"])
def test_compiled_blocks_compute_the_same_and_are_compiled_once(checkpoint, tmp_path, monkeypatch, extent):
    """Captured and differentiated by the compiler; code generation takes a minute and is skipped."""
    dynamo.reset()
    settings = [f"parallel.recompute_vision={extent}", f"parallel.recompute_language={extent}"]
    plain = built(checkpoint, tmp_path, *settings)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    compiled = built(checkpoint, tmp_path, "parallel.compile=true", *settings)
    first, *others = rows_of(checkpoint)
    assert_same(plain, compiled, first, tolerance=1e-5)
    with torch.compiler.set_stance("fail_on_recompile"):
        for inputs in others:
            assert_same(plain, compiled, inputs, tolerance=1e-5)


def test_parameters_with_a_learning_rate_of_0_are_frozen(checkpoint, tmp_path):
    parallel = built(checkpoint, tmp_path, "stages.0.optimizer.lrs={vision=0, language=0, embedding=0}")
    learns = {name.split(".")[0] for name, parameter in parallel.model.named_parameters() if parameter.requires_grad}
    assert learns == {"projector"}
    table = trainable_table(parallel.model)
    assert [line.split() for line in table.splitlines()][1:] == [
        ["vision", "158,592", "0"],
        ["projector", "98,752", "98,752"],
        ["embedding", "40,960", "0"],
        ["language", "296,064", "0"],
    ]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["stages.0.optimizer.lr=0"], "nothing would be trained"),
        (["parallel.shard_size=2"], "parallel.shard_size is now called shard"),
        (["parallel.strategy=hsdp"], "'hsdp' requires shard"),
        (["parallel.compress_gradients=powersgd"], "requires strategy = 'ddp'"),
        (["parallel.strategy=ddp", "parallel.offload=true"], "offload requires fsdp"),
        (["parallel.strategy=ddp", "parallel.compress_gradients=powersgd"], "needs GPUs and NCCL"),
    ],
)
def test_unsupported_settings_are_refused(checkpoint, tmp_path, overrides, words):
    with pytest.raises(ConfigError, match=words):
        built(checkpoint, tmp_path, *overrides)
