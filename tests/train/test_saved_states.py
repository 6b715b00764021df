"""The training state on disk: complete or absent, verified, and sufficient to resume bit for bit."""

import json
import re
import shutil
import threading

import pytest
import torch
from train.running import losses, make_checkpoint, read_recipe, write_recipe, write_shards

from saccade.errors import CheckpointError
from saccade.model import load_model
from saccade.train import saver as saver_module
from saccade.train.random_state import restore_random_state, seed_everything
from saccade.train.run_config import CheckpointConfig
from saccade.train.saved_state import SavedState, load_tensors, newest_state, states
from saccade.train.saver import Saver
from saccade.train.stages import train
from saccade.train.trainer import Ending
from saccade.world import open_world


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model") / "checkpoint")


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    return write_shards(tmp_path_factory.mktemp("data") / "shards")


@pytest.fixture(scope="module")
def whole(tmp_path_factory, folder, shards):
    """An uninterrupted run of eight steps."""
    run_root = tmp_path_factory.mktemp("whole")
    recipe = write_recipe(run_root / "recipe.toml", run=run_root / "run", checkpoint=folder, shards=shards)
    train(read_recipe(recipe, "stages.0.steps=8", "checkpoint.every=3"), device="cpu")
    return run_root / "run"


@pytest.fixture
def world():
    with open_world("cpu") as world:
        yield world


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {"a": torch.full((3, 4), value), "b": torch.full((2,), value, dtype=torch.bfloat16)}


# ------------------------------------------------------------------ resumed = uninterrupted


def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(tmp_path, folder, shards, whole):
    recipe = write_recipe(tmp_path / "recipe.toml", run=tmp_path / "run", checkpoint=folder, shards=shards)
    train(read_recipe(recipe, "stages.0.steps=5"), device="cpu")
    train(read_recipe(recipe, "stages.0.steps=8"), device="cpu")
    assert losses(tmp_path / "run") == losses(whole)
    one, other = (load_model(run / "checkpoints/step-00000008", device="cpu") for run in (tmp_path / "run", whole))
    for (name, parameter), twin in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(parameter, twin), name


@pytest.mark.parametrize("kind", ["adamw8bit", pytest.param("muon", marks=pytest.mark.slow)])
def test_every_optimizer_resumes_bit_for_bit_in_bf16(tmp_path, folder, shards, kind):
    """Parameters in bf16 are rounded masters: these must be saved, not the parameters."""
    settings = ["model.dtype=bf16", f"stages.0.optimizer.kind={kind}"]
    runs = {}
    for name, lengths in (("one", [6]), ("two", [3, 6])):
        recipe = write_recipe(tmp_path / f"{name}.toml", run=tmp_path / name, checkpoint=folder, shards=shards)
        for length in lengths:
            train(read_recipe(recipe, f"stages.0.steps={length}", *settings), device="cpu")
        runs[name] = losses(tmp_path / name)
    assert runs["one"] == runs["two"]
    assert runs["one"][0] > runs["one"][-1]


def test_a_finished_run_has_nothing_left_to_do(tmp_path, whole, folder, shards):
    copy = shutil.copytree(whole, tmp_path / "run")
    recipe = write_recipe(tmp_path / "recipe.toml", run=copy, checkpoint=folder, shards=shards)
    before = sorted(path.name for path in copy.rglob("*"))
    train(read_recipe(recipe, "stages.0.steps=8"), device="cpu")
    assert sorted(path.name for path in copy.rglob("*")) == before
    assert losses(copy) == losses(whole)


def test_an_incomplete_or_truncated_state_is_not_used(tmp_path, whole, folder, shards):
    copy = shutil.copytree(whole, tmp_path / "run")
    assert [state.step for state in states(copy / "state")] == [6, 8]
    (copy / "state/step-00000008/complete.json").unlink()
    assert [state.step for state in states(copy / "state")] == [6]
    shutil.copytree(whole / "state/step-00000008", copy / "state/step-00000008", dirs_exist_ok=True)
    data = next((copy / "state/step-00000008").glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:-1])
    assert [state.step for state in states(copy / "state")] == [6]
    recipe = write_recipe(tmp_path / "recipe.toml", run=copy, checkpoint=folder, shards=shards)
    train(read_recipe(recipe, "stages.0.steps=8"), device="cpu")
    assert losses(copy) == losses(whole), "it resumed from step 6"


def test_a_damaged_newest_state_is_announced_and_the_previous_one_is_used(tmp_path, whole, folder, shards, caplog):
    """One bit of a file differs: its size is right, its checksum is not."""
    copy = shutil.copytree(whole, tmp_path / "run")
    data = next((copy / "state/step-00000008").glob("*.distcp"))
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    recipe = write_recipe(tmp_path / "recipe.toml", run=copy, checkpoint=folder, shards=shards)
    train(read_recipe(recipe, "stages.0.steps=8", "checkpoint.every=3"), device="cpu")
    assert f"step-00000008 is damaged: {data.name} does not match its checksum" in caplog.text
    assert "using the state before it" in caplog.text
    assert losses(copy) == losses(whole), "resumed from step 6"
    names = sorted(path.name for path in (copy / "state").iterdir())
    assert names == ["rejected-step-00000008", "step-00000006", "step-00000008"]


def test_a_damaged_only_state_does_not_restart_the_run(tmp_path, whole, folder, shards):
    copy = shutil.copytree(whole, tmp_path / "run")
    shutil.rmtree(copy / "state/step-00000006")
    (copy / "state/step-00000008/complete.json").write_text('{"progress.json": 100}')
    recipe = write_recipe(tmp_path / "recipe.toml", run=copy, checkpoint=folder, shards=shards)
    with pytest.raises(CheckpointError, match=r"complete\.json cannot be read .* there is no other state\. Remove it"):
        train(read_recipe(recipe, "stages.0.steps=8"), device="cpu")
    assert losses(copy) == losses(whole)


def test_a_state_of_another_model_is_refused(tmp_path, whole, folder, shards):
    copy = shutil.copytree(whole, tmp_path / "run")
    recipe = write_recipe(tmp_path / "recipe.toml", run=copy, checkpoint=folder, shards=shards)
    with pytest.raises(CheckpointError, match=r"are not in it, among them optimizer/.*other settings"):
        train(read_recipe(recipe, "stages.0.steps=9", "stages.0.optimizer.kind=muon"), device="cpu")


# ------------------------------------------------------------------ the exported folder


def test_the_exported_folder_loads_and_has_the_trained_weights(whole, folder):
    exported = load_model(whole / "checkpoints/step-00000008", device="cpu")
    start = load_model(folder, device="cpu")
    assert exported.config == start.config
    moved = [not torch.equal(a, b) for a, b in zip(exported.parameters(), start.parameters(), strict=True)]
    assert all(moved)
    files = {path.name for path in (whole / "checkpoints/step-00000008").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= files
    assert json.loads((whole / "checkpoints/step-00000008/config.json").read_text())["torch_dtype"] == "float32"


# ------------------------------------------------------------------ saving


def test_a_loaded_state_equals_the_saved_one(tmp_path, world):
    with Saver(tmp_path / "state", CheckpointConfig(), world) as saver:
        source = tensors(1.0)
        saver.save(1, source, {"note": [1, 2]})
        for tensor in source.values():
            tensor.fill_(7.0)  # training continues while the copy is written
    state = newest_state(tmp_path / "state", world)
    loaded = tensors(0.0)
    load_tensors(state, loaded, world)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors(1.0).items())
    assert (state.step, state.progress) == (1, {"note": [1, 2]})


def test_the_last_states_and_every_nth_state_are_kept(tmp_path, world):
    with Saver(tmp_path / "state", CheckpointConfig(keep_last=2, keep_every=4), world) as saver:
        for step in range(1, 10):
            saver.save(step, tensors(step), {})
    assert [state.step for state in states(tmp_path / "state")] == [4, 8, 9]
    assert sorted(path.name for path in (tmp_path / "state").iterdir() if path.name.startswith(".")) == []


def test_a_failed_save_is_reported_and_loses_nothing(tmp_path, world, monkeypatch):
    """The disk is full when the last file is written."""
    with Saver(tmp_path / "state", CheckpointConfig(), world) as saver:
        saver.save(1, tensors(1.0), {})
        saver.finish()

        def full(path, value):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(saver_module, "_write_json", full)
        saver.save(2, tensors(2.0), {})
        saver.finish()
        assert "step-00000002: the state was not saved: No space left on device. Free space" in saver.failure
        with pytest.raises(CheckpointError, match="No space left"):
            saver.finish_or_raise()
        monkeypatch.undo()
        saver.failure = None
        saver.save(3, tensors(3.0), {})
    assert saver.failure is None
    assert [state.step for state in states(tmp_path / "state")] == [1, 3]
    assert len(list((tmp_path / "state").iterdir())) == 2


@pytest.fixture
def slow_full_disk(monkeypatch):
    """Saves outlast the steps between them, and fail as long as the list is empty: once the trainer waits for them."""
    has_room, real_save, real_finish, is_awaited = [], saver_module.save, Saver.finish, threading.Event()

    def slow(*args, **settings):
        if not has_room:
            assert is_awaited.wait(120)
            is_awaited.clear()
            raise OSError(28, "No space left on device")
        return real_save(*args, **settings)

    def finish(self):
        if self._running is not None:
            is_awaited.set()
        real_finish(self)

    monkeypatch.setattr(saver_module, "save", slow)
    monkeypatch.setattr(Saver, "finish", finish)
    return has_room


@pytest.mark.usefixtures("slow_full_disk")
def test_a_failed_save_stops_the_run_even_if_the_next_one_had_to_wait_for_it(tmp_path, folder, shards):
    recipe = write_recipe(tmp_path / "recipe.toml", run=tmp_path / "run", checkpoint=folder, shards=shards)
    settings = ["checkpoint.every=2", "checkpoint.on_failure=stop", "stages.0.steps=8"]
    with pytest.raises(CheckpointError, match=r"step-0000000[24]: the state was not saved: No space left"):
        train(read_recipe(recipe, *settings), device="cpu")
    assert len(losses(tmp_path / "run")) == 5, (
        "the save of step 2 failed while that of step 4 waited; step 5 heard of it"
    )


@pytest.mark.parametrize("on_failure", ["continue", "stop"])
def test_a_save_that_failed_does_not_end_a_run_whose_last_save_worked(
    tmp_path, folder, shards, slow_full_disk, on_failure
):
    def validate(model, step):
        if step == 4:  # the stage is over, the save of step 2 still running
            slow_full_disk.append(True)
        return {}

    recipe = write_recipe(tmp_path / "recipe.toml", run=tmp_path / "run", checkpoint=folder, shards=shards)
    settings = ["checkpoint.every=2", f"checkpoint.on_failure={on_failure}", "stages.0.steps=4", "validation.every=100"]
    assert train(read_recipe(recipe, *settings), device="cpu", validate=validate) is Ending.FINISHED
    assert [state.step for state in states(tmp_path / "run/state")] == [4]


def test_a_state_larger_than_the_free_space_is_refused_before_writing(tmp_path, world, monkeypatch):
    with Saver(tmp_path / "state", CheckpointConfig(), world) as saver:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 90, 10))
        saver.save(1, tensors(1.0), {})
    assert "GiB, the disk has 0.00 GiB free" in saver.failure
    assert states(tmp_path / "state") == []


def test_a_missing_tensor_is_named(tmp_path, world):
    with Saver(tmp_path / "state", CheckpointConfig(), world) as saver:
        saver.save(1, tensors(1.0), {})
    state = newest_state(tmp_path / "state", world)
    with pytest.raises(CheckpointError, match="1 tensors are not in it, among them c"):
        load_tensors(state, {"c": torch.zeros(2)}, world)


def test_a_tensor_of_another_shape_is_named_with_both_shapes(tmp_path, world):
    with Saver(tmp_path / "state", CheckpointConfig(), world) as saver:
        saver.save(1, tensors(1.0), {})
    state = newest_state(tmp_path / "state", world)
    with pytest.raises(CheckpointError, match=r"a is 3 x 4 in it and 5 x 5 in this run \(1 tensors differ\)"):
        load_tensors(state, {"a": torch.zeros(5, 5), "b": torch.zeros(2)}, world)
    with pytest.raises(CheckpointError, match="b is 2 in it and a scalar in this run"):
        load_tensors(state, {"b": torch.zeros(())}, world)


def test_an_unreadable_state_says_how_to_resume(tmp_path, world):
    with Saver(tmp_path / "state", CheckpointConfig(), world) as saver:
        saver.save(1, tensors(1.0), {})
    state = newest_state(tmp_path / "state", world)
    for file in state.path.glob("*.distcp"):
        file.unlink()
    with pytest.raises(
        CheckpointError, match=r"cannot be read: .* Delete this folder to resume from the state before it"
    ):
        load_tensors(state, tensors(0.0), world)


def test_a_lora_run_with_another_rank_is_refused_in_one_line(tmp_path, folder, shards):
    recipe = write_recipe(tmp_path / "recipe.toml", run=tmp_path / "run", checkpoint=folder, shards=shards)
    train(read_recipe(recipe, "stages.0.steps=3", "stages.0.lora={rank=4}"), device="cpu")
    with pytest.raises(CheckpointError) as refused:
        train(read_recipe(recipe, "stages.0.steps=4", "stages.0.lora={rank=8}"), device="cpu")
    assert "steps = 3" in (tmp_path / "run/config.toml").read_text(), "settings that are refused do not replace the old"
    message = str(refused.value)
    assert re.search(r"lora_A is 4 x \d+ in it and 8 x \d+ in this run", message)
    assert "lora.rank was changed since it was saved. Restore it to resume, or use another run folder" in message
    assert len(message.splitlines()) == 1


def test_random_generators_are_restored(tmp_path, world):
    import random

    import numpy as np

    def draw():
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    with Saver(tmp_path / "state", CheckpointConfig(), world) as saver:
        saver.save(1, tensors(1.0), {})
    expected = draw()
    state = newest_state(tmp_path / "state", world)
    restore_random_state(state, world, seed=0)
    assert draw() == expected
    new_rank = type(world)(5, 8, 5, world.device)
    restore_random_state(SavedState(state.path, {}), new_rank, seed=0)
    fresh = draw()
    seed_everything(5)
    assert draw() == fresh
