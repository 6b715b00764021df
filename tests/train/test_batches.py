"""The batch iterator: batches prepared in a thread are those that are read, errors come where they belong, and no thread is left."""

import os
import threading
import time

import pytest
import torch
from train.running import make_checkpoint, read_recipe, write_recipe, write_shards

from saccade.errors import DataError
from saccade.model.families import load_model_config
from saccade.train.batches import BatchIterator, open_stage_stream
from saccade.train.objectives.cross_entropy import CrossEntropy
from saccade.train.stages import train

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model") / "checkpoint")


@pytest.fixture
def recipe(tmp_path, checkpoint):
    shards = write_shards(tmp_path / "shards", 24)
    return write_recipe(tmp_path / "recipe.toml", run=tmp_path / "run", checkpoint=checkpoint, shards=shards)


def open_batches(config, device=CPU, **state):
    stage = config.stages[0]
    stream = open_stage_stream(config, stage, **state)
    return BatchIterator(stream, load_model_config(config.model.folder), (), device, CrossEntropy())


def read(batches, count, *, prefetch):
    """The next batches, as plain values; with `prefetch` each is prepared while the one before it is used."""
    found = []
    for number in range(count):
        batch = batches.next(with_sources=number % 2 == 0)
        micro_batches = []
        for one in batch.on_device:
            if prefetch and len(micro_batches) + 1 == batch.num_micro_batches:
                batches.prefetch(with_sources=number % 2 == 1)
            micro_batches.append((one.labels.tolist(), one.inputs.patches.sum().item(), [n for _, n in one.by_source]))
        found.append((micro_batches, batch.work, batch.num_units, batch.sample_ids, batch.state))
    return found


@pytest.fixture
def no_thread_is_left():
    """A function that waits until all of our threads that were started in the test have ended."""

    def ours():
        return {thread for thread in threading.enumerate() if thread.name.startswith("saccade")}

    before = ours()
    return lambda: wait_until(lambda: ours() <= before)


def wait_until(condition):
    deadline = time.monotonic() + 60.0
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    assert condition()


def test_prefetched_batches_are_those_read_one_by_one_and_have_the_state_after_them(recipe, no_thread_is_left):
    config = read_recipe(recipe, "stages.0.data.global_batch_size=3")
    with open_batches(config) as batches:
        expected = read(batches, 4, prefetch=False)
    with open_batches(config) as batches:
        assert read(batches, 4, prefetch=True) == expected
    resumed_after = expected[1][-1]
    with open_batches(config, state=resumed_after) as batches:
        assert read(batches, 2, prefetch=True) == expected[2:]
    no_thread_is_left()


@pytest.mark.gpu
@pytest.mark.parametrize("prefetch", [False, True])
def test_batches_on_the_gpu_are_those_of_the_cpu_with_any_number_of_micro_batches(recipe, prefetch, no_thread_is_left):
    config = read_recipe(recipe, "stages.0.data.global_batch_size=3")
    with open_batches(config) as batches:
        expected = read(batches, 4, prefetch=False)
    with open_batches(config, torch.device("cuda")) as batches:
        assert read(batches, 4, prefetch=prefetch) == expected
    no_thread_is_left()


def test_a_batch_is_prepared_before_it_is_asked_for(recipe):
    config = read_recipe(recipe)
    stream = open_stage_stream(config, config.stages[0])
    with BatchIterator(stream, load_model_config(config.model.folder), (), CPU, CrossEntropy()) as batches:
        batches.prefetch(with_sources=False)
        wait_until(lambda: stream.stats().batches == 1)
        assert batches.next(with_sources=False) is not None


def test_an_error_of_the_data_is_raised_by_next_and_closes_the_stream(recipe, tmp_path, no_thread_is_left):
    with open_batches(read_recipe(recipe, "stages.0.data.global_batch_size=8")) as batches:
        for shard in (tmp_path / "shards").glob("*.tar"):
            os.truncate(shard, 1000)
        batches.prefetch(with_sources=False)
        with pytest.raises(DataError, match=r"samples are bad, over max_bad_share"):
            batches.next(with_sources=False)
        assert batches.next(with_sources=False) is None
    no_thread_is_left()


def test_closing_does_not_wait_for_storage_that_is_away(recipe, tmp_path, no_thread_is_left):
    config = read_recipe(recipe, "stages.0.data.storage.max_wait_s=3600", "stages.0.data.num_workers=1")
    stream = open_stage_stream(config, config.stages[0])
    batches = BatchIterator(stream, load_model_config(config.model.folder), (), CPU, CrossEntropy())
    for shard in (tmp_path / "shards").glob("*.tar"):
        shard.rename(shard.with_suffix(".away"))
    batches.prefetch(with_sources=False)
    wait_until(lambda: stream.worker_pids)
    closing = threading.Thread(target=batches.close, daemon=True)
    closing.start()
    closing.join(timeout=60.0)
    assert not closing.is_alive()
    no_thread_is_left()


def test_no_thread_outlives_a_run_that_ends_or_fails_in_a_step(recipe, no_thread_is_left):
    train(read_recipe(recipe, "stages.0.steps=4"), device="cpu")
    no_thread_is_left()

    def fail(model, step):
        if step == 6:
            model.register_forward_pre_hook(lambda *_: 1 / 0)
        return {}

    with pytest.raises(ZeroDivisionError):
        train(read_recipe(recipe, "stages.0.steps=9", "validation.every=1"), device="cpu", validate=fail)
    no_thread_is_left()
