"""The layout of a run: sizes and strategies of a recipe, groups of ranks, and what is impossible."""

import itertools

import pytest

from saccade.errors import ConfigError
from saccade.parallel_dims import AXES, DATA, LOSS, ParallelDims, resolve_dims
from saccade.train.parallel_config import ParallelConfig
from saccade.world import World


@pytest.mark.parametrize(
    ("settings", "num_ranks", "layout", "strategy"),
    [
        ({}, 1, "1 rank", "none"),
        ({}, 8, "shard 8", "fsdp"),
        ({"offload": True}, 8, "shard 8", "fsdp"),
        ({"strategy": "fsdp"}, 1, "1 rank", "fsdp"),
        ({"strategy": "fsdp"}, 8, "shard 8", "fsdp"),
        ({"strategy": "ddp"}, 8, "replicate 8", "ddp"),
        ({"replicate": "rest"}, 8, "replicate 8", "ddp"),
        ({"replicate": 8, "shard": 1}, 8, "replicate 8", "ddp"),
        ({"strategy": "hsdp", "shard": 4}, 16, "replicate 4 x shard 4", "hsdp"),
        ({"shard": 4}, 16, "replicate 4 x shard 4", "hsdp"),
        ({"replicate": 2}, 16, "replicate 2 x shard 8", "hsdp"),
    ],
)
def test_the_layout_follows_from_the_recipe_and_the_ranks(settings, num_ranks, layout, strategy):
    config = ParallelConfig(**settings)
    dims = config.dims(num_ranks)
    assert (str(dims), dims.size, config.strategy_of(dims)) == (layout, num_ranks, strategy)


@pytest.mark.parametrize(
    ("settings", "num_ranks", "words"),
    [
        ({"strategy": "none"}, 8, "each would train a separate model"),
        ({"strategy": "hsdp", "shard": 3}, 8, "takes a multiple of 3 ranks, and there are 8.*possible: .*shard = 4"),
        ({"replicate": 2, "shard": 2}, 6, "replicate 2 x shard 2 takes 4 ranks, and there are 6"),
        ({"shard": 16, "replicate": 1}, 8, "takes 16 ranks, and there are 8.*parallel.shard = 8$"),
        ({"replicate": "rest", "shard": "rest"}, 8, "are both 'rest'"),
        ({"shard": 0}, 8, "parallel.shard is 0"),
        ({"strategy": "ddp", "shard": 2}, 8, "strategy = 'ddp' sets shard itself"),
        ({"pipeline": 3}, 8, "takes a multiple of 3 ranks, and there are 8.*parallel.pipeline = 4"),
    ],
)
def test_an_impossible_layout_is_one_line_with_what_is_possible(settings, num_ranks, words):
    with pytest.raises(ConfigError, match=words) as failure:
        ParallelConfig(**settings).dims(num_ranks)
    assert "\n" not in str(failure.value)


def test_offload_needs_shards():
    config = ParallelConfig(offload=True)
    with pytest.raises(
        ConfigError, match=r"offload requires fsdp, and auto means no sharding on one rank\. Set parallel"
    ):
        config.strategy_of(config.dims(1))


def test_the_suggested_layout_is_possible_and_the_nearest():
    for num_ranks, tensor, shard in itertools.product(range(1, 33), range(1, 9), ("rest", 2, 5)):
        sizes = {"tensor": tensor, "shard": shard}
        try:
            assert resolve_dims(sizes, num_ranks).size == num_ranks
        except ConfigError as error:
            named = {
                part.partition(" = ")[0].removeprefix("parallel."): int(part.partition(" = ")[2])
                for part in str(error).partition("possible: ")[2].split(", ")
            }
            assert resolve_dims(named, num_ranks).size == num_ranks


DIMS = ParallelDims(pipeline=2, replicate=2, shard=3, context=2, tensor=2)


@pytest.mark.parametrize("num_axes", range(1, 6))
def test_groups_partition_the_ranks(num_axes):
    for axes in itertools.combinations(AXES, num_axes):
        groups = DIMS.groups(*axes)
        assert sorted(itertools.chain(*groups)) == list(range(48))
        for ranks in groups:
            assert [DIMS.index(rank, *axes) for rank in ranks] == list(range(DIMS.count(*axes)))


def test_tensor_ranks_are_neighbours_and_read_the_same_data():
    worlds = [World(rank, DIMS.size, 0, None, dims=DIMS) for rank in range(DIMS.size)]
    assert DIMS.groups("tensor")[0] == [0, 1]
    assert {world.num_data_ranks for world in worlds} == {DIMS.count(*DATA)} == {6}
    assert [world.data_rank for world in worlds[:6]] == [0, 0, 0, 0, 1, 1]
    counted = [world.data_rank for world in worlds if world.counts_data]
    assert counted == list(range(6)), "every part of the data is counted once"
    assert sum(world.counts_loss for world in worlds) == DIMS.count(*LOSS) == worlds[0].num_loss_ranks
