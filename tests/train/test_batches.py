"""The batch iterator: micro-batches on the device, and the state of the stream after each step."""

import pytest
import torch
from train.running import make_checkpoint, read_recipe, write_recipe, write_shards

from saccade.model.families import load_model_config
from saccade.train.batches import BatchIterator, open_stage_stream
from saccade.train.objectives.cross_entropy import CrossEntropy


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("batches")
    checkpoint, shards = make_checkpoint(folder / "checkpoint"), write_shards(folder / "shards", 24)
    recipe = write_recipe(folder / "recipe.toml", run=folder / "run", checkpoint=checkpoint, shards=shards)
    return read_recipe(recipe, "stages.0.data.global_batch_size=3")


def read(config, count, device="cpu", first=0, **state):
    """Batches as plain values; losses by source are needed in every other."""
    found = []
    with open_stage_stream(config, config.stages[0], **state) as stream:
        model = load_model_config(config.model.folder)
        batches = BatchIterator(stream, model, (), torch.device(device), CrossEntropy())
        for number in range(first, first + count):
            batch = batches.next(with_sources=number % 2 == 0)
            micro_batches = [
                (one.labels.tolist(), one.inputs.patches.sum().item(), [n for _, n in one.by_source])
                for one in batch.on_device
            ]
            found.append((micro_batches, batch.work, batch.num_units, batch.sample_ids, batch.state))
    return found


def test_batches_continue_from_the_state_after_a_step(config):
    expected = read(config, 4)
    assert read(config, 2, first=2, state=expected[1][-1]) == expected[2:]


@pytest.mark.gpu
def test_batches_on_the_gpu_are_those_of_the_cpu_with_several_micro_batches(config):
    assert read(config, 4, "cuda") == read(config, 4)
