"""The loop: the losses of `transformers` with torch's AdamW, bad steps, bad samples, lengths in epochs and tokens."""

import json
import logging
import os
import signal
from itertools import islice, pairwise

import pytest
import torch
from model.hugging_face import SHAPES, Oracle
from model.hugging_face import make_checkpoint as make_hugging_face_checkpoint
from safetensors.torch import load_file
from train.running import losses, make_checkpoint, read_recipe, records, skipped, write_recipe, write_shards

from saccade.data import open_stream
from saccade.data.index import open_index
from saccade.errors import DataError
from saccade.train.saved_state import states
from saccade.train.stages import train
from saccade.train.trainer import Ending


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model") / "checkpoint")


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    return write_shards(tmp_path_factory.mktemp("data") / "shards")


@pytest.fixture
def recipe(tmp_path, checkpoint, shards):
    return write_recipe(tmp_path / "recipe.toml", run=tmp_path / "run", checkpoint=checkpoint, shards=shards)


# ------------------------------------------------------------------ the same as transformers


def test_twenty_steps_have_the_losses_of_transformers_with_torchs_adamw(tmp_path, shards):
    folder = make_hugging_face_checkpoint(tmp_path / "checkpoint", SHAPES[0])
    recipe = write_recipe(tmp_path / "recipe.toml", run=tmp_path / "run", checkpoint=folder, shards=shards)
    config = read_recipe(recipe, "stages.0.clip_norm=0.5", "guard.spike_sigmas=inf")
    assert train(config, device="cpu") is Ending.FINISHED
    theirs = losses_of_transformers(Oracle(folder), folder, shards, config.stages[0])
    assert theirs[0] > theirs[-1] + 0.3, "it learns"
    assert losses(tmp_path / "run") == pytest.approx(theirs, abs=1e-4)


def losses_of_transformers(oracle, folder, shards, stage):
    """Train one conversation at a time: their forward, torch's cross entropy, clipping, AdamW and our schedule."""
    model = oracle.model.train()
    groups = {True: [], False: []}
    for name, parameter in model.named_parameters():
        groups[parameter.ndim > 1 and "embed_tokens" not in name].append(parameter)
    optimizer = torch.optim.AdamW(
        [{"params": parameters, "weight_decay": 0.1 * decays} for decays, parameters in groups.items()],
        lr=1.0, betas=(0.9, 0.95), eps=1e-8,
    )  # fmt: skip
    found = []
    with open_stream(
        shards, checkpoint=folder, max_seq_len=240, max_patches=512, global_batch_size=2, seed=3, num_workers=0
    ) as stream:
        for step, batch in enumerate(islice(stream, 20)):
            sums, count = [], 0
            for inputs, labels in conversations_of(batch):
                model.model.rope_deltas = None
                logits = model(**inputs, mm_token_type_ids=oracle.token_types(inputs["input_ids"])).logits[0, :-1]
                sums.append(torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum"))
                count += int((labels != -100).sum())
            loss = torch.stack(sums).sum() / count
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), stage.clip_norm)
            for group in optimizer.param_groups:
                group["lr"] = stage.optimizer.lr * stage.schedule.factor(step, 20)
            optimizer.step()
            found.append(float(loss.detach()))
    return found


def conversations_of(batch):
    """Each conversation of a batch as `transformers` takes it, and the labels of all tokens but the first."""
    for row in batch.sequences:
        packed, image, patch = row.inputs, 0, 0
        for start, end in pairwise(packed.cu_seqlens.tolist()):
            ids, learned = packed.token_ids[start:end], packed.loss_mask[start:end]
            num_tokens = int(((packed.image_token_index >= start) & (packed.image_token_index < end)).sum())
            inputs = {"input_ids": ids[None]}
            if num_tokens:  # toy samples have one picture each
                inputs["image_grid_thw"] = packed.image_grids[image : image + 1]
                inputs["pixel_values"] = packed.normalized_patches()[patch : patch + 4 * num_tokens]
                image, patch = image + 1, patch + 4 * num_tokens
            yield inputs, ids[1:].masked_fill(~learned[1:], -100)


# ------------------------------------------------------------------ bad steps


def spoil_next_loss(model):
    """The loss of the next micro-batch is NaN, once."""

    def spoil(module, args):
        handle.remove()
        inputs, labels, count, *rest = args
        return (inputs, labels, count * float("nan"), *rest)

    handle = model.register_forward_pre_hook(spoil)


def test_a_nan_step_is_skipped_and_its_samples_are_named(recipe, tmp_path):
    before = {}

    def validate(model, step):
        if step == 3:
            spoil_next_loss(model)
            before["weights"] = model.model.head.weight.clone()
        if step == 4:
            assert torch.equal(model.model.head.weight, before["weights"]), "the bad step moved nothing"
        return {}

    train(read_recipe(recipe, "stages.0.steps=6", "validation.every=1"), device="cpu", validate=validate)
    [step] = skipped(tmp_path / "run")
    assert (step["step"], step["stage"], step["action"], step["reason"]) == (4, "learn", "skip", "the loss is nan")
    assert [row["is_finite"] for row in step["micro_batches"]] == [False, True], (
        "the micro-batch with NaN is identified"
    )
    with open_stream(
        read_recipe(recipe).stages[0].data.sources[0].path, checkpoint=read_recipe(recipe).model.folder,
        max_seq_len=240, max_patches=512, global_batch_size=2, seed=3, num_workers=0,
    ) as stream:  # fmt: skip
        fourth = list(islice(stream, 4))[3]
    assert [row["samples"] for row in step["micro_batches"]] == [row.sample_ids for row in fourth.sequences]
    assert [record["skipped"] for _, record in sorted(records(tmp_path / "run").items())] == [0, 0, 0, 1, 0, 0]
    assert losses(tmp_path / "run")[3] is None
    assert "learn" in (tmp_path / "run" / "report.html").read_text()


def test_consecutive_bad_steps_roll_back_the_weights_and_not_the_data(recipe, tmp_path):
    def validate(model, step):
        if step == 6:
            with torch.no_grad():
                model.model.language.norm.weight.fill_(float("nan"))  # every loss is NaN from here on
        return {}

    settings = ["stages.0.steps=12", "checkpoint.every=5", "validation.every=1", "guard.max_skips=3"]
    assert train(read_recipe(recipe, *settings), device="cpu", validate=validate) is Ending.FINISHED
    steps = skipped(tmp_path / "run")
    assert [(step["step"], step["action"]) for step in steps] == [(7, "skip"), (8, "skip"), (9, "roll back")]
    after = losses(tmp_path / "run")
    assert after[6:9] == [None, None, None]
    assert all(loss < after[0] for loss in after[9:]), "with the weights of step 5, not with those of the start"
    progress = json.loads((tmp_path / "run/state/step-00000012/progress.json").read_text())
    assert progress["data"]["batch"] == 12, "bad batches are not repeated"
    assert progress["optimizer_steps"] == 5 + 3


@pytest.mark.parametrize(("every", "keep_last"), [(4, 2), pytest.param(1, 1, marks=pytest.mark.slow)])
def test_a_rollback_never_loads_a_state_of_the_bad_steps(recipe, tmp_path, caplog, every, keep_last):
    """The weights are NaN from the end of step 9 on. A state of step 12, between bad steps, would have NaN as well."""

    def validate(model, step):
        if step == 9:
            with torch.no_grad():
                model.model.language.norm.weight.fill_(float("nan"))
        return {}

    settings = [f"checkpoint.every={every}", f"checkpoint.keep_last={keep_last}", "stages.0.steps=16"]
    settings += ["validation.every=1", "guard.max_skips=4", "guard.max_rollbacks=1"]
    assert train(read_recipe(recipe, *settings), device="cpu", validate=validate) is Ending.FINISHED
    assert [step["action"] for step in skipped(tmp_path / "run")] == ["skip"] * 3 + ["roll back"]
    assert f"rolled back weights and optimizer to step {9 // every * every}" in caplog.text
    assert None not in losses(tmp_path / "run")[13:]
    kept = [state.step for state in states(tmp_path / "run/state")]
    assert kept == {4: [13, 16], 1: [16]}[every], "the save that was due at step 12 follows the rollback"


def test_a_rollback_loads_weights_that_differ_from_those_of_the_bad_steps(recipe, tmp_path, caplog):
    """The state of step 6 has the weights that all bad losses were computed with."""

    def validate(model, step):
        for _ in range(2 if step == 6 else 0):
            spoil_next_loss(model)
        if step in (7, 8):
            spoil_next_loss(model)
        return {}

    settings = ["checkpoint.every=3", "stages.0.steps=10", "validation.every=1", "guard.max_skips=3"]
    assert train(read_recipe(recipe, *settings), device="cpu", validate=validate) is Ending.FINISHED
    assert [step["action"] for step in skipped(tmp_path / "run")] == ["skip", "skip", "roll back"]
    assert "rolled back weights and optimizer to step 3" in caplog.text


def test_a_run_that_never_recovers_gives_up(recipe, tmp_path):
    settings = ["guard.max_grad_norm=1e-9", "guard.max_skips=2", "guard.max_rollbacks=1"]
    with pytest.raises(
        DataError, match=r"step 4: the gradient norm .* after 1 rollbacks already.*lower the learning rate"
    ):
        train(read_recipe(recipe, *settings), device="cpu")
    assert [step["action"] for step in skipped(tmp_path / "run")] == ["skip", "roll back", "skip", "give up"]


def test_a_parameter_that_the_loss_does_not_reach_is_named_in_the_first_step(recipe, monkeypatch):
    from saccade.model.vision.patch_tower import PatchMerger

    def cut(self, outputs):
        return self.mlp(self.ln_q(outputs[0].detach()).view(-1, self.merged_size))

    monkeypatch.setattr(PatchMerger, "forward", cut)
    with pytest.raises(
        AssertionError, match=r"\d+ trained parameters got no gradient: vision\.patch_embed\.proj\.weight"
    ):
        train(read_recipe(recipe), device="cpu")


# ------------------------------------------------------------------ log and stop


def test_the_first_step_is_logged_and_validation_is_announced(recipe, tmp_path, caplog):
    caplog.set_level(logging.INFO, "saccade")
    settings = ["stages.0.steps=5", "log.every=100", "validation.every=3"]
    train(read_recipe(recipe, *settings), device="cpu", validate=lambda model, step: {"score": 1.0})
    assert list(records(tmp_path / "run")) == [1]
    lines = [record.getMessage() for record in caplog.records]
    assert [line for line in lines if line.startswith("step 3: ")] == [
        "step 3: validation",
        "step 3: validation score 1",
    ]
    assert any(line.startswith('stage "learn": step 0, single device\n') for line in lines)
    assert any(line.startswith("step 1/5") for line in lines)


def test_ctrl_c_in_a_step_discards_it_after_the_current_micro_batch(recipe, tmp_path, caplog):
    caplog.set_level(logging.INFO, "saccade")
    forwards = []

    def interrupt(*_):
        forwards.append(True)
        if len(forwards) == 3:
            os.kill(os.getpid(), signal.SIGINT)

    def validate(model, step):
        if step == 2:
            model.register_forward_pre_hook(interrupt)
        return {}

    settings = ["stages.0.steps=4", "stages.0.data.global_batch_size=6", "validation.every=1"]
    assert train(read_recipe(recipe, *settings), device="cpu", validate=validate) is Ending.STOPPED
    assert "SIGINT: finishing this step and saving; press Ctrl-C again to quit now" in caplog.text
    assert len(forwards) == 3, "of the six micro-batches of step 3"
    assert [state.step for state in states(tmp_path / "run/state")] == [2]
    train(read_recipe(recipe, *settings), device="cpu")
    train(read_recipe(recipe, *settings, f"run={tmp_path / 'other'}"), device="cpu")
    assert losses(tmp_path / "run") == losses(tmp_path / "other")


# ------------------------------------------------------------------ precision


@pytest.mark.parametrize("lora", [False, True])
def test_training_in_bf16_starts_from_the_fp32_weights_of_the_folder_sharded_or_not(tmp_path, checkpoint, shards, lora):
    """With a learning rate of next to nothing, what is exported is what training started from."""
    common = ["model.dtype=bf16", "stages.0.steps=3", "stages.0.optimizer.lr=1e-20"]
    common += ["stages.0.lora={rank=4, export='adapter'}"] if lora else []
    found = {}
    for strategy in ("none", "fsdp"):
        recipe = write_recipe(tmp_path / "recipe.toml", run=tmp_path / strategy, checkpoint=checkpoint, shards=shards)
        train(read_recipe(recipe, f"parallel.strategy={strategy}", *common), device="cpu")
        name = "adapter_model.safetensors" if lora else "model.safetensors"
        found[strategy] = load_file(tmp_path / strategy / "checkpoints/step-00000003" / name)
    start = found["fsdp"] if lora else load_file(checkpoint / "model.safetensors")
    for exported in found.values():
        assert all(torch.allclose(exported[name], start[name], rtol=0.0, atol=1e-15) for name in start)


def test_bf16_losses_are_those_of_a_sharded_run(tmp_path, checkpoint, shards):
    common = ["model.dtype=bf16", "stages.0.steps=5", "stages.0.data.global_batch_size=1"]
    for strategy in ("none", "fsdp"):
        recipe = write_recipe(tmp_path / "recipe.toml", run=tmp_path / strategy, checkpoint=checkpoint, shards=shards)
        train(read_recipe(recipe, f"parallel.strategy={strategy}", *common), device="cpu")
    assert losses(tmp_path / "none") == pytest.approx(losses(tmp_path / "fsdp"), abs=1e-5)


# ------------------------------------------------------------------ data


def damage(shards, checkpoint, *, row):
    """Change a byte of a sample's picture, after the folder's index and lengths were made."""
    open_stream(shards, checkpoint=checkpoint, max_seq_len=240, num_workers=0).close()
    index = open_index(str(shards))
    [tar] = [shards / name for name in index.shards]
    data = bytearray(tar.read_bytes())
    data[index.read(0, ["offsets"])["offsets"][row].as_py()[0] + 40] ^= 0xFF
    tar.write_bytes(data)


def test_a_corrupted_sample_is_skipped_and_named(tmp_path, checkpoint):
    shards = write_shards(tmp_path / "shards", count=8)
    damage(shards, checkpoint, row=5)
    recipe = write_recipe(tmp_path / "recipe.toml", run=tmp_path / "run", checkpoint=checkpoint, shards=shards)
    train(read_recipe(recipe, "stages.0.steps=4"), device="cpu")
    bad = [json.loads(line) for line in (tmp_path / "run/bad_samples.jsonl").read_text().splitlines()]
    assert {one["sample_id"] for one in bad} == {"shards/00000/00000005"}
    assert len(losses(tmp_path / "run")) == 4


def test_a_packed_sequence_of_bad_samples_becomes_an_empty_micro_batch(tmp_path, checkpoint):
    shards = write_shards(tmp_path / "shards", count=3)
    damage(shards, checkpoint, row=0)
    damage(shards, checkpoint, row=1)
    recipe = write_recipe(tmp_path / "recipe.toml", run=tmp_path / "run", checkpoint=checkpoint, shards=shards)
    settings = ["stages.0.steps=5", "stages.0.data.max_seq_len=100", "stages.0.data.max_bad_share=1.0"]
    train(read_recipe(recipe, *settings), device="cpu")
    seen = [0, *(record["samples"] for _, record in sorted(records(tmp_path / "run").items()))]
    samples = [after - before for before, after in pairwise(seen)]
    assert 0 in samples, "a step in which nothing was left"
    assert 1 in samples, "a step with an empty micro-batch next to a full one"
    assert [loss == 0.0 for loss in losses(tmp_path / "run")] == [count == 0 for count in samples]


def test_a_stage_of_epochs_ends_with_its_data_and_its_learning_rate_decays_to_the_end(tmp_path, checkpoint):
    shards = write_shards(tmp_path / "shards", count=10)
    text = (
        write_recipe(tmp_path / "recipe.toml", run=tmp_path / "run", checkpoint=checkpoint, shards=shards)
        .read_text()
        .replace("steps = 20", "epochs = 2")
    )
    (tmp_path / "recipe.toml").write_text(text)
    settings = ["stages.0.schedule.kind=linear", "stages.0.schedule.final_factor=0", "stages.0.schedule.warmup_steps=2"]
    train(read_recipe(tmp_path / "recipe.toml", *settings), device="cpu")
    found = records(tmp_path / "run")
    assert found[max(found)]["samples"] == 20
    rates = [found[step]["lr"]["default"] for step in sorted(found)]
    assert rates[:2] == pytest.approx([5e-4, 1e-3])
    seen = [0, *(found[step]["samples"] for step in sorted(found))]
    assert rates[2:] == pytest.approx([1e-3 * (20 - before) / (20 - seen[2]) for before in seen[2:-1]])


def test_losses_are_recorded_by_source(tmp_path, checkpoint, shards):
    texts = write_shards(tmp_path / "texts", count=12, text_every=1000)
    recipe = write_recipe(tmp_path / "recipe.toml", run=tmp_path / "run", checkpoint=checkpoint, shards=shards)
    sources = (
        f'stages.0.data.sources=[{{path="{shards}", name="toy", weight=2}}, {{path="{texts}", name="text", weight=1}}]'
    )
    train(read_recipe(recipe, sources, "stages.0.steps=4", "log.every=2"), device="cpu")
    for record in records(tmp_path / "run").values():
        assert set(record["source_loss"]) <= {"toy", "text"}
        assert min(record["source_loss"].values()) > 1.0
    assert {name for record in records(tmp_path / "run").values() for name in record["source_loss"]} == {"toy", "text"}
